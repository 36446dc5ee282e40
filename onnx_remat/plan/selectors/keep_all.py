"""Reordering without recompute: the peak it reaches costs no extra compute."""

from __future__ import annotations

from functools import partial

from onnx_remat.memory.donation import after_readers
from onnx_remat.memory.problem import Schedule
from onnx_remat.plan.request import Deadline, Request, register
from onnx_remat.plan.search.candidates import Candidate, Heat, annealed, apart, priced
from onnx_remat.plan.search.core import LivenessModel, liveness_model
from onnx_remat.plan.search.effort import allowance
from onnx_remat.plan.search.orders import list_schedules
from onnx_remat.plan.search.tuning import COARSE, FINE, ORDERS_IMPROVED, REORDER_HEAT, ROUND_SHARE


def lowered(view: LivenessModel, plan: Candidate, budget: int, work: int, deadline: Deadline) -> Candidate:
    """Reorder until a plan fits: lower its peak in small steps, for as long as that succeeds."""
    step, spent, per_round = COARSE, 0, max(20, int(work * ROUND_SHARE))
    while plan.peak > budget and step >= FINE and spent < work and not deadline.passed():
        aim = max(budget, int(plan.peak * (1 - step)))
        run = partial(annealed, view, plan, aim, per_round, Heat(*REORDER_HEAT), spent, recompute=False)
        new = apart(run, deadline)
        spent += per_round
        if new.peak < plan.peak:
            plan = priced(view.problem, new.schedule.order, budget)
        else:
            step /= 2
    return plan


def reordered(request: Request, view: LivenessModel, work: int) -> list[Candidate]:
    """Return plans without recompute, lowest peak first; the baseline and the file's order are among them."""
    problem, budget = request.problem, request.budget
    if request.fixed_order:
        return [priced(problem, tuple(range(problem.n_ops)), budget)]
    baseline = request.baseline.array()
    orders = [baseline, after_readers(problem, range(problem.n_ops)), *list_schedules(problem, baseline)]
    found = [priced(problem, order, budget) for order in orders]
    found.sort(key=lambda plan: plan.peak)
    tops = found[:ORDERS_IMPROVED] if found[0].over else []
    improved = [lowered(view, plan, budget, work // ORDERS_IMPROVED, request.deadline) for plan in tops]
    return sorted([*improved, *found], key=lambda plan: plan.peak)


@register("keep_all")
def keep_all(request: Request) -> Schedule:
    """Reorder only: greedy list schedules and local moves, no recompute."""
    view = liveness_model(request.problem, request.fixed_order)
    return reordered(request, view, allowance(request) // 4)[0].schedule
