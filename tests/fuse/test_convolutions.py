"""Convolutions by oneDNN: every form found and right to rounding, in parts and chunks; what is not one stays."""

from __future__ import annotations

import dataclasses
import json
from math import prod

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx_remat.converters.autodiff import add_backward

from onnx_remat import Session
from onnx_remat.errors import ModelError
from onnx_remat.fuse import convolution_forms, convolutions, machine_code, onednn
from onnx_remat.fuse.onednn import FORWARD, IMAGES, WEIGHTS, Convolution
from onnx_remat.fuse.ordered import OrderedStep
from onnx_remat.fuse.replacements import replaced
from onnx_remat.ir.shapes import Tensor
from onnx_remat.session import kernel_file
from onnx_remat.session.lean_graph import LeanNode
from tests.support.graphs import model_of, run_model
from tests.support.slow import few

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.skipif(bool(machine_code.why_not() or onednn.why_not()), reason="no oneDNN here")


def outputs_of(size, kernel, strides, dilations, pads):
    rank = len(size)
    return [
        (n + pads[i] + pads[i + rank] - dilations[i] * (kernel[i] - 1) - 1) // strides[i] + 1
        for i, n in enumerate(size)
    ]


def step(batch, channels, size, out, kernel, strides=None, dilations=None, pads=None, group=1, bias=False, opset=20):
    """A convolution with both gradients."""
    rank, generator = len(size), np.random.default_rng(0)
    strides, dilations, pads = strides or [1] * rank, dilations or [1] * rank, pads or [0] * 2 * rank
    weights = generator.standard_normal((out, channels // group, *kernel), np.float32)
    made = [batch, out, *outputs_of(size, kernel, strides, dilations, pads)]
    stored = [numpy_helper.from_array(weights, "w")]
    stored += [numpy_helper.from_array(generator.standard_normal(out, np.float32), "b")] if bias else []
    nodes = [
        helper.make_node("Conv", ["x", *(each.name for each in stored)], ["y"], strides=strides, dilations=dilations,
                         pads=pads, group=group),
        helper.make_node("Mul", ["y", "t"], ["m"]),
        helper.make_node("ReduceSum", ["m"], ["loss"], keepdims=0),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "step",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, channels, *size]),
         helper.make_tensor_value_info("t", TensorProto.FLOAT, made)],
        [helper.make_tensor_value_info("loss", TensorProto.FLOAT, []),
         helper.make_tensor_value_info("y", TensorProto.FLOAT, made)],
        stored,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    return add_backward(model, "loss", wrt=[each.name for each in stored] + ["x"], keep=["y"], check=False)


