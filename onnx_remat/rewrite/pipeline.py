"""The stages, top to bottom: load, compile, simulate the original, plan, rewrite, simulate the result, verify."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

import numpy as np
import onnx

from onnx_remat import files
from onnx_remat.errors import BudgetInfeasibleError, UsageError
from onnx_remat.ir import model_io, phases
from onnx_remat.ir.body import into_body
from onnx_remat.measure import verify
from onnx_remat.measure.processes import beyond_tensors
from onnx_remat.memory.problem import Floats
from onnx_remat.messages import Message, Setting
from onnx_remat.options import Options, PlanningOptions
from onnx_remat.ort.executed import Executed
from onnx_remat.ort.moves import Moved, moved
from onnx_remat.ort.peaks import describe, reserves
from onnx_remat.ort.prepare import Compiled
from onnx_remat.plan import selectors
from onnx_remat.plan.cost_bounds import cost_lower_bound
from onnx_remat.plan.request import Deadline
from onnx_remat.process import worker
from onnx_remat.rewrite.accounting import Accounting, Goal, LoopMemory
from onnx_remat.rewrite.first_use import PLANNER, REPORTER, FirstUse, first_use
from onnx_remat.rewrite.fit import fit, fit_once
from onnx_remat.rewrite.least import Trial, least_budget
from onnx_remat.rewrite.notes import MOVES, on_device, rewritten_before, rounding, unseen, warnings
from onnx_remat.rewrite.offload import fit_once_with_moves, fit_unplanned, fit_with_moves
from onnx_remat.rewrite.original import Job, Original, begin, footprint_of
from onnx_remat.rewrite.plan_files import Fitted, Work, for_budget, metadata_of
from onnx_remat.rewrite.plans import Plan, Refusal, TooLittleTime, as_it_is, make_plan
from onnx_remat.rewrite.report import Report
from onnx_remat.session.prediction import Footprint
from onnx_remat.units import Budget, format_bytes, parse_budget
from onnx_remat.write.decided import Rewritten, recorded


@dataclass(frozen=True, slots=True)
class Result:
    """A rewritten model and the report on it.

    Attributes
    ----------
    model : onnx.ModelProto
    report : Report
    folder : Path or None
        Where the model's external data lies.
    data : tuple of str
        Relative paths of the original's data files.
    compiled : Compiled
        The original as it was planned.
    original, executed : Executed
        The original and the rewritten model as ONNX Runtime executes them by default.
    recomputed : tuple of str
        Labels of the recomputed nodes, one entry per extra run.
    """

    model: onnx.ModelProto
    report: Report
    folder: Path | None
    data: tuple[str, ...]
    compiled: Compiled
    original: Executed
    executed: Executed
    recomputed: tuple[str, ...]

    def __repr__(self) -> str:
        """The verdict: a whole model would fill a screen."""
        return f"<Result: {self.report.verdict()}>"

    def save(self, path: str | os.PathLike[str], force: bool = False) -> None:
        """Write the model atomically; external data files are carried along. See `model_io.save`."""
        model_io.save(self.model, files.check_target(path, None, force), self.folder, force, self.data)


@worker.device_left()
def plan_model(model: model_io.Model, budget: str | int | Budget, **options: Unpack[PlanningOptions]) -> Plan:
    """Plan a model without rewriting it.

    Parameters
    ----------
    model : path, bytes, onnx.ModelProto or model_io.Source
        A training graph.
    budget : str, int or Budget
        Memory to take at most, see `parse_budget` and `Options.run_by`; percentages are of the original's memory.
    **options
        Fields of `Options`.

    Returns
    -------
    Plan
        Its schedule's simulated peak is at most the part of the budget that a plan may use; that of the model as it is,
        where this keeps the budget.

    Raises
    ------
    BudgetInfeasibleError
        No plan was found under the budget.
    OnnxRematError
        As `rewrite_model`.
    """
    parsed = parse_budget(budget)
    with first_use() as warmup:
        original = begin(model, options, warmup)
        if original.options.copies:
            given = Setting("offload" if original.options.offload else "offload_state", True)
            raise UsageError("{}: what copies to the host and back is planned by rewrite_model: call that", given)
        job = original.job(parsed, original.deadline)
        if original.keeps(job.goal.allowed):
            return as_it_is(job.goal)
        job.wait_for(warmup, PLANNER)
    try:
        return make_plan(job.goal, job.goal.target(), original.options, job.deadline)
    except Refusal as refusal:
        named = refusal.naming(refusal.candidate or refusal.looked)
        named.cut_short = job.deadline.cut_short and not refusal.proved
        raise named from None


@worker.device_left()
def rewrite_model(model: model_io.Model, budget: str | int | Budget, **options: Unpack[PlanningOptions]) -> Result:
    """Rewrite a training graph so that training with it takes at most a budget on stock ONNX Runtime.

    Parameters
    ----------
    model : path, bytes, onnx.ModelProto or model_io.Source
        A training graph: forward, loss, backward, often the optimizer update.
    budget : str, int or Budget
        ``"4GB"``, ``"3.5GiB"``, ``"80%"`` of the original's memory, or bytes, see `Options.run_by`. ``"auto"``: the
        least for which a step takes at most 10 % more time, as predicted, or compute for ``run_by="session"``;
        ``"+5%"``: at most 5 %.
    **options
        Fields of `Options`, which describes each: what runs the file (`provider`, `run_by`, `arena`, `level`,
        `patterns`, `fuse`); the model (`dims`, `loss`, `state_outputs`); the plan (`selector`, `keep`, `checkpoints`,
        `allow_recompute`, `offload`, `offload_state`) and the search for it (`effort`, `time_limit`); costs (`costs`,
        `cudnn_workspace`, `host_bandwidth`); `verify` ("none", "check" or "run"); and `progress`.

    Returns
    -------
    Result
        ``.model``, ``.report`` and ``.save(path)``.

    Raises
    ------
    UsageError, ModelError, ShapeError
        The arguments or the model are not usable.
    BudgetInfeasibleError
        No plan was found under the budget; the error carries the smallest peak found and a lower bound.
    VerificationError
        The rewritten model fails a check.

    Examples
    --------
    >>> from sample_models.chain import chain
    >>> result = rewrite_model(chain(16, 1024, 64), budget="70%", effort=1.0)
    >>> result.report.after.total <= result.report.budget
    True
    """
    return rewrite(model, budget, options)


def rewrite(model: model_io.Model, budget: str | int | Budget, options: PlanningOptions, advise: bool = True) -> Result:
    """As `rewrite_model`; without `advise`, a refusal names a budget that was not tried, but comes sooner."""
    parsed = parse_budget(budget)
    with first_use() as warmup:
        original = begin(model, options, warmup)
        return _rewrite_to(parsed, original, original.deadline, warmup, advise)


def rewrite_for(
    original: Original, budget: str | int | Budget, advise: bool = True, progress: selectors.Progress | None = None
) -> Result:
    """As `rewrite`, of a model that was begun for several budgets; `progress` in place of its own."""
    if progress is not None:
        original = replace(original, options=replace(original.options, progress=progress))
    with first_use() as warmup:
        return _rewrite_to(parse_budget(budget), original, Deadline(original.options.time_limit), warmup, advise)


def _rewrite_to(budget: Budget, original: Original, deadline: Deadline, warmup: FirstUse, advise: bool) -> Result:
    rival: Fitted | None = None
    slower = budget.slower
    if slower is not None:
        began = time.monotonic()
        found = least_budget(original, slower, deadline, lambda job: _tried(job, warmup))
        budget, rival = Budget(bytes=found.nbytes), found.made and for_budget(found.made, found.nbytes)
        original = replace(original, seconds={**original.seconds, "budget": time.monotonic() - began})
    result = _rewrite(original.job(budget, deadline), warmup, advise, rival, slower)
    extra = result.report.extra_time() or 0.0
    if slower is not None and extra > slower and original.options.offload_state:  # there the original is no answer
        raise _too_slow(original, slower, extra, result.report)
    return result


def _too_slow(original: Original, slower: float, extra: float, report: Report) -> BudgetInfeasibleError:
    refusal = BudgetInfeasibleError(
        Message(
            "no budget up to {} was found for which a step takes at most {:g}% more time: with its state on the host "
            "it takes {:.1f}% more for {}; try {}, or leave out {}",
            format_bytes(original.taken), 100 * slower, 100 * extra, format_bytes(report.covered_after),
            Setting("budget", f"+{math.ceil(100 * extra)}%"), Setting("offload_state", True),
        ),
        report.covered_after, report.lower_bound,
    )  # fmt: skip
    refusal.cut_short = report.cut_short
    return refusal


def _work(job: Job) -> Work:
    original = job.original
    return Work(
        original.executed, original.folder, original.options, job.clock.stage, job.deadline, original.seconds_per_file
    )


def _tried(job: Job, warmup: FirstUse) -> Trial:
    """Return what one plan's file takes; where files may copy to the host, of one that keeps the budget."""
    original = job.original
    job.wait_for(warmup, PLANNER)
    look = fit_once_with_moves if job.goal.memory.may_copy else fit_once
    nbytes, made = look(job.goal, _work(job))
    before, after = original.footprint, made.footprint  # a plain session runs none of the kernels that these count
    slower = after.slower_than(before) if before and after else None
    return Trial(nbytes, made.plan.extra_compute if slower is None else slower, made)


