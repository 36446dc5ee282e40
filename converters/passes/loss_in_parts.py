"""Losses over many classes, a few rows at a time: the logits of a language model never all exist at once.

All nodes from the product that makes the logits to the products that read their gradient compute each row separately.
If the gradient does not depend on the value of the loss, as with cross entropy, no row waits for another::

    h [n, d] -+-> h[:m] --> logits --> softmax --> gradient -+--> h's gradient[:m]  -+-> Concat [n, d]
              |                                              +--> the matrix's gradient, so far
              +-> h[m:] --> logits --> softmax --> gradient -+--> h's gradient[m:]  -+
                                                             +--> the matrix's gradient

The step computes nothing more except one sum of the matrix's gradients for each part, which Gemm includes. MAGIS (Chen
et al., ASPLOS 2024) introduced the fission of operators to save memory; Liger Kernel (Hsu et al., 2024) has a fused
linear layer and cross entropy in parts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from ..dims import Dim, Dims, dims, sizes
from ..emit import Phase
from ..tape import Tape
from ..values import replace
from .base import Fact, rewrite
from .rowwise import ELEMENTWISE, REDUCE, RESHAPE, axes, number

_LEAST_BYTES = 1 << 26
"""Size of the logits from which a loss is divided by default."""
_MOST = 16
"""Limit on the number of parts by default."""

_ALONG_ROWS = {"Softmax", "LogSoftmax"}
_BY_INDEX = {"GatherElements", "ScatterElements"}
_PRODUCTS = {"Gemm", "MatMul"}


@rewrite(requires=[Fact.SHAPES, Fact.LEAN])
def loss_in_parts(model: ir.Model, wanted: int | None = None) -> None:
    """Rewrite, in place, each loss over many classes to process its rows in parts, one after the other.

    Parameters
    ----------
    model : onnx_ir.Model
        A training step. Losses of other kinds stay unchanged.
    wanted : int or None
        Number of parts; 1 changes nothing. By default (None), a loss is divided if its logits take 64 MiB or more and
        there are more rows than entries in a row of the logits' input; each part is about as large as the matrix. A
        loss with an open number of rows is divided only if `wanted` is given.
    """
    graph = model.graph
    if wanted == 1:
        return
    found: list[tuple[_Region, int]] = []
    for node in graph:
        count = _parts(node, wanted)
        region = _region(graph, node) if count > 1 else None
        if region is not None and not any(each in other.nodes for other, _ in found for each in region.nodes):
            found.append((region, count))
    for region, count in found:
        _divide(Tape(graph), region, count)
    if found:
        common.RemoveUnusedNodesPass()(model)
        graph.sort()


def _parts(node: ir.Node, wanted: int | None) -> int:
    """Return the number of parts for the rows of a product's result; 1 if it is not a matrix of logits."""
    if node.domain or node.op_type not in _PRODUCTS or len(node.inputs) > 3:
        return 1
    x, matrix, made = node.inputs[0], node.inputs[1], node.outputs[0]
    flat = all(v is not None and v.shape is not None and v.shape.rank() == 2 for v in (x, matrix, made))
    if not flat or x is None or number(node, "transA", 0) or not _without_rows(node.inputs[2:]):
        return 1
    (rows, classes), depth = dims(made), dims(x)[1]
    if not (isinstance(classes, int) and isinstance(depth, int)) or made.dtype is None:
        return 1
    if not isinstance(rows, int):
        return wanted or 1
    if wanted is not None:
        return min(wanted, rows)
    if rows * classes * made.dtype.itemsize < _LEAST_BYTES or rows <= depth:
        return 1
    return min(_MOST, math.ceil(rows / depth))


@dataclass(frozen=True, slots=True)
class _Region:
    """The nodes from logits to the products that read their gradient.

    Attributes
    ----------
    rows : size of the first axis
    nodes : the nodes, which compute each row separately, in order
    sums : the nodes among them whose results are sums over all rows
    made : results that other nodes read, which become Concats of the parts
    loss : the value in `made` from which the loss is computed; None if the region does not compute it
    never : values by which the gradient waits for the loss, see `after_loss`; each part waits for the losses of its
    rows
    """

    rows: Dim
    nodes: tuple[ir.Node, ...]
    sums: frozenset[ir.Node]
    made: tuple[ir.Value, ...]
    loss: ir.Value | None
    never: frozenset[ir.Value]


