"""PyTorch: export a module, its loss and its optimizer as one training step in standard ONNX operators."""

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
        than tensors become constants.
    loss : callable, optional
        ``loss(output, target)`` returns the scalar loss. By default the model itself returns the loss, or an object
        with the loss as attribute ``loss``.
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
        Version of ONNX's operator set.
    dynamic_dims : mapping of str to mapping of int to str, optional
        Names of dimensions that may vary, by input name and axis, for example ``{"input.0": {0: "batch"}}``. By default
        all dimensions are those of the example.
    loss_parts : int, optional
        Number of parts of a loss over many classes. The step processes the rows part by part, so that the logits never
        all exist at once; 1 keeps the loss whole. By default the converter chooses it for logits of 64 MiB or more of
        fixed size.
    attention_parts : int, optional
        Number of parts of each attention. The step processes texts and heads part by part, and the backward pass
        recomputes the scores of a part from queries and keys, so that the scores never all exist at once; 1 keeps
        attentions whole. By default the converter chooses it for scores of 16 MiB or more of fixed size.
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
    """
    recipe = Recipe(clip_norm, clip_value, accumulate, average, None if scaler is None else Scaling.of(scaler))
    step = step_of(model, example_inputs, loss, optim.each(optimizer), recipe)
    parts = loss_in_parts.checked(loss_parts), attention_in_parts.checked(attention_parts)
    made, outside = export(step, opset, dynamic_dims or {}, check, *parts)
    if outside:
        first = next(iter(outside.values())).label
        others = f", and {len(outside) - 1} more" if len(outside) > 1 else ""
        warnings.warn(
            f"{first}{others}: constants of the file, because the model does not hold them; if they change between "
            "steps, make them buffers of the model (register_buffer)",
            stacklevel=2,
        )
    return made
