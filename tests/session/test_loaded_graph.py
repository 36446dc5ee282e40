"""What ONNX Runtime has once it has loaded a step is what was laid out, whatever it changes while it loads."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnx_remat import ModelError, Session
from onnx_remat.session import lean_graph, plan_session
from tests.support.graphs import run_model, same_at, same_numbers
from tests.support.outcomes import everything_bound
from tests.support.slow import few

pytest.importorskip("onnxruntime")

LEVELS = ("disable", "basic", "all")
HEAD = '<ir_version: 8, opset_import: ["" : 17]>'


def filled(kind, shape, rng):
    if kind == onnx.TensorProto.BOOL:
        return np.array(True)
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    return (
        rng.integers(-99, 99, shape).astype(dtype) if dtype.kind in "iu" else rng.standard_normal(shape).astype(dtype)
    )


def feeds_of(model):
    rng, stored = np.random.default_rng(0), {tensor.name for tensor in model.graph.initializer}
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    kinds = {v.name: v.type.tensor_type.elem_type for v in model.graph.input}
    return {name: filled(kinds[name], shape, rng) for name, shape in shapes.items() if name not in stored}


def assert_right(model, level):
    feeds = feeds_of(model)
    wanted = run_model(model, feeds, level)
    with everything_bound(), Session(model, level=level) as session:
        for _ in range(2):
            assert same_at(level)(session.run(feeds).values(), wanted)


STEPS = {
    "an op without a half kernel": """g (float16[4,64,64] x, float16[64,64,3] w)
        => (float16[4,64,62] y, float16[4,64,126] u) {
        y = Conv(x, w)  p = Concat<axis = 2>(x, x)  u = Conv(p, w) }""",
    "half in bodies": """g (float16[8,8] x, bool c) => (float16[8,8] y, float16[8,8] z) {
        t = Relu(x)
        y = If(c) <then_branch = a () => (float16[8,8] p) { p = Sin(t) },
                   else_branch = b () => (float16[8,8] r) { r = Cos(t) }>
        z = Cos(t) }""",
    "a DequantizeLinear that is read twice": """g (int8[16,16] q, float[16,16] a, float[16,16] b) => (float[16,16] y)
        <float s = {0.05}, int8 z = {3}> {
        d = DequantizeLinear(q, s, z)  t = Tanh(a)  p = Mul(d, t)  u = Sub(t, p)  v = Tanh(u)  w = Tanh(b)
        y = Mul(v, w) }""",
    "every output known": "g (float[4,5] x) => (int64[2] y) { y = Shape(x) }",
    "casts that meet": """g (float16[8,8] x) => (float16[8,8] y, float16[8,8] z) {
        f = Cast<to = 1>(x)  a = Tanh(f)  b = Cast<to = 10>(a)  c = Cast<to = 1>(b)  d = Tanh(c)
        y = Cast<to = 10>(d)  z = Cast<to = 10>(c) }""",
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("step", STEPS)
def test_the_loaded_graph_is_laid_out(step, level):
    assert_right(onnx.parser.parse_model(HEAD + STEPS[step]), level)


@pytest.mark.parametrize("channels", [4, 24, 36])
def test_channels_are_padded_to_whole_blocks(channels):
    """Filters of depthwise convolutions; the runtime's own shape inference forgets the padding."""
    weights = np.random.default_rng(0).standard_normal((channels, 1, 3, 3)).astype(np.float32)
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], group=channels), helper.make_node("Tanh", ["c"], ["y"])]
    x, y = (helper.make_tensor_value_info(n, 1, s) for n, s in (("x", [2, channels, 9, 9]), ("y", [2, channels, 7, 7])))
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(weights, "w")])
    for opset in (7, 17):
        opsets = [helper.make_opsetid("", opset)]
        assert_right(helper.make_model(graph, opset_imports=opsets, ir_version=8), "all")


@pytest.mark.parametrize("channels", [16, 20, 36])
@pytest.mark.parametrize("last", ["Conv", "AveragePool", "MaxPool"])
def test_images_with_channels_last_are_blocked_in_the_shape_of_channels_first(channels, last):
    """The runtime merges the Transpose in front into the node that blocks the channels, as JAX's steps have it."""
    weights = np.random.default_rng(0).standard_normal((channels, channels, 3, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Transpose", ["x"], ["first"], perm=[0, 3, 1, 2]),
        helper.make_node("Conv", ["first", "w"], ["c"])
        if last == "Conv"
        else helper.make_node(last, ["first"], ["c"], kernel_shape=[3, 3]),
        helper.make_node("Conv", ["c", "w"], ["d"]), helper.make_node("Transpose", ["d"], ["e"], perm=[0, 2, 3, 1]),
        helper.make_node("Tanh", ["e"], ["y"]),
    ]  # fmt: skip
    shapes = {"x": [2, 10, 9, channels], "y": [2, 6, 5, channels]}
    x, y = (helper.make_tensor_value_info(name, 1, shape) for name, shape in shapes.items())
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(weights, "w")])
    assert_right(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), "all")


