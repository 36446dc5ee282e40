"""Scatter sums by ScatterElements instead of ScatterND, which loses terms in ONNX Runtime.

ONNX Runtime's CPU kernel for ScatterND divides the updates among threads. If two threads add to the same entry, one of
the sums is lost: with 1024 updates of rows, two of them to the same row in different halves, that row is wrong in some
runs. ScatterElements applies one update after the other.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..dims import dims
from ..tape import Tape
from ..values import replace
from .base import Fact, rewrite

_OUTSIDE = 2**40
"""Number of a row beyond every array, which stops ONNX Runtime with an error as ScatterND would."""


@rewrite(requires=[Fact.SHAPES], ensures=[Fact.ORDERED], breaks=[Fact.LEAN])
def add_in_order(model: ir.Model) -> None:
    """Rewrite, in place, every ScatterND with a reduction whose indices may repeat."""
    for tape in list(Tape(model.graph).with_bodies()):
        for node in list(tape.graph):
            if node.op_type == "ScatterND" and not node.domain and "reduction" in node.attributes:
                _rewrite(tape, node, node.attributes["reduction"].as_string())


def _rewrite(tape: Tape, node: ir.Node, reduction: str) -> None:
    data, indices, updates = node.inputs
    if reduction == "none" or any(v is None or v.shape is None for v in node.inputs) or _apart(indices):
        return
    assert data is not None and indices is not None and updates is not None
    with tape.ahead_of(node, node.metadata_props.get("phase", "backward")):  # type: ignore[arg-type]
        made = _elements(tape, data, indices, updates, reduction)
    replace(node.outputs[0], made)
    tape.graph.remove(node, safe=True)


def _apart(indices: ir.Value | None) -> bool:
    """Return whether constant indices show that no two updates write the same place."""
    if indices is None or indices.const_value is None or indices.is_graph_input():
        return False
    known = indices.const_value.numpy()
    rows = known.reshape(-1, known.shape[-1])
    return bool((rows >= 0).all()) and len(np.unique(rows, axis=0)) == len(rows)


def _read(t: Tape, data: ir.Value, indices: ir.Value, depth: int) -> bool:
    """Return whether a GatherND reads at the same places of an array, and so stops the run at places outside."""
    for user, number in indices.uses():
        if (user.op_type, number, user.graph) == ("GatherND", 1, t.graph) and not _batched(user):
            source = user.inputs[0]
            if source is not None and source.shape is not None and dims(source)[:depth] == dims(data)[:depth]:
                return True
    return False


def _batched(gather: ir.Node) -> bool:
    return "batch_dims" in gather.attributes and gather.attributes["batch_dims"].as_int() > 0


def _elements(t: Tape, data: ir.Value, indices: ir.Value, updates: ir.Value, reduction: str) -> ir.Value:
    """Append a ScatterElements over rows: each place that indices can name is one row of a matrix."""
    shape, where = dims(data), dims(indices)
    depth = where[-1]
    assert isinstance(depth, int)
    places, cells, count = t.product(shape[:depth]), t.product(shape[depth:]), t.product(where[:-1])
    if depth == 1:
        numbers = indices
    else:
        sizes = t.shape_vector(shape[:depth])
        strides = t.shape_vector(tuple(t.product(shape[axis + 1 : depth]) for axis in range(depth)))
        parts = t.mul(t.op("Mod", indices, sizes, shape=where), strides)  # from the end, indices are negative
        if not _read(t, data, indices, depth):
            farther = t.op("Max", indices, t.sub(t.ints(-1), indices), shape=where)
            parts = t.select(t.compare("Less", farther, sizes), parts, t.ints(_OUTSIDE))
        numbers = t.sum(parts, [len(where) - 1], keepdims=False)
    rows = t.expand(t.reshape(numbers, (count, 1)), (count, cells))
    made = t.op(
        "ScatterElements", t.reshape(data, (places, cells)), rows, t.reshape(updates, (count, cells)),
        shape=(places, cells), axis=0, reduction=reduction,
    )  # fmt: skip
    return t.reshape(made, shape)
