"""Models in half precision in a form that ONNX Runtime's CPU runs: it has few kernels for bfloat16."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ..passes.widen_halves import Names, in_float32, widen_attributes

NARROW, WIDE = ir.DataType.BFLOAT16, ir.DataType.FLOAT


def widened(model: ir.Model) -> ir.Model:
    """Return a copy for checks that has float32 wherever the model has bfloat16, and rounds to bfloat16 after each
    node.

    A bfloat16 kernel that computes in float32 and rounds its result gives the same numbers. Sums that a node scatters
    in float16, which the CPU refuses, are computed in float32 as well.
    """
    copy = model.clone()
    graph = copy.graph
    for value in [*graph.inputs, *graph.initializers.values()]:
        if value.dtype == NARROW:
            value.type = ir.TensorType(WIDE)  # a new object: values share their types
            if value.const_value is not None:
                value.const_value = ir.tensor(value.const_value.numpy().astype(np.float32), name=value.name)
    for node in list(graph):
        if node.op_type == "ScatterElements" and "reduction" in node.attributes:
            in_float32(node, Names(graph), [ir.DataType.FLOAT16])
        widen_attributes(node, [NARROW])
        for value in node.outputs:
            if value.dtype == NARROW:
                _round(graph, node, value)
    return copy


def _round(graph: ir.Graph, node: ir.Node, value: ir.Value) -> None:
    """Let readers of a value read it rounded to bfloat16."""
    value.type = ir.TensorType(WIDE)
    narrow = ir.node("Cast", [value], {"to": int(NARROW)})
    wide = ir.node("Cast", narrow.outputs, {"to": int(WIDE)})
    for made, dtype in ((narrow.outputs[0], NARROW), (wide.outputs[0], WIDE)):
        made.shape, made.type = value.shape, ir.TensorType(dtype)
    name = value.name
    value.name, narrow.outputs[0].name, wide.outputs[0].name = f"{name}.exact", f"{name}.narrow", name
    value.replace_all_uses_with(wide.outputs[0], replace_graph_outputs=True)
    narrow.replace_input_with(0, value)
    graph.insert_after(node, [narrow, wide])


def wide(value: np.ndarray) -> np.ndarray:
    """Return a bfloat16 array as float32, and any other array unchanged.

    >>> wide(np.array([1.5], ml_dtypes.bfloat16)).dtype
    dtype('float32')
    """
    return value.astype(np.float32) if value.dtype == ml_dtypes.bfloat16 else value
