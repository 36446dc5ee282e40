"""Nodes that only move elements, Transpose, Slice, Split and Expand: index arithmetic of the kernels that read them.

A kernel reads such a node's input with other strides, so that the moved copy has no buffer and takes no time. A Split
moves a piece into each of its outputs; `nodes` divides it into nodes with one output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Final

import onnx

from onnx_remat.fuse import spaces
from onnx_remat.fuse.spaces import Steps
from onnx_remat.ir.graph import attributes
from onnx_remat.ir.opsets import is_op
from onnx_remat.ir.shapes import Tensor

MOVES: Final = frozenset({"Expand", "Slice", "Split", "Transpose"})
"""Operators that only move elements."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One output of a Split, as a node of its own.

    Attributes
    ----------
    node : onnx.NodeProto
        The Split.
    writes : tuple of str
        The output.
    """

    node: onnx.NodeProto
    writes: tuple[str, ...]
    captured: tuple[str, ...] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.node.input[0],)


@dataclass(frozen=True, slots=True)
class Move:
    """Where the elements of a result lie in an input: at `offset`, with `steps`."""

    offset: int
    steps: Steps


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a Slice begins in its input, and extent and stride of each axis of its result."""

    offset: int
    axes: Steps


def move_of(
    node: onnx.NodeProto, made: str, tensors: Mapping[str, Tensor], integers: Mapping[str, tuple[int, ...]]
) -> Move | None:
    """Return what a node does; None if it does not only move elements, or its arguments are unknown.

    Parameters
    ----------
    node : onnx.NodeProto
    made : str
        The output.
    tensors : mapping of str to Tensor
    integers : mapping of str to tuple of int
        Known vectors of integers.
    """
    if not is_op(node, *MOVES) or any(name and name not in integers for name in node.input[1:]):
        return None
    shape, result = tensors[node.input[0]].shape, tensors[made].shape
    values = attributes(node)
    strides = spaces.full(shape)
    if node.op_type == "Transpose":
        order = values.get("perm") or range(len(shape))[::-1]
        return Move(0, spaces.merged([(shape[axis], strides[axis]) for axis in order]))
    if node.op_type == "Expand":
        return Move(0, spaces.steps(shape, result))
    if node.op_type == "Split":
        axis = int(values.get("axis", 0)) % len(shape)
        extents = [tensors[name].shape[axis] for name in node.output]
        start = list(accumulate(extents, initial=0))[list(node.output).index(made)]
        return Move(start * strides[axis], spaces.merged(list(zip(result, strides, strict=True))))
    cut = slice_of(node, shape, result, integers)
    return None if cut is None else Move(cut.offset, spaces.merged(cut.axes))


def slice_of(
    node: onnx.NodeProto, shape: Sequence[int], result: Sequence[int], integers: Mapping[str, tuple[int, ...]]
) -> Cut | None:
    """Return what a Slice of a value of a shape leaves; None if it goes backwards, or its arguments are unknown."""
    values = attributes(node)
    given = [integers.get(name) if name else None for name in node.input[1:]]
    if any(name and found is None for name, found in zip(node.input[1:], given, strict=True)):
        return None
    names = ("starts", "ends", "axes", "steps")
    starts, ends, axes, steps = (
        values.get(name, ()) if found is None else found for name, found in zip_longest(names, given)
    )
    if not len(starts) == len(ends) > 0:
        return None
    strides = list(spaces.full(tuple(shape)))
    offset, extents = 0, list(shape)
    count = len(starts)
    for axis, start, end, step in zip(axes or range(count), starts, ends, steps or [1] * count, strict=True):
        extent, axis = shape[axis], axis % len(shape)
        if step < 1:
            return None
        first, last = (min(max(at + extent if at < 0 else at, 0), extent) for at in (start, end))
        extents[axis] = max(0, -(-(last - first) // step))
        offset += first * strides[axis]
        strides[axis] *= step
    return Cut(offset, tuple(zip(extents, strides, strict=True))) if extents == list(result) else None
