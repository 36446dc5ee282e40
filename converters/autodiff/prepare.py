"""Prepare a forward model: one opset, no functions, weights as inputs, a shape for every value."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import onnx.version_converter
import onnx_ir as ir
import onnx_ir.passes.common as passes
from google.protobuf.message import DecodeError

from onnx_remat.errors import ConversionError, ModelError, OnnxRematError, UsageError, did_you_mean
from onnx_remat.ir.expand import expand
from onnx_remat.ir.graph import build
from onnx_remat.ir.model_io import without_weights
from onnx_remat.ir.opsets import one_name_for_the_standard, opset_of
from onnx_remat.messages import Setting, first_line
from onnx_remat.ort import runtime

from ..constants import fold, static
from ..tape import Tape
from .registry import NO_GRADIENT
from .rules import RULES
from .rules_norm import BATCH_STATISTICS
from .sequences import unpack_sequences

OLDEST, UPGRADED = 18, 20
"""Opsets below the first (axes of reductions were attributes) are converted to the second."""

Source = str | os.PathLike[str] | onnx.ModelProto

_MASK = -1e4  # an initializer with a value at or below this is a mask, not a weight
_CONTROLS = {
    "Resize": (1, 2), "Upsample": (1,), "Clip": (1, 2), "Dropout": (1, 2), "BatchNormalization": (3, 4),
    "OneHot": (1, 2), "Range": (0, 1, 2),
}  # fmt: skip
_ARITHMETIC = ("Sub", "Mul", "Div", "Pow", "Max", "Min", "Where", "Equal", "Greater", "Less", "Mod")


def load(source: Source) -> ir.Model:
    """Read a forward model, convert it to an opset that the gradient rules support, and inline its functions.

    Raises
    ------
    ModelError
        The file cannot be read.
    ConversionError
        The file is invalid, or onnx cannot convert it.
    """
    try:
        proto = one_name_for_the_standard(source if isinstance(source, onnx.ModelProto) else _read(Path(source)))
        if proto.functions:
            proto = onnx.inliner.inline_local_functions(proto)
        left = {(function.domain, function.name) for function in proto.functions}
        for node in proto.graph.node:
            _check_known(node, left)
        for sparse in proto.graph.sparse_initializer:  # onnx_ir would leave it out
            raise ConversionError(f"initializer {sparse.values.name!r} is sparse: store it as a dense tensor")
        standard = opset_of(proto)
        proto = _by_definition(proto, standard)
        _check(proto)
        if standard < OLDEST:
            proto = onnx.version_converter.convert_version(_aligned(proto, standard), UPGRADED)
        model = ir.from_proto(_expanded(proto))
        if standard < _STATES_COORDINATES:
            _state_coordinates(model.graph, standard)
    except OnnxRematError:
        raise
    except Exception as error:
        raise ConversionError(
            f"the forward model cannot be read or converted to opset {UPGRADED}: {first_line(error)}"
        ) from error
    model.ir_version = max(model.ir_version, 9)  # IR versions before 4 require that weights are inputs
    passes.RemoveInitializersFromInputsPass()(model)
    taken: set[str] = set()
    for index, node in enumerate(model.graph):
        if not node.name or node.name in taken:  # values that `into_training` adds are called after their nodes
            node.name = f"{node.name or node.op_type}.{index}"
        taken.add(node.name)
        node.metadata_props["phase"] = "forward"
        node.doc_string = None
    return model


def _by_definition(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Replace ops that have other definitions since, which onnx's converter does not know: Hardmax before opset 13
    flattens its input, and GroupNormalization before 21 scales groups, not channels."""
    definitions = {"Hardmax": _hardmax_of_rows} if 5 <= opset < 13 else {}
    definitions |= {"GroupNormalization": _groups_normalized} if opset < 21 else {}
    if all(node.op_type not in definitions or node.domain for node in proto.graph.node):
        return proto
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    del made.graph.node[:]
    for node in proto.graph.node:
        define = None if node.domain else definitions.get(node.op_type)
        made.graph.node.extend([node] if define is None else define(node))
    return made


