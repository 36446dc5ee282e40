"""Operators that pick or gather elements along axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..private_torch import computed_now
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


@rule(aten.select_backward.default)
def select_backward(gradient: torch.Tensor, sizes: Sequence[int], dim: int, index: int) -> torch.Tensor:
    """Zeros, the gradient at the index: padding, which ONNX Runtime does several times faster than a scatter."""
    dim = dim % len(sizes)
    if not isinstance(sizes[dim], int):
        return gradient.new_zeros(list(sizes)).select_scatter(gradient, dim, index)
    return _amid_zeros(gradient.unsqueeze(dim), sizes[dim], dim, index % sizes[dim])


_WITHOUT_END = 2**62


@rule(aten.slice_backward.default)
def slice_backward(
    gradient: torch.Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> torch.Tensor:
    """Zeros, the gradient in the slice; the gradient alone where that is all of it."""
    dim = dim % len(sizes)
    if step == 1 and start == 0 and isinstance(end, int) and end >= _WITHOUT_END:
        return gradient.clone()
    if step != 1 or not isinstance(sizes[dim], int):
        return gradient.new_zeros(list(sizes)).slice_scatter(gradient, dim, start, end, step)
    first, *_ = slice(start, end).indices(sizes[dim])
    return _amid_zeros(gradient, sizes[dim], dim, first)


def _amid_zeros(x: torch.Tensor, size: int, dim: int, start: int) -> torch.Tensor:
    """x at some place of an axis of this size."""
    pads = [start, size - start - x.shape[dim]]
    return aten.constant_pad_nd(x, [*[0, 0] * (x.dim() - 1 - dim), *pads], 0.0)


@rule(aten.amax.default)
def amax(x: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> torch.Tensor:
    """Reduce over all axes if none is named: torch's exporter needs them by name."""
    if not x.dim():
        return x.clone()
    made: torch.Tensor = NotImplemented if dim else aten.amax(x, list(range(x.dim())), keepdim)
    return made