def feeds_of(model, seed=1):
    generator = np.random.default_rng(seed)
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    return {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def found_in(model, monkeypatch):
    """The convolutions of a step in file order, whatever they gain."""
    monkeypatch.setattr(convolutions, "worthwhile", lambda of: True)
    return convolutions.find(convolution_forms.find(ordered_step(model)))


def ordered_step(model):
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    tensors = {}
    for value in (*inferred.input, *inferred.value_info, *inferred.output):
        shape = tuple(d.dim_value for d in value.type.tensor_type.shape.dim)
        tensors[value.name] = Tensor(value.type.tensor_type.elem_type, shape, 4 * prod(shape), shape)
    for each in inferred.initializer:
        tensors[each.name] = Tensor(each.data_type, tuple(each.dims), 4 * prod(each.dims), tuple(each.dims))
    stored = {each.name: numpy_helper.to_array(each) for each in inferred.initializer}
    integers = {name: tuple(value.tolist()) for name, value in stored.items() if value.dtype == np.int64 and value.ndim}
    return OrderedStep(
        steps=[LeanNode(node) for node in inferred.node], tensors=tensors,
        outputs={value.name for value in inferred.output}, root={}, counted={}, renewed={},
        constants={name: float(value) for name, value in stored.items() if value.ndim == 0},
        integers=integers, overwrites=lambda at, new, old: False,
    )  # fmt: skip


def assert_near(model, least=0):
    feeds = feeds_of(model)
    with Session(model) as session:
        assert session.kernel_count >= least, session.not_fused
        found = session.run(feeds)
    exact = run_model(model, feeds, "disable")
    for (name, value), expected in zip(found.items(), exact, strict=True):
        largest = np.abs(expected).max(initial=0)
        np.testing.assert_allclose(value, expected, rtol=0, atol=2e-5 * largest + 1e-6, err_msg=name)


def case(batch, channels, size, out, kernel, **more):
    return {"batch": batch, "channels": channels, "size": size, "out": out, "kernel": kernel, **more}


CASES = {
    "by entry": case(16, 16, (32, 32), 16, [3, 3], pads=[1] * 4),
    "uneven": case(37, 17, (19, 23), 23, [4, 3], strides=[3, 2], pads=[1, 2, 2, 0]),
    "dilated": case(7, 32, (24, 24), 48, [3, 3], dilations=[2, 2], pads=[2] * 4),
    "depthwise": case(8, 32, (24, 24), 32, [3, 3], pads=[1] * 4, group=32),
    "groups": case(9, 32, (24, 24), 64, [3, 3], pads=[1] * 4, group=4, bias=True),
    "first layer": case(8, 3, (64, 64), 32, [7, 7], strides=[2, 2], pads=[3] * 4),
    "few channels": case(8, 6, (30, 30), 10, [3, 3], bias=True),
    "sequences": case(32, 16, (200,), 32, [5], pads=[2, 2]),
    "volumes": case(4, 16, (12, 12, 12), 16, [3, 3, 3], pads=[1] * 6),
    "entries left over": case(8, 8, (33, 32), 16, [3, 3], strides=[3, 2]),
    "large weights": case(8, 128, (16, 16), 256, [3, 3], pads=[1] * 4),
}


@pytest.mark.parametrize("name", few(CASES, ["uneven", "depthwise", "volumes", "few channels"]))
def test_a_convolution_and_its_gradients(name, monkeypatch):
    case = CASES[name]
    model = step(**case)
    kinds = sorted(found.convolution.kind for found in found_in(model, monkeypatch))
    flipped = prod(case["size"]) >= 400 and not case.get("strides")  # images: a Conv with the flipped kernel
    assert kinds == sorted([FORWARD, FORWARD if flipped else IMAGES, WEIGHTS])
    monkeypatch.undo()
    assert_near(model)


def test_a_step_runs_them_and_takes_no_more_memory():
    model = step(**CASES["by entry"] | {"batch": 64})
    with Session(model) as fused, Session(model, fuse=False) as plain:
        assert fused.kernel_count >= 3 and fused.node_count < plain.node_count
        assert fused.slab_bytes + fused.workspace_bytes <= plain.slab_bytes + plain.workspace_bytes
    assert_near(model, least=3)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 70), threads=st.integers(1, 9), out=st.sampled_from([1, 8, 24, 64, 256]),
    kind=st.sampled_from([FORWARD, IMAGES, WEIGHTS]), size=st.integers(1, 40),
)  # fmt: skip
def test_parts_cover_all_images_once(batch, threads, out, kind, size):
    of = Convolution(kind, (batch, 8, size, size), (batch, out, size, size), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1))
    made = onednn.parts(of, threads)
    assert made.images * (made.chunks - 1) < batch <= made.images * made.chunks
    assert 1 <= made.batch <= made.chunks and 1 <= made.count <= max(threads, 1) * 2
    assert out % made.channels == 0
    covered = [
        c for b in range(made.batch) for c in range(made.chunks * b // made.batch, made.chunks * (b + 1) // made.batch)
    ]
    assert covered == list(range(made.chunks))
    if kind == WEIGHTS and made.channels == 1 and out >= 32:
        assert made.batch == 1 or made.batch * 4 * prod(of.weights) <= onednn.SUM_BYTES or out % 2


def node_of(op, inputs, **attributes):
    return helper.make_node(op, inputs, ["y"], **attributes)


@pytest.mark.parametrize(
    ("node", "shapes"),
    [
        (node_of("Conv", ["x", "w"], auto_pad="SAME_UPPER"), {"x": (16, 16, 32, 32), "y": (16, 16, 32, 32)}),
        (node_of("Conv", ["double", "wide"]), {"double": (16, 16, 32, 32), "y": (16, 16, 30, 30)}),
        (node_of("ConvTranspose", ["x", "w", "b"]), {"x": (16, 16, 32, 32), "y": (16, 16, 34, 34)}),
        (node_of("Conv", ["x", "w"]), {"x": (16, 16, 5, 5), "y": (16, 16, 3, 3)}),
    ],
    ids=["a rule for padding", "float64", "a transposed one with bias", "small"],
)
def test_what_is_left_to_onnx_runtime(node, shapes):
    tensors = {name: Tensor(TensorProto.FLOAT, shape, 4 * prod(shape), shape) for name, shape in shapes.items()}
    tensors |= {"w": Tensor(TensorProto.FLOAT, (16, 16, 3, 3), 9216, ()), "b": Tensor(TensorProto.FLOAT, (16,), 64, ())}
    tensors["wide"] = Tensor(TensorProto.DOUBLE, (16, 16, 3, 3), 18432, ())
    if "double" in tensors:
        tensors["double"] = dataclasses.replace(tensors["double"], dtype=TensorProto.DOUBLE)
        tensors["y"] = dataclasses.replace(tensors["y"], dtype=TensorProto.DOUBLE)
    ordered = OrderedStep(
        steps=[LeanNode(node)], tensors=tensors, outputs={"y"}, root={}, counted={}, renewed={}, constants={},
        overwrites=lambda at, new, old: False,
    )  # fmt: skip
    assert not convolutions.find(convolution_forms.find(ordered))


def test_onnx_runtimes_scratch_memory_is_not_looked_at_where_no_kernel_has_any():
    asked = []
    tensors = {name: Tensor(TensorProto.FLOAT, (8,), 32, (8,)) for name in "xy"}
    ordered = OrderedStep(
        steps=[LeanNode(node_of("Exp", ["x"]))], tensors=tensors, outputs={"y"}, root={}, counted={}, renewed={},
        constants={}, overwrites=lambda at, new, old: False, workspace=lambda places: asked.append(places) or 0,
    )  # fmt: skip
    assert replaced(ordered, 0).kernels == () and not asked


def changed(model, change):
    other = onnx.ModelProto()
    other.CopyFrom(model)
    change(other.graph)
    return other


def test_forms_that_compute_something_else_are_not_taken(monkeypatch):
    """One product of another entry, another padding value, another order: no gradient of weights."""
    model = step(**CASES["by entry"])
    assert WEIGHTS in {each.convolution.kind for each in found_in(model, monkeypatch)}

    def swap_products(graph):
        concat = next(node for node in graph.node if node.op_type == "Concat" and len(node.input) == 9)
        concat.input[0], concat.input[1] = concat.input[1], concat.input[0]

    def pad_by_one(graph):
        graph.initializer.append(numpy_helper.from_array(np.float32(1), "one"))
        pad = next(node for node in graph.node if node.op_type == "Pad")
        pad.input.append("one")

    def reflect(graph):
        next(node for node in graph.node if node.op_type == "Pad").attribute.append(
            helper.make_attribute("mode", "edge")
        )

    def read_elsewhere(graph):
        padded = next(node.output[0] for node in graph.node if node.op_type == "Pad")
        reads = [node for node in graph.node if node.op_type == "Slice" and node.input[0] == padded]
        starts = {each.name: each for each in graph.initializer}
        moved = numpy_helper.to_array(starts[reads[0].input[1]]) + 1
        graph.initializer.append(numpy_helper.from_array(moved, "moved"))
        reads[0].input[1] = "moved"

    for change in (swap_products, pad_by_one, reflect, read_elsewhere):
        other = changed(model, change)
        kinds = [each.convolution.kind for each in found_in(other, monkeypatch)]
        assert WEIGHTS not in kinds, change.__name__


def test_a_value_that_others_read_stays(monkeypatch):
    model = step(**CASES["by entry"])
    inner = next(node.output[0] for node in model.graph.node if node.op_type == "Pad")
    model.graph.output.append(helper.make_tensor_value_info(inner, TensorProto.FLOAT, None))
    (gradient,) = [each for each in found_in(model, monkeypatch) if each.convolution.kind == WEIGHTS]
    ops = [model.graph.node[at].op_type for at in gradient.members]
    assert "Pad" not in ops and ops.count("MatMul") == 9
    monkeypatch.undo()
    model.graph.output[-1].ClearField("type")
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    known = next(value for value in inferred.graph.value_info if value.name == inner)
    model.graph.output[-1].CopyFrom(known)
    assert_near(model)


def test_scratch_memory_has_a_name_of_its_own():
    nodes = [
        helper.make_node("Conv", [before, "w"], [after], after, pads=[1] * 4)
        for before, after in (("x", "a"), ("a", "a/scratch"))
    ]
    turned = helper.make_node("Transpose", ["a/scratch"], ["y"], "turned", perm=[1, 0, 2, 3])
    shape = [8, 16, 32, 32]
    model = model_of([*nodes, turned], {"x": shape, "w": [16, 16, 3, 3]}, {"y": [16, 8, 32, 32]}, {})
    assert_near(model, least=2)


def test_the_bits_depend_neither_on_neighbours_nor_on_the_run():
    model = step(**CASES["uneven"])
    feeds = feeds_of(model)
    with Session(model) as one, Session(model) as other:
        first, again, second = one.run(feeds), one.run(feeds), other.run(feeds)
    for name in first:
        assert np.array_equal(first[name], again[name]) and np.array_equal(first[name], second[name])


def test_special_values_stay_where_they_belong():
    model = step(**CASES["by entry"])
    feeds = feeds_of(model)
    feeds["x"][3, 5, 7, 9] = np.nan
    feeds["x"][4, 0, 0, 0] = np.inf
    with Session(model) as session, np.errstate(all="ignore"):
        found = session.run(feeds)
    exact = dict(zip(found, run_model(model, feeds, "disable"), strict=True))
    assert np.array_equal(np.isfinite(found["y"]), np.isfinite(exact["y"]))
    usual = np.isfinite(exact["y"])
    np.testing.assert_allclose(found["y"][usual], exact["y"][usual], rtol=1e-4, atol=1e-4)


def test_level_disable_and_unfused_have_onnx_runtimes_bits():
    model = step(**CASES["few channels"])
    feeds = feeds_of(model)
    for settings_ in ({"level": "disable"}, {"fuse": False}):
        with Session(model, **settings_) as session:
            assert session.kernel_count == 0
            exact = run_model(model, feeds, settings_.get("level", "all"))
            assert all(np.array_equal(a, b) for a, b in zip(session.run(feeds).values(), exact, strict=True))


def test_a_convolution_is_stated_in_json():
    of = Convolution(WEIGHTS, (2, 3, 8, 8), (2, 4, 6, 6), (3, 3), (1, 1), (1, 1), (0, 0), (0, 0))
    assert Convolution.of(json.loads(json.dumps(dataclasses.asdict(of)))) == of


def test_without_the_package_steps_run_as_before(monkeypatch):
    monkeypatch.setattr(
        onednn.metadata, "files", lambda name: (_ for _ in ()).throw(onednn.metadata.PackageNotFoundError)
    )
    onednn.why_not.cache_clear()
    try:
        assert "pip install" in onednn.why_not()
    finally:
        monkeypatch.undo()
        onednn.why_not.cache_clear()
    assert not onednn.why_not()


def fused_by_the_runtime(bias, added, relu, channels=24):
    """A convolution and what ONNX Runtime computes with it, by default, as one node."""
    shapes = {"x": [7, 16, 21, 20], "w": [channels, 16, 3, 3], "b": [channels], "z": [7, channels, 21, 20]}
    read = ["x", "w", *["b"] * bias]  # constant weights would be laid out again
    nodes = [helper.make_node("Conv", read, ["c"], pads=[1] * 4)]
    if added:
        nodes.append(helper.make_node("Add", ["c", "z"], ["s"]))
    if relu:
        nodes.append(helper.make_node("Relu", [nodes[-1].output[0]], ["r"]))
    nodes.append(helper.make_node("Concat", [nodes[-1].output[0]] * 4, ["k"], axis=1))  # more memory than scratch takes
    nodes.append(helper.make_node("Transpose", ["k"], ["y"], perm=[1, 0, 2, 3]))
    graph = helper.make_graph(
        nodes, "step",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shapes[name]) for name in (*read, *["z"] * added)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4 * channels, 7, 21, 20])],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


