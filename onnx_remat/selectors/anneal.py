"""Simulated annealing over retention intervals: recomputes come, go and move, one interval at a time.

The energy is cost plus a multiplier times the bytes above the budget, summed over the steps. The multiplier follows
the search (a Lagrangian): it rises while the order stays over the budget and falls while it stays below, so that the
search keeps crossing the border where the cheapest plans are.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from onnx_remat.selectors.intervals import (
    COUNT,
    EXCESS,
    State,
    ends,
    give_back,
    make_room,
    new_event,
    place_of,
    put,
    take,
    touch_before,
    unload,
)

_CHAIN = 40  # events one move may put in or take out
_EARLY = 0.3  # how often a recompute goes where an input was last used
_NEAR = 3  # an input that ended this few places before is held, not recomputed
_TRIES = 12  # intervals looked at to find one across a chosen step
_PERIOD = 500  # moves between two looks at the multiplier
_STEP = 1.08  # factor by which the multiplier follows
_FEASIBLE = 0.35  # share of the moves that should end within the budget


@njit(cache=True, no_cpython_wrapper=True)
def _draw(rng):  # type: ignore[no-untyped-def]
    """Next number of an xorshift generator, uniform in [0, 1)."""
    x = rng[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    rng[0] = x
    return float(x >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@njit(cache=True, no_cpython_wrapper=True)
def _undo(s, log, n):  # type: ignore[no-untyped-def]
    """Take back the first `n` entries of a move's log, last one first."""
    for i in range(n - 1, -1, -1):
        e, p = log[i, 0], log[i, 1]
        if p < 0:
            take(s, e)
            give_back(s, e)
        else:
            put(s, e, p)


@njit(cache=True, no_cpython_wrapper=True)
def _insert(s, op, p, log, n):  # type: ignore[no-untyped-def]
    """Run `op` right before the event at place `p`; returns its event or -1, and logs it."""
    e = new_event(s, op)
    if e < 0:
        return e
    q = make_room(s, p)
    if q < 0:
        give_back(s, e)
        return np.int32(-1)
    put(s, e, q)
    log[n, 0], log[n, 1] = e, -1
    return e


@njit(cache=True, no_cpython_wrapper=True)
def _useless(s, e):  # type: ignore[no-untyped-def]
    """Whether `e` is a recompute whose results nobody reads."""
    event = s.events[e]
    op = s.ops[event.op]
    if op.count < 2:
        return False
    x = event.node + op.reads
    for y in range(x, x + op.writes):
        if not ends(s, y):
            return False
    return True


@njit(cache=True, no_cpython_wrapper=True)
def _removable(s, e):  # type: ignore[no-untyped-def]
    """Whether every read of the results of `e` finds an earlier result."""
    event = s.events[e]
    op = s.ops[event.op]
    if op.count < 2:
        return False
    x = event.node + op.reads
    for y in range(x, x + op.writes):
        if s.nodes[y].before < 0 and not ends(s, y):
            return False
    return True


@njit(cache=True, no_cpython_wrapper=True)
def _remove(s, e, log, n):  # type: ignore[no-untyped-def]
    """Take out `e`, then what nobody reads for want of it; returns the log's new length and the cost saved."""
    start, done = n, n
    saved = s.ops[s.events[e].op].cost
    log[n, 0], log[n, 1] = e, s.events[e].place
    n += 1
    take(s, e)
    while done < n:
        op = s.ops[s.events[log[done, 0]].op]
        p = log[done, 1]
        done += 1
        for k in range(op.slot, op.slot + op.reads):
            x = touch_before(s, s.slots[k], p)
            if x >= 0 and not s.nodes[x].read and n < start + _CHAIN:
                f = s.nodes[x].owner
                if not s.events[f].pinned and _useless(s, f) and _removable(s, f):
                    saved += s.ops[s.events[f].op].cost
                    log[n, 0], log[n, 1] = f, s.events[f].place
                    n += 1
                    take(s, f)
    return n, saved


@njit(cache=True, no_cpython_wrapper=True)
def _ready(s, op, p):  # type: ignore[no-untyped-def]
    """Whether all that `op` reads is made before place `p`."""
    for k in range(s.ops[op].slot, s.ops[op].slot + s.ops[op].reads):
        if touch_before(s, s.slots[k], p) < 0:
            return False
    return True


@njit(cache=True, no_cpython_wrapper=True)
def _pick_read(s, rng, hot):  # type: ignore[no-untyped-def]
    """A random read touch, if possible one whose interval spans a random step above the budget; -1 for none."""
    p = -1
    if hot and s.totals[EXCESS] > 0:
        for _ in range(4 * _TRIES):
            q = s.events[s.active[int(_draw(rng) * s.totals[COUNT])]].place
            if s.level[q] > 0:
                p = q
                break
    x = -1
    for _ in range(_TRIES):
        event = s.events[s.active[int(_draw(rng) * s.totals[COUNT])]]
        n_in = s.ops[event.op].reads
        if n_in == 0:
            continue
        x = event.node + int(_draw(rng) * n_in)
        if p < 0 or (event.place > p and place_of(s, s.nodes[x].before) < p):
            break
    return x


