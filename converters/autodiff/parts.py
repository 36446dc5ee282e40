"""Adjoints that are zero except for one stretch of an axis: several are concatenated, not padded and added."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..dims import Dims, dims
from ..tape import Tape

_STRETCHES = "onnx_remat.stretches"
"""Key of value metadata (in memory): the `Stretches` of a padded adjoint, or of a sum of padded adjoints."""


@dataclass(frozen=True, slots=True)
class Stretches:
    """The nonzero stretches of an adjoint along an axis: start and value of each, in order, without overlap."""

    axis: int
    parts: tuple[tuple[int, ir.Value], ...]


def place(t: Tape, g: ir.Value, axis: int, start: int, length: int) -> ir.Value:
    """Return zeros of `length` along an axis, with `g` from `start` on."""
    return _padded(t, Stretches(axis, ((start, g),)), length)


def accumulate(t: Tape, a: ir.Value, b: ir.Value) -> ir.Value:
    """Return the sum of two adjoints of one value."""
    first, second = a.meta.get(_STRETCHES), b.meta.get(_STRETCHES)
    if first is None or second is None or first.axis != second.axis:
        return t.add(a, b)
    both = Stretches(first.axis, tuple(sorted((*first.parts, *second.parts), key=lambda part: part[0])))
    gaps = [start - end for (start, _), end in zip(both.parts[1:], _ends(both), strict=False)]
    if any(gap < 0 for gap in gaps):
        return t.add(a, b)
    if any(gaps):  # later adjoints may fill the gaps, and make this sum unused
        made = t.add(a, b)
        made.meta[_STRETCHES] = both
        return made
    length = dims(a)[both.axis]
    assert isinstance(length, int)
    return _padded(t, both, length)


def _ends(of: Stretches) -> list[int]:
    return [start + int(dims(part)[of.axis]) for start, part in of.parts]


def _padded(t: Tape, of: Stretches, length: int) -> ir.Value:
    """Return contiguous stretches as one value, surrounded by zeros."""
    start, g = of.parts[0]
    have = _ends(of)[-1] - start
    if len(of.parts) > 1:
        shape = dims(g)
        joined = (*shape[: of.axis], have, *shape[of.axis + 1 :])
        g = t.op("Concat", *(part for _, part in of.parts), shape=joined, axis=of.axis)
    if have == length:
        return g
    shape = dims(g)
    pads = np.zeros((2, len(shape)), np.int64)
    pads[:, of.axis] = start, length - start - have
    whole = (*shape[: of.axis], length, *shape[of.axis + 1 :])
    made = t.op("Pad", g, t.ints(*pads.reshape(-1).tolist()), shape=whole)
    made.meta[_STRETCHES] = of
    return made


def scatter(t: Tape, shape: Dims, where: ir.Value, g: ir.Value, axis: int) -> ir.Value:
    """Return zeros to which `g` is added at the indices along one axis."""
    return add_at(t, t.zeros(shape, sum_type(g)), where, g, axis)


def add_at(t: Tape, onto: ir.Value, where: ir.Value, g: ir.Value, axis: int) -> ir.Value:
    """Return `onto` to which `g` is added at the indices along one axis."""
    assert g.dtype is not None
    terms = t.cast(onto, sum_type(g)), where, t.cast(g, sum_type(g))
    return t.cast(t.op("ScatterElements", *terms, shape=dims(onto), axis=axis, reduction="add"), g.dtype)


def sum_type(g: ir.Value) -> ir.DataType:
    """Return the type in which a scatter adds values: float32 for 16 bits, which ONNX Runtime's CPU does not add."""
    assert g.dtype is not None
    return ir.DataType.FLOAT if g.dtype.bitwidth == 16 else g.dtype
