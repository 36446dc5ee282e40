"""What a budget is asked for, what of it is left to a plan, and below what no plan can go."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from onnx_remat.fuse.ops import OPS, VIEWS
from onnx_remat.ir.graph import Graph
from onnx_remat.memory.problem import Flags, Floats, Problem
from onnx_remat.plan import bounds

MARGIN = 0.01
"""Fraction of the budget kept free for what no plan shows: allocator rounding and the runtime's own bookkeeping."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a budget is asked for, and what of it is left to a plan.

    Attributes
    ----------
    allowed : int
        The budget in bytes.
    by_loop : bool
        It covers what training with `session.training.Loop` takes of the machine, not the sum of tensors.
    books : int
        Bytes that no plan changes: what a session keeps for its graph, reckoned for the original.
    per_node : int
        Bytes of them for every node that runs again.
    taken : int
        What the original takes of what the budget covers.
    workspace : int
        How much of that is its kernels' workspace, where it lies beside all else.
    fused, own : problem.Problem or None
        The original as ONNX Runtime's default optimisations make it, and as it is, for a session of ours, in which
        results may lie over what they are made of; None for any other.
    outside : problem.Problem or None
        `own` for bounds that hold whatever is fused, where kernels are counted, see `outside_kernels`; then `fused` is
        such a problem, too.
    cost : array of float or None
        What each op costs where it runs again, for the search, where kernels are fused; None: as the problem has it.
    moving : int or None
        Bytes below which no plan goes though it may move any value to the host; None where none may be moved.
    """

    allowed: int
    by_loop: bool = False
    books: int = 0
    per_node: int = 0
    taken: int = 0
    workspace: int = 0
    fused: Problem | None = None
    own: Problem | None = None
    outside: Problem | None = None
    cost: Floats | None = None
    moving: int | None = None

    def floor(self, problem: Problem) -> int:
        """Bytes that no plan peaks below. What is fused has no values in between: then both graphs say how low."""
        if self.moving is not None:
            return self.moving
        problem = self.outside or self.own or problem
        floor = bounds.lower_bound(problem)
        if self.fused is None:
            return floor
        above = bounds.lower_bound(self.fused) - self.fused.base_bytes
        return min(problem.base_bytes, self.fused.base_bytes) + min(floor - problem.base_bytes, above)

    def floor_of_moves(self, problem: Problem) -> int:
        """The same of plans that may move every value to the host: the least that one op works on in either graph."""
        problem = problem if self.own is None else self.own
        floor = bounds.working_set(problem)
        return floor if self.fused is None else min(floor, bounds.working_set(self.fused))

    def bounded(self, problem: Problem) -> tuple[Problem, int]:
        """What a bound on extra compute is to hold for: a problem, and the bytes that its schedules may peak at.

        For a loop the books are not a schedule's to use, and the largest workspace lies beside the slab throughout.
        """
        if not self.by_loop or self.own is None:
            return problem, self.allowed
        apart = min(self.workspace, int(self.own.workspace.max(initial=0)))
        own = self.outside or self.own
        alone = replace(own, workspace=np.minimum(own.workspace, 0), base_bytes=own.base_bytes + apart)
        return alone, self.allowed - self.books

    def run_by(self) -> str:
        """What the budget is asked for, as `Options.run_by` says it."""
        return "loop" if self.by_loop else "session"

    def target(self) -> int:
        """The peak that plans are made for: the budget less its margin and the books."""
        return int((self.allowed - self.books) * (1 - MARGIN))

    def budget(self, peak: int) -> int:
        """The least budget that plans with this peak keep."""
        return int(peak / (1 - MARGIN)) + 2 + self.books


LEAST_SHARE = 0.05
"""Of an elementwise node's time, what is left where all it reads and writes stays within a kernel: arithmetic."""


def fused_cost(problem: Problem, graph: Graph) -> Floats:
    """What every op costs where it runs again beside elementwise readers, so that one kernel computes both.

    Of its time by itself the share of bytes that are still read and written: not those of values that elementwise nodes
    make and such nodes read, and no result that such nodes alone read.
    """
    life, cost, can = problem.lifetimes, problem.cost.copy(), _elementwise(graph)
    for op in np.flatnonzero(can).tolist():
        moved = left = 0
        for value in dict.fromkeys(problem.inputs(op)):
            maker, nbytes = life.maker[life.root[value]], int(problem.nbytes[value])
            moved += nbytes
            left += nbytes if maker < 0 or not can[maker] else 0
        for value in problem.outputs(op):
            readers = life.readers[life.reader_ptr[value] : life.reader_ptr[value + 1]]
            moved += int(problem.nbytes[value])
            left += int(problem.nbytes[value]) if problem.is_output[value] or not can[readers].all() else 0
        if moved:
            cost[op] *= max(left / moved, LEAST_SHARE)
    return cost


def outside_kernels(problem: Problem, graph: Graph) -> Problem:
    """A problem whose bounds hold for any session that fuses, whatever it fuses.

    While a kernel runs, values that it makes and reads itself have no buffer, and its results may lie over any of its
    inputs: nothing is counted while a node runs that may be in one. While any other node runs, every kernel has run or
    has not, and what is allocated is what it would be if the nodes of each ran one after the other.
    """
    workspace = problem.workspace.copy()
    workspace[_elementwise(graph) | _named(graph, VIEWS)] = -int(problem.nbytes.sum())
    return replace(problem, workspace=workspace)


def _elementwise(graph: Graph) -> Flags:
    """Ops that may be in a fused kernel, whatever their types."""
    return _named(graph, OPS)


def _named(graph: Graph, names: Collection[str]) -> Flags:
    return np.array([not op.node.domain and op.node.op_type in names for op in graph.ops], np.bool_)


def smallest_budget(peak: int, books: int = 0) -> int:
    """The least budget that plans with this peak keep: the peak, its margin, and what no plan changes."""
    return Goal(0, books=books).budget(peak)
