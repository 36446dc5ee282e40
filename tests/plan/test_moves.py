"""Single moves of the annealing, drawn on purpose: what they log has room, and the profile stays true."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from onnx_remat.memory.buffers import simulate
from onnx_remat.memory.problem import Problem
from onnx_remat.plan.search.anneal import anneal
from onnx_remat.plan.search.core import liveness_model
from onnx_remat.plan.search.loading import load, unload
from onnx_remat.plan.search.state import EXCESS, FIXED, WORK, State, empty_state
from onnx_remat.plan.search.tuning import ADD, CHAIN, EARLY, HOIST, HOISTED, SWAP, TRIES, WHOLE
from tests.support.planner_problems import build


def draws(seeds: npt.NDArray[np.uint64], count: int) -> npt.NDArray[np.float64]:
    """What `moves.draw` gives for each seed, one row a draw."""
    found, x = [], seeds.copy()
    for _ in range(count):
        x ^= x << np.uint64(13)
        x ^= x >> np.uint64(7)
        x ^= x << np.uint64(17)
        found.append((x >> np.uint64(11)).astype(np.float64) / 2.0**53)
    return np.array(found)


def one_move(state: State, seed: np.uint64) -> None:
    """One move, whatever it costs."""
    anneal(state, np.array([seed], np.uint64), 1.0, -1e9, 1, 1e9, 1e8, 1.0, np.zeros(1, np.int64))


def is_true(state: State, problem: Problem) -> bool:
    """Whether the profile is the simulator's."""
    steps = state.events["op"][state.at[state.at >= 0]]
    levels = simulate(problem, steps).step_bytes - problem.base_bytes - 10**6
    return bool((state.level[state.at >= 0] == levels).all() and state.totals[EXCESS] == np.maximum(levels, 0).sum())


def test_the_longest_move_has_room_in_its_log() -> None:
    """A reader goes back with all it needs; each of what that leaves behind leaves as much behind as it may."""
    wide, deep = HOISTED - 1, CHAIN - 1
    leaves = [([], [v]) for v in range(wide * deep)]
    early = len(leaves)  # what the reader goes back to
    middle = [([*range(i * deep, (i + 1) * deep)], [early + 1 + i]) for i in range(wide)]
    reader = ([early, *range(early + 1, early + 1 + wide)], [early + 1 + wide])
    late = [([early + 1 + i], [early + 2 + wide + i]) for i in range(wide)]  # they read what the reader read
    ops = [*leaves, ([], [early]), *middle, reader, *late]
    problem = build(ops, [1] * len(ops), [len(ops) - 1], hold_unread=False)
    first, again = range(early + 1 + wide), [*range(early), *range(early + 1, early + 1 + wide)]
    order = np.array([*first, *again, *range(early + 1 + wide, len(ops))], np.int32)
    at = len(first) + len(again)  # the reader's place
    seeds = np.arange(1, 2_000_000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    _, kind, _, event, read = draws(seeds, 5)
    fit = (kind > 1 - HOIST) & ((event * len(order)).astype(int) == at) & ((read * (wide + 1)).astype(int) == 0)
    state = empty_state(liveness_model(problem).core, order, 10**6)
    load(state, order)
    one_move(state, seeds[np.argmax(fit)])
    steps = state.events["op"][state.at[state.at >= 0]]
    # It put in HOISTED, and took out the reader and, with all they alone had read, the others.
    assert fit.any() and len(steps) == len(order) + HOISTED - 1 - wide * CHAIN
    assert is_true(state, problem)


def test_one_move_recomputes_a_whole_chain() -> None:
    """As part of it frees nothing: each value is as large as the one that it is made of."""
    n = CHAIN // 2
    links = [([i - 1] if i else [], [i]) for i in range(n)]
    ops = [*links, *(([i], [n + i]) for i in range(n)), ([n - 1], [2 * n])]
    problem = build(ops, [1] * (2 * n + 1), [2 * n], hold_unread=False)
    order = np.arange(2 * n + 1, dtype=np.int32)
    seeds = np.arange(1, 300_000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    drawn = draws(seeds, TRIES + 8)
    kind, (_, reader, _, deep, early) = drawn[1], drawn[TRIES + 3 :]
    fit = (kind > SWAP) & (kind < SWAP + ADD) & (reader * (2 * n + 1) >= 2 * n) & (deep**2 > WHOLE) & (early > EARLY)
    state = empty_state(liveness_model(problem).core, order, 10**6)
    load(state, order)
    one_move(state, seeds[np.argmax(fit)])
    assert fit.any() and unload(state).tolist() == [*range(2 * n), *range(n), 2 * n]
    assert is_true(state, problem)


def test_an_order_that_repeats_the_widest_op_has_room() -> None:
    """The room for touches is that of an average order, which this one is not."""
    wide = 100
    ops = [*(([], [v]) for v in range(wide)), ([*range(wide)], [wide]), ([wide], [wide + 1])]
    problem = build(ops, [1] * len(ops), [wide + 1], hold_unread=False)
    order = np.array([*range(wide), *[wide] * 600, wide + 1], np.int32)
    state = empty_state(liveness_model(problem).core, order, 10**6)
    load(state, order)
    assert unload(state).tolist() == order.tolist() and is_true(state, problem)


def test_no_recompute_takes_the_place_of_its_ops_first_execution() -> None:
    """Every gradient reads a mask that could be made from the start, and recomputed at hardly any cost."""
    n = 10
    ops = [([], [0]), *(([i], [i + 1]) for i in range(n)), *(([0], [n + 1 + i]) for i in range(n))]
    ops += [(range(n, 2 * n + 1), [2 * n + 1])]
    ops += [([2 * n + 1 + i, n - i, n + 1 + i], [2 * n + 2 + i]) for i in range(n)]
    problem = build(
        ops, [2] * len(ops), [len(ops) - 1], cost=[1e-3 if n < op <= 2 * n else 1 for op in range(len(ops))]
    )
    order = np.arange(len(ops), dtype=np.int32)
    state = empty_state(liveness_model(problem, fixed_order=True).core, order, n)
    load(state, order)
    state.totals[FIXED] = state.events["pinned"][state.at[state.at >= 0]] = 1
    for seed in range(1, 100):
        anneal(state, np.array([seed], np.uint64), 1.0, -1.0, 2_000_000, 10.0, 5.0, 1e-3, np.zeros(1, np.int64))
        assert list(dict.fromkeys(unload(state).tolist())) == order.tolist()
    assert len(unload(state)) > len(ops)


def test_looking_through_thousands_of_readers_counts_as_work() -> None:
    """Otherwise moves take longer the more readers a value has, and the effort limits no time."""
    n = 2000

    def work(shared: bool) -> int:
        more = [2 * n] if shared else []
        forward = [([i - 1, *more] if i else more, [i]) for i in range(n)]
        backward = [([n - 1 - i, *more, *([n + i - 1] if i else [])], [n + i]) for i in range(n)]
        view = liveness_model(build([([], [2 * n]), *forward, *backward], [100] * (2 * n) + [4], [2 * n - 1]))
        state = empty_state(view.core, view.ops, 100 * n // 2)
        load(state, view.ops)
        total = 0
        for seed in range(1, 300):
            one_move(state, np.uint64(seed * 7919))
            total += int(state.totals[WORK])
        return total

    assert work(shared=True) > 1.5 * work(shared=False)
