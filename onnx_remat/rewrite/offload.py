"""Offload: plans that move values to the host's memory and back where that costs less than recompute.

The first plan moves nothing. The values worth moving are those allocated at its peak and those whose recompute costs
more than a move; the next plan may move them and starts from the plan before. This repeats while plans improve.
"""

from __future__ import annotations

from dataclasses import replace

from onnx_remat.errors import BudgetInfeasibleError
from onnx_remat.memory.donation import after_readers
from onnx_remat.memory.problem import Schedule
from onnx_remat.options import Options
from onnx_remat.ort.moves import adjoined, carried, movable, split, worth_moving
from onnx_remat.ort.renewed import with_donations
from onnx_remat.plan.request import Deadline
from onnx_remat.rewrite.accounting import Goal, LoopMemory
from onnx_remat.rewrite.fit import Fitted, Work, fit
from onnx_remat.rewrite.plans import TooLittleTime, make_plan

_ROUNDS = 3  # plans that may move values
_SHARE = 0.4  # of the time limit for the plan without moves, and of the rest for each later plan
_START_HEADROOM = 1.02  # on the lowest budget found, for the plan to start from
_LOOK = 0.25  # of the effort for that plan


def fit_once_with_moves(goal: Goal, work: Work, seconds_per_file: float) -> tuple[int, Fitted]:
    """Return a file that keeps the budget, and the bytes that it takes, as `fit.fit_once` counts them."""
    made = fit_with_moves(goal, work, seconds_per_file)
    assert isinstance(goal.memory, LoopMemory) and made.footprint, "offload is a loop's, see Options"
    return goal.memory.counted(made.footprint), made


def fit_with_moves(goal: Goal, work: Work, seconds_per_file: float, rival: Fitted | None = None) -> Fitted:
    """Run `fit.fit` with and without moves to the host; return the plan with the least extra compute.

    A `rival` that keeps the budget is returned unless there is a better one.

    Raises
    ------
    BudgetInfeasibleError
        Neither kind was found.
    """
    options, deadline = work.options, work.deadline
    memory, link = goal.memory, options.link()
    assert isinstance(memory, LoopMemory), "offload is a loop's, see Options"
    compiled = memory.compiled
    best: Fitted | None = None
    refusal: BudgetInfeasibleError | None = None
    try:
        best = fit(goal, replace(work, deadline=deadline.sooner(seconds_per_file, _SHARE)), seconds_per_file)
        start = best.plan.compiled, best.plan.schedule
    except BudgetInfeasibleError as error:
        refusal = error
        start = compiled, _lowest(goal, error, options, deadline.sooner(seconds_per_file, _SHARE))
    before: set[str] = set()
    for turn in range(_ROUNDS):
        if turn and deadline.ends_within(seconds_per_file):
            break
        names = set(worth_moving(*start, link, at_any_price=best is None))
        if turn and best is None:  # nothing less will do
            names.update(movable(compiled))
        if not names or names == before:
            break
        before = names
        larger = with_donations(split(compiled, names, link))
        known = carried(start[1].order, start[0], larger)
        its = replace(goal, memory=memory.with_moves(larger))
        rest = replace(work, deadline=deadline.sooner(seconds_per_file, _SHARE))
        try:
            found = fit(its, rest, seconds_per_file, (known,))
        except BudgetInfeasibleError as error:
            if best is not None:
                break
            if not (refusal and isinstance(error, TooLittleTime)):  # what a refusal says is of more use
                refusal = error
            start = larger, known
            continue
        if best is not None and found.plan.extra_compute >= best.plan.extra_compute:
            break
        best, start = found, (larger, found.plan.schedule)
    found_or_given = [each for each in (best, rival) if each is not None]
    if not found_or_given:
        assert refusal is not None
        raise refusal
    return min(found_or_given, key=Fitted.preference)


def _lowest(goal: Goal, error: BudgetInfeasibleError, options: Options, deadline: Deadline) -> Schedule:
    """Return the lowest schedule found without moves."""
    compiled, kept = goal.memory.compiled, goal.memory.bookkeeping
    allowed = goal.memory.budget_for(int((error.best_peak_bytes - kept) * _START_HEADROOM))
    within = replace(goal, allowed=allowed)
    less = replace(options, effort=options.work_seconds() * _LOOK)
    try:
        return make_plan(within, within.target(), less, deadline).schedule
    except BudgetInfeasibleError:
        order = after_readers(compiled.problem, compiled.default_order().order)
        return adjoined(compiled.problem, order.tolist())
