"""Neighbourhood moves of the annealing: insert recomputes, remove them, run events elsewhere.

Each move logs the events it changes, as (event, the place it left, or -1 if it was inserted), so that it can be undone.
A move that turns out invalid returns an infinite cost, as would one that overflows its log; `tuning.LOG` says why none
does.
"""

from __future__ import annotations

import numpy as np

from onnx_remat.plan.search.intervals import (
    change,
    ends,
    give_back,
    make_room,
    new_event,
    place_of,
    touch_before,
)
from onnx_remat.plan.search.state import COUNT, EXCESS, FIXED
from onnx_remat.plan.search.tuning import CHAIN, EARLY, HOISTED, LONGEST_ADDED, NEAR, TRIES, WHOLE
from onnx_remat.process.compiled import inlined


@inlined
def draw(rng):  # type: ignore[no-untyped-def]
    """Return the next number of an xorshift generator, uniform in [0, 1)."""
    x = rng[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    rng[0] = x
    return float(x >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@inlined
def draw_small(rng):  # type: ignore[no-untyped-def]
    """Return the cube of the next number: most are small. (Powers with a variable exponent take long to compile.)"""
    x = draw(rng)
    return x * x * x


@inlined
def undo(s, log, n):  # type: ignore[no-untyped-def]
    """Undo the first `n` entries of a move's log, the last one first."""
    for i in range(n - 1, -1, -1):
        e, p = log[i, 0], log[i, 1]
        change(s, e, p, p >= 0)
        if p < 0:
            give_back(s, e)


@inlined
def _last_place(s, o):  # type: ignore[no-untyped-def]
    """Return the place of the last event of op `o`, -1 for none."""
    op = s.ops[o]
    p = np.int64(-1)
    if op.writes == 0:
        for i in range(s.totals[COUNT]):
            if s.events[s.active[i]].op == o:
                p = max(p, s.events[s.active[i]].place)
        return p
    x = s.values[s.slots[op.slot + op.reads]].tail
    while x >= 0 and s.nodes[x].read:
        x = s.nodes[x].before
    return place_of(s, x) if x >= 0 else p


@inlined
def _timely(s, o, p):  # type: ignore[no-untyped-def]
    """Whether op `o` may run right before place `p`: no input is overwritten yet, and it overwrites none too early."""
    op = s.ops[o]
    for k in range(op.bar, op.bar + op.closers + op.waits):
        other = _last_place(s, s.bars[k])
        if 0 <= other < p if k < op.bar + op.closers else other >= p:
            return False
    return True


@inlined
def _insert(s, op, p, log, n):  # type: ignore[no-untyped-def]
    """Insert `op` right before the event at place `p` and log it; return its event, or -1 if it cannot run there."""
    if n == len(log) or not _timely(s, op, p):
        return -1
    e = new_event(s, op)
    if e < 0:
        return e
    q = make_room(s, p)
    if q < 0:
        give_back(s, e)
        return -1
    change(s, e, q, q >= 0)
    log[n, 0], log[n, 1] = e, -1
    return e


@inlined
def _spared(s, e, at_all):  # type: ignore[no-untyped-def]
    """Whether the outputs of recompute `e` are unused; with `at_all` 0, an earlier copy for the readers also counts."""
    event = s.events[e]
    op = s.ops[event.op]
    if op.count < 2:
        return False
    x = event.node + op.reads
    for y in range(x, x + op.writes):  # noqa: SIM110 compiled code has no all()
        if not ends(s, y) and (at_all > 0 or s.nodes[y].before < 0):
            return False
    return True


@inlined
def _useless(s, e):  # type: ignore[no-untyped-def]
    """Whether `e` is a recompute whose outputs have no reader."""
    return _spared(s, e, np.int64(1))


@inlined
def removable(s, e):  # type: ignore[no-untyped-def]
    """Whether `e` is a recompute whose outputs have no reader, or an earlier copy that the readers can use."""
    return _spared(s, e, np.int64(0))


@inlined
def remove(s, e, log, n):  # type: ignore[no-untyped-def]
    """Remove `e`, then the recomputes that become unused; return the log's new length and the cost saved.

    The removal takes up to CHAIN entries: if the log might lack them, nothing is removed, and the move is invalid.
    """
    if n + CHAIN > len(log):
        return n, -np.inf
    start, done = n, n
    saved = 0.0
    log[n, 0] = e
    n += 1
    while done < n:
        f = log[done, 0]
        if done > start and not (_useless(s, f) and removable(s, f)):  # another event of its op was removed meanwhile
            n -= 1
            log[done, 0] = log[n, 0]
            continue
        event = s.events[f]
        op = s.ops[event.op]
        p = event.place
        log[done, 1] = p
        saved += op.cost
        change(s, f, p, p < 0)
        done += 1
        for k in range(event.node, event.node + op.reads):
            x = s.nodes[k].before  # as it was before `change`
            if x >= 0 and not s.nodes[x].read and n < start + CHAIN:
                f = np.int64(s.nodes[x].owner)
                wanted = s.events[f].pinned != 0
                for i in range(done, n):
                    wanted = wanted or log[i, 0] == f
                if not wanted and _useless(s, f) and removable(s, f):
                    log[n, 0] = f
                    n += 1
    return n, saved


@inlined
def _ready(s, op, p):  # type: ignore[no-untyped-def]
    """Whether all inputs of `op` are made before place `p`."""
    for k in range(s.ops[op].slot, s.ops[op].slot + s.ops[op].reads):  # noqa: SIM110 - compiled: no generators
        if touch_before(s, s.slots[k], p) < 0:
            return False
    return True


@inlined
def pick_read(s, rng, hot):  # type: ignore[no-untyped-def]
    """Return a random read touch, with `hot` preferably one across a random step above the budget; -1 for none."""
    p = -1
    if hot and s.totals[EXCESS] > 0:
        for _ in range(4 * TRIES):
            q = s.events[s.active[int(draw(rng) * s.totals[COUNT])]].place
            if s.level[q] > 0:
                p = q
                break
    x = -1
    for _ in range(TRIES):
        event = s.events[s.active[int(draw(rng) * s.totals[COUNT])]]
        n_in = s.ops[event.op].reads
        if n_in == 0:
            continue
        x = event.node + int(draw(rng) * n_in)
        if p < 0 or (event.place > p and place_of(s, s.nodes[x].before) < p):
            break
    return x


@inlined
def add(s, rng, x, log, n, deep, most_cost):  # type: ignore[no-untyped-def]
    """Recompute the value read by touch `x` just before it, and some of the inputs that are dead by then, at random.

    An input is recomputed with probability `deep`; above `WHOLE` all are, back to values that are live.

    Return the log's new length (0: impossible, or more expensive than `most_cost`) and the cost.
    """
    node = s.nodes[x]
    p = s.events[node.owner].place
    start = place_of(s, node.before)
    o = s.values[node.value].maker
    op = s.ops[o]
    last = s.nodes[node.before]
    # If the last run of the op has no other reader, this moves it instead of recomputing.
    free = last.read == 0 and not s.events[last.owner].pinned
    fair = free or (op.again and op.cost <= most_cost)
    if not fair or s.values[node.value].kept or start + 1 >= p:
        return 0, 0.0
    # Sometimes insert earlier: right after an input's last use, so that the input need not stay live.
    if op.reads > 0 and draw(rng) < EARLY:
        y = touch_before(s, s.slots[op.slot + int(draw(rng) * op.reads)], p)
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
    most = first + 1 + int(LONGEST_ADDED * draw_small(rng))  # few moves are long: most long chains are rejected
    if deep > WHOLE:  # part of a chain frees nothing where what it reads is as large as what it makes
        deep, most = 1.0, first + CHAIN
    i = first
    while i < n:
        f = log[i, 0]
        i += 1
        for y in range(s.events[f].node, s.events[f].node + s.ops[s.events[f].op].reads):
            if not ends(s, y):
                continue
            p = s.events[f].place
            source = s.values[s.nodes[y].value].maker
            far = p - place_of(s, s.nodes[y].before) > NEAR
            fair = s.ops[source].again and added + s.ops[source].cost <= most_cost
            wanted = far and fair and n < most and draw(rng) < deep
            if wanted and _insert(s, source, p, log, n) >= 0:
                n += 1
                added += s.ops[source].cost
    for i in range(first, n):
        f = s.events[log[i, 0]]
        for y in range(f.node + s.ops[f.op].reads, f.node + s.ops[f.op].reads + s.ops[f.op].writes):
            a = s.nodes[y].before
            if a >= 0 and s.nodes[a].read == 0 and n < CHAIN:
                g = s.nodes[a].owner
                if not s.events[g].pinned and _useless(s, g) and removable(s, g):
                    n, saved = remove(s, g, log, n)
                    added -= saved
    for i in range(first, n):  # an op that must run once must have been moved; otherwise the move is invalid
        made = s.ops[s.events[log[i, 0]].op]
        if log[i, 1] < 0 and made.again == 0 and made.count > 1:
            return n, np.inf
    return n, added


@inlined
def shift(s, rng, e, log):  # type: ignore[no-untyped-def]
    """Run `e` elsewhere: next to a neighbouring touch of one of its values, or at a random step nearby.

    In a fixed order it stays after the first event of its op. Return the log's length (0: impossible; undo the move if
    the cost is infinite) and the change of cost.
    """
    o, p, node = s.events[e].op, s.events[e].place, s.events[e].node
    op = s.ops[o]
    touches = op.reads + op.writes
    x = node + int(draw(rng) * touches)
    q = -1
    kind = draw(rng)
    if touches == 0:
        kind = 1.0  # it has no touches: `x` belongs to another event, or to none
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
        width = 1 + int(draw_small(rng) * 0.1 * len(s.at))
        q = p + width if draw(rng) < 0.5 else p - width
    if q < 0:
        return 0, 0.0
    while q < len(s.at) and s.at[q] < 0:
        q += 1
    if s.totals[FIXED] and (op.writes == 0 or touch_before(s, s.slots[op.slot + op.reads], q) < 0):
        return 0, 0.0
    if q >= len(s.at) or s.at[q] == e or not _ready(s, o, q) or _insert(s, o, q, log, np.int64(0)) < 0:
        return 0, 0.0
    if not removable(s, e):
        return 1, np.inf
    n, saved = remove(s, e, log, np.int64(1))
    return n, op.cost - saved


@inlined
def hoist(s, x, log, old):  # type: ignore[no-untyped-def]
    """Run the reader `x`, and the ops it needs, right after the touch before it, so that the interval ends there.

    `old`, int64 (HOISTED,), is scratch memory. Return the log's length (0: impossible; undo the move if the cost is
    infinite) and the change of cost.
    """
    target = place_of(s, s.nodes[x].before) + 1
    old[0] = s.nodes[x].owner
    count, done = 1, 0
    while done < count:
        event = s.events[old[done]]
        done += 1
        if event.pinned:
            return 0, 0.0
        for y in range(event.node, event.node + s.ops[event.op].reads):
            a = y
            while s.nodes[a].read:
                a = s.nodes[a].before
            e = s.nodes[a].owner
            if s.events[e].place < target or touch_before(s, s.nodes[a].value, target) >= 0:
                continue
            known = False
            for i in range(count):
                known = known or old[i] == e
            if not known:
                if count == HOISTED:
                    return 0, 0.0
                old[count] = e
                count += 1
    p = target
    while s.at[p] < 0:
        p += 1
    stop = s.at[p]
    for i in range(1, count):  # op numbers ascend topologically
        e, j = old[i], i
        while j > 0 and s.events[old[j - 1]].op > s.events[e].op:
            old[j] = old[j - 1]
            j -= 1
        old[j] = e
    n = np.int64(0)
    for i in range(count):
        if old[i] == stop:  # it is already there
            return n, np.inf
        if _insert(s, s.events[old[i]].op, s.events[stop].place, log, n) < 0:
            return n, np.inf
        n += 1
    extra = 0.0
    for i in range(count):
        if s.events[old[i]].place < 0:
            continue  # removed together with another event
        extra += s.ops[s.events[old[i]].op].cost
        if not removable(s, old[i]):
            return n, np.inf
        n, saved = remove(s, old[i], log, n)
        extra -= saved
    return n, extra


@inlined
def pick_event(s, rng, any_op):  # type: ignore[no-untyped-def]
    """Return a random event; without `any_op`, a recompute if possible."""
    e = s.active[int(draw(rng) * s.totals[COUNT])]
    tries = 0
    while not any_op and tries < TRIES and (s.events[e].pinned or s.ops[s.events[e].op].count < 2):
        e = s.active[int(draw(rng) * s.totals[COUNT])]
        tries += 1
    return e
