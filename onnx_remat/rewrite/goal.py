"""What a budget is asked for, what of it is left to a plan, and below what no plan can go."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from onnx_remat.fuse.ops import OPS
from onnx_remat.ir.graph import Graph
from onnx_remat.memory.problem import Problem
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
    unbuffered : problem.Problem or None
        `own` less what fused kernels may need no buffer for, where they are counted; `fused` is without that, too.
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
    unbuffered: Problem | None = None
    moving: int | None = None

    def floor(self, problem: Problem) -> int:
        """Bytes that no plan peaks below. What is fused has no values in between: then both graphs say how low."""
        if self.moving is not None:
            return self.moving
        problem = self.unbuffered or self.own or problem
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
        own = self.unbuffered or self.own
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


def without_inner(problem: Problem, graph: Graph) -> Problem:
    """A problem that no session which fuses can take less for: its bounds hold whatever is fused.

    A value that elementwise nodes make and others of them read may lie within a kernel, without a buffer. What a kernel
    leaves to others may lie over any of its inputs, so that a node's result is not counted while it is made.
    """
    life = problem.lifetimes
    can = np.array([not op.node.domain and op.node.op_type in OPS for op in graph.ops], np.bool_)
    nbytes, workspace = problem.nbytes.copy(), problem.workspace.copy()
    for op in np.flatnonzero(can).tolist():
        for value in problem.outputs(op):
            readers = life.readers[life.reader_ptr[value] : life.reader_ptr[value + 1]]
            if life.root[value] == value and can[readers].any():
                nbytes[value] = 0
    smaller = replace(problem, nbytes=nbytes)
    for op in np.flatnonzero(can).tolist():
        workspace[op] -= bounds.writes(smaller, op)
    return replace(smaller, workspace=workspace)


def smallest_budget(peak: int, books: int = 0) -> int:
    """The least budget that plans with this peak keep: the peak, its margin, and what no plan changes."""
    return Goal(0, books=books).budget(peak)
