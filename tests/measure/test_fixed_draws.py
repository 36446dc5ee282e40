"""Models with random ops: outputs can be compared once both sides draw the same."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, parser

import onnx_remat
from onnx_remat.app import cli
from onnx_remat.ir import graph, shapes
from onnx_remat.measure.fixed_draws import drawing_bodies, race_warnings, random_nodes, without_chance
from onnx_remat.measure.verify import session
from onnx_remat.ort import runtime
from onnx_remat.ort.kernels.cpu import CPU
from tests.support.graphs import mlp
from tests.support.slow import few

MODEL = """
<ir_version: 10, opset_import: ["" : 20]>
step (float[64, 8] x, float[64, 8] g) => (float[64, 8] y, float[64, 8] dx, float[64, 8] noise, float[64, 8] coin)
<float ratio = {0.25}, bool train = {1}> {
    y, mask = Dropout <seed = 3> (x, ratio, train)
    kept = Cast <to = 1> (mask)
    dx = Mul (g, kept)
    noise = RandomNormalLike (x)
    half = Sigmoid (noise)
    coin = Bernoulli (half)
}
"""


@pytest.fixture
def feeds() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {name: generator.standard_normal((64, 8)).astype(np.float32) for name in ("x", "g")}


def test_draws_are_fixed_and_still_random(feeds):
    model = parser.parse_model(MODEL)
    model.graph.node[0].output[1] = model.graph.node[1].input[0] = "y.mask"  # a name that is easily made up, too
    settled = without_chance(model, shapes.infer(graph.build(model), {}))
    onnx.checker.check_model(settled)
    assert [node.op_type for node in random_nodes(model)] == ["Dropout", "RandomNormalLike", "Bernoulli"]
    assert not random_nodes(settled)
    first, second = runtime.outputs(settled, feeds), runtime.outputs(settled, feeds)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    mask = first["dx"] != 0
    assert 0.65 < mask.mean() < 0.85
    assert np.array_equal(first["y"], feeds["x"] * mask / np.float32(0.75))
    assert abs(first["noise"].mean()) < 0.3
    assert 0.8 < first["noise"].std() < 1.2
    assert set(np.unique(first["coin"])) == {0, 1}


@pytest.mark.parametrize(
    ("drawn", "mean", "deviation"),
    [
        ("RandomNormalLike<mean = 50.0, scale = 100.0>(x)", 50, 100),
        ("RandomNormal<mean = -3.0, scale = 0.5, shape = [64, 64]>()", -3, 0.5),
        ("RandomUniformLike<low = 2.0, high = 4.0>(x)", 3, 2 / 12**0.5),
        ("RandomUniform<low = -1.0, shape = [64, 64]>()", 0, 2 / 12**0.5),
        ("Bernoulli(x)", 0.1, 0.3),
        ("Bernoulli<dtype = 11>(x)", 0.1, 0.3),
    ],
)
def test_fixed_draws_have_the_attributes_and_probabilities_of_their_nodes(drawn, mean, deviation):
    kind = "double" if "11" in drawn else "float"
    model = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 20]> g (float[64, 64] x) => ({kind}[64, 64] y) {{ y = {drawn} }}"""
    )
    settled = without_chance(model, shapes.infer(graph.build(model), {}))
    onnx.checker.check_model(settled, full_check=True)
    values = runtime.outputs(settled, {"x": np.full((64, 64), 0.1, np.float32)})["y"]
    assert values.mean() == pytest.approx(mean, abs=0.1 * deviation)
    assert values.std() == pytest.approx(deviation, rel=0.1)


def with_drawing_body() -> onnx.ModelProto:
    """A chain of layers behind an If whose bodies draw."""
    step = mlp(layers=10, batch=4096, width=32)
    value = onnx.helper.make_tensor_value_info
    arms = []
    for kind in ("RandomNormalLike", "RandomUniformLike"):
        nodes = [
            onnx.helper.make_node(kind, ["x"], [f"{kind}_drawn"]),
            onnx.helper.make_node("Add", ["x", f"{kind}_drawn"], [f"{kind}_sum"]),
        ]
        arms.append(onnx.helper.make_graph(nodes, kind, [], [value(f"{kind}_sum", TensorProto.FLOAT, [4096, 32])]))
    for node in step.graph.node:
        node.input[:] = ["noisy" if name == "x" else name for name in node.input]
    choice = onnx.helper.make_node("If", ["c"], ["noisy"], name="choice", then_branch=arms[0], else_branch=arms[1])
    step.graph.node.insert(0, choice)
    step.graph.input.append(value("c", TensorProto.BOOL, []))
    return step


