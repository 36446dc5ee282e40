"""onnxruntime-training's artifacts of three small models, run by the interpreter of its environment.

    python3.11 scripts/ort_training_env.py ENVIRONMENT
    ENVIRONMENT/bin/python scripts/ort_training_models.py FOLDER
    onnx-remat-bench FOLDER/cnn/training_model.onnx --budget 65% --dim batch=64 --initial FOLDER/cnn/checkpoint \\
        --runtime ENVIRONMENT/bin/python

For each model a folder with training, evaluation and optimizer model and a checkpoint.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


class Net:
    """A forward model under construction."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(0)

    def weight(self, name: str, *shape: int, fill: float | None = None) -> str:
        """A weight of small random numbers, or all `fill`."""
        values = 0.1 * self._random.standard_normal(shape) if fill is None else np.full(shape, fill)
        return self.constant(name, values.astype(np.float32))

    def constant(self, name: str, values: Any) -> str:
        """An initializer."""
        self.weights.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def add(self, op: str, inputs: list[str], *outputs: str, **attributes: Any) -> str:
        """A node; returns its first output."""
        self.nodes.append(helper.make_node(op, inputs, outputs, name=f"n.{outputs[0]}", **attributes))
        return outputs[0]

    def model(self, inputs: dict[str, tuple[int, list[Any]]], logits: list[Any]) -> onnx.ModelProto:
        """The checked model; its output is ``logits``."""
        graph = helper.make_graph(
            self.nodes, "net", [helper.make_tensor_value_info(n, *kind) for n, kind in inputs.items()],
            [helper.make_tensor_value_info("logits", FLOAT, logits)], self.weights,
        )  # fmt: skip
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.checker.check_model(model, full_check=True)
        return model


def mlp(layers: int = 12, width: int = 64) -> onnx.ModelProto:
    """Gemm and Relu."""
    net, x = Net(), "x"
    for i in range(layers):
        x = net.add("Gemm", [x, net.weight(f"w{i}", width, width), net.weight(f"b{i}", width)], f"z{i}")
        x = net.add("Relu", [x], f"a{i}")
    net.add("MatMul", [x, net.weight("head", width, 10)], "logits")
    return net.model({"x": (FLOAT, ["batch", width])}, ["batch", 10])


def cnn(blocks: int = 6, channels: int = 16, size: int = 32) -> onnx.ModelProto:
    """Conv, BatchNormalization in training mode, Relu, now and then MaxPool."""
    net, x, had = Net(), "x", 3
    for i in range(blocks):
        filters = [net.weight(f"c{i}.w", channels, had, 3, 3), net.weight(f"c{i}.b", channels)]
        x = net.add("Conv", [x, *filters], f"c{i}", kernel_shape=[3, 3], pads=[1] * 4)
        norm = [net.weight(f"bn{i}.{name}", channels, fill=name in "sv") for name in "sbmv"]
        x = net.add("BatchNormalization", [x, *norm], f"n{i}", f"n{i}.mean", f"n{i}.var", training_mode=1)
        x = net.add("Relu", [x], f"r{i}")
        if i % 3 == 2:
            x = net.add("MaxPool", [x], f"p{i}", f"p{i}.indices", kernel_shape=[2, 2], strides=[2, 2])
        had = channels
    flat = net.add("Flatten", [net.add("GlobalAveragePool", [x], "pooled")], "flat")
    net.add("Gemm", [flat, net.weight("fc.w", channels, 10), net.weight("fc.b", 10)], "logits")
    return net.model({"x": (FLOAT, ["batch", 3, size, size])}, ["batch", 10])


