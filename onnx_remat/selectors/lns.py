"""Large neighbourhood search: forget some recomputes, mend by peak splitting, keep what is cheaper."""

from __future__ import annotations

import numpy as np

from onnx_remat.schedule import Ints
from onnx_remat.selectors.kernels import Flat, cost_of, score, strip, valid
from onnx_remat.selectors.peak_split import luck, prune, relieve

_MOST_FORGOTTEN = 0.5  # of the recomputes
_STRETCH = 0.7  # how often those within a stretch of steps are forgotten, not scattered ones
_WORSE = 0.002  # a current plan this much dearer than the best is still built on
_RETURN = 0.05  # how often a dead end goes back to the best plan
_TOP = 2  # candidates priced exactly per peak while mending


def forget(order: Ints, flat: Flat, rng: np.random.Generator) -> Ints:
    """`order` without a random part of its recomputes: scattered, or all within a random stretch of steps."""
    again = np.ones(len(order), np.bool_)
    again[np.unique(order, return_index=True)[1]] = False
    share = _MOST_FORGOTTEN * rng.random() ** 2 + 0.01
    if rng.random() < _STRETCH:
        low = int(rng.integers(len(order)))
        chosen = np.zeros(len(order), np.bool_)
        chosen[low : low + max(1, int(share * len(order)))] = True
    else:
        chosen = rng.random(len(order)) < share
    return strip(order, flat, again & chosen)


def improve(order: Ints, flat: Flat, budget: int, evals: int, seed: int) -> tuple[Ints, int]:
    """Cheaper orders within `budget` (residents excluded), starting from one that fits or nearly so.

    Returns
    -------
    order, evals spent
    """
    rng = np.random.default_rng(seed)
    best = current = order
    best_excess, best_cost = float(score(order, flat, budget)[0]), float(cost_of(order, flat))
    spent = 1
    while spent < evals:
        spent += 1
        start = forget(current, flat, rng)
        if not valid(start, flat):
            continue
        jitter = luck(rng, float(rng.random()))
        new, excess, used = relieve(start, flat, budget, True, jitter, max(1, evals - spent), _TOP)
        spent += used
        if excess > best_excess:
            continue
        new, used = prune(new, flat, budget, max(1, evals - spent))
        spent += used
        excess, cost = float(score(new, flat, budget)[0]), float(cost_of(new, flat))
        if (excess, cost) < (best_excess, best_cost):
            best, best_excess, best_cost = new, excess, cost
        if excess <= best_excess and cost <= best_cost * (1 + _WORSE * rng.random()):
            current = new
        elif rng.random() < _RETURN:
            current = best
    return best, spent
