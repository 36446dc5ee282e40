"""Conversion of orders to search states and back."""

from __future__ import annotations

import numpy as np

from onnx_remat.plan.search.intervals import ends, in_place, new_event, place_of
from onnx_remat.plan.search.state import BUDGET, COUNT, EVENTS, EXCESS, HOLD_UNREAD, IDLE, NODES
from onnx_remat.process.compiled import compiled, inlined


@inlined
def _appended(s, o, p):  # type: ignore[no-untyped-def]
    """Append an event of op `o` at place `p`, after all existing ones; `load` computes the profile afterwards."""
    e = new_event(s, o)
    event, op = s.events[e], s.ops[o]
    s.at[p], event.place = e, p
    s.level[p] += IDLE - s.totals[BUDGET] + op.workspace
    event.rank = s.totals[COUNT]
    s.active[s.totals[COUNT]] = e
    s.totals[COUNT] += 1
    op.count += 1
    for x in range(event.node, event.node + op.reads + op.writes):
        value = s.values[s.nodes[x].value]
        s.nodes[x].before, s.nodes[x].after = value.tail, -1
        if value.tail >= 0:
            s.nodes[value.tail].after = x
        value.tail = x


@compiled
def load(s, order):  # type: ignore[no-untyped-def]
    """Fill an empty state with `order`, evenly spread: equals `change` for each step, but sums the profile once."""
    n, places = len(order), len(s.at)
    for i in range(n):
        _appended(s, np.int64(order[i]), (2 * i + 1) * places // (2 * n))
    steps = np.zeros(places + 1, np.int64)  # differences of the profile between neighbouring places
    for x in range(s.totals[NODES]):
        node = s.nodes[x]
        value = s.values[node.value]
        p = place_of(s, x)
        low, high = p, p
        if node.read:
            if value.kept:
                continue
            low = place_of(s, node.before) + 1
        elif (value.kept and node.before < 0) or (
            ends(s, x) and s.totals[HOLD_UNREAD] and not (value.droppable and node.before >= 0)
        ):
            high = places - 1
        steps[low] += value.nbytes
        steps[high + 1] -= value.nbytes
    live = np.int64(0)
    for p in range(places):
        live += steps[p]
        s.level[p] += live
        s.totals[EXCESS] += max(s.level[p], 0)
    for e in range(s.totals[EVENTS]):
        in_place(s, e)


@compiled
def unload(s):  # type: ignore[no-untyped-def]
    """Return the order in a state."""
    order = np.empty(s.totals[COUNT], np.int32)
    i = 0
    for e in s.at:
        if e >= 0:
            order[i] = s.events[e].op
            i += 1
    return order
