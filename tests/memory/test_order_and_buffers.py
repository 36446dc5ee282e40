"""The emulation of ONNX Runtime against ONNX Runtime: executed order, private buffers, folded constants."""

from __future__ import annotations

import random

import numpy as np
import onnx
import pytest
from onnx import helper

from onnx_remat.ir.metadata import TAG
from onnx_remat.ir.shapes import UNSEEN
from onnx_remat.measure import processes
from onnx_remat.memory.order import default_order
from onnx_remat.ort.executed import as_executed
from onnx_remat.ort.kernels.cpu import CPU
from onnx_remat.ort.prepare import Preparation
from tests.support.graphs import SAMPLES, mlp, model_of
from tests.support.slow import few

pytest.importorskip("onnxruntime")


@pytest.mark.parametrize(
    "path", few(SAMPLES, [path for path in SAMPLES if path.stem in ("attention_stack", "chain")]), ids=lambda p: p.stem
)
def test_emulated_order_is_the_executed_order(path):
    executed = processes.measure(path, "disable", trace=True).executed
    emulated = as_executed(onnx.load(path), None, "disable", Preparation(CPU))
    assert tuple(emulated.compiled.graph.ops[i].label for i in emulated.order.order) == executed


def shuffled(model: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """The same graph in another topological order of its file."""
    generator = random.Random(seed)
    pending, ready = list(model.graph.node), []
    known = {v.name for v in model.graph.input} | {t.name for t in model.graph.initializer}
    while pending:
        runnable = [n for n in pending if all(i in known for i in n.input)]
        node = generator.choice(runnable)
        pending.remove(node)
        ready.append(node)
        known.update(node.output)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.node[:]
    copy.graph.node.extend(ready)
    return copy


@pytest.mark.parametrize("seed", few(range(4), [0, 1]))
def test_emulated_order_and_peak_follow_the_file(seed, tmp_path):
    model = shuffled(mlp(layers=6, batch=2048, width=128), seed)
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    measured = processes.measure(path, "disable", trace=True)
    emulated = as_executed(model, None, "disable", Preparation(CPU))
    assert tuple(emulated.compiled.graph.ops[i].label for i in emulated.order.order) == measured.executed
    assert emulated.timeline.peak == pytest.approx(measured.peak_bytes, rel=0.03)


def test_default_order_takes_the_highest_leaf_first():
    assert default_order([[], [0], [0]]) == [0, 2, 1]
    assert default_order([]) == []


def test_a_private_value_gets_its_own_buffer_in_the_runtime(tmp_path):
    """Without the hidden shape the last value takes over the first's buffer, which therefore outlives a large step."""
    n = 2_000_000

    def peak(hidden: bool) -> int:
        make = helper.make_node
        nodes = [
            make("Size", ["x"], ["s"], name="s"),
            make("Mul", ["s", "no_axes"], [UNSEEN], name="unseen"),
            make("Exp", ["x"], ["a"], name="a"),
            make("ReduceSum", ["a"], ["r"], name="r"),
            make("Add", ["x", "r"], ["b"], name="b"),  # takes a's buffer and is dead after r2
            make("ReduceSum", ["b"], ["r2"], name="r2"),
            make("Mul", ["x3", "r2"], ["big"], name="big"),
            make("ReduceSum", ["big"], ["r3"], name="r3"),
            make("Unsqueeze", ["x", UNSEEN], ["x_"], name="x_"),
            make("Add", ["x_" if hidden else "x", "r3"], ["c"], name="c"),
            make("ReduceSum", ["c"], ["o"], name="o"),
        ]
        shapes = {
            "a": [n],
            "r": [1],
            "b": [n],
            "r2": [1],
            "big": [3 * n],
            "r3": [1],
            "c": [f"{TAG}p.0={n}"] if hidden else [n],
        }
        info = [helper.make_tensor_value_info(name, 1, shape) for name, shape in shapes.items()]
        model = model_of(nodes, {"x": [n], "x3": [3 * n]}, {"o": [1]}, {"no_axes": np.zeros(0, np.int64)}, info)
        path = tmp_path / f"{hidden}.onnx"
        onnx.save(model, path)
        measured = processes.measure(path, "disable").peak_bytes
        simulated = as_executed(model, None, "disable", Preparation(CPU)).timeline.peak
        assert simulated == pytest.approx(measured, rel=0.03)
        return measured

    assert peak(hidden=False) - peak(hidden=True) == pytest.approx(4 * n, rel=0.1)


def test_casts_around_half_precision_count_with_optimisations_off_too(tmp_path):
    """The CPU computes half precision in float32, so that ONNX Runtime inserts casts at every level."""
    exps = " ".join(f"a{i} = Exp (x)" for i in range(4))
    model = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["" : 20]>
        g (float16[1024, 1024] x) => (float16 y) {{
            {exps}  s = Sum (a0, a1, a2, a3)  y = ReduceMax <keepdims = 0> (s)
        }}""")
    onnx.save(model, tmp_path / "half.onnx")
    simulated = as_executed(model, None, "disable", Preparation(CPU)).timeline.peak
    measured = processes.measure(tmp_path / "half.onnx", "disable").peak_bytes
    assert simulated == pytest.approx(measured, rel=0.05)
    assert simulated > 1.5 * as_executed(model, None, "all", Preparation(CPU)).timeline.peak


def test_values_in_the_blocked_layout_share_buffers(tmp_path):
    """What a Concat reads is freed after it, unless convolutions after it, in ONNX Runtime's layout, take it over."""
    size, wide = [1, 16, 256, 256], [1, 32, 256, 256]
    weights = {"a": [16, 16, 3, 3], "b": [16, 32, 3, 3], "c": [16, 16, 3, 3]}
    pads = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    nodes = [
        helper.make_node("Conv", ["x", "a"], ["left"], name="left", **pads),
        helper.make_node("Tanh", ["x"], ["right"], name="right"),
        helper.make_node("Concat", ["left", "right"], ["both"], name="both", axis=1),
        helper.make_node("Conv", ["both", "b"], ["once"], name="once", **pads),
        helper.make_node("Conv", ["once", "c"], ["twice"], name="twice", **pads),
        helper.make_node("ReduceMean", ["twice"], ["y"], name="y", keepdims=0),
    ]  # fmt: skip
    model = model_of(nodes, {"x": size}, {"y": []})
    for name, shape in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), name))
    onnx.save(model, tmp_path / "a.onnx")
    simulated = as_executed(model, None, "all", Preparation(CPU))
    assert "ReorderInput" in {op.node.op_type for op in simulated.compiled.graph.ops}
    measured = processes.measure(tmp_path / "a.onnx", "all").peak_bytes
    assert simulated.timeline.peak == pytest.approx(measured, abs=600_000)
    assert measured > 4 * (4 * np.prod(size) + np.prod(wide))  # the two of the Concat are still there


