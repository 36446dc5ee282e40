"""Lowerings of reductions, cumulative operations and windows."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
from jax.extend import core

from onnx_remat.errors import ConversionError

from .lower import Lowering, Tensor, lowering
from .structure import padded

_REDUCE = {
    "reduce_sum": "ReduceSum", "reduce_max": "ReduceMax", "reduce_min": "ReduceMin", "reduce_prod": "ReduceProd",
    "reduce_and": "ReduceMin", "reduce_or": "ReduceMax",
}  # fmt: skip


@lowering(*_REDUCE)
def reduce(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> Tensor:
    name, axes = eqn.primitive.name, tuple(int(a) for a in eqn.params["axes"])
    op_type = _REDUCE[name]
    if x.dtype != np.bool_ and name in ("reduce_and", "reduce_or"):
        raise ConversionError(f"{name} of integers has no lowering to ONNX: reduce bits apart")
    if x.dtype == np.bool_ and name in ("reduce_sum", "reduce_prod"):
        op_type = "ReduceMax" if name == "reduce_sum" else "ReduceMin"
    if op_type == "ReduceProd" or any(x.shape[axis] == 0 for axis in axes):
        x = low.whole(x)
    left = [axis for axis in range(len(x.shape)) if axis not in axes]
    shape = [x.shape[axis] for axis in left]
    gone = [j for j, axis in enumerate(x.axes) if axis in axes]
    kept = [j for j in range(len(x.axes)) if j not in gone]
    value = x.value
    if gone:
        value = low.op(op_type, value, low.ints(gone), shape=[x.physical[j] for j in kept], keepdims=0)
    made = Tensor(value, tuple(left.index(x.axes[j]) for j in kept), tuple(shape), x.dtype)
    repeats = prod(x.shape[a] for a in axes) // max(prod(x.physical[j] for j in gone), 1)
    if op_type == "ReduceSum" and repeats > 1:
        with np.errstate(over="ignore"):  # half precision overflows in XLA, too, and integers wrap
            made = low.elementwise("Mul", made, low.array(np.asarray(repeats).astype(x.dtype)))
    return made


@lowering("argmax", "argmin")
def argreduce(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> Tensor:
    (axis,), dtype = eqn.params["axes"], np.dtype(eqn.params["index_dtype"])
    x = low.whole(x)
    j = x.axes.index(axis)
    physical = [n for i, n in enumerate(x.physical) if i != j]
    op_type = "ArgMax" if eqn.primitive.name == "argmax" else "ArgMin"
    found = low.op(op_type, x.value, shape=physical, dtype=np.int64, axis=j, keepdims=0)
    labels = tuple(a - (a > axis) for a in x.axes if a != axis)
    return Tensor(low.cast(found, dtype), labels, tuple(n for a, n in enumerate(x.shape) if a != axis), dtype)


@lowering("cumsum")
def cumsum(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> Tensor:
    x = low.whole(x)
    where = low.emit.constant(np.int64(x.axes.index(eqn.params["axis"])))
    value = low.op("CumSum", x.value, where, shape=x.physical, reverse=int(eqn.params["reverse"]))
    return Tensor(value, x.axes, x.shape, x.dtype)


_CUMULATIVE = {"cumprod": "Mul", "cummax": "Max", "cummin": "Min"}


@lowering(*_CUMULATIVE, "cumlogsumexp")
def cumulative(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> Tensor:
    """Lower by Hillis & Steele (1986): combine each element with the one 1, 2, 4, ... positions before it."""
    axis, reverse = eqn.params["axis"], eqn.params["reverse"]
    x = low.whole(x)
    size, name = x.shape[axis], eqn.primitive.name
    fill = low.array(_identity(name, x.dtype))
    step = 1
    while step < size:
        config = [(0, 0, 0)] * len(x.shape)
        config[axis] = (-step, step, 0) if reverse else (step, -step, 0)
        before = padded(low, x, fill, config)
        x = low.elementwise(_CUMULATIVE[name], x, before) if name in _CUMULATIVE else _logaddexp(low, x, before)
        step *= 2
    return x


def _identity(name: str, dtype: np.dtype[Any]) -> Any:
    if name == "cumprod":
        return dtype.type(1)
    low, high = (-np.inf, np.inf) if dtype.kind not in "iu" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return dtype.type(high if name in ("cummin", "reduce_window_min") else low)


def _logaddexp(low: Lowering, x: Tensor, y: Tensor) -> Tensor:
    """Compute larger + log(1 + exp(smaller - larger)) of x and y, which are finite or -inf."""
    larger = low.elementwise("Max", x, y)
    apart = low.elementwise("Sub", low.elementwise("Min", x, y), larger)
    alike = low.elementwise("Equal", x, y, dtype=np.bool_)  # also where both are -inf
    both = low.elementwise("Exp", low.elementwise("Where", alike, low.scalar(0, x), apart, dtype=x.dtype))
    return low.elementwise("Add", larger, low.elementwise("Log", low.elementwise("Add", both, low.scalar(1, x))))


@lowering("reduce_window_max", "reduce_window_min", "reduce_window_sum")
def reduce_window(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> Tensor:
    params, name = eqn.params, eqn.primitive.name
    fill = low.scalar(0, x) if name.endswith("sum") else low.array(_identity(name, x.dtype))
    padding = [(int(a), int(b)) for a, b in params["padding"]]
    base = [int(n) for n in params["base_dilation"]]
    whole = name.endswith("sum") and x.dtype.kind in "iu"
    if whole or any(n > 1 for n in base) or any(n < 0 for pair in padding for n in pair):
        x = padded(low, x, fill, [(*pair, n - 1) for pair, n in zip(padding, base, strict=True)])
        padding = [(0, 0)] * len(padding)
    if whole:
        return _window_sum(low, x, params["window_dimensions"], params["window_strides"], params["window_dilation"])
    turn = "Neg" if x.dtype.kind not in "iu" else "BitwiseNot"  # of integers, the least has no negative
    if name == "reduce_window_min":
        x, fill = low.elementwise(turn, x), low.array(_identity("reduce_window_max", x.dtype))
    window = _Window(low, x, fill, params["window_dimensions"], params["window_strides"], padding,
                     params["window_dilation"])  # fmt: skip
    if not name.endswith("sum"):
        made = window.tensor(window.max_pool()[0], eqn.outvars[0].aval)
        return low.elementwise(turn, made) if name == "reduce_window_min" else made
    made = window.tensor(window.pool("AveragePool", count_include_pad=1), eqn.outvars[0].aval)
    return low.elementwise("Mul", made, low.scalar(prod(params["window_dimensions"]), made))


def _window_sum(
    low: Lowering, x: Tensor, sizes: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> Tensor:
    """Sum integers in windows axis by axis: ONNX pools floats, which would round."""
    for axis, (size, stride, dilation) in enumerate(zip(sizes, strides, dilations, strict=True)):
        if (size, stride) == (1, 1):
            continue
        x = low.whole(x)
        j, count = x.axes.index(axis), (x.shape[axis] - (size - 1) * dilation - 1) // stride + 1
        where = np.arange(count)[:, None] * stride + np.arange(size) * dilation
        shape = [*x.physical[:j], count, size, *x.physical[j + 1 :]]
        value = low.op("Gather", x.value, low.emit.constant(where), shape=shape, axis=j)
        value = low.op("ReduceSum", value, low.ints([j + 1]), shape=[*shape[: j + 1], *shape[j + 2 :]], keepdims=0)
        x = Tensor(value, x.axes, tuple(count if a == axis else n for a, n in enumerate(x.shape)), x.dtype)
    return x


@lowering("select_and_scatter_add")
def select_and_scatter_add(low: Lowering, eqn: core.JaxprEqn, source: Tensor, x: Tensor) -> Tensor:
    """Lower the gradient of max-pooling: add at the positions of MaxPool's maxima."""
    params = eqn.params
    if params["select_prim"].name not in ("ge", "le"):
        raise ConversionError(f"select_and_scatter_add by {params['select_prim'].name}: only ge and le have a lowering")
    if params["select_prim"].name == "le":
        x = low.elementwise("Neg", x)
    rank = len(x.shape)
    window = _Window(low, x, low.array(_identity("reduce_window_max", x.dtype)), params["window_dimensions"],
                     params["window_strides"], params["padding"], (1,) * rank)  # fmt: skip
    where = window.max_pool()[1]
    size, count = prod(window.x.shape), prod(source.shape)
    zeros = low.filled(low.array(np.zeros(size, x.dtype)), (0,), where)
    moved = low.reshape(low.full(source, window.order), (count,))
    flat = low.op("ScatterElements", zeros, low.reshape(where, (count,)), moved, shape=(size,), reduction="add")
    shape = [window.x.shape[axis] for axis in window.order]
    made = Tensor(low.reshape(flat, shape), window.order, window.x.shape, x.dtype)
    back = [(-a, -b, 0) for a, b in window.outside]
    return padded(low, made, low.scalar(0, x), back)


