"""The mutable search state: an order and its memory profile as arrays for compiled code."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from onnx_remat.memory.problem import Ints, Longs
from onnx_remat.plan.search.core import Core
from onnx_remat.plan.search.tuning import PLACES_PER_STEP

Records: TypeAlias = npt.NDArray[Any]

IDLE = 1 << 60  # subtracted from the profile at empty places, so that they never exceed the budget
EXCESS, COUNT, EVENTS, NODES, BUDGET, HOLD_UNREAD, WORK, FIXED = range(8)  # indices into `State.totals`

# Records instead of columns: compiled functions take few arrays, and the fields of a record share a cache line. One
# integer type throughout, so that no function is compiled twice.
_OP = np.dtype(
    [("slot", "i8"), ("reads", "i8"), ("writes", "i8"), ("spare", "i8"), ("count", "i8"), ("again", "i8"),
     ("workspace", "i8"), ("cost", "f8"), ("bar", "i8"), ("closers", "i8"), ("waits", "i8")], align=True
)  # fmt: skip
_VALUE = np.dtype([("nbytes", "i8"), ("maker", "i8"), ("tail", "i8"), ("kept", "i8"), ("droppable", "i8")], align=True)
_EVENT = np.dtype(
    [
        ("bonus", "i8"),
        ("op", "i8"),
        ("place", "i8"),
        ("node", "i8"),
        ("link", "i8"),
        ("rank", "i8"),
        ("pinned", "i8"),
    ],
    align=True,
)
_NODE = np.dtype([("owner", "i8"), ("value", "i8"), ("before", "i8"), ("after", "i8"), ("read", "i8")], align=True)


class State(NamedTuple):
    """A mutable order. Events are executions of ops; nodes are their touches of values, reads first, then writes.

    Attributes
    ----------
    at : int64 (n_places,)
        Event at each place, -1 for none.
    level : int64 (n_places,)
        Live bytes at each place minus the budget; minus IDLE at an empty place.
    ops : records (n_ops,)
        First slot, reads and writes; head of the list of spare events; occurrences; whether it may occur `again`;
        workspace and cost; start of its `bars`, and their number by kind.
    values : records (n_values,)
        Size; op that makes it; last touch; see `Core` for the rest.
    events : records (n_events,)
        Bytes saved by in-place outputs; op, place (-1: not in the order), first node; next spare event; index in
        `active`; whether it must stay in its place (`pinned`).
    nodes : records (n_nodes,)
        Event, value, neighbours in the value's list of touches, whether it is a read.
    slots : int64
        Values that each op reads and writes.
    take_ptr, take : int64
        Per output slot, indices among the op's reads of the inputs whose buffer it may reuse.
    bars : int64
        Per op, the ops that it must not run after (`closers`), then the ops that must not run after it (`waits`).
    active : int64 (n_events,)
        The events in the order, unsorted.
    totals : int64 (8,)
        Excess; events in the order; events and nodes allocated; budget; whether unread values stay allocated; work
        done; whether first occurrences keep their order.
    """

    at: Longs
    level: Longs
    ops: Records
    values: Records
    events: Records
    nodes: Records
    slots: Longs
    take_ptr: Longs
    take: Longs
    bars: Longs
    active: Longs
    totals: Longs


def empty_state(core: Core, order: Ints, budget: int) -> State:
    """Return a state without events, with capacity for those of `order` and for moves; `budget` excludes residents."""
    places = PLACES_PER_STEP * len(order) + 64
    reads, writes = np.diff(core.in_ptr), np.diff(core.out_ptr)
    ops = np.zeros(len(reads), _OP)
    ops["slot"] = core.in_ptr[:-1] + core.out_ptr[:-1]
    ops["reads"], ops["writes"], ops["spare"] = reads, writes, -1
    ops["again"], ops["workspace"], ops["cost"] = core.recomputable, core.workspace, core.cost
    bars = _bars(core, ops)
    values = np.zeros(len(core.nbytes), _VALUE)
    values["nbytes"], values["maker"], values["tail"] = core.nbytes, core.made_by, -1
    values["kept"], values["droppable"] = core.kept, core.droppable
    is_write = np.zeros(len(core.in_values) + len(core.out_values), np.bool_)
    is_write[np.repeat(ops["slot"] + reads, writes) + _within(writes)] = True
    slots = np.empty(len(is_write), np.int64)
    slots[is_write], slots[~is_write] = core.out_values, core.in_values
    take_ptr = np.zeros(len(is_write) + 1, np.int64)
    take_ptr[1:][is_write] = np.diff(core.take_ptr)
    events = np.zeros(places, _EVENT)
    events["place"] = -1
    touches = reads + writes
    # Capacity for an average order, and at least for this one: `load` does not check it.
    room = int(len(slots) * (places / max(int((touches > 0).sum()), 1) + 1))
    room = max(room, int(touches[order].sum(dtype=np.int64))) + int(touches.max(initial=0))
    totals = np.array([0, 0, 0, 0, budget, core.hold_unread, 0, 0], np.int64)
    return State(
        np.full(places, -1, np.int64), np.full(places, -IDLE, np.int64), ops, values, events,
        np.zeros(room, _NODE), slots, np.cumsum(take_ptr, dtype=np.int64), core.take.astype(np.int64),
        bars, np.full(places, -1, np.int64), totals,
    )  # fmt: skip


def _bars(core: Core, ops: Records) -> Longs:
    """Fill in the ops' counts of `bars`, and return their list."""
    ops["closers"] = np.diff(core.closed_ptr)
    ops["waits"] = np.bincount(core.closed, minlength=len(ops))
    both = ops["closers"] + ops["waits"]
    ops["bar"] = np.cumsum(both) - both
    waiting = np.repeat(np.arange(len(ops)), ops["closers"])
    of, other = np.concatenate([waiting, core.closed]), np.concatenate([core.closed, waiting])
    return other[np.argsort(of, kind="stable")].astype(np.int64)  # in each op's list, closers come first


def _within(lengths: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return 0, 1, ... for each run of the given length."""
    ends = np.cumsum(lengths)
    offsets: npt.NDArray[Any] = np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)
    return offsets
