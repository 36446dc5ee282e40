"""Nodes in half precision that ONNX Runtime's CUDA provider has no kernel for, in float32.

The CPU provider computes all half precision in float32, or not at all: what has no kernel on a device has none
anywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnx_remat.ort.kernels.cuda import CUDA

from .base import Fact, rewrite

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@rewrite(ensures=[Fact.KERNELS])
def widen_halves(model: ir.Model) -> None:
    """Compute in float32, in place, nodes in half precision that CUDA has no kernel for, or that their opset forbids.

    Results are rounded to the type that they had: every reader reads the same numbers as of a kernel that computes in
    float32 inside.
    """
    opset = model.opset_imports.get("") or 1
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        if not node.domain and _lacks_kernel(node, opset):
            in_float32(node)


def _lacks_kernel(node: ir.Node, opset: int) -> bool:
    values = [*node.inputs, *node.outputs]
    if not any(value is not None and value.dtype in HALVES for value in values) or not node.inputs:
        return False
    first = node.inputs[0]
    known = CUDA.device_types.get(("", node.op_type), frozenset(HALVES))
    if first is not None and first.dtype in HALVES and first.dtype not in known and ir.DataType.FLOAT in known:
        return True
    if not onnx.defs.has(node.op_type, opset):
        return False
    schema = onnx.defs.get_schema(node.op_type, opset)
    return _is_forbidden(schema.inputs, node.inputs) or _is_forbidden(schema.outputs, node.outputs)


def _is_forbidden(formals: Sequence[onnx.defs.OpSchema.FormalParameter], values: Sequence[ir.Value | None]) -> bool:
    return any(
        value is not None
        and value.dtype in HALVES
        and f"tensor({value.dtype.name.lower()})" not in formals[min(index, len(formals) - 1)].types
        for index, value in enumerate(values)
    )


def in_float32(node: ir.Node, kinds: Collection[ir.DataType] = HALVES) -> None:
    """Let a node read its inputs of these types as float32, and round its results to their type."""
    assert node.graph is not None
    labels, name = dict(node.metadata_props), node.outputs[0].name
    wide_of: dict[ir.Value, ir.Value] = {}
    for index, value in enumerate(node.inputs):
        if value is not None and value.dtype in kinds:
            if value not in wide_of:
                cast = _cast(value, ir.DataType.FLOAT, f"{name}.wide.{index}", labels)
                node.graph.insert_before(node, cast)
                wide_of[value] = cast.outputs[0]
            node.replace_input_with(index, wide_of[value])
    widen_attributes(node, kinds)
    for value in node.outputs:
        narrow = value.dtype
        if narrow is not None and narrow in kinds:
            value.type = ir.TensorType(ir.DataType.FLOAT)  # a new object: values share their types
            cast = _cast(value, narrow, str(value.name), labels)
            value.name = f"{value.name}.single"
            value.replace_all_uses_with(cast.outputs[0], replace_graph_outputs=True)
            cast.replace_input_with(0, value)
            node.graph.insert_after(node, cast)


def widen_attributes(node: ir.Node, kinds: Collection[ir.DataType]) -> None:
    """Let a node make float32 where its attributes state one of these types."""
    for attribute in list(node.attributes.values()):
        if attribute.name in ("to", "dtype") and attribute.as_int() in kinds:
            node.attributes[attribute.name] = ir.AttrInt64(attribute.name, int(ir.DataType.FLOAT))
        elif attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in kinds:
            wide = ir.tensor(attribute.as_tensor().numpy().astype(np.float32))
            node.attributes[attribute.name] = ir.AttrTensor(attribute.name, wide)


def _cast(value: ir.Value, to: ir.DataType, name: str, labels: dict[str, str]) -> ir.Node:
    node = ir.node("Cast", [value], {"to": int(to)}, name=f"node.{name}.cast", metadata_props=labels)
    made = node.outputs[0]
    made.name, made.shape, made.type = name, value.shape, ir.TensorType(to)
    return node
