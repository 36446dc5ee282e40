"""Convolutions with large windows as matrix products: the same numbers, for plans for CUDA alone."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

from onnx_remat.ir import large_windows
from onnx_remat.ir.expand import expand
from onnx_remat.options import Options
from onnx_remat.ort.executed import as_executed
from onnx_remat.ort.kernels.registry import kernels_of
from onnx_remat.session.prediction import laid_out
from tests.support.graphs import model_of


def conv(x, w, opset=17, kind=onnx.TensorProto.FLOAT, **stated) -> onnx.ModelProto:
    """A Conv between names that its parts might have, and a Relu."""
    nodes = [
        helper.make_node("Conv", ["rows", "axes"], ["windows_0"], "conv", **stated),
        helper.make_node("Relu", ["windows_0"], ["values"]),
    ]
    inputs = [helper.make_tensor_value_info(name, kind, shape) for name, shape in (("rows", x), ("axes", w))]
    graph = helper.make_graph(
        nodes, "g", inputs, [helper.make_tensor_value_info("values", kind, list("abcde"[: len(x)]))]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def ran(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    runtime = pytest.importorskip("onnxruntime")
    return runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)[0]


CASES = {
    "weights of a first layer": ((3, 4, 32, 32), (8, 4, 16, 16), {"pads": [3] * 4, "dilations": [2, 2]}),
    "no pads, no dilation": ((2, 3, 20, 18), (5, 3, 14, 16), {}),
    "strides": ((2, 3, 30, 31), (5, 3, 14, 13), {"strides": [3, 2], "pads": [1, 2, 0, 3]}),
    "one value": ((2, 3, 16, 16), (5, 3, 16, 16), {}),
    "depthwise": ((1, 12, 20, 20), (4, 3, 16, 16), {"group": 4, "pads": [1] * 4}),
    "groups": ((2, 6, 20, 20), (8, 3, 16, 16), {"group": 2, "pads": [1] * 4}),
    "a signal": ((2, 3, 40), (5, 3, 32), {"pads": [1, 2]}),
    "a volume": ((2, 2, 14, 6, 5), (3, 2, 12, 4, 4), {"kernel_shape": [12, 4, 4]}),
}


@pytest.mark.parametrize("at_a_time", [1, 4, 1000])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_products_give_what_the_convolution_gives(monkeypatch, case, at_a_time):
    x, w, stated = case
    monkeypatch.setattr(large_windows, "windows_at_a_time", lambda *_: at_a_time)
    whole = conv(x, w, **stated)
    parts, _ = expand(whole, {large_windows.OP})
    onnx.checker.check_model(parts, full_check=True)
    assert not any(node.op_type == "Conv" for node in parts.graph.node)
    rng = np.random.default_rng(0)
    feeds = {"rows": rng.standard_normal(x, np.float32), "axes": rng.standard_normal(w, np.float32)}
    np.testing.assert_allclose(ran(parts, feeds), ran(whole, feeds), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("opset", [11, 13, 18, 21])
def test_a_plan_for_cuda_has_them_and_one_for_the_cpu_does_not(opset):
    x, w, stated = CASES["weights of a first layer"]
    whole = conv(x, w, opset, **stated)
    made, new = expand(whole, kernels_of("cuda").no_kernel)
    onnx.checker.check_model(made, full_check=True)
    assert [node.op_type for node in made.graph.node].count("Gemm") == 8 * 8 // 4
    assert "windows_0" in new and "values" not in new
    rng = np.random.default_rng(0)
    feeds = {"rows": rng.standard_normal(x, np.float32), "axes": rng.standard_normal(w, np.float32)}
    np.testing.assert_allclose(ran(made, feeds), ran(whole, feeds), rtol=1e-4, atol=1e-3)
    assert expand(whole, kernels_of("cpu").no_kernel) == (whole, frozenset())


@pytest.mark.parametrize(
    ("x", "w", "stated"),
    [
        ((2, 3, 64, 64), (5, 3, 12, 12), {}),  # many values
        ((2, 3, 12, 12), (5, 3, 11, 11), {}),  # a window that libraries know
        (("n", 3, 16, 16), (5, 3, 14, 14), {}),  # a size that is not known
        ((2, 3, 16, 16), (5, 3, 14, 14), {"auto_pad": "SAME_UPPER"}),
    ],
)
def test_others_stay_as_they_are(x, w, stated):
    given = conv(x, w, **stated)
    assert expand(given, {large_windows.OP}) == (given, frozenset())


def test_a_kernel_of_a_device_copies_the_windows_of_a_row():
    """Slices state where they begin in Constant nodes."""
    x, w, stated = [3, 4, 35, 35], [8, 4, 14, 14], {"pads": [1] * 4, "strides": [2, 2], "dilations": [2, 2]}
    model = model_of(
        [helper.make_node("Conv", ["x", "w"], ["y"], "c", **stated)], {"x": x, "w": w}, {"y": [3, 8, 6, 6]}
    )
    executed = as_executed(model, None, "all", Options(provider="cuda").preparation())
    kinds = [step.node.op_type for step in laid_out(executed).program.steps]
    assert kinds.count("Slice") == 0 and kinds.count("FusedOnDevice") == 1 + 6  # and the Pad
