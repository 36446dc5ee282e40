"""Gradient rules of ops that pick, scatter and move entries."""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx_ir as ir

from ..constants import static
from ..dims import dims
from .parts import place, scatter, sum_type
from .registry import Grads, RuleInput, rule


@rule("TopK")
def top_k(s: RuleInput) -> Grads:
    t = s.t
    return {0: lambda: scatter(t, s.shape(), s.node.outputs[1], s.full, s.axis())}


@rule("OneHot")
def one_hot(s: RuleInput) -> Grads:
    """Return the adjoint of both values: the sums over the entries that have each."""
    t, axes = s.t, range(len(dims(s.y)))

    def to_values() -> ir.Value:
        sums = []
        for kept in ([1, 0], [0, 1]):
            values = t.constant(np.asarray(kept, s.dtype(2).numpy()))
            where = t.op("OneHot", s.x(0), s.x(1), values, shape=dims(s.y), dtype=s.dtype(2),
                         axis=s.attribute("axis"))  # fmt: skip
            sums.append(t.unsqueeze(t.sum(t.mul(s.full, where), axes, keepdims=False), [0]))
        return t.op("Concat", *sums, shape=(2,), axis=0)

    return {0: lambda: None, 1: lambda: None, 2: to_values}


@rule("Range")
def arithmetic_sequence(s: RuleInput) -> Grads:
    """Return the adjoints of first entry and difference; the limit only decides how many entries there are."""
    t, count = s.t, dims(s.y)

    def to_difference() -> ir.Value:
        ones = t.expand(t.scalar(1, s.y), count)
        steps = t.op("CumSum", ones, t.constant(np.int64(0)), shape=count, exclusive=1)
        return t.sum(t.mul(s.full, steps), [0], keepdims=False)

    return {0: lambda: t.sum(s.full, [0], keepdims=False), 1: lambda: None, 2: to_difference}


@rule("GatherElements")
def gather_elements(s: RuleInput) -> Grads:
    return {0: lambda: scatter(s.t, s.shape(), s.x(1), s.full, s.axis())}


@rule("ScatterElements")
def scatter_elements(s: RuleInput) -> Grads:
    t, where, axis, reduction = s.t, s.x(1), s.axis(), s.attribute("reduction", "none")
    if reduction not in ("none", "add"):
        s.refuse(f"reduction {reduction!r} is not supported")

    def to_data() -> ir.Value:
        if reduction == "add":
            return s.g
        zeros = t.zeros(s.shape(2), s.dtype())
        return t.op("ScatterElements", s.full, where, zeros, shape=s.shape(), axis=axis)

    return {
        0: to_data,
        2: lambda: t.op("GatherElements", s.full, where, shape=s.shape(2), axis=axis),
    }


@rule("ScatterND")
def scatter_nd(s: RuleInput) -> Grads:
    t, where, reduction = s.t, s.x(1), s.attribute("reduction", "none")
    if reduction not in ("none", "add"):
        s.refuse(f"reduction {reduction!r} is not supported")

    def to_data() -> ir.Value:
        if reduction == "add":
            return s.g
        return t.op("ScatterND", s.full, where, t.zeros(s.shape(2), s.dtype()), shape=s.shape())

    return {0: to_data, 2: lambda: t.op("GatherND", s.full, where, shape=s.shape(2))}


@rule("GatherND")
def gather_nd(s: RuleInput) -> Grads:
    t, batch = s.t, s.attribute("batch_dims")

    def places() -> ir.Value:
        """Return the indices, each behind its own coordinates in the batch."""
        if not batch:
            return s.x(1)
        *outer, depth = s.known_shape(1)
        own = np.moveaxis(np.indices(outer[:batch]), 0, -1).reshape(*outer[:batch], *(1 for _ in outer[batch:]), batch)
        grid = t.expand(t.constant(own.astype(np.int64)), (*outer, batch))
        return t.op("Concat", grid, s.x(1), shape=(*outer, batch + depth), axis=-1)

    def gradient() -> ir.Value:
        zeros, g = t.zeros(s.shape(), sum_type(s.full)), t.cast(s.full, sum_type(s.full))
        return t.cast(t.op("ScatterND", zeros, places(), g, shape=s.shape(), reduction="add"), s.dtype())

    return {0: gradient}


