"""PyTorch: a module, its loss and its optimizer as one training step in standard ONNX operators."""

from __future__ import annotations

from ..extras import missing

try:
    import onnx_ir as ir
    import onnxscript  # noqa: F401 - what the modules below simplify with
    import torch
except ModuleNotFoundError as error:
    raise missing(error, "torch") from None

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import onnx

from onnx_remat.errors import ConversionError

from .. import check as checking
from .. import names, optimizers
from . import optim, updates, verify
from .initial import initial_feeds
from .lower import finish, lower
from .trace import Batch, Loss, Step, trace

__all__ = ["export_training_step", "initial_feeds"]


def export_training_step(
    model: torch.nn.Module,
    example_inputs: Any,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    clip_norm: float | None = None,
    opset: int = 20,
    dynamic_dims: Mapping[str, Mapping[int, str]] | None = None,
    check: bool = True,
) -> onnx.ModelProto:
    """Forward, loss, backward and update of a module as one ONNX graph, checked against torch.

    Parameters
    ----------
    model : torch.nn.Module
        In the mode (train or eval) it is to be exported in.
    example_inputs : tensor, sequence or mapping
        One batch: positional or keyword arguments of the model, and last, if `loss` is given, the loss's target.
        Values that are no tensors are fixed.
    loss : callable, optional
        ``loss(output, target)`` gives the scalar loss. Without it the model returns the loss, or an object with the
        loss as attribute ``loss``.
    optimizer : torch.optim.Optimizer, optional
        Over the model's parameters; those it does not hold are not trained. SGD, Adam and AdamW are written out, of
        any other its own step is traced, which must not read values. Its settings become constants, but for a
        learning rate that is a tensor: that is the input ``learning_rate``, or ``learning_rate.<i>`` where groups
        have several. Without an optimizer the gradients are put out.
    clip_norm : float, optional
        Scale all gradients together to this norm at most before the update, as `torch.nn.utils.clip_grad_norm_`.
    opset : int
        Version of ONNX's operator set.
    dynamic_dims : mapping of str to mapping of int to str, optional
        Names of dimensions that may vary, by input name and axis: ``{"input.0": {0: "batch"}}``.
    check : bool
        Run the step on ONNX Runtime and compare loss, gradients, buffers and update with torch's.

    Returns
    -------
    onnx.ModelProto
        Inputs: parameters and buffers under their names, ``state.<name>.<slot>``, the batch as ``input.<i>`` or under
        its keyword. Outputs: ``loss``, ``grad.<name>`` or ``new.<name>`` and ``new.state.<name>.<slot>``,
        ``new.<buffer>``. Nodes are labelled forward, backward or optimizer in their metadata (``phase``).

    Raises
    ------
    ConversionError
        The step cannot be traced or written, or does not compute what torch computes.
    """
    step, written_out = _step(model, example_inputs, loss, optimizer)
    step = replace(step, clip_norm=clip_norm)
    dynamic = dynamic_dims or {}
    step.batch.check_dimensions(dynamic)
    traced = trace(step, dynamic, opset)
    made = lower(traced, step.inputs, opset, dynamic)
    gradients = {str(value.name): value for value in made.graph.outputs}
    written_out = {name: update for name, update in written_out.items() if names.gradient(name) in gradients}
    if written_out:
        optimizers.append(made.graph, written_out, len(step.batch.names))
    if check:
        hidden = {names.gradient(name): str(gradients[names.gradient(name)].name) for name in written_out}
        found = verify.step(made, step, model, optimizer, hidden)
        if dynamic:
            verify.step(made, replace(step, batch=step.batch.larger(dynamic)), model, optimizer, hidden)
    finish(made, len(step.batch.names), gradients=step.optimizer is None)
    proto = ir.to_proto(made)
    if check:
        checking.record(proto, found)
    return proto


def _step(
    model: torch.nn.Module, example_inputs: Any, loss: Loss | None, optimizer: torch.optim.Optimizer | None
) -> tuple[Step, dict[str, optimizers.Optimizer]]:
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            raise ConversionError(f"parameter {name} is of {parameter.dtype}: parameters must be real floating point")
    written_out = optimizer is not None and type(optimizer) in optim.WRITTEN_OUT
    made = optim.by_parameter(optimizer, parameters) if optimizer is not None and written_out else {}
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    if optimizer is not None:
        optim.check_parameters(optimizer, parameters)
        inside = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        trained = {name for name in trained if id(parameters[name]) in inside}
    step = Step(
        model, Batch.of(example_inputs), loss,
        trainable={name: p for name, p in parameters.items() if name in trained},
        frozen={name: p for name, p in parameters.items() if name not in trained},
        buffers=dict(model.named_buffers()),
    )  # fmt: skip
    if optimizer is None or written_out:
        return step, made
    state = updates.initial_state(optimizer, {name: parameters[name] for name in parameters if name in trained})
    return replace(step, optimizer=optimizer, state=state, rates=optim.rates(optimizer)), {}
