"""Export of a module's step: trace it, translate it to ONNX, compare it with torch."""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx
import onnx_ir as ir
import torch

from onnx_remat.errors import ConversionError, UsageError
from onnx_remat.ir.metadata import INITIAL_KEY, set_entry
from onnx_remat.messages import Setting

from ..checks import agreement as checking
from . import first_state, optimizer_facts, reference, updates, verify
from .batch import Batch
from .conditions import Condition, failed
from .lower import finish, lower
from .recipe import Recipe, Scaling
from .refusals import check_modules
from .step import Loss, StepParts
from .trace import Trace, trace

OPSETS = range(18, onnx.defs.onnx_opset_version() + 1)
"""Opsets in whose ops steps are written: torch's exporter has translations for 18 and above; up to the newest of the
installed onnx."""

_NAMED = 5
"""Sizes that a warning names."""

_TRIED = 1 << 14
"""Sizes of several dimensions that are all tried for a warning; of more, some are."""


def step_of(
    model: torch.nn.Module,
    example_inputs: Any,
    loss: Loss | None,
    optimizers: tuple[torch.optim.Optimizer, ...],
    recipe: Recipe,
    outputs: Sequence[str] = (),
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
    inside = optimizer_facts.parameters_of(optimizers, parameters) if optimizers else set(parameters)
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad and name in inside}
    trainable: dict[str, torch.Tensor] = {name: p for name, p in parameters.items() if name in trained}
    optimizer_facts.check_hooks(optimizers, trainable)
    optimizer_facts.check_sparse(optimizers, model)
    buffers, batch = dict(model.named_buffers()), Batch.of(example_inputs)
    state: updates.State = {}
    for optimizer in optimizers:
        state |= first_state.initial_state(optimizer, trainable)
    step = StepParts(
        model, batch, loss, trainable,
        frozen={name: p for name, p in parameters.items() if name not in trained},
        buffers=buffers, recipe=recipe, optimizers=optimizers, state=state,
        settings=optimizer_facts.settings(optimizers), wanted=tuple(outputs),
    )  # fmt: skip
    step.check_names()
    return step


def checked_parts(loss_parts: int | None, attention_parts: int | None) -> tuple[int | None, int | None]:
    """Return the arguments; raise UsageError unless each is a number of parts or None."""
    for name, given in {"loss_parts": loss_parts, "attention_parts": attention_parts}.items():
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
            raise UsageError("{} is not a number of parts: use an integer of 1 or more", Setting(name, given))
    return loss_parts, attention_parts


def traced(
    step: StepParts, opset: int, dynamic: Mapping[str, Mapping[int, str]], feed: bool
) -> tuple[Trace, StepParts]:
    """Trace the step; with `feed`, tensors outside it are inputs, and the returned parts have them."""
    step.batch.check_dimensions(dynamic)
    made = trace(step, dynamic, opset, feed)
    if feed:
        step = replace(step, outside={name: one.alias for name, one in made.outside.items()})
        step.check_names()
    return made, step


def compare(
    made: ir.Model, step: StepParts, graph: Trace, dynamic: Mapping[str, Mapping[int, str]], distances: bool
) -> checking.Check:
    """Compare a translated step with torch's, see `verify.step`, and at a second size where dimensions are open.

    The second size is a smaller one, or a larger one where torch cannot run the smaller: indices of the example may
    point outside of it.
    """
    found = verify.step(made, step, distances)
    if dynamic and not any(_fits(made, step, other) for other in step.batch.resized(dynamic, graph.conditions)):
        warnings.warn(
            "dynamic_dims: the step is compared with torch at the example's sizes alone, since with one entry more or "
            "less its code makes another step, or fails, as indices of the example may point outside",
            stacklevel=2,
        )
    return found


def _fits(made: ir.Model, step: StepParts, batch: Batch) -> bool:
    """Compare the step with torch's on another batch; return whether torch can run that."""
    step = replace(step, batch=batch)
    try:
        verify.step(made, step, distances=False)
    except ConversionError:  # the results differ
        raise
    except Exception:
        if reference.runs(step):
            raise
        return False
    return True


def finished(made: ir.Model, step: StepParts) -> onnx.ModelProto:
    """Return a translated step without what only its comparison needs; `made` changes."""
    finish(made, len(step.batch.names), gradients=not step.optimizers)
    proto = ir.to_proto(made)
    if scalars := {name: value.item() for name, value in step.recipe.state({}).items()}:
        set_entry(proto, INITIAL_KEY, json.dumps(scalars))
    return proto


