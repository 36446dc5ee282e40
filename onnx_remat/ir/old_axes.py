"""Axes of Squeeze and Unsqueeze in opsets before 11, which state positive ones alone.

Exporters of that time wrote negative axes too, and ONNX Runtime takes them; ONNX's inference leaves them out, so that
shapes are wrong from there on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx
from onnx import helper, shape_inference

from onnx_remat.errors import ModelError
from onnx_remat.ir import native
from onnx_remat.ir.body import bodies
from onnx_remat.ir.light import without_weights
from onnx_remat.ir.opsets import is_op, opset_of
from onnx_remat.process import worker

_COUNTS_FROM_THE_END = 11
"""Opset from which the two ops state that axes may be negative."""
_OWN = "onnx_remat.axes"


def positive(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model in which no axes of Squeeze and Unsqueeze are negative if its opset knows no such axes.

    Where one is, the result is a copy; it states no types of values that inference finds to be of others.

    Raises
    ------
    ModelError
        The rank of what a node reads is unknown.
    """
    if opset_of(model) >= _COUNTS_FROM_THE_END or not any(_counting_from_the_end(model.graph)):
        return model
    light = without_weights(model)
    light.graph.ClearField("value_info")  # ONNX's own inference may have stated it
    data = light.SerializeToString()
    limit = native.limit(len(light.graph.node), len(data))
    ranks, made = worker.ask("ONNX's inference", "onnx_remat.ir.old_axes:do_ranks", limit, data)
    types = native.stated(onnx.GraphProto.FromString(made))
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for node, found in zip(list(_counting_from_the_end(copy.graph)), ranks, strict=True):
        rank = found if found is not None else _stated_rank(model.graph, node.input[0])
        if rank is None:
            raise ModelError(
                f"node {node.name or node.output[0]!r} ({node.op_type}) counts axes from the end, and the rank of "
                f"{node.input[0]!r} is unknown: add value_info for it, or export the model with opset 13"
            )
        axes = _axes(node)
        size = rank + (len(axes.ints) if node.op_type == "Unsqueeze" else 0)
        axes.ints[:] = [axis + size if axis < 0 else axis for axis in axes.ints]
    right = [value for value in copy.graph.value_info if not _differ(value.type, types.get(value.name))]
    del copy.graph.value_info[:]
    copy.graph.value_info.extend(right)
    return copy


def do_ranks(data: bytes) -> tuple[list[int | None], bytes]:
    """Infer for `positive`: ranks of what the nodes read, and types of the model's values.

    A node becomes a call of a function that is of a later opset, where inference knows such axes.
    """
    model = onnx.ModelProto.FromString(data)
    nodes = list(_counting_from_the_end(model.graph))
    for index, node in enumerate(nodes):
        body = helper.make_node(node.op_type, ["x"], ["y"], axes=list(_axes(node).ints))
        later = helper.make_opsetid("", _COUNTS_FROM_THE_END)
        model.functions.append(helper.make_function(_OWN, f"from_the_end_{index}", ["x"], ["y"], [body], [later]))
        node.domain, node.op_type = _OWN, f"from_the_end_{index}"
        del node.attribute[:]
    model.opset_import.append(helper.make_opsetid(_OWN, 1))
    try:
        inferred = shape_inference.infer_shapes(model, data_prop=True).graph
    except native.REFUSALS as error:
        raise ModelError(f"ONNX shape inference refuses the model: {native.first_line(error)}") from error
    types = onnx.GraphProto(
        value_info=[onnx.ValueInfoProto(name=k, type=v) for k, v in native.stated(inferred).items()]
    )
    return list(_ranks(inferred, {})), types.SerializeToString()


def _counting_from_the_end(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield nodes with negative axes, those of bodies too."""
    for node in graph.node:
        if is_op(node, "Squeeze", "Unsqueeze") and any(axis < 0 for axis in _axes(node).ints):
            yield node
        for body in bodies(node):
            yield from _counting_from_the_end(body)


def _axes(node: onnx.NodeProto) -> onnx.AttributeProto:
    return next((each for each in node.attribute if each.name == "axes"), onnx.AttributeProto())


def _ranks(graph: onnx.GraphProto, outer: Mapping[str, onnx.TypeProto]) -> Iterator[int | None]:
    """Yield the ranks of what the functions of `do_ranks` read, in the order of `_counting_from_the_end`."""
    types = {**outer, **native.stated(graph)}
    for node in graph.node:
        if node.domain == _OWN:
            yield _rank(types.get(node.input[0]))
        for body in bodies(node):
            yield from _ranks(body, types)


def _rank(kind: onnx.TypeProto | None) -> int | None:
    return len(kind.tensor_type.shape.dim) if kind is not None and kind.tensor_type.HasField("shape") else None


def _differ(stated: onnx.TypeProto, found: onnx.TypeProto | None) -> bool:
    if found is None or _rank(stated) is None or _rank(found) is None:
        return False
    pairs = zip(stated.tensor_type.shape.dim, found.tensor_type.shape.dim, strict=False)
    sizes = [(a.dim_value, b.dim_value) for a, b in pairs if a.HasField("dim_value") and b.HasField("dim_value")]
    return _rank(stated) != _rank(found) or any(a != b for a, b in sizes)


def _stated_rank(graph: onnx.GraphProto, name: str) -> int | None:
    return _rank(native.stated(graph).get(name))
