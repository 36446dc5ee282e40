"""Segment checkpointing: keep a few narrow cuts of the forward pass, recompute each segment when backward needs it.

On a chain of n equal layers, k segments need ``k + n / k`` layers at the peak, a minimum at ``k = sqrt(n)``. A
general graph is cut where few bytes cross, and the number of segments is swept.

References
----------
Tianqi Chen, Bing Xu, Chiyuan Zhang, Carlos Guestrin: Training deep nets with sublinear memory cost, 2016,
section 4.
"""

from __future__ import annotations

import numpy as np

from onnx_remat.memory.problem import Ints, Longs, Problem, Schedule
from onnx_remat.plan.request import Request, register
from onnx_remat.plan.search.candidates import cheapest_within
from onnx_remat.plan.selectors.materialize import materialize, split_step

_MOST_SEGMENTS = 24  # numbers of segments tried


def crossing(problem: Problem, base_order: Ints, split: int) -> tuple[Ints, Longs, Longs]:
    """Return the bytes that cross each boundary between forward steps on the way to later forward ops.

    Returns
    -------
    ends : int32 (split,)
        Last forward step that reads a result of each step or a view of it, -1 for none.
    crossing : int64 (split + 1,)
        Bytes made before a step and read by it or by a later forward step.
    made : int64 (split + 1,)
        Bytes made before each step.
    """
    root = problem.lifetimes.root
    step = np.full(problem.n_ops, split, np.int64)
    step[base_order[:split]] = np.arange(split)
    reads = np.repeat(step, np.diff(problem.in_ptr))
    writes = np.repeat(step, np.diff(problem.out_ptr))
    last = np.full(problem.n_values, -1, np.int32)
    np.maximum.at(last, root[problem.in_values[reads < split]], reads[reads < split])
    new = (writes < split) & (root[problem.out_values] == problem.out_values)
    values, born = problem.out_values[new], writes[new]
    size, dies = problem.lifetimes.nbytes[values], last[values]
    long = dies > born
    change = np.zeros(split + 2, np.int64)
    made = np.zeros(split + 1, np.int64)
    np.add.at(made, born + 1, size)
    np.add.at(change, born[long] + 1, size[long])
    np.subtract.at(change, dies[long] + 1, size[long])
    ends = np.full(problem.n_ops, -1, np.int32)
    np.maximum.at(ends, np.repeat(np.arange(problem.n_ops), np.diff(problem.out_ptr)), last[root[problem.out_values]])
    return ends[base_order[:split]], np.cumsum(change)[: split + 1], np.cumsum(made)


def segment_cuts(crossing_bytes: Longs, made: Longs, segments: int) -> list[int]:
    """Return the first steps of segments: equal shares of the bytes made, moved to the narrowest boundary nearby."""
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


def segment_plan(problem: Problem, base_order: Ints, split: int, cuts: list[int], ends: Ints) -> Schedule:
    """Keep the results that cross one of `cuts` and recompute the rest.

    `ends` is the last forward step that reads each op's results, see `crossing`.
    """
    begins = np.asarray(cuts, np.int64)
    steps = np.arange(split)
    crosses = np.searchsorted(begins, steps, side="right") < np.searchsorted(begins, ends, side="right")
    in_tail = steps >= (begins[-1] if len(begins) else 0)
    dropped = np.zeros(problem.n_ops, np.bool_)
    dropped[base_order[:split]] = ~crosses & ~in_tail
    return materialize(problem, base_order, dropped, split)


def segment_seeds(problem: Problem, base_order: Ints) -> list[Schedule]:
    """Return one plan per number of segments, from 2 to twice the square root of the number of forward ops."""
    split = split_step(problem, base_order)
    if split < 2:
        return []
    ends, crossing_bytes, made = crossing(problem, base_order, split)
    most = max(2, int(2 * np.sqrt(split)))
    plans: list[Schedule] = []
    done: list[list[int]] = []
    for segments in sorted({round(s) for s in np.geomspace(2, most, _MOST_SEGMENTS).tolist()}):
        cuts = segment_cuts(crossing_bytes, made, segments)
        if cuts and cuts not in done:
            done.append(cuts)
            plans.append(segment_plan(problem, base_order, split, cuts, ends))
    return plans


@register("sqrt_n")
def sqrt_n(request: Request) -> Schedule:
    """Chen et al. 2016: equal segments at narrow cuts, recomputed in backward; O(sqrt n) on a chain."""
    return cheapest_within(request, [request.baseline, *segment_seeds(request.problem, request.baseline.array())])
