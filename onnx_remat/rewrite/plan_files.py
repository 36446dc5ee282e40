"""The file of a plan, in memory, and the file as ONNX Runtime executes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx

from onnx_remat.errors import ModelError, VerificationError
from onnx_remat.ir import metadata
from onnx_remat.options import Options
from onnx_remat.ort import runtime
from onnx_remat.ort.executed import Executed, at_levels
from onnx_remat.plan.request import Deadline
from onnx_remat.rewrite.accounting import Goal, LoopMemory, SessionMemory, simulated_levels
from onnx_remat.rewrite.plans import Plan
from onnx_remat.session.prediction import Footprint
from onnx_remat.version import __version__
from onnx_remat.write import private_buffers
from onnx_remat.write.decided import Rewritten
from onnx_remat.write.realize import realize
from onnx_remat.write.rounding import Direct

_NEAR_PEAK = 0.97  # of the target: steps above this count as peaks in the search for buffers whose sharing raises them

Stage = Callable[[str], AbstractContextManager[None]]
"""A context manager for each stage of the work, by its name."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A plan, its file, and the file as ONNX Runtime executes it at each optimisation level.

    `footprint` is the memory of a loop with it, where the budget is for a loop.
    """

    plan: Plan
    written: Rewritten
    executed: Mapping[str, Executed]
    footprint: Footprint | None = None

    def preference(self) -> tuple[float, float]:
        """Return the order of preference among files: predicted step time, where known, then extra compute."""
        return self.footprint.seconds if self.footprint else 0.0, self.plan.extra_compute


@dataclass(frozen=True, slots=True)
class Work:
    """The context that all plans of a rewrite share.

    Attributes
    ----------
    original : Executed
        The original as ONNX Runtime executes it by default.
    folder : Path or None
        Where the model's external data lies.
    options : Options
    stage : callable
        Entered around each stage.
    deadline : Deadline
    seconds_per_file : float
        What it takes to write and simulate one file, as known so far.
    """

    original: Executed
    folder: Path | None
    options: Options
    stage: Stage
    deadline: Deadline
    seconds_per_file: float

    def ends_soon(self, files: float = 1.0) -> bool:
        """Return whether no time is left for so many files."""
        return self.deadline.ends_within(files * self.seconds_per_file)

    def clock(self, share: float = 1.0, files: float = 1.0) -> Deadline:
        """Return a deadline for a plan: a share of the time that so many files leave."""
        return self.deadline.sooner(files * self.seconds_per_file, share)


def for_budget(made: Fitted, allowed: int) -> Fitted:
    """Return a file that keeps a budget, made for another one, as a file for that budget."""
    metadata.set_entry(made.written.model, metadata.BUDGET_KEY, str(allowed))
    return replace(made, plan=replace(made.plan, budget=allowed))


def written_and_simulated(plan: Plan, goal: Goal, target: int, work: Work, direct: Direct) -> tuple[int, Fitted]:
    """Make the file of a plan, in memory, and simulate it; return its covered memory in bytes, and the file.

    A loop opens a file at the last level alone; of the levels at which a plain session has to keep the budget, the
    worst counts.

    Where the file exceeds the budget, values whose shared buffers raise the peak get private ones, as long as there are
    any. This does not help against gaps in the arena.
    """
    options, memory, before_peak = work.options, goal.memory, work.original.timeline.peak
    unrolled = private_buffers.unroll(plan.compiled.problem, plan.schedule)
    steps = unrolled.step
    private: set[int] = set()
    exposed: set[int] = set() if memory.shares_buffers else set(range(len(plan.schedule.order)))
    while True:
        with work.stage("rewrite"):
            written = _write(plan, goal, target, before_peak, private, exposed, direct.values, options.dims)
        with work.stage("simulate result"):
            rounded = direct.differing(written, unrolled)
            if not direct.values.issuperset(rounded):
                direct.values.update(rounded)
                continue
            written = replace(written, rounded=rounded)
            executed = _executed(written.model, work, memory.levels())
            taken, footprint = memory.taken(executed, max(work.deadline.left(), 0.0))
        so_far = len(private) + len(exposed)
        if memory.shares_buffers and taken > plan.budget:
            warm = int(target * _NEAR_PEAK)
            idle = {i for what in executed.values() for i in _idle_sharers(what, warm, written)}
            exposed |= {int(steps[i]) for i in idle & private}
            private |= idle
        if len(private) + len(exposed) == so_far:
            return max(taken, memory.arena_bytes(executed)), Fitted(plan, written, executed, footprint)


def _executed(model: onnx.ModelProto, work: Work, levels: Sequence[str]) -> dict[str, Executed]:
    """Return a written model as ONNX Runtime executes it, by optimisation level."""
    try:
        return at_levels(model, work.folder, levels, work.options.preparation())
    except ModelError as error:
        raise VerificationError("the rewritten model is not usable: {}", error.message) from error


def at_other_levels(made: Fitted, work: Work) -> dict[str, Executed]:
    """Return the simulations with those of the missing levels; only the first of these if little time is left."""
    model, executed = made.written.model, made.executed
    missing = [level for level in simulated_levels() if level not in executed]
    if not missing:
        return dict(executed)
    if work.ends_soon() or runtime.is_large(model):
        missing = missing[:1]
    with work.stage("simulate result"):
        found = {**executed, **_executed(model, work, missing)}
    return {level: found[level] for level in simulated_levels() if level in found}


def _idle_sharers(what: Executed, limit: int, written: Rewritten) -> set[int]:
    """Return occurrences to make private, so that no dead buffer stays allocated through steps above `limit`.

    Another value would take the place of each: its followers are found here, without another call of ONNX Runtime.
    """
    number = {name: i for i, name in enumerate(written.occurrences)}
    names = list(what.compiled.graph.values)
    unrolled = private_buffers.unroll(what.compiled.problem, what.order)
    ours = [names[v] in number for v in unrolled.source.tolist()]
    can_hide = np.zeros(len(what.order.order), np.bool_)
    can_hide[unrolled.step[ours]] = True
    found = private_buffers.choose_private(unrolled, limit, 0, can_hide).leaders
    return {number[names[unrolled.source[i]]] for i in found if ours[i]}


def _write(
    plan: Plan,
    goal: Goal,
    limit: int,
    before_peak: int,
    private: Set[int],
    exposed: Set[int],
    direct: Set[str],
    dims: Mapping[str, int],
) -> Rewritten:
    said = metadata_of(plan, goal, before_peak, dims)
    written = realize(plan.compiled, plan.schedule, limit, said, private, exposed, direct)
    if stated := goal.memory.copies(bool(written.moved)):
        stated.put(written.model)
    return written


def metadata_of(plan: Plan, goal: Goal, before_peak: int, dims: Mapping[str, int]) -> dict[str, str]:
    """Return what a file says of its plan; `before_peak` in bytes, of the original's tensors."""
    said = {
        metadata.VERSION_KEY: __version__,
        metadata.BUDGET_KEY: str(plan.budget),
        metadata.PEAK_KEY: str(before_peak),
        metadata.PLANNED_PEAK_KEY: str(plan.timeline.peak),
        metadata.DIMS_KEY: json.dumps(dict(dims)),
        metadata.RUN_BY_KEY: goal.memory.run_by,
    }
    if isinstance(goal.memory, SessionMemory):
        said[metadata.LEVEL_KEY] = goal.memory.level
        said |= {metadata.ARENA_KEY: "1"} if goal.memory.arena else {}
    elif isinstance(goal.memory, LoopMemory) and not goal.memory.options.fuse:
        said[metadata.FUSE_KEY] = "0"
    if (kernels := plan.compiled.kernels).device != "cpu":
        said |= {metadata.PROVIDER_KEY: kernels.name, metadata.WORKSPACE_KEY: str(kernels.library_workspace)}
    return said
