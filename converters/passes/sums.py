"""The terms of a sum, and the removal of nodes that nothing reads."""

from __future__ import annotations

import onnx_ir as ir


def is_add(node: ir.Node) -> bool:
    return not node.domain and node.op_type == "Add"


def read_once(value: ir.Value) -> bool:
    """Return whether one node alone reads a value, once."""
    return len(value.uses()) == 1 and not value.is_graph_output()


def is_part(value: ir.Value, node: ir.Node) -> bool:
    """Return whether a value is a sum of the same phase as an Add, and that Add alone reads it."""
    before = value.producer()
    if before is None or not is_add(before) or not read_once(value):
        return False
    phases = {each.metadata_props.get("phase") for each in (before, node)}
    return len(phases - {None}) < 2


def addends(node: ir.Node) -> list[ir.Value | None]:
    """Return the terms of the sum that an Add ends, in order; Adds that another node reads are terms.

    So are Adds of another phase: the gradient that an optimizer adds to something stays a value.
    """
    found: list[ir.Value | None] = []
    waiting = list(reversed(node.inputs))
    while waiting:
        value = waiting.pop()
        if value is not None and is_part(value, node):
            waiting += reversed(value.producer().inputs)  # type: ignore[union-attr]
        else:
            found.append(value)
    return found


def remove_unread(node: ir.Node) -> None:
    """Remove a node, and those before it, where nothing reads their results."""
    waiting = [node]
    while waiting:
        last = waiting.pop()
        if last.graph is None or any(value.uses() or value.is_graph_output() for value in last.outputs):
            continue
        before = [value.producer() for value in last.inputs if value is not None]
        last.graph.remove(last, safe=True)
        waiting += [each for each in before if each is not None]