class _Window:
    """A window over a tensor in the layout of ONNX's pools: windowed axes last, after exactly two others."""

    def __init__(
        self, low: Lowering, x: Tensor, fill: Tensor, sizes: Sequence[int], strides: Sequence[int],
        padding: Sequence[tuple[int, int]], dilations: Sequence[int],
    ) -> None:  # fmt: skip
        rank = len(x.shape)
        moving = [a for a in range(rank) if sizes[a] != 1 or strides[a] != 1 or any(padding[a])]
        if len(moving) > 3:
            raise ConversionError(f"a window over {len(moving)} axes has no lowering to ONNX: at most 3")
        # Pools do not support padding as wide as the window: such padding is applied to the tensor itself.
        wide = any(max(padding[a]) >= (sizes[a] - 1) * dilations[a] + 1 for a in moving)
        self.outside = [tuple(int(n) for n in padding[a]) if wide else (0, 0) for a in range(rank)]
        inside = [(0, 0) if wide else padding[a] for a in range(rank)]
        self.x = padded(low, x, fill, [(a, b, 0) for a, b in self.outside]) if wide else low.whole(x)
        still = [a for a in self.x.axes if a not in moving]
        moving = [a for a in self.x.axes if a in moving] or [still.pop()]
        self.low, self.order = low, (*still, *moving)
        lead = [self.x.shape[a] for a in still]
        self._lead = lead if len(lead) == 2 else [1, prod(lead)]
        self._moving = moving
        self._attributes = {
            "kernel_shape": [int(sizes[a]) for a in moving],
            "strides": [int(strides[a]) for a in moving],
            "dilations": [int(dilations[a]) for a in moving],
            "pads": [int(inside[a][0]) for a in moving] + [int(inside[a][1]) for a in moving],
        }
        self._sizes = [
            (self.x.shape[a] + sum(inside[a]) - (sizes[a] - 1) * dilations[a] - 1) // strides[a] + 1 for a in moving
        ]

    @property
    def _input(self) -> ir.Value:
        moving = [self.x.shape[a] for a in self._moving]
        return self.low.reshape(self.low.full(self.x, self.order), (*self._lead, *moving))

    def pool(self, op_type: str, **attributes: int) -> ir.Value:
        return self.low.op(
            op_type, self._input, shape=(*self._lead, *self._sizes), **self._attributes, **attributes
        )  # fmt: skip

    def max_pool(self) -> tuple[ir.Value, ir.Value]:
        """Return maxima and their positions in the flat input, from one node, so that backward can share forward's."""
        low, x = self.low, self._input
        wide = self.low.wider("MaxPool", self.x.dtype)
        shape = (*self._lead, *self._sizes)
        dtype = self.x.dtype if wide is None else wide
        results = [(shape, dtype), (shape, np.int64)]
        best, where = low.nodes("MaxPool", low.cast(x, dtype), results=results, **self._attributes)
        return low.cast(best, self.x.dtype), where

    def tensor(self, value: ir.Value, aval: Any) -> Tensor:
        """Return a pool's result as the array that it represents."""
        shape = tuple(int(n) for n in aval.shape)
        physical = [shape[axis] for axis in self.order]
        return Tensor(self.low.reshape(value, physical), self.order, shape, self.x.dtype)
