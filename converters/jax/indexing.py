"""Lowerings of gather, scatter, dynamic slices, sort and top_k."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from jax import lax
from jax.extend import core

from onnx_remat.errors import ConversionError

from .lower import Lowering, Tensor, dtype_of, lowering, shape_of
from .structure import concatenated, counting, sliced

_REDUCTIONS = {
    "scatter": "none", "scatter-add": "add", "scatter-sub": "add", "scatter-mul": "mul", "scatter-min": "min",
    "scatter-max": "max",
}  # fmt: skip
_Numbers = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int], Sequence[int]]
"""JAX's dimension numbers: offset, collapsed, indexed and batching axes, and batching axes of the indices."""

_OUTSIDE = np.int64(2**40)
"""Index beyond every array."""


@lowering("dynamic_slice")
def dynamic_slice(low: Lowering, eqn: core.JaxprEqn, x: Tensor, *starts: Tensor) -> Tensor:
    """Lower each axis to a static slice if its start is known, else to a Gather of consecutive elements."""
    sizes = [int(n) for n in eqn.params["slice_sizes"]]
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        last = x.shape[axis] - size
        if last == 0:
            continue
        rank = len(x.shape)
        if start.constant is not None:
            first = int(np.clip(start.constant, 0, last))
            limits = [first + size if a == axis else x.shape[a] for a in range(rank)]
            x = sliced(low, x, [first if a == axis else 0 for a in range(rank)], limits, [1] * rank)
            continue
        shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
        if axis not in x.axes or x.physical[x.axes.index(axis)] == 1:
            x = x.relabelled(x.axes, shape)
            continue
        j = x.axes.index(axis)
        first_value = _clamped(low, low.full(start), last)
        where = low.op("Add", low.reshape(first_value, (1,)), counting(low, size, np.int64), shape=(size,))
        physical = [size if i == j else n for i, n in enumerate(x.physical)]
        value = low.op("Gather", x.value, where, shape=physical, axis=j)
        x = Tensor(value, x.axes, shape, x.dtype)
    return x


def _clamped(low: Lowering, index: ir.Value, last: int) -> ir.Value:
    """Return `index` as int64, clamped between 0 and `last`."""
    index = low.cast(index, np.int64)
    zero, end = low.emit.constant(np.int64(0)), low.emit.constant(np.int64(last))
    shape = shape_of(index)
    return low.op("Min", low.op("Max", index, zero, shape=shape), end, shape=shape)


@lowering("dynamic_update_slice")
def dynamic_update_slice(low: Lowering, eqn: core.JaxprEqn, x: Tensor, update: Tensor, *starts: Tensor) -> Tensor:
    """Lower to a ScatterND of rows, the axes that are updated whole."""
    if update.shape == x.shape:
        return update
    lead = 1 + max(axis for axis, n in enumerate(update.shape) if n != x.shape[axis])
    grid = low.emit.constant(np.moveaxis(np.indices(update.shape[:lead]), 0, -1).astype(np.int64))
    first = [
        low.reshape(_clamped(low, low.full(starts[axis]), x.shape[axis] - update.shape[axis]), (1,))
        for axis in range(lead)
    ]
    offset = first[0] if lead == 1 else low.op("Concat", *first, shape=(lead,), axis=0)
    where = low.op("Add", grid, offset, shape=shape_of(grid))
    value = low.op("ScatterND", low.filled(x, range(len(x.shape)), where), where, low.full(update), shape=x.shape)
    return Tensor(value, tuple(range(len(x.shape))), x.shape, x.dtype)