def _region(graph: ir.Graph, logits: ir.Node) -> _Region | None:
    """Return the region that computes each row from the logits; None if it ends without products, or waits for all
    rows."""
    rows = dims(logits.outputs[0])[0]
    nodes, inside, ends, sums = _walk(graph, logits, rows)
    if not sums:
        return None
    wide = {v for v in inside if len(dims(v)) > 1 and dims(v)[-1] != 1}
    needed: set[ir.Node] = set()
    for node in reversed(nodes):
        readers = {user for value in node.outputs for user, _ in value.uses()}
        if node in ends or not wide.isdisjoint(node.inputs) or not needed.isdisjoint(readers):
            needed.add(node)
    never = frozenset(node.outputs[0] for node in graph if _is_never(node))
    tied = _tied(graph, needed, never)
    rowed = {
        v for node in tied for v in node.inputs if v is not None and v.shape is not None and dims(v)[:1] == (rows,)
    }
    if not all(_by_rows(node, rows, rowed) for node in tied):
        return None
    kept = tuple(node for node in graph if node in needed or node in tied)
    made = tuple(
        v for node in kept if node in needed and node not in sums for v in node.outputs
        if v.is_graph_output() or any(user not in needed for user, _ in v.uses())
    )  # fmt: skip
    if any(v in wide for v in made) or any(v.is_graph_output() for v in inside) or _waits(graph, kept, never):
        return None
    return _Region(rows, kept, frozenset(sums), made, next((v for v in made if v in inside), None), never)


def _walk(
    graph: ir.Graph, logits: ir.Node, rows: Dim
) -> tuple[list[ir.Node], set[ir.Value], set[ir.Node], set[ir.Node]]:
    """Return the nodes that compute each row from the logits, the values between them, the final nodes, and the
    sums."""
    nodes, inside, ends, sums = [logits], {logits.outputs[0]}, set[ir.Node](), set[ir.Node]()
    for node in graph:
        if node is logits or inside.isdisjoint(node.inputs):
            continue
        added = _adds_rows(node, rows)
        folded = not added and _folds(node, rows, inside)
        if not (added or folded or _by_rows(node, rows, inside)):
            continue
        nodes.append(node)
        if added:
            sums.add(node)
        if added or node.op_type in _PRODUCTS:
            ends.add(node)
        else:
            inside.update(node.outputs)
    return nodes, inside, ends, sums


def _is_never(node: ir.Node) -> bool:
    """Return whether the result of a node is false for every input."""
    return node.op_type == "Xor" and not node.domain and node.inputs[0] is node.inputs[1]


def _tied(graph: ir.Graph, needed: set[ir.Node], never: frozenset[ir.Value]) -> set[ir.Node]:
    """Return the nodes by which needed nodes wait for the loss."""
    after, waiting = set(never), set[ir.Node]()
    for node in graph:
        if node not in needed and not after.isdisjoint(node.inputs):
            after.update(node.outputs)
            waiting.add(node)
    tied: set[ir.Node] = set()
    todo = list(needed)
    while todo:
        makers = [v.producer() for v in todo.pop().inputs if v is not None]
        more = [maker for maker in makers if maker in waiting and maker not in tied]
        tied.update(maker for maker in more if maker is not None)
        todo += [maker for maker in more if maker is not None]
    return tied


def _waits(graph: ir.Graph, kept: tuple[ir.Node, ...], never: frozenset[ir.Value]) -> bool:
    """Return whether a node of the region needs a value that nodes outside compute from all rows."""
    own, after = set(kept), set[ir.Value]()
    for node in graph:
        late = not after.isdisjoint(node.inputs)
        if not never.isdisjoint(node.outputs):
            continue
        if node in own:
            if late:
                return True
        elif late or any(v is not None and v.producer() in own for v in node.inputs):
            after.update(node.outputs)
    return False


def _by_rows(node: ir.Node, rows: Dim, inside: set[ir.Value]) -> bool:
    """Return whether a node computes each row from the same row of its operands, and from operands without rows."""
    made = node.outputs[0]
    if node.domain or len(node.outputs) != 1 or made.shape is None or any(_unknown(v) for v in node.inputs):
        return False
    shape, op = dims(made), node.op_type
    if not 1 <= len(shape) <= 2 or shape[0] != rows:
        return False
    rank = len(shape)
    if op in ELEMENTWISE:
        return all(v is None or len(dims(v)) < rank or dims(v)[0] in (rows, 1) for v in node.inputs) and not any(
            v in inside and len(dims(v)) < rank for v in node.inputs if v is not None
        )
    if op in _ALONG_ROWS:
        return rank > 1 and number(node, "axis", -1) % rank != 0
    if op in _BY_INDEX:
        rowed = all(v is not None and dims(v)[:1] == (rows,) for v in node.inputs)
        return rowed and rank > 1 and number(node, "axis", 0) % rank != 0
    if op in REDUCE:
        over, first = axes(node), node.inputs[0]
        return over is not None and 0 not in over and first in inside and len(dims(first)) == 2
    if op in RESHAPE:
        first = node.inputs[0]
        if first not in inside or not all(isinstance(d, int) for d in shape[1:]):
            return False
        return dims(first)[0] == rows or (len(dims(first)) > 2 and dims(first)[-1] == shape[-1] and rank == 2)
    if op in _PRODUCTS:
        x, matrix, *more = node.inputs
        plain = rank == 2 and x in inside and matrix not in inside and not number(node, "transA", 0)
        return plain and _without_rows(more)
    return False


