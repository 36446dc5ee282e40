"""A training step of tanh layers whose update and state are the caller's, in plain ops without labels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import onnx
from onnx import helper

from tests.support.graphs import model_of

MAKE = helper.make_node


def updated(
    update: Callable[[int], Sequence[onnx.NodeProto]], state: Collection[str], layers=2, batch=512, width=128
) -> onnx.ModelProto:
    """Mean-square loss; `update(i)` makes ``new.w{i}`` from ``dw{i}``, and ``new.{n}{i}`` of each name in `state`."""
    inputs, outputs = {"x": [batch, width], "t": [batch, width], "rate": []}, {"loss": []}
    constants = {"two": np.float32(2 / (batch * width)), "keep": np.float32(0.9), "rest": np.float32(0.1)}
    nodes, h = [], "x"
    for i in range(layers):
        nodes += [MAKE("MatMul", [h, f"w{i}"], [f"z{i}"]), MAKE("Tanh", [f"z{i}"], [h := f"a{i}"])]
        for name in ("w", *state):
            inputs[f"{name}{i}"] = outputs[f"new.{name}{i}"] = [width, width]
    nodes += [
        MAKE("Sub", [h, "t"], ["e"]), MAKE("Mul", ["e", "e"], ["ee"]),
        MAKE("ReduceMean", ["ee"], ["loss"], keepdims=0), MAKE("Mul", ["e", "two"], ["g"]),
    ]  # fmt: skip
    g = "g"
    for i in reversed(range(layers)):
        nodes += [
            MAKE("Mul", [f"a{i}", f"a{i}"], [f"aa{i}"]), MAKE("Mul", [g, f"aa{i}"], [f"gaa{i}"]),
            MAKE("Sub", [g, f"gaa{i}"], [f"gz{i}"]), MAKE("Transpose", [f"a{i - 1}" if i else "x"], [f"T{i}"]),
            MAKE("MatMul", [f"T{i}", f"gz{i}"], [f"dw{i}"]),
        ]  # fmt: skip
        if i:
            nodes += [MAKE("Transpose", [f"w{i}"], [f"wT{i}"]), MAKE("MatMul", [f"gz{i}", f"wT{i}"], [g := f"gx{i}"])]
    for i in range(layers):
        nodes += update(i)
    return model_of(nodes, inputs, outputs, constants)


def momentum(i: int) -> list[onnx.NodeProto]:
    """Return an update by momentum, whose state is ``m``."""
    return [
        MAKE("Mul", [f"m{i}", "keep"], [f"k{i}"]), MAKE("Add", [f"k{i}", f"dw{i}"], [f"new.m{i}"]),
        MAKE("Mul", [f"new.m{i}", "rate"], [f"s{i}"]), MAKE("Sub", [f"w{i}", f"s{i}"], [f"new.w{i}"]),
    ]  # fmt: skip


def labelled(nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Return nodes that say that they are part of the update."""
    for node in nodes:
        node.metadata_props.add(key="phase", value="optimizer")
    return list(nodes)
