"""Facts about the user's optimizers that a step needs: their parameters, hooks, and settings that are inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch

from onnx_remat.errors import ConversionError

from .private_state import hooks_left_out

Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None

INPUTS = {"lr": "learning_rate", "weight_decay": "weight_decay"}
"""Settings of groups that are inputs if they are tensors, and the names of these inputs."""


def each(optimizer: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    """Return a tuple of optimizers, of one, several (such as Muon for matrices, AdamW for the rest), or none.

    Accelerate's and Lightning's wrappers count as the optimizers in them.
    """
    if optimizer is None:
        return ()
    return tuple(map(_unwrapped, (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else optimizer))


_WRAPPERS = {"AcceleratedOptimizer", "LightningOptimizer"}
"""Optimizers that add nothing to the update of the one in them, unless gradients are scaled or in several processes."""


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    while _WRAPPERS & {kind.__name__ for kind in type(optimizer).__mro__}:
        optimizer = cast(Any, optimizer).optimizer  # neither package has to be installed
    return optimizer


def parameters_of(optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names of the parameters in the optimizers.

    Raises
    ------
    ConversionError
        An optimizer has a tensor that is not a parameter of the model, or two have the same.
    """
    known = {id(parameter): name for name, parameter in parameters.items()}
    found: set[str] = set()
    for optimizer in optimizers:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if id(parameter) not in known:
                shape = tuple(parameter.shape)
                raise ConversionError(
                    f"the optimizer has a tensor of shape {shape} that is not in the model: make its module a part of "
                    "the model (for a loss with parameters: model.loss = loss)"
                )
            if known[id(parameter)] in found:
                raise ConversionError(f"two optimizers have parameter {known[id(parameter)]}: leave it out of one")
            found.add(known[id(parameter)])
    return found


_SAME_OF_DENSE = (torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers for which a row without a gradient and one with a gradient of zeros are the same."""


def check_sparse(optimizers: Sequence[torch.optim.Optimizer], model: torch.nn.Module) -> None:
    """Raise ConversionError if an optimizer has sparse gradients, and may give other results for dense ones."""
    for optimizer in optimizers:
        inside = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for path, module in model.named_modules():
            is_sparse = isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
            trained = is_sparse and module.weight.requires_grad and id(module.weight) in inside
            if trained and type(optimizer) not in _SAME_OF_DENSE:
                raise ConversionError(
                    f"module {path!r} has sparse gradients, and a step has dense ones, by which optimizer "
                    f"{type(optimizer).__qualname__} may change other rows: make it with sparse=False, or take "
                    "torch.optim.SGD or Adagrad"
                )


def check_hooks(optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise ConversionError if there are hooks that a graph cannot call."""
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
                "remove them, and do their work before or after each step"
            )


def settings(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Return learning rates and weight decays that are tensors, by the names of their inputs.

    The name is ``learning_rate`` if all groups share one, else ``learning_rate.0`` and so on.
    """
    made: dict[str, torch.Tensor] = {}
    for key, name in INPUTS.items():
        values = [group.get(key) for optimizer in optimizers for group in optimizer.param_groups]
        distinct = list({id(value): value for value in values if isinstance(value, torch.Tensor)}.values())
        made |= {name if len(distinct) == 1 else f"{name}.{i}": value for i, value in enumerate(distinct)}
    return made


def settings_type(parameters: Mapping[str, torch.Tensor]) -> torch.dtype:
    """Return the dtype of settings that are inputs: float64 if a parameter is float64, for an exact update, else
    float32."""
    return torch.float64 if any(p.dtype == torch.float64 for p in parameters.values()) else torch.float32
