"""Retention intervals under change: an order whose liveness profile is kept up to date as ops are put in and taken out.

Each value has a list of *touches*, its writes and reads in order of execution. Between two touches it is held if and
only if the later one is a read, so a recompute splits an interval and a removed one joins two; each touch changes the
profile over one range of steps. Steps live in an array with empty places between them, which take up new steps.
The profile counts bytes against the budget, so that what is above zero is excess.

References
----------
Bartan, Li, Teague, Lott, Dilkina: Moccasin, efficient tensor rematerialization for neural networks, ICML 2023
(retention intervals).
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from numba import njit

from onnx_remat.schedule import Ints, Longs
from onnx_remat.selectors.core import Core

Records: TypeAlias = npt.NDArray[Any]

_IDLE = 1 << 60  # taken off the profile where no step is
EXCESS, COUNT, EVENTS, NODES, BUDGET, HOLD_UNREAD = range(6)  # places in `State.totals`

# Records, not columns: compiled functions pass few arrays on, and what belongs together lies together.
_OP = np.dtype(
    [("slot", "i4"), ("reads", "i4"), ("writes", "i4"), ("spare", "i4"), ("count", "i4"), ("again", "i4"),
     ("workspace", "i8"), ("cost", "f8")], align=True
)  # fmt: skip
_VALUE = np.dtype(
    [("nbytes", "i8"), ("maker", "i4"), ("tail", "i4"), ("held", "i4"), ("droppable", "i4")], align=True
)
_EVENT = np.dtype(
    [("bonus", "i8"), ("op", "i4"), ("place", "i4"), ("node", "i4"), ("link", "i4"), ("rank", "i4"), ("pinned", "i4")],
    align=True,
)
_NODE = np.dtype([("owner", "i4"), ("value", "i4"), ("before", "i4"), ("after", "i4"), ("read", "i4")], align=True)


class State(NamedTuple):
    """An order under change. Events are executions of ops; nodes are their touches, reads first, then writes.

    Attributes
    ----------
    at : int32 (n_places,)
        Event at each place, -1 for none.
    level : int64 (n_places,)
        Bytes held there, less the budget; far below where no event is.
    ops : records (n_ops,)
        First slot, reads and writes; a list of spare events; occurrences; whether it may occur `again`;
        workspace and cost.
    values : records (n_values,)
        Size; op that makes it; last touch; see `Core` for the rest.
    events : records (n_events,)
        Bytes saved by working in place; op, place (-1: not in the order), first node; next spare event; place in
        `active`; whether it must stay where it is.
    nodes : records (n_nodes,)
        Event, value, neighbours in the value's list, whether it is a read.
    slots : int32
        Values each op reads and writes.
    take_ptr, take : int32
        Per slot, places among the op's reads of what it may be made in place of.
    active : int32 (n_events,)
        The events in the order, unsorted.
    totals : int64 (6,)
        Excess; events in the order; events and nodes handed out; budget; whether unread values are held.
    """

    at: Ints
    level: Longs
    ops: Records
    values: Records
    events: Records
    nodes: Records
    slots: Ints
    take_ptr: Ints
    take: Ints
    active: Ints
    totals: Longs


def empty_state(core: Core, places: int, budget: int) -> State:
    """A state with no event in it; `budget` excludes the residents."""
    reads, writes = np.diff(core.in_ptr), np.diff(core.out_ptr)
    ops = np.zeros(len(reads), _OP)
    ops["slot"] = core.in_ptr[:-1] + core.out_ptr[:-1]
    ops["reads"], ops["writes"], ops["spare"] = reads, writes, -1
    ops["again"], ops["workspace"], ops["cost"] = core.recomputable, core.workspace, core.cost
    values = np.zeros(len(core.nbytes), _VALUE)
    values["nbytes"], values["maker"], values["tail"] = core.nbytes, core.made_by, -1
    values["held"], values["droppable"] = core.held, core.droppable
    is_write = np.zeros(len(core.in_values) + len(core.out_values), np.bool_)
    is_write[np.repeat(ops["slot"] + reads, writes) + _within(writes)] = True
    slots = np.empty(len(is_write), np.int32)
    slots[is_write], slots[~is_write] = core.out_values, core.in_values
    take_ptr = np.zeros(len(is_write) + 1, np.int32)
    take_ptr[1:][is_write] = np.diff(core.take_ptr)
    events = np.zeros(places, _EVENT)
    events["place"] = -1
    room = int(len(slots) * (places / max(int((reads + writes > 0).sum()), 1) + 1)) + int((reads + writes).max(initial=0))
    totals = np.array([0, 0, 0, 0, budget, core.hold_unread], np.int64)
    return State(
        np.full(places, -1, np.int32), np.full(places, -_IDLE, np.int64), ops, values, events,
        np.zeros(room, _NODE), slots, np.cumsum(take_ptr, dtype=np.int32), core.take,
        np.full(places, -1, np.int32), totals,
    )  # fmt: skip


def _within(lengths: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """0, 1, ..., for each run of the given length."""
    ends = np.cumsum(lengths)
    return np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)


@njit(cache=True, no_cpython_wrapper=True)
def _hold(s, low, high, delta):  # type: ignore[no-untyped-def]
    """Hold `delta` bytes more from place `low` to place `high`, both included."""
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


@njit(cache=True, no_cpython_wrapper=True)
def ends(s, x):  # type: ignore[no-untyped-def]
    """Whether no read follows touch `x` before the next write."""
    b = s.nodes[x].after
    return b < 0 or s.nodes[b].read == 0


@njit(cache=True, no_cpython_wrapper=True)
def place_of(s, x):  # type: ignore[no-untyped-def]
    """Place of touch `x`."""
    return s.events[s.nodes[x].owner].place


@njit(cache=True, no_cpython_wrapper=True)
def _written(s, x, sign):  # type: ignore[no-untyped-def]
    """Count (`sign` 1) or discount (-1) the write `x` as its neighbours stand."""
    value = s.values[s.nodes[x].value]
    p = place_of(s, x)
    first = s.nodes[x].before < 0
    high = p
    if value.held and first:
        high = len(s.at) - 1
    elif ends(s, x):
        if value.droppable and not first:
            return
        if s.totals[HOLD_UNREAD]:
            high = len(s.at) - 1
    _hold(s, p, high, sign * value.nbytes)


@njit(cache=True, no_cpython_wrapper=True)
def _in_place(s, e):  # type: ignore[no-untyped-def]
    """Set what event `e` saves by making outputs in place of inputs that end there."""
    event = s.events[e]
    op = s.ops[event.op]
    start = op.slot + op.reads
    bonus = np.int64(0)
    for k in range(start, start + op.writes):
        for j in range(s.take_ptr[k], s.take_ptr[k + 1]):
            x = event.node + s.take[j]
            taken = False
            for i in range(s.take_ptr[start], j):
                taken = taken or s.take[i] == s.take[j]
            if not taken and not s.values[s.nodes[x].value].held and ends(s, x):
                y = event.node + k - op.slot
                made = s.values[s.nodes[y].value]
                if not (made.droppable and s.nodes[y].before >= 0 and ends(s, y)):
                    bonus += made.nbytes
                break
    if bonus != event.bonus:
        _hold(s, event.place, event.place, event.bonus - bonus)
        event.bonus = bonus


@njit(cache=True, no_cpython_wrapper=True)
def touch_before(s, v, p):  # type: ignore[no-untyped-def]
    """Last touch of value `v` before place `p`, -1 for none."""
    x = s.values[v].tail
    while x >= 0 and place_of(s, x) >= p:
        x = s.nodes[x].before
    return x


@njit(cache=True, no_cpython_wrapper=True)
def _relink(s, x, joining):  # type: ignore[no-untyped-def]
    """Put touch `x` into its value's list, or take it out, and keep the profile true."""
    nodes = s.nodes
    node = nodes[x]
    v = node.value
    p = place_of(s, x)
    if joining:
        b = np.int32(-1)
        a = s.values[v].tail
        while a >= 0 and place_of(s, a) >= p:
            b = a
            a = nodes[a].before
    else:
        a, b = node.before, node.after
    a_written = a >= 0 and nodes[a].read == 0
    b_read = b >= 0 and nodes[b].read != 0
    turns = b_read != (node.read != 0)  # what a is followed by changes between read and write
    alters_a = a_written and turns
    alters_b = b >= 0 and not b_read and a < 0  # it was, or becomes, the first write
    if not joining and not node.read:
        _written(s, x, -1)
    if alters_a:
        _written(s, a, -1)
    if alters_b:
        _written(s, b, -1)
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
    if alters_a:
        _written(s, a, 1)
    if alters_b:
        _written(s, b, 1)
    if joining and not node.read:
        _written(s, x, 1)
    if a >= 0 and turns:
        if not s.values[v].held:
            # A read lengthens the interval up to itself; a write parts one that went on.
            size = s.values[v].nbytes if joining == (node.read != 0) else -s.values[v].nbytes
            _hold(s, place_of(s, a) + 1, p, size)
        _in_place(s, nodes[a].owner)
    if alters_b:
        _in_place(s, nodes[b].owner)


