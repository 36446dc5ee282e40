"""Values that follow from constants and static shapes, computed before the run."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes import common

from onnx_remat.ir.op_semantics import semantics

_LARGEST = 1 << 16  # elements: shapes, axes, masks of windows, never weights
_KEY = "static, at most {}"


def static(value: ir.Value, largest: int = _LARGEST) -> np.ndarray | None:
    """Return a value that follows from constants and static shapes; None if it does not, or has more elements."""
    if value.is_graph_input():
        return None
    if value.const_value is not None:
        return value.const_value.numpy() if value.const_value.size <= largest else None
    key = _KEY.format(largest)
    if key not in value.meta:
        value.meta[key] = _evaluate(value, largest)
    found: np.ndarray | None = value.meta[key]
    return found


def forget(value: ir.Value, largest: int) -> None:
    """Free what `static` has computed for a value."""
    value.meta.pop(_KEY.format(largest), None)


def fold(model: ir.Model) -> bool:
    """Turn constants, and values that follow from them and from static shapes, into initializers, in place.

    Return True if this removed nodes other than Constant.
    """
    graph, found = model.graph, False
    for node in list(graph):
        known = {value: static(value) for value in node.outputs if value.uses()}
        if any(v.is_graph_output() for v in node.outputs) or not known:
            continue
        stored = {value: ir.tensor(array) for value, array in known.items() if array is not None}
        if len(stored) < len(known) or any(v.dtype != t.dtype or v.shape != t.shape for v, t in stored.items()):
            continue
        for value, tensor in stored.items():
            made = ir.Value(name=value.name, const_value=tensor, shape=value.shape, type=ir.TensorType(tensor.dtype))
            value.name = f"{value.name}.node"
            value.replace_all_uses_with(made)
            graph.register_initializer(made)
        graph.remove(node, safe=True)
        found = found or node.op_type != "Constant"
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    return found


def _evaluate(value: ir.Value, largest: int) -> np.ndarray | None:
    node = value.producer()
    if node is None or node.domain or node.op_type in _WRONG:
        return None
    if any(a.type in _BODIES for a in node.attributes.values()):
        return None
    if node.op_type in ("Shape", "Size"):
        return _of_shape(node)
    if node.op_type == "CastLike" and None not in node.inputs:
        known, like = static(node.inputs[0], largest), node.inputs[1].dtype  # type: ignore[arg-type, union-attr]
        return known.astype(like.numpy()) if known is not None and like is not None else None
    if semantics(node.domain, node.op_type).random:
        return None
    inputs: list[np.ndarray | None] = []
    for source in node.inputs:
        known = None if source is None else static(source, largest)
        if source is not None and known is None:
            return None
        inputs.append(known)
    if value.shape is not None and value.shape.is_static() and int(np.prod(value.shape.numpy())) > largest:
        return None
    try:
        made = _run(node, inputs)[value.index() or 0]
        return None if isinstance(made, list) else made  # a sequence is not an array
    except Exception:  # the reference implementation has gaps: the value then stays unknown
        return None


_WRONG = ("ConvTranspose", "LRN", "LpNormalization")
"""Operators of which the reference implementation computes something else, see `checks.exact_ops`."""

_BODIES = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def _of_shape(node: ir.Node) -> np.ndarray | None:
    shape = node.inputs[0].shape if node.inputs[0] is not None else None
    if shape is None:
        return None
    end = node.attributes["end"].value if "end" in node.attributes else None
    start = node.attributes["start"].value if "start" in node.attributes else None
    wanted = list(shape)[start:end]
    if not all(isinstance(d, int) for d in wanted):
        return None
    sizes = np.asarray(wanted, np.int64)
    return sizes if node.op_type == "Shape" else np.asarray(sizes.prod(), np.int64)


def _run(node: ir.Node, inputs: list[np.ndarray | None]) -> list[np.ndarray]:
    """Return the outputs of one node on the reference implementation."""
    given = {f"i{k}": array for k, array in enumerate(inputs) if array is not None}
    proto = ir.to_proto(node)
    assert isinstance(proto, onnx.NodeProto)
    proto.input[:] = [f"i{k}" if array is not None else "" for k, array in enumerate(inputs)]
    proto.output[:] = [f"o{k}" for k in range(len(proto.output))]
    graph = onnx.helper.make_graph(
        [proto],
        "constant",
        [onnx.ValueInfoProto(name=name) for name in given],
        [onnx.ValueInfoProto(name=name) for name in proto.output],
    )
    opset = node.graph.opset_imports[""] if isinstance(node.graph, ir.Graph) else 20
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset or 20)])
    return list(ReferenceEvaluator(model).run(None, given))