@pytest.mark.parametrize("relu", few([False, True], [True]))
@pytest.mark.parametrize("added", few([False, True], [True]))
@pytest.mark.parametrize("bias", [False, True])
def test_what_onnxruntime_computes_with_a_convolution(bias, added, relu):
    model = fused_by_the_runtime(bias, added, relu)
    feeds = feeds_of(model)
    feeds["x"][0, 0, 0, 0] = np.nan
    with Session(model) as session, Session(model, fuse=False) as plain:
        assert session.kernel_count
        found, expected = session.run(feeds)["y"], plain.run(feeds)["y"]
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.nanmax(np.abs(expected)), equal_nan=True)
    assert (np.nanmin(found) >= 0) == relu


@pytest.mark.parametrize("change", ["parts", "scratch"])
def test_kernels_that_were_planned_for_other_processors_are_refused(change, tmp_path, monkeypatch):
    """They would compute a part of the batch, or write past their scratch memory."""
    model = step(**CASES["by entry"])
    kernels = tuple(convolutions.kernel_of(each, ordered_step(model)) for each in found_in(model, monkeypatch))
    path = tmp_path / "lean.kernels"
    kernel_file.write(kernels, 1, path)
    with kernel_file.offered(path):
        assert kernel_file.fit_here(path)
    if change == "parts":
        divided = onednn.parts
        monkeypatch.setattr(onednn, "parts", lambda of, threads=0: divided(of, 7))
    else:
        taken = onednn.scratch_bytes
        monkeypatch.setattr(onednn, "scratch_bytes", lambda of: taken(of) + 64)
    assert not kernel_file.fit_here(path)
    with pytest.raises(ModelError, match="another number of processors"), kernel_file.offered(path):
        pass


