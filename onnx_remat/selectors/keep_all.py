"""No recompute at all: only the order changes. What this reaches costs nothing."""

from __future__ import annotations

import numpy as np

from onnx_remat.schedule import Ints, Schedule
from onnx_remat.selectors.base import Request, register
from onnx_remat.selectors.effort import allowance
from onnx_remat.selectors.kernels import Flat, flatten, score
from onnx_remat.selectors.orders import list_schedules
from onnx_remat.selectors.peak_split import NO_LUCK, relieve

_IMPROVED = 3  # orders that local improvement is tried on
_COARSE, _FINE = 0.04, 0.002  # fraction of the peak one round of improvement aims to take off


def lower_peak(order: Ints, flat: Flat, evals: int, evict: bool = False) -> tuple[Ints, int]:
    """Take the peak down step by step for as long as moves are found.

    Parameters
    ----------
    evict : bool
        Whether recomputing is allowed.

    Returns
    -------
    order, evals spent
    """
    peak, step, spent = score(order, flat, 0)[1], _COARSE, 1
    while step >= _FINE and spent < evals:
        new, _, used = relieve(order, flat, int(peak * (1 - step)), evict, NO_LUCK, evals - spent, 6)
        spent += used
        new_peak = score(new, flat, 0)[1]
        if new_peak < peak:
            order, peak = new, new_peak
        else:
            step /= 2
    return order, spent


def reordered(request: Request, flat: Flat, evals: int) -> list[Ints]:
    """Orders without recompute, lowest peak first; the baseline and the file's order are among them."""
    problem = request.problem
    file_order = np.arange(problem.n_ops, dtype=np.int32)
    if request.fixed_order:
        return [file_order]
    baseline = request.baseline.array()
    found = [baseline, file_order, *list_schedules(problem, flat, baseline)]
    found.sort(key=lambda order: score(order, flat, 0)[1])
    spent, improved = len(found), []
    for order in found[:_IMPROVED]:
        better, used = lower_peak(order, flat, max(1, (evals - spent) // 2))
        improved.append(better)
        spent += used
    return sorted([*improved, *found], key=lambda order: score(order, flat, 0)[1])


@register("keep_all")
def keep_all(request: Request) -> Schedule:
    """Reorder only: greedy list schedules and local moves, no recompute."""
    flat = flatten(request.problem, request.fixed_order)
    best = reordered(request, flat, allowance(request) // 4)[0]
    return Schedule(tuple(best.tolist()))
