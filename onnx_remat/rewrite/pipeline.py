"""The stages, top to bottom: load, compile, simulate the original, plan, rewrite, simulate the result, verify."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Unpack

import onnx

from onnx_remat import files
from onnx_remat.errors import ModelError, UsageError
from onnx_remat.ir import model_io, phases, shapes
from onnx_remat.ir.body import check_fits, into_body
from onnx_remat.measure import verify
from onnx_remat.measure.processes import beyond_tensors
from onnx_remat.messages import Setting
from onnx_remat.options import Options, PlanningOptions, parse_options
from onnx_remat.ort.executed import Executed, as_executed, at_levels
from onnx_remat.ort.moves import moved
from onnx_remat.ort.peaks import describe, reserves
from onnx_remat.ort.prepare import Compiled, prepare
from onnx_remat.plan.cost_bounds import cost_lower_bound
from onnx_remat.plan.request import Deadline
from onnx_remat.rewrite.accounting import Accounting, Goal, LoopMemory, SessionMemory, levels
from onnx_remat.rewrite.first_use import PLANNER, REPORTER, SIMULATOR, FirstUse, first_use
from onnx_remat.rewrite.fit import Fitted, Plan, Refusal, Work, fit, make_plan
from onnx_remat.rewrite.notes import MOVES, on_device, rounding, unseen, warnings, worst_level
from onnx_remat.rewrite.offload import fit_with_moves
from onnx_remat.rewrite.report import Report
from onnx_remat.session.plan_session import check_openable
from onnx_remat.session.prediction import Footprint, predict
from onnx_remat.units import Budget, parse_budget
from onnx_remat.write.decided import Rewritten


@dataclass(frozen=True, slots=True)
class Result:
    """A rewritten model and the report on it.

    Attributes
    ----------
    model : onnx.ModelProto
    report : Report
    folder : Path or None
        Where the model's external data lies.
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
    compiled: Compiled
    original: Executed
    executed: Executed
    recomputed: tuple[str, ...]

    def __repr__(self) -> str:
        """The verdict: a whole model would fill a screen."""
        return f"<Result: {self.report.verdict()}>"

    def save(self, path: str | os.PathLike[str], force: bool = False) -> None:
        """Write the model atomically; external data files are carried along. See `model_io.save`."""
        model_io.save(self.model, files.check_target(path, None, force), self.folder, force)


def plan_model(model: model_io.Model, budget: str | int | Budget, **options: Unpack[PlanningOptions]) -> Plan:
    """Plan a model without rewriting it.

    Parameters
    ----------
    model : path, bytes, onnx.ModelProto or model_io.Source
        A training graph.
    budget : str, int or Budget
        Memory to take at most, see `parse_budget` and `Options.run_by`; percentages are of what the original takes.
    **options
        Fields of `Options`.

    Returns
    -------
    Plan
        Its schedule's simulated peak is at most what the budget leaves to a plan.

    Raises
    ------
    BudgetInfeasibleError
        No plan was found under the budget.
    OnnxRematError
        As `rewrite_model`.
    """
    parsed = parse_budget(budget)
    with first_use() as kernels:
        planner = begin(model, options, kernels)
        if planner.options.offload:
            raise UsageError("offload: plans with moves are rewrite_model's")
        job = planner.job(parsed, planner.deadline)
        job.compile(kernels, PLANNER)
    try:
        return make_plan(job.goal, job.goal.target(), planner.options, job.deadline)
    except Refusal as refusal:
        raise refusal.naming(refusal.candidate or refusal.looked) from None