class _Where:
    """Positions that a gather reads or a scatter writes, in the layout of GatherND and ScatterND.

    The array has batching axes, indexed axes and whole axes; GatherND requires this order. A window larger than one
    along an indexed axis adds an axis to the index.

    Attributes
    ----------
    order : list of int
        The array's axes: batching, indexed, whole.
    value : onnx_ir.Value
        Indices in int64, of shape (*batching, *others, *windows, len(indexed)).
    result : list of int
        Axes of the gathered or scattered array, in the order in which GatherND makes them.

    Windows outside the array stop the run, are moved into it ("clip"), or begin at the end of the first axis in the
    index map ("drop").
    """

    def __init__(
        self, low: Lowering, x: Tensor, indices: Tensor, sizes: Sequence[int], numbers: _Numbers,
        result_rank: int, outside: Literal["stop", "clip", "drop"],
    ) -> None:  # fmt: skip
        offsets, collapsed, index_map, batching, index_batching = ([int(a) for a in axes] for axes in numbers)
        self.low, self.batching = low, len(batching)
        self.sizes = sizes
        indexed = sorted([*index_map, *(a for a, n in enumerate(sizes) if n != x.shape[a] and a not in index_map
                                        and a not in batching and a not in collapsed)])  # fmt: skip
        indexed += [a for a in collapsed if a not in indexed]
        indexed.sort()
        whole = [a for a in range(len(x.shape)) if a not in batching and a not in indexed]
        self.order = [*batching, *indexed, *whole]
        self.indexed = indexed
        rank = len(indices.shape) - 1
        others = [a for a in range(rank) if a not in index_batching]
        lead = [*index_batching, *others]
        windows = [a for a in indexed if a not in collapsed]
        spans = [int(sizes[a]) for a in windows]
        # Axes of the result: the axes of the indices take the places that the offsets leave, in order.
        free = [a for a in range(result_rank) if a not in offsets]
        window_axes = dict(zip([a for a in range(len(x.shape)) if a not in collapsed and a not in batching], offsets,
                               strict=True))  # fmt: skip
        self.result = [free[a] for a in lead] + [window_axes[a] for a in windows] + [window_axes[a] for a in whole]
        self.shape = tuple(indices.shape[a] for a in lead)
        columns = low.full(indices, (*lead, rank))
        columns = low.cast(columns, np.int64)
        if outside == "stop" and (indices.constant is None or (indices.constant < 0).any()):
            columns = self._never_negative(columns)
        elif outside == "drop":
            columns = self._dropped(columns, _last(x, sizes, index_map), x.shape[index_map[0]])
        columns = self._in_order(columns, index_map, indexed)
        if outside == "clip":
            last = low.emit.constant(np.asarray([x.shape[a] - sizes[a] for a in indexed], np.int64))
            shape = shape_of(columns)
            columns = low.op("Max", columns, low.emit.constant(np.int64(0)), shape=shape)
            columns = low.op("Min", columns, last, shape=shape)
        if prod(spans) > 1 or spans:
            grid = np.zeros((*spans, len(indexed)), np.int64)
            for position, axis in enumerate(windows):
                grid[..., indexed.index(axis)] = np.indices(spans)[position]
            columns = low.reshape(columns, (*self.shape, *[1] * len(spans), len(indexed)))
            if grid.any():
                shape = (*self.shape, *spans, len(indexed))
                columns = low.op("Add", columns, low.emit.constant(grid), shape=shape)
            self.shape = (*self.shape, *spans)
        self.value = columns

    def _never_negative(self, columns: ir.Value) -> ir.Value:
        """Return indices of which negative ones lie beyond the end: ONNX would count them from there.

        JAX has added the length where that is meant; the others are outside, and stop the run.
        """
        low, shape = self.low, shape_of(columns)
        outside = low.op("Less", columns, low.emit.constant(np.int64(0)), shape=shape, dtype=np.bool_)
        return low.op("Where", outside, low.emit.constant(_OUTSIDE), columns, shape=shape)

    def _dropped(self, columns: ir.Value, last: Sequence[int], end: int) -> ir.Value:
        """Return indices in which windows outside the array begin at the end of its first indexed axis."""
        low, shape = self.low, shape_of(columns)
        inside = low.reshape(_inside(low, columns, last), (*shape[:-1], 1))
        return low.op("Where", inside, columns, low.ints([end, *[0] * (len(last) - 1)]), shape=shape)

    def _in_order(self, columns: ir.Value, index_map: Sequence[int], indexed: Sequence[int]) -> ir.Value:
        """Return a column for each indexed axis, in their order; zero for those that start at zero."""
        if list(index_map) == list(indexed):
            return columns
        low, lead = self.low, shape_of(columns)[:-1]
        if set(index_map) != set(indexed):
            zero = low.op("Expand", low.ints([0]), low.ints([*lead, 1]), shape=(*lead, 1))
            columns = low.op("Concat", columns, zero, shape=(*lead, len(index_map) + 1), axis=-1)
        picks = [index_map.index(a) if a in index_map else len(index_map) for a in indexed]
        return low.op("Gather", columns, low.ints(picks), shape=(*lead, len(picks)), axis=len(lead))

    def along(self, x: Tensor) -> int | None:
        """Return the axis if this is numpy's take_along_axis (one index column, all other axes batching), else None."""
        if len(self.indexed) != 1 or len(self.order) != self.batching + 1 or len(self.shape) != self.batching + 1:
            return None
        return self.order[-1]

    def with_batch(self) -> ir.Value:
        """Return indices with a column for each batching axis, because ScatterND has no batching axes."""
        low, n = self.low, self.batching
        if not n:
            return self.value
        lead = shape_of(self.value)[:-1]
        grid = np.moveaxis(np.indices(lead[:n]), 0, -1).reshape(*lead[:n], *[1] * (len(lead) - n), n)
        columns = low.op("Expand", low.emit.constant(grid.astype(np.int64)), low.ints([*lead, n]), shape=(*lead, n))
        shape = (*lead, n + len(self.indexed))
        return low.op("Concat", columns, self.value, shape=shape, axis=len(lead))


