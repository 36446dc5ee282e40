"""BatchNormalization in training mode as standard operators, for providers with a kernel for inference only."""

from __future__ import annotations

from typing import Any

import onnx
from onnx import TensorProto, helper

from onnx_remat.errors import ModelError

OP = ("", "BatchNormalization")
_AXES_ARE_INPUTS = 18  # first opset in which the axes of ReduceMean are an input
_HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_DEFAULTS = {"epsilon": 1e-5, "momentum": 0.9}


def trains(node: onnx.NodeProto) -> bool:
    """Whether a node is in training mode, which exists from opset 14 on."""
    return any(a.name == "training_mode" and a.i for a in node.attribute)


def definition(node: onnx.NodeProto, x: onnx.TypeProto, statistics: onnx.TypeProto, opset: int) -> list[onnx.NodeProto]:
    """Return nodes equivalent to `node`: the batch's statistics, the inference form with them, and the running ones.

    Parameters
    ----------
    node : onnx.NodeProto
        In training mode.
    x, statistics : onnx.TypeProto
        Types of its first input, the rank of which must be known, and of its running statistics.
    opset : int
        Of the model.

    Raises
    ------
    ModelError
        The rank is not known.
    """
    if not x.tensor_type.HasField("shape"):
        raise ModelError(f"node {node.name!r} (BatchNormalization in training mode) reads a value of unknown rank")
    axes = [axis for axis in range(len(x.tensor_type.shape.dim)) if axis != 1]
    given = _DEFAULTS | {a.name: a.f for a in node.attribute if a.name in _DEFAULTS}
    kinds = x.tensor_type.elem_type, statistics.tensor_type.elem_type
    read, made = list(node.input), list(node.output)
    taken = {*read, *made}
    nodes: list[onnx.NodeProto] = []

    def op(kind: str, inputs: list[str], wished: str, **attributes: Any) -> str:
        name = wished
        while name in taken:
            name += "_"
        taken.add(name)
        nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def constant(wished: str, dtype: int, shape: list[int], entries: list[float] | list[int]) -> str:
        return op("Constant", [], wished, value=helper.make_tensor(wished, dtype, shape, entries))

    def mean_of(value: str, wished: str, keepdims: int) -> str:
        if opset < _AXES_ARE_INPUTS:
            return op("ReduceMean", [value], wished, axes=axes, keepdims=keepdims)
        return op("ReduceMean", [value, over], wished, keepdims=keepdims)

    def as_statistic(value: str) -> str:
        return op("Cast", [value], f"{value}_cast", to=kinds[1]) if computed != kinds[1] else value

    over = constant("axes", TensorProto.INT64, [len(axes)], axes) if opset >= _AXES_ARE_INPUTS else ""
    # In half precision a square above 255^2 would be infinite; ONNX computes statistics in float32.
    computed = TensorProto.FLOAT if kinds[0] in _HALVES else kinds[0]
    wide = op("Cast", [read[0]], "wide", to=computed) if computed != kinds[0] else read[0]
    mean = mean_of(wide, "mean_of_channel", 1)
    centred = op("Sub", [wide, mean], "centred")
    variance = as_statistic(mean_of(op("Mul", [centred, centred], "squared"), "variance", 0))
    mean = as_statistic(op("Reshape", [mean, constant("flat", TensorProto.INT64, [1], [-1])], "mean"))
    keep = constant("momentum", kinds[1], [], [given["momentum"]])
    add = constant("rate", kinds[1], [], [1 - given["momentum"]])
    kept = [op("Mul", [before, keep], "kept") for before in read[3:5]]
    added = [op("Mul", [now, add], "added") for now in (mean, variance)]
    return [
        *nodes,
        helper.make_node("BatchNormalization", [*read[:3], mean, variance], made[:1], epsilon=given["epsilon"]),
        *(helper.make_node("Add", [*pair], [new]) for *pair, new in zip(kept, added, made[1:], strict=False) if new),
    ]
