"""`onnx-remat check`: a file as it was written passes; one whose recomputes another tool merged does not."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import onnx
import pytest

import onnx_remat
from onnx_remat.app.cli import main
from onnx_remat.errors import BudgetInfeasibleError, ModelError, VerificationError
from onnx_remat.findings.check import CheckResult, check
from onnx_remat.findings.explain import explain
from onnx_remat.ir.metadata import ARENA_KEY, RECOMPUTE_KEY
from onnx_remat.measure import processes
from onnx_remat.options import Options
from onnx_remat.ort import runtime
from onnx_remat.session.session import Session
from sample_models.chain import chain
from tests.support.graphs import mlp
from tests.support.slow import few

pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("check") / "small.onnx"
    model = mlp(layers=12, batch=2048, width=32, dims="batch")
    onnx_remat.rewrite_model(model, "40%", effort=0.3, run_by="session", dims={"batch": 2048}).save(path)
    return path


def merged(model: onnx.ModelProto) -> onnx.ModelProto:
    """What a tool makes of it that removes Unsqueezes by no axes and then merges equal nodes."""
    rename: dict[str, str] = {}
    seen: dict[bytes, onnx.NodeProto] = {}
    kept = []
    for node in model.graph.node:
        node.input[:] = [rename.get(name, name) for name in node.input]
        if node.op_type == "Unsqueeze" and "__after" in node.output[0]:
            rename[node.output[0]] = node.input[0]
            continue
        twin = onnx.NodeProto()
        twin.CopyFrom(node)
        for field in ("name", "output", "metadata_props"):
            twin.ClearField(field)
        first = seen.setdefault(twin.SerializeToString(deterministic=True), node)
        if first is node:
            kept.append(node)
        else:
            rename |= dict(zip(node.output, first.output, strict=False))
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return model


def test_a_file_as_written_keeps_its_budget(small, capsys):
    found = check(small)
    assert found.kept and found.recomputed > 0 and found.control_edges > 0
    assert not found.recomputed_lost and not found.control_edges_lost
    assert 0 < found.measured <= found.budget
    assert found.running_by_level == dict.fromkeys(runtime.LEVELS, found.recomputed)
    assert main(["check", str(small)]) == 0
    out = capsys.readouterr().out
    assert "keeps its budget" in out and "the file runs: measured peak" in out


@pytest.mark.parametrize(
    ("simulated", "measured", "words", "code"),
    [
        (900_000, 1_000_000, "the file keeps its budget", 0),
        (900_000, 1_000_001, "undecided whether", 0),
        (900_000, 1_000_001 + processes.RESOLUTION, "the file no longer keeps", 5),
        (1_000_001, 900_000, "the file no longer keeps", 5),
        (1_000_001, None, "the file no longer keeps", 5),
        (900_000, None, "the file keeps its budget", 0),
    ],
)
def test_kept_means_at_most_the_budget(simulated, measured, words, code, monkeypatch, capsys):
    """Not half a megabyte more: what lies within what measuring resolves is said to."""
    found = CheckResult(1, 1, (), (), 1_000_000, {"disable": simulated}, {"disable": 1}, measured)
    assert found.kept == (words == "the file keeps its budget") and found.lost == (code == 5)
    monkeypatch.setattr("onnx_remat.findings.check.check", lambda *_, **__: found)
    assert main(["check", "some.onnx"]) == code
    assert words in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("run_by", few(["loop", "session"], ["loop"]))
def test_a_step_that_kept_its_budget_as_it_was_still_does(run_by, tmp_path, capsys):
    """The file says its plan, as others do: what it was planned for, and that it recomputes nothing."""
    model, path = mlp(layers=4, batch=256, width=32, dims="batch"), str(tmp_path / "out.onnx")
    onnx_remat.rewrite_model(model, "120%", run_by=run_by, dims={"batch": 256}).save(path)
    assert not model.metadata_props
    assert main(["check", path]) == 0
    out = capsys.readouterr().out
    assert "all 0" not in out and out.splitlines()[0] == "the plan recomputes no node and has no control edge"
    assert "the file keeps its budget of" in out
    assert main(["explain", path]) == 0
    assert "no node is recomputed, and no edge enforces another order" in capsys.readouterr().out
    with Session(path) as session:
        assert {array.name: array.shape for array in session.inputs}["x"] == (256, 32)


def test_merged_recomputes_are_named_and_cost_the_budget(small, tmp_path, capsys):
    path = tmp_path / "merged.onnx"
    onnx.save(merged(onnx.load(small)), path)
    found = check(path)
    assert 0 < len(found.recomputed_lost) <= found.recomputed and not found.kept
    assert max(found.running_by_level.values()) <= found.recomputed - len(found.recomputed_lost)
    assert main(["check", str(path), "--no-run"]) == 5
    out = capsys.readouterr().out
    assert f"{len(found.recomputed_lost)} of {found.recomputed} recomputed nodes were merged away" in out
    assert "no longer keeps its budget" in out


def test_an_edge_whose_axes_were_folded_waits_no_more(small, tmp_path):
    """The Unsqueeze is still there, and passes its value on at any time."""
    model = onnx.load(small)
    tokens = [node for node in model.graph.node if "unseen_axes_after" in node.output[0]]
    for token in tokens[:2]:
        model.graph.initializer.append(onnx.helper.make_tensor(token.output[0], onnx.TensorProto.INT64, [0], []))
        model.graph.node.remove(token)
    path = tmp_path / "folded.onnx"
    path.write_bytes(model.SerializeToString())
    assert len(check(path, run=False).control_edges_lost) >= 2


def test_a_file_that_loads_and_then_fails_is_reported(small, tmp_path, capsys):
    """As some tools leave it: a control edge's Unsqueeze that does not suit what it passes on."""
    model = onnx.load(small)
    token = [node for node in model.graph.node if "unseen_axes_after" in node.output[0]][-1]
    next(a for a in token.attribute if a.name == "end").i = 2
    path = tmp_path / "broken.onnx"
    path.write_bytes(model.SerializeToString())
    assert check(path, run=False).kept
    with pytest.raises(VerificationError, match=r"running broken\.onnx failed"):
        check(path)
    assert main(["check", str(path)]) == 5
    assert "failed" in capsys.readouterr().err


