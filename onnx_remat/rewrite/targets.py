"""The peaks that plans are made for, one after the other, until a file keeps the budget."""

from __future__ import annotations

from dataclasses import dataclass, field

from onnx_remat.rewrite.accounting import MARGIN, Goal

_CLOSE_ENOUGH = 0.98  # of a target that was too large: a target that fits and is this near ends the search
_EXPECTED_RECOMPUTE_SHARE = 0.14  # recomputed nodes of a file, as a share of the graph's, for a first guess

MOST_GROWN = 2
"""Most larger files, or missing plans, in a row: then the search goes on above the targets before."""


def first_target(goal: Goal) -> int:
    """Return the first target: lower where the bookkeeping of recomputed nodes will exceed the margin."""
    memory = goal.memory
    bookkeeping = int(_EXPECTED_RECOMPUTE_SHARE * memory.bookkeeping_per_node * memory.compiled.problem.n_ops)
    margin = int(MARGIN * goal.allowed)
    if bookkeeping < 2 * margin:
        return goal.target()
    lowered = goal.target() - bookkeeping + margin
    return lowered if lowered > memory.floor else goal.target()


@dataclass(slots=True)
class Targets:
    """Choose the target peak, in bytes, of each plan in turn, until a file keeps the budget and uses it up.

    Where the file as executed exceeds the budget, the next plan has a target that is tighter by the excess; by twice as
    much for each file in a row that got smaller by less than half of that, since small steps often find the same plan.
    The bytes that the arena adds, or that fusion saves, are not a simple function of the target: where the budget
    covers them, the search bisects between the last target that was too large and the first that was not. A tighter
    plan recomputes more, and each recomputed node adds bookkeeping: where files get larger and exceed the budget by
    more than the margin, or that bookkeeping is what exceeds it, and no plan is tighter, the search goes on above the
    targets before, with none of their plans, which recompute too much.

    Attributes
    ----------
    next : int
        The next plan's target.
    kept, missed : int
        The largest target whose file keeps the budget, or one that is too tight; the least whose file exceeds it, or a
        limit. 0 where there is none.
    highest : int
        Of the targets that were tightened.
    larger_in_a_row : int
        Files, or missing plans, in a row that were larger than one before.
    stalled_in_a_row : int
        Files in a row that got smaller by less than half of what the file before exceeds the budget by.
    files_before_going_above : int
        How many files there were when the search went on above; 0 before.
    missed_is_limit : bool
        Is `missed` a limit, for which there is no file?
    excess_is_bookkeeping : bool
        Does the last file exceed the budget by more than the margin, and by less than its recomputed nodes add as
        bookkeeping?
    files : list of int
        What the files take.
    """

    goal: Goal
    next: int
    kept: int = 0
    missed: int = 0
    highest: int = 0
    larger_in_a_row: int = 0
    stalled_in_a_row: int = 0
    files_before_going_above: int = 0
    missed_is_limit: bool = False
    excess_is_bookkeeping: bool = False
    files: list[int] = field(default_factory=list)

    def may_go_above(self) -> bool:
        """Return whether targets above those that were tried are left to try."""
        has_room = self._limit() * _CLOSE_ENOUGH > self.highest
        return not self.kept and (self.larger_in_a_row == MOST_GROWN or (self.excess_is_bookkeeping and has_room))

    def go_above(self) -> None:
        """Take a target above the ones before, up to a limit."""
        tight, limit = self.highest, self._limit()
        self.kept, self.next, self.missed = tight, (tight + limit) // 2, limit
        self.files_before_going_above, self.missed_is_limit = len(self.files), True

    def _limit(self) -> int:
        """Return the limit of targets above: more by the share that the runtime saves of the original's plan."""
        memory, tight = self.goal.memory, self.highest
        return tight + int(tight * memory.saved_by_runtime / (memory.saved_by_runtime + memory.original_bytes))

    def go_between(self) -> bool:
        """Take a target between one without a plan and the least that is too large; return whether there is any."""
        self.larger_in_a_row += self.larger_in_a_row > 0
        if not self.next < self.missed * _CLOSE_ENOUGH:
            return False
        self.next = (self.next + self.missed) // 2
        return True

    def go_on(self, file: int, peak: int, bookkeeping: int) -> bool:
        """Choose the target after a file, and return whether a further plan may be better.

        Parameters
        ----------
        file, peak, bookkeeping : int
            Bytes that the file takes, its plan's peak, and the part of `file` that is bookkeeping.
        """
        memory, allowed, target = self.goal.memory, self.goal.allowed, self.next
        stalled = self.files and 2 * (self.files[-1] - file) < self.files[-1] - allowed
        self.stalled_in_a_row = self.stalled_in_a_row + 1 if stalled else 0
        self.files.append(file)
        self.larger_in_a_row = self.larger_in_a_row + 1 if file > min(self.files) else 0
        self.excess_is_bookkeeping = bookkeeping - memory.bookkeeping > file - allowed > MARGIN * allowed
        if file <= allowed:
            self.kept, self.missed, self.missed_is_limit = target, 0 if self.missed_is_limit else self.missed, False
            if memory.is_used_up(allowed - file, allowed, missed=self.missed > 0):
                return False
            self.next = (self.kept + self.missed) // 2 if self.missed else target + allowed - file
        elif not self.kept and self.larger_in_a_row == MOST_GROWN and file - allowed > MARGIN * allowed:
            self.go_above()
        elif self.missed_is_limit and self.excess_is_bookkeeping:  # with more room a plan recomputes less
            self.kept = self.highest = target
            self.next = (target + self.missed) // 2
        else:  # less by the excess, and less than the peak of this plan
            self.missed, self.highest, self.missed_is_limit = min(target, peak), max(self.highest, target), False
            step = (target - memory.tighter(target, file, allowed)) << self.stalled_in_a_row
            self.next = min(target - step, self.missed - 1)
            if self.kept:
                self.next = (self.kept + self.missed) // 2
        return not self.kept > self.missed * _CLOSE_ENOUGH > 0
