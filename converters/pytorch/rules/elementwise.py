"""Functions of single elements."""

from __future__ import annotations

import torch

from .registry import rule

aten = torch.ops.aten


@rule(aten.fmax.default)
def fmax(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The larger, or the one that is a number."""
    return torch.where((x >= y) | y.isnan(), x, y)


@rule(aten.fmin.default)
def fmin(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The smaller, or the one that is a number."""
    return torch.where((x <= y) | y.isnan(), x, y)


@rule(aten.hypot.default)
def hypot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Squares must not overflow."""
    return (x * x + y * y).sqrt()
