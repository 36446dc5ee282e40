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

    Raises
    ------
    ConversionError
        The optimizer is none of SGD, Adam, AdamW, or holds a tensor that is no parameter of the model.
    """
    known = {id(parameter): name for name, parameter in parameters.items()}
    made = {}
    for group in optimizer.param_groups:
        update = _update(optimizer, group)
        for parameter in group["params"]:
            if id(parameter) not in known:
                shape = tuple(parameter.shape)
                raise ConversionError(f"the optimizer holds a tensor of shape {shape} that the model does not")
            made[known[id(parameter)]] = update
    return {name: made[name] for name in parameters if name in made}


def _update(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> optimizers.Optimizer:
    kind = type(optimizer)
    lr, maximize = float(group["lr"]), bool(group.get("maximize"))
    try:
        if kind is torch.optim.SGD:
            return optimizers.SGD(
                lr, group["momentum"], group["dampening"], group["weight_decay"], group["nesterov"], maximize
            )
        if kind in (torch.optim.Adam, torch.optim.AdamW):
            first, second = (float(beta) for beta in group["betas"])
            decoupled = kind is torch.optim.AdamW or bool(group.get("decoupled_weight_decay"))
            return optimizers.Adam(
                lr, (first, second), group["eps"], group["weight_decay"], group["amsgrad"], maximize, decoupled
            )
    except ValueError as error:
        raise ConversionError(str(error)) from error
    raise ConversionError(
        f"optimizer {kind.__module__}.{kind.__qualname__} is not supported (SGD, Adam and AdamW of torch.optim are): "
        "export without an optimizer and update the parameters from the gradients yourself"
    )
