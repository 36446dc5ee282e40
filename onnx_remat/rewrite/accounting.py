"""The memory that a budget covers, the part of it that a plan may use, and the bytes that no plan peaks below.

A budget covers either all memory of training with `session.training.Loop` (`LoopMemory`), or the tensors of one of ONNX
Runtime's own sessions (`SessionMemory`). Everything that differs between the two is stated here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from onnx_remat.memory import buffers
from onnx_remat.memory.problem import Floats, Longs, Problem, Schedule
from onnx_remat.options import Options
from onnx_remat.ort import moves, runtime
from onnx_remat.ort.executed import Executed
from onnx_remat.ort.folded import with_folded_transposes
from onnx_remat.ort.host_state import is_copy
from onnx_remat.ort.kernels.costs import PRESETS
from onnx_remat.ort.peaks import held
from onnx_remat.ort.prepare import Compiled
from onnx_remat.ort.renewed import with_donations, with_slab_donations
from onnx_remat.plan import bounds
from onnx_remat.rewrite.notes import fusing, other_levels, state_on_device
from onnx_remat.rewrite.relaxed import fused_cost, outside_fusions, outside_kernels, outside_pads, outside_slab
from onnx_remat.session import offsets
from onnx_remat.session.bookkeeping import BYTES_PER_VALUE
from onnx_remat.session.copies import Stated
from onnx_remat.session.fusing import why_not as why_not_fused
from onnx_remat.session.prediction import Footprint, predict
from onnx_remat.session.slab_layout import workspace
from onnx_remat.write import private_buffers

MARGIN = 0.01
"""Fraction of the budget kept free for allocator rounding and bookkeeping that no plan contains."""

AS_IT_IS = "the model as it is"
"""How messages name the original without a plan."""

_UNPREDICTED = 0.004  # headroom on a loop's prediction: networks of up to 3,600 nodes took at most 0.3 % more
_CORRECTED = 0.001  # fraction of the budget kept free by plans whose problem has what files take
_TARGET_SHRINK = 0.998  # of the target in proportion: a file seldom shrinks as much as its plan


def simulated_levels() -> tuple[str, ...]:
    """Return the optimisation levels at which files can be simulated here."""
    return runtime.LEVELS if runtime.available() else ("disable",)


@dataclass(frozen=True)
class Accounting(ABC):
    """The memory that a budget covers; all figures are in bytes.

    Attributes
    ----------
    compiled : Compiled
        The original as it is planned.
    own : Problem
        The problem of the original.
    original_bytes : int
        The covered memory of the original.
    bookkeeping : int
        The part that no plan changes: a session's own data on its graph, estimated for the original.
    bookkeeping_per_node : int
        Additional bookkeeping for every recomputed node.
    optimized : Problem or None
        The original after ONNX Runtime's default optimisations; None where a file has to keep the budget without them,
        and for plans with moves.
    outside : Problem or None
        The original relaxed by a function of `relaxed`, so that bounds hold whatever is fused. For a loop with kernels,
        `optimized` is relaxed likewise. None where a file has to keep the budget without optimisations.
    """

    compiled: Compiled
    own: Problem
    original_bytes: int
    bookkeeping: int = 0
    bookkeeping_per_node: int = 0

    optimized: Problem | None = None
    outside: Problem | None = None

    run_by: ClassVar[str]
    """The value of `Options.run_by`."""
    shares_buffers: ClassVar[bool]
    """Does ONNX Runtime choose which values share a buffer, so that a file may need private buffers?"""
    simulations: ClassVar[float]
    """Time to write and simulate a file, as a multiple of the time to simulate the original."""

    def target(self, budget: int) -> int:
        """Return the peak that plans are made for: the budget less its margin and the bookkeeping."""
        return int((budget - self.bookkeeping) * (1 - MARGIN))

    def budget_for(self, peak: int) -> int:
        """Return the least budget that plans with this peak keep."""
        return smallest_budget(peak, self.bookkeeping)

    @property
    def covered(self) -> int:
        """Bytes of the original that count against a budget: `original_bytes`, with the arena where that covers it."""
        return self.original_bytes

    @property
    def unplanned(self) -> str:
        """How messages name the original without a plan."""
        return AS_IT_IS

    @cached_property
    def saved_by_runtime(self) -> int:
        """Bytes by which the original, as ONNX Runtime runs it, peaks below the problem that is planned.

        They are those of nodes that ONNX Runtime or a kernel fuses: an inner value of a group has no buffer.
        """
        planned = buffers.simulate(self.planned(), self.compiled.default_order()).peak
        return max(0, int(planned) - (self.original_bytes - self.bookkeeping))

    @cached_property
    def floor(self) -> int:
        """Bytes that no plan peaks below: what is fused has no inner values, so the smaller of both graphs' bounds."""
        problem = self.outside or self.own
        floor = bounds.lower_bound(problem)
        if self.optimized is None:
            return floor
        above = bounds.lower_bound(self.optimized) - self.optimized.base_bytes
        return min(problem.base_bytes, self.optimized.base_bytes) + min(floor - problem.base_bytes, above)

    @property
    def least(self) -> int:
        """Bytes that no plan peaks below that the options allow: plans may also move values, where `floor` has none."""
        return self.floor

    @abstractmethod
    def planned(self, alone: bool = False) -> Problem:
        """Return the problem that selectors solve; `alone` as in `Goal`."""

    @abstractmethod
    def bounded(self, budget: int) -> tuple[Problem, int]:
        """Return the problem a bound on extra compute holds for, and the bytes that its schedules may peak at."""

    @abstractmethod
    def levels(self) -> tuple[str, ...]:
        """Return the optimisation levels at which a file has to keep the budget."""

    @abstractmethod
    def taken(self, executed: Mapping[str, Executed], seconds: float | None = None) -> tuple[int, Footprint | None]:
        """Return the covered memory of a file from its graphs by level; for a loop, also its parts."""

    @abstractmethod
    def tighter(self, target: int, taken: int, budget: int) -> int:
        """Return the target to plan for after a file took more than the budget."""

    @abstractmethod
    def is_used_up(self, unused: int, budget: int, missed: bool) -> bool:
        """Return whether a larger target cannot use the bytes left; `missed`: an earlier one was too large."""

    def arena_bytes(self, executed: Mapping[str, Executed]) -> int:
        """Return the memory of a file with ONNX Runtime's arena; 0 where the budget does not cover the arena."""
        return 0

    def bookkeeping_of(self, footprint: Footprint | None) -> int:
        """Return the bookkeeping of a file, in bytes."""
        return footprint.books if footprint else self.bookkeeping

    @property
    def may_copy(self) -> bool:
        """May files copy values or state to the host and back alongside kernels?"""
        return False

    def copies(self, moved: bool) -> Stated | None:
        """Return what a file says of its copies to the host, where it has some: by its plan if `moved`, or before."""
        return Stated.of(self.compiled.graph.model)

    def prices_kernels(self) -> bool:
        """Does the price of a recompute assume that it is part of a kernel?"""
        return False

    def corrections(self, schedule: Schedule, occurrences: Sequence[str], footprint: Footprint) -> Longs | None:
        """Return the bytes that a file takes beyond its plan while each op runs; None where that is not known.

        With the corrections as workspace the plan has the peak that its file takes, and so, nearly, has one like it:
        the next plan is made for what really runs, where a kernel's inner values have no buffer.

        Parameters
        ----------
        schedule : Schedule
            The plan.
        occurrences : sequence of str
            Names of the values in the file, as in `Rewritten`.
        footprint : Footprint
            What the file takes.
        """
        return None

    @abstractmethod
    def notes(self, footprint: Footprint | None, budget: int, peaks: Mapping[str, int]) -> tuple[str, ...]:
        """Return notes for the report on what was counted; `peaks` of a plain session, in bytes, by level."""


