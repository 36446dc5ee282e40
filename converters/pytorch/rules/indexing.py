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


@rule(aten.kthvalue.default)
def kthvalue(x: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The k-th smallest, counted from one."""
    values, indices = (made.narrow(dim, k - 1, 1) for made in x.sort(dim))
    return (values, indices) if keepdim else (values.squeeze(dim), indices.squeeze(dim))


@rule(aten.median.dim)
def median(x: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The lower of the two in the middle."""
    return kthvalue(x, (x.shape[dim] + 1) // 2, dim, keepdim)


@rule(aten.prod.dim_int)
def prod(x: torch.Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Along one axis."""
    dim, shape = dim % x.dim(), list(x.shape)
    shape[dim : dim + 1] = [1] if keepdim else []
    x = x if dtype is None else x.to(dtype)
    return onnx.op("ReduceProd", x, torch.tensor([dim]), shape=shape, keepdims=int(keepdim))


def _prefixes(x: torch.Tensor, dim: int, rest: float) -> torch.Tensor:
    """All prefixes along `dim`, side by side on the last axis but one; `rest` stands where they have ended."""
    x = x.movedim(dim, -1)
    prefix = torch.ones([x.shape[-1], x.shape[-1]], dtype=torch.bool).tril()
    return torch.where(prefix, x.unsqueeze(-2), rest)


@rule(aten.cumprod.default)
def cumprod(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Of every prefix."""
    return prod(_prefixes(x if dtype is None else x.to(dtype), dim, 1.0), -1).movedim(-1, dim)


@rule(aten.cummax.default)
def cummax(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every prefix; the first of equals, where torch takes the last."""
    values, indices = _prefixes(x, dim, -torch.inf).max(-1)
    return values.movedim(-1, dim), indices.movedim(-1, dim)


@rule(aten.cummin.default)
def cummin(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every prefix; the first of equals, where torch takes the last."""
    values, indices = cummax(-x, dim)
    return -values, indices


@rule(aten.prod.default)
def prod_all(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Over all."""
    return onnx.op("ReduceProd", x if dtype is None else x.to(dtype), shape=[], keepdims=0)