def test_what_was_not_run_is_not_called_run(small, capsys, monkeypatch):
    assert check(small, run=False).to_text().splitlines()[-2] == "the file was not run"
    monkeypatch.setattr(runtime, "available", lambda: False)
    assert main(["check", str(small)]) == 0
    out = capsys.readouterr().out
    assert "onnxruntime is not installed" in out and "it runs" not in out and "keeps its budget" in out


def test_a_file_planned_for_another_provider_is_checked_as_that(tmp_path, monkeypatch):
    """Nobody has to say it again: the CPU would keep other values, and run what the file was not planned for."""
    asked: list[Options] = []
    monkeypatch.setattr("onnx_remat.findings.check._can_run", lambda options: bool(asked.append(options)))
    path = tmp_path / "cuda.onnx"
    onnx_remat.rewrite_model(mlp(), "90%", provider="cuda", run_by="session", effort=0.3).save(path)
    check(path)
    check(path, provider="cpu")
    assert [options.provider for options in asked] == ["cuda", "cpu"]
    model = onnx.load(path)
    next(p for p in model.metadata_props if p.key.endswith(".provider")).value = "other"
    onnx.save(model, path)
    with pytest.raises(ModelError, match="damaged its metadata"):
        check(path)


def test_a_recompute_that_became_an_identity_is_lost(small, tmp_path):
    """Under its old name: a tool that merges nodes may leave one that passes on the kept value."""
    model = onnx.load(small)
    known = {node.name: node for node in model.graph.node}
    clones = [node for node in model.graph.node if any(p.key == RECOMPUTE_KEY for p in node.metadata_props)]
    for clone in clones:
        again = next(p.value for p in clone.metadata_props if p.key == RECOMPUTE_KEY)
        clone.op_type, clone.input[:] = "Identity", [known[again].output[0]]
        del clone.attribute[:]
    path = tmp_path / "identities.onnx"
    onnx.save(model, path)
    found = check(path, run=False)
    assert len(found.recomputed_lost) == found.recomputed == len(clones) and found.lost
    assert set(found.running_by_level.values()) == {0}
    assert f"{len(clones)} of {len(clones)} recomputed nodes were merged away" in found.lines()[0]


def test_a_budget_that_covers_the_arena_is_compared_with_the_arena(small, tmp_path):
    """A budget between the tensors and what the arena takes is not kept."""
    model = onnx.load(small)
    assert not any(prop.key == ARENA_KEY for prop in model.metadata_props) and check(small, run=False).reserved is None
    step = mlp(layers=12, batch=2048, width=32)
    result = onnx_remat.rewrite_model(step, "75%", effort=0.3, run_by="session", arena=True)
    assert result.model.metadata_props
    path = tmp_path / "arena.onnx"
    result.save(path)
    found = check(path, run=False)
    assert found.kept and found.budget >= found.reserved >= result.report.arena_after.held
    before, after = result.report.covered()
    assert after == found.reserved and before > result.report.before.total
    assert result.report.budget == pytest.approx(0.75 * before, rel=1e-6)  # a percentage is of what is covered
    assert "with ONNX Runtime's arena it takes" in found.to_text()
    less = dataclasses.replace(found, budget=found.reserved - 1)
    assert less.lost and not less.kept and max(less.peaks_by_level.values()) <= less.budget


@pytest.mark.slow
def test_a_refused_budget_with_the_arena_advises_one_with_the_arena():
    """The file takes less than the original does with its arena, though more than the original's tensors."""
    step, options = chain(3, 64, 64), {"run_by": "session", "arena": True, "effort": 0.05, "verify": "none"}
    with pytest.raises(BudgetInfeasibleError) as refused:
        onnx_remat.rewrite_model(step, 67803, **options)
    advised = refused.value.settings["budget"]
    report = onnx_remat.rewrite_model(step, advised, **options).report
    assert report.covered_after <= report.budget == advised < report.covered_before


