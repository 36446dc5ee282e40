"""torch.optim's optimizers as those of `converters.optimizers`, parameter by parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from onnx_remat.errors import ConversionError

from .. import optimizers


def by_parameter(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]
) -> dict[str, optimizers.Optimizer]:
    """The update of each parameter that the optimizer holds, with its group's hyperparameters.

    A learning rate that is a tensor becomes an input, see `rates`.

    Raises
    ------
    ConversionError
        A setting is not supported, or the optimizer holds a tensor that is no parameter of the model.
    """
    check_parameters(optimizer, parameters)
    known = {id(parameter): name for name, parameter in parameters.items()}
    made = {}
    inputs = {id(rate): name for name, rate in rates(optimizer).items()}
    for group in optimizer.param_groups:
        lr = group["lr"]
        update = _update(optimizer, group, inputs[id(lr)] if isinstance(lr, torch.Tensor) else float(lr))
        for parameter in group["params"]:
            made[known[id(parameter)]] = update
    return {name: made[name] for name in parameters if name in made}


WRITTEN_OUT = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers that `converters.optimizers` writes; the steps of others are traced, see `updates`."""


def check_parameters(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise ConversionError where the optimizer holds a tensor that is no parameter of the model."""
    known = {id(parameter) for parameter in parameters.values()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in known:
                shape = tuple(parameter.shape)
                raise ConversionError(f"the optimizer holds a tensor of shape {shape} that the model does not")


def rates(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Learning rates that are tensors, by the name of the input that each becomes.

    ``learning_rate`` where the groups share one, else ``learning_rate.0`` and so on.
    """
    tensors = [group["lr"] for group in optimizer.param_groups if isinstance(group.get("lr"), torch.Tensor)]
    distinct = list({id(rate): rate for rate in tensors}.values())
    return {"learning_rate" if len(distinct) == 1 else f"learning_rate.{i}": rate for i, rate in enumerate(distinct)}


def _update(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], lr: optimizers.Rate) -> optimizers.Optimizer:
    kind, maximize = type(optimizer), bool(group.get("maximize"))
    try:
        if kind is torch.optim.SGD:
            return optimizers.SGD(
                lr, group["momentum"], group["dampening"], group["weight_decay"], group["nesterov"], maximize
            )
        first, second = (float(beta) for beta in group["betas"])
        decoupled = kind is torch.optim.AdamW or bool(group.get("decoupled_weight_decay"))
        return optimizers.Adam(
            lr, (first, second), group["eps"], group["weight_decay"], group["amsgrad"], maximize, decoupled
        )
    except ValueError as error:
        raise ConversionError(str(error)) from error
