"""Lowerings of dot_general and conv_general_dilated."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
from jax.extend import core

from .lower import Lowering, Tensor, dtype_of, lowering, shape_of
from .structure import padded

_GEMM = ("float16", "float32", "float64", "bfloat16")


@lowering("dot_general")
def dot_general(low: Lowering, eqn: core.JaxprEqn, x: Tensor, y: Tensor) -> Tensor:
    aval: Any = eqn.outvars[0].aval
    x, y = (_as(low, operand, aval.dtype) for operand in (x, y))
    (x_sum, y_sum), (x_batch, y_batch) = eqn.params["dimension_numbers"]
    x_sum, y_sum, x_batch, y_batch = (tuple(int(a) for a in axes) for axes in (x_sum, y_sum, x_batch, y_batch))
    # Axes of the result: the batch axes, then the free axes of x, then those of y, each in increasing order.
    starts = (len(x_batch), len(x_batch) + len(x.shape) - len(x_sum) - len(x_batch))
    if _swapped(low, eqn, starts):
        x, y, x_sum, y_sum, x_batch, y_batch, starts = y, x, y_sum, x_sum, y_batch, x_batch, starts[::-1]
    x, y = low.whole(x), low.whole(y)
    # Axes are paired in their order in x, so that x needs no Transpose.
    summed = sorted(zip(x_sum, y_sum, strict=True), key=lambda pair: x.axes.index(pair[0]))
    shared = sorted(range(len(x_batch)), key=lambda i: x.axes.index(x_batch[i]))
    free = [[a for a in operand.axes if a not in s and a not in b] for operand, s, b in
            ((x, x_sum, x_batch), (y, y_sum, y_batch))]  # fmt: skip
    labels = list(shared)
    for operand_free, start in zip(free, starts, strict=True):
        rank = {axis: start + i for i, axis in enumerate(sorted(operand_free))}
        labels += [rank[axis] for axis in operand_free]
    shape = [aval.shape[axis] for axis in labels]
    x_batch, y_batch = (tuple(axes[i] for i in shared) for axes in (x_batch, y_batch))
    x_sum, y_sum = tuple(a for a, _ in summed), tuple(b for _, b in summed)
    if shared or x.dtype.name not in _GEMM:
        value = _matmul(low, x, y, (x_batch, y_batch), free, (x_sum, y_sum), shape)
    elif x.axes == (*free[0], *x_sum) and y.axes == (*y_sum, *free[1]) and len(x_sum) == len(free[1]) == 1 and free[0]:
        value = low.op("MatMul", x.value, y.value, shape=shape)
    else:
        value = _gemm(low, x, y, free, (x_sum, y_sum), shape)
    return Tensor(value, tuple(labels), tuple(aval.shape), np.dtype(aval.dtype))


def _swapped(low: Lowering, eqn: core.JaxprEqn, starts: tuple[int, int]) -> bool:
    """Return whether a transpose follows that moves the free axes of y before those of x: the product is then y x."""
    reader = low.only_reader(eqn.outvars[0])
    if reader is None or reader.primitive.name != "transpose":
        return False
    order = [axis for axis in reader.params["permutation"] if axis >= starts[0]]
    columns = len(order) - (starts[1] - starts[0])
    return 0 < columns < len(order) and all(axis >= starts[1] for axis in order[:columns])


def _as(low: Lowering, x: Tensor, dtype: Any) -> Tensor:
    return Tensor(low.cast(x.value, dtype), x.axes, x.shape, np.dtype(dtype))


def _matmul(
    low: Lowering, x: Tensor, y: Tensor, batch: Sequence[tuple[int, ...]], free: Sequence[list[int]],
    summed: Sequence[tuple[int, ...]], shape: Sequence[int],
) -> ir.Value:  # fmt: skip
    """Append a batched product of (batch, free, summed) and (batch, summed, free)."""
    sizes = [x.shape[a] for a in batch[0]]
    rows, inner, columns = (prod(t.shape[a] for a in axes) for t, axes in ((x, free[0]), (x, summed[0]), (y, free[1])))
    left = low.reshape(low.full(x, (*batch[0], *free[0], *summed[0])), (*sizes, rows, inner))
    right = low.reshape(low.full(y, (*batch[1], *summed[1], *free[1])), (*sizes, inner, columns))
    return low.reshape(low.op("MatMul", left, right, shape=(*sizes, rows, columns)), shape)


def _gemm(
    low: Lowering, x: Tensor, y: Tensor, free: Sequence[list[int]], summed: Sequence[tuple[int, ...]],
    shape: Sequence[int],
) -> ir.Value:  # fmt: skip
    """Append a Gemm of two matrices, with transA and transB according to their axes."""
    inner = prod(x.shape[a] for a in summed[0])
    rows, columns = prod(x.shape[a] for a in free[0]), prod(y.shape[a] for a in free[1])
    flipped_x = x.axes == (*summed[0], *free[0]) and bool(summed[0]) and bool(free[0])
    flipped_y = y.axes == (*free[1], *summed[1]) and bool(summed[1]) and bool(free[1])
    left = x.value if flipped_x else low.full(x, (*free[0], *summed[0]))
    right = y.value if flipped_y else low.full(y, (*summed[1], *free[1]))
    left = low.reshape(left, (inner, rows) if flipped_x else (rows, inner))
    right = low.reshape(right, (columns, inner) if flipped_y else (inner, columns))
    if not (flipped_x or flipped_y):
        made = low.op("MatMul", left, right, shape=(rows, columns))
    else:
        made = low.op("Gemm", left, right, shape=(rows, columns), transA=int(flipped_x), transB=int(flipped_y))
    return low.reshape(made, shape)


@lowering("conv_general_dilated")
def conv_general_dilated(low: Lowering, eqn: core.JaxprEqn, x: Tensor, w: Tensor) -> Tensor:
    aval: Any = eqn.outvars[0].aval
    params = eqn.params
    x, w = (_as(low, operand, aval.dtype) for operand in (x, w))
    numbers = params["dimension_numbers"]
    x_order, w_order, out_order = ([int(a) for a in spec] for spec in numbers)
    shape = [aval.shape[axis] for axis in out_order]
    strides, dilations, spread = (
        [int(n) for n in params[key]] for key in ("window_strides", "rhs_dilation", "lhs_dilation")
    )
    pads = [(int(a), int(b)) for a, b in params["padding"]]
    groups, batches = int(params["feature_group_count"]), int(params["batch_group_count"])
    sizes = [x.shape[axis] for axis in x_order[2:]]
    spread = [s if n > 1 else 1 for s, n in zip(spread, sizes, strict=True)]
    steps = [s if n > 1 else 1 for s, n in zip(strides, shape[2:], strict=True)]
    if batches == 1 and any(s > 1 for s in spread) and all(s == 1 for s in steps):
        value = _transposed(low, x, w, (x_order, w_order), shape, (spread, pads, dilations, groups))
        return Tensor(value, tuple(out_order), tuple(aval.shape), np.dtype(aval.dtype))
    if any(s > 1 for s in spread) or any(n < 0 for pair in pads for n in pair):
        config = [(0, 0, 0)] * len(x.shape)
        for axis, (before, after), step in zip(x_order[2:], pads, spread, strict=True):
            config[axis] = (min(before, 0), min(after, 0), step - 1)
        x = padded(low, x, low.scalar(0, x), config)
        pads = [(max(a, 0), max(b, 0)) for a, b in pads]
    left = low.full(x, x_order)
    if batches > 1:  # turn batch groups into channel groups
        n, c, *rest = shape_of(left)
        left = low.reshape(left, (batches, n // batches, c, *rest))
        left = low.transpose(left, (1, 0, *range(2, len(rest) + 3)))
        left, groups = low.reshape(left, (n // batches, batches * c, *rest)), batches
    value = low.op(
        "Conv", left, low.full(w, w_order), shape=shape, strides=strides, dilations=dilations, group=groups,
        pads=[a for a, _ in pads] + [b for _, b in pads], kernel_shape=[w.shape[axis] for axis in w_order[2:]],
    )  # fmt: skip
    return Tensor(value, tuple(out_order), tuple(aval.shape), np.dtype(aval.dtype))


def _transposed(
    low: Lowering, x: Tensor, w: Tensor, orders: tuple[list[int], list[int]], shape: Sequence[int],
    geometry: tuple[list[int], list[tuple[int, int]], list[int], int],
) -> ir.Value:  # fmt: skip
    """Lower a convolution over dilated input, the gradient of a strided one, to ConvTranspose with the kernel
    flipped."""
    (x_order, w_order), (spread, pads, dilations, groups) = orders, geometry
    reach = [(w.shape[axis] - 1) * d for axis, d in zip(w_order[2:], dilations, strict=True)]
    cut = [(r - a, r - b) for r, (a, b) in zip(reach, pads, strict=True)]
    kernel = _flipped(low, w, w_order[2:])
    out_channels, in_channels = w_order[:2]
    if groups == 1:
        weight = low.full(kernel, (in_channels, out_channels, *w_order[2:]))
    else:
        weight = low.full(kernel, w_order)
        out, per_group, *rest = shape_of(weight)
        weight = low.reshape(weight, (groups, out // groups, per_group, *rest))
        weight = low.transpose(weight, (0, 2, 1, *range(3, len(rest) + 3)))
        weight = low.reshape(weight, (groups * per_group, out // groups, *rest))
    inside = [n - max(-a, 0) - max(-b, 0) for n, (a, b) in zip(shape[2:], cut, strict=True)]
    made = low.op(
        "ConvTranspose", low.full(x, x_order), weight, shape=(*shape[:2], *inside), strides=spread,
        dilations=dilations, group=groups, kernel_shape=list(shape_of(weight)[2:]),
        pads=[max(a, 0) for a, _ in cut] + [max(b, 0) for _, b in cut],
    )  # fmt: skip
    if inside == list(shape[2:]):
        return made
    around = Tensor(made, tuple(range(len(shape))), shape_of(made), dtype_of(made))
    config = [(0, 0, 0), (0, 0, 0), *((max(-a, 0), max(-b, 0), 0) for a, b in cut)]
    return low.full(padded(low, around, low.scalar(0, x), config))


def _flipped(low: Lowering, w: Tensor, axes: Sequence[int]) -> Tensor:
    """Return `w` reversed along axes; a value that is itself a reversal gives the original."""
    w = low.whole(w)
    positions = [j for j, axis in enumerate(w.axes) if axis in axes and w.physical[j] > 1]
    source = low.reversed.get(w.value)
    if source is not None and source[1] == frozenset(positions):
        return Tensor(source[0], w.axes, w.shape, w.dtype)
    if not positions:
        return w
    ends = [low.ints([end] * len(positions)) for end in (-1, -np.iinfo(np.int64).max)]
    value = low.op("Slice", w.value, *ends, low.ints(positions), low.ints([-1] * len(positions)), shape=w.physical)
    return Tensor(value, w.axes, w.shape, w.dtype)
