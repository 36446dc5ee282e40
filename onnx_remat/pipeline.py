"""The stages, top to bottom: load, view, simulate the original, plan, rewrite, simulate the result, verify."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx

from onnx_remat import (
    bounds,
    costs,
    graph,
    memory,
    model_io,
    phases,
    runtime,
    selectors,
    shapes,
    sharing,
    verify,
)
from onnx_remat.compile import OpTable, compile_problem, tabulate
from onnx_remat.errors import BudgetInfeasibleError, ModelError, UsageError, VerificationError
from onnx_remat.graph import INPUT, Graph
from onnx_remat.ort_order import default_order
from onnx_remat.realize import realize, settle
from onnx_remat.report import Holding, Peak, Report
from onnx_remat.rewrite import Rewritten
from onnx_remat.schedule import Problem, Schedule, check_schedule
from onnx_remat.shapes import Tensor
from onnx_remat.units import Budget, format_bytes, parse_budget
from onnx_remat.version import __version__

Model = str | os.PathLike[str] | bytes | onnx.ModelProto

THREADS = 8
"""Threads per op that workspace is reckoned for: a fixed figure, so that every machine writes the same file."""

MARGIN = 0.01
"""Fraction of the budget kept free for what no plan shows: allocator rounding and the runtime's own bookkeeping."""

_WARM = 0.97  # of the target: steps above this count as peaks when looking for buffers shared to no good
_PLANS = 6  # plans made when the written file misses the budget that the plan kept


@dataclass(frozen=True, slots=True)
class Options:
    """How to plan; the command line's flags by the same names."""

    selector: str = "auto"
    dims: Mapping[str, int] = field(default_factory=dict)
    loss: str | None = None
    keep: Sequence[str] = ()
    checkpoints: Sequence[str] = ()
    allow_recompute: Sequence[str] = ()
    time_limit: float = 30.0
    costs: str = "cpu"
    verify: str = "check"
    progress: selectors.Progress = selectors.silent


@dataclass(frozen=True, slots=True)
class View:
    """A model in every form the stages need."""

    graph: Graph
    tensors: Mapping[str, Tensor]
    table: OpTable
    problem: Problem

    def default_order(self) -> Schedule:
        """The order ONNX Runtime executes this file in, its graph optimisations aside."""
        made_by = self.problem.producer()
        producers = [
            [int(made_by[v]) for v in self.problem.inputs(op) if made_by[v] >= 0] for op in range(self.problem.n_ops)
        ]
        return Schedule(tuple(default_order(producers)))


