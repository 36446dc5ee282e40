"""The curve of peak against extra compute: one rewritten model for each of many budgets, and their Pareto front."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import Any, ClassVar, Unpack

import numpy as np

from onnx_remat.errors import BudgetInfeasibleError, OnnxRematError, UsageError
from onnx_remat.ir.model_io import Model, load
from onnx_remat.messages import Finding, Setting
from onnx_remat.options import PlanningOptions, without_arena
from onnx_remat.plan.selectors import Progress, silent
from onnx_remat.process import worker
from onnx_remat.process.child import Child, Failed
from onnx_remat.rewrite.accounting import smallest_budget
from onnx_remat.rewrite.original import Original, begin
from onnx_remat.rewrite.pipeline import Result, rewrite_for
from onnx_remat.rewrite.plans import TooLittleTime
from onnx_remat.rewrite.report import CUT_SHORT
from onnx_remat.units import Budget, format_bytes, table

MOST_POINTS = 10_000
"""Maximum number of budgets in a sweep: each takes the time of a plan."""


@dataclass(frozen=True, slots=True)
class Point:
    """One rewritten model: its budget and its memory (bytes), its extra compute (a fraction) and recomputed nodes.

    `extra_time` is the predicted time of a step by a loop over that of the original, less 1; None where not known.
    """

    budget: int
    peak: int
    extra_compute: float
    recomputed: int
    extra_time: float | None = None


@dataclass(frozen=True, slots=True)
class Curve(Finding):
    """Extra compute as a function of the peak.

    Attributes
    ----------
    original_peak, lower_bound : int
        Bytes of what a budget covers (`Options.run_by`): those of the original, and a lower bound for all schedules.
    points : tuple of Point
        From the highest peak to the lowest; extra compute never decreases.
    knee : int
        Index of the point after which extra compute rises fastest: the farthest from the line between the curve's
        ends, both axes scaled to 1 (Satopää et al. 2011).
    missed : tuple of int
        Budgets, in bytes, for which no file was found.
    cut_short : bool
        Whether the clock cut the planning of a file short (`Options.time_limit`): another run may find another curve.
    impossible_below : int
        No budget below this many bytes can be kept: the lower bound with the margin that plans keep free.
    """

    schema: ClassVar[str] = "onnx-remat/sweep/1"

    original_peak: int
    lower_bound: int
    points: tuple[Point, ...]
    knee: int
    missed: tuple[int, ...] = ()
    cut_short: bool = False
    impossible_below: int = 0

    def lines(self) -> list[str]:
        """Return the curve as a table with the knee marked."""
        top = self.original_peak or 1
        times = [() if p.extra_time is None else (f"{p.extra_time:+.2%}",) for p in self.points]
        rows = [
            (format_bytes(p.peak), f"{p.peak / top:.1%}", f"{p.extra_compute:+.2%}", *time, str(p.recomputed))
            for p, time in zip(self.points, times, strict=True)
        ]
        time_head = ("predicted step time",) if any(times) else ()
        lines = table([("memory", "of original", "extra compute", *time_head, "recomputed"), *rows])
        if self.points:
            lines[1 + self.knee] += "  <- knee"
        lines.append(f"impossible: any budget below {format_bytes(self.impossible_below)}")
        if self.missed:
            lines.append("no file was found for " + ", ".join(map(format_bytes, self.missed)))
        if self.cut_short:
            lines.append(CUT_SHORT)
        return lines


@worker.device_left()
def sweep(model: Model, points: int = 10, jobs: int = 1, **options: Unpack[PlanningOptions]) -> Curve:
    """Rewrite a model for budgets spread evenly from its own peak down to the lowest that is found.

    Parameters
    ----------
    model : path, bytes or onnx.ModelProto
        A training graph.
    points : int
        Number of budgets; each takes the time of a plan.
    jobs : int
        Number of processes that plan in parallel. The curve does not depend on it where `effort` limits planning.
    **options
        Fields of `Options`.

    Returns
    -------
    Curve
        Peaks are of the memory that a budget covers: by default, all that training with `session.training.Loop` takes.

    Raises
    ------
    UsageError
        Fewer than two points, or more than `MOST_POINTS`; fewer than one job.
    OnnxRematError
        As in `rewrite_model`, except for infeasible budgets; a time limit too short for one file is an error.

    Examples
    --------
    >>> from sample_models.chain import chain
    >>> curve = sweep(chain(8, 1024, 64), 3, effort=0.02)
    >>> [p.extra_compute for p in curve.points] == sorted(p.extra_compute for p in curve.points)
    True
    """
    if not 2 <= points <= MOST_POINTS:
        raise UsageError(f"a sweep has 2 to {MOST_POINTS} points, not {points}")
    if jobs < 1:
        raise UsageError("{} must be at least 1, not {}", Setting("jobs"), jobs)
    without_arena(options, "a sweep")
    progress = options.pop("progress", silent)
    original = begin(model, options)
    whole = rewrite_for(original, "100%")
    top, books = whole.report.budget, whole.report.books()
    floor = whole.report.lower_bound + books
    found, missed = [_point(whole)], []
    least = smallest_budget(whole.report.lower_bound, books)
    lowest, cut_lowest = _lowest(original, least, named("lowest peak", progress))
    budgets = np.linspace(top, lowest, points + 1, dtype=np.int64).tolist()[1:]
    names = [f"budget {number} of {len(budgets)}" for number in range(1, len(budgets) + 1)]
    found_for: Iterator[_Tried]
    if jobs == 1:
        found_for = (_try(original, budget, named(name, progress)) for name, budget in zip(names, budgets, strict=True))
    else:
        found_for = _tried_apart(model, budgets, jobs, options, names, progress)
    cut_short = whole.report.cut_short or cut_lowest
    for budget, (point, bound, cut) in zip(budgets, found_for, strict=True):
        cut_short |= cut
        if point is None:
            missed.append(budget)
        else:
            floor = max(floor, bound + books)
            found.append(point)
    front = _front(found)
    impossible = min(smallest_budget(floor - books, books), top)
    return Curve(top, floor, front, _knee(front), tuple(missed), cut_short, impossible)


_Tried = tuple[Point | None, int, bool]
"""Result of one budget, None where no file was found; the lower bound on all schedules in bytes; `Report.cut_short`."""


def _try(original: Original, budget: int, progress: Progress = silent) -> _Tried:
    try:
        result = rewrite_for(original, Budget(bytes=budget), advise=False, progress=progress)
    except TooLittleTime:
        raise
    except BudgetInfeasibleError as error:
        return None, 0, error.cut_short
    return _point(result), result.report.lower_bound, result.report.cut_short


def tried(model: str | bytes, budget: int, options: PlanningOptions) -> tuple[dict[str, Any] | None, int, bool]:
    """Return the result of one budget as JSON data; runs in a child process."""
    point, bound, cut = _try(begin(model, options), budget)
    return None if point is None else asdict(point), bound, cut


def _tried_apart(
    model: Model, budgets: Sequence[int], jobs: int, options: PlanningOptions, names: Sequence[str], progress: Progress
) -> Iterator[_Tried]:
    """Rewrite to each budget in child processes; yield the results in order."""
    given = os.fspath(model) if isinstance(model, str | os.PathLike) else load(model).model.SerializeToString()
    idle: SimpleQueue[Child] = SimpleQueue()

    def by_another(budget: int) -> _Tried:
        child = idle.get()
        try:
            job = {"model": given, "budget": budget, "options": options}
            point, bound, cut = child.call("onnx_remat.findings.sweep:tried", job)
        finally:
            idle.put(child)
        return point and Point(**point), bound, cut

    with ThreadPoolExecutor(min(jobs, len(budgets))) as pool, ExitStack() as ended:
        for _ in range(min(jobs, len(budgets))):
            idle.put(ended.enter_context(Child()))
        ended.callback(pool.shutdown, wait=False, cancel_futures=True)
        work = [pool.submit(by_another, budget) for budget in budgets]
        try:
            for name, each in zip(names, work, strict=True):
                progress(name, 0.0)
                yield each.result()
        except Failed as failed:
            if failed.how != "died":
                raise failed.error() or failed from None
            why = "a process of the sweep was killed (out of memory?): use a smaller {}"
            raise OnnxRematError(why, Setting("jobs")) from None


def named(what: str, progress: Progress) -> Progress:
    """Return `progress` with the prefix `what` on every stage."""
    return lambda stage, fraction: progress(f"{what}: {stage}", fraction)


def _lowest(original: Original, least: int, progress: Progress) -> tuple[int, bool]:
    """The lowest budget, in bytes, that the selector keeps, and `Report.cut_short`; asks for the `least` possible."""
    try:
        found = rewrite_for(original, Budget(bytes=least), advise=False, progress=progress)
        return found.report.covered()[1], found.report.cut_short
    except TooLittleTime:
        raise
    except BudgetInfeasibleError as error:
        return smallest_budget(int(error.best_peak_bytes * 1.005)), error.cut_short


def _point(result: Result) -> Point:
    report = result.report
    return Point(report.budget, report.covered()[1], report.extra_compute, report.recomputed, report.extra_time())


def _front(found: Sequence[Point]) -> tuple[Point, ...]:
    """Return the Pareto front: the points that no other point dominates, from the highest peak down."""
    front: list[Point] = []
    for point in sorted(found, key=lambda p: (p.extra_compute, p.peak)):
        if not front or point.peak < front[-1].peak:
            front.append(point)
    return tuple(front)


def _knee(front: Sequence[Point]) -> int:
    compute = np.array([p.extra_compute for p in front])
    peak = np.array([p.peak for p in front], np.float64)
    across, down = np.ptp(compute), np.ptp(peak)
    if not across or not down:
        return len(front) - 1  # compute does not grow: the lowest peak
    # Distance below the line from the first point (0, 1) to the last (1, 0).
    return int(np.argmax(1 - (compute - compute[0]) / across - (peak - peak[-1]) / down))
