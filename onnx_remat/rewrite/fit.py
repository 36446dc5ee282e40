"""Plan, write, and simulate the file as ONNX Runtime executes it, until it keeps the budget."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx

from onnx_remat.errors import BudgetInfeasibleError, ModelError, VerificationError
from onnx_remat.ir import metadata
from onnx_remat.memory.buffers import simulate
from onnx_remat.memory.problem import Schedule
from onnx_remat.messages import Message, Setting
from onnx_remat.options import Options
from onnx_remat.ort import runtime
from onnx_remat.ort.executed import Executed, at_levels
from onnx_remat.plan.request import Deadline
from onnx_remat.rewrite.accounting import MARGIN, Goal, LoopMemory, SessionMemory, simulated_levels
from onnx_remat.rewrite.plans import (
    REFUSAL_HEADROOM,
    SEARCHES,
    Looks,
    Plan,
    Refusal,
    TooLittleTime,
    as_it_is,
    first_look,
    make_plan,
    no_look,
    no_lower,
    untried,
)
from onnx_remat.rewrite.targets import MOST_GROWN, Targets, first_target
from onnx_remat.session.prediction import Footprint
from onnx_remat.units import format_bytes
from onnx_remat.version import __version__
from onnx_remat.write import private_buffers
from onnx_remat.write.decided import Rewritten
from onnx_remat.write.realize import realize
from onnx_remat.write.rounding import Direct

_log = logging.getLogger(__name__)

_NEAR_PEAK = 0.97  # of the target: steps above this count as peaks in the search for buffers whose sharing raises them
_TOLERATED_DELAY_SECONDS = 1.0  # seconds; an answer this late is better than none
_ADVISED_TIME_FACTOR = 2.0  # factor on the missing time that a refusal advises
_RESERVE_PER_FILE = 1.3  # times what the last file took: time reserved to write and simulate the next
_MOST_PLANS = 6  # most plans for one budget, where files miss a budget that their plans keep
_FIRST_PLAN_SHARE = 0.75  # of the time limit for the first plan: its file may miss the budget
_MOST_CORRECTED, _MOST_IDLE = 3, 2  # most plans with corrections from one file, and those in a row that gain nothing
_CORRECTED_EFFORT = 0.15  # of the effort for each of them
_CORRECTED_OPS = 4_000  # of the largest step with such plans: files of larger ones take long to simulate
_LEAST_CORRECTED_EFFORT = 3.0  # seconds of effort for each of them, or the whole effort if it is less
_LATER_PLAN_EFFORT = 0.5  # of the effort for each later plan, which starts from the ones before, until one is not found


Stage = Callable[[str], AbstractContextManager[None]]
"""A context manager for each stage of the work, by its name."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A plan, its file, and the file as ONNX Runtime executes it at each optimisation level.

    `footprint` is the memory of a loop with it, where the budget is for a loop.
    """

    plan: Plan
    written: Rewritten
    executed: Mapping[str, Executed]
    footprint: Footprint | None = None

    def preference(self) -> tuple[float, float]:
        """Return the order of preference among files: predicted step time, where known, then extra compute."""
        return self.footprint.seconds if self.footprint else 0.0, self.plan.extra_compute


@dataclass(frozen=True, slots=True)
class Work:
    """The context that all plans of a rewrite share.

    Attributes
    ----------
    original : Executed
        The original as ONNX Runtime executes it by default.
    folder : Path or None
        Where the model's external data lies.
    options : Options
    stage : callable
        Entered around each stage.
    deadline : Deadline
    """

    original: Executed
    folder: Path | None
    options: Options
    stage: Stage
    deadline: Deadline


def fit(
    goal: Goal,
    work: Work,
    seconds_per_file: float,
    known: tuple[Schedule, ...] = (),
    rival: Fitted | None = None,
) -> Fitted:
    """Return a plan and a file within the budget: the selector's best, else those of a first look.

    A `rival` that keeps the budget is returned unless there is a better one.

    Raises
    ------
    Refusal
        Neither keeps the budget. It carries the bytes of the first look's file, which is the same for every budget, so
        that the advised budget is one that was tried.
    """
    direct, options, deadline = Direct.of(goal.memory.compiled), work.options, work.deadline
    look = cache(lambda: first_look(goal, options, deadline.sooner(seconds_per_file, 1.0)))

    def from_looks(looks: Looks) -> tuple[int, Fitted]:
        worst, best = _lowest_file(looks, goal, work, seconds_per_file, direct)
        if worst <= goal.allowed and _can_correct(goal, options, best):
            best = _corrected(best, best, goal, work, seconds_per_file, known, direct, []) or best
        return worst, best

    try:
        best = _attempts(goal, work, seconds_per_file, known, direct, look)
        hard = look.cache_info().currsize > 0  # a plan was refused
        if hard and rival is None and _can_correct(goal, options, best) and not deadline.ends_within(seconds_per_file):
            taken, other = from_looks(look())
            if taken <= goal.allowed and other.preference() < best.preference():
                best = other
    except TooLittleTime:
        if rival is None:
            raise
        best = rival
    except Refusal as refusal:
        if rival is None:
            if deadline.ends_within(seconds_per_file):
                raise
            taken, best = from_looks(refusal.looks)
            if taken > goal.allowed:
                if options.arena:  # which buffers are shared, and so what the arena takes, depends on the budget
                    taken = int(taken * REFUSAL_HEADROOM)
                refusal.looked = taken if taken < goal.memory.covered else 0
                raise
        else:
            best = rival
    if rival is not None and rival.preference() < best.preference():
        best = rival
    return replace(best, executed=_at_other_levels(best, work, seconds_per_file))


def fit_once(goal: Goal, work: Work, seconds_per_file: float) -> tuple[int, Fitted]:
    """Return the file of one plan for a budget, and the bytes that it takes: more than the budget or less.

    Raises
    ------
    BudgetInfeasibleError
        No plan was found.
    """
    direct, first, deadline = Direct.of(goal.memory.compiled), first_target(goal), work.deadline
    for target in dict.fromkeys((first, goal.target())):
        with work.stage("plan"):
            try:
                plan = make_plan(goal, target, work.options, deadline.sooner(seconds_per_file, 1.0), ())
            except BudgetInfeasibleError:
                if target == goal.target():
                    raise
                continue
        break
    return _written_and_simulated(plan, goal, target, work, direct)


def fit_as_it_is(goal: Goal, work: Work, seconds_per_file: float) -> Fitted:
    """Return the file of the model without any recompute, whatever it takes."""
    plan = as_it_is(goal)
    _, made = _written_and_simulated(plan, goal, plan.timeline.peak, work, Direct.of(goal.memory.compiled))
    return replace(made, executed=_at_other_levels(made, work, seconds_per_file))


def for_budget(made: Fitted, allowed: int) -> Fitted:
    """Return a file that keeps a budget, made for another one, as a file for that budget."""
    metadata.set_entry(made.written.model, metadata.BUDGET_KEY, str(allowed))
    return replace(made, plan=replace(made.plan, budget=allowed))


def _attempts(
    goal: Goal,
    work: Work,
    seconds_per_file: float,
    known: tuple[Schedule, ...],
    direct: Direct,
    look: Callable[[], Looks],
) -> Fitted:
    """Plan, write and simulate the file, until it is within the budget; see `Targets` for what is tried.

    No plan begins if its file could not be simulated before `deadline`: each leaves the time that the previous file
    took to write and simulate, `seconds_per_file` seconds at first.
    """
    allowed, memory, options, deadline = goal.allowed, goal.memory, work.options, work.deadline
    targets = Targets(goal, first_target(goal))
    plans: tuple[Schedule, ...] = ()
    best: Fitted | None = None
    missed: Fitted | None = None  # the best file that exceeds the budget
    refused: BudgetInfeasibleError | None = None
    whole = False  # whether later plans take the whole effort, too
    _check_time(goal, options, deadline, seconds_per_file)
    for _ in range(_MOST_PLANS + MOST_GROWN):
        if len(targets.files) == _MOST_PLANS or (plans and deadline.ends_within(seconds_per_file)):
            break
        target = targets.next
        with work.stage("plan"):
            try:
                share = 1.0 if plans or options.effort is not None else _FIRST_PLAN_SHARE
                part = _LATER_PLAN_EFFORT if plans and not (whole or targets.files_before_going_above) else 1.0
                less = replace(options, effort=options.work_seconds() * part) if part < 1 else options
                starts = (*known, *plans[targets.files_before_going_above :])
                plan = make_plan(goal, target, less, deadline.sooner(seconds_per_file, share), starts, look)
                plans = (*plans, plan.schedule)
            except BudgetInfeasibleError as refusal:
                _log.info("target %s: %s", format_bytes(target), refusal)
                if not plans and target < goal.target():  # no wonder
                    targets.next = goal.target()
                elif not plans and (refused or memory.floor > target or not memory.saved_by_runtime):
                    raise refused or refusal from None
                elif not plans:  # the file may take less than its plan by as much as the original does
                    refused, targets.next = refusal, target + memory.saved_by_runtime
                elif targets.may_go_above():
                    targets.go_above()
                elif best is None and not (whole or targets.files_before_going_above):
                    whole = True
                elif best is not None or not targets.go_between():
                    break
                continue
        began = time.monotonic()
        worst, made = _written_and_simulated(plan, goal, target, work, direct)
        seconds_per_file = _RESERVE_PER_FILE * (time.monotonic() - began)
        _log.info(
            "target %s: plan of %s at +%.1f %% compute, file takes %s of %s", format_bytes(target),
            format_bytes(plan.timeline.peak), 100 * plan.extra_compute, format_bytes(worst), format_bytes(allowed),
        )  # fmt: skip
        if worst <= allowed and (best is None or made.preference() < best.preference()):
            best = made
        if worst > allowed and (missed is None or made.preference() < missed.preference()):
            missed = made
        may_gain = worst > allowed or plan.extra_compute > 0
        if not targets.go_on(worst, plan.timeline.peak, memory.bookkeeping_of(made.footprint)) or not may_gain:
            break
    unsure = best is not None and memory.prices_kernels() and best.plan.extra_compute > 0
    starts = (*known, *plans)
    if best is not None and unsure and not deadline.ends_within(seconds_per_file):
        best = _unlike(best, replace(goal, alone=True), targets.kept, work, seconds_per_file, starts, direct)
    if _can_correct(goal, options, best):
        for base in filter(None, (best, missed)):
            if base is best or best is None or base.preference() < best.preference():
                best = _corrected(best, base, goal, work, seconds_per_file, starts, direct, targets.files)
    if best is not None:
        return best
    if refused:
        least = min([*targets.files, memory.covered])
        if isinstance(refused, Refusal) and least < min(refused.best_peak_bytes, memory.covered):
            refused.best_peak_bytes, refused.candidate = least, int(least * REFUSAL_HEADROOM)
            refused.finds = f": the best file takes {format_bytes(least)}"
        raise refused
    lowest, holds = min(targets.files), " with its arena" if options.arena else ""
    raise Refusal(
        f"no file found that ONNX Runtime runs under budget {format_bytes(allowed)}{holds}: plans keep it",
        int(lowest * REFUSAL_HEADROOM) if lowest < memory.covered else 0, None,
        no_lower(memory.budget_for(plan.lower_bound)), lowest, plan.lower_bound + memory.bookkeeping,
        look(), finds=f", but the best file takes {format_bytes(lowest)}", least=memory.budget_for(plan.lower_bound),
    )  # fmt: skip


def _lowest_file(looks: Looks, goal: Goal, work: Work, seconds_per_file: float, direct: Direct) -> tuple[int, Fitted]:
    """Return the file that takes the least of those of a first look's plans, and its bytes; later ones if time is left.

    The plan of the lowest peak need not have the lowest file: a file takes more than its plan by what buffers of
    different lifetimes leave free between them.
    """
    made: list[tuple[int, Fitted]] = []
    for look in looks:
        if made and work.deadline.ends_within(seconds_per_file):
            break
        made.append(_written_and_simulated(look, goal, look.timeline.peak, work, replace(direct, values=set())))
    return min(made, key=lambda each: each[0])


def _unlike(
    best: Fitted,
    goal: Goal,
    target: int,
    work: Work,
    seconds_per_file: float,
    known: tuple[Schedule, ...],
    direct: Direct,
) -> Fitted:
    """Return the better file: the best so far, or one for `goal`, which prices every node by itself.

    Both are compared by their predicted step time. The price of a recompute within a fused kernel depends on the order,
    which decides the fusion and is not known before planning.
    """
    less = replace(work.options, effort=work.options.work_seconds() * _LATER_PLAN_EFFORT)
    with work.stage("plan"):
        try:
            clock = work.deadline.sooner(seconds_per_file, 1.0)
            plan = make_plan(goal, target, less, clock, known, no_look)
        except BudgetInfeasibleError:
            return best
    if plan.schedule == best.plan.schedule:
        return best
    taken, other = _written_and_simulated(plan, goal, target, work, direct)
    return other if taken <= goal.allowed and other.preference() < best.preference() else best


def _can_correct(goal: Goal, options: Options, best: Fitted | None) -> bool:
    """Return whether plans corrected by a file may be better than the best so far."""
    small = goal.memory.compiled.problem.n_ops <= _CORRECTED_OPS
    searches = options.selector in SEARCHES and not options.offload
    return small and searches and (best is None or best.plan.extra_compute > 0)


def _corrected(
    best: Fitted | None,
    base: Fitted,
    goal: Goal,
    work: Work,
    seconds_per_file: float,
    known: tuple[Schedule, ...],
    direct: Direct,
    files: list[int],
) -> Fitted | None:
    """Return the best file of plans that are corrected by what the file before, first `base`, takes at each op.

    Where that file exceeds the budget, the next target is lower by as much, up to the margin. The bytes that files take
    are added to `files`. Where none keeps the budget so far, time is left for that of a first look.
    """
    memory, allowed, idle, excess = goal.memory, goal.allowed, 0, 0
    seconds = work.options.work_seconds()
    less = replace(work.options, effort=max(seconds * _CORRECTED_EFFORT, min(seconds, _LEAST_CORRECTED_EFFORT)))
    for _ in range(_MOST_CORRECTED):
        reserve = seconds_per_file if best else 2 * seconds_per_file
        if base.footprint is None or idle == _MOST_IDLE or work.deadline.ends_within(reserve):
            break
        found = memory.corrections(base.plan.schedule, base.written.occurrences, base.footprint)
        if found is None:
            break
        closer, known = replace(goal, corrections=found), (*known, base.plan.schedule)
        with work.stage("plan"):
            try:
                clock = work.deadline.sooner(reserve, 1.0)
                plan = make_plan(closer, closer.target() - excess, less, clock, known, no_look)
            except BudgetInfeasibleError:
                break
        if plan.schedule in known:
            break
        plan = replace(plan, timeline=simulate(memory.planned(), plan.schedule))
        taken, base = _written_and_simulated(plan, goal, plan.timeline.peak, work, direct)
        _log.info(
            "corrected: plan of %s at +%.1f %% compute, file takes %s of %s", format_bytes(plan.timeline.peak),
            100 * plan.extra_compute, format_bytes(taken), format_bytes(allowed),
        )  # fmt: skip
        files.append(taken)
        excess = min(max(taken - allowed, 0), int(MARGIN * allowed))
        better = taken <= allowed and (best is None or base.preference() < best.preference())
        best, idle = (base, 0) if better else (best, idle + 1)
    return best


def _check_time(goal: Goal, options: Options, deadline: Deadline, seconds_per_file: float) -> None:
    """Raise an error if a time limit that was asked for leaves no time to write and simulate one file."""
    late = seconds_per_file - deadline.left()
    if late <= _TOLERATED_DELAY_SECONDS or options.limit_is_default():
        return
    enough = 5 * math.ceil((options.time_limit + _ADVISED_TIME_FACTOR * late) / 5)
    raise TooLittleTime(
        Message(
            "{} is too short for a file of {} nodes: to write it and to ask ONNX Runtime about it takes about {:.0f} s "
            "by itself, at this machine's present pace; try {}; {}",
            Setting("time_limit", options.time_limit), goal.memory.compiled.graph.n_nodes(), seconds_per_file,
            Setting("time_limit", enough), untried(goal.memory),
        ),
        goal.memory.covered, goal.memory.least + goal.memory.bookkeeping,
    )  # fmt: skip


def _written_and_simulated(plan: Plan, goal: Goal, target: int, work: Work, direct: Direct) -> tuple[int, Fitted]:
    """Make the file of a plan, in memory, and simulate it; return its covered memory in bytes, and the file.

    A loop opens a file at the last level alone; of the levels at which a plain session has to keep the budget, the
    worst counts.

    Where the file exceeds the budget, values whose shared buffers raise the peak get private ones, as long as there are
    any. This does not help against gaps in the arena.
    """
    options, memory, before_peak = work.options, goal.memory, work.original.timeline.peak
    unrolled = private_buffers.unroll(plan.compiled.problem, plan.schedule)
    steps = unrolled.step
    private: set[int] = set()
    exposed: set[int] = set() if memory.shares_buffers else set(range(len(plan.schedule.order)))
    while True:
        with work.stage("rewrite"):
            written = _write(plan, goal, target, before_peak, private, exposed, direct.values, options.dims)
        with work.stage("simulate result"):
            rounded = direct.differing(written, unrolled)
            if not direct.values.issuperset(rounded):
                direct.values.update(rounded)
                continue
            written = replace(written, rounded=rounded)
            executed = _executed(written.model, work, memory.levels())
            taken, footprint = memory.taken(executed, max(work.deadline.left(), 0.0))
        so_far = len(private) + len(exposed)
        if memory.shares_buffers and taken > plan.budget:
            warm = int(target * _NEAR_PEAK)
            idle = {i for what in executed.values() for i in _idle_sharers(what, warm, written)}
            exposed |= {int(steps[i]) for i in idle & private}
            private |= idle
        if len(private) + len(exposed) == so_far:
            return max(taken, memory.arena_bytes(executed)), Fitted(plan, written, executed, footprint)


def _executed(model: onnx.ModelProto, work: Work, levels: Sequence[str]) -> dict[str, Executed]:
    """Return a written model as ONNX Runtime executes it, by optimisation level."""
    try:
        return at_levels(model, work.folder, levels, work.options.preparation())
    except ModelError as error:
        raise VerificationError("the rewritten model is not usable: {}", error.message) from error


def _at_other_levels(made: Fitted, work: Work, seconds: float) -> dict[str, Executed]:
    """Return the simulations with those of the missing levels; only the first of these if `seconds` are not left."""
    model, executed = made.written.model, made.executed
    missing = [level for level in simulated_levels() if level not in executed]
    if not missing:
        return dict(executed)
    if work.deadline.ends_within(seconds) or runtime.is_large(model):
        missing = missing[:1]
    with work.stage("simulate result"):
        found = {**executed, **_executed(model, work, missing)}
    return {level: found[level] for level in simulated_levels() if level in found}


def _idle_sharers(what: Executed, limit: int, written: Rewritten) -> set[int]:
    """Return occurrences to make private, so that no dead buffer stays allocated through steps above `limit`.

    Another value would take the place of each: its followers are found here, without another call of ONNX Runtime.
    """
    number = {name: i for i, name in enumerate(written.occurrences)}
    names = list(what.compiled.graph.values)
    unrolled = private_buffers.unroll(what.compiled.problem, what.order)
    ours = [names[v] in number for v in unrolled.source.tolist()]
    can_hide = np.zeros(len(what.order.order), np.bool_)
    can_hide[unrolled.step[ours]] = True
    found = private_buffers.choose_private(unrolled, limit, 0, can_hide).leaders
    return {number[names[unrolled.source[i]]] for i in found if ours[i]}


def _write(
    plan: Plan,
    goal: Goal,
    limit: int,
    before_peak: int,
    private: Set[int],
    exposed: Set[int],
    direct: Set[str],
    dims: Mapping[str, int],
) -> Rewritten:
    said = metadata_of(plan, goal, before_peak, dims)
    written = realize(plan.compiled, plan.schedule, limit, said, private, exposed, direct)
    if stated := goal.memory.copies(bool(written.moved)):
        stated.put(written.model)
    return written


def metadata_of(plan: Plan, goal: Goal, before_peak: int, dims: Mapping[str, int]) -> dict[str, str]:
    """Return what a file says of its plan; `before_peak` in bytes, of the original's tensors."""
    said = {
        metadata.VERSION_KEY: __version__,
        metadata.BUDGET_KEY: str(plan.budget),
        metadata.PEAK_KEY: str(before_peak),
        metadata.PLANNED_PEAK_KEY: str(plan.timeline.peak),
        metadata.DIMS_KEY: json.dumps(dict(dims)),
        metadata.RUN_BY_KEY: goal.memory.run_by,
    }
    if isinstance(goal.memory, SessionMemory):
        said[metadata.LEVEL_KEY] = goal.memory.level
        said |= {metadata.ARENA_KEY: "1"} if goal.memory.arena else {}
    elif isinstance(goal.memory, LoopMemory) and not goal.memory.options.fuse:
        said[metadata.FUSE_KEY] = "0"
    if (kernels := plan.compiled.kernels).device != "cpu":
        said |= {metadata.PROVIDER_KEY: kernels.name, metadata.WORKSPACE_KEY: str(kernels.library_workspace)}
    return said
