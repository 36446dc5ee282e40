"""One contract: whoever reads the lifetime table agrees with simulators and brute force that do not.

Each consumer gets a *subject*, a problem whose table may have been broken on purpose, and is held to the *truth*, the
same problem with its own table. With the true table the contract holds; each broken one is found out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from onnx_remat.memory.buffers import simulate
from onnx_remat.memory.donation import after_readers, donatable
from onnx_remat.memory.problem import IN_RESIDENT, Ints, Lifetimes, Problem, Schedule, check_schedule
from onnx_remat.plan.bounds import lower_bound
from onnx_remat.plan.cost_bounds import cost_lower_bound
from onnx_remat.plan.search.anneal import anneal
from onnx_remat.plan.search.core import liveness_model
from onnx_remat.plan.search.loading import load
from onnx_remat.plan.search.orders import list_schedules
from onnx_remat.plan.search.state import State, empty_state
from onnx_remat.plan.selectors import Request, get, names
from onnx_remat.plan.selectors.exact import solve
from onnx_remat.plan.selectors.materialize import materialize, split_step
from onnx_remat.plan.selectors.sqrt_n import crossing
from onnx_remat.write.private_buffers import unroll
from tests.support.naive_simulator import naive_steps
from tests.support.planner_problems import (
    baseline,
    build,
    cheapest,
    donating_problem,
    liveness_only,
    random_order,
    random_schedule,
)
from tests.support.slow import few

Check = Callable[[Problem, Problem, int], None]


def fresh(problem: Problem) -> Problem:
    """The same problem with a table of its own, to be broken."""
    return replace(problem)


def steps_of(state: State) -> Ints:
    """The order in a state."""
    return state.events["op"][state.at[state.at >= 0]].astype(np.int32)


def simulator(subject: Problem, truth: Problem, seed: int) -> None:
    order = random_schedule(truth, seed)
    assert simulate(subject, order).step_bytes.tolist() == naive_steps(truth, order)


def bounds(subject: Problem, truth: Problem, seed: int) -> None:
    order = random_schedule(truth, seed)
    peak = max(naive_steps(truth, order))
    assert lower_bound(subject) <= peak
    overhead = Schedule(tuple(order)).overhead(truth)
    fixed = cost_lower_bound(subject, peak, list(dict.fromkeys(order)))
    assert cost_lower_bound(subject, peak) <= fixed + 1e-9
    assert fixed <= overhead + 1e-9


def intervals(subject: Problem, truth: Problem, seed: int) -> None:
    """The profile of an order under change is the simulator's, and no move makes an order that cannot be."""
    subject, truth = plain(subject), liveness_only(truth)
    view = liveness_model(subject)
    order = view.contract(random_order(truth, np.random.default_rng(seed)))
    state = empty_state(view.core, order, 0)
    load(state, order)
    for _ in range(2):
        now = steps_of(state)
        expected = np.array(naive_steps(truth, now.tolist())) - truth.base_bytes
        assert state.level[state.at >= 0].tolist() == expected.tolist()
        check_schedule(truth, Schedule(tuple(now.tolist())))
        anneal(state, np.array([seed + 1], np.uint64), 1.0, -1.0, 20_000, 100.0, 50.0, 0.5, np.zeros(1, np.int64))
    check_schedule(truth, Schedule(tuple(steps_of(state).tolist())))


def core(subject: Problem, truth: Problem, seed: int) -> None:
    """Without views and back: the result is an order that can be."""
    view = liveness_model(subject)
    order = view.contract(random_order(truth, np.random.default_rng(seed)))
    state = empty_state(view.core, order, 0)
    load(state, order)
    anneal(state, np.array([seed + 1], np.uint64), 1.0, -1.0, 20_000, 100.0, 50.0, 0.5, np.zeros(1, np.int64))
    check_schedule(truth, Schedule(view.expand(steps_of(state))))


def orders(subject: Problem, truth: Problem, seed: int) -> None:
    for order in list_schedules(subject, np.array(random_order(truth, np.random.default_rng(seed)), np.int32)):
        check_schedule(truth, Schedule(tuple(order.tolist())))


