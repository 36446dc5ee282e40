"""Masks of an attention: which scores they hide, whatever the inputs are.

A mask hides a score by minus infinity, or by a number so low that nothing is left after the softmax, as long as the row
has another score. Of a mask in which inputs have a part, such as padding under a causal mask, the part that is known
counts: bounds of a condition say where it may hold, and where it must.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx_ir as ir

from .. import constants
from ..values import static

_MOST_ENTRIES = 1 << 26
"""Entries of the largest mask to compute."""

_MOST_NODES = 64
"""Nodes that compute a mask from constants, at most; what follows from activations is not looked at further."""

_LOW = {ir.DataType.FLOAT16: -65504.0}
_LOW_OTHERWISE = -1e8
"""Numbers that hide a score: added to any score of a model that works, they leave 0 after the softmax."""


@dataclass(frozen=True, eq=False, slots=True)
class Mask:
    """A node of an attention that hides scores.

    Attributes
    ----------
    node : onnx_ir.Node
    value : onnx_ir.Value
        What is added to the scores, or the condition that selects them.
    shown : numpy.ndarray of bool
        Which scores it may show, with as many axes as `value`; sizes of 1 broadcast.
    depth : float
        By how much it lowers a score that it hides, at least.
    """

    node: ir.Node
    value: ir.Value
    shown: np.ndarray
    depth: float

    @property
    def exact(self) -> bool:
        """Return whether it hides by minus infinity."""
        return self.depth == np.inf


def mask_of(node: ir.Node, own: Collection[ir.Node]) -> Mask | None:
    """Return what a node hides of the scores that the nodes `own` compute; None if it may show all."""
    outside = [value for value in node.inputs if value is not None and value.producer() not in own]
    if node.op_type == "Add":
        for value in outside:
            if len(_sizes(value)) < 2:
                continue
            shown = _shown(value)
            if not shown.all():
                return Mask(node, value, shown, np.inf)
            numbers = constant(value)
            if numbers is not None and not (shown := numbers > _low(value)).all():
                return Mask(node, value, np.asarray(shown), -_low(value))
    if node.op_type == "Where" and (condition := node.inputs[0]) in set(outside) and len(_sizes(condition)) >= 2:
        assert condition is not None
        (may, must), (_, a, b) = _bounds(condition), node.inputs
        for low in (-np.inf, _low(node.outputs[0])):
            shows_a, shows_b = (not _is_low(branch, low) for branch in (a, b))
            shown = np.asarray((may & shows_a) | (~must & shows_b))
            if not shown.all() and (low == -np.inf or constant(condition) is not None):
                return Mask(node, condition, shown, -low)
    return None


def constant(value: ir.Value | None) -> np.ndarray | None:
    """Return a value that follows from constants by a few nodes, if it is not too large."""
    if value is None or not _follows(value):
        return None
    return constants.static(value, _MOST_ENTRIES)


def number(value: ir.Value | None) -> float | None:
    """Return a constant of one element."""
    made = constant(value) if value is not None and static(value) is not None and prod(_sizes(value)) == 1 else None
    return None if made is None else float(made.reshape(()))


def forget(graph: ir.Graph) -> None:
    """Free the masks that `constant` has computed for values of a graph, and kept for other attentions."""
    for value in (value for node in graph for value in node.outputs):
        constants.forget(value, _MOST_ENTRIES)


def _follows(value: ir.Value) -> bool:
    """Return whether a value follows from constants by a few nodes."""
    todo, seen = [value], set[ir.Node]()
    while todo:
        source = todo.pop()
        if source.is_graph_input():
            return False
        node = source.producer()
        if source.const_value is not None or node is None or node in seen:
            continue
        seen.add(node)
        if len(seen) > _MOST_NODES:
            return False
        todo += [each for each in node.inputs if each is not None]
    return True


def _sizes(value: ir.Value | None) -> tuple[int, ...]:
    return static(value) or ()


def _low(value: ir.Value) -> float:
    return _LOW.get(value.dtype, _LOW_OTHERWISE) if value.dtype is not None else _LOW_OTHERWISE


def _is_low(value: ir.Value | None, low: float) -> bool:
    made = number(value)
    return made is not None and made <= low


def _of_rank(array: np.ndarray, value: ir.Value) -> np.ndarray:
    """Return an array with as many axes as a value."""
    return array.reshape((1,) * (len(_sizes(value)) - array.ndim) + array.shape)


def _shown(mask: ir.Value) -> np.ndarray:
    """Return where a number that is added to scores may be above minus infinity."""
    numbers, node = constant(mask), mask.producer()
    everywhere = np.ones((1,) * len(_sizes(mask)), bool)
    if numbers is not None:
        return np.asarray(numbers > -np.inf)
    if node is None or node.domain or any(value is not None and static(value) is None for value in node.inputs):
        return everywhere
    if node.op_type == "Add":
        a, b = (_shown(value) for value in node.inputs if value is not None)
        return _of_rank(np.asarray(a & b), mask)
    if node.op_type == "Where":
        condition, *branches = (value for value in node.inputs if value is not None)
        (may, must), (a, b) = _bounds(condition), map(_shown, branches)
        return _of_rank(np.asarray((may & a) | (~must & b)), mask)
    (moved,) = _moved(node, _shown) if node.op_type in _VIEWS else (everywhere,)
    return moved


def _bounds(condition: ir.Value) -> tuple[np.ndarray, np.ndarray]:
    """Return where a condition may hold, and where it must, whatever the inputs are."""
    decided, node = constant(condition), condition.producer()
    unknown = (1,) * len(_sizes(condition))
    if decided is not None:
        return decided.astype(bool), decided.astype(bool)
    if node is not None and not node.domain and all(static(value) is not None for value in node.inputs):
        if node.op_type in ("And", "Or"):
            a, b = (_bounds(value) for value in node.inputs if value is not None)
            both = [x & y if node.op_type == "And" else x | y for x, y in zip(a, b, strict=True)]
            return _of_rank(np.asarray(both[0]), condition), _of_rank(np.asarray(both[1]), condition)
        if node.op_type == "Not" and node.inputs[0] is not None:
            may, must = _bounds(node.inputs[0])
            return ~must, ~may
        if node.op_type in _VIEWS:
            may, must = _moved(node, _bounds)
            return may, must
    return np.ones(unknown, bool), np.zeros(unknown, bool)


_VIEWS = ("Expand", "Unsqueeze", "Identity")


def _moved(node: ir.Node, facts: Callable[[ir.Value], np.ndarray | tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    """Return what is known of the operand of a view as what is known of its result."""
    source, made = node.inputs[0], node.outputs[0]
    assert source is not None
    found = facts(source)
    arrays = found if isinstance(found, tuple) else (found,)
    if node.op_type == "Unsqueeze":
        axes = constant(node.inputs[1])
        assert axes is not None
        rank = len(_sizes(made))
        places = tuple(int(axis) % rank for axis in axes.ravel())
        return tuple(np.expand_dims(_of_rank(array, source), places) for array in arrays)
    return tuple(_of_rank(array, made) for array in arrays)
