"""Types and shapes of operators unknown to ONNX: of ONNX Runtime's training build, and of its blocked layout.

``training_model.onnx``, as onnxruntime-training writes it, has many gradient operators without a schema in onnx or in
stock ONNX Runtime. For shape inference only, standard operators whose results have the same types and shapes stand in
for each. Shapes were compared with runs of onnxruntime-training 1.19.2 (``tests/ir/test_training_ops.py``).

Stock ONNX Runtime runs convolutions on the CPU in a layout of its own; it also infers the shapes of such values, and
reuses buffers between those of equal shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import onnx
from onnx import TensorProto, helper

from onnx_remat.errors import ModelError
from onnx_remat.ir.body import bodies
from onnx_remat.ir.opsets import opset_of
from onnx_remat.messages import Setting, Word

_MS: Final = "com.microsoft"
_NCHWC: Final = "com.microsoft.nchwc"

_LIKE: Final[dict[tuple[str, str], tuple[int, ...]]] = {
    **{
        (_MS, op): (0,)
        for op in (
            "BiasFastGeluGrad_dX", "BiasGeluGrad_dX", "DropoutGrad", "FakeQuantGrad", "FastGeluGrad", "GeluGrad",
            "InPlaceAccumulator", "LeakyReluGrad", "LogSoftmaxGrad", "LogSoftmaxGrad_13", "QuickGeluGrad", "ReluGrad",
            "Scale", "SigmoidGrad", "SoftmaxGrad", "SoftmaxGrad_13", "TanhGrad", "ZeroGradient",
        )
    },
    (_MS, "BatchNormInternal"): (0, 3, 4, 1, 1),
    (_MS, "BatchNormalizationGrad"): (1, 2, 2),
    (_MS, "LayerNormalizationGrad"): (1, 2, 2),
    (_MS, "SimplifiedLayerNormalizationGrad"): (1, 2),
    (_MS, "SoftmaxCrossEntropyLossGrad"): (1,),
    (_MS, "SoftmaxCrossEntropyLossInternalGrad"): (1,),
}  # fmt: skip
"""Per output, the input that has its type and shape."""

_GIVEN_BY: Final = {
    (_MS, "GatherElementsGrad"): (1, 0),
    (_MS, "GatherGrad"): (0, 2),
    (_MS, "GatherNDGrad"): (0, 2),
    (_MS, "SliceGrad"): (1, 0),
}
"""The input whose value is the shape of the only output, and the input that has its type."""

_AS_STANDARD: Final = {
    (_MS, "ReduceSumTraining"): "ReduceSum",
    (_MS, "SoftmaxCrossEntropyLossInternal"): "SoftmaxCrossEntropyLoss",
    (_MS, "SplitTraining"): "Split",
}
"""Operators with the same results as a standard one given the same inputs and attributes."""

_BLOCKED: Final = frozenset({"AveragePool", "Conv", "GlobalAveragePool", "GlobalMaxPool", "MaxPool"})
"""Operators on ONNX Runtime's blocked layout of channels (NCHWc): results have the shapes of the standard ones."""

_UNTOLD: Final = frozenset({*_GIVEN_BY, (_MS, "BatchNormalizationGrad"), (_MS, "ConvGrad"),
                            (_MS, "SimplifiedLayerNormalizationGrad")})  # fmt: skip
"""Operators for which the training build infers no shapes either: it uses those that the file states."""

STATED: Final = frozenset({("", "AveragePoolGrad"), ("", "MaxPoolGrad")})
"""Operators whose kernels take their result's shape from the file's value_info."""

_OURS: Final = frozenset({*_LIKE, *_GIVEN_BY, *_AS_STANDARD, *STATED, (_MS, "ConvGrad"), (_MS, "ConcatTraining"),
                          (_MS, "InPlaceAccumulatorV2")})  # fmt: skip

_FORWARD: Final = frozenset({(_MS, "BiasGelu"), (_MS, "FastGelu"), (_MS, "Gelu"), (_MS, "QuickGelu"),
                             (_MS, "FusedMatMul")})  # fmt: skip
"""Operators that stock ONNX Runtime also has, but whose shapes it cannot infer in a graph with unknown operators."""


def is_training_op(domain: str, op_type: str) -> bool:
    """Whether only the training build has this operator."""
    return (domain, op_type) in _OURS


def is_pure_contrib(domain: str, op_type: str) -> bool:
    """Whether it is one of the operators above, whose results depend on their inputs alone."""
    return (domain, op_type) in _OURS or (domain, op_type) in _FORWARD


def first_training_op(model: onnx.ModelProto) -> onnx.NodeProto | None:
    """Return the first node of a model that only the training build can run, if there is one."""
    return next((node for node in model.graph.node if is_training_op(node.domain, node.op_type)), None)