def insertion(subject: Problem, truth: Problem, seed: int) -> None:
    """What is dropped is recomputed in time, or not at all."""
    rng = np.random.default_rng(seed)
    order = np.array(random_order(truth, rng), np.int32)
    for since in (split_step(truth, order), int(rng.integers(0, truth.n_ops + 1))):
        check_schedule(truth, materialize(subject, order, rng.random(truth.n_ops) < 0.7, since))


def segments(subject: Problem, truth: Problem, seed: int) -> None:
    """What crosses a step of the forward pass is allocated there."""
    order = np.array(random_order(truth, np.random.default_rng(seed)), np.int32)
    split = split_step(truth, order)
    crosses = crossing(subject, order, split)[1][:split] + truth.base_bytes
    assert (crosses <= naive_steps(truth, order.tolist())[:split]).all()


def exact(subject: Problem, truth: Problem, _seed: int) -> None:
    subject, truth = plain(subject), plain(truth)
    floor, peak = lower_bound(truth), simulate(truth, baseline(truth)).peak
    for budget in sorted({floor, (floor + peak) // 2, peak}):
        least, proof = cheapest(truth, budget), solve(subject, budget, 5.0)
        assert (proof.schedule is None) == (least is None)
        if least is not None and proof.schedule is not None:
            check_schedule(truth, proof.schedule)
            assert simulate(truth, proof.schedule).peak <= budget
            assert math.isclose(proof.schedule.overhead(truth), least, abs_tol=1e-4)
            assert cost_lower_bound(subject, budget, baseline(truth).order) <= least + 1e-9


def plain(problem: Problem) -> Problem:
    """Liveness alone, no outputs: what brute force takes; a broken table stays as broken as it is."""
    simple = liveness_only(problem)
    if "broken" in vars(problem):
        vars(simple)["lifetimes"] = vars(problem)["broken"](simple.lifetimes)
    return simple


CONTRACT: dict[str, Check] = {
    check.__name__: check for check in (simulator, bounds, intervals, core, orders, insertion, segments, exact)
}
SEEDS = {"exact": 12, "core": 40, "intervals": 40}


def cases(name: str) -> list[tuple[Problem, int]]:
    """Problems with donations for one consumer: tiny and plain where brute force is to solve them."""
    found = []
    for seed in range(SEEDS.get(name, 80)):
        most, facts = (3, False) if name == "exact" else (11, seed % 3 > 0)
        problem = donating_problem(seed, 4 + seed % most, facts)
        if name == "exact":
            problem = replace(problem, is_output=np.zeros_like(problem.is_output))
        found.append((problem, seed))
    return found


@pytest.mark.parametrize("name", CONTRACT)
def test_consumers_of_the_table_agree_with_the_truth(name: str) -> None:
    donations = 0
    for truth, seed in cases(name):
        donations += int((truth.donates >= 0).sum())
        CONTRACT[name](fresh(truth), truth, seed)
    assert donations > 10


def costs_its_bytes(life: Lifetimes) -> Lifetimes:
    """What lies in a resident's memory costs what it would elsewhere."""
    slots = life.place == IN_RESIDENT
    nbytes, least = life.nbytes.copy(), life.least.copy()
    nbytes[life.out_values[slots]] = least[life.out_values[slots]] = 1000
    return life._replace(nbytes=nbytes, least=least, place=np.where(slots, -1, life.place).astype(np.int32))


def waits_for_nobody(life: Lifetimes) -> Lifetimes:
    """Nothing says that a resident is renewed."""
    reader = np.repeat(np.arange(len(life.in_ptr) - 1), np.diff(life.in_ptr))
    made_by = life.maker[life.in_values]
    pairs = sorted({(int(a), int(b)) for a, b in zip(made_by, reader, strict=True) if a >= 0})
    ptr = np.searchsorted([a for a, _ in pairs], np.arange(len(life.in_ptr))).astype(np.int32)
    nobody = np.full_like(life.renewed_by, -1)
    return life._replace(renewed_by=nobody, next_ptr=ptr, next_ops=np.array([b for _, b in pairs], np.int32))


def runs_again(life: Lifetimes) -> Lifetimes:
    """Every op may run again."""
    return life._replace(recomputable=np.ones_like(life.recomputable))


def forgets_views(life: Lifetimes) -> Lifetimes:
    """A view of a resident is taken for a value of its own."""
    resident = (life.maker[life.root] < 0) & (life.maker >= 0)
    return life._replace(root=np.where(resident, np.arange(len(life.root)), life.root).astype(np.int32))


BROKEN = [
    (costs_its_bytes, ["simulator", "bounds", "intervals", "exact"]),
    (waits_for_nobody, ["orders", "insertion", "core", "intervals", "exact"]),
    (runs_again, ["insertion", "core", "intervals"]),
    (forgets_views, ["insertion"]),
]


@pytest.mark.parametrize(("breakage", "name"), [(b, name) for b, found in BROKEN for name in found])
def test_a_broken_table_is_found_out(breakage: Callable[[Lifetimes], Lifetimes], name: str) -> None:
    for truth, seed in cases(name):
        subject = fresh(truth)
        vars(subject)["lifetimes"] = breakage(truth.lifetimes)
        vars(subject)["broken"] = breakage
        try:
            CONTRACT[name](subject, truth, seed)
        except (AssertionError, ValueError):
            return
    pytest.fail(f"{name} does not notice that {breakage.__doc__}")


@pytest.mark.parametrize("name", few(names(), [name for name in names() if name not in ("auto", "exact")]))
def test_selectors_keep_to_donations(name: str) -> None:
    for seed in (*range(12), 272, 1198, 1403, 1591, 2434, 2590, 2768, 3126):
        problem = donating_problem(seed, 6 + seed % 12, facts=seed % 2 > 0)
        peak = simulate(problem, baseline(problem)).peak
        for share in (0.5, 0.8):
            schedule = get(name)(Request(problem, int(peak * share), baseline(problem), work=200))
            check_schedule(problem, schedule)


@pytest.mark.parametrize("seed", range(8))
def test_search_with_donations_reaches_the_least_cost(seed: int) -> None:
    problem = plain(donating_problem(seed, 4 + seed % 4, facts=False))
    problem = replace(problem, is_output=np.zeros_like(problem.is_output))
    floor, peak = lower_bound(problem), simulate(problem, baseline(problem)).peak
    for budget in sorted({floor, (floor + peak) // 2, peak}):
        least = cheapest(problem, budget, fixed_order=False)
        if least is not None:
            assert cost_lower_bound(problem, budget) <= least + 1e-9
            found = get("search")(Request(problem, budget, baseline(problem), work=5000))
            assert simulate(problem, found).peak <= budget
            assert found.overhead(problem) <= least * 1.01 + 1e-9


def update(reads_again: bool = False) -> Problem:
    """Resident 0 is read by ops 0 and 2 (through a view); op 1 makes value 3, its new value of 8 bytes."""
    ops = [([0], [1]), ([1], [3]), ([0], [2]), ([2, 3] if reads_again else [2], [4])]
    return build(ops, nbytes=[8, 2, 8, 8, 1], outputs=[3, 4], resident=[0], alias={2: 0})


def test_views_that_read_one_value_twice_are_looked_at_once() -> None:
    """A chain of Reshapes to what they reshape: each was looked at twice as often as the one after."""
    n = 60
    reads = [([], [0]), *(([i, i], [i + 1]) for i in range(n)), ([n], [n + 1])]
    problem = build(reads, [8] * (n + 2), [n + 1], alias=dict.fromkeys(range(1, n + 1), 0))
    view = liveness_model(problem)
    assert view.ops.tolist() == [0, n + 1] and view.expand([0, n + 1]) == tuple(range(n + 2))


def test_a_renewed_weight_costs_nothing_and_waits_for_views_of_the_old_one() -> None:
    problem = donatable(update(), [(3, 0)]).apply(update())
    assert simulate(update(), [0, 2, 3, 1]).step_bytes.tolist() == [10, 10, 11, 19]
    assert simulate(problem, [0, 2, 3, 1]).step_bytes.tolist() == [10, 10, 11, 11]
    assert after_readers(problem, range(4)).tolist() == [0, 2, 3, 1]
    with pytest.raises(ValueError, match="step 2 runs op 2 after op 1, which overwrites its input"):
        check_schedule(problem, Schedule((0, 1, 2, 3)))
    with pytest.raises(ValueError, match="step 4 runs op 0 after op 1"):
        check_schedule(problem, Schedule((0, 2, 3, 1, 0)))
    with pytest.raises(ValueError, match="op 1 must not run twice"):
        check_schedule(problem, Schedule((0, 2, 3, 1, 1)))


def test_pairs_that_cannot_be_are_left_out_with_the_reason() -> None:
    circle = donatable(update(reads_again=True), [(3, 0)])
    assert circle.accepted == ()
    assert circle.reasons == {(3, 0): "a reader of the old value must run after the op that makes the new one"}
    reads_itself = build(ops=[([0], [1])], nbytes=[8, 8], outputs=[1], resident=[0])
    assert "its kernel reads" in donatable(reads_itself, [(1, 0)]).reasons[1, 0]
    assert donatable(replace(reads_itself, donee_may_read=np.array([False, True])), [(1, 0)]).accepted == ((1, 0),)
    smaller = build(ops=[([], [1])], nbytes=[8, 4], outputs=[1], resident=[0])
    assert donatable(smaller, [(1, 0)]).reasons == {(1, 0): "sizes differ"}


def test_two_weights_that_wait_for_each_other_are_not_both_renewed_in_place() -> None:
    """Each new value is made from the other's old one: the larger is renewed in place."""
    problem = build(ops=[([0], [2]), ([1], [3])], nbytes=[8, 9, 9, 8], outputs=[2, 3], resident=[0, 1])
    swap = [(2, 1), (3, 0)]
    assert donatable(problem, swap).accepted == ((2, 1),)


@pytest.mark.parametrize("seed", range(60))
def test_a_pair_is_left_out_only_where_no_order_is_left(seed: int) -> None:
    problem = donating_problem(seed, 8)
    after_readers(problem, range(8))
    taken = set(problem.donates.tolist())
    residents = [w for w in np.flatnonzero(problem.resident).tolist() if w not in taken and not problem.is_output[w]]
    for value in np.flatnonzero(~problem.resident & (problem.donates < 0)).tolist():
        for resident in residents:
            donates = problem.donates.copy()
            donates[value] = resident
            wanted = [(v, int(w)) for v, w in enumerate(donates.tolist()) if w >= 0]
            given = donatable(replace(problem, nbytes=np.ones_like(problem.nbytes)), wanted)
            more = replace(problem, donates=donates)
            try:
                after_readers(more, range(8))
            except ValueError:
                assert given.reasons
            else:
                assert all("no fixed place" in why for why in given.reasons.values())


def test_what_a_view_reads_besides_what_it_views_is_not_renewed_in_place() -> None:
    """Views are taken where they are read, so nobody would see to it that this one comes before the new value."""
    ops, nbytes = [([0, 1], [2]), ([2], [3]), ([], [4])], [8, 8, 8, 8, 8]
    problem = build(ops=ops, nbytes=nbytes, outputs=[3, 4], resident=[0, 1])
    assert donatable(problem, [(4, 1)]).accepted == ((4, 1),)
    view = replace(problem, alias_slot=np.array([0, -1, -1], np.int32))
    assert "only makes views" in donatable(view, [(4, 1)]).reasons[4, 1]


def test_every_occurrence_unrolled_lies_where_it_did() -> None:
    for seed in range(30):
        problem = donating_problem(seed, 10)
        order = Schedule(tuple(random_schedule(problem, seed)))
        unrolled = unroll(problem, order).problem
        steps = range(unrolled.n_ops)
        check_schedule(unrolled, Schedule(tuple(steps)))
        assert simulate(unrolled, steps).step_bytes.tolist() == simulate(problem, order).step_bytes.tolist()
