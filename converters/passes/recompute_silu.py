"""Recompute the result of SiLU in the backward pass, so that two tensors are kept for it, not three."""

from __future__ import annotations

import onnx_ir as ir

from ..dims import dims
from .after_loss import AfterLoss
from .base import Fact, rewrite


@rewrite(requires=[Fact.SHAPES, Fact.LEAN])
def recompute_silu(model: ir.Model) -> None:
    """Recompute ``x * sigmoid(x)`` in the backward pass where that pass reads `x` and ``sigmoid(x)`` anyway.

    torch keeps `x` and the product, and recomputes the sigmoid. ONNX Runtime's default optimisations would merge two
    equal sigmoids into one. They do not merge two products whose factors are in opposite order, so the product is
    recomputed with its factors swapped.
    """
    after = AfterLoss(model.graph)
    late = set(after.nodes)
    for node in list(model.graph):
        if node in late or node.domain or node.op_type != "Mul" or node.outputs[0].is_graph_output():
            continue
        x, gate = node.inputs
        if not _is_gate(x, gate):
            x, gate = gate, x
        if not _is_gate(x, gate) or x is None or gate is None or not (_read(x, late) and _read(gate, late)):
            continue
        readers = [(user, slot) for user, slot in node.outputs[0].uses() if user in late]
        if not readers or len(readers) == len(list(node.outputs[0].uses())):
            continue
        first = min((user for user, _ in readers), key=after.nodes.index)
        with after.tape.ahead_of(first, "backward"):
            again = after.tape.op("Mul", *reversed(node.inputs), shape=dims(node.outputs[0]))
        for user, slot in readers:
            user.replace_input_with(slot, again)


def _is_gate(x: ir.Value | None, gate: ir.Value | None) -> bool:
    node = gate.producer() if gate is not None else None
    return node is not None and not node.domain and node.op_type == "Sigmoid" and node.inputs[0] is x


def _read(value: ir.Value, late: set[ir.Node]) -> bool:
    return any(user in late for user, _ in value.uses())
