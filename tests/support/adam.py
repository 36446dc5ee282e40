"""A training step by Adam, in plain ops, and the batches of a job that ranks share."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from tests.support.graphs import model_of

MAKE = helper.make_node


def adam(layers=4, batch=32, width=16, counted=32, dims=None):
    """A tanh MLP with biases, a mean-square loss over `counted` rows, and Adam; the learning rate is an input.

    ``shift`` is a running mean of the first layer, and renewed by the forward pass; ``fixed`` is not trained; layers 1
    and 2 share their weights.
    """
    inputs = {"x": [dims or batch, width], "t": [dims or batch, width], "fixed": [width]}
    outputs = {"loss": [], "new.shift": [width]}
    constants = {
        "two": np.float32(2.0 / (counted * width)), "keep": np.float32(0.9), "rest": np.float32(0.1),
        "keep2": np.float32(0.999), "rest2": np.float32(0.001), "eps": np.float32(1e-8), "one": np.float32(1),
        "rows": np.array([0]), "count": np.float32(counted * width),
    }  # fmt: skip
    nodes, h = [MAKE("Add", ["count.steps", "one"], ["new.count.steps"]), MAKE("Add", ["x", "fixed"], ["h"])], "h"
    weights = ["w1" if i == 2 else f"w{i}" for i in range(layers)]
    for i, w in enumerate(weights):
        nodes += [
            MAKE("MatMul", [h, w], [f"z{i}"]), MAKE("Add", [f"z{i}", f"b{i}"], [f"y{i}"]),
            MAKE("Tanh", [f"y{i}"], [f"a{i}"]),
        ]  # fmt: skip
        h = f"a{i}"
    nodes += [
        MAKE("ReduceMean", ["z0", "rows"], ["mean"], keepdims=0), MAKE("Mul", ["shift", "keep"], ["kept"]),
        MAKE("Mul", ["mean", "rest"], ["part"]), MAKE("Add", ["kept", "part"], ["new.shift"]),
        MAKE("Sub", [h, "t"], ["e"]), MAKE("Mul", ["e", "e"], ["ee"]), MAKE("ReduceSum", ["ee"], ["sum"], keepdims=0),
        MAKE("Div", ["sum", "count"], ["loss"]), MAKE("Mul", ["e", "two"], ["g"]),
    ]  # fmt: skip
    g, found = "g", {}
    for i, w in reversed(list(enumerate(weights))):
        nodes += [
            MAKE("Mul", [f"a{i}", f"a{i}"], [f"aa{i}"]), MAKE("Mul", [g, f"aa{i}"], [f"gaa{i}"]),
            MAKE("Sub", [g, f"gaa{i}"], [f"gz{i}"]), MAKE("Transpose", [f"a{i - 1}" if i else "h"], [f"T{i}"]),
                MAKE("MatMul", [f"T{i}", f"gz{i}"], [f"dw{i}"]),
            MAKE("ReduceSum", [f"gz{i}", "rows"], [f"db{i}"], keepdims=0),
            MAKE("Transpose", [w], [f"wT{i}"]), MAKE("MatMul", [f"gz{i}", f"wT{i}"], [f"gx{i}"]),
        ]  # fmt: skip
        g = f"gx{i}"
        found.setdefault(w, []).append(f"dw{i}")
        found[f"b{i}"] = [f"db{i}"]
    for name, parts in sorted(found.items()):
        gradient = parts[0]
        if len(parts) > 1:
            nodes.append(MAKE("Add", parts, [gradient := f"both.{name}"]))
        shape = [width] if name[0] == "b" else [width, width]
        nodes += _update(name, gradient)
        for state in (name, f"m.{name}", f"v.{name}"):
            inputs[state] = outputs[f"new.{state}"] = shape
    for number in ("count.steps", "rate"):
        inputs[number] = []
    inputs["shift"] = [width]
    outputs["new.count.steps"] = []
    return model_of(nodes, inputs, outputs, constants)


def _update(name: str, g: str) -> list[onnx.NodeProto]:
    lines = [
        ("Mul", [f"m.{name}", "keep"], "a"), ("Mul", [g, "rest"], "b"), ("Add", ["a", "b"], f"new.m.{name}"),
        ("Mul", [g, g], "gg"), ("Mul", [f"v.{name}", "keep2"], "c"), ("Mul", ["gg", "rest2"], "d"),
        ("Add", ["c", "d"], f"new.v.{name}"), ("Pow", ["keep", "new.count.steps"], "p1"), ("Sub", ["one", "p1"], "q1"),
        ("Pow", ["keep2", "new.count.steps"], "p2"), ("Sub", ["one", "p2"], "q2"),
        ("Div", [f"new.m.{name}", "q1"], "mm"), ("Div", [f"new.v.{name}", "q2"], "vv"), ("Sqrt", ["vv"], "r"),
        ("Add", ["r", "eps"], "re"), ("Div", ["mm", "re"], "s"), ("Mul", ["s", "rate"], "sr"),
        ("Sub", [name, "sr"], f"new.{name}"),
    ]  # fmt: skip
    own = {out for _, _, out in lines if not out.startswith("new.")}
    return [
        MAKE(op, [f"{n}.{name}" if n in own else n for n in reads], [f"{out}.{name}" if out in own else out])
        for op, reads, out in lines
    ]


def first_state(model: onnx.ModelProto, seed: int = 0) -> dict[str, np.ndarray]:
    """Values for all inputs but the batch: weights random, the rest zero, a rate of 0.003."""
    generator = np.random.default_rng(seed)
    state = {}
    for value in model.graph.input:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        if value.name not in ("x", "t"):
            random = value.name[0] in "wb" or value.name == "fixed"
            state[value.name] = np.zeros(shape, np.float32)
            state[value.name][...] = 0.4 * generator.standard_normal(shape) if random else 0
    state["rate"][...] = 0.003
    return state


def shared_batches(steps: int, ranks: int, rows: int, width: int, micro: int = 1):
    """Batches of all ranks by the names of `ranks.launch`, and the joined ones, step by step."""
    generator = np.random.default_rng(1)
    apart, joined = {}, []
    for step in range(steps):
        whole = {name: generator.standard_normal((rows * ranks * micro, width)).astype(np.float32) for name in "xt"}
        joined.append(whole)
        for part in range(ranks * micro):
            for name, array in whole.items():
                apart[f"{step}.{part // micro}.{part % micro}.{name}"] = array[part * rows : (part + 1) * rows]
    return apart, joined
