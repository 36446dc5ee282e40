"""One contract for every registered selector, and what each method is known for."""

from __future__ import annotations

import math
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_remat.errors import UsageError
from onnx_remat.memory.buffers import simulate
from onnx_remat.memory.problem import BACKWARD, FORWARD, Problem, Schedule, check_schedule
from onnx_remat.plan import request as contract
from onnx_remat.plan.bounds import lower_bound
from onnx_remat.plan.cost_bounds import cost_lower_bound
from onnx_remat.plan.request import Deadline
from onnx_remat.plan.search.anneal import anneal
from onnx_remat.plan.search.candidates import annealed
from onnx_remat.plan.search.core import liveness_model
from onnx_remat.plan.search.effort import allowance
from onnx_remat.plan.search.loading import load
from onnx_remat.plan.search.state import EXCESS, empty_state
from onnx_remat.plan.search.tuning import LANES
from onnx_remat.plan.selectors import Request, get, materialize, names
from onnx_remat.plan.selectors.exact import solve
from onnx_remat.plan.selectors.materialize import _sort, split_step
from onnx_remat.plan.selectors.min_cut import cut_seeds
from onnx_remat.plan.selectors.revolve import table
from tests.support.planner_problems import (
    baseline,
    build,
    chain,
    chain_optimum,
    cheapest,
    liveness_only,
    problems,
    random_order,
    random_problem,
)
from tests.support.slow import few

SELECTORS = names()


def planned(name: str, problem: Problem, budget: int, **options: object) -> Schedule:
    """What the selector answers, checked: valid, the same when asked again, in order where that is asked."""
    request = Request(problem, budget, baseline(problem), **{"work": 2000, **options})  # type: ignore[arg-type]
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
def test_a_fixed_order_holds_where_gradients_could_wait(name: str) -> None:
    """What is for a shortcut, over four ops, is made long before an order by blocks would make it."""
    n = 12
    reads: list[list[int]] = [[], *([i - 1] for i in range(1, n))]
    due = n - 1  # the gradient of the op that is next
    for i in reversed(range(1, n)):
        gradient, due = due, len(reads)
        reads.append([i, gradient])
        if i % 4 == 0:
            reads.append([i - 4, gradient])
    count = len(reads)
    phase = [FORWARD] * n + [BACKWARD] * (count - n)
    ops = [(read, [op]) for op, read in enumerate(reads)]
    problem = build(ops, [10] * count, [], phase=phase, hold_unread=False)
    before = simulate(problem, baseline(problem)).peak
    planned(name, problem, before // 3, fixed_order=True)


def test_a_plan_that_leaves_a_fixed_order_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "_REGISTRY", {})
    problem = build(ops=[([], [0]), ([], [1]), ([0, 1], [2])], nbytes=[1, 1, 1], outputs=[2])
    request = Request(problem, 3, baseline(problem), fixed_order=True)

    def careless(_request: Request) -> Schedule:
        return Schedule((1, 0, 2))

    selector = contract.register("careless")(careless)
    with pytest.raises(ValueError, match="step 0 runs op 1 before op 0, which comes first in the fixed order"):
        selector(request)
    assert selector(replace(request, fixed_order=False)).order == (1, 0, 2)


@pytest.mark.parametrize("name", SELECTORS)
def test_budget_of_the_baseline_costs_nothing(name: str) -> None:
    problem = chain(12)
    assert planned(name, problem, simulate(problem, baseline(problem)).peak).overhead(problem) == 0


@pytest.mark.parametrize("budget", few([20, 14, 10, 8, 6], [20, 6]))
def test_chain_of_32_fits_small_budgets(budget: int) -> None:
    problem = chain(32)
    schedule = get("search")(Request(problem, budget, baseline(problem), work=100_000))
    assert simulate(problem, schedule).peak <= budget


@pytest.mark.parametrize(("n", "slots"), [(16, 0), (64, 1), (64, 4), pytest.param(200, 7, marks=pytest.mark.slow)])
def test_chains_are_within_a_twentieth_of_the_optimum(n: int, slots: int) -> None:
    """Values are recomputed as often as dynamic programming says that it takes."""
    problem, known = chain(n), chain_optimum(n, slots)
    check_schedule(problem, known)
    found = planned("search", problem, simulate(problem, known).peak)
    assert simulate(problem, found).peak <= simulate(problem, known).peak
    assert len(found.order) <= 1.05 * len(known.order)


def test_few_checkpoints_cost_what_is_proved_least() -> None:
    """Griewank's closed form, for the number of steps one higher than that of results to hold or to make again."""
    found = table(30, 5).runs
    for slots in range(6):
        for n in range(1, 31):
            r = next(r for r in range(1, n + 2) if math.comb(slots + 1 + r, r) >= n + 1)
            assert found[n, slots] == r * (n + 1) - math.comb(slots + 1 + r, r - 1)


