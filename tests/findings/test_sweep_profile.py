"""``onnx-remat sweep`` and ``onnx-remat profile``: curves that are monotone, profiles that ``--costs`` reads."""

from __future__ import annotations

import argparse
import json
import sys

import numpy as np
import onnx
import pytest

from onnx_remat.app import cli, flags
from onnx_remat.errors import OnnxRematError, UsageError
from onnx_remat.findings import sweep as sweeping
from onnx_remat.findings.estimate import estimate
from onnx_remat.findings.lowest import lowest_budget
from onnx_remat.findings.sweep import Point, _front, _knee, _tried_apart, _try, sweep
from onnx_remat.ir import model_io
from onnx_remat.ir.body import into_body
from onnx_remat.measure.profiling import _by_node, profile
from onnx_remat.options import Options
from onnx_remat.ort import runtime
from onnx_remat.ort.kernels import costs
from onnx_remat.ort.kernels.cpu import CPU
from onnx_remat.ort.prepare import Preparation, prepare
from onnx_remat.plan.selectors import silent
from onnx_remat.process import child
from onnx_remat.rewrite import pipeline, plans
from onnx_remat.rewrite.original import Original, begin
from onnx_remat.units import format_bytes
from sample_models.chain import chain
from tests.support.graphs import mlp


@pytest.fixture(scope="module")
def curve():
    return sweep(mlp(layers=6, batch=256, width=32), 5, effort=0.2, run_by="session")


def test_a_curve_is_monotone_and_its_knee_lies_on_it(curve):
    peaks = [p.peak for p in curve.points]
    compute = [p.extra_compute for p in curve.points]
    assert len(peaks) >= 3 and peaks == sorted(set(peaks), reverse=True) and compute == sorted(set(compute))
    assert all(p.peak <= p.budget <= curve.original_peak for p in curve.points)
    assert peaks[-1] >= curve.lower_bound
    assert curve.to_text().splitlines()[1 + curve.knee].endswith("knee")


def test_a_curve_states_memory_and_the_bound_of_an_estimate(curve):
    """The time of a step is predicted for a loop, not for a session, which runs no kernels."""
    head, *others = curve.to_text().splitlines()
    assert head.split("  ")[0].strip() == "memory" and "predicted step time" not in head
    assert {point.extra_time for point in curve.points} == {None}
    bound = estimate(mlp(layers=6, batch=256, width=32), run_by="session").impossible_below
    assert curve.impossible_below == bound
    assert f"impossible: any budget below {format_bytes(bound)}" in others


@pytest.mark.slow
def test_a_curve_of_a_loop_states_the_predicted_time_of_a_step():
    curve = sweep(chain(6, 512, 64), 2, effort=0.05, run_by="loop")
    head, *_ = curve.to_text().splitlines()
    assert "predicted step time" in head and curve.points[0].extra_time == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("proved", [False, True])
def test_a_budget_that_the_clock_cut_off_is_noted_unless_a_proof_refuses_it(proved, monkeypatch):
    def refused(goal, work, *_, **__):
        work.deadline.cut_short = True
        raise plans.Refusal("no plan", 0, None, "" if proved else "below 1 MB there is none", 1, 1, ())

    monkeypatch.setattr(pipeline, "fit", refused)
    assert _try(begin(chain(6, 512, 64), {"effort": 0.05}), 10**6) == (None, 0, not proved)


@pytest.mark.slow
def test_several_processes_find_the_same_curve(curve):
    assert sweep(mlp(layers=6, batch=256, width=32), 5, jobs=2, effort=0.2, run_by="session") == curve


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_curve_cut_short_by_the_clock_says_so(monkeypatch, jobs):
    answers = iter([(None, 0, False), (None, 0, True)] * 2)
    monkeypatch.setattr(sweeping, "_try", lambda *_: next(answers))
    monkeypatch.setattr(sweeping, "_tried_apart", lambda *_: (next(answers) for _ in range(2)))
    found = sweep(chain(4, 16, 8), 2, jobs, effort=0.02, run_by="session")
    assert found.cut_short and "the time limit cut planning short" in found.to_text()


