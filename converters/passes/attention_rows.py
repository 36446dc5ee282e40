"""Blocks of rows of an attention whose mask hides many keys: the queries of a block need only the keys they may see.

Under a causal mask, the queries of a block see the keys up to the block's end: with eight blocks, a step makes 9/16 of
the scores. A score that its mask sets to minus infinity has no influence: its share after the softmax is 0, and so is
its gradient. `visible_blocks` proves that for the nodes of a region: it relates the axes of their values to queries and
keys, and follows what the mask makes of hidden scores, minus infinity before the softmax and 0 behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod

import numpy as np
import onnx_ir as ir

from .. import constants
from ..values import static
from .attention_regions import ENTRY_BY_ENTRY, Region, known
from .rowwise import REDUCE, RESHAPE, axes, number

Range = tuple[int, int]
Places = Mapping[ir.Value, tuple[int | None, int | None]]
"""The axis of the queries and that of the keys of each value, None where a value has none."""

LEAST_ROWS = 64
"""Rows of a block, at least: products of fewer are slow."""

_MOST_ENTRIES = 1 << 27
"""Entries of the largest mask to look at."""

_HIDDEN = -1e30
"""Numbers below hide a score: added to any score of a model that works, they leave 0 after the softmax."""

_STEP = 16
"""Keys of a block begin and end at multiples of this, for aligned products."""

_WORTH = 0.8
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
    axes_of : dict of onnx_ir.Value to tuple
        The axes of queries and keys of each value, see `Places`; values that take another's place are added.
    blocks : tuple of Block
        In order of their rows.
    """

    axes_of: dict[ir.Value, tuple[int | None, int | None]]
    blocks: tuple[Block, ...]

    def cuts(self, value: ir.Value, block: Block) -> dict[int, Range]:
        """Return the range of each axis of a value that a block needs; axes that it needs whole are absent."""
        queries, keys = self.axes_of.get(value, (None, None))
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
        influence.
    """
    scores = next(node.outputs[0] for node in region.forward if node.op_type == "MatMul")
    rows, columns = known(scores)[-2:]
    size = max(ceil(rows / count), LEAST_ROWS)
    related = _Axes(region)
    rank = len(known(scores))
    queries, keys = related.of(scores, rank - 2), related.of(scores, rank - 1)
    placed = related.places(queries, keys)
    if size >= rows or not related.sound or queries == keys or placed is None:
        return None
    masks = {node: seen for node in region.forward if (seen := _seen(node, placed, (rows, columns))) is not None}
    if not masks:
        return None
    first = next(iter(masks.values()))
    hiding = {node for node, seen in masks.items() if not (seen & ~first).any()}
    if not (first.any(axis=0).all() and first.any(axis=1).all() and _Influence(region, placed, hiding).none):
        return None
    blocks = []
    for begin in range(0, rows, size):
        end = min(begin + size, rows)
        (seen,) = np.nonzero(first[begin:end].any(axis=0))
        keys_of = int(seen[0]) // _STEP * _STEP, min(ceil((int(seen[-1]) + 1) / _STEP) * _STEP, columns)
        blocks.append(Block((begin, end), keys_of))
    area = sum((block.rows[1] - block.rows[0]) * (block.keys[1] - block.keys[0]) for block in blocks)
    return Rows(placed, tuple(blocks)) if area <= _WORTH * rows * columns else None


def forget(graph: ir.Graph) -> None:
    """Free the masks that were computed."""
    for value in (value for node in graph for value in node.outputs):
        constants.forget(value, _MOST_ENTRIES)


class _Axes:
    """Classes of the axes of a region's values: axes that must be cut alike."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._class: dict[tuple[ir.Value, int], tuple[ir.Value, int]] = {}
        self.sound = all(self._relate(node) for node in region.nodes)

    def of(self, value: ir.Value, axis: int) -> tuple[ir.Value, int]:
        """Return the representative of an axis's class."""
        found = value, axis
        while (above := self._class.get(found, found)) != found:
            found = above
        return found

    def places(
        self, queries: tuple[ir.Value, int], keys: tuple[ir.Value, int]
    ) -> dict[ir.Value, tuple[int | None, int | None]] | None:
        """Return the axes of queries and keys of each value; None if a value has two of one kind."""
        found: dict[ir.Value, tuple[int | None, int | None]] = {}
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
        if op in (*_ALONG, "Dropout"):
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


