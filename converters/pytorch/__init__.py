"""PyTorch: a module, its loss and its optimizer as one training step in standard ONNX operators."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from ..extras import require

require("torch", "onnx_ir", "onnxruntime", "torch", "onnxscript")

import onnx
import torch

from ..passes import attention_in_parts, loss_in_parts
from . import optim
from .budgeted import Budgeted, budgeted
from .export import export, step_of
from .initial import initial_feeds
from .recipe import Recipe, Scaling
from .trace import Loss

__all__ = ["Budgeted", "budgeted", "export_training_step", "initial_feeds"]


def export_training_step(
    model: torch.nn.Module,
    example_inputs: Any,
    loss: Loss | None = None,
    optimizer: optim.Optimizers = None,
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
    optimizer : torch.optim.Optimizer or sequence of them, optional
        Over the model's parameters; those it does not hold are not trained. Its own step is traced, which must not
        decide by values. Its settings become constants, but for learning rates and weight decays that are tensors:
        those are the input ``learning_rate``, or ``learning_rate.<i>`` where groups have several, and
        ``weight_decay``. Without an optimizer the gradients are put out.
    clip_norm, clip_value : float, optional
        Clip gradients before the update, as `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_`.
    accumulate : int
        Micro-batches to an update: gradients are averaged over so many steps, the last of which updates.
    average : float, optional
        Keep a moving average of the weights with this decay, as inputs ``state.<name>.average``.
    scaler : torch.amp.GradScaler, optional
        Scale the loss with its settings, leave out updates where gradients overflow.
    opset : int
        Version of ONNX's operator set.
    dynamic_dims : mapping of str to mapping of int to str, optional
        Names of dimensions that may vary, by input name and axis: ``{"input.0": {0: "batch"}}``.
    loss_parts : int, optional
        Parts of the rows in which a loss over many classes is computed, one after the other, so that the logits never
        all exist at once; 1 for none. By default chosen for logits of 64 MiB or more of sizes that are fixed.
    attention_parts : int, optional
        Parts of texts and heads in which each attention is computed, one after the other, in the backward pass from its
        queries and keys again, so that its scores never all exist at once; 1 for none. By default chosen for scores of
        16 MiB or more of sizes that are fixed.
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
    recipe = Recipe(clip_norm, clip_value, accumulate, average, None if scaler is None else Scaling.of(scaler))
    step = step_of(model, example_inputs, loss, optim.each(optimizer), recipe)
    parts = loss_in_parts.checked(loss_parts), attention_in_parts.checked(attention_parts)
    made, outside = export(step, opset, dynamic_dims or {}, check, *parts)
    if outside:
        first = next(iter(outside.values())).told
        others = f", and {len(outside) - 1} more" if len(outside) > 1 else ""
        warnings.warn(
            f"{first}{others}: constants of the file, because the model does not hold them; if they change between "
            "steps, make them buffers of the model (register_buffer)",
            stacklevel=2,
        )
    return made
