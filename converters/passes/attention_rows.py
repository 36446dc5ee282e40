"""Blocks of rows of an attention whose mask hides many keys: the queries of a block need only the keys they may see.

Under a causal mask, the queries of a block see the keys up to the block's end: with eight blocks, a step makes 9/16 of
the scores. A score that its mask hides has no influence: its share after the softmax is 0, and so is its gradient.
`visible_blocks` proves that for the nodes of a region: it relates the axes of their values to queries and keys, and
follows what becomes of hidden scores, which are minus infinity (or as low) before the softmax and 0 behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import onnx_ir as ir

from ..values import static
from .attention_masks import Mask, constant, mask_of
from .attention_masks import number as number_of
from .attention_regions import ALONG, ENTRY_BY_ENTRY, Region, Shape, known
from .rowwise import REDUCE, RESHAPE, axes, number

Range = tuple[int, int]
Axes = tuple[int | None, int | None]
"""The axis of the queries and that of the keys of a value, None where it has none."""

Axis = tuple[int, int]
"""An axis of a value, by the value's identity: what torch's exporter makes compares as arrays do."""

LEAST_ROWS = 64
"""Rows of a block, at least: products of fewer are slow."""

_STEP = 16
"""Keys of a block begin and end at multiples of this, for aligned products."""

_MOST_AREA = 0.8
"""Share of the scores that blocks make, at most, to be worth their nodes."""


@dataclass(frozen=True, slots=True)
class Block:
    """Some rows of all scores, and the keys that one of them may see."""

    rows: Range
    keys: Range


@dataclass(frozen=True, slots=True)
class Rows:
    """How the rows of a region can be divided.

    Attributes
    ----------
    axes_of : dict of onnx_ir.Value to Axes
        Of all values of the region.
    blocks : tuple of Block
        In order of their rows.
    """

    axes_of: dict[ir.Value, Axes]
    blocks: tuple[Block, ...]

    def cuts(self, value: ir.Value, block: Block) -> dict[int, Range]:
        """Return the range of each axis of a value that a block needs; axes that it needs whole are absent."""
        queries, keys = self.axes_of[value]
        return {axis: limits for axis, limits in ((queries, block.rows), (keys, block.keys)) if axis is not None}

    def is_sum(self, value: ir.Value) -> bool:
        """Return whether a value has a share from each block, for the block's keys; otherwise blocks are its rows."""
        return self.axes_of[value][0] is None


