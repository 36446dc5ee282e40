"""Gradients of a layer that runs at every step of a sequence: one product, where exporters sum one for each step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from ..dims import dims
from ..emit import Phase
from ..tape import Tape
from ..values import replace, static
from .base import Fact, rewrite
from .rowwise import RESHAPE, axes, number
from .sums import addends, is_add, is_part, read_once, remove_unread

_FEWEST = 4  # products, or rows, that are worth a Concat of their operands


@rewrite(requires=[Fact.SHAPES, Fact.LEAN])
def sum_once(model: ir.Model) -> None:
    """Rewrite, in place, a sum of products ``A'B`` as products of stacked operands, and sums of rows likewise.

    Every term writes a matrix as large as the weights, and every Add reads two and writes one; a product of stacked
    operands sums as it multiplies. A stack of operands that the step makes anyway, for the gradient of the layer's
    inputs, is used. What has to be stacked for a product is at most as large as the product: until it is computed, all
    of it is in memory. Rows are summed at once only where there is a stack of them.
    """
    tape = Tape(model.graph)
    for sum_terms in (_sum_products, _sum_rows):
        for node in list(model.graph):
            if node.graph is not None and is_add(node) and not _is_inner(node):
                sum_terms(tape, node)
    model.graph.sort()  # a stack may come after the sum


def _is_inner(node: ir.Node) -> bool:
    return any(is_part(node.outputs[0], reader) for reader, _ in node.outputs[0].uses() if is_add(reader))


def _sum_products(tape: Tape, root: ir.Node) -> None:
    """Replace the terms ``A'B`` of a sum by products of stacked operands."""
    terms = {term: found for term in addends(root) if term is not None and (found := _operands(term))}
    if len(terms) < _FEWEST or len({(dims(term), term.dtype) for term in terms}) > 1:
        return
    left, right = _sizes(next(iter(terms)))
    pairs = list(terms.values())
    stack, order = _stack(tape.graph, [a for a, _ in pairs])
    if stack is not None and sum(_count(b) for _, b in pairs) <= left * right:
        parts = [[pairs[i] for i in order]]
    else:
        stack, parts = None, [part for part in _parts(pairs, left * right) if len(part) >= _FEWEST]
    done = {pair for part in parts for pair in part}
    if not done:
        return
    with tape.ahead_of(root, _phase(root)):
        products = [_product(tape, part, stack, left, right) for part in parts]
        _finish(tape, root, [term for term, pair in terms.items() if pair in done], products)


def _parts(pairs: Sequence[tuple[ir.Value, ir.Value]], most: int) -> list[list[tuple[ir.Value, ir.Value]]]:
    """Divide pairs of matrices into runs of at most so many elements each, in order."""
    parts: list[list[tuple[ir.Value, ir.Value]]] = [[]]
    held = 0
    for a, b in pairs:
        held += (more := _count(a) + _count(b))
        if held > most and parts[-1]:
            parts.append([])
            held = more
        parts[-1].append((a, b))
    return parts


def _product(
    tape: Tape, pairs: Sequence[tuple[ir.Value, ir.Value]], stack: ir.Value | None, left: int, right: int
) -> ir.Value:
    """Append the product of stacked pairs; `stack` is that of the first matrices, where there is one."""
    rows = sum(_sizes(b)[0] for _, b in pairs)
    if stack is None:
        stack = tape.op("Concat", *(a for a, _ in pairs), shape=(rows, left), axis=0)
    others = tape.op("Concat", *(b for _, b in pairs), shape=(rows, right), axis=0)
    return tape.op("Gemm", tape.reshape(stack, (rows, left)), others, shape=(left, right), transA=1)


