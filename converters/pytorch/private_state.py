"""Torch beyond its documented interface, as far as a process that trains needs it; see `private_torch` for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree  # structures of arguments, flat and back

__all__ = ["gradient_hooks", "hooks_left_out", "pytree"]


def gradient_hooks(parameter: torch.Tensor) -> tuple[Callable[..., Any], ...]:
    """Return the hooks registered with ``parameter.register_hook``, in order."""
    return tuple((parameter._backward_hooks or {}).values())


def hooks_left_out(owner: torch.Tensor | torch.optim.Optimizer) -> bool:
    """Return whether there are hooks that a graph cannot call: on an accumulated gradient, or around an optimizer's
    step."""
    of_parameter = ("_post_accumulate_grad_hooks",)
    of_optimizer = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return any(getattr(owner, n, None) for n in (of_parameter if isinstance(owner, torch.Tensor) else of_optimizer))
