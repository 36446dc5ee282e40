"""One plan for a peak in bytes: the selector's, that of a first look, or a refusal that advises another budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from onnx_remat.errors import BudgetInfeasibleError
from onnx_remat.memory import buffers
from onnx_remat.memory.donation import after_readers
from onnx_remat.memory.problem import Schedule, check_schedule
from onnx_remat.messages import Message, Setting, joined
from onnx_remat.options import Options
from onnx_remat.ort import host_state, moves
from onnx_remat.ort.kernels import costs
from onnx_remat.ort.prepare import Compiled
from onnx_remat.plan import selectors
from onnx_remat.plan.request import Deadline
from onnx_remat.rewrite.accounting import AS_IT_IS, MARGIN, Accounting, Goal
from onnx_remat.units import as_budget, format_bytes
from onnx_remat.write.realize import settle

SEARCHES = ("search", "auto", "exact")
"""Selectors that use all the time they are given, and plans that are known."""

REFUSAL_HEADROOM = 1.02  # headroom on the advised budget: another search may not find the same plan
_ADVISED_EFFORT_FACTOR = 2.0  # factor on the effort that a refusal advises
_ANNEAL = ("search", "auto")  # selectors that find better plans with more effort
LOOK_EFFORT = 1.0  # most effort of each search of a first look
_LOOK_AIMS = (0.5, 0.2, 0.1)  # peaks that these aim at: parts of the way from the lower bound to the original's
_LOOK_OPS = 10_000  # of the largest step for which there are such searches: their starts take longer than a second
_FROM_LOOK = 0.5  # of the effort for a search from a plan of the first look


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule for a budget, which it may exceed until it is checked, and the compiled model it is for."""

    compiled: Compiled
    schedule: Schedule
    timeline: buffers.Timeline
    budget: int
    extra_compute: float
    lower_bound: int


Looks = tuple[Plan, ...]
"""Plans of a first look, the lowest first."""


def make_plan(
    goal: Goal,
    target: int,
    options: Options,
    deadline: Deadline,
    known_plans: tuple[Schedule, ...] = (),
    look: Callable[[], Looks] | None = None,
) -> Plan:
    """Return the selector's plan for a peak of `target` bytes; raise Refusal where it and a first look find none.

    `known_plans` are starting points, see `request.Request.known`; `look` makes the first look, or returns one that was
    made before.
    """
    memory = goal.memory
    proved = memory.floor > target
    plan = None
    if not proved:
        plan = _selected(goal, target, options, deadline, known=known_plans)
        if plan.timeline.peak <= target:
            return plan
    looks = look() if look else first_look(goal, options, deadline)
    if within := [each for each in looks if each.timeline.peak <= target and not proved]:
        cheapest = min(within, key=lambda each: each.extra_compute)  # of plans made to be low, whatever they recompute
        if options.selector not in SEARCHES:
            return cheapest
        less, known = replace(options, effort=options.work_seconds() * _FROM_LOOK), (*known_plans, cheapest.schedule)
        better = _selected(goal, target, less, deadline, known=known)
        return better if better.timeline.peak <= target else cheapest
    tensors = memory.original_bytes - memory.bookkeeping
    lowest = min((lowest_peak(each, memory) for each in (plan, *looks) if each is not None), default=tensors)
    found = memory.budget_for(lowest)
    why, finds = _refused(goal, target, lowest, options)
    raise Refusal(
        why,
        0 if found >= memory.original_bytes or proved else int(found * REFUSAL_HEADROOM),
        None if proved else _lower(options),
        "" if proved else no_lower(memory.budget_for(memory.floor)),
        min(lowest + memory.bookkeeping, memory.original_bytes), memory.floor + memory.bookkeeping, looks,
        found if proved and found < memory.original_bytes else 0, finds, memory.budget_for(memory.floor),
    )  # fmt: skip


def no_look() -> Looks:
    """Return no plans, in place of a first look, where a refusal advises nobody."""
    return ()


def lowest_peak(plan: Plan, memory: Accounting) -> int:
    """Return a plan's peak with the bookkeeping of the nodes that it runs again."""
    return plan.timeline.peak + memory.bookkeeping_per_node * (len(plan.schedule.order) - plan.compiled.problem.n_ops)