@dataclass(frozen=True)
class SessionMemory(Accounting):
    """The tensors of one of ONNX Runtime's own sessions, at the default level or at the worst of all.

    Attributes
    ----------
    arena : bool
        Does the budget also cover the arena?
    with_arena : int
        Bytes of the original with its arena, where the budget covers that.
    level : str
        The optimisation level at which files keep the budget, one of `options.LEVELS`.
    """

    arena: bool = False
    with_arena: int = 0
    level: str = "every"

    run_by = "session"
    shares_buffers = True
    simulations = 4.0

    @classmethod
    def of(cls, compiled: Compiled, by_level: Mapping[str, Executed], options: Options) -> SessionMemory:
        """Return the accounting of a step; `by_level`: as it is executed at the levels that the budget is for."""
        most = max(each.timeline.peak for each in by_level.values())
        made = cls(compiled, compiled.problem, most, arena=options.arena)
        made = replace(made, with_arena=made.arena_bytes(by_level))
        if options.level == "every" or not runtime.available() or by_level["all"].emulated:
            return made  # where nothing is known of what is fused, files keep the budget with nothing fused
        default = by_level["all"].compiled
        outside = outside_fusions(made.own, compiled, default.graph)
        return replace(made, level=options.level, optimized=default.problem, outside=outside)

    @property
    def covered(self) -> int:
        return max(self.original_bytes, self.with_arena)

    @cached_property
    def saved_by_runtime(self) -> int:
        return super().saved_by_runtime if self.optimized else 0

    def planned(self, alone: bool = False) -> Problem:
        """Plans count liveness: the file keeps the runtime from sharing buffers where sharing raises the peak."""
        return replace(self.own, poolable=np.zeros(self.own.n_values, np.bool_))

    def bounded(self, budget: int) -> tuple[Problem, int]:
        return self.outside or self.own, budget

    def levels(self) -> tuple[str, ...]:
        return simulated_levels() if self.level == "every" else simulated_levels()[-1:]

    def taken(self, executed: Mapping[str, Executed], seconds: float | None = None) -> tuple[int, None]:
        return max(each.timeline.peak for each in executed.values()), None

    def arena_bytes(self, executed: Mapping[str, Executed]) -> int:
        return max(held(each, each.timeline) for each in executed.values()) if self.arena else 0

    def tighter(self, target: int, taken: int, budget: int) -> int:
        return target - int(target * (1 - budget / taken * _TARGET_SHRINK))

    def is_used_up(self, unused: int, budget: int, missed: bool) -> bool:
        if self.arena and missed:
            return False
        return not self.saved_by_runtime or unused <= budget * MARGIN

    def notes(self, footprint: Footprint | None, budget: int, peaks: Mapping[str, int]) -> tuple[str, ...]:
        return other_levels(peaks, budget, self.level)