def test_front_and_knee_by_hand():
    points = [Point(0, peak, compute, 0) for peak, compute in ((100, 0), (40, 0.01), (60, 0.02), (30, 0.2), (30, 0.3))]
    front = _front(points)
    assert [p.peak for p in front] == [100, 40, 30]
    assert _knee(front) == 1
    assert _knee(front[:1]) == 0


def test_sweep_command_writes_json_and_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    model, picture = tmp_path / "in.onnx", tmp_path / "curve.png"
    onnx.save(mlp(layers=4, batch=128, width=16), model)
    more = ["--points", "2", "--effort", "0.1s", "--plot", str(picture)]
    assert cli.main(["sweep", str(model), *more, "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == "onnx-remat/sweep/1" and data["points"][0]["extra_compute"] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["sweep"], 2, "IN"),
        (["sweep", "in.onnx", "--points", "1"], 2, "has 2 to 10000 points"),
        (["sweep", "in.onnx", "--jobs", "0"], 2, "must be at least 1, not 0"),
        (["sweep", "nowhere.onnx"], 4, "nowhere.onnx"),
        (["sweep", "in.onnx", "--plot", "x.html"], 2, ".png"),
        (["profile", "in.onnx"], 2, "OUT"),
        (["profile", "in.onnx", "out.json", "--runs", "0"], 2, "at least one"),
        (["profile", "in.onnx", "in.onnx"], 2, "in.onnx"),
    ],
)
def test_refusals_are_one_line(arguments, code, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(mlp(layers=2, batch=8, width=4), "in.onnx")
    assert cli.main(arguments) == code
    out, err = capsys.readouterr()
    assert message in err and len(err.splitlines()) == 1 and not out
    assert err.startswith(f"onnx-remat {arguments[0]}: error: ")


def test_profile_without_onnxruntime_says_what_to_install(tmp_path, capsys, monkeypatch):
    onnx.save(mlp(layers=2, batch=8, width=4), tmp_path / "in.onnx")
    monkeypatch.setattr(runtime, "available", lambda: False)
    assert cli.main(["profile", str(tmp_path / "in.onnx"), str(tmp_path / "out.json")]) == 4
    assert "onnxruntime is not installed: pip install" in capsys.readouterr().err


@pytest.mark.slow
def test_a_sweep_tells_which_budget_it_is_at():
    stages = []
    sweep(
        mlp(layers=4, batch=128, width=16),
        2,
        effort=0.1,
        run_by="session",
        progress=lambda stage, _: stages.append(stage),
    )
    stated = [stage.partition(":")[0] for stage in stages]
    assert list(dict.fromkeys(stated)) == ["lowest peak", "budget 1 of 2", "budget 2 of 2"]


def test_a_profile_has_every_op_and_prices_a_model_by_it(tmp_path):
    model, written = tmp_path / "in.onnx", tmp_path / "profile.json"
    onnx.save(mlp(layers=3, batch=64, width=16), model)
    found = profile(model, runs=1, steps=2, threads=1)
    written.write_text(found.to_json())
    compiled = prepare(onnx.load(model), Preparation(CPU))
    plain = [e for e in found.events if e["pid"] == "disable"]
    assert sorted(e["name"] for e in plain) == sorted(op.label + "_kernel_time" for op in compiled.graph.ops)
    assert all(e["dur"] > 0 for e in plain)
    by_key = costs._read_profile(str(written))
    prices = costs.price(compiled.graph, compiled.tensors, CPU, str(written))
    assert all(price in by_key.values() for price in prices)


@pytest.mark.slow
def test_a_profile_says_how_far_it_is(tmp_path):
    path, seen = tmp_path / "model.onnx", []
    onnx.save(mlp(layers=2, batch=8, width=8), path)
    profile(path, runs=2, steps=1, progress=lambda stage, fraction: seen.append((stage, fraction)))
    assert [fraction for _, fraction in seen] == sorted({fraction for _, fraction in seen})
    assert [stage for stage, _ in seen] == [
        f"measuring nodes at level {level}" for level in ("disable", "all") for _ in range(3)
    ]


@pytest.mark.slow
def test_names_of_profiled_nodes_may_have_several_lines(tmp_path):
    model = mlp(layers=1, batch=4, width=4)
    model.graph.node[0].name = "a\nb,c"
    onnx.save(model, tmp_path / "lines.onnx")
    events = profile(tmp_path / "lines.onnx", runs=1, steps=1, threads=1).events
    assert "MatMul" in {event["args"]["op_name"] for event in events}


@pytest.mark.slow
def test_a_profile_is_of_the_step_in_a_body(tmp_path):
    pytest.importorskip("onnxruntime")
    path = tmp_path / "body.onnx"
    model_io.save(into_body(chain(3, 16, 8)), path, None)
    for level in ("disable", "all"):
        ran = {e["args"]["op_name"] for e in profile(path, runs=1, steps=1).events if e["pid"] == level}
        assert ran and not ran & {"If", "SequenceLength", "Greater"}


def test_a_profile_has_no_nodes_of_bodies():
    """A Loop's event contains those of its iterations, here two in each of two steps; nested If and Loop alike."""

    def event(name, op_type, start, dur):
        args = {"op_name": op_type, "node_index": "0"}
        return {"cat": "Node", "name": f"{name}_kernel_time", "ts": start, "dur": dur, "args": args}

    events = []
    for step in (0, 100):
        inside = [event("tanh", "Tanh", step + at, 20) for at in (10, 40)]
        events += [event("choice", "If", step + 10, 25), *inside, event("zero", "Neg", step + 10, 0)]
        events += [event("turns", "Loop", step + 10, 60), event("tanh", "Relu", step + 70, 5)]
    nodes = _by_node(events)
    assert {name: [e["dur"] for e in same] for name, same in nodes.items()} == {
        "turns_kernel_time#0": [60, 60],
        "tanh_kernel_time#0": [5, 5],
    }
    assert [[e["recorded"] for e in same] for same in nodes.values()] == [[5, 5], [1, 1]]


@pytest.mark.slow
def test_processes_of_a_sweep_that_die_or_refuse_end_it(monkeypatch):
    with pytest.raises(UsageError, match="unknown selector 'none'"):
        [*_tried_apart(mlp(), [1, 2, 3], 2, {"selector": "none"}, ["a", "b", "c"], silent)]
    monkeypatch.setattr(child, "_command", lambda _: [sys.executable, "-c", "input()"])
    with pytest.raises(OnnxRematError, match="a process of the sweep was killed"):
        [*_tried_apart(mlp(), [1, 2, 3], 2, {}, ["a", "b", "c"], silent)]


@pytest.mark.slow
def test_several_processes_read_the_data_of_the_file(tmp_path, capsys):
    model = mlp(layers=4, batch=128, width=32)
    inputs = [value for value in model.graph.input if value.name != "w3"]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((32, 32), np.float32), "w3"))
    path = tmp_path / "in.onnx"
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=100)
    more = ["--points", "2", "--effort", "0.1s", "--for", "session", "--jobs", "2"]
    assert cli.main(["sweep", str(path), *more]) == 0, capsys.readouterr().err


