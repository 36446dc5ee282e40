"""Export of a module's step: trace it, translate it to ONNX, compare it with torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import onnx
import onnx_ir as ir
import torch

from onnx_remat.errors import ConversionError
from onnx_remat.ir.shapes import INITIAL_KEY

from ..checks import agreement as checking
from . import optim, updates, verify
from .batch import Batch
from .lower import finish, lower
from .outside import Outside
from .recipe import Recipe
from .refusals import check_modules
from .trace import Loss, StepParts, trace


def step_of(
    model: torch.nn.Module,
    example_inputs: Any,
    loss: Loss | None,
    optimizers: tuple[torch.optim.Optimizer, ...],
    recipe: Recipe,
) -> StepParts:
    """Return the parts of the step to trace.

    Raises
    ------
    ConversionError
        The model, an optimizer or a setting cannot be part of a step.
    """
    check_modules(model)
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            raise ConversionError(f"parameter {name} is {parameter.dtype}: use real floating point for parameters")
    recipe.check(bool(optimizers))
    inside = optim.parameters_of(optimizers, parameters) if optimizers else set(parameters)
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad and name in inside}
    trainable: dict[str, torch.Tensor] = {name: p for name, p in parameters.items() if name in trained}
    optim.check_hooks(optimizers, trainable)
    state: updates.State = {}
    for optimizer in optimizers:
        state |= updates.initial_state(optimizer, trainable)
    return StepParts(
        model, Batch.of(example_inputs), loss, trainable,
        frozen={name: p for name, p in parameters.items() if name not in trained},
        buffers=dict(model.named_buffers()), recipe=recipe, optimizers=optimizers, state=state,
        settings=optim.settings(optimizers),
    )  # fmt: skip


def export(
    step: StepParts,
    opset: int,
    dynamic: Mapping[str, Mapping[int, str]],
    check: bool,
    loss_parts: int | None = None,
    attention_parts: int | None = None,
    feed: bool = False,
) -> tuple[onnx.ModelProto, Mapping[str, Outside]]:
    """Return the step as a model, see `export_training_step`, and the tensors outside it by name (inputs with
    `feed`)."""
    step.batch.check_dimensions(dynamic)
    traced = trace(step, dynamic, opset, feed)
    if feed:
        step = replace(step, outside={name: one.alias for name, one in traced.outside.items()})
    made = lower(traced, step.inputs, opset, dynamic, loss_parts, attention_parts)
    if check:
        found = verify.step(made, step)
        if dynamic:
            verify.step(made, replace(step, batch=step.batch.larger(dynamic)))
    finish(made, len(step.batch.names), gradients=not step.optimizers)
    proto = ir.to_proto(made)
    if scalars := {name: value.item() for name, value in step.recipe.state({}).items()}:
        proto.metadata_props.add(key=INITIAL_KEY, value=json.dumps(scalars))
    if check:
        checking.record(proto, found)
    return proto, traced.outside
