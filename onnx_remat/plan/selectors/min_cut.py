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

from onnx_remat.plan.flow import Network
from onnx_remat.plan.request import Request, register
from onnx_remat.plan.search.plans import cheapest_within
from onnx_remat.plan.selectors.materialize import materialize, split_step
from onnx_remat.problem import Ints, Problem, Schedule

_PRICES = np.geomspace(1e-4, 1e2, 25)  # bytes against cost, both as fractions of their totals


def saving(problem: Problem, base_order: Ints, split: int) -> Network:
    """What backward, from step `split` of `base_order` on, may find saved or have made again.

    Op vertices are ``2 + op``; graph outputs are saved at no price, views are taken again from what they view.
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
    return Network(
        (value_node + np.unique(problem.in_values[across])).astype(np.int32),
        np.stack([value_node + value, np.where(life.recomputable[maker], op_node + maker, 1)], 1).astype(np.int32),
        size, (op_node + again).astype(np.int32), problem.cost[again],
        np.stack([op_node + reader[within], value_node + problem.in_values[within]], 1).astype(np.int32),
    )  # fmt: skip


def cut_seeds(problem: Problem, base_order: Ints) -> list[Schedule]:
    """Distinct schedules of a sweep of prices, cheapest first."""
    split = split_step(problem, base_order)
    network = saving(problem, base_order, split)
    unit = float(problem.cost.sum()) / (float(problem.lifetimes.nbytes.sum()) or 1.0)
    found: list[Schedule] = []
    previous = np.zeros(problem.n_ops, np.bool_)
    for price in _PRICES:
        dropped = np.zeros(problem.n_ops, np.bool_)
        dropped[network.cut(float(price) * unit).again - 2] = True
        if not np.array_equal(dropped, previous):
            found.append(materialize(problem, base_order, dropped, split))
        previous = dropped
    return found


@register("min_cut")
def min_cut(request: Request) -> Schedule:
    """Priced min-cut between forward and backward (AOTAutograd's partitioner, recompute cost in the cut)."""
    return cheapest_within(request, [request.baseline, *cut_seeds(request.problem, request.baseline.array())])