def _rewrite(
    job: Job, warmup: FirstUse, advise: bool, rival: Fitted | None = None, slower: float | None = None
) -> Result:
    """Rewrite for a budget; `slower` as in `Budget`, where that was searched for, and a `rival` was found or not."""
    original, memory = job.original, job.goal.memory
    options = original.options
    if original.keeps(job.goal.allowed):
        return _unchanged(job, _why_kept(original, slower))
    job.wait_for(warmup, PLANNER + REPORTER if options.arena else PLANNER)
    work = _work(job)

    def within(goal: Goal, rival: Fitted | None = None) -> Fitted:
        if memory.may_copy:
            return fit_with_moves(goal, work, rival)
        return fit(goal, work, rival=rival)

    try:
        fitted = within(job.goal, rival)
    except Refusal as refusal:
        plain = fit_unplanned(job.goal, work) if options.offload_state else None
        taken = plain.footprint.total if plain and plain.footprint else memory.covered
        if plain is None or taken > job.goal.allowed:
            budget = _to_ask_for(refusal, job, within) if advise else refusal.candidate
            named = refusal.naming(budget, taken, memory.unplanned)
            named.cut_short = job.deadline.cut_short and not refusal.proved
            raise named from None
        fitted = plain  # like the original, it needs no margin
    job.wait_for(warmup, REPORTER)
    written, final = fitted.written, list(fitted.executed.values())[-1]
    with job.clock.stage("verify"):
        measured = _verify(job, written, fitted.executed)
    report = _report(job, fitted, measured)
    return Result(
        _as_saved(written.model, options), report, original.folder, original.data, memory.compiled, original.executed,
        final, tuple(written.recomputed),
    )  # fmt: skip