@njit(cache=True, no_cpython_wrapper=True)
def put(s, e, p):  # type: ignore[no-untyped-def]
    """Let event `e` run at the empty place `p`."""
    event = s.events[e]
    op = s.ops[event.op]
    s.at[p], event.place = e, p
    s.level[p] += _IDLE - s.totals[BUDGET] + op.workspace
    s.totals[EXCESS] += max(s.level[p], 0)
    event.bonus = 0
    for x in range(event.node, event.node + op.reads + op.writes):
        _relink(s, x, True)
    _in_place(s, e)
    event.rank = s.totals[COUNT]
    s.active[s.totals[COUNT]] = e
    s.totals[COUNT] += 1
    op.count += 1


@njit(cache=True, no_cpython_wrapper=True)
def take(s, e):  # type: ignore[no-untyped-def]
    """Take event `e` out of the order; it stays at hand for `put`."""
    event = s.events[e]
    op = s.ops[event.op]
    p = event.place
    _hold(s, p, p, event.bonus)
    event.bonus = 0
    for x in range(event.node + op.reads + op.writes - 1, event.node - 1, -1):
        _relink(s, x, False)
    s.totals[EXCESS] -= max(s.level[p], 0)
    s.level[p] -= _IDLE - s.totals[BUDGET] + op.workspace
    s.at[p], event.place = -1, -1
    s.totals[COUNT] -= 1
    last = s.active[s.totals[COUNT]]
    s.active[event.rank] = last
    s.events[last].rank = event.rank
    op.count -= 1