def rewrite_model(model: model_io.Model, budget: str | int | Budget, **options: Unpack[PlanningOptions]) -> Result:
    """Rewrite a training graph so that training with it takes at most a budget on stock ONNX Runtime.

    Parameters
    ----------
    model : path, bytes, onnx.ModelProto or model_io.Source
        A training graph: forward, loss, backward, often the optimizer update.
    budget : str, int or Budget
        ``"4GB"``, ``"3.5GiB"``, ``"80%"`` of what the original takes, or bytes; `Options.run_by` says of what.
    **options
        Fields of `Options`: `run_by`, `selector`, `dims`, `loss`, `keep`, `checkpoints`, `allow_recompute`,
        `time_limit`, `effort`, `costs`, `verify` ("none", "check" or "run"), `progress`.

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
        The rewritten model is not what was promised.

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
    with first_use() as kernels:
        planner = begin(model, options, kernels)
        return _rewrite(planner.job(parsed, planner.deadline), kernels, advise)


def _rewrite(job: Job, kernels: FirstUse, advise: bool) -> Result:
    planner, memory = job.planner, job.goal.memory
    options = planner.options
    if planner.keeps(job.goal.allowed):
        return _unchanged(job)
    job.compile(kernels, PLANNER + REPORTER if options.arena else PLANNER)
    reserve = memory.simulations * planner.seconds["simulate original"]
    fitting = fit_with_moves if options.offload else fit
    work = Work(planner.original, planner.folder, options, job.clock.stage, job.deadline)

    def within(goal: Goal) -> Fitted:
        return fitting(goal, work, reserve)

    try:
        fitted = within(job.goal)
    except Refusal as refusal:
        budget = _to_ask_for(refusal, job, within) if advise else refusal.candidate
        raise refusal.naming(budget, 0 if options.arena else memory.original_bytes) from None
    job.compile(kernels, REPORTER)
    written, final = fitted.written, list(fitted.executed.values())[-1]
    with job.clock.stage("verify"):
        measured = _verify(job, written, fitted.executed)
    report = _report(job, fitted, measured)
    return Result(
        _as_written(written.model, options), report, planner.folder, memory.compiled, planner.original, final,
        tuple(written.recomputed),
    )  # fmt: skip


_TRIED_BUDGETS = 2  # most budgets that are tried before a refusal advises one


def _to_ask_for(refusal: Refusal, job: Job, within: Callable[[Goal], Fitted]) -> int:
    """Return a budget that a file was found for: a little above the lowest plan, or the bytes of the first look's file.

    0 where neither is below the original. A search limited by the clock may end differently next time, and there is no
    time for a second one: then only the first look counts.
    """
    found, again = refusal.looked, refusal
    most = job.goal.memory.original_bytes
    for _ in range(_TRIED_BUDGETS if job.planner.options.effort is not None else 0):
        candidate = again.candidate
        if not 0 < candidate < min(found or most, most):
            break
        try:
            within(replace(job.goal, allowed=candidate))
            return candidate
        except Refusal as error:
            again = error
    return found


def _verify(job: Job, written: Rewritten, executed: Mapping[str, Executed]) -> verify.Measured | None:
    """Check the written file as `Options.verify` says; return the measurements if it was run."""
    planner, compiled = job.planner, job.goal.memory.compiled
    plain, options = executed["disable"], planner.options
    if options.verify != "none":
        verify.check(compiled.graph.model, written.model, plain.compiled.graph)
    if options.verify != "run":
        return None
    order = [plain.compiled.graph.ops[i].node.name for i in plain.order.order]
    # A budget for a loop promises nothing of a plain session: there the file takes what was simulated.
    by_loop = isinstance(job.goal.memory, LoopMemory)
    simulated = max(each.timeline.peak for each in executed.values())
    return verify.run(
        compiled, written.model, planner.folder, dict(options.dims), simulated if by_loop else job.goal.allowed, order,
        options.arena, written.rounded, trained=job.goal.allowed if by_loop else None,
        beyond=(beyond_tensors(planner.original), beyond_tensors(list(executed.values())[-1])),
        body=not options.patterns, fuse=options.fuse,
    )  # fmt: skip


def _report(job: Job, fitted: Fitted, measured: verify.Measured | None) -> Report:
    """Return the report on the original and on the file as ONNX Runtime runs it by default."""
    plan, written, executed = fitted.plan, fitted.written, fitted.executed
    planner, memory = job.planner, job.goal.memory
    options, compiled, original, final = planner.options, memory.compiled, planner.original, list(executed.values())[-1]
    after = final.timeline
    with job.clock.stage("bound"):
        problem, allowed = memory.bounded(job.goal.allowed)
        until, per_node = job.deadline.passed, memory.bookkeeping_per_node
        at_least = 0.0 if options.offload else cost_lower_bound(problem, allowed, None, until, per_node)
        if at_least > plan.extra_compute:  # fused kernels have fewer values than the nodes that the bound counts
            at_least = 0.0
    with job.clock.stage("arena"):
        arenas = reserves(original, original.timeline), reserves(final, after)
    return Report(
        selector=options.selector,
        budget=job.goal.allowed,
        before=describe(original, original.timeline),
        after=describe(final, after),
        peaks_by_level={level: each.timeline.peak for level, each in executed.items()},
        lower_bound=plan.lower_bound,
        impossible_below=planner.impossible_below(plan.lower_bound),
        extra_compute=plan.extra_compute,
        extra_compute_bound=at_least,
        moved=moved(plan.compiled, plan.schedule),
        recomputed=len(written.recomputed),
        control_edges=written.control_edges,
        private_values=written.private_values,
        nodes_before=compiled.graph.n_nodes(),
        nodes_after=compiled.graph.n_nodes() + written.nodes_added,
        seconds=job.clock.seconds,
        arena_before=arenas[0],
        arena_after=arenas[1],
        measured=measured,
        notes=(
            *unseen(original.emulated or final.emulated, compiled.graph.model),
            *rounding(written.rounded),
            *phases.note(compiled.problem.phase.tolist()),
            *on_device(compiled),
            *((MOVES,) if written.moved else ()),
            *memory.notes(fitted.trained, job.goal.allowed),
        ),
        warnings=warnings(compiled, written.model),
        run_by=memory.run_by,
        cut_short=job.deadline.cut_short,
        loop_before=planner.trained,
        loop_after=fitted.trained or _as_trained(final, written.model, options),
    )


@dataclass(frozen=True, slots=True)
class Planner:
    """A model that is loaded, compiled and simulated, for any number of budgets; see `begin`.

    Attributes
    ----------
    options : Options
    folder : Path or None
        Where the model's external data lies.
    memory : Accounting
        What budgets cover, and the model as it is planned.
    original : Executed
        The model as ONNX Runtime executes it by default; `by_level` at each level that budgets are for.
    trained : Footprint or None
        What a loop takes with it; None where it cannot open the model.
    seconds : mapping of str to float
        Time that each stage took so far.
    deadline : Deadline
        Of the first budget: simulating the original counts.
    """

    options: Options
    folder: Path | None
    memory: Accounting
    original: Executed
    by_level: Mapping[str, Executed]
    trained: Footprint | None
    seconds: Mapping[str, float]
    deadline: Deadline

    def rewrite(
        self, budget: str | int | Budget, advise: bool = True, progress: Callable[[str, float], None] | None = None
    ) -> Result:
        """Rewrite the model to a budget; `advise` as in `rewrite`, errors as `rewrite_model`."""
        planner = self if progress is None else replace(self, options=replace(self.options, progress=progress))
        with first_use() as kernels:
            return _rewrite(planner.job(parse_budget(budget), Deadline(self.options.time_limit)), kernels, advise)

    def job(self, budget: Budget, deadline: Deadline) -> Job:
        """Return the job of keeping a budget."""
        goal = Goal(budget.resolve(self.memory.original_bytes), self.memory)
        return Job(self, goal, _Stopwatch(self.options.progress, self.seconds), deadline)

    def impossible_below(self, floor: int) -> int:
        """Return the least budget that could be kept if no plan peaks below `floor`: at most the original's bytes."""
        return min(self.memory.budget(floor), self.memory.original_bytes)

    def keeps(self, budget: int) -> bool:
        """Return whether the original itself is within a budget."""
        return max(self.memory.original_bytes, self.memory.arena_bytes(self.by_level)) <= budget