def test_a_gradient_waits_for_what_it_reads():
    """Even where a node that turns its other operand, and is no longer needed, comes long before that is made."""
    batch, channels, out, size = 8, 16, 16, 24
    images, gradients, weights = [batch, channels, size, size], [batch, out, size - 2, size - 2], [out, channels, 3, 3]
    turn = {"perm": [1, 0, 2, 3]}
    nodes = [
        helper.make_node("Transpose", ["x"], ["xt"], **turn),
        helper.make_node("Mul", ["u", "c"], ["v"]),
        helper.make_node("ReduceSum", ["v"], ["s"], keepdims=0),
        helper.make_node("Mul", ["g0", "s"], ["g"]),
        helper.make_node("Transpose", ["g"], ["gt"], **turn),
        helper.make_node("Conv", ["xt", "gt"], ["d"]),
        helper.make_node("Transpose", ["d"], ["dw"], **turn),
        helper.make_node("ReduceMax", ["gt"], ["h"], keepdims=0),
        helper.make_node("Add", ["dw", "v"], ["y"]),
    ]
    shapes = {"x": images, "g0": gradients, "u": weights}
    graph = helper.make_graph(
        nodes, "step",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, weights),
         helper.make_tensor_value_info("h", TensorProto.FLOAT, [])],
        [numpy_helper.from_array(np.float32(0.5), "c")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    feeds = {name: np.random.default_rng(0).standard_normal(shape, np.float32) for name, shape in shapes.items()}
    with Session(model) as session:
        found = session.run(feeds)
        assert session.kernel_count > 1
    for name, wanted in zip(("y", "h"), run_model(model, feeds, "disable"), strict=True):
        np.testing.assert_allclose(found[name], wanted, rtol=1e-4, atol=1e-2)