@lowering("gather")
def gather(low: Lowering, eqn: core.JaxprEqn, x: Tensor, indices: Tensor) -> Tensor:
    """Lower to Gather, GatherElements or GatherND.

    Indices outside the array stop ONNX Runtime with an error, whereas JAX returns NaN. They behave as in JAX if the
    mode is clip, or fill with a given value. Those that a scatter drops are clipped, too, where they are promised to be
    inside: JAX's gradient of ``x.at[i].set(y)`` reads so at `i`, and XLA clips.
    """
    params, aval = eqn.params, eqn.outvars[0].aval
    numbers = params["dimension_numbers"]
    shape = tuple(int(n) for n in aval.shape)  # type: ignore[attr-defined]
    sizes = [int(n) for n in params["slice_sizes"]]
    if any(n == 0 for n in shape):
        return low.array(np.zeros(shape, x.dtype))
    fields = (numbers.offset_dims, numbers.collapsed_slice_dims, numbers.start_index_map,
              numbers.operand_batching_dims, numbers.start_indices_batching_dims)  # fmt: skip
    x = low.whole(x)
    mode, key = params["mode"], _key(x, indices, sizes, fields)
    fill = params["fill_value"] if mode == lax.GatherScatterMode.FILL_OR_DROP else None
    given = fill is not None and not _is_default(fill, x.dtype)
    dropped = mode == lax.GatherScatterMode.PROMISE_IN_BOUNDS and low.outside.get(key) == "drop"
    clip = given or dropped or mode == lax.GatherScatterMode.CLIP
    if not clip:
        low.outside[key] = "stop"
    where = _Where(low, x, indices, sizes, fields, len(shape), "clip" if clip else "stop")
    axis = where.along(x)
    if axis is not None:
        made = low.op("GatherElements", low.full(x, where.order), low.reshape(where.value, where.shape),
                      shape=where.shape, axis=where.batching)  # fmt: skip
        result = Tensor(made, tuple(where.result), shape, x.dtype)
    elif len(where.indexed) == 1 and not where.batching:
        result = _gather_along(low, x, where, shape)
    else:
        physical = [shape[a] for a in where.result]
        made = low.op("GatherND", low.full(x, where.order), where.value, shape=physical, batch_dims=where.batching)
        result = Tensor(made, tuple(where.result), shape, x.dtype)
    if not given:
        return result
    columns = low.cast(low.full(indices), np.int64)
    every = _inside(low, columns, _last(x, sizes, fields[2]))
    free = [a for a in range(len(shape)) if a not in fields[0]]
    inside = Tensor(every, tuple(free), tuple(n if a in free else 1 for a, n in enumerate(shape)), np.dtype(np.bool_))
    return low.elementwise("Where", inside, result, low.scalar(float(fill or 0), result), shape=shape, dtype=x.dtype)