def test_bodies_are_sized_by_the_shapes_that_they_read():
    """A Scan's body reshapes to sizes that are computed outside of it, and repeats as often as a constant says."""
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 20]>
        g (float[5, 24] x, float[24] zero) => (float[24] last, float[5, 4, 12] y)
        <int64[2] twice = {2, 1}, int64[1] two = {2}, int64[1] rest = {-1}> {
            size = Shape <start = 1> (x)
            half = Div(size, two)
            wide = Concat <axis = 0> (rest, half)
            last, y = Scan <num_scan_inputs = 1, body = b (float[24] s, float[24] r) => (float[24] t, float[4, 12] w) {
                t = Add(s, r)
                flat = Reshape(t, wide)
                w = Tile(flat, twice)
            }> (zero, x)
        }""")
    for level in ("disable", "all"):
        compiled = as_executed(model, None, level, Preparation(CPU)).compiled
        (scan,) = (op for op in compiled.graph.ops if op.node.op_type == "Scan")
        assert "twice" in scan.captured and len(scan.captured) == 2


def waiting(tail: list[onnx.NodeProto], stated: onnx.ValueInfoProto) -> onnx.ModelProto:
    """A buffer of the shape of x is freed, then twice as much is live; `tail` makes y from a, whose shape is hidden."""
    make, small, large = helper.make_node, [32, 128, 256], [64, 128, 256]
    nodes = [
        make("Exp", ["x"], ["p"], name="p"), make("ReduceSum", ["p"], ["s"], name="s", keepdims=0),
        make("Add", ["w", "s"], ["q"], name="q"), make("ReduceSum", ["q"], ["s2"], name="s2", keepdims=0),
        make("Unsqueeze", ["x", UNSEEN], ["x_"], name="x_"), make("Add", ["x_", "s2"], ["a"], name="a"), *tail,
    ]  # fmt: skip
    model = model_of(nodes, {"x": small, "w": large}, {"y": []})
    model.graph.input.append(helper.make_tensor_value_info(UNSEEN, onnx.TensorProto.INT64, [0]))
    model.graph.value_info.append(stated)
    for name, number in (("zero", 0), ("one", 1), ("end", 256)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([number]), name))
    return model


@pytest.mark.parametrize("level", few(["disable", "basic", "all"], ["all"]))
@pytest.mark.parametrize("case", ["a Transpose that moves", "a cast for a kernel"])
def test_a_value_that_onnx_runtime_names_takes_a_freed_buffer_if_it_knows_the_shape(case, level, tmp_path):
    """It moves the Transpose behind the Slice, whose new result has the shape of p: p's buffer waits for it.

    The result of a kernel that computes in float32 has another name than in the file, too, and no known shape.
    """
    make, info = helper.make_node, helper.make_tensor_value_info
    if case == "a Transpose that moves":
        tail = [
            make("Transpose", ["a"], ["t"], name="t", perm=[0, 2, 1]),
            make("Slice", ["t", "zero", "end", "one"], ["c"], name="c"),
            make("ReduceMax", ["c"], ["y"], name="y", keepdims=0),
        ]
        stated = info("c", onnx.TensorProto.FLOAT, [32, 256, 128])
    else:
        tail = [
            make("Cast", ["a"], ["h"], name="h", to=onnx.TensorProto.FLOAT16),
            make("Softplus", ["h"], ["c"], name="c"), make("Cast", ["c"], ["f"], name="f", to=1),
            make("ReduceMax", ["f"], ["y"], name="y", keepdims=0),
        ]  # fmt: skip
        stated = info("c", onnx.TensorProto.FLOAT16, [32, 128, 256])
    model, path = waiting(tail, stated), tmp_path / "m.onnx"
    onnx.save(model, path)
    predicted = as_executed(model, None, level, Preparation(CPU))
    assert predicted.timeline.peak == pytest.approx(processes.measure(path, level).peak_bytes, rel=0.03)


def test_an_empty_value_beside_a_size_that_nobody_knows_is_no_error():
    make, info = helper.make_node, helper.make_tensor_value_info
    nodes = [
        make("Unsqueeze", ["x", UNSEEN], ["x_"], name="x_"), make("Neg", ["x_"], ["a"], name="a"),
        make("Transpose", ["a"], ["t"], name="t", perm=[0, 2, 1]),
        make("Slice", ["t", "zero", "end", "one"], ["c"], name="c"),
        make("ReduceSum", ["c"], ["y"], name="y", keepdims=0),
    ]  # fmt: skip
    model = model_of(nodes, {"x": [0, 8, 4]}, {"y": []})
    model.graph.input.append(info(UNSEEN, onnx.TensorProto.INT64, [0]))
    model.graph.value_info.append(info("c", onnx.TensorProto.FLOAT, ["m", 4, 8]))
    for name, number in (("zero", 0), ("one", 1), ("end", 4)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([number]), name))
    assert as_executed(model, None, "all", Preparation(CPU)).timeline.peak > 0