def visible_blocks(region: Region, count: int) -> Rows | None:
    """Divide the rows of an attention into about `count` blocks.

    Returns
    -------
    Rows or None
        None if no mask hides a good share of the scores, whatever the inputs are, or if a hidden score might have an
        influence. Masks that were computed are kept for other regions, see `attention_masks.forget`.
    """
    scores = next(node.outputs[0] for node in region.forward if node.op_type == "MatMul")
    shape = known(scores)
    rows, columns = shape[-2:]
    blocks = min(count, rows // LEAST_ROWS)
    related = _Related(region)
    queries, keys = related.of(scores, len(shape) - 2), related.of(scores, len(shape) - 1)
    placed = related.places(queries, keys)
    if blocks < 2 or not related.sound or queries == keys or placed is None:
        return None
    own = set(region.nodes)
    masks = [mask for node in region.forward if (mask := mask_of(node, own)) is not None]
    if not all(mask.exact for mask in masks) and not (len(masks) == 1 and _numbers_hide(region, placed, masks[0])):
        masks = [mask for mask in masks if mask.exact]
    if not masks:
        return None
    seen = {mask.node: _seen(mask, placed, (rows, columns)) for mask in masks}
    least = min(seen.values(), key=np.count_nonzero)
    hiding = {node for node, each in seen.items() if not (each & ~least).any()}
    depth = min(mask.depth for mask in masks)
    if not (least.any(axis=0).all() and least.any(axis=1).all() and _Influence(region, placed, hiding, depth).none):
        return None
    found, begin = [], 0
    for place in range(blocks):
        end = begin + rows // blocks + (place < rows % blocks)
        (which,) = np.nonzero(least[begin:end].any(axis=0))
        last = min(ceil((int(which[-1]) + 1) / _STEP) * _STEP, columns)
        found.append(Block((begin, end), (int(which[0]) // _STEP * _STEP, last)))
        begin = end
    area = sum((block.rows[1] - block.rows[0]) * (block.keys[1] - block.keys[0]) for block in found)
    return Rows(placed, tuple(found)) if area <= _MOST_AREA * rows * columns else None


def _seen(mask: Mask, placed: dict[ir.Value, Axes], shape: Shape) -> np.ndarray:
    """Return which query may see which key in some text or head, as an array of this shape."""
    queries, keys = placed[mask.value]
    others = tuple(axis for axis in range(mask.shown.ndim) if axis not in (queries, keys))
    shown = np.asarray(mask.shown.any(axis=others))
    if queries is None or keys is None:
        shown = np.expand_dims(shown, 0 if queries is None else 1)
    elif queries > keys:
        shown = shown.T
    return np.broadcast_to(shown, shape)


def _numbers_hide(region: Region, placed: dict[ir.Value, Axes], mask: Mask) -> bool:
    """Return whether the numbers of a mask hide as well as minus infinity: each row of each matrix shows a score.

    Whatever else differs along a row is a constant, and small: an input might hide what the mask shows.
    """
    _, keys = placed[mask.value]
    if constant(mask.value) is None or keys is None or not mask.shown.any(axis=keys).all():
        return False
    own = set(region.nodes)
    read = (value for node in region.forward if node.op_type in _SHIFTS for value in node.inputs if value is not None)
    outside = [value for value in read if value.producer() not in own and placed[value][1] is not None]
    numbers = [constant(value) for value in outside if value is not mask.value]
    return all(each is not None and bool((np.abs(each * 1.0) <= _SMALL * mask.depth).all()) for each in numbers)


_SMALL = 1e-3
_ENOUGH = 1e4
"""What a hidden score must lie below others, once it is scaled, to leave 0 after the softmax."""
_SHIFTS = ("Add", "Sub", "Sum", "Where", "Max", "Min")


class _Related:
    """Classes of the axes of a region's values: axes that must be cut alike."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._class: dict[Axis, Axis] = {}
        self.sound = all(self._relate(node) for node in region.nodes)

    def of(self, value: ir.Value, axis: int) -> Axis:
        """Return the representative of an axis's class."""
        found = id(value), axis
        while (above := self._class.get(found, found)) != found:
            found = above
        return found

    def places(self, queries: Axis, keys: Axis) -> dict[ir.Value, Axes] | None:
        """Return the axes of queries and keys of each value; None if a value has two of one kind."""
        found: dict[ir.Value, Axes] = {}
        for node in self._region.nodes:
            for value in (*node.inputs, *node.outputs):
                shape = static(value)
                if value is None or shape is None or value in found:
                    continue
                of = [[a for a in range(len(shape)) if self.of(value, a) == kind] for kind in (queries, keys)]
                if any(len(each) > 1 for each in of):
                    return None
                found[value] = of[0][0] if of[0] else None, of[1][0] if of[1] else None
        return found

    def _join(self, a: ir.Value, axis: int, b: ir.Value, other: int) -> None:
        self._class[self.of(a, axis)] = self.of(b, other)

    def _relate(self, node: ir.Node) -> bool:
        """Relate the axes of a node's operands and results; return False for a node that is not known."""
        made, op, lead = node.outputs[0], node.op_type, self._region.stack.lead
        shape, read = known(made), [value for value in node.inputs if value is not None]
        rank, first = len(shape), read[0]
        if op in ENTRY_BY_ENTRY or op == "Expand":
            for value in read[:1] if op == "Expand" else read:
                sizes = known(value)
                for axis, size in enumerate(sizes, rank - len(sizes)):
                    if size == shape[axis] and axis >= 0:
                        self._join(value, axis - rank + len(sizes), made, axis)
            return True
        if op == "MatMul":
            a, b = len(known(read[0])), len(known(read[1]))
            self._join(read[0], a - 2, made, rank - 2)
            self._join(read[1], b - 1, made, rank - 1)
            self._join(read[0], a - 1, read[1], b - 2)
            return True
        if op == "Transpose":
            perm = list(node.attributes["perm"].as_ints()) if "perm" in node.attributes else [*range(rank)][::-1]
            for axis, source in enumerate(perm):
                self._join(first, source, made, axis)
            return True
        if op in (*ALONG, "Dropout"):
            for value in node.outputs:
                for axis in range(rank):
                    self._join(first, axis, value, axis)
            return True
        sizes = known(first)
        if op in REDUCE:
            over = axes(node) or []
            kept = [axis for axis in range(len(sizes)) if axis not in over]
            targets = kept if len(sizes) == rank else range(rank)
            for source, axis in zip(kept, targets, strict=True):
                self._join(first, source, made, axis)
            return True
        if op in RESHAPE:
            ours, theirs = lead(sizes), lead(shape)
            assert ours is not None and theirs is not None
            left = [axis for axis in range(ours, len(sizes)) if sizes[axis] != 1]
            right = [axis for axis in range(theirs, rank) if shape[axis] != 1]
            if [sizes[axis] for axis in left] != [shape[axis] for axis in right]:
                return False
            for source, axis in zip(left, right, strict=True):
                self._join(first, source, made, axis)
            return True
        return False


class _Influence:
    """Follows what becomes of hidden scores: `none` says whether they change no result.

    `_hidden` are the values in which they are minus infinity or as low, `_zeros` those in which they are 0. The nodes
    `hiding` lower them by `depth`.
    """

    def __init__(self, region: Region, placed: dict[ir.Value, Axes], hiding: Collection[ir.Node], depth: float) -> None:
        self._placed, self._own, self._depth = placed, set(region.nodes), depth
        self._hidden: set[ir.Value] = set()
        self._zeros: set[ir.Value] = set()
        self.none = all(self._follow(node, node in hiding) for node in (*region.forward, *region.backward))
        self.none = self.none and all(map(self._leaves, region.made((*region.forward, *region.backward))))

    def _follow(self, node: ir.Node, hides: bool) -> bool:
        """Note what a node's result has in place of hidden scores; return False if they change it."""
        op, made, first = node.op_type, node.outputs[0], node.inputs[0]
        assert first is not None
        if op == "MatMul":
            return self._product(node)
        if op in REDUCE or op in ALONG:
            over = axes(node) if op in REDUCE else [number(node, "axis", -1) % len(known(first))]
            queries, keys = self._placed[first]
            if over is None or queries in over:
                return False
            if keys in over:
                if op == "Softmax":
                    self._zeros.add(made)
                if op == "LogSoftmax":
                    self._hidden.add(made)
                return first in (self._zeros if op == "ReduceSum" else self._hidden if op in _OF_VISIBLE else ())
        if hides:
            self._hidden.add(made)
        elif op in _SAME or op in RESHAPE:
            for values in (self._hidden, self._zeros):
                if first in values:
                    values.add(made)
        elif op in ("Mul", "Div", "Neg", "Dropout"):
            read = node.inputs if op == "Mul" else node.inputs[:1]
            if any(value in self._zeros for value in read):
                self._zeros.add(made)
            factor = number_of(node.inputs[1]) if op in ("Mul", "Div") else None
            if first in self._hidden and factor is not None and factor > 0:
                self._depth *= min(1.0, factor if op == "Mul" else 1 / factor)
                if self._depth >= _ENOUGH:
                    self._hidden.add(made)
        elif op == "Exp" and first in self._hidden:
            self._zeros.add(made)
        elif op in ("Add", "Sub", "Sum", "Where"):
            self._joined(op, made, node.inputs[1:] if op == "Where" else node.inputs)
        return True

    def _joined(self, op: str, made: ir.Value, read: Sequence[ir.Value | None]) -> None:
        if all(value in self._zeros or (op == "Where" and number_of(value) == 0.0) for value in read):
            self._zeros.add(made)
        if op == "Where" and all(value in self._hidden or number_of(value) == -np.inf for value in read):
            self._hidden.add(made)
        if op == "Add" and any(value in self._hidden for value in read):
            self._hidden.add(made)
        if op == "Sub" and read[0] in self._hidden and read[1] not in self._hidden:
            self._hidden.add(made)

    def _product(self, node: ir.Node) -> bool:
        a, b = node.inputs[0], node.inputs[1]
        assert a is not None and b is not None
        queries, keys = self._placed[a]
        terms = len(known(a)) - 1
        if terms not in (queries, keys):
            return True
        zero = any(value in self._zeros for value in (a, b))
        ends = all(user not in self._own for user, _ in node.outputs[0].uses())
        return zero and (terms == keys or ends)

    def _leaves(self, value: ir.Value) -> bool:
        """Return whether blocks can make a value that nodes outside read: its rows, or shares of a sum.

        A wide one is read by the check alone, as `attention_regions.find` leaves it. Of what a Dropout draws, blocks
        make a part, and the rest may be drawn otherwise.
        """
        queries, keys = self._placed[value]
        node = value.producer()
        assert node is not None and node.inputs[0] is not None
        if queries is not None:
            return keys is None or node.op_type == "Dropout"
        terms = len(known(node.inputs[0])) - 1
        return keys is not None and node.op_type == "MatMul" and self._placed[node.inputs[0]][0] == terms


_OF_VISIBLE = ("Softmax", "LogSoftmax", "ReduceMax", "ReduceLogSumExp")
"""Operators for which an entry of minus infinity among others is as if it were not there."""
_SAME = ("Identity", "Transpose", "Cast", "Expand")
