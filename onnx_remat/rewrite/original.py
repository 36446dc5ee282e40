"""A model before any budget: loaded, compiled and simulated once, for any number of budgets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import onnx

from onnx_remat.errors import ModelError, UsageError
from onnx_remat.ir import model_io, shapes
from onnx_remat.ir.body import check_fits
from onnx_remat.ir.state import with_state
from onnx_remat.messages import Setting
from onnx_remat.options import Options, PlanningOptions, parse_options
from onnx_remat.ort.executed import Executed, as_executed, at_levels
from onnx_remat.ort.host_state import NOT_MOVABLE, counted, movable_state, own_state, state_bytes, with_state_on_host
from onnx_remat.ort.moves import LEAST
from onnx_remat.ort.prepare import Compiled, prepare
from onnx_remat.plan.request import Deadline
from onnx_remat.rewrite.accounting import Accounting, Goal, LoopMemory, SessionMemory, simulated_levels
from onnx_remat.rewrite.first_use import SIMULATOR, FirstUse
from onnx_remat.session.fusing import why_not as why_not_fused
from onnx_remat.session.plan_session import check_openable
from onnx_remat.session.prediction import Footprint, predict
from onnx_remat.units import Budget, format_bytes


@dataclass(frozen=True, slots=True)
class Original:
    """A model that is loaded, compiled and simulated once, for any number of budgets; see `begin`.

    Attributes
    ----------
    options : Options
    folder : Path or None
        Where the model's external data lies.
    data : tuple of str
        Relative paths of its data files.
    memory : Accounting
        The memory that budgets cover, and the model as it is planned.
    executed : Executed
        The model as ONNX Runtime executes it by default; `by_level` at each level that budgets are for.
    footprint : Footprint or None
        Memory of a loop with it; None where a loop cannot open the model.
    seconds : mapping of str to float
        Time that each stage took so far.
    deadline : Deadline
        Deadline of the first budget, which includes simulating the original.
    expanded : bool
        Whether functions of the file are written out as nodes in the model.
    nodes : int
        Number of nodes of the model, without copies of state that the plan adds.
    """

    options: Options
    folder: Path | None
    data: tuple[str, ...]
    memory: Accounting
    executed: Executed
    by_level: Mapping[str, Executed]
    footprint: Footprint | None
    seconds: Mapping[str, float]
    deadline: Deadline
    expanded: bool
    nodes: int

    @property
    def seconds_per_file(self) -> float:
        """Seconds to write and simulate a file, by those that the original took."""
        return self.memory.simulations * self.seconds["simulate original"]

    def job(self, budget: Budget, deadline: Deadline) -> Job:
        """Return the job of keeping a budget until a deadline."""
        goal = Goal(budget.resolve(self.taken), self.memory)
        return Job(self, goal, Stopwatch(self.options.progress, self.seconds), deadline)

    def impossible_below(self, floor: int) -> int:
        """Return the least budget that could be kept if no plan peaks below `floor`: at most the original's bytes."""
        return min(self.memory.budget_for(floor), self.memory.original_bytes)

    @property
    def taken(self) -> int:
        """Bytes that count against a budget: the covered memory, with the arena where the budget covers that."""
        if self.options.offload_state and self.footprint is not None:
            return self.footprint.total  # with its state on the device
        return self.memory.covered

    def peaks_by_level(self) -> dict[str, int]:
        """Return the peak of a plain session's tensors, in bytes, at each level that budgets are for."""
        return {level: each.timeline.peak for level, each in self.by_level.items()}

    def keeps(self, budget: int) -> bool:
        """Return whether the original itself is within a budget, and is to stay as it is."""
        return self.taken <= budget and not self.options.offload_state


@dataclass(frozen=True, slots=True)
class Job:
    """The job of keeping one budget."""

    original: Original
    goal: Goal
    clock: Stopwatch
    deadline: Deadline

    def wait_for(self, warmup: FirstUse, groups: tuple[str, ...]) -> None:
        """Compile some groups of search functions if they are not yet; the time limit does not count it."""
        self.original.options.progress("compile", 0.0)
        seconds = warmup.compile(groups)
        self.clock.waited(seconds)
        self.deadline.later(seconds)


