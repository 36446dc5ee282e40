"""Train with a step that onnxsim made from a forward ONNX file, within a budget.

A step from another tool names the outputs of its state as it likes: `state_outputs` says which is which. Needs onnxsim.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnxsim
from onnx import numpy_helper

import onnx_remat
from onnx_remat.training import Loop

BATCH, WIDTH, LAYERS = 2048, 64, 8


def forward(rng: np.random.Generator) -> onnx.ModelProto:
    """A network of linear layers, and its loss."""
    layers, weights, value = "", {}, "x"
    for i in range(LAYERS):
        layers += f"a{i} = MatMul ({value}, w{i})\n b{i} = Add (a{i}, c{i})\n h{i} = Relu (b{i})\n"
        weights[f"w{i}"] = rng.standard_normal((WIDTH, WIDTH)) * np.sqrt(2 / WIDTH)
        weights[f"c{i}"] = np.zeros(WIDTH)
        value = f"h{i}"
    model = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["" : 17]>
        mlp (float[{BATCH}, {WIDTH}] x, float[{BATCH}, {WIDTH}] y) => (float loss) {{
            {layers}
            error = Sub ({value}, y)
            squared = Mul (error, error)
            loss = ReduceMean <keepdims = 0> (squared)
        }}""")
    for name, value in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), name))
    return model


def batch(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Points, and their absolute values."""
    x = rng.standard_normal((BATCH, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.abs(x)}


def main() -> None:
    rng = np.random.default_rng(0)
    model = forward(rng)
    parameters = [tensor.name for tensor in model.graph.initializer]
    theirs = onnxsim.compile_training_loop(model, "loss", parameters, optimizer="sgd_momentum")
    step = theirs.step_graph
    result = onnx_remat.rewrite_model(step.model, "70%", state_outputs=step.state, effort=3)
    print(result.report.verdict())

    rate = {"lr": np.float32(0.5)}
    loop = Loop(result, {**theirs.initial_state, **batch(rng), **rate})
    losses = [loop.step(batch(rng)) for _ in range(120)]
    print(f"loss {losses[0]:.3f} at first, {np.mean(losses[-5:]):.3f} in the end")


if __name__ == "__main__":
    main()
