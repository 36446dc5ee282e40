"""Incremental retention intervals: insert and remove executions in an order and update its liveness profile.

Each value has a list of *touches*, its writes and reads in order of execution. Between two touches it is live if and
only if the later one is a read, so a recompute splits an interval and its removal joins two; each touch changes the
profile over one range of places. Steps lie in an array with empty places between them for new steps. The profile is the
live bytes minus the budget, so that positive levels are excess::

    place         0   1   2   3   4   5   6   7           W write, R read: the touches of one value
    event         a   .   b   .   c   .   d   .           the profile at an empty place counts the values live across it
    value of a    W---+---R---+---+---+---R               live until d reads it
    insert a at 5:
    event         a   .   b   .   c   a   d   .
    value of a    W---+---R           W---R               d now reads the second write: the value is dead at c

References
----------
Bartan, Li, Teague, Lott, Dilkina: Moccasin, efficient tensor rematerialization for neural networks, ICML 2023
(retention intervals).
"""

from __future__ import annotations

import numpy as np

from onnx_remat.plan.search.state import BUDGET, COUNT, EVENTS, EXCESS, HOLD_UNREAD, IDLE, NODES, WORK
from onnx_remat.plan.search.tuning import FREE_TOUCHES, WORK_OF_CHANGE, WORK_OF_TOUCH
from onnx_remat.process.compiled import inlined


@inlined
def _add_live(s, low, high, delta):  # type: ignore[no-untyped-def]
    """Add `delta` live bytes from place `low` to place `high`, both included."""
    if high < low:
        return
    level = s.level[low : high + 1]
    change = np.int64(0)
    for i in range(len(level)):
        old = level[i]
        new = old + delta
        change += max(new, 0) - max(old, 0)
        level[i] = new
    s.totals[EXCESS] += change
    s.totals[WORK] += len(level) + WORK_OF_CHANGE


@inlined
def ends(s, x):  # type: ignore[no-untyped-def]
    """Whether no read follows touch `x` before the next write."""
    b = s.nodes[x].after
    return b < 0 or s.nodes[b].read == 0


@inlined
def place_of(s, x):  # type: ignore[no-untyped-def]
    """Return the place of touch `x`."""
    return s.events[s.nodes[x].owner].place


@inlined
def _written(s, x, sign):  # type: ignore[no-untyped-def]
    """Add (`sign` 1) or remove (-1) the bytes of write `x` in the profile, for its current neighbours."""
    value = s.values[s.nodes[x].value]
    p = place_of(s, x)
    first = s.nodes[x].before < 0
    high = p
    if (value.kept and first) or (ends(s, x) and s.totals[HOLD_UNREAD] and not (value.droppable and not first)):
        high = len(s.at) - 1
    _add_live(s, p, high, sign * value.nbytes)


@inlined
def in_place(s, e):  # type: ignore[no-untyped-def]
    """Update the bytes that event `e` saves by in-place outputs over inputs that die there."""
    event = s.events[e]
    op = s.ops[event.op]
    start = op.slot + op.reads
    bonus = np.int64(0)
    taken = np.int64(0)  # a bit for each input whose buffer an earlier output reuses
    for k in range(start, start + op.writes):
        y = event.node + k - op.slot
        made = s.values[s.nodes[y].value]
        first = s.nodes[y].before < 0
        if made.kept and first:
            continue
        for j in range(s.take_ptr[k], s.take_ptr[k + 1]):
            x = event.node + s.take[j]
            bit = np.int64(1) << np.int64(min(s.take[j], 62))
            if not taken & bit and not s.values[s.nodes[x].value].kept and ends(s, x):
                bonus += made.nbytes
                taken |= bit
                break
    if bonus != event.bonus:
        _add_live(s, event.place, event.place, event.bonus - bonus)
        event.bonus = bonus


@inlined
def touch_before(s, v, p):  # type: ignore[no-untyped-def]
    """Return the last touch of value `v` before place `p`, -1 for none."""
    x = s.values[v].tail
    passed = 0
    while x >= 0 and place_of(s, x) >= p:
        x = s.nodes[x].before
        passed += 1
    s.totals[WORK] += WORK_OF_TOUCH * max(passed - FREE_TOUCHES, 0)
    return x