def _hardmax_of_rows(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    axis = next((each.i for each in node.attribute if each.name == "axis"), 1)
    flatten = onnx.helper.make_node("Flatten", node.input[:1], [f"{node.output[0]}.rows"], axis=axis)
    return _between(node, flatten, onnx.helper.make_node("Hardmax", [], [], node.name, axis=1))


def _groups_normalized(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    stated = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    to = f"{node.output[0]}.groups"
    shape = np.asarray([0, stated.pop("num_groups"), -1])
    target = onnx.helper.make_node("Constant", [], [to], value=onnx.numpy_helper.from_array(shape))
    reshape = onnx.helper.make_node("Reshape", [node.input[0], to], [f"{node.output[0]}.rows"])
    normalize = onnx.helper.make_node("InstanceNormalization", node.input[1:], [], node.name, **stated)
    return [target, *_between(node, reshape, normalize)]


def _between(node: onnx.NodeProto, before: onnx.NodeProto, op: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return nodes that apply `op` to the result of `before` and give the result the shape of the node's input."""
    x, y = node.input[0], node.output[0]
    op.input.insert(0, before.output[0])
    op.output.append(f"{y}.made")
    shape = onnx.helper.make_node("Shape", [x], [f"{y}.shape"])
    return [before, op, shape, onnx.helper.make_node("Reshape", [op.output[0], shape.output[0]], [y])]


def _read(path: Path) -> onnx.ModelProto:
    try:
        return onnx.load(path)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except DecodeError as error:
        raise ModelError(f"{path} is not an ONNX model, or is truncated") from error


_STATES_COORDINATES = 11
"""Opset from which Resize has attributes for its coordinates."""
_ROUNDING = "rounding follows from scales"
"""Key in the metadata of a Resize whose scales `_round_coordinates` has yet to look at."""


def _state_coordinates(graph: ir.Graph, opset: int) -> None:
    """Give each Resize the coordinates of earlier opsets, which onnx's converter leaves at another default.

    ONNX Runtime rounds them up along axes that become smaller, else down. Upsample, as Resize was called before opset
    10, makes none smaller. Scales of a Resize may follow from sizes, so `_round_coordinates` looks at them later.
    """
    for node in graph:
        if node.op_type != "Resize" or node.domain or "coordinate_transformation_mode" in node.attributes:
            continue
        node.attributes["coordinate_transformation_mode"] = ir.AttrString(
            "coordinate_transformation_mode", "asymmetric"
        )
        if "mode" in node.attributes and node.attributes["mode"].as_string() != "nearest":
            continue
        if opset < 10:
            node.attributes["nearest_mode"] = ir.AttrString("nearest_mode", "floor")
        else:
            node.metadata_props[_ROUNDING] = ""


def _round_coordinates(graph: ir.Graph) -> bool:
    """Let each Resize of opset 10 round as its scales demand, where they are known; return whether any is."""
    found = False
    for node in list(graph):
        given = node.inputs[2] if _ROUNDING in node.metadata_props else None
        scales = static(given) if given is not None else None
        if scales is None:
            continue
        del node.metadata_props[_ROUNDING]
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


def _aligned(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Align second operands at the axis that opsets before 7 state (`broadcast`, `axis`), and PRelu's slopes at the
    channels: onnx's converter refuses the first, and leaves the others at the last axis.

    Raises
    ------
    ConversionError
        The rank of such a node's input is unknown.
    """
    if opset >= 7:
        return proto
    inferred = onnx.shape_inference.infer_shapes(proto).graph
    types = {v.name: v.type.tensor_type for v in (*inferred.value_info, *inferred.input, *inferred.output)}
    ranks = {name: len(kind.shape.dim) for name, kind in types.items() if kind.HasField("shape")}
    ranks |= {tensor.name: len(tensor.dims) for tensor in proto.graph.initializer}
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    del made.graph.node[:]
    for original in proto.graph.node:
        node = onnx.NodeProto.FromString(original.SerializeToString())
        stated = {a.name: a.i for a in node.attribute if a.name in ("broadcast", "axis")}
        is_slope = node.op_type == "PRelu" and ranks.get(node.input[1]) != 0
        if is_slope or (stated.get("broadcast") and "axis" in stated):
            first, second = node.input
            if unknown := [name for name in (first, second) if name not in ranks]:
                raise ConversionError(
                    f"node {node.name or node.output[0]!r} ({node.op_type}): the rank of {unknown[0]!r} is unknown, "
                    "and so the axis at which its inputs meet: add value_info for it, or convert the model to opset 7"
                )
            at = 1 if is_slope else stated["axis"] % max(1, ranks[first])
            if missing := list(range(ranks[second], ranks[first] - at)):
                node.input[1] = f"{node.output[0]}.aligned"
                made.graph.node.append(onnx.helper.make_node("Unsqueeze", [second], [node.input[1]], axes=missing))
            if not is_slope:
                kept = [attribute for attribute in node.attribute if attribute.name != "axis"]
                del node.attribute[:]
                node.attribute.extend(kept)
        made.graph.node.append(node)
    return made


def _check_known(node: onnx.NodeProto, functions: Collection[tuple[str, str]]) -> None:
    """Raise ConversionError if an op is not in ONNX; `functions` are those that cannot be inlined."""
    if not onnx.defs.has(node.op_type, node.domain):
        domain = f"{node.domain}." if node.domain else ""
        name = node.name or next(filter(None, node.output), "")
        if (node.domain, node.op_type) in functions:
            raise ConversionError(
                f"function {domain}{node.op_type} (node {name!r}) is of another opset than the model: use one"
            )
        raise ConversionError(f"no gradient rule for op {domain}{node.op_type} (node {name!r}): not in ONNX")


def _check(proto: onnx.ModelProto) -> None:
    """Raise ConversionError unless a model is valid ONNX: onnx_ir itself trusts names and fills in missing values."""
    light = without_weights(proto)
    try:
        build(light)  # its error names the node and a remedy
        # The checker handles bodies; type inference finds missing types later.
        light.graph.ClearField("value_info")
        for value in (*light.graph.input, *light.graph.output):
            value.type.CopyFrom(onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, []))
        onnx.checker.check_model(light)
    except (ModelError, onnx.checker.ValidationError, UnicodeDecodeError) as error:
        raise ConversionError(f"the forward model is invalid: {first_line(error)}") from error


def _expanded(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Replace ops without a gradient rule by the ONNX functions that define them."""
    opset = opset_of(proto)
    wanted = []
    for op_type in dict.fromkeys(n.op_type for n in proto.graph.node if not n.domain):
        if op_type in RULES or op_type in NO_GRADIENT or not onnx.defs.has(op_type, opset):
            continue
        schema = onnx.defs.get_schema(op_type, opset)
        if schema.has_function or schema.has_context_dependent_function:  # type: ignore[attr-defined]
            wanted.append(("", op_type))
    return expand(proto, wanted)[0]


def initial_values(graph: ir.Graph) -> Iterator[tuple[str, ir.Value]]:
    """Yield the values that may become parameters: initializers, and values computed from constants alone."""
    yield from ((str(value.name), value) for value in graph.initializers.values())
    for node in graph:
        if not any(v is not None for v in node.inputs) or node.op_type == "ConstantOfShape":
            yield from ((str(value.name), value) for value in node.outputs)


def select(graph: ir.Graph, wrt: Sequence[str] | None, frozen: Sequence[str]) -> list[ir.Value]:
    """Return the parameters: values whose names match `wrt`, or by default all that look like weights.

    Those are all floating-point initializers except running statistics, masks (with values of -10000 and below, or not
    finite), scalars, one-element vectors that ops other than layers read, and settings such as the limits of Clip. A
    ConstantOfShape of a value other than 0 and 1 counts as an initializer, because files without data store weights in
    this form.

    Raises
    ------
    UsageError
        A name matches nothing, or an integer.
    """
    candidates = {str(value.name): value for value in graph.inputs} | dict(initial_values(graph))
    held = _frozen(candidates, frozen)
    if wrt is None:
        return [value for name, value in initial_values(graph) if name not in held and _is_weight(value)]
    found: dict[str, ir.Value] = {}
    for pattern in wrt:
        exact, names = pattern in candidates, _matching(pattern, candidates)
        if not names:
            hint = did_you_mean(pattern, candidates)
            raise UsageError(f"wrt: no input or initializer is called {pattern!r}{hint}")
        for name in names:
            dtype = candidates[name].dtype
            if dtype is None or dtype.is_floating_point():
                found[name] = candidates[name]
            elif exact:
                raise UsageError(f"wrt: {name!r} is {dtype}, and only floating point has gradients: leave it out")
    return [value for name, value in found.items() if name not in held]


def _frozen(known: Collection[str], patterns: Sequence[str]) -> set[str]:
    """Return the names that are frozen; raise UsageError for a pattern that matches none."""
    found: set[str] = set()
    for pattern in patterns:
        matched = _matching(pattern, known)
        if not matched:
            raise UsageError(f"frozen: no input or initializer is called {pattern!r}{did_you_mean(pattern, known)}")
        found.update(matched)
    return found


def _matching(pattern: str, known: Collection[str]) -> list[str]:
    """Return the name that a text is, or the names that match it as a pattern: names of parameters contain brackets."""
    return [pattern] if pattern in known else [name for name in known if fnmatch.fnmatchcase(name, pattern)]


def _is_weight(value: ir.Value) -> bool:
    node = value.producer()
    if node is not None and node.op_type != "ConstantOfShape":
        return False
    uses = value.uses()
    if all(use.idx in _CONTROLS.get(use.node.op_type, ()) for use in uses):
        return False
    known = value.const_value.numpy() if value.const_value is not None else filled(value)
    if known is None or known.dtype.kind not in "fV" or not known.ndim:  # V: bfloat16 and similar types
        return False
    if node is not None and known.size and known.flat[0] in (0, 1):
        return False
    if known.size == 1:
        return any(use.node.op_type not in _ARITHMETIC for use in uses)
    array = known.astype(np.float32, copy=False)
    return bool(np.isfinite(array).all()) and float(array.min(initial=0)) > _MASK


def promote(graph: ir.Graph, value: ir.Value) -> tuple[ir.Value, np.ndarray | None]:
    """Turn a constant into an input; return the input, and the constant's value if it is stored or easily computed."""
    if value.is_graph_input():
        return value, None
    if value.is_initializer():
        assert value.const_value is not None and value.name is not None
        array = value.const_value.numpy()
        graph.initializers.pop(value.name)
        value.const_value = None
        value.shape, value.type = ir.Shape(array.shape), ir.TensorType(ir.tensor(array).dtype)
        return value, array
    made = filled(value)
    if made is None:
        raise ConversionError(f"wrt: the value of {value.name!r} does not follow from constants alone")
    node = value.producer()
    new = ir.Value(name=value.name, shape=ir.Shape(made.shape), type=ir.TensorType(ir.tensor(made).dtype))
    value.name = f"{value.name}.constant"
    value.replace_all_uses_with(new, replace_graph_outputs=True)
    if node is not None and all(not v.uses() and not v.is_graph_output() for v in node.outputs):
        graph.remove(node, safe=True)
    return new, made


def filled(value: ir.Value) -> np.ndarray | None:
    """Return the array of a value computed from constants alone; None if it is not such a value."""
    node = value.producer()
    if node is not None and node.op_type == "ConstantOfShape":
        shape = static(node.inputs[0]) if node.inputs[0] is not None else None
        fill = node.attributes["value"].as_tensor().numpy() if "value" in node.attributes else np.zeros(1, np.float32)
        return None if shape is None else np.full(tuple(shape), fill.item(), fill.dtype)
    return static(value)


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
    if left := [node.name for node in made.graph if _ROUNDING in node.metadata_props]:
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


_RATIO = 0.5
"""Share of entries that a Dropout without a ratio drops."""


def into_training(graph: ir.Graph) -> None:
    """Set every Dropout and every BatchNormalization to training mode, in place.

    Raises
    ------
    ConversionError
        A body contains one in inference mode: nodes of bodies stay as they are.
    """
    for node in ir.traversal.RecursiveGraphIterator(graph):
        if node.graph is not graph and node.op_type in ("Dropout", "BatchNormalization") and not _trains(node):
            name = node.name or node.outputs[0].name
            raise ConversionError(
                f"node {name!r} ({node.op_type}) is in a body, where it stays in inference mode: move it out of there"
            )
    for node in graph:
        if node.op_type == "Dropout":
            yes = ir.Value(name=f"{node.name}.training", const_value=ir.tensor(np.asarray(True)))
            yes.shape, yes.type = ir.Shape([]), ir.TensorType(ir.DataType.BOOL)
            graph.register_initializer(yes)
            node.resize_inputs(3)
            if node.inputs[1] is None:
                ratio = ir.Value(name=f"{node.name}.ratio", const_value=ir.tensor(np.float32(_RATIO)))
                ratio.shape, ratio.type = ir.Shape([]), ir.TensorType(ir.DataType.FLOAT)
                graph.register_initializer(ratio)
                node.replace_input_with(1, ratio)
            node.replace_input_with(2, yes)
            if len(node.outputs) < 2:
                node.resize_outputs(2)
                node.outputs[1].name = f"{node.name}.mask"
        if node.op_type == "BatchNormalization":
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
            node.resize_outputs(3)
            for value, what in zip(node.outputs[1:], ("mean", "var"), strict=True):
                value.name = value.name or f"{node.name}.{what}"


def running_statistics(graph: ir.Graph) -> list[ir.Value]:
    """Return running mean and variance of every BatchNormalization in training mode."""
    return list(dict.fromkeys(v for node in _trained(graph) for v in node.inputs[3:5] if v is not None))


def _trained(graph: ir.Graph) -> list[ir.Node]:
    return [node for node in graph if node.op_type == "BatchNormalization" and _trains(node)]


def _trains(node: ir.Node) -> bool:
    """Return whether a Dropout or a BatchNormalization is in training mode in every run."""
    if node.op_type == "Dropout":
        given = node.inputs[2] if len(node.inputs) > 2 else None
        return given is not None and bool(static(given))
    return "training_mode" in node.attributes and bool(node.attributes["training_mode"].as_int())


def use_batch_statistics(t: Tape, graph: ir.Graph) -> dict[ir.Value, ir.Value]:
    """Divide each BatchNormalization in training mode into the statistics of the batch and the inference form.

    The inference form has a kernel on every device. The training form has none on CUDA, and does not output the
    statistics.

    Returns
    -------
    dict of Value to Value
        The new value of each running statistic.
    """
    updated: dict[ir.Value, ir.Value] = {}
    for node in _trained(graph):
        x, mean_before, variance_before = node.inputs[0], node.inputs[3], node.inputs[4]
        assert x is not None and x.shape is not None and mean_before is not None and variance_before is not None
        others = [i for i in range(len(x.shape)) if i != 1]
        momentum = node.attributes["momentum"].as_float() if "momentum" in node.attributes else 0.9
        with t.ahead_of(node):
            if x.dtype is not None and x.dtype.bitwidth == 16:  # squares overflow in it
                x = t.cast(x, ir.DataType.FLOAT)
            mean = t.reduce("ReduceMean", x, others)
            centred = t.sub(x, mean)
            variance = t.reduce("ReduceMean", t.mul(centred, centred), others, keepdims=False)
            mean = t.reshape(mean, tuple(mean_before.shape or ()))  # type: ignore[arg-type]
        for slot, before, found in ((3, mean_before, mean), (4, variance_before, variance)):
            with t.ahead_of(node):
                now = t.cast(found, before.dtype or ir.DataType.FLOAT)
                latest, share = updated.get(before), t.mul(now, 1 - momentum)
                own = t.add(t.mul(before, momentum), share)
                # Of a module that is called several times, each call goes on from the one before.
                updated[before] = own if latest is None else t.add(t.mul(latest, momentum), share)
            node.replace_input_with(slot, now)
            if len(node.outputs) > slot - 2:
                node.outputs[slot - 2].replace_all_uses_with(own, replace_graph_outputs=True)
        node.resize_outputs(1)
        del node.attributes["training_mode"]
        node.meta[BATCH_STATISTICS] = True
    return updated