def check_ops(model: onnx.ModelProto) -> None:
    """Raise a ModelError with advice if stock ONNX Runtime cannot run a model."""
    if node := first_training_op(model):
        raise ModelError(
            "node {!r} ({}) is an op of onnxruntime-training that stock ONNX Runtime lacks: {} names the interpreter "
            "of an environment that has it",
            node.name or node.output[0],
            node.op_type,
            Setting("python", Word("PYTHON")),
        )


def with_stand_ins(model: onnx.ModelProto, as_runtime: bool = False, stock: bool = False) -> onnx.ModelProto:
    """Return a model whose values have the same types and shapes, with ops that shape inference knows.

    Parameters
    ----------
    model : onnx.ModelProto
        Returned unchanged if no op needs a stand-in.
    as_runtime : bool
        Stand in only for ops for which the training build itself infers shapes, and for none in bodies (If, Loop,
        Scan), for which no runtime infers them.
    stock : bool
        Stand in also for ops of stock ONNX Runtime in a model that has no others: where it cannot be asked.

    Examples
    --------
    >>> text = '''<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
    ...     g (float[2, 3] dy, float[2, 3] y) => (dx) { dx = com.microsoft.ReluGrad (dy, y) }'''
    >>> [node.op_type for node in with_stand_ins(onnx.parser.parse_model(text)).graph.node]
    ['Identity']
    """
    inner = [] if as_runtime else [body for node in model.graph.node for body in bodies(node)]
    within = any(map(_holds_one, inner))
    kinds = {(node.domain, node.op_type) for node in model.graph.node}
    alone = not any(kind in _OURS or kind[0] == _NCHWC or (stock and kind in _FORWARD) for kind in kinds)
    if alone and not within:
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    opset, padded = opset_of(model), _padded_channels(model.graph)
    for body in [body for node in copy.graph.node for body in bodies(node)] if within else ():
        _stand_in_body(body, opset)
    if alone:
        return copy
    nodes = list(copy.graph.node)
    del copy.graph.node[:]
    for node in nodes:
        kind = (node.domain, node.op_type)
        skipped = as_runtime and (kind in _UNTOLD or kind in _FORWARD)
        if node.op_type == "ReorderInput" and node.output[0] in padded:
            copy.graph.node.extend(_with_channels(node, padded[node.output[0]]))
        else:
            copy.graph.node.extend([node] if skipped else _stand_in(node, opset))
    return copy


def _holds_one(body: onnx.GraphProto) -> bool:
    """Whether a body, or a body nested in it, has one of the operators above."""
    return any(is_pure_contrib(node.domain, node.op_type) or any(map(_holds_one, bodies(node))) for node in body.node)


def _stand_in_body(body: onnx.GraphProto, opset: int) -> None:
    nodes = list(body.node)
    for inner in (inner for node in nodes for inner in bodies(node)):
        _stand_in_body(inner, opset)
    made = [stand_in for node in nodes for stand_in in _stand_in(node, opset)]
    del body.node[:]
    body.node.extend(made)


def _padded_channels(graph: onnx.GraphProto) -> dict[str, int]:
    """Return the channels of the inputs of convolutions in the blocked layout: whole blocks, as in their filters."""
    filters = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    filters |= {value.name: [d.dim_value for d in value.type.tensor_type.shape.dim] for value in graph.input}
    found = {}
    for node in graph.node:
        if node.domain == _NCHWC and node.op_type == "Conv" and len(filters.get(node.input[1], ())) > 1:
            groups = next((a.i for a in node.attribute if a.name == "group"), 1)
            found[node.input[0]] = groups * filters[node.input[1]][1]
    return found


def _with_channels(node: onnx.NodeProto, channels: int) -> list[onnx.NodeProto]:
    """Return a convolution with 1x1 filters: its output has a node's padded number of channels, whatever its input."""
    pixels = helper.make_tensor("", TensorProto.FLOAT, [channels, 1, 1, 1], [0.0] * channels)
    name, read = f"{node.output[0]}.pixels", node.input[0]
    made = [helper.make_node("Constant", [], [name], value=pixels)]
    if _is_channels_last(node):
        read = f"{node.output[0]}.channels_first"
        made.append(_channels_first(node, read))
    return [*made, helper.make_node("Conv", [read, name], node.output)]


def _is_channels_last(node: onnx.NodeProto) -> bool:
    """Whether ONNX Runtime has merged a Transpose into the node that blocks the channels of images."""
    return any(each.name == "channels_last" and each.i for each in node.attribute)


def _channels_first(node: onnx.NodeProto, output: str) -> onnx.NodeProto:
    return helper.make_node("Transpose", node.input[:1], [output], perm=[0, 3, 1, 2])


