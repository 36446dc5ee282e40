"""Half-precision graphs as float32 graphs, for queries to a runtime without half-precision kernels.

ONNX Runtime's CPU provider inserts casts around nodes in half precision, so its optimised graph would not resemble the
device's. For the same graph in float32 it makes the graph that the device makes in half precision, provided that casts
that change nothing in float32 stay (`KEEPS_CASTS`, `_STAND_INS`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from onnx_remat.ir import constant_nodes, native
from onnx_remat.ir.body import bodies
from onnx_remat.ir.shapes import Tensor

HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
"""Element types that the CPU computes in float32."""

KEEPS_CASTS = ("CastElimination", "CastChainElimination")
"""ONNX Runtime's names of the optimisations that would eliminate casts that only matter in half precision."""

_STAND_INS = {False: "Max", True: "Min"}
"""Operators in place of a Cast that reads what another Cast rounds, by whether it rounds again: of one number, each is
that number. At every level, ONNX Runtime removes a pair of casts from float32 and back; other optimisations treat a
Cast and these alike."""

_MAY_VANISH = ("Dropout", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
"""Operators that may be removed between two casts."""

_TYPE_NAMES = ("to", "dtype", "output_dtype")  # attributes of standard operators that are an element type


def has_halves(model: onnx.ModelProto) -> bool:
    """Whether a stated value, or a Cast, has one of these types."""
    graph = model.graph
    stated = (value.type.tensor_type.elem_type for value in (*graph.input, *graph.output, *graph.value_info))
    casts = (a.i for node in graph.node if node.op_type == "Cast" for a in node.attribute if a.name == "to")
    return any(kind in HALVES for kind in (*stated, *casts, *(tensor.data_type for tensor in graph.initializer)))


def as_floats(light: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model whose large weights are inputs (`light.without_weights`) in float32; every node gets a name."""
    shown = onnx.ModelProto()
    shown.CopyFrom(light)
    _to_floats(shown.graph)
    return shown


def _to_floats(graph: onnx.GraphProto) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type in HALVES:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    for tensor in graph.initializer:
        _widen(tensor)
    rounded: set[str] = set()
    for name, node in zip(_names(graph), graph.node, strict=True):
        node.name = name
        to = next((a.i for a in node.attribute if a.name == "to"), None) if node.op_type == "Cast" else None
        follows = bool(node.input) and node.input[0] in rounded
        if to in HALVES or (follows and node.op_type in _MAY_VANISH):
            rounded.add(node.output[0])
        if follows and to in (TensorProto.FLOAT, *HALVES):
            node.op_type = _STAND_INS[to in HALVES]
            node.ClearField("attribute")
        for attribute in _typed(node):
            if attribute.type == onnx.AttributeProto.TENSOR:
                _widen(attribute.t)
            else:
                attribute.i = TensorProto.FLOAT
        for body in bodies(node):
            _to_floats(body)


def as_halves(optimized: onnx.ModelProto, light: onnx.ModelProto, tensors: Mapping[str, Tensor]) -> None:
    """Restore the types of an optimised ``as_floats(light)``; `tensors` are those of the values of `light`."""
    _to_halves(optimized.graph, light.graph, {name: tensor.dtype for name, tensor in tensors.items()})


def _to_halves(graph: onnx.GraphProto, own: onnx.GraphProto, types: Mapping[str, int]) -> None:
    """Restore the types of an optimised graph from the one it was, whose values have these types."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.name in types:
            value.type.tensor_type.elem_type = types[value.name]
    for tensor in graph.initializer:
        if types.get(tensor.name) in HALVES:
            kind = onnx.helper.tensor_dtype_to_np_dtype(types[tensor.name])
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(kind), tensor.name))
    nodes = dict(zip(_names(own), own.node, strict=True))
    _separate_constants(graph, own, nodes)
    for node in graph.node:
        if node.name not in nodes:
            continue
        if node.op_type in _STAND_INS.values() and nodes[node.name].op_type == "Cast":
            node.op_type = "Cast"
            node.attribute.extend(nodes[node.name].attribute)
        narrow = {attribute.name: attribute for attribute in _typed(nodes[node.name])}
        before = {attribute.name: attribute.g for attribute in nodes[node.name].attribute if attribute.HasField("g")}
        for attribute in node.attribute:
            if attribute.name in narrow:
                attribute.CopyFrom(narrow[attribute.name])
            if attribute.name in before:
                _body_to_halves(attribute.g, before[attribute.name])


def _separate_constants(graph: onnx.GraphProto, own: onnx.GraphProto, nodes: Mapping[str, onnx.NodeProto]) -> None:
    """Let nodes read the constants that they read before: in float32, ONNX Runtime shares equal ones of all types.

    A node may have its inputs in another order (``Where(Not(x), a, b)``), so it is the number that tells a constant.
    """
    floats = (TensorProto.FLOAT, *HALVES)
    stated = {node.output[0]: constant_nodes.tensor_of(node) for node in own.node if node.op_type == "Constant"}
    stated |= {tensor.name: tensor for tensor in own.initializer}
    was = {name: tensor for name, tensor in stated.items() if tensor is not None and tensor.data_type in floats}
    now = {tensor.name: tensor for tensor in graph.initializer if tensor.data_type in floats}
    numbers = {name: _number(tensor) for name, tensor in (was | now).items()}
    for node in graph.node:
        before = nodes[node.name].input if node.name in nodes else ()
        by_number = {numbers[name]: name for name in before if name in was}
        for slot, name in enumerate(node.input):
            known = by_number.get(numbers[name]) if name in now and name not in before else None
            if known is not None and was[known].data_type != now[name].data_type:
                node.input[slot] = known
                if known not in now:
                    now[known] = was[known]
                    graph.initializer.append(was[known])
                    graph.initializer[-1].name = known


def _number(tensor: onnx.TensorProto) -> bytes:
    return numpy_helper.to_array(tensor).astype(np.float32).tobytes()


def _body_to_halves(body: onnx.GraphProto, own: onnx.GraphProto) -> None:
    stated = {name: kind.tensor_type.elem_type for name, kind in native.stated(own).items()}
    kept = [value for value in body.value_info if value.name in stated]
    del body.value_info[:]  # the types of other values follow
    body.value_info.extend(kept)
    _to_halves(body, own, stated)


def _names(graph: onnx.GraphProto) -> list[str]:
    """Return a name for each node, its own where no other has it."""
    counts = Counter(node.name for node in graph.node)
    return [
        node.name if node.name and counts[node.name] == 1 else f"{node.name} node {number}".strip()
        for number, node in enumerate(graph.node)
    ]


def _typed(node: onnx.NodeProto) -> Iterator[onnx.AttributeProto]:
    """Yield the attributes of a node that state half precision."""
    for attribute in node.attribute:
        tensor = attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type in HALVES
        if tensor or (attribute.name in _TYPE_NAMES and attribute.i in HALVES):
            yield attribute


def _widen(tensor: onnx.TensorProto) -> None:
    if tensor.data_type in HALVES:
        wide = numpy_helper.to_array(tensor).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(wide, tensor.name))
