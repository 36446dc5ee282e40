"""A shape for every value of a forward model, with a name for every open size."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir

from onnx_remat.errors import ConversionError, UsageError
from onnx_remat.ir.light import without_weights
from onnx_remat.messages import Setting
from onnx_remat.ort import runtime

from ..constants import fold, static
from .sequences import unpack_sequences
from .upgrade import ROUNDING


def infer_shapes(model: ir.Model, dims: Mapping[str, int]) -> ir.Model:
    """Infer shapes and dtypes of all values, with the sizes in `dims` fixed and unknown sizes named.

    Raises
    ------
    ConversionError
        The model is inconsistent, or a Resize of opset 10 has scales that follow from the run.
    UsageError
        It has no size of a name in `dims`.
    """
    seen = {str(d.value) for v in model.graph.inputs for d in (v.shape or ()) if not isinstance(d, int)}
    if unknown := [name for name in dims if name not in seen]:
        raise UsageError(f"dims: no input has a size called {unknown[0]!r}: use one of {sorted(seen)}")
    for value in (*model.graph.inputs, *(v for node in model.graph for v in node.outputs)):
        if value.shape is not None:
            value.shape = ir.Shape([d if isinstance(d, int) else dims.get(str(d.value), d) for d in value.shape])
    for node in model.graph:
        # Declared shapes of outputs may be less precise than inferred ones, or use other symbols.
        for value in node.outputs:
            if value.shape is not None and not value.shape.is_static():
                value.shape = None
    proto = ir.to_proto(model)
    try:
        inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True, strict_mode=True)
    except Exception:  # strict mode stops at the first op that it cannot infer; the other ops may not need that shape
        inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    made = ir.from_proto(inferred)
    # Values known now may determine further shapes. A Resize of constants is folded only once it has its rounding.
    if (
        _round_coordinates(made.graph)
        or unpack_sequences(made.graph)
        or (fold(made) and any(not _is_static(v) for n in made.graph for v in n.outputs))
    ):
        return infer_shapes(made, {})
    proto = ir.to_proto(made)
    if _unranked(proto):
        made = ir.from_proto(runtime.infer_shapes_symbolically(proto) or proto)
    if left := [node.name for node in made.graph if ROUNDING in node.metadata_props]:
        raise ConversionError(
            "node {!r} (Resize): its scales are unknown before the run, and with them how it rounds coordinates: fix "
            "open sizes with {}, or convert the model to opset 11",
            left[0],
            Setting("dims"),
        )
    _name_sizes(made)
    for index, value in enumerate((*made.graph.inputs, *(v for node in made.graph for v in node.outputs))):
        if value.shape is not None:
            known = [d if isinstance(d, int) else d.value for d in value.shape]
            value.shape = ir.Shape([f"size.{index}.{i}" if d is None else d for i, d in enumerate(known)])
    return made


_SIZES = ((10007, 1013), (20011, 1709))
"""First size and step between sizes of the two inferences: no difference of two of them is a window or a padding of a
model, nor are two differences equal."""
_WITHOUT_END = 2**31 - 1
"""Ends of Slices from this one on mean the end of the axis."""


def _name_sizes(model: ir.Model) -> None:
    """Name each size after the input size that it equals in two inferences with different values for all names."""
    values = [v for node in model.graph for v in node.outputs if v.shape is not None]
    names = sorted({str(d.value) for v in model.graph.inputs for d in v.shape or () if not isinstance(d, int)})
    if all(isinstance(d, int) or d.value in names for v in values for d in v.shape or ()):
        return
    found: dict[tuple[str, int], str] = {}
    above = _largest_integer(model)  # a Slice to a constant end must cut the axis, as it does in a longer batch
    for first, step in _SIZES:
        sizes = {name: above + first + step * i for i, name in enumerate(names)}
        light = without_weights(ir.to_proto(model))
        light.graph.ClearField("value_info")
        for value in (*light.graph.input, *light.graph.output):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param in sizes:
                    dim.dim_value = sizes[dim.dim_param]
                elif not dim.HasField("dim_value"):
                    dim.Clear()
        inferred = onnx.shape_inference.infer_shapes(light, data_prop=True).graph
        called = {size: name for name, size in sizes.items()}
        seen = {
            (value.name, axis): called.get(dim.dim_value, "")
            for value in (*inferred.value_info, *inferred.output)
            for axis, dim in enumerate(value.type.tensor_type.shape.dim)
        }
        found = seen if not found else {place: name for place, name in found.items() if seen.get(place) == name}
    for value in values:
        sizes_of = enumerate(value.shape or ())
        value.shape = ir.Shape([d if isinstance(d, int) else found.get((str(value.name), i)) or d for i, d in sizes_of])


_ENDS = 64
"""Elements of the largest constant that may be one of a Slice's ends: larger ones are weights and tables of indices."""


def _largest_integer(model: ir.Model) -> int:
    """Return the largest integer among constants such as the end of a Slice, in size; at least 0."""
    stored = (value.const_value for graph in model.graphs() for value in graph.initializers.values())
    kinds = (ir.DataType.INT32, ir.DataType.INT64)
    sizes = (abs(t.numpy().astype(np.int64)) for t in stored if t is not None and t.dtype in kinds and t.size <= _ENDS)
    return max((int(each[each < _WITHOUT_END].max(initial=0)) for each in sizes), default=0)


def _is_static(value: ir.Value) -> bool:
    return value.shape is not None and value.shape.is_static()


def _unranked(proto: onnx.ModelProto) -> bool:
    known = {v.name for v in (*proto.graph.value_info, *proto.graph.output) if v.type.tensor_type.HasField("shape")}
    return any(name not in known for node in proto.graph.node for name in node.output if name)


def _round_coordinates(graph: ir.Graph) -> bool:
    """Let each Resize of opset 10 round as its scales demand, where they are known; return whether any is."""
    found = False
    for node in list(graph):
        given = node.inputs[2] if ROUNDING in node.metadata_props else None
        scales = static(given) if given is not None else None
        if scales is None:
            continue
        del node.metadata_props[ROUNDING]
        if (scales < 1).any() and (scales > 1).any():
            _enlarge_first(node, scales)
        node.attributes["nearest_mode"] = ir.AttrString("nearest_mode", "ceil" if (scales < 1).any() else "floor")
        found = True
    return found


def _enlarge_first(node: ir.Node, scales: np.ndarray) -> None:
    """Divide a Resize in two: another one before it enlarges axes, and it makes the others smaller."""
    graph, name = node.graph, f"{node.outputs[0].name}.enlarged"
    assert isinstance(graph, ir.Graph)
    factors = [
        ir.Value(name=f"{name}.{what}", const_value=ir.tensor(each.astype(scales.dtype)))
        for what, each in (("scales", np.maximum(scales, 1)), ("rest", np.minimum(scales, 1)))
    ]
    for value in factors:
        value.shape, value.type = ir.Shape(scales.shape), ir.TensorType(ir.tensor(scales).dtype)
        graph.register_initializer(value)
    made = ir.node("Resize", [node.inputs[0], None, factors[0]], dict(node.attributes), name=name)
    made.attributes["nearest_mode"] = ir.AttrString("nearest_mode", "floor")
    made.outputs[0].name = name
    made.metadata_props["phase"] = "forward"
    graph.insert_before(node, made)
    node.replace_input_with(0, made.outputs[0])
    node.replace_input_with(2, factors[1])
