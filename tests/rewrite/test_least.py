"""``--budget auto``: the least memory for which a step takes little more time."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from onnx_remat import rewrite_model
from onnx_remat.app.cli import main
from onnx_remat.errors import BudgetInfeasibleError, UsageError
from onnx_remat.ir.metadata import BUDGET_KEY
from onnx_remat.options import Options
from onnx_remat.plan.request import Deadline
from onnx_remat.rewrite.least import CLOSE_ENOUGH, TRIALS, Trial, least_budget
from onnx_remat.units import Budget, parse_budget
from sample_models.chain import chain
from tests.support.graphs import mlp


@dataclass(frozen=True)
class Step:
    """A step of 1,000 bytes; it takes more time for each byte less, and there is no plan below 300."""

    options: Options
    memory: SimpleNamespace
    seconds_per_file: float = 0.1

    @property
    def taken(self) -> int:
        return 1000

    def impossible_below(self, floor: int) -> int:
        return floor

    def job(self, budget: Budget, deadline: Deadline) -> tuple[int, Options, float]:
        return budget.resolve(1000), self.options, deadline.left()


DEFAULT = Options()


def tried(
    slower: float, more: int = 0, options: Options = DEFAULT, seconds_per_file: float = 0.1
) -> tuple[int, list[tuple[int, Options, float]]]:
    attempts = []

    def attempt(job):
        attempts.append(job)
        budget = job[0]
        if budget < 300:
            raise BudgetInfeasibleError("none", 300, 300)
        return Trial(budget + more, (1000 - budget - more) / 1000)

    memory = SimpleNamespace(covered=1000, least=100, bookkeeping=0, budget_for=int, unplanned="it")
    step = Step(options, memory, seconds_per_file)
    return least_budget(step, slower, Deadline(options.time_limit), attempt).nbytes, attempts


@pytest.mark.parametrize("more", [0, 20, -20])
@pytest.mark.parametrize(("slower", "least"), [(0.05, 950), (0.25, 750), (0.5, 500), (0.9, 300)])
def test_the_least_budget_is_found_in_few_trials(slower, least, more):
    """Files may take more than the budget that was tried, or less."""
    found, attempts = tried(slower, more)
    assert least + min(more, 0) <= found <= least + CLOSE_ENOUGH * 1000 + abs(more)
    assert len(attempts) <= TRIALS
    assert all(options.effort == Options().effort / 8 for _, options, _ in attempts)


def test_no_budget_below_the_original_is_one_that_is_the_original_s_memory():
    assert tried(1e-9)[0] == 1000


def test_a_limit_that_nobody_set_leaves_each_trial_time_for_its_file():
    """A step of 7,000 nodes, whose file takes six seconds: trials once had six, and none was made."""
    found, attempts = tried(0.5, seconds_per_file=6.0)
    assert 500 <= found <= 530
    assert all(options.limit_is_default() and seconds > 6.0 for _, options, seconds in attempts)
    assert tried(0.5, seconds_per_file=300.0)[1], "on the slowest machine, too"


def test_a_limit_that_is_too_short_for_a_trial_is_refused():
    options = Options(time_limit=20.0)
    with pytest.raises(
        BudgetInfeasibleError,
        match=r"time_limit=20 is too short .* 12 s here; try time_limit=170.* no plan was tried: ",
    ) as refused:
        tried(0.5, options=options, seconds_per_file=6.0)
    assert refused.value.cut_short
    found, attempts = tried(0.5, options=options, seconds_per_file=2.0)
    assert found < 1000 and all(seconds > 2.0 for _, _, seconds in attempts)


@pytest.mark.slow
def test_a_step_takes_at_most_so_much_more_time():
    pytest.importorskip("onnxruntime")
    model = mlp(layers=24, batch=4096, width=64)
    little, much = (rewrite_model(model, budget, effort=2.0).report for budget in ("+4%", "auto"))
    assert little.extra_time() <= 0.04 and much.extra_time() <= 0.1
    assert much.budget < little.budget < little.loop_before.total
    assert much.loop_after.total <= much.budget and much.seconds["budget"] > 0


def test_a_plain_session_takes_at_most_so_much_more_compute():
    """None of the kernels that make a recompute cheap in a loop are there: +3 % ended at +14.6 % compute."""
    pytest.importorskip("onnxruntime")
    report = rewrite_model(chain(16, 1024, 64), "+3%", run_by="session", effort=0.05, verify="none").report
    assert 0 < report.extra_compute <= 0.03


def test_a_search_that_finds_nothing_says_so_of_no_budget_that_somebody_gave():
    pytest.importorskip("onnxruntime")
    for layers, batch, said in ((1, 2, "no smaller budget is possible"), (4, 256, "no smaller budget was found that")):
        model = mlp(layers=layers, batch=batch, width=64)
        note = rewrite_model(model, "+0.0001%", effort=0.05, verify="none").report.notes[0]
        assert note.startswith(said) and note.endswith("OUT is the original, unchanged but for metadata")
    assert "costs at most 0.0001% more time" in note


@pytest.mark.slow
def test_the_file_says_the_budget_that_the_report_says():
    """Here the file of a trial is the answer, for whose budget it was not planned."""
    pytest.importorskip("onnxruntime")
    result = rewrite_model(chain(16, 1024, 64), "auto", effort=0.05, verify="none")
    notes = {prop.key: prop.value for prop in result.model.metadata_props}
    assert notes[BUDGET_KEY] == str(result.report.budget)
    assert result.report.extra_time() <= 0.1 and result.report.budget < result.report.loop_before.total


def test_the_command_takes_it(tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    import onnx

    path = tmp_path / "in.onnx"
    onnx.save(mlp(layers=6, batch=2048, width=32), path)
    assert main([str(path), "--budget", "auto", "--dry-run", "--effort", "0.3"]) == 0
    assert " -> " in capsys.readouterr().out
    assert main([str(path), "--budget", "+0%", "--dry-run"]) == 2
    assert "must be greater than zero" in capsys.readouterr().err


@pytest.mark.parametrize("budget", ["+", "auto 5%", "+5", "-5%"])
def test_other_texts_are_refused(budget):
    with pytest.raises(UsageError):
        parse_budget(budget)


def test_elsewhere_a_size_is_asked_for():
    with pytest.raises(UsageError, match="give a size or a percentage here"):
        parse_budget("auto").resolve(1000)
