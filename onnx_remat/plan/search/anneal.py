"""Simulated annealing over retention intervals: a move adds, removes or shifts recomputes, one interval at a time.

The energy is the cost plus a multiplier times the bytes above the budget, summed over the steps. The multiplier adapts
(as in a Lagrangian method): it rises while the order exceeds the budget and falls while it does not, so that the search
keeps crossing the border of feasibility, where the cheapest plans are.
"""

from __future__ import annotations

import numpy as np

from onnx_remat.plan.search.intervals import give_back
from onnx_remat.plan.search.loading import unload
from onnx_remat.plan.search.neighbours import (
    add,
    draw,
    hoist,
    pick_event,
    pick_read,
    removable,
    remove,
    shift,
    undo,
)
from onnx_remat.plan.search.state import EXCESS, WORK, State
from onnx_remat.plan.search.tuning import (
    ADD,
    FEASIBLE_SHARE,
    HOIST,
    HOISTED,
    HOT_READ,
    LOG,
    PERIOD,
    PRICE_STEP,
    REMOVE,
    REORDER,
    SWAP,
    WORK_OF_MOVE,
)
from onnx_remat.process.compiled import compiled


@compiled
def anneal(s: State, rng, cost, floor, work, hot, cold, price, stop):  # type: ignore[no-untyped-def]
    """Anneal from the order in `s`.

    Parameters
    ----------
    rng : uint64 (1,)
        State of the pseudo-random generator.
    cost : float
        Cost of the order in `s`.
    floor : float
        Cost at which to stop, as no order is cheaper.
    work : int
        Limit of work, see `tuning.WORK_PER_SECOND`.
    hot, cold : float
        Temperatures, in units of cost, at the start and the end.
    price : float
        Initial multiplier: cost of one byte above the budget for one step.
    stop : int64 (1,)
        No move begins once it is not 0: another thread sets it when time is up.

    Returns
    -------
    order, fits
        The cheapest order within the budget, else the one with the least excess.
    """
    log, hoisted = np.empty((LOG, 2), np.int64), np.empty(HOISTED, np.int64)
    best = unload(s)
    best_cost = cost if s.totals[EXCESS] == 0 else np.inf
    least = s.totals[EXCESS]
    floor += 1e-9 * abs(floor)
    fits = 0
    loose = True
    for event in s.events:
        loose = loose and not event.pinned
    heat, start = hot, price
    move = 0
    s.totals[WORK] = 0
    while s.totals[WORK] < work and stop[0] == 0:
        s.totals[WORK] += WORK_OF_MOVE
        move += 1
        if move % PERIOD == 0:
            price *= PRICE_STEP if fits < FEASIBLE_SHARE * PERIOD else 1.0 / PRICE_STEP
            price = min(max(price, 1e-4 * start), 1e5 * start)
            fits = 0
            heat = hot * (cold / hot) ** (s.totals[WORK] / work)
        excess = s.totals[EXCESS]
        limit = -heat * np.log(draw(rng) + 1e-300)  # a gain up to this is accepted
        n, extra = 0, 0.0
        kind = draw(rng)
        e = pick_event(s, rng, loose and kind > REORDER)
        if kind < ADD + SWAP:
            swap = kind < SWAP and not s.events[e].pinned and s.ops[s.events[e].op].count > 1
            most = limit + price * excess + (s.ops[s.events[e].op].cost if swap else 0.0)
            x = pick_read(s, rng, draw(rng) < HOT_READ)
            if x >= 0:
                far = draw(rng)
                n, extra = add(s, rng, x, log, np.int64(0), far * far, most)
            if n > 0 and swap and s.events[e].place >= 0 and removable(s, e):
                n, saved = remove(s, e, log, n)
                extra -= saved
        elif not s.events[e].pinned:
            if kind < ADD + SWAP + REMOVE:
                if removable(s, e):
                    n, extra = remove(s, e, log, np.int64(0))
                    extra = -extra
            elif loose and kind > 1 - HOIST:
                x = pick_read(s, rng, kind < 1.0)
                if x >= 0:
                    n, extra = hoist(s, x, log, hoisted)
            else:
                n, extra = shift(s, rng, e, log)
        if n == 0:
            fits += excess == 0
            continue
        gain = extra + price * (s.totals[EXCESS] - excess)
        if gain <= limit:
            cost += extra
            for i in range(n):
                if log[i, 1] >= 0:
                    give_back(s, log[i, 0])
            if s.totals[EXCESS] == 0:
                if cost < best_cost - 1e-9 * abs(cost):
                    best_cost, least = cost, 0
                    best = unload(s)
                    if cost <= floor:
                        break
            elif s.totals[EXCESS] < 0.98 * least:
                least = s.totals[EXCESS]
                best = unload(s)
        else:
            undo(s, log, n)
        fits += s.totals[EXCESS] == 0
    return best, best_cost < np.inf
