"""Offload: plans that move values to the host's memory and back where that costs less than recompute.

The first plan moves nothing. The values worth moving are those allocated at its peak and those whose recompute costs
more than a move; the next plan may move them and starts from the plan before. This repeats while plans improve.

Copies run alongside the kernels (`session.overlap`), as far as the budget has room for what is on its way. So a move
costs what kernels wait for it. That is known once there is a file: the next plan pays for the share that they waited
for in the file before. Where kernels wait for long, the next plan is for less memory, which leaves room for copies, and
pays for a share between that one and the one that the file was planned with.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from onnx_remat.errors import BudgetInfeasibleError
from onnx_remat.memory.donation import after_readers
from onnx_remat.memory.problem import Schedule
from onnx_remat.options import Options
from onnx_remat.ort.host_state import when_due
from onnx_remat.ort.moves import Link, adjoined, carried, movable, moved, split, worth_moving
from onnx_remat.ort.renewed import with_donations
from onnx_remat.plan.request import Deadline
from onnx_remat.rewrite.accounting import Goal, LoopMemory
from onnx_remat.rewrite.fit import fit, fit_as_it_is
from onnx_remat.rewrite.plan_files import Fitted, Work, for_budget
from onnx_remat.rewrite.plans import TooLittleTime, make_plan
from onnx_remat.session import prediction
from onnx_remat.session.copies import Stated
from onnx_remat.session.offsets import least
from onnx_remat.session.overlap import overlapped
from onnx_remat.units import format_bytes

_log = logging.getLogger(__name__)

_ROUNDS = 4  # plans that may move values
_ROOM = 0.93  # of the memory that the plan before was for, for one that leaves more room for copies
_LONG = 0.1  # share of the copies' time that kernels wait for, above which such a plan is made
_TOO_LONG = 0.5  # share above which a first plan moves too much: the next one pays for it, with the same memory
_FREE = 0.001  # extra compute below which no other plan is looked for
_FITS, _LESS = 8, 0.03  # layouts with overlap for one file, each with less room than the last: by this share at least
_SHARE = 0.4  # of the time limit for the plan without moves, and of the rest for each later plan
_HOPED, _LEAST_WAITED = 0.1, 0.02  # share of its time that a move is taken to cost: first, and at least
_START_HEADROOM = 1.02  # on the lowest budget found, for the plan to start from
_LOOK = 0.25  # of the effort for that plan


def fit_once_with_moves(goal: Goal, work: Work) -> tuple[int, Fitted]:
    """Return a file that keeps the budget, and the bytes that it takes, as `fit.fit_once` counts them."""
    made = fit_with_moves(goal, work)
    assert isinstance(goal.memory, LoopMemory) and made.footprint, "offload is a loop's, see Options"
    return goal.memory.counted(made.footprint), made


def fit_with_moves(goal: Goal, work: Work, rival: Fitted | None = None) -> Fitted:
    """Run `fit.fit` with and without moves to the host; return the plan with the least extra compute.

    A `rival` that keeps the budget is returned unless there is a better one.

    Raises
    ------
    BudgetInfeasibleError
        Neither kind was found.
    """
    options = work.options
    memory, link = goal.memory, replace(options.link(), waited=_HOPED if options.fuse else 1.0)
    assert isinstance(memory, LoopMemory), "offload is a loop's, see Options"
    if not options.offload:
        return _with_state_alone(goal, work, rival)
    compiled = memory.compiled
    best: Fitted | None = None
    refusal: BudgetInfeasibleError | None = None
    try:
        best = fit(goal, replace(work, deadline=work.clock(_SHARE)))
        best = _overlapped(best, goal)
        start = best.plan.compiled, best.plan.schedule
    except BudgetInfeasibleError as error:
        refusal = error
        start = compiled, _lowest(goal, error, options, work.clock(_SHARE))
    before: tuple[set[str], Link, int] | None = None
    allowed = goal.allowed
    for turn in range(_ROUNDS):
        if turn and work.ends_soon():
            break
        names = set(worth_moving(*start, link, at_any_price=best is None))
        if turn and best is None:  # nothing less will do
            names.update(movable(compiled))
        if not names or (names, link, allowed) == before:
            break
        before = names, link, allowed
        larger = with_donations(split(compiled, names, link))
        known = carried(start[1].order, start[0], larger)
        its = replace(goal, allowed=allowed, memory=memory.with_moves(larger))
        rest = replace(work, deadline=work.clock(_SHARE))
        try:
            found = for_budget(fit(its, rest, (known,)), goal.allowed)
        except BudgetInfeasibleError as error:
            if best is not None:
                if allowed == goal.allowed:
                    break
                allowed = goal.allowed
                continue
            if not (refusal and isinstance(error, TooLittleTime)):  # what a refusal says is of more use
                refusal = error
            start = larger, known
            continue
        found = _overlapped(found, goal)
        start = larger, found.plan.schedule
        waited = _waited(found)
        _log.info(
            "moves at %.2f of their time, for %s: %d, of which kernels wait for %.2f; +%.1f %% compute, %.2f ms",
            link.waited, format_bytes(allowed), len(found.written.moved), waited, 100 * found.plan.extra_compute,
            1e3 * found.footprint.seconds if found.footprint else 0.0,
        )  # fmt: skip
        better = best is None or found.preference() < best.preference()
        best = found if better else best
        if found.plan.extra_compute < _FREE or not (better or turn == 0):
            break
        share = waited
        if waited > _LONG and (turn or waited <= _TOO_LONG):
            allowed = int(allowed * _ROOM)
        if _LONG < waited <= _TOO_LONG:  # in part for want of room, of which the next plan leaves more
            share = (link.waited * waited) ** 0.5
        link = replace(link, waited=max(share, _LEAST_WAITED))
    found_or_given = [each for each in (best, rival) if each is not None]
    if not found_or_given:
        assert refusal is not None
        raise refusal
    return min(found_or_given, key=Fitted.preference)


def fit_unplanned(goal: Goal, work: Work) -> Fitted:
    """Return the file of the model as it is, but with its state on the host, whatever it takes."""
    return _overlapped(fit_as_it_is(goal, work), goal)


def _with_state_alone(goal: Goal, work: Work, rival: Fitted | None) -> Fitted:
    """As `fit_with_moves`, where no value is moved but state."""
    try:
        best = _overlapped(fit(goal, work), goal)
    except BudgetInfeasibleError:
        if rival is None:
            raise
        return rival
    return best if rival is None else min(best, rival, key=Fitted.preference)


def _waited(made: Fitted) -> float:
    """Return the share of the copies' time that kernels wait for; 1 where nothing is copied."""
    found = made.footprint
    return found.waited / found.copies if found and found.copies else 1.0