@dataclass(frozen=True, kw_only=True)
class LoopMemory(Accounting):
    """All memory of training with `session.training.Loop`.

    Attributes
    ----------
    options : Options
        `own` and `optimized` are as `onnx_remat.Session` runs them: a result may overwrite an input in the slab.
    workspace : int
        The part of `original_bytes` that is its kernels' workspace, where it lies alongside all else.
    cost : array of float or None
        Cost of recomputing each op, for the search, where kernels are fused; None for that of the problem.
    moving : int or None
        Bytes that no plan peaks below even if it may move any value to the host; None where no value may be moved.
    state : int
        Bytes of state that should lie on the host.
    waited : float
        Seconds that the original's kernels wait for its copies.
    """

    options: Options
    workspace: int = 0
    cost: Floats | None = None
    moving: int | None = None
    state: int = 0
    waited: float = 0.0

    run_by = "loop"
    shares_buffers = False
    simulations = 3.0

    @classmethod
    def of(cls, original: Executed, compiled: Compiled, footprint: Footprint, options: Options) -> LoopMemory:
        """Return the accounting of a step; `original` and `compiled` are without donations."""
        compiled = with_donations(compiled)
        optimized, own = with_slab_donations(with_donations(original.compiled)), with_slab_donations(compiled)
        own = with_folded_transposes(own, compiled, original.compiled)
        per_node = BYTES_PER_VALUE if compiled.kernels.device == "cpu" else 0
        outside, cost = outside_pads(own, compiled), None
        if options.fuse and not why_not_fused(options.provider):
            optimized, outside = outside_kernels(optimized, original.compiled), outside_kernels(own, compiled)
            cost = fused_cost(own, compiled.graph)
        least = offsets.least(compiled.kernels)
        return cls(
            compiled, own, footprint.total, footprint.books, per_node, outside_slab(optimized, least),
            outside_slab(outside, least), options=options, workspace=footprint.workspace, cost=cost,
        )  # fmt: skip

    def with_moves(self, compiled: Compiled) -> LoopMemory:
        """Return the accounting of plans that may move values to the host; `compiled` has the moves."""
        return replace(
            self,
            compiled=compiled,
            own=with_slab_donations(compiled),
            optimized=None,
            outside=None,
            cost=None,
            moving=self.least,
        )

    @cached_property
    def floor(self) -> int:
        return super().floor if self.moving is None else self.moving

    @cached_property
    def least(self) -> int:
        if self.moving is not None or not self.options.offload:
            return self.floor
        return min(bounds.working_set(each) for each in (self.own, self.optimized) if each is not None)

    def planned(self, alone: bool = False) -> Problem:
        """The slab stays allocated while a kernel has its workspace: the largest workspace counts throughout."""
        problem, apart = self.own, min(self.workspace, workspace(self.compiled, self.compiled.graph.ops)[0])
        return replace(
            problem,
            poolable=np.zeros(problem.n_values, np.bool_),
            cost=problem.cost if alone or self.cost is None else self.cost,
            workspace=moves.host_copy_bytes(self.compiled),
            base_bytes=problem.base_bytes + apart,
            hold_unread=False,
        )

    def bounded(self, budget: int) -> tuple[Problem, int]:
        """A schedule may not use the bookkeeping, and the largest workspace counts throughout."""
        own = self.outside or self.own
        apart = min(self.workspace, int(own.workspace.max(initial=0)))
        alone = replace(own, workspace=np.minimum(own.workspace, 0), base_bytes=own.base_bytes + apart)
        return alone, budget - self.bookkeeping

    def levels(self) -> tuple[str, ...]:
        return simulated_levels()[-1:]

    def taken(self, executed: Mapping[str, Executed], seconds: float | None = None) -> tuple[int, Footprint]:
        footprint = predict(executed[simulated_levels()[-1]], seconds, self.options.fuse, self.options.costs)
        return self.counted(footprint), footprint

    def counted(self, footprint: Footprint) -> int:
        """Return the bytes that a file counts for: its prediction with headroom."""
        return int(footprint.total * (1 + _UNPREDICTED))

    @property
    def may_copy(self) -> bool:
        return self.compiled.kernels.device != "cpu" and self.copies(self.options.offload) is not None

    def copies(self, moved: bool) -> Stated | None:
        """They run alongside kernels, if these are ours, where no more may be live."""
        before = super().copies(moved) is not None and any(map(is_copy, self.compiled.graph.ops))
        return self.stated(self.compiled, self.options) if moved or before else None

    @staticmethod
    def stated(compiled: Compiled, options: Options) -> Stated:
        """As `copies` of a file that has some, before there is an accounting."""
        before = None if options.copies else Stated.of(compiled.graph.model)
        costs = options.costs if options.costs in PRESETS else (before and before.costs) or compiled.kernels.costs
        return Stated(before.bandwidth if before else options.link().bandwidth, costs, int(options.fuse))

    def prices_kernels(self) -> bool:
        return self.cost is not None

    def corrections(self, schedule: Schedule, occurrences: Sequence[str], footprint: Footprint) -> Longs | None:
        if self.moving is not None:
            return None
        problem, order = self.planned(), schedule.array()
        takes, unrolled = np.full(len(order), -1, np.int64), private_buffers.unroll(self.compiled.problem, schedule)
        for name, step in zip(occurrences, unrolled.step.tolist(), strict=True):
            takes[step] = max(takes[step], footprint.in_use.get(name, -1))
        following = highest = max(footprint.in_use.values(), default=0)
        for step in reversed(range(len(takes))):  # a node that is missing is part of a later one
            following = takes[step] = takes[step] if takes[step] >= 0 else following
        takes = ((takes + footprint.total - highest) * (1 + _UNPREDICTED)).astype(np.int64)
        beyond = takes - buffers.simulate(problem, schedule).step_bytes
        found = np.zeros(problem.n_ops, np.int64)
        rising = np.argsort(takes, kind="stable")  # of the occurrences of an op, the last one is written
        found[order[rising]] = beyond[rising]
        return found

    def tighter(self, target: int, taken: int, budget: int) -> int:
        return target - (taken - budget)

    def is_used_up(self, unused: int, budget: int, missed: bool) -> bool:
        return unused <= budget * MARGIN

    @property
    def unplanned(self) -> str:
        """How messages name the original without a plan."""
        return "the step with its state on the host" if self.options.offload_state else super().unplanned

    def notes(self, footprint: Footprint | None, budget: int, peaks: Mapping[str, int]) -> tuple[str, ...]:
        return *fusing(footprint, budget, self.options.offload_state), *state_on_device(footprint, self.state)


@dataclass(frozen=True, slots=True)
class Goal:
    """A budget in bytes, and the memory that it covers.

    Attributes
    ----------
    allowed : int
    memory : Accounting
    alone : bool
        Price no node as part of a kernel.
    corrections : int64 (n_ops,) or None
        As of `Accounting.corrections`.
    """

    allowed: int
    memory: Accounting
    alone: bool = False
    corrections: Longs | None = None

    def target(self) -> int:
        """Return the peak that plans are made for."""
        return self.memory.target(self.allowed) if self.corrections is None else int(self.allowed * (1 - _CORRECTED))

    def planned(self) -> Problem:
        """Return the problem that selectors solve."""
        problem = self.memory.planned(self.alone)
        return problem if self.corrections is None else replace(problem, workspace=problem.workspace + self.corrections)


def smallest_budget(peak: int, bookkeeping: int = 0) -> int:
    """Return the least budget that plans with this peak keep: the peak, its margin and the bookkeeping."""
    return int(peak / (1 - MARGIN)) + 2 + bookkeeping
