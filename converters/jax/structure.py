"""Lowerings of primitives that move elements: reshape, slice, pad, concatenate and similar ones."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
import onnx_ir as ir
from jax.extend import core

from onnx_remat.errors import ConversionError

from . import kernels
from .bits import bits_of
from .lower import Array, Lowering, Stack, Tensor, lowering, shape_of

_TO_THE_END = np.iinfo(np.int64).max


@lowering("transpose")
def transpose(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> Tensor:
    return permuted(x, eqn.params["permutation"])


def permuted(x: Tensor, order: Sequence[int]) -> Tensor:
    """Return `x` with its axis ``order[j]`` as axis j, by new labels alone."""
    order = list(order)
    return x.relabelled([order.index(axis) for axis in x.axes], [x.shape[axis] for axis in order])


@lowering("broadcast_in_dim")
def broadcast_in_dim(low: Lowering, eqn: core.JaxprEqn, x: Tensor, *_: Tensor) -> Tensor:
    into = eqn.params["broadcast_dimensions"]
    return x.relabelled([into[axis] for axis in x.axes], eqn.params["shape"])


@lowering("reshape")
def reshape(low: Lowering, eqn: core.JaxprEqn, x: Tensor, *_: Tensor) -> Tensor:
    order = eqn.params["dimensions"]
    return reshaped(low, x if order is None else permuted(x, order), eqn.params["new_sizes"])


@lowering("expand_dims")
def expand_dims(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> Tensor:
    return reshaped(low, x, eqn.outvars[0].aval.shape)  # type: ignore[attr-defined]


@lowering("squeeze", stacks=True)
def squeeze(low: Lowering, eqn: core.JaxprEqn, x: Array) -> Array:
    if isinstance(x, Stack) and tuple(eqn.params["dimensions"]) == (0,):
        return x.items[0]
    return reshaped(low, low.tensor(x), eqn.outvars[0].aval.shape)  # type: ignore[attr-defined]


def reshaped(low: Lowering, x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return `x` in another shape; if only unit axes are added or removed, only labels change."""
    shape = tuple(int(n) for n in shape)
    if not x.axes:
        return x.relabelled((), shape)
    old = [axis for axis, size in enumerate(x.shape) if size != 1]
    new = [axis for axis, size in enumerate(shape) if size != 1]
    if [x.shape[axis] for axis in old] == [shape[axis] for axis in new]:
        renamed = dict(zip(old, new, strict=True))
        kept = [axis for axis in x.axes if axis in renamed]
        value = low.reshape(x.value, [x.physical[x.axes.index(axis)] for axis in kept])
        return Tensor(value, tuple(renamed[axis] for axis in kept), shape, x.dtype)
    return Tensor(low.reshape(low.full(x), shape), tuple(range(len(shape))), shape, x.dtype)


