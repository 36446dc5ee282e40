"""A step in a body: the same step, of which sessions with default options make no memory patterns."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest

import onnx_remat
from onnx_remat.errors import ModelError
from onnx_remat.ir import model_io
from onnx_remat.ir.body import into_body, is_body, out_of_body, unshadow
from onnx_remat.measure import processes
from sample_models.chain import chain

PASSED_ON = """
<ir_version: 8, opset_import: ["" : 17]>
step (float[4] x, bool up) => (float loss, float[4] y, float[4] x_again, float[2] given)
<float[2] given = {1.0, 2.0}>
{
    y = If (up) <then_branch = then () => (float[4] more) { more = Add (x, x) },
                 else_branch = otherwise () => (float[4] less) { less = Neg (x) }>
    loss = ReduceSum <keepdims = 0> (y)
    x_again = Identity (x)
}
"""


@pytest.fixture
def passed_on() -> onnx.ModelProto:
    """A step with a body of its own, and an output that is an initializer."""
    return onnx.parser.parse_model(PASSED_ON)


def ran(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def test_it_comes_out_as_it_went_in(passed_on: onnx.ModelProto) -> None:
    for model in (chain(3, 4, 2), passed_on):
        inside = into_body(model)
        onnx.checker.check_model(inside, full_check=True)
        assert is_body(inside) and into_body(inside) is inside and not is_body(model)
        assert [v.name for v in inside.graph.output] == [v.name for v in model.graph.output]
        assert out_of_body(inside).SerializeToString(deterministic=True) == model.SerializeToString(deterministic=True)


@pytest.mark.parametrize("up", [True, False])
def test_same_results(passed_on: onnx.ModelProto, up: bool) -> None:
    feeds = {"x": np.arange(4, dtype=np.float32), "up": np.array(up)}
    for one, other in zip(ran(passed_on, feeds), ran(into_body(passed_on), feeds), strict=True):
        np.testing.assert_array_equal(one, other)


def test_default_options_take_no_more_than_the_plan(tmp_path) -> None:
    pytest.importorskip("onnxruntime")
    result = onnx_remat.rewrite_model(chain(24, 1024, 256), "60%", run_by="session", effort=0.3)
    plain, body = tmp_path / "plain.onnx", tmp_path / "body.onnx"
    result.save(plain)
    onnx.save(into_body(result.model), body)
    with_patterns, without = (processes.measure(p, default=True, steps=3).peak_bytes for p in (plain, body))
    assert without < result.report.budget * 1.1 < 1.5 * result.report.budget < with_patterns


def test_the_file_is_read_as_the_step_it_is(tmp_path) -> None:
    pytest.importorskip("onnxruntime")
    graph = chain(12, 64, 32)
    result = onnx_remat.rewrite_model(graph, "70%", run_by="session", effort=0.3, patterns=False)
    assert is_body(result.model)
    result.save(path := tmp_path / "body.onnx")
    again = onnx_remat.rewrite_model(path, "100%", run_by="session", effort=0.3)
    assert again.report.before.total == result.report.after.total
    with onnx_remat.Session(path) as session:
        feeds = {a.name: np.full(a.shape, 0.1, a.dtype_name) for a in session.inputs}
        made = session.run(feeds)
    for name, value in zip(made, ran(graph, feeds), strict=True):
        np.testing.assert_allclose(made[name], value, rtol=1e-5, atol=1e-7)


def test_opsets_without_sequences_are_refused() -> None:
    model = chain(3, 4, 2)
    model.opset_import[0].version = 10
    with pytest.raises(ModelError, match="opset 11"):
        into_body(model)


HEAD = '<ir_version: 8, opset_import: ["" : 17]> step (float[4] x, bool up, int64 n) => (float loss, float[4] y) '
SHADOWS = {
    "a node": """{
        y = If (up) <then_branch = then () => (float[4] more) { loss = Add (x, x) more = Neg (loss) },
                     else_branch = otherwise () => (float[4] less) { less = Neg (x) }>
        loss = ReduceSum <keepdims = 0> (y) }""",
    "an initializer": """{
        y = If (up) <then_branch = then () => (float[4] more) <float[4] loss = {1.0, 2.0, 3.0, 4.0}>
                     { more = Add (loss, x) }, else_branch = otherwise () => (float[4] less) { less = Neg (x) }>
        loss = ReduceSum <keepdims = 0> (y) }""",
    "an input": """{
        q = Loop (n, up, x) <body = turn (int64 i, bool c, float[4] y) => (bool on, float[4] z)
                             { on = Identity (c) z = Add (y, y) }>
        y = Identity (q)
        loss = ReduceSum <keepdims = 0> (y) }""",
}


@pytest.mark.parametrize("what", SHADOWS)
def test_bodies_may_have_something_of_an_outputs_name(what: str) -> None:
    model = onnx.parser.parse_model(HEAD + SHADOWS[what])
    inside = into_body(model)
    assert out_of_body(inside).SerializeToString(deterministic=True) == model.SerializeToString(deterministic=True)
    feeds = {"x": np.arange(4, dtype=np.float32), "up": np.array(True), "n": np.array(2)}
    feeds = {value.name: feeds[value.name] for value in model.graph.input}
    for one, other in zip(ran(model, feeds), ran(inside, feeds), strict=True):
        np.testing.assert_array_equal(one, other)


def _renamed_hidden(model: onnx.ModelProto) -> None:
    hidden = next(node.output[0] for node in model.graph.node if node.output[0] != "loss")
    for node in model.graph.node:
        for place in (node.input, node.output):
            place[:] = ["onnx_remat.body.zero" if name == hidden else name for name in place]


def _sequence(model: onnx.ModelProto) -> None:
    model.graph.node.add(op_type="SequenceConstruct", input=["loss"], output=["losses"])
    kind = onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [])
    model.graph.output.append(
        onnx.helper.make_value_info("losses", onnx.helper.make_sequence_type_proto(kind))
    )  # fmt: skip


def _only_inputs(model: onnx.ModelProto) -> None:
    del model.graph.output[:]
    model.graph.output.append(model.graph.input[0])


def _no_standard(model: onnx.ModelProto) -> None:
    model.opset_import[0].domain = "com.microsoft"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_renamed_hidden, "'onnx_remat.body.zero' is needed"),
        (_sequence, "output 'losses' is not a tensor"),
        (_only_inputs, "every output is an input or a constant"),
        (_no_standard, "does not import"),
    ],
)
def test_what_fits_in_no_body_is_refused(change, message: str) -> None:
    model = chain(3, 4, 2)
    change(model)
    with pytest.raises(ModelError, match=message):
        into_body(model)


def test_it_is_refused_before_the_plan() -> None:
    model = chain(3, 4, 2)
    _sequence(model)
    seen: list[str] = []
    with pytest.raises(ModelError, match="not a tensor of a known type"):
        onnx_remat.rewrite_model(
            model, "90%", run_by="session", patterns=False, progress=lambda what, _: seen.append(what)
        )
    assert set(seen) <= {"load"}


def _then(model: onnx.ModelProto) -> onnx.GraphProto:
    return next(a.g for a in model.graph.node[-1].attribute if a.name == "then_branch")


HOSTILE = {
    "no bodies": lambda model: model.graph.node[-1].ClearField("attribute"),
    "no graph in it": lambda model: _then(model).Clear(),
    "no nodes": lambda model: _then(model).ClearField("node"),
    "a step that does not capture": lambda model: _then(model).node.pop(0),
    "more before it": lambda model: model.graph.node.insert(0, onnx.helper.make_node("Neg", ["bias"], ["less"])),
    "weights in it": lambda model: _then(model).initializer.add(name="w", data_type=1, dims=[0]),
    "another condition": lambda model: model.graph.node[-1].input.__setitem__(0, "bias"),
    "a condition that never holds": lambda model: (
        model.graph.node[0].attribute[0].t.CopyFrom(onnx.helper.make_tensor("zero", onnx.TensorProto.INT64, [], [1]))
    ),
    "outputs in another order": lambda model: model.graph.node[-1].output.reverse(),
    "a node of another domain": lambda model: setattr(model.graph.node[-1], "domain", "elsewhere"),
    "no nodes at all": lambda model: model.graph.ClearField("node"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_file_that_says_so_and_is_not_is_refused(what: str) -> None:
    model = into_body(chain(3, 4, 2))
    HOSTILE[what](model)
    with pytest.raises(ModelError, match="by its metadata the step is in the body"):
        model_io.load(model.SerializeToString())


def test_an_output_may_be_taken_from_it() -> None:
    model = into_body(chain(3, 4, 2))
    gone = model.graph.output.pop(0).name
    step = model_io.load(model.SerializeToString()).model
    assert any(gone in node.output for node in step.graph.node)
    onnx.checker.check_model(step, full_check=True)


def test_a_budget_that_is_kept_says_that_the_file_is_another() -> None:
    options = {"run_by": "session", "effort": 0.5}
    for patterns, said in ((True, "unchanged but for metadata"), (False, "in the body of an If")):
        result = onnx_remat.rewrite_model(chain(3, 16, 8), "100%", patterns=patterns, **options)
        assert is_body(result.model) is not patterns
        assert result.report.notes[0] == f"the original keeps this budget already: OUT is the original, {said}"


def test_a_budget_that_is_kept_says_what_is_written_out() -> None:
    text = "(float[4, 3] x, int64[4] t) => (float loss) { loss = SoftmaxCrossEntropyLoss (x, t) }"
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 17]> g {text}')
    result = onnx_remat.rewrite_model(model, "100%", run_by="session", effort=0.5)
    whole = [node.op_type for node in result.model.graph.node] == ["SoftmaxCrossEntropyLoss"]
    said = "unchanged but for metadata" if whole else "with functions written out"
    assert result.report.notes[0].endswith(f"OUT is the original, {said}") and not whole


def test_absent_outputs_are_no_names() -> None:
    """A body's absent outputs, and absent inputs, stay absent where the graph outside has absent outputs as well."""
    text = """(float[2, 1, 3] x, float[1, 16, 3] w, float[1, 16, 4] r, bool c) => (float[2, 1, 4] z) {
        , h, = LSTM <hidden_size = 4> (x, w, r)
        z = If (c) <
            then_branch = g () => (float[2, 1, 4] y) {
                q, , = LSTM <hidden_size = 4> (x, w, r, , , h)
                a = Clip (q, , one)
                y = Squeeze (a, at) },
            else_branch = e () => (float[2, 1, 4] s) {
                p, , = LSTM <hidden_size = 4> (x, w, r)
                s = Squeeze (p, at) }>
    }"""
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 17]> g {text}')
    before = model.SerializeToString()
    unshadow(model.graph)
    assert model.SerializeToString() == before