def _overlapped(made: Fitted, goal: Goal) -> Fitted:
    """Return a file whose copies run alongside the kernels as far as the budget has room, with what that costs."""
    memory, footprint, stated = goal.memory, made.footprint, Stated.of(made.written.model)
    assert isinstance(memory, LoopMemory), "offload is a loop's, see Options"
    if stated is None or footprint is None:
        return made
    best = footprint
    if memory.options.fuse:
        arranged = prediction.without_overlap(made.executed[memory.levels()[-1]])
        smallest = least(arranged.compiled.kernels)
        live = footprint.live + max(goal.allowed - memory.counted(footprint), 0)
        for _ in range(_FITS):
            tried = replace(stated, live=live)
            tried.put(arranged.compiled.graph.model)
            found = prediction.footprint(overlapped(arranged, smallest), memory.options.costs)
            over = memory.counted(found) - goal.allowed
            if over <= 0:
                if found.seconds < best.seconds:
                    stated, best = tried, found
                break
            # Values on their way leave gaps: the slab is larger than what is live.
            live = max(live - max(over, int(live * _LESS)), 1)
    for model in (made.written.model, *(each.compiled.graph.model for each in made.executed.values())):
        stated.put(model)
    plain = moved(made.plan.compiled, made.plan.schedule)
    waited = max(best.waited - memory.waited, 0.0) / made.plan.compiled.problem.plain_cost()
    recomputed = max(made.plan.extra_compute - (plain.share if plain else 0.0), 0.0)  # not a rounding error below
    return replace(made, plan=replace(made.plan, extra_compute=recomputed + waited), footprint=best)


def _lowest(goal: Goal, error: BudgetInfeasibleError, options: Options, deadline: Deadline) -> Schedule:
    """Return the lowest schedule found without moves."""
    compiled, kept = goal.memory.compiled, goal.memory.bookkeeping
    allowed = goal.memory.budget_for(int((error.best_peak_bytes - kept) * _START_HEADROOM))
    within = replace(goal, allowed=allowed)
    less = replace(options, effort=options.work_seconds() * _LOOK)
    try:
        return make_plan(within, within.target(), less, deadline).schedule
    except BudgetInfeasibleError:
        order = after_readers(compiled.problem, when_due(compiled, compiled.default_order().order))
        return adjoined(compiled.problem, order.tolist())
