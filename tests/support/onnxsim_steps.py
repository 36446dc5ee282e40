"""Forward models with a loss, of the kinds that onnxsim makes training steps of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import numpy_helper


@dataclass
class Forward:
    """A model that is written line by line, the weights it trains, and the shapes of its inputs."""

    shapes: dict[str, list[int]]
    lines: list[str] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    trained: list[str] = field(default_factory=list)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def weight(self, name: str, *shape: int, scale: float | None = None, trains: bool = True) -> str:
        """A weight of random numbers, or of equal ones where `scale` is given."""
        fan = np.prod(shape[:1] if len(shape) == 2 else shape[1:])
        value = self.rng.standard_normal(shape) / np.sqrt(fan) if scale is None else np.full(shape, scale)
        self.weights[name] = value
        self.trained += [name] if trains else []
        return name

    def add(self, made: str, node: str) -> str:
        self.lines.append(f"{made} = {node}")
        return made

    def squared(self, value: str, target: str) -> Forward:
        """The same model with the mean squared difference as its loss."""
        self.add("squares", f"Mul ({self.add('error', f'Sub ({value}, {target})')}, error)")
        self.add("loss", "ReduceMean <keepdims = 0> (squares)")
        return self

    def model(self) -> onnx.ModelProto:
        given = ", ".join(f"float{shape} {name}" for name, shape in self.shapes.items())
        made = onnx.parser.parse_model(
            f'<ir_version: 9, opset_import: ["" : 17]> g ({given}) => (float loss) {{ {chr(10).join(self.lines)} }}'
        )
        for name, value in self.weights.items():
            made.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), name))
        return made


def mlp(rows: int = 2048, width: int = 128, layers: int = 8) -> Forward:
    made, value = Forward({"x": [rows, width], "y": [rows, width]}), "x"
    for i in range(layers):
        weight, bias = made.weight(f"w{i}", width, width), made.weight(f"b{i}", width, scale=0)
        product = made.add(f"z{i}", f"MatMul ({value}, {weight})")
        value = made.add(f"h{i}", f"Relu ({made.add(f'a{i}', f'Add ({product}, {bias})')})")
    return made.squared(value, "y")


def cnn(images: int = 32, channels: int = 32, side: int = 16, layers: int = 10) -> Forward:
    shape = [images, channels, side, side]
    made, value = Forward({"x": shape, "y": shape}), "x"
    for i in range(layers):
        weight, bias = made.weight(f"w{i}", channels, channels, 3, 3), made.weight(f"b{i}", channels, scale=0)
        value = made.add(
            f"h{i}", f"Relu ({made.add(f'z{i}', f'Conv <pads = [1, 1, 1, 1]> ({value}, {weight}, {bias})')})"
        )
    return made.squared(value, "y")


def transformer(texts: int = 16, length: int = 64, width: int = 64, layers: int = 4, rank: int = 0) -> Forward:
    """With a `rank`, its products have trained parts of low rank, and all else is fixed (LoRA)."""
    shape = [texts, length, width]
    made, value = Forward({"x": shape, "y": shape}), "x"
    made.weight("scale", scale=width**-0.5, trains=False)

    def linear(name: str, read: str, into: int, out: int) -> str:
        product = made.add(f"{name}_p", f"MatMul ({read}, {made.weight(name, into, out, trains=not rank)})")
        if not rank:
            return product
        down, up = made.weight(f"{name}_down", into, rank), made.weight(f"{name}_up", rank, out, scale=0)
        low = made.add(f"{name}_low", f"MatMul ({read}, {down})")
        return made.add(f"{name}_o", f"Add ({product}, {made.add(f'{name}_part', f'MatMul ({low}, {up})')})")

    for i in range(layers):
        factor = made.weight(f"factor{i}", width, scale=1, trains=not rank)
        shift = made.weight(f"shift{i}", width, scale=0, trains=not rank)
        normal = made.add(f"n{i}", f"LayerNormalization <axis = -1> ({value}, {factor}, {shift})")
        queries, keys, values = (linear(f"{each}{i}", normal, width, width) for each in "qkv")
        turned = made.add(f"t{i}", f"Transpose <perm = [0, 2, 1]> ({keys})")
        scores = made.add(f"s{i}", f"Mul ({made.add(f'm{i}', f'MatMul ({queries}, {turned})')}, scale)")
        mixed = made.add(f"o{i}", f"MatMul ({made.add(f'p{i}', f'Softmax <axis = -1> ({scores})')}, {values})")
        value = made.add(f"r{i}", f"Add ({value}, {mixed})")
        hidden = made.add(f"f{i}", f"Relu ({linear(f'up{i}', value, width, 4 * width)})")
        value = made.add(f"h{i}", f"Add ({value}, {linear(f'down{i}', hidden, 4 * width, width)})")
    return made.squared(value, "y")


def distilled(rows: int = 2048, width: int = 128) -> Forward:
    """A small network that learns the outputs of a fixed one."""
    made = Forward({"x": [rows, width]})
    ends = []
    for who, layers in (("teacher", 4), ("student", 6)):
        value = "x"
        for i in range(layers):
            weight = made.weight(f"{who}{i}", width, width, trains=who == "student")
            value = made.add(f"{who}_h{i}", f"Relu ({made.add(f'{who}_z{i}', f'MatMul ({value}, {weight})')})")
        ends.append(made.add(f"{who}_p", f"Softmax <axis = -1> ({value})"))
    return made.squared(ends[1], ends[0])


STEPS: dict[str, tuple[Callable[[], Forward], str]] = {
    "mlp": (mlp, "adam"),
    "cnn": (cnn, "sgd_momentum"),
    "transformer": (transformer, "adam"),
    "lora": (lambda: transformer(texts=64, rank=4), "adam"),
    "distilled": (distilled, "adam"),
}
"""A model and onnxsim's optimizer for it."""
