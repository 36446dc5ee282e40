"""Parameters, buffers and optimizer state as inputs of the first step."""

from __future__ import annotations

import json

import numpy as np
import onnx
import torch

from onnx_remat.ir.metadata import INITIAL_KEY, entries

from .. import names
from . import first_state, optimizer_facts, recipe
from .arrays import array


def initial_feeds(
    step: onnx.ModelProto, model: torch.nn.Module, optimizer: optimizer_facts.Optimizers = None
) -> dict[str, np.ndarray]:
    """Return the inputs of an exported step except the batch: current parameters, buffers, optimizer state and rates.

    Parameters
    ----------
    step : onnx.ModelProto
        The result of `export_training_step` for this model and optimizer, or that step rewritten.
    model, optimizer
        An optimizer without state contributes the state from which its first step would start.

    Returns
    -------
    dict of str to array
        A value by input name. After a step, feed each output ``new.<name>`` as ``<name>``.
    """
    parameters = dict(model.named_parameters())
    tensors = dict(model.named_buffers()) | parameters
    for one in optimizer_facts.each(optimizer):
        for name, pieces in first_state.initial_state(one, parameters).items():
            tensors |= {names.state(name, slot): value for slot, value in pieces.items()}
    for name, parameter in parameters.items():
        tensors[names.state(name, recipe.SUM)] = torch.zeros_like(parameter)
        tensors[names.state(name, recipe.AVERAGE)] = parameter
    scalars = json.loads(entries(step).get(INITIAL_KEY, "{}")) | optimizer_facts.settings(
        optimizer_facts.each(optimizer)
    )
    feeds = {}
    for value in step.graph.input:
        if value.name in scalars:
            kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            feeds[value.name] = np.array(float(scalars[value.name]), kind)
        elif value.name in tensors:
            feeds[value.name] = np.array(array(tensors[value.name]))
    return feeds