@inlined
def _relink(s, x, joining):  # type: ignore[no-untyped-def]
    """Insert touch `x` into its value's list, or remove it, and update the profile."""
    nodes = s.nodes
    node = nodes[x]
    v = node.value
    p = place_of(s, x)
    if joining:
        b = -1
        a = s.values[v].tail
        passed = 0
        while a >= 0 and place_of(s, a) >= p:
            b = a
            a = nodes[a].before
            passed += 1
        s.totals[WORK] += WORK_OF_TOUCH * max(passed - FREE_TOUCHES, 0)
    else:
        a, b = node.before, node.after
    a_written = a >= 0 and nodes[a].read == 0
    b_read = b >= 0 and nodes[b].read != 0
    turns = b_read != (node.read != 0)  # whether the kind of the touch after a changes between read and write
    alters_a = a_written and turns
    alters_b = b >= 0 and not b_read and a < 0  # it was, or becomes, the first write
    kept = s.values[v].kept
    size = s.values[v].nbytes
    for sign in (
        -1,
        1,
    ):  # remove the old contributions, then add the new ones; one call site per callee, as compiling takes long
        for k in range(3):
            y = x if k == 0 else (a if k == 1 else b)
            if (k == 0 and joining == (sign > 0) and not node.read) or (k == 1 and alters_a) or (k == 2 and alters_b):
                _written(s, y, sign)
        if sign < 0:
            left, right = a, b
            if joining:
                node.before, node.after = a, b
                left, right = x, x
            if a >= 0:
                nodes[a].after = right
            if b >= 0:
                nodes[b].before = left
            else:
                s.values[v].tail = left
    if a >= 0 and turns and not kept:
        # A new read extends the interval up to itself; a new write splits an interval.
        _add_live(s, place_of(s, a) + 1, p, size if joining == (node.read != 0) else -size)
    for k in range(2):
        if (a >= 0 and turns) if k == 0 else alters_b:
            in_place(s, nodes[a if k == 0 else b].owner)


@inlined
def change(s, e, p, joining):  # type: ignore[no-untyped-def]
    """Insert event `e` at the empty place `p`, or remove it from the order; a removed event can be inserted again."""
    event = s.events[e]
    op = s.ops[event.op]
    if joining:
        s.at[p], event.place = e, p
        s.level[p] += IDLE - s.totals[BUDGET] + op.workspace
        s.totals[EXCESS] += max(s.level[p], 0)
        event.rank = s.totals[COUNT]
        s.active[s.totals[COUNT]] = e
        s.totals[COUNT] += 1
        op.count += 1
    n = op.reads + op.writes
    for k in range(n):
        _relink(s, event.node + (k if joining else n - 1 - k), joining)
    if joining:
        in_place(s, e)
        return
    p = event.place
    s.totals[EXCESS] -= max(s.level[p], 0)
    # Removing its reads already undid part of what it saved in place; this undoes the rest.
    s.level[p] -= IDLE - s.totals[BUDGET] + op.workspace - event.bonus
    event.bonus = 0
    s.at[p], event.place = -1, -1
    s.totals[COUNT] -= 1
    last = s.active[s.totals[COUNT]]
    s.active[event.rank] = last
    s.events[last].rank = event.rank
    op.count -= 1


@inlined
def new_event(s, o):  # type: ignore[no-untyped-def]
    """Return an unused event of op `o`, -1 if the capacity is exhausted."""
    op = s.ops[o]
    e = op.spare
    if e >= 0:
        op.spare = s.events[e].link
        return e
    n = op.reads + op.writes
    first = s.totals[NODES]
    e = s.totals[EVENTS]
    if e == len(s.events) or first + n > len(s.nodes):
        return -1
    s.totals[EVENTS] += 1
    s.totals[NODES] += n
    s.events[e].op = o
    s.events[e].node = first
    for k in range(n):
        node = s.nodes[first + k]
        node.owner = e
        node.value = s.slots[op.slot + k]
        node.read = k < op.reads
    return e


@inlined
def give_back(s, e):  # type: ignore[no-untyped-def]
    """Return an event that is not in the order to the spare events of its op."""
    op = s.ops[s.events[e].op]
    s.events[e].link = op.spare
    op.spare = e


@inlined
def _carried(s, e):  # type: ignore[no-untyped-def]
    """Return the level at an empty place right after event `e`."""
    event = s.events[e]
    op = s.ops[event.op]
    level = s.level[event.place] + s.totals[BUDGET] - IDLE - op.workspace + event.bonus
    for x in range(event.node, event.node + op.reads + op.writes):
        if not ends(s, x):
            continue
        node = s.nodes[x]
        value = s.values[node.value]
        first = node.before < 0
        if value.kept and (node.read or first):
            continue
        if node.read or not s.totals[HOLD_UNREAD] or (value.droppable and not first):
            level -= value.nbytes
    return level


@inlined
def make_room(s, p):  # type: ignore[no-untyped-def]
    """Return an empty place right before the event at place `p`, -1 if there is none; shifts events if necessary."""
    n = len(s.at)
    if p > 0 and s.at[p - 1] < 0:
        return p - 1
    before = s.at[p - 1] if p > 0 else -1
    left, right = p - 1, p + 1
    while (left < 0 or s.at[left] >= 0) and (right >= n or s.at[right] >= 0):
        if left < 0 and right >= n:
            return -1
        left, right = max(left - 1, -1), min(right + 1, n)
    if left >= 0 and s.at[left] < 0:
        for i in range(left, p - 1):
            s.at[i], s.level[i] = s.at[i + 1], s.level[i + 1]
            s.events[s.at[i]].place = i
        empty = p - 1
    else:
        for i in range(right, p, -1):
            s.at[i], s.level[i] = s.at[i - 1], s.level[i - 1]
            s.events[s.at[i]].place = i
        empty = p
    s.at[empty] = -1
    s.level[empty] = _carried(s, before) if before >= 0 else -IDLE
    return empty
