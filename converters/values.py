"""Values of a graph: their constants and shapes, where the file states them, and replacing one by another."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


def constant(value: ir.Value | None) -> np.ndarray | None:
    """Return the array that a value is, where the file states it."""
    known = value.const_value if value is not None and not value.is_graph_input() else None
    return known.numpy() if known is not None else None


def static(value: ir.Value | None) -> tuple[int, ...] | None:
    """Return the shape of a value, where every dimension is a number."""
    if value is None or value.shape is None or not value.shape.is_static():
        return None
    return value.shape.numpy()


def replace(value: ir.Value, by: ir.Value) -> None:
    """Let readers of `value` read `by`; an output of the graph becomes `by` where a node makes that."""
    if value.is_graph_output() and (by.is_graph_output() or by.producer() is None):
        for user, index in list(value.uses()):
            user.replace_input_with(index, by)
    else:
        if value.is_graph_output():
            value.name, by.name = by.name, value.name
        value.replace_all_uses_with(by, replace_graph_outputs=True)
