"""Pooling, in any number of spatial dimensions, by windows of the flattened plane."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from . import onnx
from .registry import rule

aten = torch.ops.aten


def _each(values: Sequence[int], rank: int, default: int = 1) -> list[int]:
    values = list(values) or [default]
    return values * rank if len(values) == 1 else values


def _max_pool(
    rank: int, x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], ceil_mode: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """ONNX counts indices over the whole tensor, torch over each plane."""
    if x.dim() == rank + 1:
        y, indices = _max_pool(rank, x.unsqueeze(0), kernel, stride, padding, dilation, ceil_mode)
        return y.squeeze(0), indices.squeeze(0)
    kernel, padding, dilation = (_each(v, rank, 0) for v in (kernel, padding, dilation))
    stride = _each(stride, rank) if stride else kernel
    shape = [*x.shape[:2]]
    for size, k, s, p, d in zip(x.shape[2:], kernel, stride, padding, dilation, strict=True):
        reach = size + 2 * p - d * (k - 1) - 1
        count = (reach + s - 1 if ceil_mode else reach) // s + 1
        shape.append(count - 1 if ceil_mode and (count - 1) * s >= size + p else count)
    y, flat = onnx.many(
        "MaxPool", x, shapes=[shape, shape], dtypes=[x.dtype, torch.int64], kernel_shape=kernel, strides=stride,
        pads=[*padding, *padding], dilations=dilation, ceil_mode=int(ceil_mode),
    )  # fmt: skip
    return y, flat % math.prod(x.shape[2:])


@rule(aten.max_pool2d_with_indices.default)
def max_pool2d(
    x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,), ceil_mode: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One MaxPool."""
    return _max_pool(2, x, kernel, stride, padding, dilation, ceil_mode)