def _is_default(fill: Any, dtype: np.dtype[Any]) -> bool:
    """Return whether this is JAX's default fill value: NaN, the smallest signed or the largest unsigned integer."""
    if dtype.kind in "iu":
        return bool(fill == (np.iinfo(dtype).min if dtype.kind == "i" else np.iinfo(dtype).max))
    return bool(fill != fill) or (dtype == np.bool_ and bool(fill))


def _gather_along(low: Lowering, x: Tensor, where: _Where, shape: tuple[int, ...]) -> Tensor:
    """Gather along the one indexed axis, at its position in the value."""
    (axis,) = where.indexed
    j = x.axes.index(axis)
    spread = len(where.shape)
    index = low.reshape(where.value, where.shape)
    # The index's axes in place of `axis`, and the array's other axes unchanged.
    whole = dict(zip(where.order[1:], where.result[spread:], strict=True))
    labels = [whole[a] for a in x.axes[:j]] + where.result[:spread] + [whole[a] for a in x.axes[j + 1 :]]
    made = low.op("Gather", x.value, index, shape=[shape[a] for a in labels], axis=j)
    return Tensor(made, tuple(labels), shape, x.dtype)


def _last(x: Tensor, sizes: Sequence[int], index_map: Sequence[int]) -> tuple[int, ...]:
    """Return the last index, in each column, of a window that is within the array."""
    return tuple(int(x.shape[a] - sizes[a]) for a in index_map)


def _inside(low: Lowering, columns: ir.Value, last: Sequence[int]) -> ir.Value:
    """Return, for each row of indices, whether the whole window is within the array."""
    shape = shape_of(columns)
    above = low.op("GreaterOrEqual", columns, low.emit.constant(np.int64(0)), shape=shape, dtype=np.bool_)
    below = low.op("LessOrEqual", columns, low.ints(last), shape=shape, dtype=np.bool_)
    both = low.op("And", above, below, shape=shape)
    return low.op("ReduceMin", both, low.ints([len(shape) - 1]), shape=shape[:-1], keepdims=0)


def _key(x: Tensor, indices: Tensor, sizes: Sequence[int], fields: _Numbers) -> tuple[object, ...]:
    """Return indices with the last ones inside the array, the key of `Lowering.outside`."""
    return indices.value, indices.axes, indices.shape, _last(x, sizes, fields[2])


def _may_leave(low: Lowering, x: Tensor, indices: Tensor, sizes: Sequence[int], fields: _Numbers) -> bool:
    """Return whether windows may lie outside the array: constants show it, and a gather has stopped the run if so."""
    if low.outside.get(_key(x, indices, sizes, fields)) == "stop" or 0 in indices.shape:
        return False
    known, axis = indices.constant, len(indices.shape) - 1
    if known is None:
        return True
    columns = np.moveaxis(known, indices.axes.index(axis), -1) if axis in indices.axes else known[..., None]
    return bool(((columns < 0) | (columns > np.asarray(_last(x, sizes, fields[2])))).any())


