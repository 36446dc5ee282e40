"""Operators that pick or gather elements along axes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import onnx
from .registry import rule

aten = torch.ops.aten


@rule(aten.unfold_backward.default)
def unfold_backward(gradient: torch.Tensor, sizes: Sequence[int], dim: int, size: int, step: int) -> torch.Tensor:
    """Every element gathers what the windows over it got."""
    dim = dim % len(sizes)
    source = torch.arange(sizes[dim]).unfold(0, size, step).flatten()
    flat = gradient.movedim(-1, dim + 1).flatten(dim, dim + 1)
    return gradient.new_zeros(list(sizes)).index_add(dim, source, flat)


@rule(aten.median.dim)
def median(x: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The lower of the two in the middle."""
    values, indices = x.sort(dim)
    middle = (x.shape[dim] - 1) // 2
    values, indices = values.narrow(dim, middle, 1), indices.narrow(dim, middle, 1)
    return (values, indices) if keepdim else (values.squeeze(dim), indices.squeeze(dim))


@rule(aten.prod.dim_int)
def prod(x: torch.Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Along one axis."""
    dim, shape = dim % x.dim(), list(x.shape)
    shape[dim : dim + 1] = [1] if keepdim else []
    x = x if dtype is None else x.to(dtype)
    return onnx.op("ReduceProd", x, torch.tensor([dim]), shape=shape, keepdims=int(keepdim))


@rule(aten.cumprod.default)
def cumprod(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Products of all prefixes, side by side."""
    x = (x if dtype is None else x.to(dtype)).movedim(dim, -1)
    prefix = torch.ones([x.shape[-1], x.shape[-1]], dtype=torch.bool).tril()
    return prod(torch.where(prefix, x.unsqueeze(-2), 1.0), -1).movedim(-1, dim)


@rule(aten.prod.default)
def prod_all(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Over all."""
    return onnx.op("ReduceProd", x if dtype is None else x.to(dtype), shape=[], keepdims=0)
