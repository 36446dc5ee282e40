"""Models in half precision in a form that ONNX Runtime's CPU runs as a device does.

It has few kernels for bfloat16; it computes chains of float16 nodes in float32, without rounding between them.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ..passes.widen_halves import HALVES, widen_attributes

WIDE = ir.DataType.FLOAT


def widened(model: ir.Model) -> ir.Model:
    """Return a copy for checks that has float32 wherever the model has half precision, and rounds after each node.

    A kernel in half precision that computes in float32 and rounds its result gives the same numbers.
    """
    copy = model.clone()
    graph = copy.graph
    for value in [*graph.inputs, *graph.initializers.values()]:
        if value.dtype in HALVES:
            value.type = ir.TensorType(WIDE)  # a new object: values share their types
            if value.const_value is not None:
                value.const_value = ir.tensor(value.const_value.numpy().astype(np.float32), name=value.name)
    for node in list(graph):
        widen_attributes(node)
        for value in node.outputs:
            if value.dtype in HALVES:
                _round(graph, node, value, value.dtype)
    return copy


def _round(graph: ir.Graph, node: ir.Node, value: ir.Value, dtype: ir.DataType) -> None:
    """Let readers of a value read it rounded to a type."""
    value.type = ir.TensorType(WIDE)
    narrow = ir.node("Cast", [value], {"to": int(dtype)})
    wide = ir.node("Cast", narrow.outputs, {"to": int(WIDE)})
    for made, kind in ((narrow.outputs[0], dtype), (wide.outputs[0], WIDE)):
        made.shape, made.type = value.shape, ir.TensorType(kind)
    name = value.name
    value.name, narrow.outputs[0].name, wide.outputs[0].name = f"{name}.exact", f"{name}.narrow", name
    value.replace_all_uses_with(wide.outputs[0], replace_graph_outputs=True)
    narrow.replace_input_with(0, value)
    graph.insert_after(node, [narrow, wide])


def wide(value: np.ndarray) -> np.ndarray:
    """Return an array in half precision as float32, and any other array unchanged.

    >>> wide(np.array([1.5], ml_dtypes.bfloat16)).dtype
    dtype('float32')
    """
    return value.astype(np.float32) if is_half(value) else value


def is_half(value: np.ndarray) -> bool:
    """Return whether an array is in half precision."""
    return value.dtype in (ml_dtypes.bfloat16, np.float16)
