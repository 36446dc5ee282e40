"""Biases on a device: a Gemm and an Add compute what a Gemm does, and are counted as one."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from onnx_remat.findings import explain
from onnx_remat.ir.shapes import Tensor
from onnx_remat.options import Options
from onnx_remat.ort.executed import as_executed
from onnx_remat.ort.kernels.registry import kernels_of
from onnx_remat.session import biases, offsets, slab_layout
from onnx_remat.session.lean_graph import LeanNode
from onnx_remat.session.prediction import laid_out, predict
from onnx_remat.session.step_time import node_seconds
from tests.support.graphs import model_of

SHAPES = {"a": (6, 4), "b": (4, 3), "y": (6, 3)}


def gemm(bias: tuple[int, ...] | None, dtype: int = 1, readers: int = 1, **attributes: float) -> offsets.Program:
    shapes = SHAPES | ({} if bias is None else {"c": bias})
    node = helper.make_node("Gemm", ["a", "b", *(["c"] if bias is not None else [])], ["y"], "g", **attributes)
    last = [helper.make_node("Identity", ["y"], [f"z{i}"], f"reader{i}") for i in range(readers)]
    shapes |= {f"z{i}": SHAPES["y"] for i in range(readers)}
    tensors = {n: Tensor(dtype, s, int(4 * np.prod(s)), s) for n, s in shapes.items()}
    steps = [LeanNode(each) for each in (node, *last)]
    outputs = [f"z{i}" for i in range(readers)]
    return offsets.program(steps, tensors, [n for n in shapes if n in "abc"], outputs, kernels_of("cuda"))


def ran(program: offsets.Program, feeds: dict[str, np.ndarray]) -> np.ndarray:
    weights = [numpy_helper.from_array(array, name) for name, array in feeds.items()]
    graph = helper.make_graph(
        [step.node for step in program.steps], "g", [], [helper.make_tensor_value_info("z0", 1, SHAPES["y"])], weights
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {})[0])


@pytest.mark.parametrize("bias", [(3,), (1, 3), (6, 1), (6, 3), (1,), ()], ids=str)
def test_a_product_and_an_add_are_a_gemm(bias):
    whole = gemm(bias, alpha=0.5)
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(whole.tensors[name].shape).astype(np.float32) for name in "abc"}
    made = biases.divided(whole, 17)
    assert [step.node.op_type for step in made.steps] == ["Gemm", "Add", "Identity"]
    assert [biases.result_of(step.writes[0]) for step in made.steps] == ["y", "", ""]
    np.testing.assert_allclose(ran(made, feeds), ran(whole, feeds), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "program",
    [gemm(None), gemm((3,), beta=2.0), gemm((3,), dtype=10), gemm((3,), readers=2)],
    ids=["no bias", "beta", "half precision", "two readers"],
)
def test_others_stay_as_they_are(program):
    assert biases.divided(program, 17) is program


def test_a_gemm_that_must_have_a_bias_keeps_it():
    program = gemm((3,))
    assert biases.divided(program, 10) is program and biases.divided(program, 11) is not program


def test_a_result_in_the_memory_of_an_input_stays():
    program = gemm((3,))
    assert biases.divided(program, 17, {"y": "h"}) is program


def test_a_value_that_has_the_name_of_the_product_keeps_it():
    program = gemm((3,))
    taken = offsets.program(
        program.steps, {**program.tensors, "y/product": program.tensors["y"]}, program.inputs, program.outputs,
        program.kernels,
    )  # fmt: skip
    assert biases.divided(taken, 17) is taken


def test_a_divided_gemm_costs_what_the_gemm_does_and_is_explained():
    nodes, weights = [], {}
    for i in range(4):
        nodes += [
            helper.make_node("Gemm", [f"x{i}", f"w{i}", f"b{i}"], [f"h{i}"], f"gemm{i}"),
            helper.make_node("Tanh", [f"h{i}"], [f"x{i + 1}"], f"tanh{i}"),
        ]
        weights |= {f"w{i}": [256, 256], f"b{i}": [256]}
    model = model_of(nodes, {"x0": [512, 256]} | weights, {"x4": [512, 256]})
    executed = as_executed(model, None, "all", Options(provider="cuda").preparation())
    fused, plain = laid_out(executed), laid_out(executed, fuse=False)
    divided = [step for step in fused.program.steps if biases.result_of(next(iter(step.writes), ""))]
    maker = slab_layout.makers(fused.compiled)
    ops = [slab_layout.op_of(maker, step) for step in divided]
    assert [op and op.node.op_type for op in ops] == ["Gemm"] * 4
    gemms = [op for op in slab_layout.kept(maker, plain.program.steps) if op.node.op_type == "Gemm"]
    assert [op for op in slab_layout.kept(maker, fused.program.steps) if op.node.op_type == "Gemm"] == gemms
    assert sum(node_seconds(fused)) == pytest.approx(sum(node_seconds(plain)), rel=0.01)
    assert [kernel.nodes for kernel in explain._kernels(fused)] == [(f"gemm{i}/bias", f"tanh{i}") for i in range(4)]


def test_an_add_that_no_kernel_takes_is_not_counted_twice():
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["h"], "gemm"), helper.make_node("MatMul", ["h", "v"], ["y"], "last"),
        helper.make_node("Neg", ["y"], ["n"], "neg"), helper.make_node("Abs", ["n"], ["z"], "abs"),
    ]  # fmt: skip
    model = model_of(nodes, {"x": [64, 64], "w": [64, 64], "b": [64], "v": [64, 64]}, {"z": [64, 64]})
    executed = as_executed(model, None, "all", Options(provider="cuda").preparation())
    fused = laid_out(executed)
    maker = slab_layout.makers(fused.compiled)
    kept = [op.node.op_type for op in slab_layout.kept(maker, fused.program.steps)]
    assert kept.count("Gemm") == 1 and [s.node.op_type for s in fused.program.steps].count("Add") == 1


def test_the_memory_without_kernels_counts_the_workspace_that_they_save():
    """Of the sums over a batch and its pixels, which cuDNN computes, as many bytes as of their input."""
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], "mean", axes=[0, 2, 3]),
        helper.make_node("Sub", ["x", "mean"], ["below"], "below"), helper.make_node("Relu", ["below"], ["y"], "relu"),
    ]  # fmt: skip
    model = model_of(nodes, {"x": [4, 64, 32, 32]}, {"y": [4, 64, 32, 32]}, opset=17)
    executed = as_executed(model, None, "all", Options(provider="cuda").preparation())
    fused, plain = predict(executed), predict(executed, fuse=False)
    assert fused.kernels == 1 and plain.workspace - fused.workspace >= 4 * 4 * 64 * 32 * 32
    assert fused.unfused == pytest.approx(plain.total, abs=2048)