@pytest.mark.parametrize("command", ["check", "explain"])
def test_a_dimension_that_the_file_lacks_is_refused(command, small, capsys):
    flags = ["--no-run"] if command == "check" else []
    assert main([command, str(small), *flags, "--dim", "bacth=64"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no symbolic dimension 'bacth'" in line and "did you mean 'batch'?" in line


def test_the_result_is_written_as_json(small, tmp_path, capsys):
    path = tmp_path / "check.json"
    assert main(["check", str(small), "--no-run", "--json", str(path)]) == 0
    assert json.loads(path.read_text()) == json.loads(check(small, run=False).to_json())
    assert f"wrote {path}" in capsys.readouterr().out
    assert main(["check", str(small), "--no-run", "--json", str(small)]) == 2  # it would replace the model


def test_a_file_on_standard_input_is_checked(small):
    """Another process, which runs it, has another standard input."""
    command = [sys.executable, "-m", "onnx_remat", "check", "/dev/stdin"]
    with small.open("rb") as file:
        done = subprocess.run(command, stdin=file, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "the file runs: measured peak" in done.stdout


def test_files_that_say_nothing_of_a_plan_are_refused(tmp_path):
    path = tmp_path / "plain.onnx"
    onnx.save(mlp(), path)
    with pytest.raises(ModelError, match="does not say what was planned"):
        check(path)


@pytest.mark.parametrize("command", few([check, explain], [explain]))
def test_a_model_in_memory_is_as_good_as_its_file(command, small):
    model = onnx.load(small)
    found, of_file = command(model), command(small)
    if isinstance(found, CheckResult):  # two runs of it need not measure the same page for page
        found, of_file = (dataclasses.replace(each, measured=each.measured is not None) for each in (found, of_file))
    assert found == of_file
    with pytest.raises(ModelError) as caught:
        command(mlp())
    assert str(caught.value).startswith("the model does not say what was planned: onnx-remat did not write it")


@pytest.mark.slow
def test_a_loop_s_file_is_simulated_with_the_sizes_that_a_loop_gives(tmp_path):
    """Zeros of a symbolic shape are a constant there, and no step makes them."""
    model = mlp(layers=8, batch=2048, width=32, dims="batch")
    model.graph.node.insert(0, onnx.helper.make_node("Shape", ["x"], ["shape"], name="shape"))
    model.graph.node.insert(1, onnx.helper.make_node("ConstantOfShape", ["shape"], ["zeros"], name="zeros"))
    model.graph.node.insert(2, onnx.helper.make_node("Add", ["x", "zeros"], ["shifted"], name="shift"))
    next(node for node in model.graph.node if node.name == "mm0").input[0] = "shifted"
    made = onnx_remat.rewrite_model(model, "90%", effort=0.3, dims={"batch": 2048})
    made.save(tmp_path / "out.onnx")
    found = check(tmp_path / "out.onnx", run=False)
    assert found.peaks_by_level["all"] == made.report.peaks_by_level["all"]
    assert found.trained == made.report.loop_after.total


@pytest.mark.slow
def test_a_file_planned_without_kernels_is_checked_and_explained_so(tmp_path):
    model, path = mlp(layers=8, batch=8192, width=64), tmp_path / "small.onnx"
    result = onnx_remat.rewrite_model(model, "70%", effort=0.5, fuse=False)
    result.save(path)
    assert abs(check(path, run=False).trained - result.report.loop_after.total) < 0.01 * result.report.budget
    assert not explain(path).fused
    onnx_remat.rewrite_model(model, "70%", effort=0.5).save(path, force=True)
    assert explain(path).fused


def test_one_size_of_several_may_be_given(tmp_path):
    model, path = mlp(layers=8, width=32, dims="batch"), tmp_path / "small.onnx"
    for value in model.graph.input:
        if value.name == "w0":
            value.type.tensor_type.shape.dim[1].dim_param = "width"
    options = {"effort": 0.5, "run_by": "session", "dims": {"batch": 2048, "width": 32}}
    onnx_remat.rewrite_model(model, "70%", **options).save(path)
    halved, whole = (max(check(path, dims, run=False).peaks_by_level.values()) for dims in ({"batch": 1024}, None))
    assert halved < 0.7 * whole
    assert explain(path, {"batch": 1024}).peak < explain(path).peak


def test_a_loops_budget_is_not_judged_by_the_tensors_of_a_session(monkeypatch, capsys):
    for peak in (900_000, 1_100_000):
        found = CheckResult(1, 0, (), (), 1_000_000, {"disable": peak}, {"disable": 1}, peak, run_by="loop")
        assert not found.kept and not found.lost
        assert (
            "undecided whether the file keeps its budget of 1.0 MB: it is that of training by Loop" in found.lines()[-1]
        )
