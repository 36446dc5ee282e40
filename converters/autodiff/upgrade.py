"""Read a forward model: of one opset, without functions, of ops that have gradient rules."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import onnx.version_converter
import onnx_ir as ir
import onnx_ir.passes.common as passes
from google.protobuf.message import DecodeError

from onnx_remat.errors import ConversionError, ModelError, OnnxRematError
from onnx_remat.ir.expand import expand
from onnx_remat.ir.graph import build
from onnx_remat.ir.light import without_weights
from onnx_remat.ir.old_axes import positive
from onnx_remat.ir.opsets import one_name_for_the_standard, opset_of
from onnx_remat.messages import first_line

from .parameters import SETTING, initial_values, is_setting
from .registry import NO_GRADIENT
from .rules import RULES

OLDEST, UPGRADED = 18, 20
"""Opsets below the first (axes of reductions were attributes) are converted to the second."""

Source = str | os.PathLike[str] | onnx.ModelProto


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
        proto = positive(proto)
        if standard < OLDEST:
            proto = onnx.version_converter.convert_version(_aligned(proto, standard), UPGRADED)
        settings = [name for name, value in initial_values(ir.from_proto(proto).graph) if is_setting(value)]
        model = ir.from_proto(_expanded(proto))
        for name, value in initial_values(model.graph):
            if name in settings:  # of an op that is replaced by its definition, too
                value.meta[SETTING] = True
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
ROUNDING = "rounding follows from scales"
"""Key in the metadata of a Resize whose scales `shapes` has yet to look at."""


def _state_coordinates(graph: ir.Graph, opset: int) -> None:
    """Give each Resize the coordinates of earlier opsets, which onnx's converter leaves at another default.

    ONNX Runtime rounds them up along axes that become smaller, else down. Upsample, as Resize was called before opset
    10, makes none smaller. Scales of a Resize may follow from sizes, so `shapes` looks at them later.
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
            node.metadata_props[ROUNDING] = ""


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