@pytest.mark.slow
@pytest.mark.parametrize("run_by", few(["session", "loop"], ["session"]))
def test_a_step_with_draws_in_a_body_is_not_compared_and_not_refused(run_by):
    """Two runs differ, and nothing is known of the shapes in a body that would let its draws be fixed."""
    step = with_drawing_body()
    assert [node.name for node in drawing_bodies(step)] == ["choice"] and not random_nodes(step)
    result = onnx_remat.rewrite_model(step, "85%", effort=0.3, verify="run", run_by=run_by)
    assert result.report.recomputed
    found = result.report.measured
    assert "outputs not compared: node 'choice' draws" in result.report.to_text()
    assert found.outputs_equal == "not compared: node 'choice' draws random numbers in a body"


@pytest.mark.slow
def test_a_session_with_draws_in_a_body_is_not_compared(tmp_path):
    onnx.save(with_drawing_body(), tmp_path / "step.onnx")
    session(tmp_path / "step.onnx", level="disable")


SCATTER = """
<ir_version: 9, opset_import: ["" : 20]>
step (float[2, 1024] x, int64[1024, 1] i, float[1024, 1024] u) => (float[2, 1024] y) {
    y = ScatterND <reduction = "add"> (x, i, u)
}
"""


def scatter(reduction: str = "add", indices: list[int] | None = None) -> onnx.ModelProto:
    model = parser.parse_model(SCATTER)
    model.graph.node[0].attribute[0].s = reduction.encode()
    if indices is not None:
        del model.graph.input[1]
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(indices)[:, None], "i"))
    return model


def test_sums_that_race_are_reported():
    (line,) = race_warnings(scatter(), CPU)
    assert "ScatterND sums into 'y'" in line and "23396" in line and "\n" not in line
    assert race_warnings(scatter("max", [0, 0]), CPU) and race_warnings(scatter("mul", [1, -1]), CPU)
    assert not race_warnings(scatter("none"), CPU) and not race_warnings(scatter("add", [1, 0]), CPU)
    inner = scatter().graph
    del inner.input[:]
    nested = onnx.helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)
    assert (
        "in 1 more nodes"
        in race_warnings(onnx.helper.make_model(onnx.helper.make_graph([nested], "g", [], [])), CPU)[0]
    )


def test_one_thread_does_not_race():
    """What `verify` and the warning rely on. That several threads do race, no test can insist on."""
    generator = np.random.default_rng(0)
    feeds = {"x": np.zeros((2, 1024), np.float32), "i": generator.integers(0, 2, (1024, 1))}
    feeds["u"] = generator.standard_normal((1024, 1024)).astype(np.float32)
    options = runtime.session_options()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(scatter().SerializeToString(), options, providers=["CPUExecutionProvider"])
    first, *others = (session.run(None, feeds)[0] for _ in range(5))
    assert all(np.array_equal(first, other) for other in others)
    exact = np.stack([feeds["u"][feeds["i"][:, 0] == row].astype(np.float64).sum(0) for row in (0, 1)])
    assert np.abs(first - exact).max() < 1e-4


@pytest.mark.slow
def test_a_step_that_races_is_verified_on_one_thread_and_warned_of(tmp_path, capsys):
    step = mlp(layers=6, batch=1024, width=64)
    picks = onnx.helper.make_node("ScatterND", ["table", "i", "aa0"], ["sums"], name="sums", reduction="add")
    step.graph.node.append(picks)
    step.graph.input.append(onnx.helper.make_tensor_value_info("table", TensorProto.FLOAT, [2, 64]))
    step.graph.input.append(onnx.helper.make_tensor_value_info("i", TensorProto.INT64, [1024, 1]))
    step.graph.output.append(onnx.helper.make_tensor_value_info("sums", TensorProto.FLOAT, [2, 64]))
    onnx.save(step, tmp_path / "in.onnx")
    flags = [
        "--for",
        "session",
        "--budget",
        "80%",
        "--effort",
        "0.3",
        "--verify",
        "run",
        "--json",
        str(tmp_path / "r.json"),
    ]
    assert cli.main([str(tmp_path / "in.onnx"), str(tmp_path / "out.onnx"), *flags]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("onnx-remat: warning: ScatterND sums into 'sums'")
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["warnings"] == [line.removeprefix("onnx-remat: warning: ")]
    assert report["measured"]["outputs_equal"] == "bitwise equal on one thread"