def plain_problem(seed: int) -> Problem:
    """Four to eight ops without any buffer rule: what brute force takes."""
    problem = liveness_only(random_problem(seed, 4 + seed % 5, facts=False))
    return replace(problem, is_output=np.zeros_like(problem.is_output))


def some_budgets(problem: Problem) -> list[int]:
    """The floor, the peak, and what lies between."""
    floor, peak = lower_bound(problem), simulate(problem, baseline(problem)).peak
    return sorted({floor, (2 * floor + peak) // 3, (floor + peak) // 2, peak})


@pytest.mark.parametrize("seed", range(30))
def test_exact_search_and_bounds_agree_with_brute_force(seed: int) -> None:
    problem = plain_problem(seed)
    for budget in some_budgets(problem):
        least = cheapest(problem, budget)
        proof = solve(problem, budget, 5.0)
        assert proof.optimal
        assert (proof.schedule is None) == (least is None)
        bound = cost_lower_bound(problem, budget, range(problem.n_ops))
        if least is None or proof.schedule is None:
            continue
        assert simulate(problem, proof.schedule).peak <= budget
        assert math.isclose(proof.schedule.overhead(problem), least, abs_tol=1e-4)
        assert bound <= least + 1e-9
        found = get("search")(Request(problem, budget, baseline(problem), fixed_order=True, work=5000))
        assert simulate(problem, found).peak <= budget
        assert found.overhead(problem) <= least * 1.01 + 1e-9


@pytest.mark.parametrize("seed", range(10))
def test_exact_and_bounds_know_what_only_a_recompute_needs(seed: int) -> None:
    """First runs do not pay for it; search, which counts it always, still keeps the budget and costs no less."""
    problem = plain_problem(seed)
    scratch = np.random.default_rng(seed).integers(0, 5, problem.n_ops)
    problem = replace(problem, rerun_workspace=scratch.astype(np.int64))
    for budget in some_budgets(problem):
        least = cheapest(problem, budget)
        proof = solve(problem, budget, 5.0)
        assert (proof.schedule is None) == (least is None)
        if least is None or proof.schedule is None:
            continue
        assert simulate(problem, proof.schedule).peak <= budget
        assert math.isclose(proof.schedule.overhead(problem), least, abs_tol=1e-4)
        assert cost_lower_bound(problem, budget, range(problem.n_ops)) <= least + 1e-9
        found = get("search")(Request(problem, budget, baseline(problem), fixed_order=True, work=5000))
        assert simulate(problem, found).peak > budget or found.overhead(problem) >= least - 1e-9


@pytest.mark.parametrize("seed", range(30))
def test_free_order_agrees_with_brute_force(seed: int) -> None:
    """Any order of first executions: search reaches the least cost, and the bound for any order is below it."""
    problem = plain_problem(seed)
    for budget in some_budgets(problem):
        least = cheapest(problem, budget, fixed_order=False)
        bound = cost_lower_bound(problem, budget)
        if least is None:
            continue
        assert bound <= least + 1e-9
        found = get("search")(Request(problem, budget, baseline(problem), work=5000))
        assert simulate(problem, found).peak <= budget
        assert found.overhead(problem) <= least * 1.01 + 1e-9


@pytest.mark.parametrize(
    "name",
    few(
        [name for name in SELECTORS if name != "collection"],
        [name for name in SELECTORS if name not in ("collection", "exact")],
    ),
)
@settings(max_examples=8, deadline=None)
@given(problem=problems(12))
def test_sweeps_upwards_never_cost_more_nor_exceed_the_budget(name: str, problem: Problem) -> None:
    """Each plan is handed on to the next larger budget; what a plan kept once is kept ever after."""
    peak = simulate(problem, baseline(problem)).peak
    last, kept = math.inf, False
    plans: tuple[Schedule, ...] = ()
    for budget in range(lower_bound(problem), peak + 1, max(1, (peak - lower_bound(problem)) // 6)):
        plan = planned(name, problem, budget, known=plans, work=50)
        cost, fits = plan.overhead(problem), simulate(problem, plan).peak <= budget
        assert fits or not kept
        if kept:
            assert cost <= last + 1e-9
        if fits:
            last, kept = cost, True
        plans = (*plans, plan)


@pytest.mark.parametrize("name", few(["search", "auto"], ["search"]))
def test_a_larger_budget_never_costs_more_even_asked_alone(name: str) -> None:
    problem = chain(24)
    peak = simulate(problem, baseline(problem)).peak
    costs = [planned(name, problem, budget).overhead(problem) for budget in range(peak // 2, peak + 1, 2)]
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize("fixed_order", [False, True])
def test_a_refusal_takes_one_more_round_than_a_plan(fixed_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module, spent = sys.modules["onnx_remat.plan.selectors.search"], []

    def counted(view, plan, budget, work, *rest, **more):  # type: ignore[no-untyped-def]
        spent.append(work)
        return annealed(view, plan, budget, work, *rest, **more)

    monkeypatch.setattr(module, "annealed", counted)
    problem = chain(40)
    for budget in (2, 20):
        spent.clear()
        request = Request(problem, budget, baseline(problem), work=4000, fixed_order=fixed_order)
        assert (simulate(problem, get("search")(request)).peak > budget) == (budget == 2)
        assert sum(spent) <= (1.3 if budget == 20 else 2.5) * LANES * allowance(request)


def test_collection_keeps_the_list_and_recomputes_the_rest() -> None:
    problem = chain(8)
    schedule = planned("collection", problem, 0, checkpoints=(1, 3, 5))
    count = np.bincount(schedule.array(), minlength=16)
    assert count[[1, 3, 5]].tolist() == [1, 1, 1]
    assert count[[0, 2, 4]].tolist() == [2, 2, 2]


def test_speed_keeps_the_anchors() -> None:
    problem = chain(8)
    schedule = planned("speed", problem, 0, anchors=(1, 3, 5, 7))
    assert np.bincount(schedule.array(), minlength=16)[[1, 3, 5, 7]].tolist() == [1, 1, 1, 1]


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


@settings(max_examples=40, deadline=None)
@given(problem=problems(), seed=st.integers(0, 2**31))
def test_profile_under_change_is_the_simulators(problem: Problem, seed: int) -> None:
    """Whatever is put in and taken out, the profile is that of a simulation from scratch."""
    problem = liveness_only(problem)
    view = liveness_model(problem)
    order = view.contract(random_order(problem, np.random.default_rng(seed)))
    state = empty_state(view.core, order, 0)
    load(state, order)
    rng = np.random.default_rng(seed)
    for _ in range(3):
        draws, never = np.array([seed + 1], np.uint64), np.zeros(1, np.int64)
        anneal(state, draws, 1.0, -1.0, 20_000, 100.0, 50.0, float(rng.random()), never)
        at = state.at[state.at >= 0]
        now = state.events["op"][at]
        expected = simulate(problem, now).step_bytes - problem.base_bytes
        assert state.level[state.at >= 0].tolist() == expected.tolist()
        assert state.totals[EXCESS] == np.maximum(expected, 0).sum()


@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize("seed", few(range(40), range(0, 40, 4)))
def test_search_stays_valid_on_dense_graphs(seed: int, fixed_order: bool) -> None:
    """Many recomputes of the same ops come and go; none may take its op's last execution along."""
    problem = random_problem(seed, 7 + seed % 8)
    planned("search", problem, int(simulate(problem, baseline(problem)).peak * 0.5), fixed_order=fixed_order)


def test_help_needs_no_docstrings(monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -OO`` leaves them out."""
    assert contract.summary("keep_all")
    monkeypatch.setattr(get("keep_all"), "__doc__", None)
    assert contract.summary("keep_all") == ""


def test_unknown_selector_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'search'"):
        get("serach")


@pytest.mark.parametrize("length", [1, 2, 3, 7, 50, 400])
def test_a_chain_is_sorted_by_position(length):
    rng = np.random.default_rng(length)
    position, chain = rng.permutation(500), rng.permutation(500)[:length].astype(np.int32)
    expected = [chain[0], *sorted(chain[1:], key=lambda op: position[op])]
    _sort.py_func(chain, length, position)
    assert chain.tolist() == expected


def test_no_cut_is_searched_for_once_time_is_up() -> None:
    problem = chain(40)
    assert cut_seeds(problem, np.arange(problem.n_ops, dtype=np.int32), 0, Deadline())
    assert not cut_seeds(problem, np.arange(problem.n_ops, dtype=np.int32), 0, Deadline(0.0))


def test_cuts_of_ops_that_cost_nothing_know_their_prices() -> None:
    """A view has no size to keep: infinite, times a price of 0, it was no number."""
    problem = build(
        [([], [0]), ([0], [1]), ([1], [2]), ([2], [3]), ([1, 3], [4])], [8] * 5, [4],
        alias={2: 0}, cost=[0.0] * 5, phase=[FORWARD] * 3 + [BACKWARD] * 2,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cut_seeds(problem, np.arange(problem.n_ops, dtype=np.int32), 0, Deadline())