@lowering("tile")
def tile(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> Tensor:
    reps = [int(n) for n in eqn.params["reps"]]
    shape = [n for pair in zip(reps, x.shape, strict=True) for n in pair]
    return reshaped(low, x.relabelled([2 * axis + 1 for axis in x.axes], shape), eqn.outvars[0].aval.shape)  # type: ignore[attr-defined]


@lowering("empty", "empty2")
def empty(low: Lowering, eqn: core.JaxprEqn) -> Tensor:
    aval: Any = eqn.outvars[0].aval
    return low.array(np.zeros(aval.shape, kernels.dtype_of_aval(aval)))


@lowering("iota")
def iota(low: Lowering, eqn: core.JaxprEqn, *_: Tensor) -> Tensor:
    shape, axis = tuple(eqn.params["shape"]), eqn.params["dimension"]
    value = counting(low, shape[axis], np.dtype(eqn.params["dtype"]))
    return Tensor(value, (axis,), shape, np.dtype(eqn.params["dtype"]))


def counting(low: Lowering, n: int, dtype: Any) -> ir.Value:
    """Return the vector 0, 1, ..., n - 1."""
    ends = [low.emit.constant(np.int64(end)) for end in (0, n, 1)]
    return low.cast(low.op("Range", *ends, shape=(n,), dtype=np.int64), dtype)


@lowering("slice", stacks=True)
def strided_slice(low: Lowering, eqn: core.JaxprEqn, x: Array) -> Array:
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(starts)
    if isinstance(x, Stack):
        kept = x.items[starts[0] : limits[0] : strides[0]]
        if kept and tuple(limits[1:]) == x.shape[1:] and not any(starts[1:]) and all(s == 1 for s in strides[1:]):
            return Stack(kept)
        x = low.tensor(x)
    return sliced(low, x, starts, limits, strides)


def sliced(low: Lowering, x: Tensor, starts: Sequence[int], limits: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Return ``x[start:limit:stride]`` along every axis."""
    shape = tuple(len(range(int(a), int(b), int(s))) for a, b, s in zip(starts, limits, strides, strict=True))
    cut = [
        j
        for j, axis in enumerate(x.axes)
        if x.physical[j] != 1 and (starts[axis], limits[axis], strides[axis]) != (0, x.shape[axis], 1)
    ]
    value = x.value
    if cut:
        physical = [shape[axis] if j in cut else x.physical[j] for j, axis in enumerate(x.axes)]
        bounds = [[int(which[x.axes[j]]) for j in cut] for which in (starts, limits)]
        steps = [int(strides[x.axes[j]]) for j in cut]
        extra = [low.ints(steps)] if any(step != 1 for step in steps) else []
        value = low.op(
            "Slice", value, low.ints(bounds[0]), low.ints(bounds[1]), low.ints(cut), *extra, shape=physical
        )  # fmt: skip
    empty = [j for j, axis in enumerate(x.axes) if shape[axis] == 0 and shape_of(value)[j] != 0]
    if empty or any(n == 0 for n in shape):
        return low.array(np.zeros(shape, x.dtype))
    return Tensor(value, x.axes, shape, x.dtype)


@lowering("rev")
def rev(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> Tensor:
    flipped = [j for j, axis in enumerate(x.axes) if axis in eqn.params["dimensions"] and x.physical[j] > 1]
    if not flipped:
        return x
    bounds = [low.ints([end] * len(flipped)) for end in (-1, -_TO_THE_END)]
    value = low.op(
        "Slice", x.value, *bounds, low.ints(flipped), low.ints([-1] * len(flipped)), shape=x.physical
    )  # fmt: skip
    low.reversed[value] = (x.value, frozenset(flipped))
    return Tensor(value, x.axes, x.shape, x.dtype)


@lowering("concatenate")
def concatenate(low: Lowering, eqn: core.JaxprEqn, *xs: Tensor) -> Tensor:
    return concatenated(low, xs, eqn.params["dimension"])


def concatenated(low: Lowering, xs: Sequence[Tensor], axis: int) -> Tensor:
    """Concatenate tensors along an axis; all take the order of axes of the largest."""
    xs = [x for x in xs if x.shape[axis]] or xs[:1]
    if len(xs) == 1:
        return xs[0]
    order = low.whole(max(xs, key=lambda x: prod(x.physical))).axes
    shape = list(xs[0].shape)
    shape[axis] = sum(x.shape[axis] for x in xs)
    values = [low.full(x, order) for x in xs]
    made = low.op("Concat", *values, shape=[shape[a] for a in order], axis=order.index(axis))
    return Tensor(made, order, tuple(shape), xs[0].dtype)


@lowering("stack")
def stack(low: Lowering, eqn: core.JaxprEqn, *xs: Tensor) -> Tensor:
    axis = eqn.params["axis"]
    shape = list(eqn.outvars[0].aval.shape)  # type: ignore[attr-defined]
    shape[axis] = 1
    return concatenated(low, [reshaped(low, x, shape) for x in xs], axis)


@lowering("unstack")
def unstack(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> list[Tensor]:
    axis = eqn.params["axis"]
    return [taken(low, x, axis, index) for index in range(x.shape[axis])]


def taken(low: Lowering, x: Tensor, axis: int, index: int) -> Tensor:
    """Return ``x[index]`` along an axis, without that axis."""
    shape = x.shape[:axis] + x.shape[axis + 1 :]
    labels = [a - (a > axis) for a in x.axes if a != axis]
    if axis not in x.axes:
        return x.relabelled(labels, shape)
    j = x.axes.index(axis)
    physical = [n for i, n in enumerate(x.physical) if i != j]
    where = low.emit.constant(np.int64(0 if x.physical[j] == 1 else index))
    return Tensor(low.op("Gather", x.value, where, shape=physical, axis=j), tuple(labels), shape, x.dtype)


@lowering("split")
def split(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> list[Tensor]:
    axis, sizes = eqn.params["axis"], [int(n) for n in eqn.params["sizes"]]
    shapes = [(*x.shape[:axis], n, *x.shape[axis + 1 :]) for n in sizes]
    if axis not in x.axes or x.physical[x.axes.index(axis)] == 1:
        return [x.relabelled(x.axes, shape) for shape in shapes]
    j = x.axes.index(axis)
    results = [((*x.physical[:j], n, *x.physical[j + 1 :]), x.dtype) for n in sizes]
    parts = low.nodes("Split", x.value, low.ints(sizes), results=results, axis=j)
    return [Tensor(part, x.axes, shape, x.dtype) for part, shape in zip(parts, shapes, strict=True)]


@lowering("pad")
def pad(low: Lowering, eqn: core.JaxprEqn, x: Tensor, fill: Tensor) -> Tensor:
    return padded(low, x, fill, eqn.params["padding_config"])


def padded(low: Lowering, x: Tensor, fill: Tensor, config: Sequence[tuple[int, int, int]]) -> Tensor:
    """Return `x` with padding of (low, high, interior) by axis; negative amounts remove elements."""
    x = low.whole(x)
    for axis, (_, _, between) in enumerate(config):
        if between and x.shape[axis] > 1:
            x = _spread(low, x, fill, axis, between)
    config = [(*_of_length(n, a, b), 0) for n, (a, b, _) in zip(x.shape, config, strict=True)]
    x = sliced(
        low, x, [max(-a, 0) for a, _, _ in config],
        [n - max(-b, 0) for n, (_, b, _) in zip(x.shape, config, strict=True)], [1] * len(config),
    )  # fmt: skip
    return _surrounded(low, low.whole(x), fill, [(max(a, 0), max(b, 0)) for a, b, _ in config])


def _of_length(n: int, before: int, after: int) -> tuple[int, int]:
    """Return amounts of which none removes more than the `n` elements: the rest is of the padding at the other end."""
    if before < -n:
        return -n, after + before + n
    return (before + after + n, -n) if after < -n else (before, after)


def _surrounded(low: Lowering, x: Tensor, fill: Tensor, amounts: Sequence[tuple[int, int]]) -> Tensor:
    if not any(a or b for a, b in amounts):
        return x
    shape = tuple(n + a + b for n, (a, b) in zip(x.shape, amounts, strict=True))
    pads = [amounts[axis][end] for end in (0, 1) for axis in x.axes]
    extra = [low.full(fill)] if fill.constant is None or fill.constant.item() != 0 else []
    value = low.op("Pad", x.value, low.ints(pads), *extra, shape=[shape[axis] for axis in x.axes])
    return Tensor(value, x.axes, shape, x.dtype)


def _spread(low: Lowering, x: Tensor, fill: Tensor, axis: int, between: int) -> Tensor:
    """Insert `between` fill elements after each element except the last: pad an inner axis, merge it, cut the end."""
    n, rank = x.shape[axis], len(x.shape)
    inner = (*x.shape[: axis + 1], 1, *x.shape[axis + 1 :])
    wide = reshaped(low, low.whole(Tensor(low.full(x), tuple(range(rank)), x.shape, x.dtype)), inner)
    wide = _surrounded(low, low.whole(wide), fill, [(0, between if a == axis + 1 else 0) for a in range(rank + 1)])
    merged = reshaped(low, wide, (*x.shape[:axis], n * (between + 1), *x.shape[axis + 1 :]))
    limits = [(n - 1) * (between + 1) + 1 if a == axis else size for a, size in enumerate(x.shape)]
    return sliced(low, merged, [0] * rank, limits, [1] * rank)


@lowering("bitcast_convert_type")
def bitcast_convert_type(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> Tensor:
    """Cast between integers of equal size; convert bits to floats and back by arithmetic, exact except for NaNs."""
    dtype = kernels.dtype_of_aval(eqn.outvars[0].aval)
    same = x.dtype.kind in "iu" and x.dtype.itemsize == dtype.itemsize
    if dtype.kind in "iu" and x.dtype.itemsize == dtype.itemsize <= 4 and jnp.issubdtype(x.dtype, jnp.floating):
        return bits_of(low, x, dtype)
    if same and dtype.kind in "iu":
        return Tensor(low.cast(x.value, dtype), x.axes, x.shape, dtype)
    if not same or not jnp.issubdtype(dtype, jnp.floating):
        raise ConversionError(f"bitcast_convert_type from {x.dtype} to {dtype} has no lowering to ONNX")
    numbers, unsigned = (np.float64, np.uint64) if dtype.itemsize == 8 else (np.float32, np.uint32)
    kind, bits = jnp.finfo(dtype), low.cast(x.value, f"uint{8 * x.dtype.itemsize}")
    unit = low.array(numbers(kind.eps))
    fraction = _mantissa_below_two(bits, kind)
    if fraction is not None:  # 1.0 <= result < 2, as in random uniform numbers
        mantissa = Tensor(low.cast(fraction, numbers), x.axes, x.shape, np.dtype(numbers))
        total = low.elementwise("Add", low.elementwise("Mul", mantissa, unit), low.array(numbers(1)))
        return Tensor(low.cast(total.value, dtype), x.axes, x.shape, dtype)
    words = Tensor(low.cast(bits, unsigned), x.axes, x.shape, np.dtype(unsigned))

    def field(shift: int, count: int) -> Tensor:
        moved = low.elementwise("BitShift", words, low.array(unsigned(shift)), direction="RIGHT") if shift else words
        return low.elementwise("BitwiseAnd", moved, low.array(unsigned(2**count - 1)))

    def number(z: Tensor) -> Tensor:
        return Tensor(low.cast(z.value, numbers), z.axes, x.shape, np.dtype(numbers))

    exponents, exponent = np.arange(2**kind.nexp), field(kind.nmant, kind.nexp)
    scale = np.ldexp(1.0, np.maximum(exponents, 1) - exponents.size // 2 + 1)
    table = low.emit.constant(np.where(exponents == exponents.size - 1, np.inf, scale).astype(numbers))
    size = low.op("Gather", table, low.cast(exponent.value, np.int32), shape=exponent.physical, axis=0)
    fraction_part = low.elementwise("Mul", number(field(0, kind.nmant)), unit)
    implied = low.elementwise("Min", exponent, low.array(unsigned(1)))
    total = low.elementwise("Add", fraction_part, number(implied))
    positive = low.elementwise("Mul", total, Tensor(size, exponent.axes, x.shape, np.dtype(numbers)))
    negative = Tensor(low.cast(field(kind.bits - 1, 1).value, np.bool_), x.axes, x.shape, np.dtype(np.bool_))
    made = low.elementwise("Where", negative, low.elementwise("Neg", positive), positive, dtype=numbers)
    return Tensor(low.cast(made.value, dtype), made.axes, x.shape, dtype)


def _mantissa_below_two(bits: ir.Value, kind: Any) -> ir.Value | None:
    """Return m if bits are ``m | bits of 1.0``, and m the result of a right shift to the mantissa's bits; None
    otherwise."""
    node = _uncast(bits)
    if node is None or node.op_type != "BitwiseOr":
        return None
    mantissa, ones = node.inputs
    shift = _uncast(mantissa)
    one = int(np.ones((), kind.dtype).view(f"uint{kind.bits}"))
    if shift is None or shift.op_type != "BitShift" or (_constant(ones), _constant(shift.inputs[1])) != (
        one, kind.bits - kind.nmant
    ):  # fmt: skip
        return None
    return mantissa if shift.attributes["direction"].as_string() == "RIGHT" else None


def _uncast(value: ir.Value | None) -> ir.Node | None:
    """Return the node that makes a value, before casts between integers."""
    node = None if value is None else value.producer()
    return _uncast(node.inputs[0]) if node is not None and node.op_type == "Cast" else node


def _constant(value: ir.Value | None) -> object:
    return None if value is None or value.const_value is None else value.const_value.numpy().tolist()
