"""Priced min-cut: decide which values to keep and which ops to recompute, with one maximum flow per price.

AOTAutograd's partitioner minimises the bytes kept for backward and treats recomputing as free or forbidden. With two
0/1 variables per op (result available to backward, op recomputed) the recompute cost fits into the same cut: minimise
``price * bytes kept + cost of the recomputes`` such that the inputs of every backward op and of every recompute are
available. Every term is pairwise submodular, so one min-cut solves it, and a sweep of prices traces the Pareto front.

References
----------
Horace He, Shangdi Yu: Transcending the runtime-memory tradeoff in checkpointing by being fusion aware, MLSys
2023.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from onnx_remat.memory.buffers import simulate
from onnx_remat.memory.problem import Flags, Ints, Problem, Schedule
from onnx_remat.plan.flow import Network, arcs
from onnx_remat.plan.request import Deadline, Request, register
from onnx_remat.plan.search.candidates import cheapest_within
from onnx_remat.plan.selectors.materialize import materialize, split_step

_BISECTIONS = 5  # of the price interval that contains the budget
_PRICES = np.geomspace(1e-4, 1e2, 25)  # of bytes in units of cost, both as fractions of their totals


def saving(problem: Problem, base_order: Ints, split: int) -> Network:
    """Return the network of forward values that backward, from step `split` of `base_order` on, keeps or recomputes.

    Op vertices are ``2 + op``; graph outputs are kept for free, views are taken again from the viewed value.
    """
    early = np.zeros(problem.n_ops, np.bool_)
    early[base_order[:split]] = True
    life = problem.lifetimes
    op_node, value_node = 2, 2 + problem.n_ops
    again = np.flatnonzero(early & life.recomputable)
    maker = np.repeat(np.arange(problem.n_ops), np.diff(problem.out_ptr))
    slots = np.flatnonzero(early[maker])
    value, maker = problem.out_values[slots], maker[slots]
    view = (life.place[slots] >= 0) & life.recomputable[maker] & ~life.kept[value]
    size = np.where(life.kept[value], 0.0, life.nbytes[value].astype(np.float64))
    size[view] = np.inf
    reader = np.repeat(np.arange(problem.n_ops), np.diff(problem.in_ptr))
    source = life.maker[problem.in_values]
    within = (source >= 0) & (early & life.recomputable)[reader]
    across = (source >= 0) & ~early[reader]
    across[across] = early[source[across]]
    needed = np.unique(problem.in_values[across])
    return Network(
        np.concatenate(
            [arcs(0, value_node + needed), arcs(op_node + reader[within], value_node + problem.in_values[within])]
        ),
        arcs(value_node + value, np.where(life.recomputable[maker], op_node + maker, 1)),
        size,
        arcs(op_node + again, 1),
        problem.cost[again],
    )


def cut_seeds(problem: Problem, base_order: Ints, budget: int, deadline: Deadline) -> list[Schedule]:
    """Return distinct schedules of a sweep of prices, cheapest first, and mixtures of the two next to the budget; those
    of the prices that there is time for."""
    split = split_step(problem, base_order)
    network = saving(problem, base_order, split)
    unit = (float(problem.cost.sum()) or 1.0) / (float(problem.lifetimes.nbytes.sum()) or 1.0)

    def dropped(price: float) -> Flags:
        flags = np.zeros(problem.n_ops, np.bool_)
        flags[network.again[network.cut(price * unit).again, 0] - 2] = True
        return flags

    def schedule(flags: Flags) -> Schedule:
        return materialize(problem, base_order, flags, split)

    def keeps(flags: Flags) -> bool:
        return simulate(problem, schedule(flags)).peak <= budget

    found: list[Flags] = []
    above, before = 0.0, np.zeros(problem.n_ops, np.bool_)
    within: tuple[float, Flags] | None = None
    for price in _PRICES.tolist():
        if deadline.passed():
            break
        if not np.array_equal(flags := dropped(price), found[-1] if found else before):
            found.append(flags)
            if within is None and keeps(flags):
                within = price, flags
        if within is None:
            above, before = price, flags
    if within is None:
        return [*map(schedule, found)]
    price, after = within
    for _ in range(_BISECTIONS):
        if deadline.passed():
            break
        middle = math.sqrt(above * price) if above else price / 2
        if keeps(flags := dropped(middle)):
            price, after = middle, flags
        else:
            above, before = middle, flags
    mixed = [] if deadline.passed() else _mixtures(base_order, before, after, keeps)
    return [*map(schedule, found), *map(schedule, (after, *mixed))]


def _mixtures(base_order: Ints, before: Flags, after: Flags, keeps: Callable[[Flags], bool]) -> Iterator[Flags]:
    """Yield `before` plus the fewest additional ops of `after` that meet the budget: first ops first, then last first.

    A network of equal layers has few minimum cuts, each of which treats all layers alike: these mixtures treat some
    layers as one cut does and the others as the next.
    """
    more = base_order[(after & ~before)[base_order]]
    for of in (more, more[::-1]):
        few, many = 0, len(of)
        while many - few > 1:
            flags = before.copy()
            flags[of[: (middle := (few + many) // 2)]] = True
            few, many = (few, middle) if keeps(flags) else (middle, many)
        flags = before.copy()
        flags[of[:many]] = True
        yield flags


@register("min_cut")
def min_cut(request: Request) -> Schedule:
    """Priced min-cut between forward and backward (AOTAutograd's partitioner, recompute cost in the cut)."""
    cuts = cut_seeds(request.problem, request.baseline.array(), request.budget, request.deadline)
    return cheapest_within(request, [request.baseline, *cuts])
