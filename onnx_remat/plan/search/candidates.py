"""Candidate plans: orders with their simulated peak and cost, and annealing from one to a better one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat
from typing import TypeVar

import numpy as np

from onnx_remat.memory.buffers import simulate
from onnx_remat.memory.problem import Ints, Longs, Problem, Schedule
from onnx_remat.plan.request import Deadline, Request
from onnx_remat.plan.search.anneal import anneal
from onnx_remat.plan.search.core import LivenessModel
from onnx_remat.plan.search.loading import load
from onnx_remat.plan.search.state import EXCESS, FIXED, State, empty_state
from onnx_remat.plan.search.tuning import FIRST_PRICE, LANES


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule with its simulated peak, its cost, and whether the peak exceeds the budget (`over`)."""

    schedule: Schedule
    over: bool
    cost: float
    peak: int

    @property
    def key(self) -> tuple[bool, float, float]:
        """Sort key, best first: within the budget by cost, above it by peak."""
        return (True, float(self.peak), self.cost) if self.over else (False, self.cost, float(self.peak))


def priced(problem: Problem, order: Ints | tuple[int, ...], budget: int) -> Candidate:
    """Simulate `order` and return it as a `Candidate`."""
    schedule = Schedule(tuple(np.asarray(order).tolist()))
    peak = simulate(problem, schedule).peak
    return Candidate(schedule, peak > budget, float(problem.cost[schedule.array()].sum()), peak)


def best_of(plans: list[Candidate]) -> Candidate:
    """Return the best plan, the first of equals."""
    return min(plans, key=lambda plan: plan.key)


def cheapest_within(request: Request, schedules: Sequence[Schedule]) -> Schedule:
    """Return the schedule of least overhead among those within the budget, otherwise that of the lowest peak."""
    return best_of([priced(request.problem, schedule.order, request.budget) for schedule in schedules]).schedule


_Job = TypeVar("_Job")


def in_parallel(run: Callable[[_Job, Longs], Candidate], jobs: Sequence[_Job], deadline: Deadline) -> list[Candidate]:
    """Map `run` over jobs and the `stop` of `annealed`, `LANES` at a time; the kernels release the GIL.

    The kernels stop at the deadline, and where a signal handler raises an exception: handlers run in the main thread,
    which therefore runs no kernel, and leaving the pool waits for those that run.
    """
    with deadline.flag() as stop, ThreadPoolExecutor(LANES) as pool:
        try:
            return list(pool.map(run, jobs, repeat(stop)))
        except BaseException:
            stop[0] = 1
            raise


def apart(run: Callable[[Longs], Candidate], deadline: Deadline) -> Candidate:
    """Run one annealing as `in_parallel` runs several."""
    return in_parallel(lambda job, stop: job(stop), [run], deadline)[0]


@dataclass(frozen=True, slots=True)
class Heat:
    """Temperatures of an annealing run, in average ops' costs."""

    hot: float
    cold: float


def fits(view: LivenessModel, plan: Candidate, budget: int) -> bool:
    """Whether a plan meets a budget by liveness alone, the model that annealing uses."""
    return bool(_loaded(view, view.contract(plan.schedule.order), budget).totals[EXCESS] == 0)


def _loaded(view: LivenessModel, order: Ints, budget: int) -> State:
    state = empty_state(view.core, order, budget - view.problem.base_bytes)
    load(state, order)
    return state


def annealed(
    view: LivenessModel,
    plan: Candidate,
    budget: int,
    work: int,
    heat: Heat,
    seed: int,
    stop: Longs,
    recompute: bool = True,
    keep: bool = False,
) -> Candidate:
    """Anneal from a plan and return the result, better or worse; the plan itself if it must stop at once.

    The parameters are those of `improved`, except that the start is a plan.
    """
    order = view.contract(plan.schedule.order)
    if not len(order):
        return plan
    if stop[0]:
        return replace(plan, over=plan.peak > budget)
    found = improved(view, order, budget, work, heat, seed, stop, recompute, keep)
    return priced(view.problem, view.expand(found), budget)


def improved(
    view: LivenessModel,
    order: Ints,
    budget: int,
    work: int,
    heat: Heat,
    seed: int,
    stop: Longs,
    recompute: bool,
    keep: bool,
) -> Ints:
    """Anneal from an order and return the best order found.

    Parameters
    ----------
    view : LivenessModel
        The liveness model.
    order : int32 (n,)
        Where to start, without views.
    budget : int
        Bytes, residents included.
    stop : int64 (1,)
        See `anneal`.
    recompute : bool
        False to reorder only.
    keep : bool
        Pin first executions to their places. A model with a fixed order always does so, and then no recompute precedes
        its op's first execution.
    """
    core = view.core
    state = _loaded(view, order, budget)
    if not recompute:
        state.ops["again"][:] = 0
    if view.fixed_order or keep:
        placed = state.at[state.at >= 0]
        state.totals[FIXED] = view.fixed_order
        state.events["pinned"][placed[np.unique(order, return_index=True)[1]]] = 1
    unit = float(core.cost[view.ops].mean()) or 1.0
    size = float(core.nbytes[core.out_values].mean()) or 1.0
    found, _ = anneal(
        state, np.array([seed * 7919 + 104729], np.uint64), float(core.cost[order].sum()),
        float(core.cost[view.ops].sum()), work, heat.hot * unit, heat.cold * unit, FIRST_PRICE * unit / size, stop,
    )  # fmt: skip
    return found  # type: ignore[no-any-return]
