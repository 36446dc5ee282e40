"""A small graph around `onnx_remat.write.barriers`."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
from onnx import TensorProto, helper

from onnx_remat.write.barriers import Barriers
from tests.support.graphs import model_of

make = helper.make_node


def held_back(opset: int, shape: list[int | str], dtype: int = TensorProto.FLOAT, holds: int = 2) -> onnx.ModelProto:
    """``y = Neg(x)``, twice if `holds` is 2, each after ``t = Cast(a)``, of which nothing else is read before."""
    nodes = [make("Cast", ["a"], ["t"], name="t", to=dtype)]
    vectors: dict[str, np.ndarray] = {}
    barriers = _barriers(opset, nodes, vectors)
    names = ["y", "again"][:holds]
    for name, hide in zip(names, (False, True), strict=False):
        barriers.delay("x", f"x_for_{name}", "t", hide)
        nodes.append(make("Neg", [f"x_for_{name}"], [name], name=name))
    nodes.append(make("Cast", ["t"], ["b"], name="b", to=TensorProto.DOUBLE))
    outputs = dict.fromkeys(names, shape) | {"b": (TensorProto.DOUBLE, ["n", "m"])}
    info = [helper.make_tensor_value_info("x_for_y", TensorProto.FLOAT, shape)]
    return model_of(
        nodes, {"a": (TensorProto.DOUBLE, ["n", "m"]), "x": shape}, outputs, vectors, info, opset=opset, ir_version=8
    )


def shape_held_back(opset: int, symbolic: bool) -> onnx.ModelProto:
    """``y``: zeros of shape [2, 3], or of the shape of ``x``, not before ``t = Cast(a)``."""
    nodes = [make("Cast", ["a"], ["t"], name="t", to=TensorProto.FLOAT)]
    vectors = {"shape": np.array([2, 3], np.int64)}
    if symbolic:
        nodes.append(make("Shape", ["x"], ["shape"], name="shape"))
        vectors = {}
    _barriers(opset, nodes, vectors).delay_shape("shape", "held", "t")
    nodes += [
        make("ConstantOfShape", ["held"], ["zeros"], name="zeros"),
        make("Add", ["zeros", "x"], ["y"], name="y"),
        make("Cast", ["t"], ["b"], name="b", to=TensorProto.DOUBLE),
    ]
    outputs = {"y": ["r", "c"], "b": (TensorProto.DOUBLE, ["n", "m"])}
    shape: list[int | str] = ["r", "c"] if symbolic else [2, 3]
    return model_of(
        nodes, {"a": (TensorProto.DOUBLE, ["n", "m"]), "x": shape}, outputs, vectors, opset=opset, ir_version=8
    )


def _barriers(opset: int, nodes: list[onnx.NodeProto], vectors: dict[str, np.ndarray]) -> Barriers:
    def emit(op_type: str, inputs: list[str], output: str, _trigger: str, **attributes: int) -> None:
        nodes.append(make(op_type, inputs, [output], name=output, **attributes))

    def add_vector(name: str, entries: list[int]) -> None:
        vectors[name] = np.array(entries, np.int64)

    numbers = itertools.count()
    return Barriers(opset, "x", emit, lambda wish: f"{wish}{next(numbers)}", add_vector)
