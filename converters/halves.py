"""Half precision: its types, and models in it in a form that ONNX Runtime's CPU runs as a device does.

The CPU has few kernels for bfloat16; it computes chains of float16 nodes in float32, without rounding between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
WIDE = ir.DataType.FLOAT


@dataclass(frozen=True, slots=True)
class OnCPU:
    """A step in a form that the CPU runs, with the numbers that a device computes.

    Attributes
    ----------
    model : onnx.ModelProto
        The step, half precision widened.
    feeds : dict of str to array
    narrow : dict of str to dtype
        Values that the step has in half precision.
    """

    model: onnx.ModelProto
    feeds: dict[str, np.ndarray]
    narrow: dict[str, np.dtype[Any]]

    def rounded(self, outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return outputs of `model` in the types that the step has."""
        return {name: value.astype(self.narrow.get(name, value.dtype)) for name, value in outputs.items()}


def on_cpu(model: ir.Model, feeds: Mapping[str, np.ndarray]) -> OnCPU:
    """Return a step and its feeds with half precision widened, if there is any."""
    values = [*model.graph.inputs, *(value for node in model.graph for value in node.outputs)]
    narrow = {str(value.name): value.dtype.numpy() for value in values if value.dtype in HALVES}
    inner = (value for node in ir.traversal.RecursiveGraphIterator(model.graph) for value in node.outputs)
    if narrow or any(value.dtype in HALVES for value in inner):
        model, feeds = widened(model), {name: wide(feed) for name, feed in feeds.items()}
    return OnCPU(ir.to_proto(model), dict(feeds), narrow)


def widened(model: ir.Model) -> ir.Model:
    """Return a copy that has float32 wherever the model has tensors in half precision, and rounds after each node.

    A kernel in half precision that computes in float32 and rounds its result gives the same numbers.
    """
    copy = model.clone()
    nodes = list(ir.traversal.RecursiveGraphIterator(copy.graph))
    for graph in {copy.graph: None} | {node.graph: None for node in nodes if isinstance(node.graph, ir.Graph)}:
        for value in [*graph.inputs, *graph.initializers.values()]:
            if is_narrow(value):
                value.type = ir.TensorType(WIDE)  # a new object: values share their types
                if value.const_value is not None:
                    value.const_value = ir.tensor(value.const_value.numpy().astype(np.float32), name=value.name)
    for node in nodes:
        widen_attributes(node)
        for value in node.outputs:
            if is_narrow(value):
                _round(node, value)
            elif value.dtype in HALVES and isinstance(value.type, ir.SequenceType):
                value.type = ir.SequenceType(ir.TensorType(WIDE))
    return copy


def widen_attributes(node: ir.Node) -> None:
    """Let a node make float32 where its attributes state half precision."""
    for attribute in list(node.attributes.values()):
        if attribute.name in ("to", "dtype") and attribute.as_int() in HALVES:
            node.attributes[attribute.name] = ir.AttrInt64(attribute.name, int(WIDE))
        elif attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in HALVES:
            tensor = ir.tensor(attribute.as_tensor().numpy().astype(np.float32))
            node.attributes[attribute.name] = ir.AttrTensor(attribute.name, tensor)


def is_narrow(value: ir.Value) -> bool:
    """Return whether a value is a tensor in half precision."""
    return isinstance(value.type, ir.TensorType) and value.dtype in HALVES


def _round(node: ir.Node, value: ir.Value) -> None:
    """Let readers of a node's result read it rounded to its type."""
    assert value.dtype is not None and node.graph is not None
    dtype, value.type = value.dtype, ir.TensorType(WIDE)
    narrow = ir.node("Cast", [value], {"to": int(dtype)})
    wide = ir.node("Cast", narrow.outputs, {"to": int(WIDE)})
    for made, kind in ((narrow.outputs[0], dtype), (wide.outputs[0], WIDE)):
        made.shape, made.type = value.shape, ir.TensorType(kind)
    name = value.name
    value.name, narrow.outputs[0].name, wide.outputs[0].name = f"{name}.exact", f"{name}.narrow", name
    value.replace_all_uses_with(wide.outputs[0], replace_graph_outputs=True)
    narrow.replace_input_with(0, value)
    node.graph.insert_after(node, [narrow, wide])


def wide(value: np.ndarray) -> np.ndarray:
    """Return an array in half precision as float32, and any other array unchanged.

    >>> wide(np.array([1.5], ml_dtypes.bfloat16)).dtype
    dtype('float32')
    """
    return value.astype(np.float32) if is_half(value) else value


def is_half(value: np.ndarray) -> bool:
    """Return whether an array is in half precision."""
    return value.dtype in (ml_dtypes.bfloat16, np.float16)