_TRIED_BUDGETS = 2  # most budgets that are tried before a refusal advises one


def _to_ask_for(refusal: Refusal, job: Job, within: Callable[[Goal], Fitted]) -> int:
    """Return a budget that a file was found for: a little above the lowest plan, or the bytes of the first look's file.

    0 where neither is below the original. A search limited by the clock may end differently next time, and there is no
    time for a second one: then only the first look counts.
    """
    found, again = refusal.looked, refusal
    most = job.goal.memory.covered
    for _ in range(_TRIED_BUDGETS if job.original.options.effort is not None else 0):
        candidate = again.candidate
        if not 0 < candidate < min(found or most, most):
            break
        try:
            within(replace(job.goal, allowed=candidate))
            return candidate
        except Refusal as error:
            again = error
        except TooLittleTime:
            break
    return found


def _verify(job: Job, written: Rewritten, executed: Mapping[str, Executed]) -> verify.Measured | None:
    """Check the written file as `Options.verify` says; return the measurements if it was run."""
    original, compiled = job.original, job.goal.memory.compiled
    plain, options = executed["disable"], original.options
    if options.verify != "none":
        verify.check(compiled.graph.model, written.model)
    if options.verify != "run":
        return None
    order = [plain.compiled.graph.ops[i].node.name for i in plain.order.order]
    # A loop's budget does not cover a plain session, whose peak is compared with the simulated one.
    by_loop = isinstance(job.goal.memory, LoopMemory)
    simulated = max(each.timeline.peak for each in executed.values())
    limits = verify.Limits(
        tensors=simulated if by_loop else job.goal.allowed,
        arena=options.arena,
        training=job.goal.allowed if by_loop else None,
        beyond=(beyond_tensors(original.executed), beyond_tensors(list(executed.values())[-1])),
    )
    return verify.run(
        compiled, written.model, original.folder, options.dims, limits, order,
        rounded=written.rounded, body=not options.patterns, fuse=options.fuse,
    )  # fmt: skip