@pytest.mark.parametrize("level", few(LEVELS, LEVELS[2:]))
@pytest.mark.parametrize("form", ["initializers", "constants"])
def test_weights_may_lie_in_files_next_to_the_model(tmp_path, form, level):
    weights = numpy_helper.from_array(np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32), "w")
    model = onnx.parser.parse_model(HEAD + "g (float[8,64] x) => (float[8,64] y) { t = MatMul(x, w)  y = Tanh(t) }")
    if form == "initializers":
        model.graph.initializer.append(weights)
    else:
        model.graph.node.insert(0, helper.make_node("Constant", [], ["w"], value=weights))
    feeds = feeds_of(model)
    wanted = run_model(model, feeds, level)
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0, convert_attribute=True)
    with Session(path, level=level) as session:
        assert same_numbers(session.run(feeds).values(), wanted)


@pytest.mark.parametrize("level", few(LEVELS, LEVELS[2:]))
@pytest.mark.parametrize("ir_version", few([3, 8], [8]))
def test_inputs_with_a_default_need_not_be_fed(ir_version, level):
    """Also those that the runtime folds away; of IR version 3 every initializer is listed among the inputs."""
    text = "g (float[4,8] x, float[8] w, float[8] v) => (float[4,8] y) { o = Neg(v)  t = Add(x, o)  y = Mul(t, w) }"
    model = onnx.parser.parse_model(f'<ir_version: {ir_version}, opset_import: ["" : 9]>' + text)
    weights = np.arange(8, dtype=np.float32)
    model.graph.initializer.extend(numpy_helper.from_array(weights, name) for name in "vw")
    assert_right(model, level)
    if ir_version > 3:
        feeds = feeds_of(model) | {"w": weights + 1}
        with Session(model, level=level) as session:
            assert same_at(level)(session.run(feeds).values(), run_model(model, feeds, level))


def test_a_graph_that_changes_at_every_load_is_refused(monkeypatch, tmp_path):
    model = onnx.parser.parse_model(HEAD + "g (float[4,5] x) => (float[4,5] y) { t = Neg(x)  y = Tanh(t) }")
    onnx.save(model, tmp_path / "model.onnx")
    real = lean_graph.as_loaded
    seen = []

    def restless(copy, *args):
        loaded = real(copy, *args)
        loaded.graph.node.add().CopyFrom(helper.make_node("Neg", ["x"], [f"n{len(seen)}"], name=f"new{len(seen)}"))
        seen.append(lean_graph.difference(copy, loaded))
        return loaded

    monkeypatch.setattr(lean_graph, "as_loaded", restless)
    with pytest.raises(ModelError, match=r"changes it whenever it loads it \(node 'new3' \(Neg\) is new\)"):
        plan_session.plan(tmp_path / "model.onnx", tmp_path / "copy.onnx", plan_session.SessionRequest())
    assert len(seen) == 4


def test_differences_between_graphs_are_found():
    def graph(text):
        model = onnx.parser.parse_model(HEAD + text)
        for node in model.graph.node:
            node.name = f"3:{node.output[0]}"
        return model

    planned = graph("g (float[4] x, bool c) => (float[4] y) { t = Neg(x)  y = Add(t, x) }")
    assert not lean_graph.difference(planned, planned)
    other = graph("g (float[4] x, bool c) => (float[4] y) { t = Neg(x)  y = Add(x, x) }")
    assert lean_graph.difference(planned, other) == "node 'y' (Add) is another"
    other = graph("g (float[4] x, bool c) => (float[4] y) { y = Add(x, x) }")
    assert lean_graph.difference(planned, other) == "node 't' (Neg) is gone"
    other = graph("g (float[4] x, bool c) => (float[4] y) { t = Neg(x)  y = Add(t, x)  z = Neg(t) }")
    assert lean_graph.difference(planned, other) == "node 'z' (Neg) is new"
    body = """g (float[4] x, bool c) => (float[4] y) {
        y = If(c) <then_branch = a () => (float[4] p) { p = %s(x) },
                   else_branch = b () => (float[4] q) { q = Neg(x) }> }"""
    assert lean_graph.difference(graph(body % "Abs"), graph(body % "Neg")) == "node 'y' (If) is another"