@njit(cache=True, no_cpython_wrapper=True)
def _add(s, rng, x, log, n, deep):  # type: ignore[no-untyped-def]
    """Recompute the value read by touch `x` just before it, and dead inputs with it by chance.

    Returns the log's new length (0: impossible) and the cost.
    """
    node = s.nodes[x]
    p = s.events[node.owner].place
    start = place_of(s, node.before)
    o = s.values[node.value].maker
    op = s.ops[o]
    if not op.again or s.values[node.value].held or start + 1 >= p:
        return 0, 0.0
    # Sometimes earlier: right after an input's last use, which need not be held until then.
    if op.reads > 0 and _draw(rng) < _EARLY:
        y = touch_before(s, s.slots[op.slot + int(_draw(rng) * op.reads)], p)
        q = place_of(s, y) + 1
        while q < p and s.at[q] < 0:
            q += 1
        if q > start:
            p = q
    first = n
    if _insert(s, o, p, log, n) < 0:
        return 0, 0.0
    n += 1
    added = op.cost
    i = first
    while i < n:
        f = log[i, 0]
        i += 1
        for y in range(s.events[f].node, s.events[f].node + s.ops[s.events[f].op].reads):
            if not ends(s, y):
                continue
            p = s.events[f].place
            source = s.values[s.nodes[y].value].maker
            far = p - place_of(s, s.nodes[y].before) > _NEAR
            if far and s.ops[source].again and n < _CHAIN and _draw(rng) < deep:
                if _insert(s, source, p, log, n) >= 0:
                    n += 1
                    added += s.ops[source].cost
    return n, added


@njit(cache=True, no_cpython_wrapper=True)
def _shift(s, rng, e, log):  # type: ignore[no-untyped-def]
    """Run `e` elsewhere: next to a neighbouring touch of what it reads or writes, or at a random step near.

    Returns the log's length (0: impossible) and the change of cost.
    """
    o, p, node = s.events[e].op, s.events[e].place, s.events[e].node
    op = s.ops[o]
    x = node + int(_draw(rng) * (op.reads + op.writes))
    q = -1
    kind = _draw(rng)
    if kind < 0.35:
        b = s.nodes[x].after
        if kind < 0.15 and b >= 0:
            b = s.nodes[b].after
        if b >= 0:
            q = place_of(s, b)
    elif kind < 0.7:
        a = s.nodes[x].before
        if a >= 0:
            q = place_of(s, a) + s.nodes[x].read
    else:
        width = 1 + int(_draw(rng) ** 3 * 0.1 * len(s.at))
        q = p + width if _draw(rng) < 0.5 else p - width
    if q < 0:
        return 0, 0.0
    while q < len(s.at) and s.at[q] < 0:
        q += 1
    if q >= len(s.at) or s.at[q] == e or not _ready(s, o, q) or _insert(s, o, q, log, 0) < 0:
        return 0, 0.0
    if not _removable(s, e):
        _undo(s, log, 1)
        return 0, 0.0
    n, saved = _remove(s, e, log, 1)
    return n, op.cost - saved


@njit(cache=True)
def anneal(s: State, rng, cost, moves, hot, cold, price):  # type: ignore[no-untyped-def]
    """Search from the order in `s`.

    Parameters
    ----------
    rng : uint64 (1,)
        State of the generator.
    cost : float
        Of the order in `s`.
    moves : int
        Moves tried.
    hot, cold : float
        Temperatures, in units of cost, at the start and the end.
    price : float
        Cost of one byte above the budget for one step, at the start.

    Returns
    -------
    order, its cost (infinite if none fits), price
        The cheapest order within the budget.
    """
    log = np.empty((2 * _CHAIN + 8, 2), np.int64)
    best = unload(s)
    best_cost = cost if s.totals[EXCESS] == 0 else np.inf
    fits = 0
    loose = True
    for event in s.events:
        loose = loose and not event.pinned
    cooling = (cold / hot) ** (1.0 / max(1, moves // _PERIOD))
    heat = hot
    for move in range(moves):
        if move % _PERIOD == _PERIOD - 1:
            price *= _STEP if fits < _FEASIBLE * _PERIOD else 1.0 / _STEP
            fits = 0
            heat *= cooling
        excess = s.totals[EXCESS]
        kind = _draw(rng)
        n, change = 0, 0.0
        over = excess > 0
        if kind < 0.4:
            x = _pick_read(s, rng, _draw(rng) < 0.7)
            if x >= 0:
                n, change = _add(s, rng, x, log, 0, _draw(rng) ** 2)
        else:
            e = s.active[int(_draw(rng) * s.totals[COUNT])]
            tries = 0
            while not (loose and kind > 0.75) and tries < _TRIES and (
                s.events[e].pinned or s.ops[s.events[e].op].count < 2
            ):
                e = s.active[int(_draw(rng) * s.totals[COUNT])]
                tries += 1
            if kind < 0.65:
                if not s.events[e].pinned and _removable(s, e):
                    n, change = _remove(s, e, log, 0)
                    change = -change
            elif not s.events[e].pinned:
                n, change = _shift(s, rng, e, log)
        if n == 0:
            fits += not over
            continue
        gain = change + price * (s.totals[EXCESS] - excess)
        if gain <= 0 or _draw(rng) < np.exp(-gain / heat):
            cost += change
            for i in range(n):
                if log[i, 1] >= 0:
                    give_back(s, log[i, 0])
            if s.totals[EXCESS] == 0:
                if cost < best_cost - 1e-9 * abs(cost):
                    best_cost = cost
                    best = unload(s)
        else:
            _undo(s, log, n)
        fits += s.totals[EXCESS] == 0
    return best, best_cost, price, cost
