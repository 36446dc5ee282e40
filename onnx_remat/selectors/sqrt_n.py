"""Segment checkpointing: save a few narrow cuts of the forward pass, recompute each segment when backward
needs it.

On a chain of n equal layers, k segments hold ``k + n / k`` layers at the peak, least at ``k = sqrt(n)``. A
general graph is cut where few bytes cross, and the number of segments is swept.

References
----------
Tianqi Chen, Bing Xu, Chiyuan Zhang, Carlos Guestrin: Training deep nets with sublinear memory cost, 2016,
section 4.
"""

from __future__ import annotations

import numpy as np

from onnx_remat.schedule import Ints, Longs, Problem, Schedule, alias_roots
from onnx_remat.selectors.base import Request, register
from onnx_remat.selectors.materialize import materialize, split_step
from onnx_remat.selectors.min_cut import cheapest_within

_MOST_SEGMENTS = 24  # numbers of segments tried


def crossing(problem: Problem, base_order: Ints, split: int) -> tuple[Ints, Longs, Longs]:
    """What crosses each boundary of the forward pass on its way to later forward ops.

    Returns
    -------
    last : int32 (n_values,)
        Last forward step that reads each value or a view of it, -1 for none.
    crossing : int64 (split + 1,)
        Bytes made before a step and read by it or by a later forward step.
    made : int64 (split + 1,)
        Bytes made before each step.
    """
    root = alias_roots(problem)
    last = np.full(problem.n_values, -1, np.int32)
    born = np.full(problem.n_values, -1, np.int32)
    for step, op in enumerate(base_order[:split]):
        for value in problem.inputs(int(op)):
            last[root[value]] = step
        for value in problem.outputs(int(op)):
            if root[value] == value:
                born[value] = step
    change = np.zeros(split + 2, np.int64)
    made = np.zeros(split + 1, np.int64)
    for value in np.flatnonzero(born >= 0).tolist():
        made[born[value] + 1] += problem.nbytes[value]
        if last[value] > born[value]:
            change[born[value] + 1] += problem.nbytes[value]
            change[last[value] + 1] -= problem.nbytes[value]
    return last[root], np.cumsum(change)[: split + 1], np.cumsum(made)


def segment_cuts(crossing_bytes: Longs, made: Longs, segments: int) -> list[int]:
    """Steps that begin a segment: equal shares of the bytes made, moved to the narrowest boundary near."""
    cuts: list[int] = []
    share = made[-1] / segments
    for i in range(1, segments):
        low = int(np.searchsorted(made, (i - 0.5) * share))
        high = max(low + 1, int(np.searchsorted(made, (i + 0.5) * share)))
        window = np.arange(max(1, low), min(high, len(made) - 1))
        if len(window):
            off = np.abs(made[window] - i * share)
            cuts.append(int(window[np.lexsort((off, crossing_bytes[window]))[0]]))
    return sorted(set(cuts))


def segment_plan(problem: Problem, base_order: Ints, split: int, cuts: list[int], last: Ints) -> Schedule:
    """Keep what crosses `cuts`; every other forward op runs again."""
    dropped = np.zeros(problem.n_ops, np.bool_)
    begins = np.asarray(cuts, np.int64)
    for step, op in enumerate(base_order[:split]):
        ends = max((int(last[v]) for v in problem.outputs(int(op))), default=-1)
        crosses = np.searchsorted(begins, step, side="right") < np.searchsorted(begins, ends, side="right")
        view = bool((problem.alias_slot[problem.out_ptr[op] : problem.out_ptr[op + 1]] >= 0).all())
        in_tail = not len(begins) or step >= begins[-1]
        dropped[op] = not crosses and not in_tail and (not view or problem.out_ptr[op] < problem.out_ptr[op + 1])
    return materialize(problem, base_order, dropped, split)


def segment_seeds(problem: Problem, base_order: Ints) -> list[Schedule]:
    """One plan per number of segments, from 2 to beyond the square root of the forward pass."""
    split = split_step(problem, base_order)
    if split < 2:
        return []
    last, crossing_bytes, made = crossing(problem, base_order, split)
    most = max(2, int(2 * np.sqrt(split)))
    plans: list[Schedule] = []
    done: list[list[int]] = []
    for segments in sorted({round(s) for s in np.geomspace(2, most, _MOST_SEGMENTS).tolist()}):
        cuts = segment_cuts(crossing_bytes, made, segments)
        if cuts and cuts not in done:
            done.append(cuts)
            plans.append(segment_plan(problem, base_order, split, cuts, last))
    return plans


@register("sqrt_n")
def sqrt_n(request: Request) -> Schedule:
    """Chen et al. 2016: equal segments at narrow cuts, recomputed in backward; O(sqrt n) on a chain."""
    return cheapest_within(request, [request.baseline, *segment_seeds(request.problem, request.baseline.array())])