@njit(cache=True, no_cpython_wrapper=True)
def new_event(s, o):  # type: ignore[no-untyped-def]
    """An unused event of op `o`, -1 if there is no room."""
    op = s.ops[o]
    e = op.spare
    if e >= 0:
        op.spare = s.events[e].link
        return e
    n = op.reads + op.writes
    first = s.totals[NODES]
    e = np.int32(s.totals[EVENTS])
    if e == len(s.events) or first + n > len(s.nodes):
        return np.int32(-1)
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


@njit(cache=True, no_cpython_wrapper=True)
def give_back(s, e):  # type: ignore[no-untyped-def]
    """Hand an event that is not in the order back."""
    op = s.ops[s.events[e].op]
    s.events[e].link = op.spare
    op.spare = e


@njit(cache=True, no_cpython_wrapper=True)
def _carried(s, e):  # type: ignore[no-untyped-def]
    """Level at an empty place right after event `e`."""
    event = s.events[e]
    op = s.ops[event.op]
    level = s.level[event.place] + s.totals[BUDGET] - _IDLE - op.workspace + event.bonus
    for x in range(event.node, event.node + op.reads + op.writes):
        if not ends(s, x):
            continue
        node = s.nodes[x]
        value = s.values[node.value]
        first = node.before < 0
        if value.held and (node.read or first):
            continue
        if node.read or not (s.totals[HOLD_UNREAD] or (value.droppable and not first)):
            level -= value.nbytes
    return level


@njit(cache=True, no_cpython_wrapper=True)
def make_room(s, p):  # type: ignore[no-untyped-def]
    """An empty place right before the event at place `p`, -1 if there is none; events move aside."""
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
    s.level[empty] = _carried(s, before) if before >= 0 else -_IDLE
    return empty


@njit(cache=True)
def load(s, order):  # type: ignore[no-untyped-def]
    """Fill an empty state with `order`, evenly spread."""
    n, places = len(order), len(s.at)
    for i in range(n):
        put(s, new_event(s, order[i]), (2 * i + 1) * places // (2 * n))


@njit(cache=True, no_cpython_wrapper=True)
def unload(s):  # type: ignore[no-untyped-def]
    """The order in a state."""
    order = np.empty(s.totals[COUNT], np.int32)
    i = 0
    for e in s.at:
        if e >= 0:
            order[i] = s.events[e].op
            i += 1
    return order