@dataclass(frozen=True, slots=True)
class Job:
    """One budget for a model."""

    planner: Planner
    goal: Goal
    clock: _Stopwatch
    deadline: Deadline

    def compile(self, kernels: FirstUse, groups: tuple[str, ...]) -> None:
        """Compile some kernels if they are not yet; the time limit does not count it."""
        self.planner.options.progress("compile", 0.0)
        seconds = kernels.compile(groups)
        self.clock.waited(seconds)
        self.deadline.later(seconds)


def begin(model: model_io.Model, given: PlanningOptions, kernels: FirstUse | None = None) -> Planner:
    """Check the options, load and compile a model, and simulate it; `kernels` know what is compiled.

    Raises
    ------
    OnnxRematError
        As `rewrite_model`, budgets apart.
    """
    options = parse_options(given)
    clock = _Stopwatch(options.progress)
    with clock.stage("load"):
        source = model_io.load(model)
        if not options.patterns:
            check_fits(source.model)
        compiled = prepare(source.model, options.preparation())
        options = replace(options, dims=shapes.all_dims(compiled.tensors, options.dims))
    clock.waited((kernels or FirstUse()).compile(SIMULATOR))
    deadline = Deadline(options.time_limit)
    with clock.stage("simulate original"):
        original = as_executed(compiled.graph.model, source.folder, "all", options.preparation(), compiled)
        _ = original.timeline  # simulated within the stage
    by_level = {"all": original}
    memory: Accounting
    if options.run_by == "session":  # at every level, so that a percentage is of what it takes at the worst of them
        with clock.stage("simulate result"):
            by_level = _at_every_level(original, compiled, source.folder, options)
        trained = _as_trained(original, source.model, options)
        memory = SessionMemory(compiled, max(each.timeline.peak for each in by_level.values()), arena=options.arena)
    else:
        try:
            check_openable(source.model)
            trained = predict(original, fuse=options.fuse, costs=options.costs)
        except ModelError as error:
            session = Setting("run_by", "session")
            raise ModelError("{}; {} plans for onnxruntime's own", error.message, session) from None
        memory = LoopMemory.of(original, compiled, trained, options)
    return Planner(options, source.folder, memory, original, by_level, trained, clock.seconds, deadline)


