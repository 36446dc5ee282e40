"""Iteration spaces of groups: the axes of a group's elements, and the strides of each value over them.

A group computes `size` elements. If all its values have that many, or one, a single loop suffices. A broadcast value
requires the elements to be divided into axes; adjacent axes along which every value behaves alike are merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]
Strides: TypeAlias = tuple[int, ...]
"""Distance in elements of one step along each axis; 0 along an axis over which a value is repeated."""


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


def strides(shape: Shape, out: Shape, extents: Sequence[int]) -> Strides:
    """Return the strides of a value of `shape`, broadcast to `out`, over axes whose cuts include this broadcast's."""
    left, step, found = [list(run) for run in runs(shape, out)], 1, []
    for extent in reversed(extents):
        size, moves = left[-1] if left else (1, False)
        if extent == 1:
            found.append(0)
            continue
        assert size % extent == 0
        found.append(step if moves else 0)
        step *= extent if moves else 1
        left[-1][0] = size // extent
        if left[-1][0] == 1:
            left.pop()
    return tuple(reversed(found))


def full(extents: Sequence[int]) -> Strides:
    """Return the strides of a value that has all elements."""
    return tuple(prod(extents[i + 1 :]) for i in range(len(extents)))


def of_rows(extents: Sequence[int]) -> Strides:
    """Return the strides of a value that has one element for each row, the innermost axis."""
    return (*full(extents[:-1]), 0)