_ROUNDING = 1e-9


def _free(plan: Plan, cost: Floats) -> float:
    """Return the part of a plan's extra compute that its bound takes as free; `cost`: that of each op."""
    return float(cost @ (np.bincount(plan.schedule.array(), minlength=len(cost)) - 1))


def _report(job: Job, fitted: Fitted, measured: verify.Measured | None) -> Report:
    """Return the report on the original and on the file as ONNX Runtime runs it by default."""
    plan, written, executed = fitted.plan, fitted.written, fitted.executed
    peaks = {level: each.timeline.peak for level, each in executed.items()}
    original, memory = job.original, job.goal.memory
    options, compiled, before, final = original.options, memory.compiled, original.executed, list(executed.values())[-1]
    after = final.timeline
    with job.clock.stage("bound"):
        problem, allowed = memory.bounded(job.goal.allowed)
        until, per_node = job.deadline.passed, memory.bookkeeping_per_node
        total = float(compiled.problem.cost.sum())
        at_least = 0.0 if options.offload else cost_lower_bound(problem, allowed, None, until, per_node, total)
        counts = memory.prices_kernels() and not options.offload
        free = _free(plan, compiled.problem.cost - problem.cost) if counts else 0.0
        in_kernels = free / (total or 1.0)
        if at_least > plan.extra_compute - in_kernels + _ROUNDING:  # the file has fewer values than the bound counts
            at_least = 0.0
    footprint = fitted.footprint or footprint_of(final, written.model, options)
    with job.clock.stage("arena"):
        arenas = reserves(before, before.timeline), reserves(final, after)
    return Report(
        selector=options.selector,
        budget=job.goal.allowed,
        before=describe(before, before.timeline),
        after=describe(final, after),
        peaks_by_level=peaks,
        lower_bound=memory.least,
        impossible_below=original.impossible_below(memory.least),
        extra_compute=plan.extra_compute,
        extra_compute_bound=at_least,
        extra_compute_in_kernels=in_kernels,
        moved=_moved(plan, footprint),
        recomputed=len(written.recomputed),
        control_edges=written.control_edges,
        private_values=written.private_values,
        state_copies=compiled.graph.n_nodes() - original.nodes,
        nodes_before=original.nodes,
        nodes_after=compiled.graph.n_nodes() + written.nodes_added,
        seconds=job.clock.seconds,
        arena_before=arenas[0],
        arena_after=arenas[1],
        measured=measured,
        notes=(
            *rewritten_before(compiled.graph.model),
            *unseen(before.emulated or final.emulated, compiled.graph.model),
            *rounding(written.rounded),
            *phases.note(compiled.problem.phase.tolist()),
            *on_device(compiled),
            *((MOVES,) if written.moved else ()),
            *memory.notes(fitted.footprint, job.goal.allowed, peaks),
        ),
        warnings=warnings(compiled, written.model),
        run_by=memory.run_by,
        cut_short=job.deadline.cut_short,
        loop_before=original.footprint,
        loop_after=footprint,
        covered_before=original.taken,
        covered_after=_covered(memory, executed, footprint),
    )


