"""Budget-driven search: several seeds, mended and pruned against the exact simulator, then improved while
work is left.

Seeds are the orders of `keep_all`, priced cuts and segment plans; peak splitting takes each under the budget,
pruning takes back what became needless, large neighbourhood search makes the best cheaper. Values may be
recomputed more than once, and order is part of the plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnx_remat.schedule import Ints, Schedule
from onnx_remat.selectors.base import Request, register
from onnx_remat.selectors.effort import allowance
from onnx_remat.selectors.keep_all import lower_peak, reordered
from onnx_remat.selectors.kernels import Flat, cost_of, flatten, score, strip
from onnx_remat.selectors.lns import improve
from onnx_remat.selectors.min_cut import cut_seeds
from onnx_remat.selectors.peak_split import NO_LUCK, prune, relieve
from onnx_remat.selectors.sqrt_n import segment_seeds

_TOP = 4  # candidates priced exactly per peak while mending
_ORDERS = 3  # orders without recompute that seeds are built on
_TIGHTER = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)  # budgets of plain liveness tried where buffers are shared
_IMPROVED = 3  # plans that large neighbourhood search is given
_SEEDING, _SPREAD = 0.4, 0.3  # shares of the work for seeds and for choosing among improved plans
_DESCENT = 0.02  # share of the peak taken off at a time when the budget is out of reach


@dataclass(frozen=True, slots=True)
class Plan:
    """An order with what the simulator says of it; plans sort from best to worst."""

    order: Ints
    over: bool
    cost: float
    peak: int

    @property
    def key(self) -> tuple[bool, float, float]:
        """Within the budget the cheaper is better, beyond it the lower."""
        return (True, float(self.peak), self.cost) if self.over else (False, self.cost, float(self.peak))


def priced(order: Ints, flat: Flat, budget: int) -> Plan:
    """`order` as a `Plan`; `budget` excludes the residents."""
    peak = int(score(order, flat, budget)[1])
    return Plan(order, peak > budget, float(cost_of(order, flat)), peak)


def mended(order: Ints, flat: Flat, budget: int, evals: int) -> tuple[Plan, int]:
    """The plan that peak splitting and pruning make of `order`, and the evaluations spent."""
    order = strip(order, flat, np.zeros(len(order), np.bool_))
    order, _, spent = relieve(order, flat, budget, True, NO_LUCK, max(1, evals), _TOP)
    order, used = prune(order, flat, budget, max(1, evals - spent))
    return priced(order, flat, budget), spent + used + 1


def seed_orders(request: Request, flat: Flat, evals: int) -> list[Ints]:
    """Starting points of the search, in a fixed order of preference."""
    problem = request.problem
    plain = reordered(request, flat, evals // 10)
    tops = plain[:_ORDERS]
    seeds = list(tops)
    budget = request.budget - problem.base_bytes
    if problem.poolable.any():
        unshared = flat._replace(poolable=np.zeros_like(problem.poolable))
        for order in tops[:2]:
            seeds += [
                relieve(order, unshared, int(budget * share), True, NO_LUCK, evals // 20, _TOP)[0]
                for share in _TIGHTER
            ]
    bases = tops[:1] if request.fixed_order else [tops[0], request.baseline.array()]
    for order in bases:
        seeds += [schedule.array() for schedule in segment_seeds(problem, order)]
        seeds += [schedule.array() for schedule in cut_seeds(problem, order)]
    return seeds


def find(request: Request) -> Plan:
    """The best plan within the allowance."""
    problem = request.problem
    flat = flatten(problem, request.fixed_order)
    budget = request.budget - problem.base_bytes
    evals = allowance(request)
    plans: list[Plan] = []
    spent = 0
    seeds = seed_orders(request, flat, evals)
    for i, order in enumerate(seeds):
        if plans and spent > evals * _SEEDING:
            break
        request.progress("seeds", _SEEDING * i / len(seeds))
        plan, used = mended(order, flat, budget, int(evals * _SEEDING) - spent)
        spent += used
        plans.append(plan)
    plans.sort(key=lambda plan: plan.key)
    if plans[0].over:
        return _lowest(plans, flat, budget, evals - spent)
    share = int(evals * _SPREAD) // _IMPROVED
    for i, plan in enumerate(plans[:_IMPROVED]):
        if spent >= evals or plan.over:
            break
        request.progress("improving", _SEEDING + _SPREAD * i / _IMPROVED)
        order, used = improve(plan.order, flat, budget, min(share, evals - spent), request.seed + i)
        spent += used
        plans.append(priced(order, flat, budget))
    best = min(plans, key=lambda plan: plan.key)
    if spent < evals:
        request.progress("improving", _SEEDING + _SPREAD)
        order, _ = improve(best.order, flat, budget, evals - spent, request.seed + _IMPROVED)
        best = min(best, priced(order, flat, budget), key=lambda plan: plan.key)
    request.progress("done", 1.0)
    return best


def _lowest(plans: list[Plan], flat: Flat, budget: int, evals: int) -> Plan:
    """Where no seed meets the budget: press the lowest ones further down."""
    found = list(plans)
    for plan in plans[:_IMPROVED]:
        order, _ = lower_peak(plan.order, flat, evals // (2 * _IMPROVED), evict=True)
        found.append(priced(order, flat, budget))
    found.sort(key=lambda plan: plan.key)
    if found[0].over:
        aim = max(budget, int(found[0].peak * (1 - _DESCENT)))
        order, _ = improve(found[0].order, flat, aim, evals // 4, 0)
        found.append(priced(order, flat, budget))
    best = min(found, key=lambda plan: plan.key)
    if not best.over:
        order, _ = improve(best.order, flat, budget, evals // 4, 1)
        best = min(best, priced(order, flat, budget), key=lambda plan: plan.key)
    return best


@register("search")
def search(request: Request) -> Schedule:
    """Ours: cuts, segments and peak splitting, improved against the exact simulator; any order."""
    return Schedule(tuple(find(request).order.tolist()))