def first_look(goal: Goal, options: Options, deadline: Deadline) -> Looks:
    """Return the plans of a few short searches, the lowest first.

    Unless time is up they are the same for every budget, and for every effort of at least `LOOK_EFFORT`.

    The plan of the lowest peak may recompute so many nodes that their bookkeeping takes more than is saved. Searches
    for higher peaks follow it, each for a lower one, as long as they find a plan.
    """
    memory, short = goal.memory, replace(options, effort=min(LOOK_EFFORT, options.work_seconds()))
    found = [_selected(goal, 0, short, deadline, work=1, use_time=False)]
    least, original = memory.budget_for(memory.floor), memory.original_bytes
    for aim in _LOOK_AIMS if options.selector in _ANNEAL and memory.compiled.problem.n_ops <= _LOOK_OPS else ():
        target = memory.target(least + int(aim * (original - least)))
        if min(lowest_peak(plan, memory) for plan in found) <= target:
            continue
        if deadline.passed():
            break
        known = tuple(plan.schedule for plan in found)
        found.append(_selected(goal, target, short, deadline, use_time=False, known=known))
        if found[-1].timeline.peak > target:
            break
    return tuple(sorted(found, key=lambda plan: lowest_peak(plan, memory)))


def as_it_is(goal: Goal) -> Plan:
    """Return the plan of the model as it is: no recompute, in the order in which ONNX Runtime executes it."""
    compiled, order = goal.memory.compiled, _default_order(goal.memory.compiled)
    return Plan(compiled, order, buffers.simulate(goal.planned(), order), goal.allowed, 0.0, goal.memory.floor)


def _default_order(compiled: Compiled) -> Schedule:
    due = host_state.when_due(compiled, compiled.default_order().order)
    order = moves.adjoined(compiled.problem, due).order
    return Schedule(tuple(after_readers(compiled.problem, order).tolist()))


def _selected(goal: Goal, target: int, options: Options, deadline: Deadline, **more: Any) -> Plan:
    """Return the selector's plan, even above the target; `more` are fields of `request.Request`."""
    compiled, problem = goal.memory.compiled, goal.planned()
    numbers = {name: i for i, name in enumerate(compiled.graph.values)}
    request = selectors.Request(
        problem,
        target,
        _default_order(compiled),
        effort=options.work_seconds(),
        deadline=deadline,
        progress=options.progress,
        checkpoints=tuple(numbers[name] for name in options.checkpoints),
        anchors=tuple(op.index for op in compiled.graph.ops if op.node.op_type in costs.MATRIX_OPS),
        **{"use_time": options.effort is None, **more},
    )
    schedule = moves.adjoined(problem, selectors.get(options.selector)(request).order, target)
    schedule = settle(compiled, problem, schedule, target)
    check_schedule(problem, schedule)
    timeline = buffers.simulate(problem, schedule)
    extra = schedule.overhead(compiled.problem)
    return Plan(compiled, schedule, timeline, goal.allowed, extra, goal.memory.floor)