def _stand_in(node: onnx.NodeProto, opset: int) -> list[onnx.NodeProto]:
    kind = (node.domain, node.op_type)
    if kind in _LIKE:
        made = [_like(node, slot, like) for slot, like in enumerate(_LIKE[kind][: len(node.output)])]
    elif kind in _AS_STANDARD:
        other = onnx.NodeProto()
        other.CopyFrom(node)
        other.domain, other.op_type = "", _AS_STANDARD[kind]
        if node.op_type == "SoftmaxCrossEntropyLossInternal":
            del other.input[3:]  # its ignored index is an input; the standard one's is an attribute
        return [other]
    elif kind in _GIVEN_BY:
        shape, like = (node.input[slot] for slot in _GIVEN_BY[kind])
        filled = f"{node.output[0]}.like"
        made = [
            helper.make_node("ConstantOfShape", [shape], [filled]),
            helper.make_node("CastLike", [filled, like], [node.output[0]]),
        ]
    elif node.domain == _NCHWC:
        return [_unblocked(node)]
    elif kind in _SPECIAL:
        made = list(_SPECIAL[kind](node))
    elif kind in _FORWARD:
        made = [_like(node, 0, 0)]
    elif node.op_type in ("LayerNormalization", "SimplifiedLayerNormalization") and node.domain == "":
        made = list(_normalization(node, opset))
    else:
        return [node]
    return [m for m in made if m.output[0]]


def _like(node: onnx.NodeProto, slot: int, like: int) -> onnx.NodeProto:
    return helper.make_node("Identity", [node.input[like]], [node.output[slot]])


def _unblocked(node: onnx.NodeProto) -> onnx.NodeProto:
    """Return a blocked operator as a standard one; filters are padded like channels, a Conv loses its sum input."""
    if node.op_type == "ReorderInput":
        return _channels_first(node, node.output[0]) if _is_channels_last(node) else _like(node, 0, 0)
    if node.op_type not in _BLOCKED:
        return node
    made = helper.make_node(node.op_type, node.input[:3], node.output)
    made.attribute.extend(a for a in node.attribute if not a.name.startswith("activation"))
    return made


def _conv_grad(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """Yield stand-ins for gradients of data, filters and bias; the last has an entry per filter."""
    yield from (_like(node, slot, slot + 1) for slot in range(min(2, len(node.output))))
    if len(node.output) > 2 and node.output[2]:
        flat = f"{node.output[2]}.flat"
        yield helper.make_node("Flatten", [node.input[2]], [flat], axis=1)
        yield helper.make_node("Einsum", [flat], [node.output[2]], equation="ij->i")


def _accumulator(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """Yield stand-ins for the update flag, and optionally for the sum."""
    yield _constant(node.output[0], TensorProto.BOOL, 1)
    if len(node.output) > 1:
        yield _like(node, 1, 0)


def _concat(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """Yield stand-ins for the concatenation, and for the length of each input."""
    joined = helper.make_node("Concat", node.input, node.output[:1])
    joined.attribute.extend(node.attribute)
    yield joined
    if len(node.output) > 1:
        yield _constant(node.output[1], TensorProto.INT64, len(node.input))


def _fused_matmul(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    flags = {a.name: a.i for a in node.attribute if a.type == onnx.AttributeProto.INT}
    if flags.get("transBatchA") or flags.get("transBatchB"):
        yield node
        return
    operands = list(node.input)
    for slot, flag in enumerate(("transA", "transB")):
        if flags.get(flag):
            operands[slot] = f"{node.output[0]}.{flag}"
            yield helper.make_node("Einsum", [node.input[slot]], [operands[slot]], equation="...ij->...ji")
    yield helper.make_node("MatMul", operands, node.output)


_SPECIAL: Final[dict[tuple[str, str], Callable[[onnx.NodeProto], Iterator[onnx.NodeProto]]]] = {
    (_MS, "ConcatTraining"): _concat,
    (_MS, "ConvGrad"): _conv_grad,
    (_MS, "FusedMatMul"): _fused_matmul,
    (_MS, "InPlaceAccumulatorV2"): _accumulator,
}


def _normalization(node: onnx.NodeProto, opset: int) -> Iterator[onnx.NodeProto]:
    """Yield stand-ins for a normalisation of the last axis, if the opset lacks it; statistics have size 1 there."""
    axis = next((a.i for a in node.attribute if a.name == "axis"), -1)
    if axis != -1 or (opset >= 17 and node.op_type == "LayerNormalization"):
        yield node
        return
    yield _like(node, 0, 0)
    for name in filter(None, node.output[1:]):
        if opset >= 18:
            axes = f"{name}.axes"
            last = helper.make_tensor(axes, TensorProto.INT64, [1], [-1])
            yield helper.make_node("Constant", [], [axes], value=last)
            yield helper.make_node("ReduceMean", [node.input[0], axes], [name])
        else:
            yield helper.make_node("ReduceMean", [node.input[0]], [name], axes=[-1])


def _constant(name: str, dtype: int, length: int) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=helper.make_tensor(name, dtype, [length], [0] * length))
