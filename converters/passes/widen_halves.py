"""Nodes in half precision in float32, where ONNX Runtime has no kernel for them, and sums at indices.

A device adds up at indices in half precision, and the CPU refuses that in float16.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np
import onnx
import onnx_ir as ir

from onnx_remat.ort.kernels.cuda import CUDA

from ..halves import HALVES, widen_attributes
from ..values import constant
from .base import Fact, rewrite


@rewrite(ensures=[Fact.KERNELS])
def widen_halves(model: ir.Model) -> None:
    """Compute in float32, in place, sums at indices in half precision, and nodes in it that CUDA has no kernel for, or
    that their opset forbids.

    Results are rounded to the type that they had: every reader reads the same numbers as of a kernel that computes in
    float32 inside, as torch's on a device do for embeddings and pools.
    """
    opset = model.opset_imports.get("") or 1
    names = _Names(model.graph)
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        if not node.domain and (_adds_at_indices(node) or _lacks_kernel(node, opset)):
            _in_float32(node, names)


def _adds_at_indices(node: ir.Node) -> bool:
    reduction = node.attributes.get("reduction")
    return node.op_type in ("ScatterElements", "ScatterND") and reduction is not None and reduction.value != "none"


def _lacks_kernel(node: ir.Node, opset: int) -> bool:
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    halves = {value.dtype for value in values} & set(HALVES)
    tensors = all(value.type is None or isinstance(value.type, ir.TensorType) for value in values)
    if not halves or not tensors or not node.inputs or not onnx.defs.has(node.op_type, opset):
        return False
    first, known = node.inputs[0], CUDA.device_types.get(("", node.op_type), frozenset(HALVES))
    narrow = None if first is None else first.dtype
    if narrow in halves - known and (narrow == ir.DataType.BFLOAT16 or ir.DataType.FLOAT in known):
        return True  # the CPU has kernels for many operators in float16, and computes them in float32
    schema = onnx.defs.get_schema(node.op_type, opset)
    return _is_forbidden(schema.inputs, node.inputs) or _is_forbidden(schema.outputs, node.outputs)


def _is_forbidden(formals: Sequence[onnx.defs.OpSchema.FormalParameter], values: Sequence[ir.Value | None]) -> bool:
    return any(
        value is not None
        and value.dtype in HALVES
        and f"tensor({value.dtype.name.lower()})" not in formals[min(index, len(formals) - 1)].types
        for index, value in enumerate(values)
    )


class _Names:
    """The names of a graph's values and nodes, bodies included."""

    def __init__(self, graph: ir.Graph) -> None:
        nodes = list(ir.traversal.RecursiveGraphIterator(graph))
        self._taken = {node.name for node in nodes} | {value.name for node in nodes for value in node.outputs}
        self._taken.update(value.name for node in nodes for value in node.inputs if value is not None)
        self._taken.update(value.name for value in (*graph.inputs, *graph.initializers.values()))

    def fresh(self, name: str) -> str:
        """Return a name, or a numbered variant of it that is free."""
        tried = (name if number == 0 else f"{name}.{number}" for number in count())
        made = next(each for each in tried if each not in self._taken)
        self._taken.add(made)
        return made


def _in_float32(node: ir.Node, names: _Names) -> None:
    """Let a node read its inputs in half precision as float32, and round its results to their type."""
    assert node.graph is not None
    labels, name = dict(node.metadata_props), node.outputs[0].name
    wide_of: dict[ir.Value, ir.Value] = {}
    for index, value in enumerate(node.inputs):
        if value is None or value.dtype not in HALVES:
            continue
        if value not in wide_of:
            wide = ir.Value(
                name=names.fresh(f"{name}.wide.{index}"), shape=value.shape, type=ir.TensorType(ir.DataType.FLOAT)
            )
            wide_of[value] = wide
            number = constant(value)
            if number is not None and value.graph is not None:
                wide.const_value = ir.tensor(number.astype(np.float32), name=wide.name)
                value.graph.register_initializer(wide)
            else:
                node.graph.insert_before(node, _cast(value, wide, names, labels))
        node.replace_input_with(index, wide_of[value])
    widen_attributes(node)
    for value in node.outputs:
        if value.dtype in HALVES:
            narrow = ir.Value(name=value.name, shape=value.shape, type=value.type)
            value.name, value.type = names.fresh(f"{value.name}.single"), ir.TensorType(ir.DataType.FLOAT)
            value.replace_all_uses_with(narrow, replace_graph_outputs=True)
            node.graph.insert_after(node, _cast(value, narrow, names, labels))


def _cast(value: ir.Value, made: ir.Value, names: _Names, labels: dict[str, str]) -> ir.Node:
    assert made.dtype is not None
    name = names.fresh(f"node.{made.name}.cast")
    return ir.node("Cast", [value], {"to": int(made.dtype)}, name=name, outputs=[made], metadata_props=labels)