@rule("Gather")
def gather(s: RuleInput) -> Grads:
    t, shape, axis = s.t, s.shape(), s.axis()
    where = s.x(1)

    def gradient() -> ir.Value:
        known = static(where)
        length = shape[axis]
        if known is not None and known.ndim == 0 and isinstance(length, int):
            return place(t, t.unsqueeze(s.full, [axis]), axis, int(known) % length, length)
        # The selected entries lie along one axis of the adjoint; ScatterElements adds repeated ones in order.
        count = len(dims(where))
        before, after = dims(s.y)[:axis], dims(s.y)[axis + count :]
        g = t.reshape(s.full, (*before, t.product(dims(where)), *after))
        if known is not None and isinstance(length, int) and known.size:
            places = known.reshape(-1) % length
            if np.array_equal(places, places[0] + np.arange(places.size)):
                return place(t, g, axis, int(places[0]), length)
        rows = t.reshape(where, (*(1 for _ in before), dims(g)[axis], *(1 for _ in after)))
        return scatter(t, shape, t.expand(rows, dims(g)), g, axis)

    return {0: gradient}


@rule("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def reshape(s: RuleInput) -> Grads:
    return {0: lambda: s.t.reshape(s.full, s.shape())}


@rule("Transpose")
def transpose(s: RuleInput) -> Grads:
    perm = s.attribute("perm") or list(reversed(range(len(s.shape()))))
    return {0: lambda: s.t.transpose(s.full, [list(perm).index(i) for i in range(len(perm))])}


@rule("Expand")
def expand(s: RuleInput) -> Grads:
    return {0: lambda: s.t.unbroadcast(s.g, dims(s.y), s.shape())}


@rule("Concat")
def concat(s: RuleInput) -> Grads:
    t, axis = s.t, s.axis(rank=len(dims(s.y)))
    lengths = [s.shape(i)[axis] for i in range(len(s.node.inputs))]

    parts: list[ir.Value] = []

    def part(slot: int) -> ir.Value:
        if len(lengths) == 1:
            return s.full
        if sum(s.wanted) == 1 and all(isinstance(n, int) for n in lengths[: slot + 1]):
            known = [int(n) for n in lengths[: slot + 1]]
            return t.slice(s.full, axis, sum(known[:-1]), known[-1])
        if not parts:
            parts.extend(t.many("Split", s.full, t.shape_vector(tuple(lengths)), outputs=len(lengths), axis=axis))
            for i, made in enumerate(parts):
                made.shape, made.type = s.x(i).shape, ir.TensorType(s.dtype())
        return parts[slot]

    return {slot: partial(part, slot) for slot in range(len(lengths))}


@rule("Split")
def split(s: RuleInput) -> Grads:
    t = s.t

    def gradient() -> ir.Value:
        parts = [
            t.zeros(dims(v), s.dtype()) if g is None else t.expand(g, dims(v))
            for v, g in zip(s.node.outputs, s.adjoints, strict=True)
        ]
        return parts[0] if len(parts) == 1 else t.op("Concat", *parts, shape=s.shape(), axis=s.axis())

    return {0: gradient}


@rule("Slice")
def slice_(s: RuleInput) -> Grads:
    """Return the adjoint of Slice: a padding if starts and lengths are known and steps are 1, else a scatter."""
    t, shape = s.t, s.shape()

    def gradient() -> ir.Value:
        starts = static(s.x(1))
        axes = static(s.x(3)) if s.has(3) else None if starts is None else np.arange(len(starts))
        steps = static(s.x(4)) if s.has(4) else None if starts is None else np.ones(len(starts))
        out = dims(s.y)
        if starts is None or axes is None or steps is None or any(steps != 1):
            return by_indices(s)
        g = s.full
        for start, axis in zip(starts.tolist(), (int(a) % len(shape) for a in axes), strict=True):
            length, taken = shape[axis], out[axis]
            if length == taken:
                continue
            if not isinstance(taken, int) or not isinstance(length, int):
                return by_indices(s)
            first = max(0, start + length) if start < 0 else start
            g = place(t, g, axis, min(first, length), length)
        return g

    return {0: gradient}


@rule("Pad")
def pad(s: RuleInput) -> Grads:
    """Return the adjoint of Pad: a crop for constant padding, else a scatter, as entries are read several times."""
    t = s.t

    def gradient() -> ir.Value:
        if s.attribute("mode", "constant") != "constant":
            return by_indices(s, ignored=2)
        known = static(s.x(1))
        cut = t.unary("Neg", s.x(1)) if known is None else t.constant(-known)
        axes = [None, s.x(3)] if s.has(3) else []
        return t.op("Pad", s.full, cut, *axes, shape=s.shape())

    return {0: gradient}


@rule("SpaceToDepth")
def space_to_depth(s: RuleInput) -> Grads:
    return {0: lambda: s.t.op("DepthToSpace", s.full, shape=s.shape(), blocksize=s.attribute("blocksize"))}


@rule("DepthToSpace")
def depth_to_space(s: RuleInput) -> Grads:
    t, block = s.t, s.attribute("blocksize")
    n, _, height, width = s.shape()
    channels = dims(s.y)[1]

    def gradient() -> ir.Value:
        if s.attribute("mode") != "CRD":
            return t.op("SpaceToDepth", s.full, shape=s.shape(), blocksize=block)
        blocks = t.reshape(s.full, (n, channels, height, block, width, block))
        return t.reshape(t.transpose(blocks, [0, 1, 3, 5, 2, 4]), s.shape())

    return {0: gradient}


@rule("Tile")
def moved(s: RuleInput) -> Grads:
    return {0: lambda: by_indices(s)}


@rule("ReverseSequence")
def reverse_sequence(s: RuleInput) -> Grads:
    """Return the adjoint of ReverseSequence, which undoes itself."""
    attributes = {name: a.value for name, a in s.node.attributes.items()}
    return {0: lambda: s.t.op("ReverseSequence", s.full, s.x(1), shape=s.shape(), **attributes)}


@rule("Trilu")
def trilu(s: RuleInput) -> Grads:
    k = s.node.inputs[1] if s.has(1) else None
    return {0: lambda: s.t.op("Trilu", s.full, k, shape=s.shape(), upper=s.attribute("upper"))}


def by_indices(s: RuleInput, ignored: int | None = None) -> ir.Value:
    """Return the adjoint of an op that only moves entries: apply the op to entry numbers, and scatter by them.

    The input of slot `ignored` has no influence, and may be of a type that entry numbers cannot have.
    """
    t, shape = s.t, s.shape()
    entries, rows = t.product(shape), t.product(dims(s.y))
    if isinstance(entries, int) and entries <= _MANY:
        numbers = t.constant(np.arange(entries, dtype=np.int64).reshape([int(d) for d in shape]))
    else:
        length = t.op("Squeeze", t.shape_vector((entries,)), shape=())
        first, step = t.constant(np.int64(0)), t.constant(np.int64(1))
        numbers = t.reshape(t.op("Range", first, length, step, shape=(entries,)), shape)
    attributes = {name: a.value for name, a in s.node.attributes.items()}
    rest = [None if slot == ignored else value for slot, value in enumerate(s.node.inputs) if slot]
    sent = t.op(s.node.op_type, numbers, *rest, shape=dims(s.y), **attributes)
    made = scatter(t, (entries,), t.reshape(sent, (rows,)), t.reshape(s.full, (rows,)), 0)
    return t.reshape(made, shape)


_MANY = 4096  # from this many on, the run computes the entry numbers