def _seen(node: ir.Node, placed: Places, shape: Range) -> np.ndarray | None:
    """Return which query may see which key in some text or head, if a node hides scores by a mask."""
    mask = _mask_of(node)
    if mask is None:
        return None
    value, shown = mask
    queries, keys = placed[value]
    shown = shown.reshape((1,) * (len(known(value)) - shown.ndim) + shown.shape)
    others = tuple(axis for axis in range(shown.ndim) if axis not in (queries, keys))
    shown = np.asarray(shown.any(axis=others))
    if queries is None or keys is None:
        shown = np.expand_dims(shown, 0 if queries is None else 1)
    elif queries > keys:
        shown = shown.T
    return np.broadcast_to(shown, shape)


def _mask_of(node: ir.Node) -> tuple[ir.Value, np.ndarray] | None:
    """Return the value by which a node hides scores, and where it may show one.

    A mask that inputs have a part in counts only if it hides by minus infinity: by a number, rows without any key would
    have equal shares of all keys.
    """
    if node.op_type == "Add":
        for value in node.inputs:
            if value is not None and (shown := _shown(value)) is not None:
                return value, shown
    if node.op_type == "Where" and (condition := node.inputs[0]) is not None and len(known(condition)) >= 2:
        _, a, b = node.inputs
        decided = _constant(condition)
        if decided is not None and _hides(a):
            return condition, ~decided
        if _hides(b) if decided is not None else _number(b) == -np.inf:
            return condition, _may_hold(condition)
    return None


def _shown(mask: ir.Value) -> np.ndarray | None:
    """Return where a mask that is added to scores may show one; None if it is no mask."""
    if len(known(mask)) < 2:
        return None
    numbers = _constant(mask)
    if numbers is not None:
        return np.asarray(numbers > _HIDDEN) if numbers.dtype != bool else None
    node = mask.producer()
    if node is None or node.op_type != "Where" or _number(node.inputs[2]) != -np.inf or node.inputs[0] is None:
        return None
    return _may_hold(node.inputs[0])


def _may_hold(condition: ir.Value) -> np.ndarray:
    """Return where a condition may hold, whatever the inputs are; its shape broadcasts to the condition's."""
    decided, node = _constant(condition), condition.producer()
    if decided is not None:
        return decided.astype(bool)
    if node is not None and not node.domain and node.op_type in ("And", "Or"):
        a, b = (_may_hold(value) for value in node.inputs if value is not None)
        return np.asarray(a & b if node.op_type == "And" else a | b)
    return np.ones((1,) * len(known(condition)), bool)


def _constant(value: ir.Value) -> np.ndarray | None:
    return constants.static(value, _MOST_ENTRIES)


def _hides(value: ir.Value | None) -> bool:
    """Return whether a value is a single number that hides scores."""
    number_ = _number(value)
    return number_ is not None and number_ <= _HIDDEN


def _number(value: ir.Value | None) -> float | None:
    """Return a constant of one element."""
    shape = static(value)
    made = _constant(value) if value is not None and shape is not None and prod(shape) == 1 else None
    return None if made is None else float(made.reshape(()))


class _Influence:
    """Follows what a mask makes of hidden scores: `none` says whether they change no result.

    `hidden` are the values in which they are minus infinity, `zeros` those in which they are 0.
    """

    def __init__(self, region: Region, placed: Places, hiding: Collection[ir.Node]) -> None:
        self._placed, self._own = placed, set(region.nodes)
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
        if op in REDUCE or op in _ALONG:
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
        elif op == "Exp" and first in self._hidden:
            self._zeros.add(made)
        elif op in ("Add", "Sub", "Sum", "Where"):
            self._joined(op, made, node.inputs[1:] if op == "Where" else node.inputs)
        return True

    def _joined(self, op: str, made: ir.Value, read: Sequence[ir.Value | None]) -> None:
        if all(value in self._zeros or (op == "Where" and _number(value) == 0.0) for value in read):
            self._zeros.add(made)
        if op == "Where" and all(value in self._hidden or _hides(value) for value in read):
            self._hidden.add(made)
        if op in ("Add", "Sub") and read[0] in self._hidden and read[1] not in self._hidden:
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

        A wide one is read by the check alone, as `attention_regions.find` leaves it.
        """
        queries, keys = self._placed[value]
        node = value.producer()
        assert node is not None and node.inputs[0] is not None
        if queries is not None:
            return True
        terms = len(known(node.inputs[0])) - 1
        return keys is not None and node.op_type == "MatMul" and self._placed[node.inputs[0]][0] == terms


_ALONG = ("Softmax", "LogSoftmax")
_OF_VISIBLE = ("Softmax", "LogSoftmax", "ReduceMax", "ReduceLogSumExp")
"""Operators for which an entry of minus infinity among others is as if it were not there."""
_SAME = ("Identity", "Transpose", "Cast", "Expand")