def export_training_step(
    model: torch.nn.Module,
    example_inputs: Any,
    loss: Loss | None = None,
    optimizer: optimizer_facts.Optimizers = None,
    *,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    accumulate: int = 1,
    average: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    opset: int = 20,
    dynamic_dims: Mapping[str, Mapping[int, str]] | None = None,
    loss_parts: int | None = None,
    attention_parts: int | None = None,
    outputs: Sequence[str] = (),
    check: bool = True,
) -> onnx.ModelProto:
    """Export a module's training step (forward, loss, backward and update) as one ONNX graph.

    By default the step computes the loss and the gradient of every parameter, and is compared with torch before it is
    returned. With `optimizer` the update is part of the graph: the step returns new parameters and new optimizer state,
    which the training loop feeds back in the next step. For example, ``export_training_step(model, (x, target),
    loss=F.cross_entropy, optimizer=AdamW(model.parameters()))`` returns a step that trains the model on batches of the
    size of `x`. An alternative is `budgeted`, which also runs the step and trains the module in place.

    Parameters
    ----------
    model : torch.nn.Module
        The module, in the mode (train or eval) of the step.
    example_inputs : tensor, sequence or mapping
        One batch: positional or keyword arguments of the model, and last, if `loss` is given, the target. Values other
        than tensors become constants; arrays of numpy are refused.
    loss : callable, optional
        ``loss(output, target)`` returns the scalar loss. By default the model itself returns the loss, or an object
        with the loss as attribute ``loss`` or under the key ``"loss"``.
    optimizer : torch.optim.Optimizer or sequence of them, optional
        An optimizer over the model's parameters; a parameter that is in no optimizer is not trained. Its own ``step``
        is traced, and must not branch on the values of tensors. Its settings become constants, except learning rates
        and weight decays that are tensors. Those become the inputs ``learning_rate`` (or ``learning_rate.<i>`` if
        groups have several) and ``weight_decay``. By default the step outputs gradients.
    clip_norm, clip_value : float, optional
        Clip gradients before the update, as `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_`.
    accumulate : int
        Number of micro-batches in an update: gradients are averaged over this many steps, and the last one updates.
    average : float, optional
        Decay of a moving average of the weights, which is state with the inputs ``state.<name>.average``.
    scaler : torch.amp.GradScaler, optional
        Scale the loss with the settings of this scaler, and skip updates in which gradients overflow.
    opset : int
        Version of ONNX's operator set, one of `OPSETS`.
    dynamic_dims : mapping of str to mapping of int to str, optional
        Names of dimensions that may vary, by input name and axis, for example ``{"input.0": {0: "batch"}}``. By default
        all dimensions are those of the example.
    loss_parts : int, optional
        Number of parts of a loss over many classes. The step processes the rows part by part, so that the logits never
        all exist at once; 1 keeps the loss whole. By default the converter chooses it for logits of 64 MiB or more of
        fixed size.
    attention_parts : int, optional
        Number of parts of each attention. The step processes texts and heads part by part, or queries where a mask
        hides keys from them. The backward pass recomputes the scores of a part from queries and keys, so that they
        never all exist at once; 1 keeps attentions whole. By default the converter chooses it for scores of 16 MiB or
        more of fixed size.
    outputs : sequence of str
        Tensors of the model's output that the step also outputs, for metrics: ``["logits"]`` of a model that returns an
        object or a dict with them, ``["0"]`` for the first of a tuple, ``["output"]`` of a model that returns a tensor.
        They are named ``output.<name>``, or ``output``.
    check : bool
        Run the step on ONNX Runtime, and compare loss, gradients, buffers and update with torch's.

    Returns
    -------
    onnx.ModelProto
        Inputs: parameters and buffers under their names, ``state.<name>.<slot>``, the batch as ``input.<i>`` or under
        its keyword. Outputs: ``loss``, ``grad.<name>`` or ``new.<name>`` and ``new.state.<name>.<slot>``,
        ``new.<buffer>``. Nodes are labelled forward, backward or optimizer in their metadata (``phase``).

    Raises
    ------
    ConversionError
        The step cannot be traced or translated to ONNX, or its results differ from torch's.
    UsageError
        An argument is wrong.
    """
    if opset not in OPSETS:
        raise UsageError(f"opset {opset} is not supported: use {OPSETS[0]} to {OPSETS[-1]}")
    recipe = Recipe(clip_norm, clip_value, accumulate, average, None if scaler is None else Scaling.of(scaler))
    step = step_of(model, example_inputs, loss, optimizer_facts.each(optimizer), recipe, outputs)
    dynamic = dynamic_dims or {}
    parts = checked_parts(loss_parts, attention_parts)
    graph, step = traced(step, opset, dynamic, feed=False)
    made = lower(graph, step.inputs, opset, dynamic, *parts)
    found = compare(made, step, graph, dynamic, distances=True) if check else None
    proto = finished(made, step)
    if found is not None:
        checking.record(proto, found)
    for where, reason in _wrong(graph.conditions, step.batch.sizes(dynamic)):
        warnings.warn(f"the file is wrong where {where}: for these, {reason}", stacklevel=2)
    if outside := graph.outside:
        first = next(iter(outside.values())).label
        others = f", and {len(outside) - 1} more" if len(outside) > 1 else ""
        warnings.warn(
            f"{first}{others}: constants of the file, because the model does not hold them; if they change between "
            "steps, make them buffers of the model (register_buffer)",
            stacklevel=2,
        )
    return proto


def _wrong(conditions: Sequence[Condition], most: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield the sizes up to the example's for which a step is another, and why, in words."""
    for dim, largest in most.items():
        own = [condition for condition in conditions if {*condition.dims.values()} == {dim}]
        reasons = {size: one.reason for size in range(1, largest + 1) if (one := failed(own, {dim: size}))}
        for reason in dict.fromkeys(reasons.values()):
            which = [str(size) for size, given in reasons.items() if given == reason]
            yield f"{dim} is {', '.join(which[:_NAMED])}{', ...' if len(which) > _NAMED else ''}", reason
    for condition in conditions:
        if len(condition.dims) > 1 and _may_fail(condition, most):
            yield f"{condition.text} is false", condition.reason


def _may_fail(condition: Condition, most: Mapping[str, int]) -> bool:
    """Return whether sizes up to the example's make a condition false; of many sizes, some tell."""
    dims = list(condition.dims.values())
    few = math.prod(most[dim] for dim in dims) <= _TRIED
    tried = [range(1, most[dim] + 1) if few else _some(most[dim]) for dim in dims]
    return not all(condition.holds(dict(zip(dims, sizes, strict=True))) for sizes in itertools.product(*tried))


def _some(most: int) -> list[int]:
    """Return sizes up to the largest: small ones, powers of two, and the two largest."""
    powers = (1 << power for power in range(most.bit_length()))
    return sorted({*range(1, min(most, 16) + 1), *powers, max(most - 1, 1), most})
