"""What of the user's optimizers a step needs to know: which they are, what they hold, which settings are inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from onnx_remat.errors import ConversionError

from .private_torch import hooks_left_out

Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None

INPUTS = {"lr": "learning_rate", "weight_decay": "weight_decay"}
"""Settings of groups that are inputs where they are tensors, and what these are called."""


def each(optimizer: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    """One, several (Muon for matrices, AdamW for the rest), or none."""
    if optimizer is None:
        return ()
    return (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)


def held(optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, torch.Tensor]) -> set[str]:
    """Names of the parameters that the optimizers hold.

    Raises
    ------
    ConversionError
        One holds a tensor that is no parameter of the model, or two hold the same.
    """
    known = {id(parameter): name for name, parameter in parameters.items()}
    found: set[str] = set()
    for optimizer in optimizers:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if id(parameter) not in known:
                shape = tuple(parameter.shape)
                raise ConversionError(
                    f"the optimizer holds a tensor of shape {shape} that the model does not: make what it belongs to a "
                    "part of the model (a loss with parameters: model.loss = loss)"
                )
            if known[id(parameter)] in found:
                raise ConversionError(f"two optimizers hold parameter {known[id(parameter)]}")
            found.add(known[id(parameter)])
    return found


def check_hooks(optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, torch.Tensor]) -> None:
    """ConversionError where hooks change or see what a graph does by itself."""
    for name, parameter in parameters.items():
        if hooks_left_out(parameter):
            raise ConversionError(
                f"parameter {name} has a hook on its accumulated gradient, which a graph cannot call: remove it "
                "(register_hook is traced)"
            )
    for optimizer in optimizers:
        if hooks_left_out(optimizer):
            raise ConversionError(
                f"optimizer {type(optimizer).__qualname__} has hooks around its step, which a graph cannot call: "
                "remove them, and do before or after each step what they do"
            )


def settings(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Learning rates and weight decays that are tensors, by the name of the input that each becomes.

    ``learning_rate`` where the groups share one, else ``learning_rate.0`` and so on.
    """
    made: dict[str, torch.Tensor] = {}
    for key, name in INPUTS.items():
        values = [group.get(key) for optimizer in optimizers for group in optimizer.param_groups]
        distinct = list({id(value): value for value in values if isinstance(value, torch.Tensor)}.values())
        made |= {name if len(distinct) == 1 else f"{name}.{i}": value for i, value in enumerate(distinct)}
    return made


def settings_type(parameters: Mapping[str, torch.Tensor]) -> torch.dtype:
    """Of settings that are inputs: float32, but float64 where a parameter is, so that the update is as exact."""
    return torch.float64 if any(p.dtype == torch.float64 for p in parameters.values()) else torch.float32
