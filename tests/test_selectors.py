"""One contract for every registered selector, and what each method is known for."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_problems import baseline, build, chain, problems, random_problem

from onnx_remat.errors import UsageError
from onnx_remat.memory import simulate
from onnx_remat.schedule import Problem, Schedule, check_schedule
from onnx_remat.selectors import Request, get, materialize, names
from onnx_remat.selectors.kernels import flatten, ranked, strip
from onnx_remat.selectors.materialize import split_step

SELECTORS = names()


def planned(name: str, problem: Problem, budget: int, **options: object) -> Schedule:
    """What the selector answers, checked: valid, the same when asked again, in order where that is asked."""
    request = Request(problem, budget, baseline(problem), work=2000, **options)  # type: ignore[arg-type]
    schedule = get(name)(request)
    check_schedule(problem, schedule)
    assert get(name)(request) == schedule
    if request.fixed_order:
        assert list(dict.fromkeys(schedule.order)) == list(range(problem.n_ops))
    return schedule


@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize("name", SELECTORS)
@settings(max_examples=15, deadline=None)
@given(problem=problems(), share=st.floats(0.3, 1.1))
def test_contract(name: str, fixed_order: bool, problem: Problem, share: float) -> None:
    before = simulate(problem, baseline(problem)).peak
    schedule = planned(name, problem, int(before * share), fixed_order=fixed_order)
    assert simulate(problem, schedule).peak <= before or before <= int(before * share)


@pytest.mark.parametrize("name", SELECTORS)
def test_budget_of_the_baseline_costs_nothing(name: str) -> None:
    problem = chain(12)
    assert planned(name, problem, simulate(problem, baseline(problem)).peak).overhead(problem) == 0


@pytest.mark.parametrize("name", ["search", "auto"])
@pytest.mark.parametrize("budget", [20, 14, 10, 8, 6])
def test_chain_of_32_fits_small_budgets(name: str, budget: int) -> None:
    problem = chain(32)
    assert simulate(problem, planned(name, problem, budget)).peak <= budget


@pytest.mark.parametrize("n", [16, 36, 64, 100])
def test_sqrt_n_peak_grows_with_the_square_root_of_a_chain(n: int) -> None:
    problem = chain(n)
    schedule = planned("sqrt_n", problem, 0)
    assert simulate(problem, schedule).peak <= 2 * math.isqrt(n) + 3
    assert schedule.overhead(problem) <= 0.5


def test_keep_all_never_recomputes() -> None:
    for seed in range(10):
        problem = random_problem(seed, 20)
        assert sorted(planned("keep_all", problem, 0).order) == list(range(20))


def test_keep_all_runs_leaves_early() -> None:
    """Two big values with one reader each: interleaving needs one at a time."""
    problem = build(
        ops=[([], [0]), ([], [1]), ([0], [2]), ([1], [3]), ([2, 3], [4])], nbytes=[9, 9, 1, 1, 1], outputs=[4]
    )
    assert simulate(problem, planned("keep_all", problem, 0)).peak == 11


def test_auto_keeps_all_where_order_is_enough() -> None:
    problem = build(
        ops=[([], [0]), ([], [1]), ([0], [2]), ([1], [3]), ([2, 3], [4])], nbytes=[9, 9, 1, 1, 1], outputs=[4]
    )
    assert planned("auto", problem, 11).overhead(problem) == 0


def test_materialize_recomputes_once_just_before_use() -> None:
    problem = chain(4)
    dropped = np.array([False, True, True] + [False] * 5)
    schedule = materialize(problem, range(8), dropped, split_step(problem, np.arange(8, dtype=np.int32)))
    assert schedule.order == (0, 1, 2, 3, 4, 1, 2, 5, 6, 7)


def test_strip_drops_what_nobody_reads() -> None:
    problem = chain(3)
    order = np.array([0, 1, 1, 2, 0, 3, 4, 5], np.int32)
    none = np.zeros(len(order), np.bool_)
    assert strip(order, flatten(problem), none).tolist() == [0, 1, 2, 0, 3, 4, 5]
    assert strip(order, flatten(problem, fixed_order=True), none).tolist() == [0, 1, 1, 2, 0, 3, 4, 5]


@settings(deadline=None)
@given(st.lists(st.integers(-5, 5)))
def test_ranked_is_a_stable_argsort(keys: list[int]) -> None:
    array = np.asarray(keys, np.int64)
    assert ranked(array).tolist() == np.argsort(array, kind="stable").tolist()


def test_unknown_selector_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'search'"):
        get("serach")
