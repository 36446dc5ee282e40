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


@rule(aten.clamp.default)
def clamp(x: torch.Tensor, low: float | None = None, high: float | None = None) -> torch.Tensor:
    """Of floats between integers: torch's exporter makes tensors of them, which it then cannot translate."""
    whole = [end is not None and not isinstance(end, float) for end in (low, high)]
    if not x.is_floating_point() or not any(whole) or not all(isinstance(e, int | float | None) for e in (low, high)):
        return NotImplemented
    made: torch.Tensor = aten.clamp(x, *(None if end is None else float(end) for end in (low, high)))
    return made


@rule(aten.lerp.Scalar)
def lerp(start: torch.Tensor, end: torch.Tensor, weight: float) -> torch.Tensor:
    """As torch computes it, from the nearer end."""
    if abs(weight) < 0.5:
        return start + (end - start) * weight
    return end - (end - start) * (1 - weight)