def _sum_rows(tape: Tape, root: ir.Node) -> None:
    """Replace the terms of a sum that are sums of rows by one sum, where their operands are stacked."""
    terms = {term: found for term in addends(root) if term is not None and (found := _summed(term))}
    if len(terms) < _FEWEST or len({(dims(term), term.dtype) for term in terms}) > 1:
        return
    stack, _ = _stack(tape.graph, list(terms.values()))
    if stack is None:
        return
    shape = dims(next(iter(terms)))
    with tape.ahead_of(root, _phase(root)):
        lead = list(range(len(dims(stack)) - 1))
        readers = (user for user, _ in stack.uses() if user.graph is tape.graph and user.op_type == "ReduceSum")
        known = next((user.outputs[0] for user in readers if axes(user) == lead), None)
        _finish(tape, root, list(terms), [tape.reshape(known or tape.sum(stack, lead), shape)])


def _finish(tape: Tape, root: ir.Node, terms: Sequence[ir.Value], made: Sequence[ir.Value]) -> None:
    """Replace a sum by that of `made`, in place of `terms`, and of its other terms."""
    total, *rest = (*made, *(other for other in addends(root) if other is not None and other not in terms))
    for other in rest:
        total = tape.add(total, other)
    replace(root.outputs[0], total)
    remove_unread(root)


def _phase(node: ir.Node) -> Phase:
    return node.metadata_props.get("phase", "backward")  # type: ignore[return-value]


def _operands(term: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """Return `A` and `B` of a product ``A'B`` of matrices of known sizes; None for any other value."""
    node = term.producer()
    if node is None or node.domain or node.op_type != "Gemm" or len(node.inputs) != 2 or not read_once(term):
        return None
    a, b = node.inputs
    plain = number(node, "transA", 0) and not number(node, "transB", 0) and "alpha" not in node.attributes
    if not plain or a is None or b is None or static(a) is None or static(b) is None:
        return None
    return a, b


def _summed(term: ir.Value) -> ir.Value | None:
    """Return the matrix whose rows a value sums, possibly reshaped; None for any other value."""
    node, value = term.producer(), term
    if node is not None and _is_reshape(node) and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    if node is None or node.domain or node.op_type != "ReduceSum" or not (read_once(value) and read_once(term)):
        return None
    source = node.inputs[0]
    if source is None or static(source) is None or static(term) is None:
        return None
    lead = list(range(len(dims(source)) - 1))
    return source if lead and axes(node) == lead and dims(term)[-1:] == dims(source)[-1:] else None


def _sizes(matrix: ir.Value) -> tuple[int, int]:
    rows, columns = static(matrix) or (0, 0)
    return rows, columns


def _count(matrix: ir.Value) -> int:
    return math.prod(_sizes(matrix))


def _stack(graph: ir.Graph, values: Sequence[ir.Value]) -> tuple[ir.Value | None, list[int]]:
    """Return a value that stacks the rows of all `values`, None where a graph has none, and their order in it."""
    place = {view: i for i, value in enumerate(values) for view in _views(graph, value)}
    for view in _views(graph, values[0]):
        for user, _ in view.uses():
            if (
                user.graph is not graph
                or user.domain
                or user.op_type != "Concat"
                or number(user, "axis", 0)
                or len(dims(view)) < 2
            ):
                continue
            order = [place.get(each, -1) for each in user.inputs if each is not None]
            if sorted(order) == list(range(len(values))):
                return user.outputs[0], order
    return None, list(range(len(values)))


def _views(graph: ir.Graph, value: ir.Value) -> list[ir.Value]:
    """Return a value and its reshaped forms that have rows of the same length."""
    made = [user.outputs[0] for user, slot in value.uses() if slot == 0 and user.graph is graph and _is_reshape(user)]
    node = value.producer()
    source = node.inputs[0] if node is not None and _is_reshape(node) else None
    near = [value, *made] if source is None else [value, source, *made]
    return [each for each in near if static(each) is not None and dims(each)[-1:] == dims(value)[-1:]]


def _is_reshape(node: ir.Node) -> bool:
    return not node.domain and node.op_type in RESHAPE
