"""Search for the lowest budget that a file keeps, between the lowest found and the highest proved impossible."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Unpack

from onnx_remat.errors import BudgetInfeasibleError
from onnx_remat.findings.sweep import named
from onnx_remat.ir.model_io import Model
from onnx_remat.messages import Finding
from onnx_remat.options import PlanningOptions, without_arena
from onnx_remat.plan.selectors import silent
from onnx_remat.process import worker
from onnx_remat.rewrite.accounting import smallest_budget
from onnx_remat.rewrite.original import begin
from onnx_remat.rewrite.pipeline import rewrite_for
from onnx_remat.rewrite.plans import TooLittleTime
from onnx_remat.rewrite.report import CUT_SHORT
from onnx_remat.units import Budget, format_bytes

_TRIES = 8  # budgets to plan for; each at least halves the gap
_RESOLUTION = 1.01  # factor between budgets that count as equal
_REFUSAL_HEADROOM = 1.01  # factor on the peak that a refusal names: another search may not find the same plan


@dataclass(frozen=True, slots=True)
class Lowest(Finding):
    """The lowest budget found, and the highest that is proved impossible; all but the last two fields in bytes.

    Attributes
    ----------
    original_peak : int
        Memory of the original that a budget covers.
    budget, peak : int
        The lowest budget with a file that keeps it, and the memory of that file.
    lower_bound : int
        Lower bound on the memory of every schedule.
    impossible : int
        Every budget below this one is proved impossible.
    missed : tuple of int
        Budgets for which no file was found, in the order they were tried.
    extra_compute : float
        Extra compute of the file that keeps `budget`, as a fraction.
    tries : int
        Number of budgets tried.
    cut_short : bool
        Whether the clock cut the planning of a file short (`Options.time_limit`): another run may find another budget.
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
    cut_short: bool = False

    def lines(self) -> list[str]:
        """Return the lowest budget found, the bound, and the budgets in between that were missed."""
        share = self.budget / (self.original_peak or 1)
        lines = [
            f"lowest budget found: {self.budget}B ({format_bytes(self.budget)}), {share:.1%} of the original's peak, "
            f"at {self.extra_compute:+.2%} compute",
            f"no budget below {self.impossible}B ({format_bytes(self.impossible)}) is possible: "
            f"no schedule takes less than {format_bytes(self.lower_bound)}",
        ]
        if missed := [budget for budget in self.missed if budget >= self.impossible]:
            lines.append("no file was found for budgets in between: " + ", ".join(map(format_bytes, sorted(missed))))
        if self.cut_short:
            lines.append(CUT_SHORT)
        return lines


@worker.device_left()
def lowest_budget(model: Model, **options: Unpack[PlanningOptions]) -> Lowest:
    """Search for the lowest budget that a file keeps.

    Parameters
    ----------
    model : path, bytes or onnx.ModelProto
        A training graph.
    **options
        Fields of `Options`; the effort, or the time limit, applies to each budget that is tried.

    Raises
    ------
    OnnxRematError
        As in `rewrite_model`, except for infeasible budgets; a time limit too short for one file is an error.

    Examples
    --------
    >>> from sample_models.chain import chain
    >>> found = lowest_budget(chain(4, 1024, 64), effort=0.1)
    >>> found.impossible <= found.budget < found.original_peak
    True
    """
    without_arena(options, "a search for the lowest budget")
    progress = options.pop("progress", silent)
    original = begin(model, options)
    report = rewrite_for(original, "100%").report
    top, books, bound = report.budget, report.books(), report.lower_bound
    impossible = min(smallest_budget(bound, books), top)  # the original itself keeps that, without a margin
    budget, missed, tries, cut_short = impossible, [impossible - 1], 0, report.cut_short
    while tries < _TRIES and report.budget > _RESOLUTION * max(missed):
        tries += 1
        watched = named(f"try {tries} of {_TRIES} at most, {format_bytes(report.budget)} found", progress)
        try:
            report = rewrite_for(original, Budget(bytes=budget), advise=False, progress=watched).report
        except TooLittleTime:
            raise
        except BudgetInfeasibleError as error:
            missed.append(budget)
            cut_short |= error.cut_short
            budget = int(smallest_budget(error.best_peak_bytes) * _REFUSAL_HEADROOM)
        else:
            budget = report.budget
            cut_short |= report.cut_short
        if budget >= report.budget or budget <= max(missed):
            budget = math.isqrt(max(missed) * report.budget)  # the geometric mean
    return Lowest(
        top, report.budget, report.covered()[1], bound + books, impossible, tuple(missed[1:]), report.extra_compute,
        tries, cut_short,
    )  # fmt: skip
