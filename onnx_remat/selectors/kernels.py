"""Compiled building blocks of the searching selectors: score an order, strip what nobody reads, find what to
evict.

Orders are int32 arrays of op numbers in which ops may recur. Every function here is pure: it returns new
arrays.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from onnx_remat.memory import plan_buffers
from onnx_remat.schedule import Flags, Floats, Ints, Longs, Problem

NEVER = 2**31 - 1  # a step after every step


class Flat(NamedTuple):
    """A `Problem` in the form compiled code takes; `budget`-like numbers beside it exclude the residents."""

    in_ptr: Ints
    in_values: Ints
    out_ptr: Ints
    out_values: Ints
    nbytes: Longs
    is_output: Flags
    shape_class: Ints
    poolable: Flags
    alias_slot: Ints
    inplace_ptr: Ints
    inplace_slots: Ints
    droppable: Flags
    workspace: Longs
    hold_unread: bool
    cost: Floats
    recomputable: Flags
    made_by: Ints
    movable: Flags  # ops whose first occurrence may change place; all False where the order is fixed


def flatten(problem: Problem, fixed_order: bool = False) -> Flat:
    """`problem` as compiled code takes it."""
    return Flat(
        problem.in_ptr, problem.in_values, problem.out_ptr, problem.out_values, problem.nbytes,
        problem.is_output, problem.shape_class, problem.poolable, problem.alias_slot, problem.inplace_ptr,
        problem.inplace_slots, problem.droppable, problem.workspace, problem.hold_unread,
        problem.cost, problem.recomputable, problem.producer(), np.full(problem.n_ops, not fixed_order),
    )  # fmt: skip


class Around(NamedTuple):
    """Instances of an order and their reads, seen from step p.

    Attributes
    ----------
    made : int32 (n_inst,)
        Step that makes each instance.
    value : int32 (n_inst,)
        Its value.
    before, after, last : int32 (n_inst,)
        Last read at or before p (-1: none), first read after p (NEVER: none), last of all (-1: none).
    head : int32 (n_steps,)
        Number of each step's first instance.
    previous : int32 (n_steps,)
        Previous occurrence of each step's op, -1 for the first.
    final : int32 (n_ops,)
        Last occurrence of each op.
    """

    made: Ints
    value: Ints
    before: Ints
    after: Ints
    last: Ints
    head: Ints
    previous: Ints
    final: Ints


@njit(cache=True)
def plan(order: Ints, f: Flat):  # type: ignore[no-untyped-def]
    """The simulator on a `Flat`."""
    return plan_buffers(
        order, f.in_ptr, f.in_values, f.out_ptr, f.out_values, f.nbytes, f.is_output, f.shape_class,
        f.poolable, f.alias_slot, f.inplace_ptr, f.inplace_slots, f.droppable, f.workspace, f.hold_unread,
    )  # fmt: skip


@njit(cache=True)
def excess_of(step_bytes: Longs, budget: int) -> float:
    """Bytes above `budget`, summed over the steps."""
    total = 0.0
    for held in step_bytes:
        if held > budget:
            total += held - budget
    return total


@njit(cache=True)
def score(order: Ints, f: Flat, budget: int) -> tuple[float, int]:
    """Excess over `budget` and peak, both without residents."""
    step_bytes = plan(order, f)[0]
    return excess_of(step_bytes, budget), step_bytes.max()


@njit(cache=True)
def cost_of(order: Ints, f: Flat) -> float:
    """Cost of every occurrence."""
    total = 0.0
    for op in order:
        total += f.cost[op]
    return total


@njit(cache=True)
def strip(order: Ints, f: Flat, drop: npt.NDArray[np.bool_]) -> Ints:
    """`order` without the steps flagged in `drop` and without occurrences whose results nobody reads.

    One occurrence of each op stays. The first one counts as wanted where `movable` forbids to leave it out.
    """
    n_ops = len(f.in_ptr) - 1
    first = np.full(n_ops, -1, np.int32)
    for t in range(len(order)):
        if first[order[t]] < 0 and not drop[t]:
            first[order[t]] = t
    keep = np.zeros(len(order), np.bool_)
    later = np.zeros(n_ops, np.bool_)  # an occurrence further on is kept
    wanted = np.zeros(len(f.nbytes), np.bool_)
    kept = 0
    for t in range(len(order) - 1, -1, -1):
        op = order[t]
        if drop[t]:
            continue
        is_first = first[op] == t
        need = is_first and not (later[op] and f.movable[op])
        for k in range(f.out_ptr[op], f.out_ptr[op + 1]):
            need = need or wanted[f.out_values[k]]
        if not need:
            continue
        keep[t] = True
        kept += 1
        later[op] = True
        for k in range(f.out_ptr[op], f.out_ptr[op + 1]):
            wanted[f.out_values[k]] = False
        for k in range(f.in_ptr[op], f.in_ptr[op + 1]):
            wanted[f.in_values[k]] = True
    result = np.empty(kept, np.int32)
    i = 0
    for t in range(len(order)):
        if keep[t]:
            result[i] = order[t]
            i += 1
    return result


@njit(cache=True)
def valid(order: Ints, f: Flat) -> bool:
    """Whether every op occurs, every read is produced before, and no op that must not recur recurs."""
    seen = np.zeros(len(f.in_ptr) - 1, np.bool_)
    for op in order:
        if seen[op] and not f.recomputable[op]:
            return False
        for k in range(f.in_ptr[op], f.in_ptr[op + 1]):
            maker = f.made_by[f.in_values[k]]
            if maker >= 0 and not seen[maker]:
                return False
        seen[op] = True
    return bool(seen.all())


@njit(cache=True)
def insert(order: Ints, at: Ints, ops: Ints) -> Ints:
    """`order` with ``ops[i]`` put just before step ``at[i]``; `at` ascends."""
    result = np.empty(len(order) + len(ops), np.int32)
    i, j = 0, 0
    for t in range(len(order) + 1):
        while j < len(at) and at[j] == t:
            result[i] = ops[j]
            i += 1
            j += 1
        if t < len(order):
            result[i] = order[t]
            i += 1
    return result


@njit(cache=True)
def reads_around(order: Ints, f: Flat, p: int):  # type: ignore[no-untyped-def]
    """Instances of `order` and their reads, seen from step `p`."""
    n_inst = 0
    for op in order:
        n_inst += f.out_ptr[op + 1] - f.out_ptr[op]
    made, value = np.empty(n_inst, np.int32), np.empty(n_inst, np.int32)
    before, after = np.full(n_inst, -1, np.int32), np.full(n_inst, NEVER, np.int32)
    last = np.full(n_inst, -1, np.int32)
    head, previous = np.empty(len(order), np.int32), np.empty(len(order), np.int32)
    final = np.full(len(f.in_ptr) - 1, -1, np.int32)
    latest = np.full(len(f.nbytes), -1, np.int32)
    i = 0
    for t in range(len(order)):
        op = order[t]
        for k in range(f.in_ptr[op], f.in_ptr[op + 1]):
            inst = latest[f.in_values[k]]
            if inst >= 0:
                last[inst] = t
                if t <= p:
                    before[inst] = t
                elif after[inst] == NEVER:
                    after[inst] = t
        head[t] = i
        previous[t] = final[op]
        final[op] = t
        for k in range(f.out_ptr[op], f.out_ptr[op + 1]):
            made[i], value[i] = t, f.out_values[k]
            latest[f.out_values[k]] = i
            i += 1
    return Around(made, value, before, after, last, head, previous, final)


@njit(cache=True)
def ranked(keys):  # type: ignore[no-untyped-def]
    """Indices that sort `keys` ascending, ties by index; Shell's sort, as `np.argsort` is slow to compile."""
    n = len(keys)
    index = np.empty(n, np.int64)
    for i in range(n):
        index[i] = i
    gap = 1
    while gap < n:
        gap = 3 * gap + 1
    while gap > 1:
        gap = gap // 3
        for i in range(gap, n):
            item = index[i]
            j = i
            while j >= gap:
                other = index[j - gap]
                if keys[other] < keys[item] or (keys[other] == keys[item] and other < item):
                    break
                index[j] = other
                j -= gap
            index[j] = item
    return index
