"""Priced min-cut: what to save and what to recompute, as one maximum flow per price.

AOTAutograd's partitioner minimises the bytes saved for backward and treats recomputing as free or forbidden.
With two 0/1 variables per op (result available to backward, op run again) recompute cost fits into the same
cut: minimise ``price * bytes saved + cost of what runs again`` subject to "backward finds what it reads" and
"what runs again finds its inputs". Every term is pairwise submodular, so it is one min-cut, and sweeping the
price walks the Pareto front.

References
----------
Horace He, Shangdi Yu: Transcending the runtime-memory tradeoff in checkpointing by being fusion aware, MLSys
2023.
"""

from __future__ import annotations

import numpy as np
from ortools.graph.python import max_flow

from onnx_remat.memory import simulate
from onnx_remat.schedule import Flags, Ints, Problem, Schedule
from onnx_remat.selectors.base import Request, register
from onnx_remat.selectors.materialize import materialize, split_step

_UNITS = 10**9  # the sum of all costs in integer capacities
_FOREVER = 10**15
_PRICES = np.geomspace(1e-4, 1e2, 25)  # bytes against cost, both as fractions of their totals


def priced_cut(problem: Problem, base_order: Ints, split: int, price: float) -> Flags:
    """Ops to drop at step `split` of `base_order` when saving everything costs `price` times running
    everything.

    Returns
    -------
    bool (n_ops,)
        Ops that run again.
    """
    early = base_order[:split]
    in_early = np.zeros(problem.n_ops, np.bool_)
    in_early[early] = True
    made_by = problem.producer()
    saveable = float(problem.nbytes[~problem.resident].sum()) or 1.0
    total_cost = float(problem.cost.sum()) or 1.0
    source, sink = 0, 1
    op_node = 2 + np.arange(problem.n_ops)
    value_node = 2 + problem.n_ops + np.arange(problem.n_values)
    tails: list[int] = []
    heads: list[int] = []
    capacities: list[int] = []

    def arc(tail: int, head: int, capacity: int) -> None:
        tails.append(int(tail))
        heads.append(int(head))
        capacities.append(capacity)

    for op in sorted(int(o) for o in early):
        again = int(problem.cost[op] / total_cost * _UNITS) + 1 if problem.recomputable[op] else _FOREVER
        arc(op_node[op], sink, again)
        for k in range(problem.out_ptr[op], problem.out_ptr[op + 1]):
            value = problem.out_values[k]
            save = int(price * problem.nbytes[value] / saveable * _UNITS)
            if problem.is_output[value]:
                save = 0
            elif problem.alias_slot[k] >= 0 and problem.recomputable[op]:
                save = _FOREVER  # a view is taken again from what it views
            arc(value_node[value], op_node[op], save)
        for value in problem.inputs(op):
            if made_by[value] >= 0:
                arc(op_node[op], value_node[value], _FOREVER)
    needed = np.zeros(problem.n_values, np.bool_)
    for op in base_order[split:]:
        needed[problem.inputs(int(op))] = True
    for value in np.flatnonzero(needed & (made_by >= 0)):
        if in_early[made_by[value]]:
            arc(source, value_node[value], _FOREVER)
    flow = max_flow.SimpleMaxFlow()
    flow.add_arcs_with_capacity(np.array(tails, np.int32), np.array(heads, np.int32), np.array(capacities, np.int64))
    flow.solve(source, sink)
    dropped = np.zeros(problem.n_ops, np.bool_)
    for node in flow.get_source_side_min_cut():
        if 2 <= node < 2 + problem.n_ops:
            dropped[node - 2] = True
    return dropped & in_early & problem.recomputable


def cut_seeds(problem: Problem, base_order: Ints) -> list[Schedule]:
    """Distinct schedules of a sweep of prices, cheapest first."""
    split = split_step(problem, base_order)
    found: list[Schedule] = []
    previous = np.zeros(problem.n_ops, np.bool_)
    for price in _PRICES:
        dropped = priced_cut(problem, base_order, split, float(price))
        if not np.array_equal(dropped, previous):
            found.append(materialize(problem, base_order, dropped, split))
        previous = dropped
    return found


def cheapest_within(request: Request, schedules: list[Schedule]) -> Schedule:
    """Least overhead among those that meet the budget, else the lowest peak."""

    def key(schedule: Schedule) -> tuple[bool, float, int]:
        peak = simulate(request.problem, schedule).peak
        over = peak > request.budget
        return over, float(peak) if over else schedule.overhead(request.problem), peak

    return min(schedules, key=key)


@register("min_cut")
def min_cut(request: Request) -> Schedule:
    """Priced min-cut between forward and backward (AOTAutograd's partitioner, recompute cost in the cut)."""
    return cheapest_within(request, [request.baseline, *cut_seeds(request.problem, request.baseline.array())])
