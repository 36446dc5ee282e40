"""`onnx-remat estimate` and `explain`: what a graph takes, how low it can go, and why a file recomputes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import onnx_remat
from onnx_remat.app.cli import main
from onnx_remat.errors import BudgetInfeasibleError, ModelError
from onnx_remat.findings.estimate import estimate
from onnx_remat.findings.explain import explain
from onnx_remat.findings.show import modules
from onnx_remat.ir.metadata import PROVIDER_KEY, set_entry
from onnx_remat.ort.moves import DOWN, UP
from onnx_remat.units import format_bytes
from tests.support.graphs import mlp, model_of

pytest.importorskip("onnxruntime")


def with_modules(model: onnx.ModelProto) -> onnx.ModelProto:
    for node in model.graph.node:
        if node.name.startswith("act"):
            node.metadata_props.add(key="module", value=f"layers.{node.name[3:]}")
    return model


@pytest.fixture(scope="module")
def step():
    return with_modules(mlp(layers=12, batch=2048, width=32))


@pytest.fixture(scope="module")
def small(step, tmp_path_factory):
    path = tmp_path_factory.mktemp("explain") / "small.onnx"
    result = onnx_remat.rewrite_model(step, "40%", effort=0.3, run_by="session")
    assert result.recomputed
    result.save(path)
    return path, result


@pytest.fixture(scope="module")
def for_loop(tmp_path_factory):
    path = tmp_path_factory.mktemp("explain") / "loop.onnx"
    result = onnx_remat.rewrite_model(with_modules(mlp(layers=12, batch=16384, width=32)), "60%", effort=0.3)
    assert result.recomputed
    result.save(path)
    return path, result


@pytest.mark.slow
def test_what_the_budget_covers_comes_first(step, small, for_loop):
    """And nothing that it does not cover stands without saying so."""
    path, result = for_loop
    report = result.report
    text = explain(path).to_text().splitlines()
    assert explain(path).trained == report.loop_after.total <= report.budget
    taken, budget = format_bytes(report.loop_after.total), format_bytes(report.budget)
    assert text[0] == f"training by Loop takes {taken}, budget {budget}"
    assert text[2].startswith("tensors in a plain session, which this budget does not cover")
    assert explain(small[0]).trained is None and "training by Loop" not in explain(small[0]).to_text()
    estimated, tensors = estimate(step), estimate(step, run_by="session")
    assert estimated.to_text().startswith(f"training takes {format_bytes(estimated.loop.total)}, ")
    assert tensors.to_text().startswith(f"peak {format_bytes(tensors.peak.total)}, ")


def test_a_tree_says_what_no_module_is(step, small):
    assert "\n(no module): nodes that do not name" in explain(small[0]).to_text()
    assert modules.flame_text(modules.flame([("a", 1)], "peak"))[-1].endswith("a")


@pytest.mark.slow
def test_the_report_and_the_estimate_agree_on_what_is_impossible(step, small):
    assert small[1].report.impossible_below == estimate(step, run_by="session").impossible_below
    report = onnx_remat.rewrite_model(step, "90%", effort=0.5, verify="none").report
    assert report.impossible_below == estimate(step).impossible_below > report.lower_bound
    unchanged = onnx_remat.rewrite_model(step, "100%").report
    assert unchanged.impossible_below == report.impossible_below
    assert f">= {format_bytes(report.impossible_below)}" in report.to_text()


def test_an_estimate_is_what_the_report_calls_before(step, small):
    found, report = estimate(step), small[1].report
    assert found.peak == report.before
    assert found.loop == report.loop_before
    assert "in_use" not in found.to_json() and found.to_dict()["loop"] == report.to_dict()["loop_before"]
    assert found.arena == report.arena_before
    assert sum(getattr(found.peak, part) for part in ("inputs", "weights", "activations", "outputs", "workspace")) == (
        found.peak.total
    )
    assert found.by_module.bytes == found.peak.total


@pytest.mark.slow
def test_the_lowest_budgets_hold(step):
    found = estimate(step)
    assert found.impossible_below <= found.first_look < found.covered == found.loop.total
    onnx_remat.rewrite_model(step, found.first_look, effort=1.0, verify="none")
    with pytest.raises(BudgetInfeasibleError):
        onnx_remat.plan_model(step, found.impossible_below - 3, effort=0.3)


@pytest.mark.slow
def test_a_first_look_searches_where_the_plans_that_it_starts_from_take_more_than_the_original():
    """Recompute of a GELU's parts is free in a kernel, and each node has its bookkeeping: "none below the original"."""
    torch = pytest.importorskip("torch")
    from onnx_remat.converters.pytorch import export_training_step

    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(128, 128), torch.nn.GELU())]
    model, batch = torch.nn.Sequential(*layers), (torch.randn(1024, 128), torch.randn(1024, 128))
    updated = torch.optim.AdamW(model.parameters())
    step = export_training_step(model, batch, torch.nn.functional.mse_loss, updated, check=False)
    found = estimate(step)
    assert found.first_look < 0.8 * found.covered
    with pytest.raises(BudgetInfeasibleError) as refusal:
        onnx_remat.rewrite_model(step, found.impossible_below // 2, effort=0.5)
    advised = refusal.value.settings["budget"]
    assert refusal.value.best_peak_bytes <= advised < 0.8 * found.covered
    assert onnx_remat.rewrite_model(step, advised, effort=0.5, verify="none").report.covered()[1] <= advised


@pytest.mark.slow
def test_what_a_budget_covers_is_what_is_estimated(step):
    found = estimate(step, run_by="session")
    assert (found.run_by, found.covered) == ("session", found.peak.total)
    assert found.impossible_below <= found.first_look < found.covered
    onnx_remat.rewrite_model(step, found.first_look, effort=1.0, verify="none", run_by="session")


def test_an_inference_graph_has_an_estimate():
    nodes = [helper.make_node("Exp", ["x"], ["y"]), helper.make_node("Add", ["x", "y"], ["z"])]
    found = estimate(model_of(nodes, {"x": [64, 64]}, {"z": [64, 64]}))
    assert found.peak.total == 3 * 64 * 64 * 4
    assert found.notes and "inference graph" in found.notes[0]


def test_the_peaks_of_an_explanation_rise_from_the_file_to_the_original(small):
    path, result = small
    found = explain(path)
    assert found.budget == result.report.budget
    assert found.peak == result.report.peaks_by_level["disable"] < found.kept_peak
    assert found.original_peak == result.report.before.total
    assert found.by_module.bytes == found.peak
    assert found.control_edges == result.report.control_edges


def test_every_recomputed_node_is_in_one_module(small):
    path, result = small
    found = explain(path)
    assert sum(each.times for each in found.recomputed) == len(result.recomputed)
    named = [each.module for each in found.recomputed if each.module.startswith("layers.")]
    acts = {label for label in result.recomputed if label.startswith("act")}
    assert sorted(named) == sorted(f"layers.{label[3:]}" for label in acts)


def test_a_file_of_an_older_format_is_explained(tmp_path):
    """Nodes have metadata from IR version 10 on, and in older files none the less."""
    step = mlp(layers=12, batch=2048, width=32)
    step.ir_version = 8
    result = onnx_remat.rewrite_model(step, "60%", effort=0.3, run_by="session")
    result.save(tmp_path / "small.onnx")
    found = explain(tmp_path / "small.onnx")
    assert sum(each.times for each in found.recomputed) == result.report.recomputed > 0


NORMALIZED = """<ir_version: 9, opset_import: ["" : 17]> normalized (float[256, 4096] x) => (float[256, 4096] y)
    <float small = {0.00001}, float two = {2.0}> {
        mean = ReduceMean <axes = [-1]> (x)  centred = Sub (x, mean)  square = Pow (centred, two)
        variance = ReduceMean <axes = [-1]> (square)  safe = Add (variance, small)  spread = Sqrt (safe)
        y = Div (centred, spread) }"""


def test_nothing_is_proved_that_a_fused_step_disproves():
    """ONNX Runtime makes one node of these: it takes less than any order of them."""
    step = onnx.parser.parse_model(NORMALIZED)
    step.graph.node.append(helper.make_node("Mul", ["y", "scale"], ["scaled"]))
    step.graph.node.append(helper.make_node("Add", ["scaled", "shift"], ["z"]))
    step.graph.output[0].name = "z"
    for name in ("scale", "shift"):
        step.graph.initializer.append(numpy_helper.from_array(np.ones(4096, np.float32), name))
    found = estimate(step)
    with pytest.raises(BudgetInfeasibleError) as refusal:
        onnx_remat.rewrite_model(step, found.loop.total - 1, effort=0.1)
    assert refusal.value.lower_bound_bytes <= found.loop.total
    assert f"less than the model as it is: try budget={found.loop.total} (" in str(refusal.value)
    assert onnx_remat.rewrite_model(step, found.loop.total, effort=0.1).report.recomputed == 0


def test_what_is_spared_is_what_keeping_would_add(small):
    """At the op where all that is dropped would weigh most, it weighs what the table says."""
    found = explain(small[0])
    spared = sum(each.spared for each in found.recomputed)
    assert 0 < spared <= sum(each.bytes for each in found.recomputed)
    assert found.kept_peak - spared <= found.peak


def test_a_file_that_was_not_rewritten_has_no_explanation(step, tmp_path):
    onnx.save(step, tmp_path / "in.onnx")
    with pytest.raises(ModelError, match="does not say what was planned"):
        explain(tmp_path / "in.onnx")


def test_both_commands_print_text_or_json(step, small, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    onnx.save(step, "in.onnx")
    assert main(["estimate", "in.onnx"]) == 0
    out = capsys.readouterr().out
    assert "allocated at the peak" in out and "impossible: any budget below" in out
    assert main(["estimate", "in.onnx", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "onnx-remat/estimate/1"
    assert main(["explain", str(small[0]), "--json", "e.json"]) == 0
    out = capsys.readouterr().out
    assert "nodes are recomputed" in out and "layers" in out and out.endswith("\nwrote e.json\n")
    assert json.loads((tmp_path / "e.json").read_text())["schema"] == "onnx-remat/explain/1"
    assert main(["explain", "in.onnx"]) == 4


@pytest.mark.parametrize(
    ("notes", "name", "module"),
    [
        ({"module": "a.b"}, "/x/y/Conv", "a.b"),
        ({"pkg.torch.onnx.name_scopes": "['', 'down.0', 'down.0.conv', 'conv2d']"}, "n", "down.0.conv"),
        ({"pkg.torch.onnx.name_scopes": "__import__('os')"}, "n", ""),
        ({}, "/layer1/conv/Conv", "layer1.conv"),
        ({}, "node_7", ""),
    ],
)
def test_the_module_of_a_node(notes, name, module):
    node = helper.make_node("Conv", ["x"], ["y"], name=name)
    for key, value in notes.items():
        node.metadata_props.add(key=key, value=value)
    assert modules.module_of(node) == module


def test_a_flame_graph_adds_up_and_sums_up_what_is_small():
    frame = modules.flame([("a.b.c", 60), ("a.b.d", 39), ("e", 1), ("a.b.c", 100)], "peak")
    assert (frame.bytes, [inner.name for inner in frame.inside]) == (200, ["a.b", "e"])
    assert [(inner.name, inner.bytes) for inner in frame.inside[0].inside] == [("c", 160), ("d", 39)]
    assert modules.flame_text(frame)[-1].endswith("1 smaller")


def test_a_file_with_ops_that_onnxruntime_lacks_is_explained(tmp_path):
    model = onnx.shape_inference.infer_shapes(mlp(layers=4, batch=256, width=32))
    next(node for node in model.graph.node if node.name == "act1").domain = "nobody"
    model.opset_import.add(domain="nobody", version=1)
    result = onnx_remat.rewrite_model(model, "80%", effort=0.3, run_by="session", verify="none")
    result.save(tmp_path / "out.onnx")
    assert explain(tmp_path / "out.onnx").peak == result.report.after.total


@pytest.mark.slow
def test_the_reference_names_all_that_a_report_says_of_a_loop(for_loop):
    text = (Path(onnx_remat.__file__).parents[1] / "docs/reference/report-json.md").read_text()
    stated = json.loads(for_loop[1].report.to_json())
    assert {name for name in stated["loop_after"] if f"`{name}`" not in text} == set()


def test_the_extra_compute_is_the_report_s(step, small, for_loop):
    """Of the original's work: what edges and buffers are made of is no part of it."""
    for path, result in (small, for_loop):
        assert explain(path).extra_seconds == pytest.approx(result.report.extra_compute, rel=1e-3)


def test_copies_between_device_and_host_are_no_compute(small):
    """They run alongside the kernels: the share of recompute does not fall with each."""
    model = onnx.load(small[0])
    set_entry(model, PROVIDER_KEY, "cuda")
    kept = explain(model).extra_seconds
    nodes, name = list(model.graph.node), next(value.name for value in model.graph.output)
    at = next(i for i, node in enumerate(nodes) if name in node.output)
    nodes[at].output[list(nodes[at].output).index(name)] = "made"
    nodes[at + 1 : at + 1] = [helper.make_node(DOWN, ["made"], ["home"]), helper.make_node(UP, ["home"], [name])]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    assert explain(model).extra_seconds == kept > 0


def test_an_explanation_prices_nodes_as_the_plan_was_priced(step, small, tmp_path, capsys):
    """A profile in which the nodes that this file recomputes take most of the time."""
    rows, square = {"float": [2048, 32]}, {"float": [32, 32]}
    events = [
        {"cat": "Node", "name": f"{name}_kernel_time", "dur": took, "args": {"op_name": name, "input_type_shape": read}}
        for name, took, read in (("Tanh", 9e6, [rows]), ("MatMul", 1.0, [rows, square]))
    ]
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(events))
    found = explain(small[0], costs=str(profile))
    assert found.extra_seconds > explain(small[0]).extra_seconds
    assert f"compute by the costs of {profile}" in found.to_text()
    assert main(["explain", str(small[0]), "--costs", str(profile)]) == 0
    assert f"+{found.extra_seconds:.1%} compute by the costs of {profile}" in capsys.readouterr().out
    assert "compute by the costs of cpu" in explain(small[0]).to_text()
    planned = onnx_remat.rewrite_model(step, "40%", effort=0.3, run_by="session", costs=str(profile))
    planned.save(tmp_path / "planned.onnx")
    assert explain(tmp_path / "planned.onnx", costs=str(profile)).extra_seconds == pytest.approx(
        planned.report.extra_compute, rel=1e-3
    )