def _moved(plan: Plan, footprint: Footprint | None) -> Moved | None:
    """Return the moves of a plan with what kernels wait for them; None if it has none."""
    found = moved(plan.compiled, plan.schedule)
    if found is None or footprint is None or not footprint.copies:
        return found
    share = footprint.waited / plan.compiled.problem.plain_cost()
    return replace(found, share=share, covered=1 - footprint.waited / footprint.copies)


def _covered(memory: Accounting, executed: Mapping[str, Executed], footprint: Footprint | None) -> int:
    """Return the bytes of a file that count against a budget, without headroom."""
    if memory.run_by == "loop" and footprint is not None:
        return footprint.total
    by_level = {level: each for level, each in executed.items() if level in memory.levels()} or executed
    return max(memory.arena_bytes(by_level), *(each.timeline.peak for each in by_level.values()))


def _as_saved(model: onnx.ModelProto, options: Options) -> onnx.ModelProto:
    """Return the model as it is written: in the body of an If where memory patterns are off."""
    return model if options.patterns else into_body(model)


def _why_kept(original: Original, slower: float | None) -> str:
    """Return why the original is the result: it keeps the budget, or no smaller one was found."""
    if slower is None:
        return "the original keeps this budget already"
    if original.impossible_below(original.memory.least) >= original.taken:
        return "no smaller budget is possible"
    price = "time" if original.memory.run_by == "loop" else "compute"
    return f"no smaller budget was found that costs at most {100 * slower:g}% more {price}"


def _unchanged(job: Job, why: str) -> Result:
    """Return the original as the result, with its plan in the metadata, and why."""
    original, memory, clock = job.original, job.goal.memory, job.clock
    options, compiled, executed, footprint = original.options, memory.compiled, original.executed, original.footprint
    peak, nodes = describe(executed, executed.timeline), compiled.graph.n_nodes()
    with clock.stage("arena"):
        taken = reserves(executed, executed.timeline)
    peaks = original.peaks_by_level()
    report = Report(
        selector=options.selector, budget=job.goal.allowed, before=peak, after=peak, peaks_by_level=peaks,
        lower_bound=memory.least, impossible_below=original.impossible_below(memory.least), extra_compute=0.0,
        extra_compute_bound=0.0, extra_compute_in_kernels=0.0,
        recomputed=0, control_edges=0, private_values=0, nodes_before=nodes, nodes_after=nodes,
        seconds=clock.seconds, arena_before=taken, arena_after=taken,
        notes=(
            f"{why}: OUT is the original, "
            + (
                "in the body of an If" if not options.patterns
                else "with outputs renamed" if options.state_outputs
                else "with functions written out" if original.expanded else "unchanged but for metadata"
            ),
            *rewritten_before(compiled.graph.model),
            *phases.note(compiled.problem.phase.tolist()),
            *on_device(compiled),
            *memory.notes(footprint, job.goal.allowed, peaks),
        ),
        warnings=warnings(compiled, compiled.graph.model),
        run_by=memory.run_by, loop_before=footprint, loop_after=footprint,
        covered_before=original.taken, covered_after=original.taken,
    )  # fmt: skip
    metadata = metadata_of(as_it_is(job.goal), job.goal, peak.total, options.dims)
    model = _as_saved(recorded(compiled.graph.model, metadata), options)
    return Result(model, report, original.folder, original.data, compiled, executed, executed, ())
