"""The time limit is a wall clock; effort is an amount of work."""

from __future__ import annotations

import contextlib
import importlib
import math
import re
import signal
import threading
import time
from types import SimpleNamespace

import pytest

import onnx_remat
from onnx_remat.memory import buffers
from onnx_remat.options import parse_options
from onnx_remat.plan import request as contract
from onnx_remat.plan import selectors
from onnx_remat.plan.request import Deadline, Request
from onnx_remat.plan.search import candidates
from onnx_remat.plan.search.loading import unload
from onnx_remat.plan.selectors.exact import Proof, solve
from onnx_remat.rewrite import fit, original
from onnx_remat.units import format_bytes
from sample_models.chain import chain
from tests.support import planner_problems


class Clock:
    """Stands still but where a test lets time pass."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def monotonic(self) -> float:
        return self.seconds

    perf_counter = monotonic


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(contract, "time", clock)
    monkeypatch.setattr(fit, "time", clock)
    return clock


def test_what_postpones_a_part_postpones_the_whole(clock):
    """Compilation in a trial took the time of the plan that follows."""
    whole = Deadline(10.0)
    whole.sooner(1.0, 0.5).later(30.0)
    assert whole.left() == 40.0


def test_a_deadline_notes_whether_it_cut_anything(clock):
    deadline = Deadline(5.0)
    clock.seconds += 4.0
    assert not deadline.passed() and not deadline.cut_short
    clock.seconds += 1.0
    assert not deadline.cut_short  # nobody has asked: nothing was left undone
    assert deadline.passed() and deadline.cut_short


def test_an_earlier_deadline_leaves_a_fifth_at_least_and_cuts_for_the_whole(clock):
    whole = Deadline(10.0)
    assert whole.sooner(2.0).left() == 8.0
    part = whole.sooner(9.0)
    assert part.left() == 2.0
    clock.seconds += 2.0
    assert part.passed() and whole.cut_short and not whole.passed()
    assert Deadline().sooner(3.0).left() == math.inf


def test_compiled_code_is_notified():
    deadline = Deadline(0.05)
    with deadline.flag() as up:
        assert up[0] == 0
        while not up[0]:
            time.sleep(0.01)
    assert deadline.cut_short


@pytest.mark.slow
def test_an_annealing_without_end_ends_with_the_limit(monkeypatch):
    """It takes as long as one that ends at once, and the limit; twice as much at most, whatever the machine does."""

    def at_once(state, *_):
        return unload(state), False

    def endless(state, *rest):
        while not rest[-1][0]:
            time.sleep(0.01)
        return unload(state), False

    def taken(anneal):
        monkeypatch.setattr(candidates, "anneal", anneal)
        began, cut = time.monotonic(), True
        with contextlib.suppress(onnx_remat.BudgetInfeasibleError):  # nothing found without annealing: in time, too
            report = onnx_remat.rewrite_model(chain(16, 1024, 64), "70%", time_limit=2.0, verify="none").report
            cut = report.cut_short
        return time.monotonic() - began, cut

    taken(at_once)
    plain, _ = taken(at_once)
    seconds, cut = taken(endless)
    assert cut
    assert seconds < 2 * (2.0 + plain)


@pytest.mark.parametrize("selector", ["search", "keep_all"])
def test_a_signal_ends_running_annealings(monkeypatch, selector):
    """Those of several lanes, and a single one."""
    problem, begun, stopped = planner_problems.chain(16), [], []
    baseline = planner_problems.baseline(problem)

    def endless(state, *rest):
        begun.append(state)
        if len(begun) == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        until = time.monotonic() + 2.0
        while not rest[-1][0] and time.monotonic() < until:
            time.sleep(0.01)
        stopped.append(bool(rest[-1][0]))
        return unload(state), False

    def handler(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(candidates, "anneal", endless)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            selectors.get(selector)(Request(problem, 2, baseline, selector == "search", work=10_000))
    finally:
        signal.signal(signal.SIGUSR1, before)
    until = time.monotonic() + 3.0
    while len(stopped) < len(begun) and time.monotonic() < until:
        time.sleep(0.01)
    assert begun and stopped == [True] * len(begun)


def test_a_search_without_time_plans_for_no_few_layers(monkeypatch):
    problem = planner_problems.chain(16)
    monkeypatch.setattr(importlib.import_module("onnx_remat.plan.selectors.search"), "layered", None)
    selectors.get("search")(Request(problem, 2, planner_problems.baseline(problem), deadline=Deadline(0.0)))


def test_the_exact_selector_gives_up_within_the_time_that_its_model_takes():
    """That of 60 ops takes seconds to build."""
    pytest.importorskip("ortools.sat.python.cp_model")  # its import takes a second
    problem, deadline = planner_problems.chain(30), Deadline(0.1)
    began = time.monotonic()
    assert solve(problem, 10, 1.0, deadline=deadline) == Proof(None, False)
    assert deadline.cut_short and time.monotonic() - began < 1.0


def test_no_plan_is_begun_after_the_limit(monkeypatch, clock):
    """Every file misses the budget, and every plan takes a second: of six, three are made in 2.5 s."""
    model, made = chain(16, 1024, 64), []
    plan = onnx_remat.plan_model(model, "90%", selector="sqrt_n", fuse=False)

    def slow(*_):
        made.append(clock.seconds)
        clock.seconds += 1.0
        return plan

    monkeypatch.setattr(fit, "make_plan", slow)
    missed = SimpleNamespace(footprint=None, preference=lambda: (0.0, 0.0))
    monkeypatch.setattr(fit, "written_and_simulated", lambda plan, goal, *_: (goal.allowed + 1, missed))
    with pytest.raises(onnx_remat.BudgetInfeasibleError, match="no file found"):
        onnx_remat.rewrite_model(model, "90%", time_limit=2.5, fuse=False)
    assert made == [100.0, 101.0, 102.0]


def test_effort_alone_sets_no_clock():
    assert parse_options({"effort": 2}).time_limit == math.inf
    assert parse_options({"effort": "2s"}).work_seconds() == 2.0
    both = parse_options({"effort": 20, "time_limit": 3})
    assert (both.time_limit, both.work_seconds()) == (3.0, 20.0)
    assert parse_options({"time_limit": 3}).work_seconds() == 3.0


def test_a_limit_too_short_to_write_a_file_is_refused_at_once(monkeypatch, clock):
    """Simulating the original takes four seconds, so a file is expected to take twelve: ten are too few."""
    seen = original.as_executed

    def slow(*arguments):
        clock.seconds += 4.0
        return seen(*arguments)

    monkeypatch.setattr(original, "as_executed", slow)
    monkeypatch.setattr(original, "time", clock)
    monkeypatch.setattr(fit, "make_plan", lambda *_: pytest.fail("planned, though no file could be written in time"))
    with pytest.raises(
        onnx_remat.BudgetInfeasibleError, match=r"time_limit=10 is too short for a file of \d+ nodes"
    ) as no:
        onnx_remat.rewrite_model(chain(16, 1024, 64), "70%", time_limit=10)
    best, bound = no.value.best_peak_bytes, no.value.lower_bound_bytes
    assert best > bound > 0
    known = f"no plan was tried: the model as it is takes {format_bytes(best)}, and below "
    assert re.search(f"; try time_limit=[0-9]+; {known}.*B there is no plan at all$", str(no.value))


def test_a_plan_that_missed_is_mended_rather_than_made_from_scratch(monkeypatch):
    """Under a clock the search goes on from a plan for a larger budget, and leaves the seeds alone."""
    search = importlib.import_module("onnx_remat.plan.selectors.search")
    problem = planner_problems.chain(40)
    most = buffers.simulate(problem, planner_problems.baseline(problem)).peak

    def asked(budget, known=()):
        baseline = planner_problems.baseline(problem)
        return Request(problem, budget, baseline, known=known, deadline=Deadline(2.0), use_time=True, effort=0.5)

    first = search.find(asked(most * 6 // 10))
    assert most // 2 < first.peak <= most * 6 // 10
    monkeypatch.setattr(search, "seeds", lambda *_: pytest.fail("made from scratch"))
    assert search.find(asked(most // 2, (first.schedule,))).peak <= most // 2
