"""Nodes in forms that a device has a kernel for, and that no version computes wrongly."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper

from onnx_remat.ort import known_bugs, runtime
from onnx_remat.ort.kernels.cuda import uneven_pads

ir = pytest.importorskip("onnx_ir")
ort = pytest.importorskip("onnxruntime")


def transposed(pads: list[int], **more: object) -> onnx.ModelProto:
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], "up", strides=[2, 2], pads=pads, **more)
    info = helper.make_tensor_value_info
    inputs = [info("x", 1, [2, 3, 5, 4]), info("w", 1, [3, 2, 3, 3])]
    graph = helper.make_graph([node], "g", inputs, [info("y", 1, list("nchw"))])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def outputs(model: onnx.ModelProto) -> np.ndarray:
    draw = np.random.default_rng(0)
    fed = {"x": draw.random((2, 3, 5, 4), np.float32), "w": draw.random((3, 2, 3, 3), np.float32)}
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (made,) = session.run(None, fed)
    return made


@pytest.mark.parametrize(
    ("pads", "evened"), [([0, 0, 1, 1], True), ([1, 0, 1, 2], True), ([1, 1, 1, 1], False), ([1, 0, 0, 0], False)]
)
def test_uneven_pads_become_even_and_a_slice(pads, evened):
    from onnx_remat.converters.passes.write_safely import write_safely

    model = transposed(pads)
    made = ir.from_proto(model)
    write_safely(made)
    written = ir.to_proto(made)
    onnx.checker.check_model(written, full_check=True)
    assert [node.op_type for node in written.graph.node] == ["ConvTranspose", *["Slice"] * evened]
    assert uneven_pads(written.graph.node[0]) == (pads[:2] != pads[2:] and not evened)
    assert (outputs(written) == outputs(model)).all()


@pytest.mark.parametrize(
    ("pads", "apart"), [([1, 0, 1, 0], True), ([0, 0, 1, 1], True), ([1, 1, 1, 1], False), ([0, 1, 0, 1], False)]
)
def test_pads_that_would_be_miscounted_are_a_node_of_their_own(pads, apart):
    from onnx_remat.converters.passes.write_safely import write_safely

    info = helper.make_tensor_value_info
    node = helper.make_node("AveragePool", ["x"], ["y"], "pool", kernel_shape=[3, 3], pads=pads, count_include_pad=1)
    graph = helper.make_graph([node], "g", [info("x", 1, [2, 3, 6, 5])], [info("y", 1, list("nchw"))])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    made = ir.from_proto(model)
    write_safely(made)
    written = ir.to_proto(made)
    onnx.checker.check_model(written, full_check=True)
    assert [n.op_type for n in written.graph.node] == [*["Pad"] * apart, "AveragePool"]
    assert bool(known_bugs.find(model)) == apart and known_bugs.find(written) == ()
    fed = {"x": np.random.default_rng(0).random((2, 3, 6, 5), np.float32)}
    for level in ("disable", "all"):
        np.testing.assert_allclose(*(runtime.outputs(m, fed, level)["y"] for m in (model, written)), rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "axes", "staged"),
    [([65536, 5], [0], True), ([64, 96, 5], [0, 1], True), ([64, 5], [0], False), ([4099, 5], [0], False),
     ([4096, 5], [1], False), ([4096], [0], False)],
)  # fmt: skip
def test_sums_of_many_rows_are_taken_in_stages(shape, axes, staged):
    """A prime number of rows has no blocks."""
    from onnx_remat.converters.passes.write_safely import write_safely

    info = helper.make_tensor_value_info
    node = helper.make_node("ReduceSum", ["x", "axes"], ["y"], "sum", keepdims=0)
    kept = [n for i, n in enumerate(shape) if i not in axes]
    graph = helper.make_graph([node], "g", [info("x", 1, shape)], [info("y", 1, kept)])
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(axes, np.int64), "axes"))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    made = ir.from_proto(model)
    write_safely(made)
    write_safely(made)  # what is in stages stays as it is
    written = ir.to_proto(made)
    onnx.checker.check_model(written, full_check=True)
    assert [n.op_type for n in written.graph.node] == [*["Reshape", "ReduceSum"] * staged, "ReduceSum"]
    fed = np.random.default_rng(0).normal(0.5, 1, shape).astype(np.float32)
    exact = fed.astype(np.float64).sum(tuple(axes))
    for level in ("disable", "all"):
        off = np.abs(runtime.outputs(written, {"x": fed}, level)["y"] - exact).max() / np.abs(exact).max()
        assert off < 5e-7 if staged else off < 1e-4


@pytest.mark.parametrize("axes", [[0], [0, 1]])
@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16])
def test_sums_of_16_bits_stay_whole(kind, axes):
    """Sums of blocks of 64 rows, and of rows, would be infinite in float16, and rounded in bfloat16."""
    from onnx_remat.converters.passes.write_safely import write_safely

    info, dtype = helper.make_tensor_value_info, helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    node = helper.make_node("ReduceSum", ["x", "axes"], ["y"], "sum", keepdims=0)
    graph = helper.make_graph([node], "g", [info("x", dtype, [4096, 16])], [info("y", dtype, [16] * (2 - len(axes)))])
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(axes, np.int64), "axes"))
    made = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9))
    write_safely(made)
    assert [n.op_type for n in made.graph] == ["ReduceSum"]


@pytest.mark.parametrize("mask", ["", ", m"])
@pytest.mark.parametrize("mode", ["{1}", "{0}"])
def test_masks_of_dropouts_are_read(mask, mode):
    """Or ONNX Runtime takes a Dropout in training for one of inference."""
    from onnx_remat.converters.passes.read_masks import read_masks

    model = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["" : 20]> g (float16[1000] x) => (float16[1000] y)
        <float r = {{0.5}}, bool t = {mode}> {{ h = Cos (x)  d{mask} = Dropout (h, r, t)  y = Neg (d) }}"""
    )
    made = ir.from_proto(onnx.shape_inference.infer_shapes(model))
    read_masks(made)
    read_masks(made)  # it has a reader now
    written = ir.to_proto(made)
    onnx.checker.check_model(written, full_check=True)
    drops = mode == "{1}"
    assert [node.op_type for node in written.graph.node] == ["Cos", "Dropout", *["Where"] * drops, "Neg"]
    assert bool(known_bugs.find(model)) == drops and known_bugs.find(written) == ()
    for level in ("disable", "all"):
        found = runtime.outputs(written, {"x": np.zeros(1000, np.float16)}, level)["y"]
        assert set(found.tolist()) == ({0.0, -2.0} if drops else {-1.0})