@rule(aten.max_pool3d_with_indices.default)
def max_pool3d(
    x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,), ceil_mode: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One MaxPool."""
    return _max_pool(3, x, kernel, stride, padding, dilation, ceil_mode)


def _scatter(gradient: torch.Tensor, x: torch.Tensor, indices: torch.Tensor, rank: int) -> torch.Tensor:
    """Add each gradient to the element its index names."""
    planes = math.prod(x.shape[:-rank])
    flat = gradient.new_zeros([planes, math.prod(x.shape[-rank:])])
    return flat.scatter_add(1, indices.reshape([planes, -1]), gradient.reshape([planes, -1])).reshape(x.shape)


@rule(aten.max_pool2d_with_indices_backward.default)
def max_pool2d_backward(
    gradient: torch.Tensor, x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], ceil_mode: bool, indices: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """To the winners."""
    return _scatter(gradient, x, indices, 2)


@rule(aten.max_pool3d_with_indices_backward.default)
def max_pool3d_backward(
    gradient: torch.Tensor, x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], ceil_mode: bool, indices: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """To the winners."""
    return _scatter(gradient, x, indices, 3)


def _adaptive_windows(sizes: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """Per output, the plane's elements it pools; short windows repeat their first element."""
    spans = [
        [range(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]
        for size, count in zip(sizes, counts, strict=True)
    ]
    longest = math.prod(max(len(span) for span in axis) for axis in spans)
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    windows = []
    for window in itertools.product(*spans):
        cells = [sum(i * s for i, s in zip(cell, strides, strict=True)) for cell in itertools.product(*window)]
        windows.append(cells + cells[:1] * (longest - len(cells)))
    return windows


def _adaptive_max_pool(rank: int, x: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    windows = torch.tensor(_adaptive_windows(x.shape[-rank:], counts))
    cells = x.flatten(-rank).index_select(-1, windows.flatten())
    values, which = cells.unflatten(-1, windows.shape).max(-1)
    table = windows.expand([*x.shape[:-rank], *windows.shape])
    indices = table.gather(-1, which.unsqueeze(-1)).squeeze(-1)
    return values.unflatten(-1, list(counts)), indices.unflatten(-1, list(counts))


@rule(aten.adaptive_max_pool2d.default)
def adaptive_max_pool2d(x: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest of each window."""
    return _adaptive_max_pool(2, x, counts)


@rule(aten.adaptive_max_pool3d.default)
def adaptive_max_pool3d(x: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest of each window."""
    return _adaptive_max_pool(3, x, counts)


@rule(aten.adaptive_max_pool2d_backward.default)
def adaptive_max_pool2d_backward(gradient: torch.Tensor, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """To the winners."""
    return _scatter(gradient, x, indices, 2)


@rule(aten.adaptive_max_pool3d_backward.default)
def adaptive_max_pool3d_backward(gradient: torch.Tensor, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """To the winners."""
    return _scatter(gradient, x, indices, 3)


@rule(aten.avg_pool2d.default, aten.avg_pool3d.default)
def avg_pool(
    x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
    ceil_mode: bool = False, count_include_pad: bool = True, divisor: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """With a divisor of its own: ONNX has none."""
    if divisor is None:
        return NotImplemented  # torch then keeps the operator
    if ceil_mode:
        raise NotImplementedError("average pooling with divisor_override and ceil_mode")
    rank = len(kernel) if len(kernel) > 1 else x.dim() - 2
    pool = aten.avg_pool2d if rank == 2 else aten.avg_pool3d
    made: torch.Tensor = pool(x, kernel, stride, padding, False, True)
    return made * (math.prod(_each(kernel, rank)) / divisor)


@rule(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def avg_pool_backward(
    gradient: torch.Tensor, x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    ceil_mode: bool, count_include_pad: bool, divisor: int | None,
) -> torch.Tensor:  # fmt: skip
    """Each output's gradient over its divisor, spread over its window."""
    rank = len(kernel) if len(kernel) > 1 else x.dim() - 2
    kernel, padding = _each(kernel, rank), _each(padding, rank, 0)
    stride = _each(stride, rank) if stride else kernel
    if x.dim() == rank + 1:
        args = (kernel, stride, padding, ceil_mode, count_include_pad, divisor)
        return avg_pool_backward(gradient.unsqueeze(0), x.unsqueeze(0), *args).squeeze(0)
    space, counts = list(x.shape[2:]), list(gradient.shape[2:])
    sizes = [_window_sizes(*of, count_include_pad) for of in zip(space, counts, kernel, stride, padding, strict=True)]
    if divisor:
        share = gradient / divisor
    elif all(len(set(axis)) == 1 for axis in sizes):
        share = gradient / math.prod(axis[0] for axis in sizes)
    else:
        areas = [math.prod(cell) for cell in itertools.product(*sizes)]
        share = gradient / torch.tensor(areas, dtype=gradient.dtype).reshape(counts)
    if kernel == stride and not any(padding) and [c * k for c, k in zip(counts, kernel, strict=True)] == space:
        blocks = share
        for axis, k in enumerate(kernel):
            at = 2 * axis + 3
            blocks = blocks.unsqueeze(at).expand([*blocks.shape[:at], k, *blocks.shape[at:]])
        return blocks.reshape(x.shape)
    over = [(c - 1) * s + k - p - size for size, c, k, s, p in zip(space, counts, kernel, stride, padding, strict=True)]
    return onnx.op(
        "ConvTranspose", share, gradient.new_ones([x.shape[1], 1, *kernel]), shape=x.shape, strides=stride,
        pads=[*padding, *(max(n, 0) for n in over)], output_padding=[max(-n, 0) for n in over], group=x.shape[1],
    )  # fmt: skip


def _window_sizes(size: int, count: int, kernel: int, stride: int, padding: int, include_pad: bool) -> list[int]:
    """Along one axis, by how much each output was divided."""
    made = []
    for start in range(-padding, -padding + count * stride, stride):
        end = min(start + kernel, size + padding)
        made.append(end - start if include_pad else min(end, size) - max(start, 0))
    return made


@rule(aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool3d(x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """A product with one matrix per axis."""
    for axis, count in zip(range(x.dim() - 3, x.dim()), counts, strict=True):
        rows = torch.tensor(_averages(x.shape[axis], count), dtype=x.dtype)
        x = (x.movedim(axis, -1) @ rows.t()).movedim(-1, axis)
    return x


@rule(aten._adaptive_avg_pool2d_backward.default)
def adaptive_avg_pool2d_backward(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The averages are a product with one matrix per axis; so is the gradient."""
    return _adaptive_avg_pool_backward(gradient, x, 2)


@rule(aten._adaptive_avg_pool3d_backward.default)
def adaptive_avg_pool3d_backward(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The averages are a product with one matrix per axis; so is the gradient."""
    return _adaptive_avg_pool_backward(gradient, x, 3)


def _adaptive_avg_pool_backward(gradient: torch.Tensor, x: torch.Tensor, rank: int) -> torch.Tensor:
    for axis in range(x.dim() - rank, x.dim()):
        rows = torch.tensor(_averages(x.shape[axis], gradient.shape[axis]), dtype=gradient.dtype)
        gradient = (gradient.movedim(axis, -1) @ rows).movedim(-1, axis)
    return gradient


def _averages(size: int, count: int) -> list[list[float]]:
    """Row by row, how much each of `count` windows takes of each of `size` elements."""
    rows = [[0.0] * size for _ in range(count)]
    for i, row in enumerate(rows):
        start, end = i * size // count, -(-(i + 1) * size // count)
        row[start:end] = [1 / (end - start)] * (end - start)
    return rows
