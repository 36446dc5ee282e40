"""Schedules from dropped results: the ops whose results are dropped, and from which step -> where they run again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnx_remat.memory.problem import BACKWARD, Flags, Ints, Problem, Schedule
from onnx_remat.process.compiled import compiled, inlined


def split_step(problem: Problem, base_order: Ints) -> int:
    """Return the step of `base_order` that separates forward from backward with the fewest ops on the wrong side.

    Labels alone do not suffice: a runtime may run a backward op without dependencies, a transposed weight say, first.
    """
    forward = problem.phase[base_order] < BACKWARD
    balance = np.concatenate(([0], np.cumsum(np.where(forward, 1, -1))))
    return int(np.argmax(balance))


def materialize(problem: Problem, base_order: Ints | Sequence[int], dropped: Flags, since: int | Ints) -> Schedule:
    """Insert recomputes just before they are needed.

    Parameters
    ----------
    problem : Problem
        The graph.
    base_order : sequence of int
        A topological order in which every op occurs once.
    dropped : bool (n_ops,)
        Ops whose results are dropped. Results of ops that must not be recomputed are kept anyway.
    since : int or int32 (n_ops,)
        Step of `base_order`, for all or for each op, from which on the first results are gone.

    Returns
    -------
    Schedule
        A dropped op is emitted again, once, before the first step from `since` on that reads it, directly or
        for another recompute; later steps read that second result. If one of its inputs is overwritten by then, its
        first result is kept.
    """
    order = np.asarray(base_order, np.int32)
    position = np.empty(problem.n_ops, np.int64)
    position[order] = np.arange(problem.n_ops)
    gone_at = np.empty(problem.n_ops, np.int64)
    gone_at[:] = since
    life = problem.lifetimes
    renewing = life.renewed_by[life.root[problem.in_values]]
    deadline = np.full(problem.n_ops, problem.n_ops, np.int64)
    reader = np.repeat(np.arange(problem.n_ops), np.diff(problem.in_ptr))
    np.minimum.at(deadline, reader[renewing >= 0], position[renewing[renewing >= 0]])
    gone = dropped & life.recomputable
    found = inserted(order, position, gone, gone_at, deadline, life)
    return Schedule(tuple(found.tolist()))


@inlined
def _sort(chain, length, position):  # type: ignore[no-untyped-def]
    """Sort the ops at indices 1 .. length - 1 of a chain by position; NumPy's sort takes seconds to compile.

    Source: D. L. Shell, A high-speed sorting procedure, 1959, with the gaps of Knuth.
    """
    gap = 1
    while 3 * gap < length:
        gap = 3 * gap + 1
    while gap:
        for i in range(1 + gap, length):
            op, k = chain[i], i
            while k > gap and position[chain[k - gap]] > position[op]:
                chain[k] = chain[k - gap]
                k -= gap
            chain[k] = op
        gap //= 3


@compiled
def inserted(order, position, gone, gone_at, deadline, life):  # type: ignore[no-untyped-def]
    """Return `order` with recomputes inserted; `gone` is scratch: it loses the ops that were recomputed."""
    result = np.empty(2 * len(order), np.int32)
    chain = np.empty(len(order) + 1, np.int32)
    n = 0
    for step in range(len(order)):
        chain[0], length, done = order[step], 1, 0
        while done < length:
            op = chain[done]
            done += 1
            for v in life.in_values[life.in_ptr[op] : life.in_ptr[op + 1]]:
                source = life.maker[v]
                if source < 0 or not gone[source] or step > deadline[source]:
                    continue
                if step >= gone_at[source] and position[source] < gone_at[source]:
                    gone[source] = False
                    chain[length] = source
                    length += 1
        _sort(chain, length, position)
        for k in range(1, length):
            result[n] = chain[k]
            n += 1
        result[n] = order[step]
        n += 1
    return result[:n]
