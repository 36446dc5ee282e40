"""Find attentions in a step: nodes that compute each matrix of a stack of scores separately, in both passes.

A *stack* is a tensor whose leading axes count matrices, texts times heads: (2, 4, n, m) and (8, n, m) are the same
stack of eight. It is *wide* where a matrix has about as many entries as the scores of one head of one text.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ..tape import number as scalar
from ..values import static
from .rowwise import ELEMENTWISE, REDUCE, RESHAPE, axes, number

Shape = tuple[int, ...]

ENTRY_BY_ENTRY = ELEMENTWISE | {"IsInf", "IsNaN"}
ALONG = {"Softmax", "LogSoftmax"}
STACKED = {"Concat", "GatherElements", "ScatterElements"}
"""Ops whose operands are all stacks."""
_EXPONENTIALS = {"Softmax", "LogSoftmax", "Exp"}
"""Every attention contains one of these, unlike other products of stacks of matrices."""
_FORMING = {"Transpose", "Cast", "Mul", "Div", "Neg"} | RESHAPE


@dataclass(frozen=True, slots=True)
class Stack:
    """The definition of a stack, and of a wide one.

    Attributes
    ----------
    count : matrices
    area : entries of a matrix above which a stack is wide
    """

    count: int
    area: float

    def lead(self, shape: Shape | None) -> int | None:
        """Return the number of leading axes that count the matrices; None if the shape is not a stack.

        >>> two_by_four = Stack(8, 128)
        >>> two_by_four.lead((2, 4, 16, 16)), two_by_four.lead((8, 16, 16)), two_by_four.lead((2, 1, 16, 16))
        (2, 1, None)
        """
        product = 1
        for axis, size in enumerate(shape or (), 1):
            product *= size
            if product >= self.count:
                return axis if product == self.count else None
        return None

    def is_wide(self, value: ir.Value | None) -> bool:
        """Return whether a value is as large as the scores."""
        shape = static(value)
        lead = self.lead(shape)
        return shape is not None and lead is not None and math.prod(shape[lead:]) > self.area


@dataclass(frozen=True, slots=True)
class Region:
    """An attention: the nodes from the product that makes its scores to the products that read them.

    Attributes
    ----------
    stack : Stack
    forward, backward : tuple of onnx_ir.Node
        Nodes of each pass, in order; `backward` is empty where the attention has no gradient.
    forming : tuple of onnx_ir.Node
        Nodes that only rearrange operands, in order; each part can rearrange its own.
    factors : tuple of int
        The common axes that count the matrices: (2, 4) where some values have 8 and others 2 by 4.
    """

    stack: Stack
    forward: tuple[ir.Node, ...]
    backward: tuple[ir.Node, ...]
    forming: tuple[ir.Node, ...]
    factors: Shape

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        """All nodes of the attention."""
        return (*self.forward, *self.backward, *self.forming)

    def made(self, nodes: Iterable[ir.Node]) -> list[ir.Value]:
        """Return the results of `nodes` that other nodes read, in order."""
        own = set(self.nodes)
        return [
            v for node in nodes for v in node.outputs
            if v.is_graph_output() or any(user not in own for user, _ in v.uses())
        ]  # fmt: skip


def known(value: ir.Value) -> Shape:
    """Return the shape of a value of static shape."""
    shape = static(value)
    assert shape is not None, value.name
    return shape


def is_forward(node: ir.Node) -> bool:
    """Return whether a node belongs to the forward pass."""
    return node.metadata_props.get("phase") == "forward"


def find(place: Mapping[ir.Node, int], scores: ir.Node, watched: Collection[str]) -> Region | None:
    """Find the attention whose scores a product of the forward pass makes.

    Parameters
    ----------
    place : mapping of onnx_ir.Node to int
        All nodes of the graph, in order, with their positions.
    scores : onnx_ir.Node
        A MatMul whose result's sizes are known.
    watched : collection of str
        Temporary outputs of the graph, which may be wide.

    Returns
    -------
    Region or None
        None if other nodes read a wide value, if a result for one matrix depends on other matrices, or if this is not
        an attention.
    """
    made = known(scores.outputs[0])
    stack = Stack(math.prod(made[:-2]), math.prod(made[-2:]) / 2)
    grown = _grow(scores, stack, watched)
    if grown is None:
        return None
    nodes = _needed(sorted(grown, key=place.__getitem__), stack)
    if not any(node.op_type in _EXPONENTIALS for node in nodes):
        return None
    forming = sorted(_forming(nodes, stack), key=place.__getitem__)
    inside = {v for node in (*nodes, *forming) for v in node.outputs}
    factors = _factors(inside, stack)
    if factors is None or not all(_by_matrix(node, stack, inside) for node in (*nodes, *forming)):
        return None
    forward = tuple(node for node in nodes if is_forward(node))
    backward = tuple(node for node in nodes if not is_forward(node))
    late = {v for node in backward for v in node.outputs}
    if any(not late.isdisjoint(node.inputs) for node in forward):
        return None
    region = Region(stack, forward, backward, tuple(forming), factors)
    if any(_waits(place, side, region.nodes) for side in (forward, backward)):
        return None
    return region


def _grow(scores: ir.Node, stack: Stack, watched: Collection[str]) -> set[ir.Node] | None:
    """Return the nodes reached from the scores that compute each matrix separately, up to products that are not
    wide."""
    nodes: set[ir.Node] = set()
    inside: set[ir.Value] = set()
    from_product: dict[ir.Value, bool] = {}
    todo = [scores]
    while todo:
        node = todo.pop()
        if node in nodes:
            continue
        nodes.add(node)
        for value in node.outputs:
            wide = stack.is_wide(value)
            if node.op_type == "MatMul" and not wide:
                continue
            if wide and value.is_graph_output() and value.name not in watched:
                return None
            inside.add(value)
            for user, _ in value.uses():
                if _by_matrix(user, stack, inside) and (wide or user.op_type != "MatMul"):
                    todo.append(user)
                elif wide:
                    return None
        for source in node.inputs:
            maker = source.producer() if source is not None and source not in inside else None
            if source is not None and maker is not None and _is_from_product(source, stack, from_product):
                todo.append(maker)
    return nodes


def _is_from_product(value: ir.Value, stack: Stack, known: dict[ir.Value, bool]) -> bool:
    """Return whether a value is wide and computed from a wide product, matrix by matrix."""
    if value not in known:
        known[value] = False
        node = value.producer()
        if node is not None and stack.is_wide(value):
            wide = {v for v in node.inputs if v is not None and stack.is_wide(v)}
            known[value] = _by_matrix(node, stack, wide) and (
                node.op_type == "MatMul" or any(_is_from_product(v, stack, known) for v in wide)
            )
    return known[value]


def _needed(nodes: Sequence[ir.Node], stack: Stack) -> list[ir.Node]:
    """Return the nodes that read or make wide values, and the nodes that those need, in order."""
    needed: set[ir.Node] = set()
    for node in reversed(nodes):
        wide = any(stack.is_wide(v) for v in (*node.inputs, *node.outputs))
        if wide or any(user in needed for v in node.outputs for user, _ in v.uses()):
            needed.add(node)
    return [node for node in nodes if node in needed]


def _by_matrix(node: ir.Node, stack: Stack, inside: Collection[ir.Value]) -> bool:
    """Return whether a node computes each matrix from the same matrix of its operands, and from values without a stack.

    Values in `inside` are stacks. Other operands may be stacks too, or have axes of size 1 in their place.
    """
    op, made = node.op_type, static(node.outputs[0])
    lead = stack.lead(made)
    read = [static(v) for v in node.inputs if v is not None]
    if node.domain or made is None or lead is None or not read or any(shape is None for shape in read):
        return False
    if len(node.outputs) != (2 if op == "Dropout" else 1):
        return False
    rank, axes_of_stack, first = len(made), made[:lead], read[0]
    assert first is not None
    if op in ENTRY_BY_ENTRY or op == "MatMul":
        if op == "MatMul" and (lead > rank - 2 or any(len(shape) < 2 for shape in read if shape is not None)):
            return False
        stacks = [known(v) for v in node.inputs if v is not None and v in inside]
        return all(((1,) * (rank - len(shape)) + shape)[:lead] == axes_of_stack for shape in stacks)
    own = stack.lead(first)
    if own is None or (op not in STACKED and any(v in inside for v in node.inputs[1:])):
        return False
    if op in RESHAPE:
        return True
    if op == "Transpose":
        perm = list(node.attributes["perm"].as_ints()) if "perm" in node.attributes else list(range(rank))[::-1]
        return perm[:own] == list(range(own))
    if first[:own] != axes_of_stack:
        return False
    if op in REDUCE:
        over = axes(node)
        return bool(over) and min(over or ()) >= own
    if op == "Expand":
        return len(first) == rank
    if op in STACKED:
        same = all(shape is not None and shape[:lead] == axes_of_stack and len(shape) == rank for shape in read)
        return same and number(node, "axis", 0) % rank >= lead
    if op in ALONG:
        return number(node, "axis", -1) % rank >= lead
    return op == "Dropout" and _draws(node)


def _draws(node: ir.Node) -> bool:
    """Return whether a Dropout drops a known share and has no seed."""
    _, ratio, training = (*node.inputs, None, None)[:3]
    share = scalar(ratio) if ratio is not None else 0.5
    trains = training is not None and scalar(training) == 1.0
    return share is not None and 0 <= share < 1 and trains and "seed" not in node.attributes


def _forming(nodes: Sequence[ir.Node], stack: Stack) -> list[ir.Node]:
    """Return the nodes that only rearrange operands of the others."""
    own = dict.fromkeys(nodes)
    todo = list(nodes)
    while todo:
        for value in todo.pop().inputs:
            own.update(dict.fromkeys(_chain(value, stack, own)))
    return [node for node in own if node not in set(nodes)]


def _chain(value: ir.Value | None, stack: Stack, own: Mapping[ir.Node, None]) -> list[ir.Node]:
    """Return the nodes that rearrange a value with no other reader; exclude those that are mere views."""
    chain: dict[ir.Node, None] = {}
    while value is not None and not value.is_graph_output():
        node = value.producer()
        if node is None or node in own or node.domain or node.op_type not in _FORMING:
            break
        if any(user not in own and user not in chain for user, _ in value.uses()):
            break
        source = node.inputs[0]
        alone = node.op_type in RESHAPE or all(static(other) == () for other in node.inputs[1:])
        if source is None or not alone or not _by_matrix(node, stack, {source}):
            break
        chain[node] = None
        value = source
    found = list(chain)
    while found and found[-1].op_type in RESHAPE:
        found.pop()
    return found


def _factors(inside: Iterable[ir.Value], stack: Stack) -> Shape | None:
    """Return the common axes of all stacks; None if they count the matrices in incompatible ways."""
    ends = {1, stack.count}
    for value in inside:
        shape = known(value)
        lead = stack.lead(shape)
        assert lead is not None
        ends.update(math.prod(shape[axis:lead]) for axis in range(lead))
    ordered = sorted(ends, reverse=True)
    pairs = list(itertools.pairwise(ordered))
    if any(a % b for a, b in pairs):
        return None
    return tuple(a // b for a, b in pairs) or (1,)  # a single matrix has one axis, too


def _waits(place: Mapping[ir.Node, int], side: Sequence[ir.Node], own: Collection[ir.Node]) -> bool:
    """Return whether nodes of one pass need a value that nodes outside compute from their results."""
    mine, inside = set(side), set(own)
    after: set[ir.Value] = set()
    for node in place:
        late = any(v in after for v in node.inputs if v is not None)
        if node in inside:
            if late and node in mine:
                return True
        elif late or any(v is not None and v.producer() in mine for v in node.inputs):
            after.update(node.outputs)
    return False
