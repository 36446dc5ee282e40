"""Nodes that look like what kernels replace, and are not, or have sizes that others never have: steps stay right."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_remat import ModelError, Session
from onnx_remat.fuse.kernel import FusedNode
from onnx_remat.fuse.nodes import fuse
from tests.support.fusing import ordered_step
from tests.support.graphs import model_of, run_model

pytest.importorskip("onnxruntime")

node = helper.make_node
MATRIX = [3, 4]
CASES = {
    "products with vectors side by side": (
        [node("MatMul", ["a", "v"], ["p"]), node("MatMul", ["a", "w"], ["q"]),
         node("Concat", ["p", "q"], ["y"], axis=0)],
        {"a": MATRIX, "v": [4], "w": [4]}, [6],
    ),
    "a number added to one column": (
        [node("Gemm", ["x", "w", "c"], ["y"])], {"x": [32, 64], "w": [64, 1], "c": []}, [32, 1],
    ),
    "no image": (
        [node("Reshape", ["x", "shape"], ["r"], allowzero=1), node("Conv", ["r", "w"], ["y"])],
        {"x": [0, 4, 2, 2], "w": [3, 1, 1, 1]}, [0, 3, 4, 4],
    ),
    "pads that follow from the size": (
        [node("ConvTranspose", ["x", "w"], ["y"], strides=[2, 2], pads=[2, 2, 0, 0], output_shape=[31, 31])],
        {"x": [8, 32, 16, 16], "w": [32, 32, 3, 3]}, [8, 32, 31, 31],
    ),
    "windows in the padding alone": (
        [node("MaxPool", ["x"], ["y", "where"], kernel_shape=[2, 1], dilations=[3, 1], pads=[1, 0, 1, 0])],
        {"x": [1, 16, 2, 512]}, [1, 16, 1, 512],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_step_with_it_is_right(name):
    nodes, shapes, made = CASES[name]
    outputs = {"y": made} | ({"where": (TensorProto.INT64, made)} if "where" in nodes[-1].output else {})
    model = model_of(nodes, shapes, outputs, {"shape": np.array([0, 1, 4, 4])} if "r" in nodes[0].output else {})
    rng = np.random.default_rng(0)
    feeds = {name: np.asarray(rng.standard_normal(shape), np.float32) for name, shape in shapes.items()}
    with Session(model) as session:
        found = session.run(feeds)
    for value, wanted in zip(found.values(), run_model(model, feeds, "disable"), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [[1, 1], [8, 1]], ids=str)
def test_a_split_stays_one_node_where_a_device_reads_no_piece(sizes):
    """Pieces of single columns are no members of its groups: threads would read far apart."""
    names = [f"part{i}" for i in range(len(sizes))]
    nodes = [node("Split", ["x", "sizes"], names, axis=1)]
    nodes += [node("Mul", [name, "x1"], [f"m{name}"]) for name in names]
    nodes += [node("Neg", [f"m{name}"], [f"y{name}"]) for name in names]
    outputs = {f"y{name}": [1024, size] for name, size in zip(names, sizes, strict=True)}
    model = model_of(nodes, {"x": [1024, sum(sizes)], "x1": [1024, 1]}, outputs, {"sizes": np.array(sizes)})
    made = fuse(replace(ordered_step(onnx.shape_inference.infer_shapes(model)), device=True), 1)
    kept = [each for each in made.order if not isinstance(each, FusedNode)]
    written = [name for each in made.order if isinstance(each, FusedNode) for name in each.node.output]
    assert len(kept) == len(set(kept)) and len(written) == len(set(written))
    assert not set(written) & {name for at in kept for name in nodes[at].output if at < len(nodes)}


@pytest.mark.parametrize("shape", [[4096, 1], [64, 64, 1], [1], []], ids=str)
def test_powers_along_an_axis_of_one_element_have_the_same_bits(shape):
    """There ONNX Runtime calls pow, elsewhere it multiplies."""
    nodes = [node("Pow", ["x", "e"], ["p"]), node("Neg", ["p"], ["y"])]
    model = model_of(nodes, {"x": shape}, {"p": shape, "y": shape}, {"e": np.float32(3)})
    feeds = {"x": np.asarray(np.random.default_rng(0).standard_normal(shape), np.float32).reshape(shape)}
    with Session(model) as session:
        found = session.run(feeds)
    for value, wanted in zip(found.values(), run_model(model, feeds, "disable"), strict=True):
        np.testing.assert_array_equal(value, wanted)


def test_a_shape_that_a_node_makes_is_made_for_the_view_that_needs_it():
    nodes = [
        node("Abs", ["s"], ["sizes"]), node("Reshape", ["x", "sizes"], ["r"]), node("MatMul", ["r", "w"], ["y"]),
        node("Add", ["sizes", "sizes"], ["more"]),
    ]  # fmt: skip
    two = TensorProto.INT64, [2]
    model = model_of(nodes, {"s": two, "x": [4, 6], "w": [12, 8]}, {"y": [2, 8], "more": two})
    model.graph.value_info.append(helper.make_tensor_value_info("r", TensorProto.FLOAT, [2, 12]))
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((4, 6), np.float32), "w": rng.standard_normal((12, 8), np.float32)}
    with Session(model) as session:
        made = session.run(feeds | {"s": np.array([2, -12])})
    np.testing.assert_allclose(made["y"], feeds["x"].reshape(2, 12) @ feeds["w"], rtol=1e-5)
    np.testing.assert_array_equal(made["more"], [4, 24])


@pytest.mark.parametrize(
    ("op", "stated", "fed", "made"),
    [("Reshape", [8, 6], [6, 8], (6, 8)), ("Tile", [8, 12], [2, 1], (16, 6)), ("Unsqueeze", [8, 1, 6], [2], (8, 6, 1))],
)
@pytest.mark.parametrize("before", [True, False])
def test_a_fed_shape_other_than_the_stated_one_is_computed_or_refused(op, stated, fed, made, before):
    nodes = [
        node("Tanh", ["x"], ["t"]), node(op, ["t", "fed"], ["h"]), node("Neg", ["h"], ["n"]),
        node("Sigmoid", ["n"], ["q"]), node("ReduceSum", ["q", "axis"], ["s"], keepdims=0),
        node("Mul", ["s", "s"], ["u"]), node("ReduceSum", ["u"], ["r"], keepdims=0),
    ]  # fmt: skip
    if not before:  # the kernel would read through the view itself
        nodes[2].op_type, nodes[2].output[0], nodes[3].input[0] = "Identity", "unread", "h"
    model = model_of(nodes, {"x": [8, 6], "fed": (TensorProto.INT64, [len(fed)])}, {"r": []})
    model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "axis"))
    model.graph.value_info.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, stated))
    feeds = {"x": np.random.default_rng(0).standard_normal((8, 6), np.float32), "fed": np.array(fed)}
    shapes = rf"states to be of shape \[{','.join(map(str, stated))}\] is of shape \[{','.join(map(str, made))}\]"
    with Session(model) as session:
        assert session.kernel_count
        try:
            found = session.run(feeds)
        except ModelError as refused:
            assert re.search(shapes + ": correct the model", str(refused))
        else:
            np.testing.assert_allclose(found["r"], run_model(model, feeds, "disable")[0], rtol=1e-6)