def begin(model: model_io.Model, given: PlanningOptions, warmup: FirstUse | None = None) -> Original:
    """Check the options, load and compile a model, and simulate it; `warmup` knows what is compiled.

    Raises
    ------
    OnnxRematError
        As `rewrite_model`, budgets apart.
    """
    options = parse_options(given)
    clock = Stopwatch(options.progress)
    with clock.stage("load"):
        source = model_io.load(model)
        if options.state_outputs:
            source = with_state(source, options.state_outputs)
        if not options.patterns:
            check_fits(source.model)
        compiled = prepare(source.model, options.preparation())
        options = replace(options, dims=shapes.all_dims(compiled.tensors, options.dims))
    clock.waited((warmup or FirstUse()).compile(SIMULATOR))
    deadline = Deadline(options.time_limit)
    with clock.stage("simulate original"):
        executed = as_executed(compiled.graph.model, source.folder, "all", options.preparation(), compiled)
        _ = executed.timeline  # simulated within the stage
    by_level = {"all": executed}
    memory: Accounting
    if options.offload_state:
        return _with_state_on_host(source, compiled, executed, options, clock, deadline)
    if options.run_by == "session":
        if options.level == "every":  # percentages are of the worst
            with clock.stage("simulate result"):
                by_level = _at_every_level(executed, compiled, source.folder, options)
        footprint = footprint_of(executed, source.model, options)
        memory = SessionMemory.of(compiled, by_level, options)
    else:
        try:
            footprint = _predicted(executed, source.model, options)
        except ModelError as error:
            session = Setting("run_by", "session")
            raise ModelError("{}; {} plans for onnxruntime's own", error.message, session) from None
        there = footprint.state_on_host > 0
        run = replace(executed, compiled=counted(executed.compiled, there))
        memory = LoopMemory.of(run, counted(compiled, there), footprint, options)
        memory = replace(memory, waited=footprint.waited)
    nodes = len(source.model.graph.node), len(compiled.graph.model.graph.node)
    expanded = bool(source.model.functions) or nodes[0] != nodes[1]
    return Original(
        options, source.folder, source.data, memory, executed, by_level, footprint, clock.seconds, deadline, expanded,
        compiled.graph.n_nodes(),
    )  # fmt: skip


def _with_state_on_host(
    source: model_io.Source,
    compiled: Compiled,
    executed: Executed,
    options: Options,
    clock: Stopwatch,
    deadline: Deadline,
) -> Original:
    """Return a step as it is, to be planned with its state on the host."""
    given, own, state = Setting("offload_state", True), own_state(compiled), movable_state(compiled)
    if not state:
        why = f"no input of at least {format_bytes(LEAST)} is read by its own update alone, as moments are"
        if own:
            why = f"{next(iter(own))!r} cannot lie on the host: {NOT_MOVABLE}"
        elif state_bytes(compiled):
            why = "state is on the host already"
        raise UsageError("{}: {}: leave this out", given, why)
    if why := why_not_fused(options.provider):
        raise UsageError("{} copies by a kernel of ours, which this machine cannot run: {}", given, why)
    footprint = _predicted(executed, source.model, options)
    with clock.stage("load"):
        moved = with_state_on_host(source, state)
        planned = prepare(moved.model, options.preparation())
        LoopMemory.stated(planned, options).put(planned.graph.model)
    with clock.stage("simulate original"):
        there = as_executed(planned.graph.model, source.folder, "all", options.preparation(), planned)
    least = _predicted(there, planned.graph.model, options)
    memory = LoopMemory.of(replace(there, compiled=counted(there.compiled)), counted(planned), least, options)
    memory = replace(memory, state=state_bytes(compiled) + sum(compiled.tensors[name].nbytes for name in own))
    nodes = len(source.model.graph.node), len(compiled.graph.model.graph.node)
    return Original(
        options, source.folder, source.data, memory, executed, {"all": executed}, footprint, clock.seconds, deadline,
        bool(source.model.functions) or nodes[0] != nodes[1], compiled.graph.n_nodes(),
    )  # fmt: skip


def _at_every_level(
    original: Executed, compiled: Compiled, folder: Path | None, options: Options
) -> dict[str, Executed]:
    """Return the original as ONNX Runtime executes it at each level; `original` is that of the default level."""
    if original.emulated:
        return {"all": original}
    others = [level for level in simulated_levels() if level != "all"]
    return {**at_levels(compiled.graph.model, folder, others, options.preparation(), compiled), "all": original}


def footprint_of(executed: Executed, model: onnx.ModelProto, options: Options) -> Footprint | None:
    """Return the memory of a loop; None where a session cannot open the step."""
    try:
        return _predicted(executed, model, options)
    except ModelError:
        return None


def _predicted(executed: Executed, model: onnx.ModelProto, options: Options) -> Footprint:
    check_openable(model)
    return predict(executed, fuse=options.fuse, costs=options.costs)


class Stopwatch:
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
