"""From a decision, which ops' results are dropped and from when on, to the schedule that recomputes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnx_remat.schedule import BACKWARD, Flags, Ints, Problem, Schedule


def split_step(problem: Problem, base_order: Ints) -> int:
    """Step of `base_order` that parts forward from backward with the fewest ops on the wrong side.

    Labels alone would not do: a runtime may execute a backward op that needs nothing, a transposed weight
    say, first.
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
        Ops whose results do not survive. Those that must not be recomputed survive anyway.
    since : int or int32 (n_ops,)
        Step of `base_order`, for all or for each op, from which on the first results are gone.

    Returns
    -------
    Schedule
        A dropped op is emitted again, once, before the first step from `since` on that reads it, directly or
        for another recompute; later steps read that second result.
    """
    order = [int(op) for op in base_order]
    position = np.empty(problem.n_ops, np.int64)
    position[order] = np.arange(problem.n_ops)
    gone_at = np.broadcast_to(np.asarray(since, np.int64), (problem.n_ops,))
    gone = dropped & problem.recomputable
    made_by = problem.producer().tolist()
    result: list[int] = []
    for step, op in enumerate(order):
        chain: list[int] = []
        todo = [op]
        while todo:
            for value in problem.inputs(todo.pop()):
                source = made_by[value]
                if source >= 0 and gone[source] and step >= gone_at[source] and position[source] < gone_at[source]:
                    gone[source] = False
                    chain.append(source)
                    todo.append(source)
        result += sorted(chain, key=lambda source: position[source])
        result.append(op)
    return Schedule(tuple(result))