@rule(aten.amin.default)
def amin(x: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> torch.Tensor:
    """As `amax`."""
    if not x.dim():
        return x.clone()
    made: torch.Tensor = NotImplemented if dim else aten.amin(x, list(range(x.dim())), keepdim)
    return made


@rule(aten.as_strided.default)
def as_strided(x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> torch.Tensor:
    """Return elements of the memory of x; most often all of x, with other strides along axes of size one."""
    places = _places(x, size, stride, offset)
    if places is None:
        return x.reshape(list(size)).clone()
    return x.flatten().index_select(0, places).reshape(list(size))


@rule(aten.as_strided_scatter.default)
def as_strided_scatter(
    x: torch.Tensor, source: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> torch.Tensor:
    """x, where `as_strided` of the result is the source."""
    places = _places(x, size, stride, offset)
    if places is None:
        return source.reshape(x.shape).clone()
    return x.flatten().scatter(0, places, source.flatten()).reshape(x.shape)


def _places(x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> torch.Tensor | None:
    """For each element of the strided view, one after another, its number in x; None where that is its own."""
    first, own = x.storage_offset() if offset is None else offset, x.storage_offset()
    same = first == own and list(size) == list(x.shape)
    if same and all(n == 1 or new == old for n, new, old in zip(size, stride, x.stride(), strict=True)):
        return None
    if not all(isinstance(n, int) for n in (*x.shape, *size)):
        raise NotImplementedError("as_strided along dimensions that vary")
    with computed_now():  # computed now, a constant of the graph
        reach = [start + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
                 for start, shape, steps in ((own, x.shape, x.stride()), (first, size, stride))]  # fmt: skip
        memory = torch.full([max(reach) + 1], -1)
        memory.as_strided(x.shape, x.stride(), own).copy_(torch.arange(x.numel()).reshape(x.shape))
        found = memory.as_strided(size, stride, first).flatten().tolist()
    if -1 in found:
        raise NotImplementedError("as_strided that reads memory around its tensor")
    return None if found == list(range(x.numel())) else torch.tensor(found)


@rule(aten.diagonal_scatter.default)
def diagonal_scatter(
    x: torch.Tensor, source: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> torch.Tensor:
    """x with another diagonal."""
    places = _on_diagonal(torch.ones_like(source), x.shape, offset, dim1, dim2)
    return torch.where(places > 0, _on_diagonal(source, x.shape, offset, dim1, dim2), x)


@rule(aten.diagonal_backward.default)
def diagonal_backward(gradient: torch.Tensor, sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> torch.Tensor:
    """Return zeros with the gradient on the diagonal."""
    return _on_diagonal(gradient, sizes, offset, dim1, dim2)


def _on_diagonal(values: torch.Tensor, sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> torch.Tensor:
    made = torch.diag_embed(values, offset, dim1, dim2)
    rest = [0] * (2 * len(sizes))
    for dim in (dim1 % len(sizes), dim2 % len(sizes)):  # the square may be larger or smaller than what it goes into
        rest[2 * (len(sizes) - 1 - dim) + 1] = sizes[dim] - made.shape[dim]
    return aten.constant_pad_nd(made, rest) if any(rest) else made


@rule(aten.masked_scatter_backward.default)
def masked_scatter_backward(gradient: torch.Tensor, mask: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The source's elements went to the mask's places in order."""
    mask = mask.expand(gradient.shape).flatten()
    order = (mask.long().cumsum(0) - 1).clamp(min=0)
    masked = torch.where(mask, gradient.flatten(), 0.0)
    return gradient.new_zeros([math.prod(sizes)]).scatter_add(0, order, masked).reshape(list(sizes))


@rule(aten.scatter_reduce.two)
def scatter_reduce(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, reduce: str, *, include_self: bool = True
) -> torch.Tensor:
    """Means, and what leaves out x itself: ONNX has neither. ONNX Runtime has no extremes of bools."""
    if not x.dim() and index.numel() == 1:
        row, index, source = x.reshape([1]), index.reshape([1]), source.reshape([1])
        return aten.scatter_reduce(row, 0, index, source, reduce, include_self=include_self).reshape([])
    if x.dtype == torch.bool and reduce in ("amax", "amin"):
        return aten.scatter_reduce(
            x, dim, index, source, "sum" if reduce == "amax" else "prod", include_self=include_self
        )
    if reduce != "mean" and include_self:
        return NotImplemented  # torch then keeps the operator
    ones = torch.ones_like(source)
    if not include_self:
        neutral = _ends(x.dtype)[reduce == "amin"] if reduce in ("amax", "amin") else int(reduce == "prod")
        x = x.scatter(dim, index, neutral)
    if reduce != "mean":
        return aten.scatter_reduce(x, dim, index, source, reduce)
    counts = torch.full_like(x, int(include_self)).scatter_add(dim, index, ones).clamp(min=1)
    total = x.scatter_add(dim, index, source)
    return total / counts if x.is_floating_point() else torch.div(total, counts, rounding_mode="floor")


def _ends(dtype: torch.dtype) -> tuple[float, float]:
    """The least and the largest number of a type."""
    if dtype.is_floating_point:
        return -math.inf, math.inf
    known = torch.iinfo(dtype)
    return known.min, known.max


@rule(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searchsorted(
    sequence: torch.Tensor,
    values: torch.Tensor | float,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: torch.Tensor | None = None,
) -> torch.Tensor:
    """How many come before each value."""
    if sorter is not None:
        sequence = sequence.gather(-1, sorter)
    if not isinstance(values, torch.Tensor):
        values = torch.full([], values, dtype=torch.result_type(sequence, values))
    if sequence.dim() > 1:
        sequence = sequence.unsqueeze(-2)
    value = values.unsqueeze(-1)
    after = sequence > value if right or side == "right" else sequence >= value
    return (~after).sum(-1).to(torch.int32 if out_int32 else torch.int64)


@rule(aten.bucketize.Tensor, aten.bucketize.Scalar)
def bucketize(
    values: torch.Tensor | float, boundaries: torch.Tensor, *, out_int32: bool = False, right: bool = False
) -> torch.Tensor:
    """As `searchsorted`."""
    return searchsorted(boundaries, values, out_int32=out_int32, right=right)


@rule(aten.median.default)
def median_of_all(x: torch.Tensor) -> torch.Tensor:
    """The lower of the two in the middle; NaN if there is one."""
    return median(x.flatten(), 0)[0]


@rule(aten.kthvalue.default)
def kthvalue(x: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The k-th smallest, counted from one."""
    if not x.dim():
        return x.clone(), torch.zeros([], dtype=torch.int64)
    values, indices = (made.narrow(dim, k - 1, 1) for made in x.sort(dim))
    return (values, indices) if keepdim else (values.squeeze(dim), indices.squeeze(dim))


@rule(aten.median.dim)
def median(x: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The lower of the two in the middle; the first NaN if there is one."""
    value, index = kthvalue(x, (x.shape[dim] + 1) // 2 if x.dim() else 1, dim, keepdim)
    if not x.dim() or not x.is_floating_point():
        return value, index
    lost = x.isnan()
    first = lost.to(torch.float32).argmax(dim, keepdim)  # CUDA has a kernel for floats alone
    has_lost = lost.any(dim, keepdim)
    return torch.where(has_lost, math.nan, value), torch.where(has_lost, first, index)


@rule(aten.index_reduce.default)
def index_reduce(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, reduce: str, *, include_self: bool = True
) -> torch.Tensor:
    """As `scatter_reduce`, of whole slices."""
    if not x.dim():
        return scatter_reduce(x, dim, index, source, reduce, include_self=include_self)
    places = index.reshape([-1 if axis == dim % x.dim() else 1 for axis in range(x.dim())]).expand(source.shape)
    return aten.scatter_reduce(x, dim, places, source, reduce, include_self=include_self)


@rule(aten.take.default)
def take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Of the elements one after the other; negative places count from the end."""
    return x.flatten().index_select(0, _from_start(index, x.numel())).reshape(index.shape)


@rule(aten.put.default)
def put(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
    """As `take`."""
    places, flat = _from_start(index, x.numel()), x.flatten()
    write = flat.scatter_add if accumulate else flat.scatter
    return write(0, places, source.flatten()).reshape(x.shape)


def _from_start(index: torch.Tensor, count: int) -> torch.Tensor:
    index = index.flatten()
    return torch.where(index < 0, index + count, index)


@rule(aten.repeat_interleave.Tensor)
def repeat_interleave(repeats: torch.Tensor, *, output_size: int | None = None) -> torch.Tensor:
    """Each place as often as `repeats` says, where the caller says how many there are."""
    if output_size is None:
        return NotImplemented
    return searchsorted(repeats.cumsum(0), torch.arange(output_size), right=True)


@rule(aten.sort.stable)
def sort(
    x: torch.Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of equal elements ONNX, too, has the first one first."""
    return aten.sort(x, dim, descending)


@rule(aten.squeeze.dims)
def squeeze(x: torch.Tensor, dim: Sequence[int]) -> torch.Tensor:
    """Where no axis is squeezed, torch's decomposition ends in an operator that ONNX lacks."""
    left_out = {axis % max(x.dim(), 1) for axis in dim}
    return x.view([size for axis, size in enumerate(x.shape) if axis not in left_out or size != 1])


@rule(aten.topk.default)
def topk(x: torch.Tensor, k: int, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a single number, along the axis that it does not have: the number itself, as below."""
    if x.dim() or k != 1:
        return NotImplemented
    return x.clone(), torch.zeros([], dtype=torch.int64)


@rule(aten.gather.default)
def gather(x: torch.Tensor, dim: int, index: torch.Tensor, *, sparse_grad: bool = False) -> torch.Tensor:
    """Of a single number."""
    return NotImplemented if x.dim() else x.expand(index.shape)


@rule(aten.scatter.src)
def scatter(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Into a single number."""
    return NotImplemented if x.dim() or index.numel() != 1 else source.reshape([])


@rule(aten.scatter.value)
def scatter_value(x: torch.Tensor, dim: int, index: torch.Tensor, value: float) -> torch.Tensor:
    """Into a single number."""
    return NotImplemented if x.dim() or index.numel() != 1 else torch.full_like(x, value)


@rule(aten.scatter_add.default)
def scatter_add(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Into a single number."""
    return NotImplemented if x.dim() else x + source.flatten()[: index.numel()].sum()


@rule(aten.prod.dim_int)
def prod(x: torch.Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Along one axis; int64 of integers, as in torch."""
    x = _as_factors(x, dtype)
    if not x.dim():
        return x.clone()
    dim, shape = dim % x.dim(), list(x.shape)
    shape[dim : dim + 1] = [1] if keepdim else []
    return onnx.op("ReduceProd", x, torch.tensor([dim]), shape=shape, keepdims=int(keepdim))


def _as_factors(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """x in the type that its product has."""
    if dtype is None:
        dtype = x.dtype if x.is_floating_point() else torch.int64
    return x.to(dtype)


def _prefixes(x: torch.Tensor, dim: int, rest: float) -> torch.Tensor:
    """All prefixes along `dim`, side by side on the last axis but one; `rest` stands where they have ended."""
    x = x.movedim(dim, -1)
    prefix = torch.ones([x.shape[-1], x.shape[-1]], dtype=torch.bool).tril()
    return torch.where(prefix, x.unsqueeze(-2), torch.full([], rest, dtype=x.dtype))


@rule(aten.cumprod.default)
def cumprod(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Of every prefix."""
    x = _as_factors(x, dtype)
    return prod(_prefixes(x, dim, 1), -1).movedim(-1, dim) if x.dim() else x.clone()


@rule(aten.cummax.default)
def cummax(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every prefix; of equals the last, as in torch."""
    return _extremes(x, dim, least=False)


@rule(aten.cummin.default)
def cummin(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `cummax`."""
    return _extremes(x, dim, least=True)


def _extremes(x: torch.Tensor, dim: int, least: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest or least of every prefix, and where it is."""
    if not x.dim():
        return x.clone(), torch.zeros([], dtype=torch.int64)
    if x.dtype == torch.bool:
        values, indices = _extremes(x.to(torch.int32), dim, least)
        return values.to(torch.bool), indices
    prefixes = _prefixes(x, dim, _ends(x.dtype)[least])
    values = prefixes.amin(-1) if least else prefixes.amax(-1)
    equal = (x.movedim(dim, -1).unsqueeze(-2) == values.unsqueeze(-1)).tril()
    indices = torch.where(equal, torch.arange(x.shape[dim]), -1).amax(-1)
    return values.movedim(-1, dim), indices.movedim(-1, dim)


@rule(aten.prod.default)
def prod_all(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Over all."""
    return onnx.op("ReduceProd", _as_factors(x, dtype), shape=[], keepdims=0)
