"""Run by the interpreter of an environment with onnxruntime-training (see ``ort_training_env``), by ``ort_training``.

    python ort_training_worker.py artifacts MODEL FOLDER
    python ort_training_worker.py train FOLDER FILE STEPS DIMS     (DIMS: a JSON object)
    python ort_training_worker.py order FOLDER FILE DIMS

The first writes what onnxruntime-training makes of a small forward model; the others print a JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
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


def artifacts(name: str, folder: str) -> None:
    """Training, evaluation and optimizer model and a checkpoint of one of `MODELS`."""
    from onnxruntime.training import artifacts as made

    model = MODELS[name]()
    floats = [w.name for w in model.graph.initializer if w.data_type == FLOAT and len(w.dims) and w.name != "causal"]
    frozen = [name for name in floats if name.startswith("bn") and name.endswith((".m", ".v"))]
    Path(folder).mkdir(parents=True, exist_ok=True)
    made.generate_artifacts(
        model, requires_grad=[name for name in floats if name not in frozen], frozen_params=frozen,
        loss=made.LossType.CrossEntropyLoss, optimizer=made.OptimType.AdamW, artifact_directory=folder,
    )  # fmt: skip


def train(folder: str, file: str, steps: int, dims: dict[str, int]) -> dict[str, Any]:
    """Losses of some steps with the artifacts' optimizer, and the peak: graph inputs and the rise of resident memory.

    Parameters and running statistics as they are then go to ``<file>.npz``. The first step faults in code and thread
    stacks and counts for nothing. Arena and memory patterns are off, so that every buffer goes back to the system.
    """
    from onnxruntime.training.api import Optimizer

    module, state, feeds, held = _module(folder, file, dims, _options())
    optimizer = Optimizer(str(Path(folder) / "optimizer_model.onnx"), module)
    losses, rise = [], 0
    for step in range(steps):
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident("VmRSS")
        losses.append(float(np.asarray(module(*feeds)).ravel()[0]))
        rise = max(rise, _resident("VmHWM") - before) if step else 0
        optimizer.step()
        module.lazy_reset_grad()
    np.savez(f"{file}.npz", **{name: parameter.data for name, parameter in state.parameters})
    return {"losses": losses, "peak_bytes": held + rise}


def order(folder: str, file: str, dims: dict[str, int]) -> list[str]:
    """Names of the nodes in the order the module runs them, graph optimisations off."""
    import onnxruntime

    with tempfile.TemporaryDirectory() as scratch:
        options = _options()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_profiling, options.profile_file_prefix = True, str(Path(scratch) / "profile")
        module, _, feeds, _ = _module(folder, file, dims, options)
        module(*feeds)
        del module  # writes the profile
        (profile,) = Path(scratch).iterdir()
        events = [e for e in json.loads(profile.read_text()) if e["name"].endswith("_kernel_time")]
    return [e["name"].removesuffix("_kernel_time") for e in sorted(events, key=lambda e: e["ts"])]


def _options() -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    options.log_severity_level = 3
    return options


def _module(folder: str, file: str, dims: dict[str, int], options: Any) -> tuple[Any, Any, list[np.ndarray], int]:
    """A module in training mode, its state, what to feed it, and bytes of all inputs of its graph."""
    from onnxruntime.training.api import CheckpointState, Module

    state = CheckpointState.load_checkpoint(str(Path(folder) / "checkpoint"))
    module = Module(file, state, device="cpu", session_options=options)
    weights = {name for name, _ in state.parameters}
    random, feeds, held = np.random.default_rng(0), [], 0
    for value in onnx.load(file).graph.input:
        kind = value.type.tensor_type
        shape = [d.dim_value or dims[d.dim_param] for d in kind.shape.dim]
        held += int(np.prod(shape)) * helper.tensor_dtype_to_np_dtype(kind.elem_type).itemsize
        if value.name not in weights and value.name != "lazy_reset_grad" and not value.name.endswith(".buffer"):
            floats = kind.elem_type == FLOAT
            feeds.append(random.standard_normal(shape, np.float32) if floats else random.integers(0, 10, shape))
    module.train()
    return module, state, feeds, held


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


if __name__ == "__main__":
    task, *rest = sys.argv[1:]
    if task == "artifacts":
        artifacts(*rest)
        os._exit(0)  # the package's own clean-up is slow
    answer = train(rest[0], rest[1], int(rest[2]), json.loads(rest[3])) if task == "train" else (
        order(rest[0], rest[1], json.loads(rest[2]))
    )  # fmt: skip
    print(json.dumps(answer))