def _at_every_level(
    original: Executed, compiled: Compiled, folder: Path | None, options: Options
) -> dict[str, Executed]:
    """Return the original as ONNX Runtime executes it at each level; `original` is that of the default level."""
    if original.emulated:
        return {"all": original}
    others = [level for level in levels() if level != "all"]
    return {**at_levels(compiled.graph.model, folder, others, options.preparation(), compiled), "all": original}


def _as_written(model: onnx.ModelProto, options: Options) -> onnx.ModelProto:
    """Return the model as it is written: in the body of an If where memory patterns are off."""
    return model if options.patterns else into_body(model)


def _as_trained(executed: Executed, model: onnx.ModelProto, options: Options) -> Footprint | None:
    """Return the memory of a loop; None where a session cannot open the step."""
    try:
        check_openable(model)
        return predict(executed, fuse=options.fuse, costs=options.costs)
    except ModelError:
        return None


def _unchanged(job: Job) -> Result:
    """Return the original as the result: it keeps the budget."""
    planner, memory, clock = job.planner, job.goal.memory, job.clock
    options, compiled, original, trained = planner.options, memory.compiled, planner.original, planner.trained
    peak, nodes = describe(original, original.timeline), compiled.graph.n_nodes()
    with clock.stage("arena"):
        taken = reserves(original, original.timeline)
    peaks = {level: each.timeline.peak for level, each in planner.by_level.items()}
    report = Report(
        selector=options.selector, budget=job.goal.allowed, before=peak, after=peak, peaks_by_level=peaks,
        lower_bound=memory.floor, impossible_below=planner.impossible_below(memory.floor), extra_compute=0.0,
        extra_compute_bound=0.0, recomputed=0, control_edges=0, private_values=0, nodes_before=nodes, nodes_after=nodes,
        seconds=clock.seconds, arena_before=taken, arena_after=taken,
        notes=(
            "the original keeps this budget already: OUT is the original, "
            + ("unchanged" if options.patterns else "in the body of an If"),
            *worst_level(peaks, peak.total),
            *phases.note(compiled.problem.phase.tolist()),
            *on_device(compiled),
            *memory.notes(trained, job.goal.allowed),
        ),
        warnings=warnings(compiled, compiled.graph.model),
        run_by=memory.run_by, loop_before=trained, loop_after=trained,
    )  # fmt: skip
    return Result(_as_written(compiled.graph.model, options), report, planner.folder, compiled, original, original, ())


class _Stopwatch:
    """Seconds per stage, summed over repeats; it also calls the progress callback."""

    def __init__(
        self, progress: Callable[[str, float], None], seconds: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        self.seconds = dict(seconds)
        self._progress = progress

    def waited(self, seconds: float) -> None:
        """Add the seconds of a first use's compilation."""
        if seconds:
            self.seconds["compile"] = self.seconds.get("compile", 0.0) + seconds

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._progress(name, 0.0)
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self._progress(name, 1.0)