def test_a_limit_that_follows_from_the_effort_is_not_one_that_was_asked_for():
    parser = argparse.ArgumentParser()
    flags.add_flags(parser, effort="10s")
    assert Options(**flags.planning_options(parser.parse_args([]))).limit_is_default()
    assert not Options(effort=10, time_limit=15).limit_is_default()


@pytest.mark.parametrize("search", [lambda model, **given: sweep(model, 2, **given), lowest_budget])
def test_a_limit_that_is_too_short_for_a_file_is_no_missed_budget(search, monkeypatch):
    monkeypatch.setattr(Original, "seconds_per_file", 30.0)
    with pytest.raises(OnnxRematError, match="time_limit=5 is too short for a file"):
        search(mlp(layers=4, batch=128, width=16), run_by="session", time_limit=5)


def test_processes_of_a_sweep_read_the_file_of_a_descriptor(tmp_path, monkeypatch, capsys):
    """As ``/dev/stdin``, which is another file in each of them."""
    path, given = tmp_path / "in.onnx", []

    def noted(model, *_, **__):
        given.append(model)
        raise UsageError("enough")

    onnx.save(mlp(layers=2, batch=4, width=4), path)
    monkeypatch.setattr("onnx_remat.findings.sweep.sweep", noted)
    with path.open("rb") as file:
        cli.main(["sweep", f"/proc/self/fd/{file.fileno()}", "--jobs", "2"])
    assert given == [path]
