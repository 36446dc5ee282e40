"""Gradients of operators that pick elements by position."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .registry import rule

aten = torch.ops.aten


@rule(aten.unfold_backward.default)
def unfold_backward(gradient: torch.Tensor, sizes: Sequence[int], dim: int, size: int, step: int) -> torch.Tensor:
    """Every element gathers what the windows over it got."""
    dim = dim % len(sizes)
    source = torch.arange(sizes[dim]).unfold(0, size, step).flatten()
    flat = gradient.movedim(-1, dim + 1).flatten(dim, dim + 1)
    return gradient.new_zeros(list(sizes)).index_add(dim, source, flat)
