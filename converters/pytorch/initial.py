"""Parameters, buffers and optimizer state as the first step's inputs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import torch

from .. import names
from . import optim, updates
from .arrays import array


def initial_feeds(
    step: onnx.ModelProto, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, np.ndarray]:
    """What an exported step reads besides the batch: parameters, buffers, optimizer state and rates as they are now.

    Parameters
    ----------
    step : onnx.ModelProto
        Made by `export_training_step` of this model and optimizer.
    model, optimizer
        Before its first step, the optimizer's state is what that step would start from.

    Returns
    -------
    dict of str to array
        By input name. After a step, feed each output ``new.<name>`` as ``<name>``.
    """
    tensors = dict(model.named_buffers()) | dict(model.named_parameters())
    rates = optim.rates(optimizer) if optimizer else {}
    traced = optimizer is not None and type(optimizer) not in optim.WRITTEN_OUT
    state = updates.initial_state(optimizer, dict(model.named_parameters())) if traced and optimizer else {}
    pieces = {names.state(name, slot): value for name, slots in state.items() for slot, value in slots.items()}
    feeds = {}
    for value in step.graph.input:
        if value.name in tensors:
            feeds[value.name] = array(tensors[value.name])
        elif value.name in pieces:
            feeds[value.name] = array(pieces[value.name])
        elif value.name.startswith("state."):
            feeds[value.name] = _state(value, tensors, optimizer)
        elif value.name in rates:
            feeds[value.name] = np.array(rates[value.name].item(), np.float32)
    return feeds


def _state(
    value: onnx.ValueInfoProto, tensors: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer | None
) -> np.ndarray:
    name, _, slot = value.name.removeprefix("state.").rpartition(".")
    current = optimizer.state.get(tensors[name], {}).get(slot) if optimizer else None
    if current is not None:
        return array(torch.as_tensor(current))
    kind = value.type.tensor_type
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
    return np.zeros([d.dim_value for d in kind.shape.dim], dtype)
