"""The lowest budget there is a file for: the gap between what is found and what is proved impossible, narrowed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Unpack

from onnx_remat.errors import BudgetInfeasibleError
from onnx_remat.findings.sweep import named
from onnx_remat.ir.model_io import Model
from onnx_remat.messages import Finding
from onnx_remat.options import PlanningOptions
from onnx_remat.plan.selectors import silent
from onnx_remat.rewrite.accounting import smallest_budget
from onnx_remat.rewrite.pipeline import begin
from onnx_remat.units import format_bytes

_TRIES = 8  # budgets asked for; each halves the gap, or does better
_CLOSE = 1.01  # budgets within a percent are one
_EASE = 1.01  # above a peak that a refusal names: a search for just that would have to be as lucky again


@dataclass(frozen=True, slots=True)
class Lowest(Finding):
    """The lowest budget found, and the highest that is proved impossible; all but the last two in bytes.

    Attributes
    ----------
    original_peak : int
        What the original takes of what a budget covers.
    budget, peak : int
        The lowest budget that a file was found for, and what that file takes of it.
    lower_bound : int
        No schedule takes less.
    impossible : int
        Every budget below this one is refused, and that is proved.
    missed : tuple of int
        Budgets that no file was found for, in the order they were tried.
    extra_compute : float
        Of the file that keeps `budget`.
    tries : int
        Budgets asked for.
    """

    schema: ClassVar[str] = "onnx-remat/lowest/1"

    original_peak: int
    budget: int
    peak: int
    lower_bound: int
    impossible: int
    missed: tuple[int, ...]
    extra_compute: float
    tries: int

    def lines(self) -> list[str]:
        """What was found, what is proved, and what lies between."""
        share = self.budget / (self.original_peak or 1)
        lines = [
            f"lowest budget found: {self.budget}B ({format_bytes(self.budget)}), {share:.1%} of the original's peak, "
            f"at {self.extra_compute:+.2%} compute",
            f"no budget below {self.impossible}B ({format_bytes(self.impossible)}) is possible: "
            f"no schedule takes less than {format_bytes(self.lower_bound)}",
        ]
        if missed := [budget for budget in self.missed if budget >= self.impossible]:
            lines.append("in between no file was found for " + ", ".join(map(format_bytes, sorted(missed))))
        return lines


def lowest_budget(model: Model, **options: Unpack[PlanningOptions]) -> Lowest:
    """Look for the lowest budget that a file keeps.

    Parameters
    ----------
    model : path, bytes or onnx.ModelProto
        A training graph.
    **options
        Fields of `Options`; the effort, or the time limit, is for each budget that is asked for.

    Raises
    ------
    OnnxRematError
        As `rewrite_model`, infeasible budgets apart.

    Examples
    --------
    >>> from sample_models.chain import chain
    >>> found = lowest_budget(chain(8, 1024, 64), effort=0.5)
    >>> found.impossible <= found.budget < found.original_peak
    True
    """
    progress = options.pop("progress", silent)
    planner = begin(model, options)
    report = planner.rewrite("100%").report
    top, books, bound = report.budget, report.books(), report.lower_bound
    impossible = smallest_budget(bound, books)
    budget, missed, tries = impossible, [impossible - 1], 0
    while tries < _TRIES and report.budget > _CLOSE * max(missed):
        tries += 1
        watched = named(f"try {tries} of {_TRIES} at most", progress)
        try:
            report = planner.rewrite(budget, advise=False, progress=watched).report
        except BudgetInfeasibleError as error:
            missed.append(budget)
            budget = int(smallest_budget(error.best_peak_bytes) * _EASE)
        else:
            budget = report.budget
        if budget >= report.budget or budget <= max(missed):
            budget = math.isqrt(max(missed) * report.budget)  # the middle, as a factor
    return Lowest(
        top, report.budget, report.covered()[1], bound + books, impossible, tuple(missed[1:]), report.extra_compute,
        tries,
    )  # fmt: skip
