"""Iteration spaces of groups: the axes of a group's elements, and the position of each value over them.

A group computes `size` elements. If all its values have that many, or one, a single loop suffices. A broadcast or moved
value requires the elements to be divided into axes; adjacent axes along which every value behaves alike are merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd, prod
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]
Strides: TypeAlias = tuple[int, ...]
"""Distance in elements of one step along each axis; 0 along an axis over which a value is repeated."""
Steps: TypeAlias = tuple[tuple[int, int], ...]
"""How a node reads a value: for each axis of what it reads, outermost first, its extent and stride."""


@dataclass(frozen=True, slots=True)
class Position:
    """Index of the element of a value that belongs to an element of a group: `offset`, and strides over the axes."""

    offset: int
    strides: Strides


def is_broadcast(shape: Shape, out: Shape) -> bool:
    """Whether a value has more than one element, and fewer than the result that it is broadcast to."""
    return 1 < prod(shape) < prod(out)


def runs(shape: Shape, out: Shape) -> list[tuple[int, bool]]:
    """Return a broadcast as runs of axes of `out`, outermost first: elements, and whether the value varies along it.

    Examples
    --------
    >>> runs((3, 1, 1), (5, 3, 2, 2))
    [(5, False), (3, True), (4, False)]
    """
    own = (1,) * (len(out) - len(shape)) + shape
    found: list[tuple[int, bool]] = []
    for extent, mine in zip(out, own, strict=True):
        if extent == 1:
            continue
        moves = mine > 1
        if found and found[-1][1] == moves:
            found[-1] = found[-1][0] * extent, moves
        else:
            found.append((extent, moves))
    return found


def cuts(shape: Shape, out: Shape) -> set[int]:
    """Return where a broadcast divides the elements of `out`: the number of elements inside each of its runs."""
    inside, found = 1, set()
    for extent, _ in reversed(runs(shape, out)):
        inside *= extent
        found.add(inside)
    return found


def axes(size: int, cut: Iterable[int]) -> tuple[int, ...]:
    """Return the extents of the axes, outermost first, for a set of cuts of `size` elements; none if they do not nest.

    Examples
    --------
    >>> axes(24, {4, 12}), axes(24, {4, 6})
    ((2, 3, 4), ())
    """
    points = sorted({1, size, *cut})
    if any(above % below for below, above in pairwise(points)):
        return ()
    return tuple(above // below for below, above in pairwise(points))[::-1] or (1,)


def steps(shape: Shape, out: Shape) -> Steps:
    """Return how a value is read that is broadcast to `out`.

    Examples
    --------
    >>> steps((3, 1, 1), (5, 3, 2, 2))
    ((5, 0), (3, 1), (4, 0))
    """
    found, stride = [], 1
    for extent, moves in reversed(runs(shape, out)):
        found.append((extent, stride if moves else 0))
        stride *= extent if moves else 1
    return tuple(reversed(found))


def merged(axes: Iterable[tuple[int, int]]) -> Steps:
    """Return axes without those of one element, and with adjacent ones merged where that is possible.

    Examples
    --------
    >>> merged([(2, 12), (1, 12), (3, 4), (4, 1)])
    ((24, 1),)
    """
    found: list[tuple[int, int]] = []
    for extent, stride in axes:
        if extent == 1:
            continue
        if found and found[-1][1] == stride * extent:
            found[-1] = found[-1][0] * extent, stride
        else:
            found.append((extent, stride))
    return tuple(found)


def missing_cuts(read: Steps, at: Position, extents: Sequence[int]) -> set[int]:
    """Return the cuts that `composed` lacks: where an axis of a group crosses a border between axes of a reader."""
    found, inside, border = set(), 1, 1
    borders = []
    for extent, _ in reversed(read):
        border *= extent
        borders.append(border)
    for extent, stride in zip(reversed(extents), reversed(at.strides), strict=True):
        for border in borders:
            if stride and stride < border < stride * extent and border % stride == 0:
                found.add(inside * (border // stride))
        inside *= extent
    return found


def composed(read: Steps, offset: int, at: Position, extents: Sequence[int]) -> Position | None:
    """Return the position of a value that a node at a position reads; None if it has no constant strides.

    Examples
    --------
    >>> transposed = (3, 1), (2, 3)  # a matrix of 2 x 3
    >>> composed(transposed, 0, Position(0, (2, 1)), (3, 2))
    Position(offset=0, strides=(1, 3))
    """
    digits, inside = [], 1  # of an index of the node: what one of a digit counts, its base, and its stride
    for extent, stride in reversed(read):
        digits.append((inside, extent, stride))
        inside *= extent
    if at.offset >= inside:
        return None
    used = [at.offset // each % extent for each, extent, _ in digits]
    offset += sum(digit * stride for digit, (_, _, stride) in zip(used, digits, strict=True))
    strides: list[int] = []
    for extent, stride in zip(extents, at.strides, strict=True):
        if extent == 1 or not stride:
            strides.append(0)
            continue
        i = max((i for i, (each, _, _) in enumerate(digits) if each <= stride), default=-1)
        if i < 0 or stride % digits[i][0]:
            return None
        step = stride // digits[i][0]
        used[i] += step * (extent - 1)
        strides.append(step * digits[i][2])
    if any(digit >= extent for digit, (_, extent, _) in zip(used, digits, strict=True)):
        return None
    return Position(offset, tuple(strides))


def inverse(read: Steps) -> Steps:
    """Return the inverse of a reading in which each element is read once.

    Examples
    --------
    >>> inverse(((3, 1), (2, 3)))  # a matrix of 2 x 3 transposed to 3 x 2
    ((2, 1), (3, 2))
    """
    inside, found = 1, []
    for extent, stride in reversed(read):
        found.append((stride, extent, inside))
        inside *= extent
    return merged((extent, step) for _, extent, step in sorted(found, reverse=True))


def strides(shape: Shape, out: Shape, extents: Sequence[int]) -> Strides:
    """Return the strides of a value of `shape`, broadcast to `out`, over axes whose cuts include this broadcast's."""
    found = composed(steps(shape, out), 0, Position(0, full(extents)), extents)
    assert found is not None
    return found.strides


