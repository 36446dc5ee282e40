"""Torch beyond its documented interface, as far as a process that trains needs it; see `private_torch` for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils import _pytree as pytree  # structures of arguments, flat and back

__all__ = ["gradient_hooks", "hooks_left_out", "module_hooks", "pytree"]


def gradient_hooks(parameter: torch.Tensor) -> tuple[Callable[..., Any], ...]:
    """Return the hooks registered with ``parameter.register_hook``, in order."""
    return tuple((parameter._backward_hooks or {}).values())


def hooks_left_out(owner: torch.Tensor | torch.optim.Optimizer) -> bool:
    """Return whether there are hooks that a graph cannot call: on an accumulated gradient, or around an optimizer's
    step."""
    if isinstance(owner, torch.Tensor):
        return bool(getattr(owner, "_post_accumulate_grad_hooks", None))
    own = (getattr(owner, name, None) for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"))
    return any((*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))


def module_hooks(module: torch.nn.Module) -> tuple[Callable[..., Any], ...]:
    """Return the hooks around a module's forward and backward pass, in order."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return tuple(hook for kind in kinds for hook in getattr(module, kind).values())
