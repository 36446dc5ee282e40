"""Gradients against central differences of the exported loss, all in float64: JAX, PyTorch, and at hostile points.

Other tests compare JAX's and PyTorch's steps with the framework, which is asked for both sides of the gradient; here
the exported loss alone says what its gradient must be. Rules of `autodiff` at random points are in
test_autodiff_ops.py, and here at hostile ones. A part of each table by default, all of it with ``--slow``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from onnx_remat.converters.autodiff import add_backward
from onnx_remat.converters.checks import finite_differences, tolerances
from onnx_remat.converters.checks.exact import Evaluator

from onnx_remat.ort import runtime

PREFIX = "grad."


def check(step: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> None:
    """Every gradient a step outputs; the parameter to blame is named by the error."""
    parameters = [o.name.removeprefix(PREFIX) for o in step.graph.output if o.name.startswith(PREFIX)]
    assert parameters
    found = finite_differences.check(step, parameters, {}, feeds)
    assert found.differences <= tolerances.DIFFERENCE


def some(names: list[str], config: pytest.Config, few: int) -> list[str]:
    """All names with ``--slow``, else about so many, from the whole table."""
    return names if config.getoption("--slow") else names[:: -(-len(names) // few)]


def parts(names: list[str]) -> list[list[str]]:
    """About 15 cases each, which make one step."""
    count = -(-len(names) // 15)
    return [names[i::count] for i in range(count)]


NO_DERIVATIVE = {
    "bitcast": "looks at the bits of a float32",
    "reduce_precision": "rounds to the bits of a float32",
    "embedding_pad": "its padding row is not trained, by intent",
    "scatter max": "has a stop_gradient: what it returns is not the derivative, by intent",
}


def test_jax(pytestconfig):
    pytest.importorskip("jax")
    from onnx_remat.converters.jax import export as converter
    from onnx_remat.converters.jax.step import trace

    from tests.converters.test_jax import BATTERY, weighted

    names = some([name for name in BATTERY if name not in NO_DERIVATIVE], pytestconfig, 10)
    for part in parts(names):

        def loss(params, part=part):
            return sum(weighted(BATTERY[name][0])(params[name]) for name in part)

        step = trace(loss, {name: BATTERY[name][1]() for name in part}, (), None, None, None)
        check(converter.convert(step), step.feeds())


def test_pytorch(pytestconfig):
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    from onnx_remat.converters.pytorch import export_training_step, initial_feeds

    from tests.support import torch_battery

    left_out = (*torch_battery.SLOW, *NO_DERIVATIVE)
    names = some([name for name in torch_battery.CASES if name not in left_out], pytestconfig, 4)
    for part in parts(names):
        model = torch_battery.Group(part)
        step = export_training_step(model, torch.ones(()), check=False)
        known = initial_feeds(step, model)
        check(step, {v.name: known.get(v.name, np.ones((), np.float32)) for v in step.graph.input})


def differences(model: onnx.ModelProto, at: np.ndarray, by: np.ndarray) -> np.ndarray:
    """The derivative of each element of ``y`` by its own ``x``; `by` is the step of each."""
    forward = Evaluator(finite_differences.widened(ir.from_proto(model), ir.DataType.DOUBLE))
    ups, downs = (forward.run({"x": at + s * by, "w": np.ones_like(at)})["y"] for s in (1, -1))
    return (ups - downs) / (2 * by)


EVERYWHERE = (
    "Identity", "Neg", "Abs", "Relu", "LeakyRelu", "Elu", "Selu", "Celu", "ThresholdedRelu", "HardSigmoid", "HardSwish",
    "Mish", "Gelu", "Sigmoid", "Tanh", "Softplus", "Softsign", "Erf", "Sin", "Cos", "Atan", "Asinh", "Exp", "Sinh",
    "Cosh",
)  # fmt: skip
LARGE = np.float32([-80, -30, -8, -0.7, -1e-3, 1e-3, 0.7, 8, 30, 80])
TINY = np.float32([1e-12, 1e-6, 1e-3, 1, 1e3, 1e9])
EDGE = np.float32([-0.999999, -0.99, -1e-7, 1e-7, 0.99, 0.999999])
HOSTILE = {
    **{op: (LARGE, np.full(len(LARGE), 1e-5)) for op in EVERYWHERE},
    **{op: (TINY, 1e-6 * TINY.astype(np.float64)) for op in ("Log", "Sqrt", "Reciprocal")},
    **{op: (EDGE, np.full(len(EDGE), 1e-9)) for op in ("Asin", "Acos", "Atanh")},
    "Acosh": (np.float32([1.00001, 1.1, 1e3]), np.float64([1e-9, 1e-6, 1e-3])),
    "Tan": (np.float32([-1.57, 1e-3, 1.57]), np.full(3, 1e-8)),
}
"""Points where a careless formula overflows, cancels or divides by nothing, and steps that suit them."""


@pytest.mark.parametrize("op", HOSTILE)
def test_autodiff_at_hostile_points(op):
    """In float64 as differences say; in float32 on ONNX Runtime too, finite wherever the derivative is."""
    at, by = HOSTILE[op]
    typed = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [len(at)]) for name in ("x", "w", "y")}
    nodes = [
        helper.make_node(op, ["x"], ["y"], "rule"),
        helper.make_node("Mul", ["y", "w"], ["weighed"]),
        helper.make_node("ReduceSum", ["weighed"], ["loss"], keepdims=0),
    ]
    outputs = [helper.make_tensor_value_info("loss", TensorProto.FLOAT, []), typed["y"]]
    graph = helper.make_graph(nodes, "g", [typed["x"], typed["w"]], outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    expected = differences(model, at.astype(np.float64), by)
    step, feeds = add_backward(model, wrt=["x"], loss="loss", check=False), {"x": at, "w": np.ones_like(at)}
    size = np.maximum(np.abs(expected), 1e-3)
    assert (np.abs(finite_differences.in_float64(step, feeds)["grad.x"] - expected) < 1e-4 * size).all()
    assert (np.abs(runtime.outputs(step, feeds)["grad.x"] - expected) < 2e-3 * size).all()


KINKS = {
    **dict.fromkeys(("Abs", "Relu", "LeakyRelu", "Elu", "Selu", "Celu", "Softsign", "Mish", "Gelu"), (0.0, -0.0)),
    "HardSigmoid": (-2.5, 2.5),
    "HardSwish": (-3.0, 3.0),
    "Clip": (-0.5, 0.5),
    "PRelu": (0.0, -0.0),
    "Pow": (0.0, -0.0),
}
MORE = {
    "Clip": {"low": np.float32(-0.5), "high": np.float32(0.5)},
    "PRelu": {"slope": np.float32(0.25)},
    "Pow": {"by": np.float32(2)},
}


def gradient_at(node: onnx.NodeProto, at: np.ndarray, constants: dict[str, Any] | None = None) -> np.ndarray:
    """Of the sum of what a node makes of `at`, on ONNX Runtime."""
    graph = helper.make_graph(
        [node, helper.make_node("ReduceSum", ["y"], ["loss"], keepdims=0)], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, at.shape)],
        [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])],
        [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return runtime.outputs(add_backward(model, wrt=["x"], loss="loss", check=False), {"x": at})["grad.x"]


@pytest.mark.parametrize("op", KINKS)
def test_autodiff_at_a_kink_is_between_the_slopes_of_both_sides(op):
    at, constants = np.float32(KINKS[op]), MORE.get(op, {})
    node = helper.make_node(op, ["x", *constants], ["y"], "rule")
    here = gradient_at(node, at, constants)
    left, right = (gradient_at(node, at + np.float32(by), constants) for by in (-1e-3, 1e-3))
    assert (here >= np.minimum(left, right) - 3e-3).all() and (here <= np.maximum(left, right) + 3e-3).all()


@pytest.mark.parametrize(
    ("op", "shape", "attributes"),
    [("ReduceMax", [2, 6], {"keepdims": 0}), ("ReduceMin", [2, 6], {"keepdims": 0}),
     ("MaxPool", [1, 2, 1, 6], {"kernel_shape": [1, 6]}), ("GlobalMaxPool", [1, 2, 1, 6], {})],
)  # fmt: skip
def test_autodiff_at_ties_shares_out_the_whole_gradient(op, shape, attributes):
    """All elements are equal: who gets it is open, how much is not."""
    inputs = ["x", "last"] if op.startswith("Reduce") else ["x"]
    for value in (0.0, 3.0):
        node = helper.make_node(op, inputs, ["y"], "rule", **attributes)
        here = gradient_at(node, np.full(shape, value, np.float32), {"last": np.array([-1])} if inputs[1:] else {})
        assert (here >= 0).all()
        np.testing.assert_allclose(here.reshape(2, 6).sum(1), 1, rtol=1e-6)


@pytest.mark.parametrize("op", ["Max", "Min"])
def test_autodiff_of_equal_inputs_is_shared_out_too(op):
    """Both inputs are x: whatever goes to either, the sum is the derivative of x by itself."""
    here = gradient_at(helper.make_node(op, ["x", "x"], ["y"], "rule"), np.float32([0, -1, 2]))
    np.testing.assert_allclose(here, 1)