@lowering(*_REDUCTIONS)
def scatter(low: Lowering, eqn: core.JaxprEqn, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Lower to ScatterElements or ScatterND.

    Where JAX drops windows outside the array, they are written behind its end, and cut off.
    """
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    if eqn.primitive.name == "scatter" and params["update_jaxpr"] is not None:
        raise ConversionError("a function applied at indices (x.at[...].apply) has no lowering to ONNX: gather and set")
    if any(n == 0 for n in updates.shape):
        return x
    reduction = _REDUCTIONS[eqn.primitive.name]
    collapsed = [*numbers.inserted_window_dims]
    windows = [a for a in range(len(x.shape)) if a not in collapsed and a not in numbers.operand_batching_dims]
    sizes = [1] * len(x.shape)
    for axis, label in zip(windows, numbers.update_window_dims, strict=True):
        sizes[axis] = updates.shape[label]
    fields = (numbers.update_window_dims, collapsed, numbers.scatter_dims_to_operand_dims,
              numbers.operand_batching_dims, numbers.scatter_indices_batching_dims)  # fmt: skip
    mode, shape = params["mode"], x.shape
    clip = mode == lax.GatherScatterMode.CLIP
    drop = mode == lax.GatherScatterMode.FILL_OR_DROP and _may_leave(low, x, indices, sizes, fields)
    outside: Literal["stop", "clip", "drop"] = "clip" if clip else "drop" if drop else "stop"
    where = _Where(low, x, indices, sizes, fields, len(updates.shape), outside)
    if drop:
        low.outside[_key(x, indices, sizes, fields)] = "drop"
        x = _longer(low, x, fields[2][0], sizes)
    if eqn.primitive.name == "scatter-sub":
        updates = low.elementwise("Neg", updates)
    physical = [x.shape[a] for a in where.order]
    target, moved = low.filled(x, where.order, where.value), low.full(updates, where.result)
    if where.along(x) is not None:
        index = low.reshape(where.value, where.shape)
        value = low.op(
            "ScatterElements", target, index, moved, shape=physical, axis=where.batching, reduction=reduction
        )  # fmt: skip
    else:
        value = low.op("ScatterND", target, where.with_batch(), moved, shape=physical, reduction=reduction)
    made = Tensor(value, tuple(where.order), x.shape, x.dtype)
    return sliced(low, made, [0] * len(shape), shape, [1] * len(shape)) if drop else made


def _longer(low: Lowering, x: Tensor, axis: int, sizes: Sequence[int]) -> Tensor:
    """Return `x` with room for one window more at the end of an axis."""
    longer = [n + sizes[axis] if a == axis else n for a, n in enumerate(x.shape)]
    if axis not in x.axes:
        return x.relabelled(x.axes, longer)
    room = [sizes[axis] if a == axis else n for a, n in enumerate(x.shape)]
    return concatenated(low, [x, low.scalar(0, x).relabelled((), room)], axis)


@lowering("sort")
def sort(low: Lowering, eqn: core.JaxprEqn, *xs: Tensor) -> list[Tensor]:
    """Lower to TopK of all elements, which is stable; sort several keys from the least significant to the first."""
    axis, keys = eqn.params["dimension"], eqn.params["num_keys"]
    values = [low.full(x) for x in xs]
    shape = xs[0].shape
    for key in reversed(range(keys)):
        best, where = _top(low, values[key], axis, shape[axis], largest=False)
        values = [
            best if i == key else low.op("GatherElements", value, where, shape=shape, axis=axis)
            for i, value in enumerate(values)
        ]
    return [Tensor(value, tuple(range(len(shape))), shape, x.dtype) for value, x in zip(values, xs, strict=True)]


@lowering("top_k")
def top_k(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> list[Tensor]:
    axis, k = eqn.params.get("axis", len(x.shape) - 1), int(eqn.params["k"])
    best, where = _top(low, low.full(x), axis, k, largest=True)
    shape, axes = shape_of(best), tuple(range(len(x.shape)))
    index: Any = np.dtype(eqn.outvars[1].aval.dtype)  # type: ignore[attr-defined]
    return [Tensor(best, axes, shape, x.dtype), Tensor(low.cast(where, index), axes, shape, index)]


def _top(low: Lowering, value: ir.Value, axis: int, k: int, largest: bool) -> tuple[ir.Value, ir.Value]:
    """Return values and positions, in order; equal values keep their order."""
    dtype = dtype_of(value)
    wide = low.wider("TopK", dtype) or dtype
    if dtype.name == "uint64":
        raise ConversionError("sorting uint64 has no lowering to ONNX")
    shape = tuple(k if a == axis else n for a, n in enumerate(shape_of(value)))
    best, where = low.nodes(
        "TopK", low.cast(value, wide), low.ints([k]), results=[(shape, wide), (shape, np.int64)], axis=axis,
        largest=int(largest), sorted=1,
    )  # fmt: skip
    return low.cast(best, dtype), where
