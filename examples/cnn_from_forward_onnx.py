"""Train a CNN from a forward ONNX file of any framework, within a budget.

`add_backward` appends the backward section and the update to the graph. Needs onnx-remat[convert].
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper
from onnx_remat.converters.autodiff import add_backward, initial_inputs
from onnx_remat.converters.optimizers import SGD

import onnx_remat
from onnx_remat.training import Loop

BATCH, SIDE, WIDTH, CLASSES = 128, 24, 16, 4


def forward(rng: np.random.Generator) -> onnx.ModelProto:
    """Three convolutions with BatchNormalization, then the mean over the image, as an exporter writes it."""
    layers, weights = "", {}
    for i, (into, value) in enumerate([(1, "image"), (WIDTH, "r0"), (WIDTH, "r1")]):
        layers += f"""
            c{i} = Conv <pads = [1, 1, 1, 1]> ({value}, w{i})
            n{i} = BatchNormalization (c{i}, scale{i}, bias{i}, mean{i}, var{i})
            r{i} = Relu (n{i})"""
        weights[f"w{i}"] = rng.standard_normal((WIDTH, into, 3, 3)) * np.sqrt(2 / (9 * into))
        weights |= {f"scale{i}": np.ones(WIDTH), f"bias{i}": np.zeros(WIDTH)}
        weights |= {f"mean{i}": np.zeros(WIDTH), f"var{i}": np.ones(WIDTH)}
    weights["w"] = rng.standard_normal((WIDTH, CLASSES)) / np.sqrt(WIDTH)
    model = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["" : 17]>
        cnn (float[{BATCH}, 1, {SIDE}, {SIDE}] image) => (float[{BATCH}, {CLASSES}] scores) {{{layers}
            pooled = GlobalAveragePool (r2)
            flat = Flatten (pooled)
            scores = MatMul (flat, w)
        }}""")
    for name, value in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), name))
    return model


def batch(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Stripes of four directions with noise."""
    target = rng.integers(0, CLASSES, BATCH)
    y, x = np.mgrid[:SIDE, :SIDE]
    waves = [np.sin(x), np.sin(y), np.sin(x + y), np.sin(x - y)]
    image = np.stack([waves[t] for t in target])[:, None] + 0.3 * rng.standard_normal((BATCH, 1, SIDE, SIDE))
    return {"image": image.astype(np.float32), "target": target}


def main() -> None:
    rng = np.random.default_rng(0)
    model = forward(rng)
    optimizer = SGD(lr=0.1, momentum=0.9)
    step = add_backward(model, loss="cross_entropy", optimizer=optimizer, training=True)
    result = onnx_remat.rewrite_model(step, budget="70%", effort=3)
    print(result.report.verdict())

    loop = Loop(result, initial_inputs(model, step, optimizer) | batch(rng))
    losses = [loop.step(batch(rng)) for _ in range(40)]
    print(f"loss {losses[0]:.3f} at first, {np.mean(losses[-5:]):.3f} in the end")

    state = loop.state()
    for tensor in model.graph.initializer:  # the trained weights, back into the forward file
        if tensor.name in state:
            tensor.CopyFrom(numpy_helper.from_array(state[tensor.name], tensor.name))
    onnx.save(model, "trained.onnx")


if __name__ == "__main__":
    main()