class Refusal(BudgetInfeasibleError):
    """No plan or no file was found: the reason, and the figures for advice on another budget.

    Attributes
    ----------
    why : str
        The first part of the message.
    candidate : int
        A budget in bytes, a little above the lowest that was found; 0 where none is below the original's memory.
    lower : Setting, Message or None
        The setting that may reach a lower budget.
    below : str
        The bytes below which there is no plan, as text; may be empty.
    looks : Looks
        Plans of a first look, the same whatever the budget is.
    looked : int
        A budget in bytes for which the first look finds a plan, or a file once one was written; 0 where it finds none
        below the original's memory.
    finds : str
        The end of the first part: the lowest that was found. It is left out where the first look's file is advised.
    least : int
        No budget below this many bytes can be kept; 0 where that is not known.
    """

    def __init__(
        self, why: str, candidate: int, lower: Setting | Message | None, below: str, best_peak_bytes: int,
        lower_bound_bytes: int, looks: Looks, looked: int = 0, finds: str = "", least: int = 0,
    ) -> None:  # fmt: skip
        self.why, self.candidate, self.lower, self.below = why, candidate, lower, below
        self.looks, self.looked, self.finds, self.least = looks, looked, finds, least
        self.best_peak_bytes, self.lower_bound_bytes = best_peak_bytes, lower_bound_bytes
        super().__init__(self._text(candidate or looked), best_peak_bytes, lower_bound_bytes)

    @property
    def proved(self) -> bool:
        """Is no plan possible?"""
        return not self.below

    def naming(self, budget: int, taken: int = 0, unplanned: str = AS_IT_IS) -> BudgetInfeasibleError:
        """Return the same error advising `budget`; 0 for no budget but `taken`, the memory of what is `unplanned`."""
        best = min(found for found in (self.best_peak_bytes, budget, self.looked) if found)
        return BudgetInfeasibleError(self._text(budget, taken, unplanned), best, self.lower_bound_bytes)

    def _text(self, budget: int, taken: int = 0, unplanned: str = AS_IT_IS) -> Message:
        if budget:
            looked = "), for which a first look finds one"
            above = f", {REFUSAL_HEADROOM - 1:.0%} above that)" if budget == self.candidate else looked
            advice = Message("try {} ({}{}", Setting("budget", as_budget(budget)), format_bytes(budget), above)
            advice = Message("{}, or {} to go lower", advice, self.lower) if self.lower else advice
        elif self.lower:
            advice = Message("try {}", self.lower)
        else:
            advice = Message("a first look finds none that takes less than {}", unplanned)
            if taken and self.least < taken:
                advice = Message("{} ({} searches for one)", advice, Setting("budget", "auto"))
            if taken:
                asked = Setting("budget", as_budget(taken))
                advice = Message("{}: try {} ({}), which it takes", advice, asked, format_bytes(taken))
        why = self.why if 0 < budget == self.looked else Message("{}{}", self.why, self.finds)
        return joined("; ", filter(None, (why, advice, self.below)))


class TooLittleTime(BudgetInfeasibleError):
    """A time limit that was asked for ends before a file could be written: nothing is known about the budget."""

    cut_short = True


def _refused(goal: Goal, target: int, lowest: int, options: Options) -> tuple[str, str]:
    """Return why there is no plan, proved or not found in the time given, and the lowest that was found."""
    allowed, memory, floor = goal.allowed, goal.memory, goal.memory.floor
    # The model as it is needs no margin.
    least, found = min(memory.budget_for(floor), memory.original_bytes), memory.budget_for(lowest)
    if floor > target:
        kept = f"{format_bytes(memory.bookkeeping)} of ONNX Runtime's own bookkeeping, " if memory.bookkeeping else ""
        return (
            f"budget {format_bytes(allowed)} is impossible: below {format_bytes(least)} ({format_bytes(floor)} of "
            f"tensors, {kept}{MARGIN:.0%} kept free) there is no plan, which is proved"
        ), ""
    within = Message(" with {}", options.bounded_by()) if options.selector in SEARCHES else ""
    finds = f": the lowest that selector {options.selector!r} finds is {format_bytes(found)}"
    if found >= memory.original_bytes:
        finds = f": selector {options.selector!r} finds nothing lower than {memory.unplanned}"
    return Message("no plan found for budget {}{}", format_bytes(allowed), within), finds


def _lower(options: Options) -> Setting | Message:
    """Return the setting that may reach a lower budget."""
    if options.selector in SEARCHES:
        return options.bounded_by(_ADVISED_EFFORT_FACTOR)
    auto = Setting("selector", "auto")
    return Message("{} without {}", auto, Setting("checkpoints")) if options.checkpoints else auto


def no_lower(least: int) -> str:
    """Return the end of a refusal: the budget in bytes below which there is no plan."""
    return f"below {format_bytes(least)} there is no plan at all"


def untried(memory: Accounting) -> str:
    """Return the end of a refusal for lack of time: the figures that are known without a plan."""
    as_it_is, least = memory.covered, min(memory.budget_for(memory.least), memory.covered)
    return f"no plan was tried: {memory.unplanned} takes {format_bytes(as_it_is)}, and {no_lower(least)}"
