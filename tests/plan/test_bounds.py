"""No schedule beats a bound: random schedules, and every short schedule of tiny graphs."""

from __future__ import annotations

import json
import math
import tracemalloc
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onnx_remat
from onnx_remat.memory.buffers import simulate
from onnx_remat.memory.problem import Problem, Schedule, check_schedule
from onnx_remat.plan.bounds import lower_bound
from onnx_remat.plan.cost_bounds import cost_lower_bound
from onnx_remat.plan.search.core import liveness_model
from sample_models.chain import chain as chain_model
from tests.support.planner_problems import build, chain, problems, random_schedule


@settings(max_examples=150, deadline=None)
@given(problems(), st.integers(0, 2**31))
def test_no_schedule_peaks_below_the_floor(problem: Problem, seed: int) -> None:
    assert simulate(problem, random_schedule(problem, seed)).peak >= lower_bound(problem)


@settings(max_examples=150, deadline=None)
@given(problems(), st.integers(0, 2**31))
def test_no_schedule_is_cheaper_than_the_bound_for_its_first_executions(problem: Problem, seed: int) -> None:
    order = random_schedule(problem, seed)
    schedule = Schedule(tuple(order))
    peak, overhead = simulate(problem, schedule).peak, schedule.overhead(problem)
    fixed = cost_lower_bound(problem, peak, list(dict.fromkeys(order)))
    assert cost_lower_bound(problem, peak) <= fixed + 1e-9
    assert fixed <= overhead + 1e-9


@settings(max_examples=12, deadline=None)
@given(problems(4))
def test_bounds_hold_for_every_short_schedule(problem: Problem) -> None:
    peaks: dict[int, float] = {}
    for length in range(problem.n_ops, problem.n_ops + 3):
        for order in product(range(problem.n_ops), repeat=length):
            first = list(dict.fromkeys(order))
            if first != list(range(problem.n_ops)):
                continue
            schedule = Schedule(order)
            try:
                check_schedule(problem, schedule)
            except ValueError:
                continue
            peak = simulate(problem, schedule).peak
            peaks[peak] = min(peaks.get(peak, math.inf), schedule.overhead(problem))
    for peak, overhead in peaks.items():
        assert lower_bound(problem) <= peak
        assert cost_lower_bound(problem, peak, range(problem.n_ops)) <= overhead + 1e-9


def test_floor_of_a_chain_is_one_step() -> None:
    assert lower_bound(chain(10)) == 3


def test_what_an_op_reads_must_be_brought_together() -> None:
    """The floor is the last op's 14; but while its second input is made from ten bytes, the first is there already."""
    problem = build(
        ops=[([], [0]), ([0], [1]), ([], [2]), ([2], [3]), ([1, 3], [4])],
        nbytes=[10, 3, 10, 3, 1], outputs=[4], workspace=[0, 0, 0, 0, 7],
    )  # fmt: skip
    assert lower_bound(problem) == simulate(problem, range(5)).peak == 16


@pytest.mark.slow
def test_an_op_that_reads_thousands_of_values_is_looked_at_for_seconds() -> None:
    """Such as one that joins all gradients to a vector; each is made from a value of its own, and all are needed."""
    count = 250
    problem = build(
        ops=[*(([], [i]) for i in range(count)), *(([i], [count + i]) for i in range(count)),
             ([*range(count, 2 * count)], [2 * count])],
        nbytes=[*[3] * count, *[2] * count, 1], outputs=[2 * count],
    )  # fmt: skip
    tracemalloc.start()
    try:
        assert lower_bound(problem) == 2 * count + 3  # the last of them is made from three bytes
        assert tracemalloc.get_traced_memory()[1] < 1 << 25
    finally:
        tracemalloc.stop()


def test_cut_knapsack_of_a_chain_drops_what_exceeds_the_budget() -> None:
    """Ten activations and a gradient, eight units: three must be recomputed, of twenty ops."""
    assert cost_lower_bound(chain(10), 11) == 0
    assert math.isclose(cost_lower_bound(chain(10), 8), 3 / 20)
    assert cost_lower_bound(chain(10), 2) == math.inf


def test_one_run_of_a_two_output_op_is_counted_once() -> None:
    problem = build(
        ops=[([], [0, 1]), ([], [2]), ([2], [3]), ([0, 1, 3], [4])],
        nbytes=[5, 5, 9, 1, 1],
        outputs=[4],
        cost=[4, 1, 1, 1],
        hold_unread=False,
    )
    assert simulate(problem, range(4)).peak == 20
    assert simulate(problem, [0, 1, 2, 0, 3]).peak == 12
    # The third op finds 20 bytes in use, 8 too many of the 10 that one run brings back: 0.8 of its cost of 4.
    assert math.isclose(cost_lower_bound(problem, 12, range(4)), 0.8 * 4 / 7)
    assert simulate(problem, [1, 2, 0, 3]).peak == 12
    assert cost_lower_bound(problem, 12) == 0


def test_the_report_says_how_far_any_plan_may_be() -> None:
    report = onnx_remat.rewrite_model(
        chain_model(16, 256, 64), "60%", effort=0.5, verify="none", run_by="session"
    ).report
    assert 0 < report.extra_compute_bound <= report.extra_compute
    gap = 100 * (report.extra_compute - report.extra_compute_bound)
    assert f"at most {gap:.1f} points above any possible plan" in report.verdict()
    assert json.loads(report.to_json())["extra_compute_bound"] == report.extra_compute_bound


def test_what_is_open_has_run_or_has_not() -> None:
    """At the op with the scratch memory the side branch has left its output, or waits for what it reads: ten bytes."""
    problem = build(
        ops=[([], [0]), ([0], [1]), ([0], [2]), ([2], [3])], nbytes=[10, 10, 1, 1], outputs=[1, 3],
        workspace=[0, 0, 0, 12],
    )  # fmt: skip
    assert cost_lower_bound(problem, 24) == 0
    assert math.isclose(cost_lower_bound(problem, 22), 1 / 4 * (1 - 8 / 10), rel_tol=1e-6)
    assert simulate(problem, [0, 2, 3, 0, 1]).peak <= 22
    # A node that takes three bytes, wherever it runs again, saves but seven of the ten.
    assert math.isclose(cost_lower_bound(problem, 22, per_rerun=3), 1 / 4 * (1 - 5 / 7), rel_tol=1e-6)


def test_a_bound_is_not_above_a_schedule_whose_small_values_are_rounded_away() -> None:
    problem = build(
        ops=[([], [0]), ([], [1]), ([], [2]), ([0, 1, 2], [3])], nbytes=[4_000_000_000, 4, 1, 1], outputs=[3],
        workspace=[0, 0, 6_000_000_000, 0], cost=[1, 1, 1, 1], hold_unread=False,
    )  # fmt: skip
    schedule = Schedule((0, 1, 2, 0, 1, 3))
    peak = simulate(problem, schedule).peak
    assert cost_lower_bound(problem, peak, range(4)) <= schedule.overhead(problem) == 0.5


def test_views_of_views_may_be_many() -> None:
    count = 3000
    problem = build(
        ops=[([], [0]), *(([i], [i + 1]) for i in range(count)), ([count], [count + 1])], nbytes=[8] * (count + 2),
        outputs=[count + 1], alias={i + 1: 0 for i in range(count)},
    )  # fmt: skip
    view = liveness_model(problem)
    assert view.expand(view.ops) == tuple(range(count + 2))