LINE, SETS, WAYS = 16, 64, 8
"""Of a core's first cache, at least: elements of a line, sets of lines, and lines that it holds of each set."""


def lines(read: Steps) -> tuple[int, int]:
    """Return how many cache lines are read in turns, before further elements of the first one are read.

    Also return how many of them the cache holds: lines at distances like 4096 elements all belong to one set.

    Examples
    --------
    >>> lines(((60, 1), (32, 60))), lines(((32, 60), (60, 1)))  # a matrix of 32 x 60, transposed and as it lies
    ((32, 512), (1, 512))
    """
    inside, held = 1, SETS * WAYS
    for extent, stride in reversed(read):
        if 0 < stride < LINE:
            break
        inside *= extent if stride else 1
        if stride and stride % LINE == 0:
            held = min(held, SETS // gcd(SETS, stride // LINE) * WAYS)
    return inside, held


def is_bijective(at: Position, extents: Sequence[int]) -> bool:
    """Whether a value has an element for each element of a group, and no more."""
    if at.offset or any(extent > 1 and not stride for extent, stride in zip(extents, at.strides, strict=True)):
        return False
    last = sum((extent - 1) * stride for extent, stride in zip(extents, at.strides, strict=True))
    return last == prod(extents) - 1


def full(extents: Sequence[int]) -> Strides:
    """Return the strides of a value that has all elements."""
    return tuple(prod(extents[i + 1 :]) for i in range(len(extents)))


def of_rows(extents: Sequence[int], outer: int = 0, inner: int = 1) -> Strides:
    """Return the strides of a value that has one element for each row, which are `outer` and `inner` axes.

    Examples
    --------
    >>> of_rows((5, 3, 4)), of_rows((5, 3, 4), outer=1)
    ((3, 1, 0), (0, 1, 0))
    """
    return (*[0] * outer, *full(extents[outer : len(extents) - inner]), *[0] * inner)
