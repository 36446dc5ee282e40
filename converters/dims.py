"""Shapes as tuples of sizes and symbols, and their broadcasting."""

from __future__ import annotations

from typing import TypeAlias

import onnx_ir as ir

from onnx_remat.errors import ConversionError
from onnx_remat.messages import Setting

Dim: TypeAlias = int | str
Dims: TypeAlias = tuple[Dim, ...]


def dims(value: ir.Value) -> Dims:
    """Return the sizes and symbols of a value; equal symbols stand for equal sizes.

    Raises
    ------
    ConversionError
        The rank is unknown.
    """
    if value.shape is None:
        value = _origin(value)
        node = value.producer()
        made = f"made by {node.op_type} node {node.name!r}" if node else "a graph input"
        fix = "the shape of {!r} ({}) is unknown: fix the symbolic sizes with {}, or add value_info for it"
        raise ConversionError(fix, value.name, made, Setting("dims"))
    return tuple(d if isinstance(d, int) else str(d.value) for d in value.shape)


def _origin(value: ir.Value) -> ir.Value:
    """Return the value of unknown rank from which that of this one follows: every input of its node has a shape."""
    while (node := value.producer()) is not None:
        before = next((v for v in node.inputs if v is not None and v.shape is None), None)
        if before is None:
            break
        value = before
    return value


def sizes(value: ir.Value | None) -> Dims | None:
    """Return `dims` of a value if every dimension has a size or a symbol; None otherwise."""
    if value is None or value.shape is None or any(not isinstance(d, int) and d.value is None for d in value.shape):
        return None
    return dims(value)


def is_static(shape: Dims) -> bool:
    """
    >>> is_static((2, 3)), is_static(("batch", 3))
    (True, False)
    """
    return all(isinstance(d, int) for d in shape)


def size(shape: Dims) -> int | None:
    """Return the number of elements; None if a size is unknown.

    >>> size((2, 3)), size(()), size(("batch", 3))
    (6, 1, None)
    """
    total = 1
    for d in shape:
        if not isinstance(d, int):
            return None
        total *= d
    return total


def broadcast(a: Dims, b: Dims) -> Dims:
    """Return the shape of a binary op's output; two different symbols, either of which may be 1, give a new symbol.

    >>> broadcast((8, 1, "t"), (5, 1))
    (8, 5, 't')
    >>> broadcast(("n",), ("m",))
    ('max(n,m)',)
    """
    rank = max(len(a), len(b))
    a, b = ((1,) * (rank - len(s)) + s for s in (a, b))
    return tuple(_wider(x, y) for x, y in zip(a, b, strict=True))


def _wider(a: Dim, b: Dim) -> Dim:
    if a == b or b == 1:
        return a
    if a == 1 or isinstance(b, int):
        return b
    return a if isinstance(a, int) else f"max({a},{b})"


def reduced_axes(wide: Dims, narrow: Dims) -> list[int] | None:
    """Return the axes of `wide` along which a value of shape `narrow` was broadcast; None if they depend on the run.

    >>> reduced_axes((8, 5, 3), (5, 1))
    [0, 2]
    >>> reduced_axes(("n", 3), ("m", 3)) is None
    True
    """
    lead = len(wide) - len(narrow)
    axes = list(range(lead))
    for axis, (w, n) in enumerate(zip(wide[lead:], narrow, strict=True), start=lead):
        if w == n or (isinstance(n, int) and n > 1):
            continue
        if n != 1:
            return None
        axes.append(axis)
    return axes