def _without_rows(added: Iterable[ir.Value | None]) -> bool:
    """Return whether what a product adds is the same for all rows."""
    return all(v is None or (v.shape is not None and (len(dims(v)) < 2 or dims(v)[0] == 1)) for v in added)


def _folds(node: ir.Node, rows: Dim, inside: set[ir.Value]) -> bool:
    """Return whether a node works on rows that a Reshape temporarily distributes over several axes.

    Models reshape logits to texts and tokens, scale or cast them, and flatten them again.
    """
    made = node.outputs[0]
    if node.domain or len(node.outputs) != 1 or any(_unknown(v) for v in (*node.inputs, made)):
        return False
    folded = [v for v in node.inputs if v in inside]
    if node.op_type == "Reshape":
        source = node.inputs[0]
        return source in inside and len(dims(made)) > 2 and dims(source)[-1] == dims(made)[-1] != 1
    if not folded or any(dims(v) != dims(made) or len(dims(v)) < 3 for v in folded):
        return False
    alone = all(v is None or v in inside or all(d == 1 for d in dims(v)) for v in node.inputs)
    last = number(node, "axis", -1) in (-1, len(dims(made)) - 1)
    return alone and (node.op_type in ELEMENTWISE or (node.op_type in _ALONG_ROWS and last))


def _adds_rows(node: ir.Node, rows: Dim) -> bool:
    """Return whether the result of a node is a sum over the rows of its operands."""
    if node.domain or any(_unknown(v) for v in node.inputs):
        return False
    if node.op_type == "ReduceSum":
        return axes(node) == [0] and dims(node.inputs[0])[:1] == (rows,) and len(dims(node.inputs[0])) == 2  # type: ignore[arg-type]
    if node.op_type != "Gemm" or not number(node, "transA", 0) or number(node, "transB", 0) or len(node.inputs) > 2:
        return False
    return all(v is not None and dims(v)[:1] == (rows,) for v in node.inputs)


def _unknown(value: ir.Value | None) -> bool:
    return value is not None and sizes(value) is None


def _divide(tape: Tape, region: _Region, count: int) -> None:
    """Write a region's nodes once for each part, and concatenate or add up their results."""
    own = {v for node in region.nodes for v in node.outputs}
    rowed = {node: dict(_rowed(node, region.rows, own)) for node in region.nodes}
    read = {v: None for slots in rowed.values() for v in slots.values() if v not in own}
    last, lengths = region.nodes[-1], _lengths(region.rows, count)
    with tape.ahead_of(last, "forward"):
        stated = _computed_lengths(tape, next(iter(read)), count) if lengths is None else tape.ints(*lengths)
        slices = {value: _split(tape, value, count, stated, lengths) for value in read}
    parts: list[Mapping[ir.Value, ir.Value]] = []
    so_far: dict[ir.Value, ir.Value] = {}
    for part in range(count):
        known = {value: pieces[part] for value, pieces in slices.items()}
        for node in region.nodes:
            phase: Phase = node.metadata_props.get("phase", "forward")  # type: ignore[assignment]
            with tape.ahead_of(last, phase):
                _write(tape, node, rowed[node], region, known, so_far, None if lengths is None else lengths[part])
        parts.append(known)
    with tape.ahead_of(last, "backward"):
        for value in region.made:
            whole = tape.op("Concat", *(known[value] for known in parts), shape=dims(value), axis=0)
            replace(value, whole)
    for value, total in so_far.items():
        replace(value, total)