@dataclass(frozen=True, slots=True)
class Executed:
    """A model as ONNX Runtime will execute it: its optimised graph and the order of its nodes."""

    view: View
    order: Schedule

    def timeline(self) -> memory.Timeline:
        return memory.simulate(self.view.problem, self.order)


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule that keeps a budget, and what it was made from."""

    view: View
    schedule: Schedule
    timeline: memory.Timeline
    budget: int
    extra_compute: float
    lower_bound: int


@dataclass(frozen=True, slots=True)
class Result:
    """A rewritten model and the report on it."""

    model: onnx.ModelProto
    report: Report
    folder: Path | None = field(default=None, repr=False)

    def save(self, path: str | os.PathLike[str], force: bool = False) -> None:
        """Write the model atomically; external data files are carried along. See `model_io.save`."""
        model_io.save(self.model, model_io.check_target(path, None, force), self.folder)


def make_view(model: onnx.ModelProto, options: Options) -> View:
    """Graph, shapes, facts, costs and phases of a model, compiled into a `Problem`."""
    ir = graph.build(model)
    tensors = shapes.infer(ir, options.dims)
    table = _keeping(ir, tabulate(ir, tensors, THREADS, options.allow_recompute), options.keep)
    problem = compile_problem(
        ir, tensors, table, costs.price(ir, tensors, options.costs), phases.split(ir, tensors, options.loss)
    )
    return View(ir, tensors, table, problem)


def _keeping(ir: Graph, table: OpTable, keep: Sequence[str]) -> OpTable:
    """`table` with the producers of the values named in `keep` marked as not to be recomputed."""
    producer = ir.producer()
    kept = {producer[_known(name, producer, "--keep")] for name in keep}
    return replace(table, recomputable=tuple(r and i not in kept for i, r in enumerate(table.recomputable)))


def _known(name: str, names: Collection[str], flag: str) -> str:
    """`name` if it is one of `names`; UsageError with the nearest match otherwise."""
    if name in names:
        return name
    close = difflib.get_close_matches(name, names, n=1)
    raise UsageError(f"{flag}: no node makes a value {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))


def as_executed(model: onnx.ModelProto, folder: Path | None, level: str, options: Options) -> Executed:
    """What ONNX Runtime makes of a model at an optimisation level; emulated from the file where it is not installed."""
    plain = replace(options, keep=(), loss=None, costs="cpu")
    if level == "disable" or not runtime.available():
        view = _structural_view(model, plain)
        return Executed(view, view.default_order())
    view = _structural_view(runtime.optimized(shapes.declared(model), folder, level), plain)
    return Executed(view, Schedule(tuple(range(view.problem.n_ops))))


def _structural_view(model: onnx.ModelProto, options: Options) -> View:
    """A view for simulation alone: costs and phases do not matter to memory."""
    ir = graph.build(model)
    tensors = shapes.infer(ir, options.dims)
    table = tabulate(ir, tensors, THREADS, options.allow_recompute)
    nothing = [0] * len(ir.ops)
    return View(ir, tensors, table, compile_problem(ir, tensors, table, nothing, nothing))


def plan_model(model: Model, budget: str | int | Budget, **options: object) -> Plan:
    """Plan a model without rewriting it.

    Parameters
    ----------
    model : path, bytes or onnx.ModelProto
        A training graph.
    budget : str, int or Budget
        Peak to stay under, see `parse_budget`; percentages are of the original's own peak.
    **options
        Fields of `Options`.

    Returns
    -------
    Plan
        Its schedule's simulated peak is at most the budget.

    Raises
    ------
    BudgetInfeasibleError
        No plan was found under the budget.
    OnnxRematError
        As `rewrite_model`.
    """
    parsed, opts = parse_budget(budget), _options(options)
    source = model_io.load(model)
    view = make_view(source.model, opts)
    original = as_executed(source.model, source.folder, "all", opts)
    allowed = parsed.resolve(original.timeline().peak)
    return _plan(view, allowed, int(allowed * (1 - MARGIN)), opts)


def rewrite_model(model: Model, budget: str | int | Budget, **options: object) -> Result:
    """Rewrite a training graph so that its whole step peaks at or under a budget on stock ONNX Runtime.

    Parameters
    ----------
    model : path, bytes or onnx.ModelProto
        A training graph: forward, loss, backward, often the optimizer update.
    budget : str, int or Budget
        ``"4GB"``, ``"3.5GiB"``, ``"80%"`` of the original's peak, or bytes.
    **options
        Fields of `Options`: `selector`, `dims`, `loss`, `keep`, `checkpoints`, `allow_recompute`, `time_limit`,
        `costs`, `verify` ("none", "check" or "run"), `progress`.

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
    >>> result = rewrite_model(chain(16, 1024, 64), budget="70%", time_limit=1.0)
    >>> result.report.after.total <= result.report.budget
    True
    """
    parsed, opts = parse_budget(budget), _options(options)
    clock = _Stopwatch(opts.progress)
    with clock.stage("load"):
        source = model_io.load(model)
        view = make_view(source.model, opts)
    with clock.stage("simulate original"):
        original = as_executed(view.graph.model, source.folder, "all", opts)
        before = original.timeline()
        allowed = parsed.resolve(before.peak)
    if before.peak <= allowed:
        return _unchanged(view, original, allowed, opts, source.folder, clock)
    plan, written, executed = _fit(view, original, allowed, source.folder, opts, clock)
    peaks = {level: what.timeline().peak for level, what in executed.items()}
    measured, notes = None, _notes()
    with clock.stage("verify"):
        if opts.verify != "none":
            verify.check(view.graph.model, written.model, executed["disable"].view.graph)
        if opts.verify == "run":
            plain = executed["disable"]
            order = [plain.view.graph.ops[i].node.name for i in plain.order.order]
            measured = verify.run(view.graph.model, written.model, source.folder, dict(opts.dims), allowed, order)
    final = list(executed)[-1]
    return Result(
        written.model,
        Report(
            selector=opts.selector,
            budget=allowed,
            before=_describe(original, before),
            after=_describe(executed[final], executed[final].timeline()),
            peaks_by_level=peaks,
            lower_bound=plan.lower_bound,
            extra_compute=plan.extra_compute,
            recomputed=len(written.recomputed),
            control_edges=written.control_edges,
            private_values=written.private_values,
            nodes_before=len(view.graph.ops),
            nodes_after=len(view.graph.ops) + written.nodes_added,
            seconds=clock.seconds,
            measured=measured,
            notes=notes,
        ),
        source.folder,
    )


def _unchanged(
    view: View, original: Executed, allowed: int, options: Options, folder: Path | None, clock: _Stopwatch
) -> Result:
    """The original as it is: it keeps the budget already."""
    peak = _describe(original, original.timeline())
    report = Report(
        selector=options.selector, budget=allowed, before=peak, after=peak, peaks_by_level={"all": peak.total},
        lower_bound=bounds.lower_bound(view.problem), extra_compute=0.0, recomputed=0, control_edges=0,
        private_values=0, nodes_before=len(view.graph.ops), nodes_after=len(view.graph.ops), seconds=clock.seconds,
        notes=("the original keeps this budget already: OUT is the original, unchanged",),
    )  # fmt: skip
    return Result(view.graph.model, report, folder)


def _options(given: Mapping[str, object]) -> Options:
    try:
        options = Options(**given)  # type: ignore[arg-type]
    except TypeError as error:
        fields = ", ".join(Options.__dataclass_fields__)
        raise UsageError(f"unknown option: choose from {fields}") from error
    if options.verify not in verify.MODES:
        raise UsageError(f"verify must be one of {', '.join(verify.MODES)}, not {options.verify!r}")
    selectors.get(options.selector)
    if options.verify == "run":
        runtime.import_runtime()
    return options


def _plan(view: View, allowed: int, target: int, options: Options) -> Plan:
    floor = bounds.lower_bound(view.problem)
    baseline = view.default_order()
    select = selectors.get(options.selector)
    # Plans are made against liveness: the file keeps the runtime from sharing buffers where that costs memory.
    problem = replace(view.problem, poolable=np.zeros(view.problem.n_values, np.bool_))
    numbers = {name: i for i, name in enumerate(view.graph.values)}
    request = selectors.Request(
        problem,
        target,
        baseline,
        time_limit=options.time_limit,
        progress=options.progress,
        checkpoints=tuple(numbers[_known(name, numbers, "--checkpoint")] for name in options.checkpoints),
        anchors=tuple(op.index for op in view.graph.ops if op.node.op_type in costs.MATRIX_OPS),
    )
    schedule = settle(view.graph, problem, select(request), target)
    check_schedule(problem, schedule)
    timeline = memory.simulate(problem, schedule)
    if timeline.peak > target:
        needed = int(timeline.peak / (1 - MARGIN)) + 1
        impossible = "is impossible" if floor > allowed else "was not reached"
        raise BudgetInfeasibleError(
            f"budget {format_bytes(allowed)} {impossible}: the lowest that selector {options.selector!r} finds is "
            f"about {format_bytes(needed)} ({needed}B), and no schedule peaks below {format_bytes(floor)}",
            timeline.peak, floor,
        )  # fmt: skip
    return Plan(view, schedule, timeline, allowed, schedule.overhead(view.problem), floor)


def _fit(
    view: View, original: Executed, allowed: int, folder: Path | None, options: Options, clock: _Stopwatch
) -> tuple[Plan, Rewritten, dict[str, Executed]]:
    """Plan, write, and see what ONNX Runtime would make of the file, until that is within the budget.

    Where the file as executed exceeds the budget, first the values that share buffers to no good are made private;
    when there are none left, the plan is made anew for a tighter target.
    """
    target = int(allowed * (1 - MARGIN))
    before_peak = original.timeline().peak
    lowest: int | None = None
    for attempt in range(_PLANS):
        with clock.stage("plan"):
            try:
                plan = _plan(view, allowed, target, options)
            except BudgetInfeasibleError:
                if not attempt:
                    raise
                break
        private: set[int] = set()
        exposed: set[int] = set()
        while True:
            with clock.stage("rewrite"):
                written = _write(plan, target, before_peak, private, exposed)
            with clock.stage("simulate result"):
                executed = _as_written(written.model, folder, options)
                timelines = {level: what.timeline() for level, what in executed.items()}
            worst = max(timeline.peak for timeline in timelines.values())
            lowest = worst if lowest is None else min(lowest, worst)
            if worst <= allowed:
                return plan, written, executed
            warm = int(target * _WARM)
            idle = {i for level, what in executed.items() for i in _idle_sharers(what, timelines[level], warm, written)}
            known = {i for i in idle if i in private}
            steps = sharing.unroll(view.problem, plan.schedule).step
            news = (idle - private, {int(steps[i]) for i in known} - exposed)
            if not any(news):
                break
            private |= news[0]
            exposed |= news[1]
        target = int(target * allowed / worst * 0.998)  # ask for less by what the file took more than the plan
    assert lowest is not None  # the first plan either raised or was written
    raise BudgetInfeasibleError(
        f"no file found that ONNX Runtime runs under budget {format_bytes(allowed)}: the best one peaks at "
        f"{format_bytes(lowest)}; no schedule at all peaks below {format_bytes(plan.lower_bound)}",
        lowest, plan.lower_bound,
    )  # fmt: skip


def _as_written(model: onnx.ModelProto, folder: Path | None, options: Options) -> dict[str, Executed]:
    """A written model as ONNX Runtime executes it, per optimisation level."""
    levels = runtime.LEVELS if runtime.available() else ("disable",)
    try:
        return {level: as_executed(model, folder, level, options) for level in levels}
    except ModelError as error:
        raise VerificationError(f"the rewritten model is not usable: {error}") from error


def _idle_sharers(what: Executed, timeline: memory.Timeline, limit: int, written: Rewritten) -> set[int]:
    """Occurrences that hold a dead buffer through steps above `limit` in the file as executed."""
    number = {name: i for i, name in enumerate(written.occurrences)}
    names = list(what.view.graph.values)
    found = sharing.gap_tenants(what.view.problem, what.order.order, timeline, limit)
    return {number[names[v]] for v in found if names[v] in number}


def _write(plan: Plan, limit: int, before_peak: int, private: Set[int], exposed: Set[int]) -> Rewritten:
    metadata = {
        "version": __version__,
        "budget_bytes": str(plan.budget),
        "original_peak_bytes": str(before_peak),
        "planned_peak_bytes": str(plan.timeline.peak),
    }
    view = plan.view
    return realize(view.graph, view.tensors, view.table, view.problem, plan.schedule, limit, metadata, private, exposed)


def _notes() -> tuple[str, ...]:
    if runtime.available():
        return ()
    return (
        "onnxruntime is not installed: its graph optimisations were not simulated; "
        "install onnx-remat[cpu] to have the file checked as it will really run",
    )


def _describe(executed: Executed, timeline: memory.Timeline) -> Peak:
    """Split a peak into inputs, weights, activations, outputs and workspace."""
    view, problem = executed.view, executed.view.problem
    names = list(view.graph.values)
    inputs = sum(view.tensors[n].nbytes for n, v in view.graph.values.items() if v.kind == INPUT)
    alive = np.flatnonzero((timeline.start <= timeline.peak_step) & (timeline.end >= timeline.peak_step))
    outputs = int(sum(timeline.size[b] for b in alive if problem.is_output[timeline.owner[b]]))
    op = executed.order.order[timeline.peak_step] if executed.order.order else -1
    workspace = int(problem.workspace[op]) if op >= 0 else 0
    producer = view.graph.producer()
    largest = sorted(alive.tolist(), key=lambda b: (-int(timeline.size[b]), b))[:10]
    return Peak(
        total=timeline.peak,
        inputs=inputs,
        weights=problem.base_bytes - inputs,
        activations=timeline.peak - problem.base_bytes - outputs - workspace,
        outputs=outputs,
        workspace=workspace,
        at=f"{view.graph.ops[op].node.op_type} {view.graph.ops[op].label}" if op >= 0 else "",
        top=tuple(
            Holding(name, view.graph.ops[producer[name]].node.op_type, int(timeline.size[b]))
            for b in largest
            for name in (names[timeline.owner[b]],)
        ),
    )


class _Stopwatch:
    """Seconds per stage, summed over repeats; also tells the progress callback which stage runs."""

    def __init__(self, progress: Callable[[str, float], None]) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._progress(name, 0.0)
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self._progress(name, 1.0)
