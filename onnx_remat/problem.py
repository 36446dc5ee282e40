"""The planner's currency: a `Problem` (one graph as flat arrays) and a `Schedule` (an order in which ops may recur)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int32]
Longs: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Flags: TypeAlias = npt.NDArray[np.bool_]

FORWARD, BACKWARD, OPTIMIZER = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Problem:
    """One graph as the simulator and the selectors see it: ops and values are numbers, relations are CSR arrays.

    Ops are numbered in a topological order (the file's). An *output slot* is a position in `out_values`.

    Attributes
    ----------
    in_ptr, in_values : int32 (n_ops + 1,), (n_inputs,)
        Values read by op ``i``: ``in_values[in_ptr[i]:in_ptr[i + 1]]``, one entry per input slot, repeats kept.
    out_ptr, out_values : int32 (n_ops + 1,), (n_slots,)
        Values written by op ``i``.
    nbytes : int64 (n_values,)
        Size of each value in bytes.
    resident : bool (n_values,)
        Graph inputs and initializers: they exist for the whole step and are never freed.
    is_output : bool (n_values,)
        Graph outputs: once made (by the op's first occurrence) they are never freed nor shared.
    shape_class : int32 (n_values,)
        Equal numbers mean equal shape and element size, -1 means never shared (unknown shape, string, non-tensor).
    poolable : bool (n_values,)
        May take over, or be taken over from, a dead buffer of its class (ONNX Runtime leaves scalars out).
    alias_slot : int32 (n_slots,)
        Input slot (counted within the op) whose buffer this output must share (Reshape, ...), else -1.
    inplace_ptr, inplace_slots : int32 (n_slots + 1,), (n,)
        Input slots whose buffer this output may take over when it dies here, in the order the runtime tries them.
    droppable : bool (n_slots,)
        An optional output: a recomputed occurrence that nobody reads need not produce it.
    workspace : int64 (n_ops,)
        Bytes of scratch memory alive only while the op runs.
    rerun_workspace : int64 (n_ops,)
        More of it, where the op is a recompute.
    cost : float64 (n_ops,)
        Seconds (or any unit; only ratios matter) of one execution.
    recomputable : bool (n_ops,)
        False for random, stateful and opaque ops: they occur exactly once in every schedule.
    phase : int8 (n_ops,)
        FORWARD, BACKWARD or OPTIMIZER.
    base_bytes : int
        Bytes of all resident values.
    hold_unread : bool
        True where a value nobody reads stays allocated to the end of the step, as ONNX Runtime does;
        False where it is freed right after its op, as the published benchmark graphs count.
    """

    in_ptr: Ints
    in_values: Ints
    out_ptr: Ints
    out_values: Ints
    nbytes: Longs
    resident: Flags
    is_output: Flags
    shape_class: Ints
    poolable: Flags
    alias_slot: Ints
    inplace_ptr: Ints
    inplace_slots: Ints
    droppable: Flags
    workspace: Longs
    rerun_workspace: Longs
    cost: Floats
    recomputable: Flags
    phase: npt.NDArray[np.int8]
    base_bytes: int
    hold_unread: bool = True

    @property
    def n_ops(self) -> int:
        return len(self.in_ptr) - 1

    @property
    def n_values(self) -> int:
        return len(self.nbytes)

    def inputs(self, op: int) -> list[int]:
        """Values read by `op`, in slot order."""
        return [int(v) for v in self.in_values[self.in_ptr[op] : self.in_ptr[op + 1]]]

    def outputs(self, op: int) -> list[int]:
        """Values written by `op`, in slot order."""
        return [int(v) for v in self.out_values[self.out_ptr[op] : self.out_ptr[op + 1]]]

    def producer(self) -> Ints:
        """Op that writes each value, -1 for residents. Shape (n_values,)."""
        made_by = np.full(self.n_values, -1, np.int32)
        made_by[self.out_values] = np.repeat(np.arange(self.n_ops, dtype=np.int32), np.diff(self.out_ptr))
        return made_by


@dataclass(frozen=True, slots=True)
class Schedule:
    """An execution order of op numbers. A second occurrence is a recompute; a step reads the latest occurrence."""

    order: tuple[int, ...]

    def array(self) -> Ints:
        return np.asarray(self.order, np.int32)

    def overhead(self, problem: Problem) -> float:
        """Extra compute as a fraction of one plain execution of every op: 0.25 means 25 % more."""
        total = float(problem.cost.sum())
        repeats = np.bincount(self.array(), minlength=problem.n_ops) - 1
        return float(problem.cost @ repeats) / total if total else 0.0


def check_schedule(problem: Problem, schedule: Schedule) -> None:
    """Raise ValueError unless `schedule` is one the rewriter could write.

    Every op occurs; an op runs after every producer of what it reads; ops that must not be recomputed occur once.
    """
    made_by = problem.producer()
    count = np.zeros(problem.n_ops, np.int64)
    for step, op in enumerate(schedule.order):
        if not 0 <= op < problem.n_ops:
            raise ValueError(f"step {step} runs op {op}, which does not exist")
        for value in problem.inputs(op):
            if made_by[value] >= 0 and not count[made_by[value]]:
                raise ValueError(f"step {step} runs op {op} before op {made_by[value]}, whose output it reads")
        count[op] += 1
    if not count.all():
        raise ValueError(f"op {int(np.argmin(count))} never runs")
    if ((count > 1) & ~problem.recomputable).any():
        raise ValueError(f"op {int(np.argmax((count > 1) & ~problem.recomputable))} must not run twice")


def alias_roots(problem: Problem) -> Ints:
    """Value whose buffer each value lives in, following mandatory aliases only. Shape (n_values,)."""
    root = np.arange(problem.n_values, dtype=np.int32)
    maker = np.repeat(np.arange(problem.n_ops), np.diff(problem.out_ptr))
    aliased = (problem.alias_slot >= 0) & ~problem.is_output[problem.out_values]
    for slot in np.flatnonzero(aliased):  # in order of the ops, so that what is viewed has its root already
        viewed = problem.in_values[problem.in_ptr[maker[slot]] + problem.alias_slot[slot]]
        root[problem.out_values[slot]] = root[viewed]
    return root


def successors(problem: Problem) -> tuple[Ints, Ints]:
    """Ops that read what each op writes, as CSR arrays, each reader once."""
    made_by = problem.producer()
    readers = np.repeat(np.arange(problem.n_ops, dtype=np.int64), np.diff(problem.in_ptr))
    sources = made_by[problem.in_values].astype(np.int64)
    pairs = np.unique((sources * problem.n_ops + readers)[sources >= 0])
    ptr = np.searchsorted(pairs, np.arange(problem.n_ops + 1, dtype=np.int64) * problem.n_ops).astype(np.int32)
    return ptr, (pairs % max(problem.n_ops, 1)).astype(np.int32)
