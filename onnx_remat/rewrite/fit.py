"""Plan, write, and simulate the file as ONNX Runtime executes it, until it keeps the budget."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

from onnx_remat.errors import BudgetInfeasibleError
from onnx_remat.memory.buffers import simulate
from onnx_remat.memory.problem import Schedule
from onnx_remat.messages import Message, Setting
from onnx_remat.rewrite.accounting import MARGIN, Goal
from onnx_remat.rewrite.plan_files import Fitted, Work, at_other_levels, written_and_simulated
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
from onnx_remat.units import format_bytes
from onnx_remat.write.rounding import Direct

_log = logging.getLogger(__name__)

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


def fit(goal: Goal, work: Work, known: tuple[Schedule, ...] = (), rival: Fitted | None = None) -> Fitted:
    """Return a plan and a file within the budget: the selector's best, else those of a first look.

    A `rival` that keeps the budget is returned unless there is a better one.

    Raises
    ------
    Refusal
        Neither keeps the budget. It carries the bytes of the first look's file, which is the same for every budget, so
        that the advised budget is one that was tried.
    """
    fitting = _Fitting(goal, work, known, Direct.of(goal.memory.compiled))
    look = cache(lambda: first_look(goal, work.options, work.clock()))
    try:
        best = fitting.attempts(look)
        hard = look.cache_info().currsize > 0  # a plan was refused
        if hard and rival is None and fitting.can_correct(best) and not work.ends_soon():
            taken, other = fitting.from_looks(look())
            if taken <= goal.allowed and other.preference() < best.preference():
                best = other
    except TooLittleTime:
        if rival is None:
            raise
        best = rival
    except Refusal as refusal:
        if rival is None:
            if work.ends_soon():
                raise
            taken, best = fitting.from_looks(refusal.looks)
            if taken > goal.allowed:
                if work.options.arena:  # which buffers are shared, and so what the arena takes, depends on the budget
                    taken = int(taken * REFUSAL_HEADROOM)
                refusal.looked = taken if taken < goal.memory.covered else 0
                raise
        else:
            best = rival
    if rival is not None and rival.preference() < best.preference():
        best = rival
    return replace(best, executed=at_other_levels(best, work))


def fit_once(goal: Goal, work: Work) -> tuple[int, Fitted]:
    """Return the file of one plan for a budget, and the bytes that it takes: more than the budget or less.

    Raises
    ------
    BudgetInfeasibleError
        No plan was found.
    """
    first = first_target(goal)
    for target in dict.fromkeys((first, goal.target())):
        with work.stage("plan"):
            try:
                plan = make_plan(goal, target, work.options, work.clock(), ())
            except BudgetInfeasibleError:
                if target == goal.target():
                    raise
                continue
        break
    return written_and_simulated(plan, goal, target, work, Direct.of(goal.memory.compiled))


def fit_as_it_is(goal: Goal, work: Work) -> Fitted:
    """Return the file of the model without any recompute, whatever it takes."""
    plan = as_it_is(goal)
    _, made = written_and_simulated(plan, goal, plan.timeline.peak, work, Direct.of(goal.memory.compiled))
    return replace(made, executed=at_other_levels(made, work))


@dataclass(slots=True)
class _Fitting:
    """The search for a file that keeps one budget.

    Attributes
    ----------
    goal : Goal
    work : Work
        Its seconds for a file are those of the last one.
    known : tuple of Schedule
        Plans to start from.
    direct : Direct
        Values that files round at once, as found so far.
    files : list of int
        What the files of attempts take.
    """

    goal: Goal
    work: Work
    known: tuple[Schedule, ...]
    direct: Direct
    files: list[int] = field(default_factory=list)

    def attempts(self, look: Callable[[], Looks]) -> Fitted:
        """Plan, write and simulate the file, until it is within the budget; see `Targets` for what is tried.

        No plan begins if its file could not be simulated before the deadline: each leaves the time that the previous
        file took to write and simulate.
        """
        goal, memory, options = self.goal, self.goal.memory, self.work.options
        targets = Targets(goal, first_target(goal), files=self.files)
        plans: tuple[Schedule, ...] = ()
        best: Fitted | None = None
        missed: Fitted | None = None  # the best file that exceeds the budget
        refused: BudgetInfeasibleError | None = None
        whole = False  # whether later plans take the whole effort, too
        self._check_time()
        for _ in range(_MOST_PLANS + MOST_GROWN):
            if len(self.files) == _MOST_PLANS or (plans and self.work.ends_soon()):
                break
            target = targets.next
            with self.work.stage("plan"):
                try:
                    share = 1.0 if plans or options.effort is not None else _FIRST_PLAN_SHARE
                    part = _LATER_PLAN_EFFORT if plans and not (whole or targets.files_before_going_above) else 1.0
                    less = replace(options, effort=options.work_seconds() * part) if part < 1 else options
                    starts = (*self.known, *plans[targets.files_before_going_above :])
                    plan = make_plan(goal, target, less, self.work.clock(share), starts, look)
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
            taken, made = self.file_of(plan, target)
            self.work = replace(self.work, seconds_per_file=_RESERVE_PER_FILE * (time.monotonic() - began))
            self._log_file(f"target {format_bytes(target)}", plan, taken)
            if taken <= goal.allowed and (best is None or made.preference() < best.preference()):
                best = made
            if taken > goal.allowed and (missed is None or made.preference() < missed.preference()):
                missed = made
            may_gain = taken > goal.allowed or plan.extra_compute > 0
            if not targets.go_on(taken, plan.timeline.peak, memory.bookkeeping_of(made.footprint)) or not may_gain:
                break
        starts = (*self.known, *plans)
        if best is not None:
            best = self._unlike(best, targets.kept, starts)
        if self.can_correct(best):
            for base in filter(None, (best, missed)):
                if base is best or best is None or base.preference() < best.preference():
                    best = self._corrected(best, base, starts)
        if best is None:
            raise self._refusal(refused, plan, look)
        return best

    def from_looks(self, looks: Looks) -> tuple[int, Fitted]:
        """Return the best file of a first look's plans, improved if it keeps the budget, and the bytes it takes.

        It is the one that takes the least of the first, and of later ones if time is left. The plan of the lowest peak
        need not have the lowest file: a file takes more than its plan by what buffers of different lifetimes leave free
        between them.
        """
        made: list[tuple[int, Fitted]] = []
        for look in looks:
            if made and self.work.ends_soon():
                break
            made.append(self.file_of(look, look.timeline.peak, replace(self.direct, values=set())))
        taken, best = min(made, key=lambda each: each[0])
        if taken <= self.goal.allowed and self.can_correct(best):
            best = self._corrected(best, best, self.known) or best
        return taken, best

    def can_correct(self, best: Fitted | None) -> bool:
        """Return whether plans corrected by a file may be better than the best so far."""
        options = self.work.options
        small = self.goal.memory.compiled.problem.n_ops <= _CORRECTED_OPS
        searches = options.selector in SEARCHES and not options.offload
        return small and searches and (best is None or best.plan.extra_compute > 0)

    def file_of(self, plan: Plan, target: int, direct: Direct | None = None) -> tuple[int, Fitted]:
        """Return the bytes that a plan's file takes, and the file."""
        return written_and_simulated(plan, self.goal, target, self.work, direct or self.direct)

    def _unlike(self, best: Fitted, target: int, known: tuple[Schedule, ...]) -> Fitted:
        """Return the better file: the best so far, or one of a plan that prices every node by itself.

        Both are compared by their predicted step time. The price of a recompute within a fused kernel depends on the
        order, which decides the fusion and is not known before planning.
        """
        unsure = self.goal.memory.prices_kernels() and best.plan.extra_compute > 0
        if not unsure or self.work.ends_soon():
            return best
        less = replace(self.work.options, effort=self.work.options.work_seconds() * _LATER_PLAN_EFFORT)
        with self.work.stage("plan"):
            try:
                plan = make_plan(replace(self.goal, alone=True), target, less, self.work.clock(), known, no_look)
            except BudgetInfeasibleError:
                return best
        if plan.schedule == best.plan.schedule:
            return best
        taken, other = self.file_of(plan, target)
        return other if taken <= self.goal.allowed and other.preference() < best.preference() else best

    def _corrected(self, best: Fitted | None, base: Fitted, known: tuple[Schedule, ...]) -> Fitted | None:
        """Return the best file of plans that are corrected by what the file before, first `base`, takes at each op.

        Where that file exceeds the budget, the next target is lower by as much, up to the margin. Where none keeps the
        budget so far, time is left for that of a first look.
        """
        goal, memory, allowed, idle, excess = self.goal, self.goal.memory, self.goal.allowed, 0, 0
        seconds = self.work.options.work_seconds()
        effort = max(seconds * _CORRECTED_EFFORT, min(seconds, _LEAST_CORRECTED_EFFORT))
        less = replace(self.work.options, effort=effort)
        for _ in range(_MOST_CORRECTED):
            reserved = 1 if best else 2
            if base.footprint is None or idle == _MOST_IDLE or self.work.ends_soon(reserved):
                break
            found = memory.corrections(base.plan.schedule, base.written.occurrences, base.footprint)
            if found is None:
                break
            closer, known = replace(goal, corrections=found), (*known, base.plan.schedule)
            with self.work.stage("plan"):
                try:
                    clock = self.work.clock(files=reserved)
                    plan = make_plan(closer, closer.target() - excess, less, clock, known, no_look)
                except BudgetInfeasibleError:
                    break
            if plan.schedule in known:
                break
            plan = replace(plan, timeline=simulate(memory.planned(), plan.schedule))
            taken, base = self.file_of(plan, plan.timeline.peak)
            self._log_file("corrected", plan, taken)
            self.files.append(taken)
            excess = min(max(taken - allowed, 0), int(MARGIN * allowed))
            better = taken <= allowed and (best is None or base.preference() < best.preference())
            best, idle = (base, 0) if better else (best, idle + 1)
        return best

    def _log_file(self, what: str, plan: Plan, taken: int) -> None:
        _log.info(
            "%s: plan of %s at +%.1f %% compute, file takes %s of %s", what, format_bytes(plan.timeline.peak),
            100 * plan.extra_compute, format_bytes(taken), format_bytes(self.goal.allowed),
        )  # fmt: skip

    def _refusal(
        self, refused: BudgetInfeasibleError | None, plan: Plan, look: Callable[[], Looks]
    ) -> BudgetInfeasibleError:
        """Return why no file keeps the budget, although `plan`, the last one, and others have been found."""
        memory = self.goal.memory
        lowest = min(self.files, default=memory.covered)
        advised = int(lowest * REFUSAL_HEADROOM)
        if refused:
            if isinstance(refused, Refusal) and lowest < min(refused.best_peak_bytes, memory.covered):
                refused.best_peak_bytes, refused.candidate = lowest, advised
                refused.finds = f": the best file takes {format_bytes(lowest)}"
            return refused
        holds, least = " with its arena" if self.work.options.arena else "", memory.budget_for(plan.lower_bound)
        return Refusal(
            f"no file found that ONNX Runtime runs under budget {format_bytes(self.goal.allowed)}{holds}: "
            "plans keep it",
            advised if lowest < memory.covered else 0, None, no_lower(least), lowest,
            plan.lower_bound + memory.bookkeeping, look(), finds=f", but the best file takes {format_bytes(lowest)}",
            least=least,
        )  # fmt: skip

    def _check_time(self) -> None:
        """Raise an error if a time limit that was asked for leaves no time to write and simulate one file."""
        options, memory, seconds = self.work.options, self.goal.memory, self.work.seconds_per_file
        late = seconds - self.work.deadline.left()
        if late <= _TOLERATED_DELAY_SECONDS or options.limit_is_default():
            return
        enough = 5 * math.ceil((options.time_limit + _ADVISED_TIME_FACTOR * late) / 5)
        raise TooLittleTime(
            Message(
                "{} is too short for a file of {} nodes: to write it and to ask ONNX Runtime about it takes about "
                "{:.0f} s by itself, at this machine's present pace; try {}; {}",
                Setting("time_limit", options.time_limit), memory.compiled.graph.n_nodes(), seconds,
                Setting("time_limit", enough), untried(memory),
            ),
            memory.covered, memory.least + memory.bookkeeping,
        )  # fmt: skip
