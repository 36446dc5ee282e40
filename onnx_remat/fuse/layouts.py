"""How a value that Transposes and Reshapes make lies in the value that they begin with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Atom = tuple[int, int, int]
"""Axis of the origin, stride along it, number of entries."""

Layout = tuple[tuple[Atom, ...], ...]
"""Atoms by axis of the value, the outermost first."""

Wanted = Callable[[tuple[int, ...]], Layout]
"""A layout by the origin's shape."""


def plain(shape: Sequence[int]) -> Layout:
    """Return the layout of the origin itself."""
    return tuple(((axis, 1, size),) for axis, size in enumerate(shape))


def joined(atoms: Sequence[Atom]) -> tuple[Atom, ...]:
    """Return atoms without those of one entry, neighbours joined."""
    made: list[Atom] = []
    for axis, stride, size in atoms:
        if size == 1:
            continue
        if made and made[-1][0] == axis and made[-1][1] == stride * size:
            made[-1] = (axis, stride, made[-1][2] * size)
        else:
            made.append((axis, stride, size))
    return tuple(made)


def flat(layout: Layout) -> tuple[Atom, ...]:
    """Return the order of the elements, whatever the value's shape."""
    return joined([atom for axis in layout for atom in axis])


def reshaped(layout: Layout, shape: Sequence[int]) -> Layout | None:
    """Return the layout of the same elements in another shape; None if an axis is cut at no multiple, or is empty."""
    if not all(entries for axis in layout for _, _, entries in axis):
        return None
    atoms = [atom for axis in layout for atom in axis if atom[2] != 1][::-1]
    made = []
    for size in shape:
        axis: list[Atom] = []
        while size > 1:
            if not atoms:
                return None
            origin, stride, entries = atoms.pop()
            if size % entries == 0:
                axis.append((origin, stride, entries))
                size //= entries
            elif entries % size == 0:
                axis.append((origin, stride * (entries // size), size))
                atoms.append((origin, stride, entries // size))
                size = 1
            else:
                return None
        made.append(tuple(axis))
    return tuple(made)


def equal(one: Layout | None, other: Layout) -> bool:
    """Return whether two layouts have the same shape and the same elements at each place."""
    return one is not None and [joined(axis) for axis in one] == [joined(axis) for axis in other]