def transformer(layers: int = 2, steps: int = 16, width: int = 32, heads: int = 2, words: int = 64) -> onnx.ModelProto:
    """Gather, LayerNormalization, causal attention, GELU by Erf, cross entropy over all tokens."""
    net = Net()
    split = net.constant("split", np.array([0, 0, heads, width // heads], np.int64))
    join = net.constant("join", np.array([0, 0, width], np.int64))
    scale = net.constant("scale", np.float32((width // heads) ** -0.5))
    causal = net.constant("causal", np.triu(np.full((steps, steps), -1e9, np.float32), 1))
    root, one, half = (net.constant(n, np.float32(v)) for n, v in (("root2", 2**0.5), ("one", 1), ("half", 0.5)))

    def norm(x: str, name: str) -> str:
        gain = [net.weight(f"{name}.g", width, fill=1), net.weight(f"{name}.b", width, fill=0)]
        return net.add("LayerNormalization", [x, *gain], name, f"{name}.mean", f"{name}.inverse", axis=-1)

    def linear(x: str, name: str, read: int, made: int) -> str:
        product = net.add("MatMul", [x, net.weight(f"{name}.w", read, made)], f"{name}.product")
        return net.add("Add", [product, net.weight(f"{name}.bias", made)], name)

    embedded = net.add("Gather", [net.weight("words", words, width), "ids"], "embedded", axis=0)
    x = net.add("Add", [embedded, net.weight("positions", steps, width)], "x0")
    for i in range(layers):
        at = f"l{i}."
        read = norm(x, at + "norm1")
        q, k, v = (
            net.add("Transpose", [net.add("Reshape", [linear(read, at + n, width, width), split], at + n + ".heads")],
                    at + n + ".t", perm=[0, 2, 3, 1] if n == "k" else [0, 2, 1, 3])
            for n in "qkv"
        )  # fmt: skip
        scores = net.add("Mul", [net.add("MatMul", [q, k], at + "qk"), scale], at + "scaled")
        weights = net.add("Softmax", [net.add("Add", [scores, causal], at + "masked")], at + "weights", axis=-1)
        mixed = net.add("Transpose", [net.add("MatMul", [weights, v], at + "mixed")], at + "mixed.t", perm=[0, 2, 1, 3])
        out = linear(net.add("Reshape", [mixed, join], at + "joined"), at + "out", width, width)
        x = net.add("Add", [x, out], at + "x1")
        up = linear(norm(x, at + "norm2"), at + "up", width, 4 * width)
        erf = net.add("Erf", [net.add("Div", [up, root], at + "g1")], at + "g2")
        gate = net.add("Mul", [up, net.add("Add", [erf, one], at + "g3")], at + "g4")
        down = linear(net.add("Mul", [gate, half], at + "g"), at + "down", 4 * width, width)
        x = net.add("Add", [x, down], at + "x2")
    head = net.add("MatMul", [norm(x, "last"), net.weight("head", width, words)], "tokens")
    net.add("Reshape", [head, net.constant("rows", np.array([-1, words], np.int64))], "logits")
    return net.model({"ids": (INT64, ["batch", steps])}, ["tokens", words])


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {"mlp": mlp, "cnn": cnn, "transformer": transformer}


def artifacts(name: str, folder: Path) -> None:
    """Training, evaluation and optimizer model and a checkpoint of one of `MODELS`."""
    from onnxruntime.training import artifacts as made

    model = MODELS[name]()
    floats = [w.name for w in model.graph.initializer if w.data_type == FLOAT and len(w.dims) and w.name != "causal"]
    frozen = [name for name in floats if name.startswith("bn") and name.endswith((".m", ".v"))]
    folder.mkdir(parents=True, exist_ok=True)
    made.generate_artifacts(
        model, requires_grad=[name for name in floats if name not in frozen], frozen_params=frozen,
        loss=made.LossType.CrossEntropyLoss, optimizer=made.OptimType.AdamW, artifact_directory=str(folder),
    )  # fmt: skip


def main() -> None:
    """Write the artifacts of the models named, or of all."""
    if len(sys.argv) < 2:
        sys.exit("usage: ENVIRONMENT/bin/python scripts/ort_training_models.py FOLDER [MODEL ...]")
    for name in sys.argv[2:] or MODELS:
        artifacts(name, Path(sys.argv[1]) / name)
    sys.stdout.flush()
    os._exit(0)  # the package's own clean-up is slow


if __name__ == "__main__":
    main()
