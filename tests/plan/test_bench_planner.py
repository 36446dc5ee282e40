"""The planner benchmark: its rules, its records, its table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from onnx_remat.errors import UsageError
from onnx_remat.memory.buffers import simulate
from onnx_remat.memory.problem import Schedule, check_schedule
from scripts import bench_planner
from tests.support.published import load, synthetic

BEST = bench_planner.Best(12.5, 1)


@pytest.fixture
def graphs(tmp_path: Path) -> Path:
    """A chain of four and its mirror, each value ten bytes."""
    edges = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (2, 5), (1, 6), (0, 7)]
    graph = {
        "bytes": [10] * 8,
        "cost": [1] * 8,
        "edges": edges,
        "backward": [0] * 4 + [1] * 4,
        "base_peak": 50,
    }
    (tmp_path / "tiny.json").write_text(json.dumps(graph), encoding="utf-8")
    table = "| graph (nodes) | 0.9 | 0.8 |\n| --- | --- | --- |\n| tiny (8) | | 12.5* |\n"
    (tmp_path / "README.md").write_text(table, encoding="utf-8")
    return tmp_path


def test_records_are_simulated_and_within_the_budget(graphs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_planner.main(["--graphs", str(graphs), "--budget", "0.8", "--time-limit", "0.1", "--json", "-"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    problem, base_peak = load(graphs / "tiny.json")
    assert simulate(problem, range(8)).peak == base_peak
    assert simulate(problem, record["schedule"]).peak == record["peak"] <= 0.8 * base_peak
    assert list(dict.fromkeys(record["schedule"])) == list(range(8))
    assert record["lower_bound"] <= record["overhead"] + 1e-9


def test_best_known_is_read_from_the_graphs_own_table(graphs: Path) -> None:
    assert bench_planner.best_known(graphs / "README.md") == {("tiny", 0.8): BEST}
    assert bench_planner.best_known(graphs / "missing.md") == {}


def test_synthetic_graphs_are_training_shaped() -> None:
    problem = synthetic(64)
    peak = simulate(problem, range(64)).peak
    assert peak > problem.nbytes.max() * 4
    record = bench_planner.plan("blocks", problem, peak, 0.6, "search", 0.2)
    assert record.feasible and record.overhead < 0.5


def test_the_table_says_where_the_best_known_is_missed() -> None:
    record = bench_planner.Record("tiny", 0.8, "search", [], 0.126, 0, 0.1, 1.0, True)
    shown = [line.split()[-1] for line in bench_planner.rows([record], {("tiny", 0.8): BEST})][1:]
    assert shown == ["OVER"]
    (tie,) = list(bench_planner.rows([replace(record, overhead=0.1254)], {("tiny", 0.8): BEST}))[1:]
    assert tie.endswith("same")  # the table shows no more decimals
    (better,) = list(bench_planner.rows([replace(record, overhead=0.12)], {("tiny", 0.8): BEST}))[1:]
    assert better.endswith("under")


def test_growth_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_planner.main(["--scale", "64,128", "--budget", "0.6", "--free", "--time-limit", "0.1"]) == 0
    assert "time grows with n to the power of" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["torch_min_cut", "torch_dp", "torch_greedy", "torch_ilp"])
def test_pytorchs_partitioner_answers_as_a_peer(name: str, graphs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    arguments = ["--graphs", str(graphs), "--budget", "0.8", "--selector", name, "--json", "-"]
    assert bench_planner.main(arguments) == 0
    (record,) = json.loads(capsys.readouterr().out)
    problem, _ = load(graphs / "tiny.json")
    check_schedule(problem, Schedule(tuple(record["schedule"])))


def test_pytorch_missing_is_said(monkeypatch: pytest.MonkeyPatch, graphs: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(UsageError, match="need torch: pip install"):
        bench_planner.main(["--graphs", str(graphs), "--budget", "0.8", "--selector", "torch_dp"])


def test_checkmates_program_agrees_with_exact(graphs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--graphs", str(graphs), "--budget", "0.8", "--time-limit", "0.5", "--json", "-"]
    assert bench_planner.main([*arguments, "--selector", "checkmate_milp,exact,checkmate_lp"]) == 0
    milp, exact, relaxed = json.loads(capsys.readouterr().out)
    assert milp["feasible"] and milp["overhead"] == pytest.approx(exact["overhead"])
    assert not relaxed["feasible"] or relaxed["overhead"] >= exact["overhead"] - 1e-9
