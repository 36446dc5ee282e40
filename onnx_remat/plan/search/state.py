"""The arrays of an order under change, as compiled code takes them."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from onnx_remat.memory.problem import Ints, Longs
from onnx_remat.plan.search.core import Core
from onnx_remat.plan.search.tuning import PLACES_PER_STEP

Records: TypeAlias = npt.NDArray[Any]

IDLE = 1 << 60  # taken off the profile where no step is
EXCESS, COUNT, EVENTS, NODES, BUDGET, HOLD_UNREAD, WORK, FIXED = range(8)  # places in `State.totals`

# Records, not columns: compiled functions pass few arrays on, and what belongs together lies together. One
# integer
# type throughout, so that nothing is compiled twice.
_OP = np.dtype(
    [("slot", "i8"), ("reads", "i8"), ("writes", "i8"), ("spare", "i8"), ("count", "i8"), ("again", "i8"),
     ("workspace", "i8"), ("cost", "f8"), ("bar", "i8"), ("closers", "i8"), ("waits", "i8")], align=True
)  # fmt: skip
_VALUE = np.dtype([("nbytes", "i8"), ("maker", "i8"), ("tail", "i8"), ("held", "i8"), ("droppable", "i8")], align=True)
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
    """An order under change. Events are executions of ops; nodes are their touches, reads first, then writes.

    Attributes
    ----------
    at : int64 (n_places,)
        Event at each place, -1 for none.
    level : int64 (n_places,)
        Bytes held there, less the budget; far below where no event is.
    ops : records (n_ops,)
        First slot, reads and writes; a list of spare events; occurrences; whether it may occur `again`;
        workspace and cost; where its `bars` begin, and how many of the two kinds there are.
    values : records (n_values,)
        Size; op that makes it; last touch; see `Core` for the rest.
    events : records (n_events,)
        Bytes saved by working in place; op, place (-1: not in the order), first node; next spare event;
        place in `active`; whether it must stay where it is.
    nodes : records (n_nodes,)
        Event, value, neighbours in the value's list, whether it is a read.
    slots : int64
        Values each op reads and writes.
    take_ptr, take : int64
        Per slot, places among the op's reads of what it may be made in place of.
    bars : int64
        Per op, those that it must not run after (`closers`), then those that must not run after it (`waits`).
    active : int64 (n_events,)
        The events in the order, unsorted.
    totals : int64 (8,)
        Excess; events in the order; events and nodes handed out; budget; whether unread values are held;
        work done; whether first occurrences keep their order.
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
    """A state with no event in it and room for those of `order` and for moves; `budget` excludes the residents."""
    places = PLACES_PER_STEP * len(order) + 64
    reads, writes = np.diff(core.in_ptr), np.diff(core.out_ptr)
    ops = np.zeros(len(reads), _OP)
    ops["slot"] = core.in_ptr[:-1] + core.out_ptr[:-1]
    ops["reads"], ops["writes"], ops["spare"] = reads, writes, -1
    ops["again"], ops["workspace"], ops["cost"] = core.recomputable, core.workspace, core.cost
    bars = _bars(core, ops)
    values = np.zeros(len(core.nbytes), _VALUE)
    values["nbytes"], values["maker"], values["tail"] = core.nbytes, core.made_by, -1
    values["held"], values["droppable"] = core.held, core.droppable
    is_write = np.zeros(len(core.in_values) + len(core.out_values), np.bool_)
    is_write[np.repeat(ops["slot"] + reads, writes) + _within(writes)] = True
    slots = np.empty(len(is_write), np.int64)
    slots[is_write], slots[~is_write] = core.out_values, core.in_values
    take_ptr = np.zeros(len(is_write) + 1, np.int64)
    take_ptr[1:][is_write] = np.diff(core.take_ptr)
    events = np.zeros(places, _EVENT)
    events["place"] = -1
    touches = reads + writes
    # What an average order takes, and in any case what this one does: `load` does not ask whether there is room.
    room = int(len(slots) * (places / max(int((touches > 0).sum()), 1) + 1))
    room = max(room, int(touches[order].sum(dtype=np.int64))) + int(touches.max(initial=0))
    totals = np.array([0, 0, 0, 0, budget, core.hold_unread, 0, 0], np.int64)
    return State(
        np.full(places, -1, np.int64), np.full(places, -IDLE, np.int64), ops, values, events,
        np.zeros(room, _NODE), slots, np.cumsum(take_ptr, dtype=np.int64), core.take.astype(np.int64),
        bars, np.full(places, -1, np.int64), totals,
    )  # fmt: skip


def _bars(core: Core, ops: Records) -> Longs:
    """Fill in which ops bar which; the list of them all."""
    ops["closers"] = np.diff(core.closed_ptr)
    ops["waits"] = np.bincount(core.closed, minlength=len(ops))
    both = ops["closers"] + ops["waits"]
    ops["bar"] = np.cumsum(both) - both
    waiting = np.repeat(np.arange(len(ops)), ops["closers"])
    of, other = np.concatenate([waiting, core.closed]), np.concatenate([core.closed, waiting])
    return other[np.argsort(of, kind="stable")].astype(np.int64)  # in each op's list closers come first


def _within(lengths: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """0, 1, ..., for each run of the given length."""
    ends = np.cumsum(lengths)
    offsets: npt.NDArray[Any] = np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)
    return offsets