def _rowed(node: ir.Node, rows: Dim, inside: Collection[ir.Value]) -> Iterator[tuple[int, ir.Value]]:
    """Yield slots and operands of a node that have one entry for each row, among them those in `inside`.

    A product of embeddings with themselves reads the same value by rows in one slot, and whole in the other.
    """
    rank = len(dims(node.outputs[0]))
    for slot, value in enumerate(node.inputs):
        if value is None:
            continue
        if value in inside:
            yield slot, value
            continue
        if dims(value)[:1] != (rows,):
            continue
        whole = node.op_type in ELEMENTWISE and len(dims(value)) < rank
        matrix = node.op_type in _PRODUCTS and not number(node, "transA", 0) and slot > 0
        stated = node.op_type in REDUCE | RESHAPE and slot > 0
        if not (whole or matrix or stated):
            yield slot, value


def _lengths(rows: Dim, count: int) -> list[int] | None:
    if not isinstance(rows, int):
        return None
    return [rows // count + (part < rows % count) for part in range(count)]


def _computed_lengths(tape: Tape, value: ir.Value, count: int) -> ir.Value:
    """Append the computation of the parts' lengths; a Split into a number of parts fails where some would be empty."""
    rows = tape.op("Shape", value, shape=(1,), dtype=ir.DataType.INT64, start=0, end=1)
    ends, begins = (
        tape.op("Div", tape.mul(rows, tape.ints(*range(first, first + count))), tape.ints(count), shape=(count,))
        for first in (1, 0)
    )
    return tape.sub(ends, begins)


def _split(tape: Tape, value: ir.Value, count: int, sizes: ir.Value, lengths: list[int] | None) -> tuple[ir.Value, ...]:
    """Append a Split of a value's rows."""
    made = tape.many("Split", value, sizes, outputs=count, axis=0)
    for part, piece in enumerate(made):
        piece.shape = ir.Shape([None if lengths is None else lengths[part], *dims(value)[1:]])
        piece.type = value.type
    return made


def _write(
    tape: Tape,
    node: ir.Node,
    rowed: Mapping[int, ir.Value],
    region: _Region,
    known: dict[ir.Value, ir.Value],
    so_far: dict[ir.Value, ir.Value],
    size: int | None,
) -> None:
    """Append a copy of a node for one part.

    In the slots `rowed` it reads parts of values, which are `known`; `so_far` are the sums of the earlier parts.
    """
    made = node.outputs[0]
    inputs = [known[rowed[slot]] if slot in rowed else v for slot, v in enumerate(node.inputs)]
    if not region.never.isdisjoint(inputs):
        inputs = [_never(tape, region, known) if v in region.never else v for v in inputs]
    attributes = dict(node.attributes)
    total = so_far.get(made)
    if node in region.sums:
        if node.op_type == "Gemm" and total is not None:
            inputs.append(total)
            attributes.pop("beta", None)
        one = tape.op(node.op_type, *inputs, shape=dims(made), dtype=made.dtype, **attributes)
        if node.op_type != "Gemm" and total is not None:
            one = tape.add(total, one)
        so_far[made] = one
        return
    op_type, shape = node.op_type, dims(made)
    if len(shape) > 2:  # a part has its rows along one axis everywhere
        shape = (region.rows, shape[-1])
        attributes |= {"axis": ir.AttrInt64("axis", -1)} if "axis" in attributes else {}
    if op_type in RESHAPE:
        op_type, attributes = "Reshape", {}
        rest: Dims = shape[1:]
        inputs = [inputs[0], tape.ints(-1, *(int(d) for d in rest))]
    one = tape.op(op_type, *inputs, shape=(), dtype=made.dtype, **attributes)
    one.shape = ir.Shape([size, *shape[1:]])
    known[made] = one


def _never(tape: Tape, region: _Region, known: Mapping[ir.Value, ir.Value]) -> ir.Value:
    """Return a scalar or column that is false and is computed from the losses of a part's rows."""
    if region.loss is None:
        return tape.constant(np.asarray(False))
    part = _column(tape, known[region.loss])
    nonzero = tape.op("Cast", part, shape=(), dtype=ir.DataType.BOOL, to=int(ir.DataType.BOOL))
    never = tape.op("Xor", nonzero, nonzero, shape=())
    nonzero.shape = never.shape = part.shape  # not by `dims`: an open size differs from part to part
    return never


def _column(tape: Tape, part: ir.Value) -> ir.Value:
    """Return one entry for each row as a column, which broadcasts to matrices with these rows."""
    if len(dims(part)) == 2:
        return part
    column = tape.op("Reshape", part, tape.ints(-1, 1), shape=())
    column.shape = ir.Shape([*(part.shape or ()), 1])  # not by `dims`, see `_never`
    return column
