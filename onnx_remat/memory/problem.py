"""The planner's data types: `Problem` (one graph as flat arrays), its `Lifetimes`, and `Schedule` (an order of ops).

`Problem.lifetimes` is the one table of where values lie, who makes and reads them, and which ops must precede others:
the simulator, the bounds and every selector read it. A rule about these goes there; `tests/plan/test_lifetimes.py`
checks that all of them obey it. When a value's memory is free again depends on the order: `buffers` has that rule for
the simulator, `plan/search/intervals` for the search.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int32]
Longs: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Flags: TypeAlias = npt.NDArray[np.bool_]

FORWARD, BACKWARD, OPTIMIZER = 0, 1, 2
OWN, IN_RESIDENT = -1, -2
"""Values of `Lifetimes.place` for an output not in an input's buffer: in its own buffer, in a resident's memory."""


@dataclass(frozen=True)
class Problem:
    """One graph as the simulator and the selectors see it: ops and values are numbers, relations are CSR arrays.

    Ops are numbered in a topological order (the file's). An *output slot* is a position in `out_values`.

    Attributes
    ----------
    in_ptr, in_values : int32 (n_ops + 1,), (n_inputs,)
        Values read by op ``i``: ``in_values[in_ptr[i]:in_ptr[i + 1]]``, one entry per input slot, repeats kept.
    out_ptr, out_values : int32 (n_ops + 1,), (n_slots,)
        Values written by op ``i``.
    nbytes : int64 (n_values,)
        Size of each value in bytes.
    resident : bool (n_values,)
        Graph inputs and initializers: they exist for the whole step and are never freed.
    is_output : bool (n_values,)
        Graph outputs: once made (by the op's first occurrence) they are never freed nor shared.
    shape_class : int32 (n_values,)
        Equal numbers mean equal shape and element size, -1 means never shared (unknown shape, string, non-tensor).
    poolable : bool (n_values,)
        May reuse a freed buffer of its class, and leave its own for reuse (ONNX Runtime excludes scalars).
    alias_slot : int32 (n_slots,)
        Input slot (counted within the op) whose buffer this output must share (Reshape, ...), else -1.
    inplace_ptr, inplace_slots : int32 (n_slots + 1,), (n,)
        Input slots whose buffer this output may reuse if the input dies here, in the order the runtime tries them.
    droppable : int8 (n_slots,)
        Which unread occurrences of an output are dropped, that is freed right after their op: none (0), the recomputed
        ones (1, optional outputs) or any (2). The others follow `hold_unread`.
    workspace : int64 (n_ops,)
        Bytes of scratch memory allocated only while the op runs.
    rerun_workspace : int64 (n_ops,)
        Additional workspace of a recompute of the op.
    cost : float64 (n_ops,)
        Seconds (or any unit; only ratios matter) of one execution.
    recomputable : bool (n_ops,)
        False for random, stateful and opaque ops: each occurs exactly once in every schedule.
    phase : int8 (n_ops,)
        FORWARD, BACKWARD or OPTIMIZER.
    base_bytes : int
        Bytes of all resident values.
    hold_unread : bool
        True if an unread value stays allocated to the end of the step, as in ONNX Runtime; False if it is freed right
        after its op, as the published benchmark graphs count.
    donates : int32 (n_values,) or empty
        Resident whose memory each value reuses (an updated weight that of the old one), or -1. Empty: no donations.
        Such a value takes no memory. Its op runs once, after every op that reads the resident or a view of it.
    donee_may_read : bool (n_values,) or empty
        Whether the op that makes such a value may itself read the resident it replaces: its kernel reads every element
        before it overwrites it. Empty: none may.
    outputs_join : bool
        Whether a graph output may reuse the buffer of an input that dies, as in a `Session`; in ONNX Runtime's own
        sessions it has one of its own. Bounds alone look at it.
    moves : bool (n_ops,) or empty
        Ops that copy a value back from the host (`ort.moves`). Their first occurrence, right after the op that makes
        the value, does nothing and costs nothing. Empty: no moves.
    """

    in_ptr: Ints
    in_values: Ints
    out_ptr: Ints
    out_values: Ints
    nbytes: Longs
    resident: Flags
    is_output: Flags
    shape_class: Ints
    poolable: Flags
    alias_slot: Ints
    inplace_ptr: Ints
    inplace_slots: Ints
    droppable: npt.NDArray[np.int8]
    workspace: Longs
    rerun_workspace: Longs
    cost: Floats
    recomputable: Flags
    phase: npt.NDArray[np.int8]
    base_bytes: int
    hold_unread: bool = True
    outputs_join: bool = False
    donates: Ints = field(default_factory=lambda: np.empty(0, np.int32))
    donee_may_read: Flags = field(default_factory=lambda: np.empty(0, np.bool_))
    moves: Flags = field(default_factory=lambda: np.empty(0, np.bool_))

    @cached_property
    def lifetimes(self) -> Lifetimes:
        """Where values lie and which ops precede which; ValueError if a donation is impossible."""
        return _lifetimes(self)

    @cached_property
    def _lists(self) -> tuple[list[list[int]], list[list[int]]]:
        """Inputs and outputs of every op as lists: slicing an array takes longer than using the slice."""
        columns = (self.in_ptr, self.in_values), (self.out_ptr, self.out_values)
        reads, writes = ([of[a:b] for of in [v.tolist()] for a, b in pairwise(p.tolist())] for p, v in columns)
        return reads, writes

    @property
    def n_ops(self) -> int:
        return len(self.in_ptr) - 1

    @property
    def n_values(self) -> int:
        return len(self.nbytes)

    def plain_cost(self) -> float:
        """Return the cost of one execution of every op, in the unit of `cost`; a move's first is free."""
        moves = float(self.cost[self.moves].sum()) if len(self.moves) else 0.0
        return float(self.cost.sum()) - moves

    def inputs(self, op: int) -> list[int]:
        """Values read by `op`, in slot order."""
        return [*self._lists[0][op]]

    def outputs(self, op: int) -> list[int]:
        """Values written by `op`, in slot order."""
        return [*self._lists[1][op]]

    def producer(self) -> Ints:
        """Op that writes each value, -1 for residents. Shape (n_values,)."""
        return self.lifetimes.maker


class Lifetimes(NamedTuple):
    """Per value of a problem: the op that makes it, its readers, its place and its size, as one record for kernels.

    The simulator determines everything that depends on a schedule: which occurrence a step reads, the last read.

    Attributes
    ----------
    in_ptr, in_values, out_ptr, out_values, shape_class, poolable, droppable, workspace, rerun_workspace, hold_unread
        As in `Problem`.
    maker : int32 (n_values,)
        Op that makes a value, -1 for residents.
    root : int32 (n_values,)
        Value in whose buffer it lies, itself unless it is a view: chains of mandatory aliases are resolved.
    reader_ptr, readers : int32 (n_values + 1,), (n,)
        Ops that read each root or a view of it, ascending, each once.
    nbytes : int64 (n_values,)
        Bytes of the value's own buffer: 0 for residents and values in their memory.
    least : int64 (n_values,)
        Lower bound on the bytes of a root's buffer: a view of it may be smaller.
    kept : bool (n_values,)
        Graph outputs: allocated from their first occurrence to the end of the step.
    place : int32 (n_slots,)
        Where an output lies: in the buffer of this input slot of its op, OWN, or IN_RESIDENT. The first occurrence of
        a kept value that is not in a resident's memory always has a buffer of its own.
    take_ptr, take : int32 (n_slots + 1,), (n,)
        Input slots whose buffer an output reuses if the input dies there, in the order the runtime tries them.
    renewed_by : int32 (n_values,)
        Op that overwrites a resident with its new value: no op may read the old value or a view of it afterwards.
        -1 for none.
    recomputable : bool (n_ops,)
        Ops that may occur more than once.
    next_ptr, next_ops : int32 (n_ops + 1,), (n,)
        Ops whose first occurrence must follow that of each op, ascending: they read its output, or overwrite its input.
    """

    in_ptr: Ints
    in_values: Ints
    out_ptr: Ints
    out_values: Ints
    shape_class: Ints
    poolable: Flags
    droppable: npt.NDArray[np.int8]
    workspace: Longs
    rerun_workspace: Longs
    hold_unread: bool
    maker: Ints
    root: Ints
    reader_ptr: Ints
    readers: Ints
    nbytes: Longs
    least: Longs
    kept: Flags
    place: Ints
    take_ptr: Ints
    take: Ints
    renewed_by: Ints
    recomputable: Flags
    next_ptr: Ints
    next_ops: Ints


@dataclass(frozen=True, slots=True)
class Schedule:
    """An execution order of op numbers. A second occurrence is a recompute; a step reads the latest occurrence."""

    order: tuple[int, ...]

    def array(self) -> Ints:
        return np.asarray(self.order, np.int32)

    def overhead(self, problem: Problem) -> float:
        """Return the extra compute as a fraction of one execution of every op: 0.25 means 25 % more; moves count."""
        total = problem.plain_cost()
        repeats = np.bincount(self.array(), minlength=problem.n_ops) - 1
        again = float(problem.cost @ repeats) + float(problem.cost[self.late_moves(problem)].sum())
        return again / total if total else 0.0

    def late_moves(self, problem: Problem) -> list[int]:
        """Return the moves whose first occurrence copies, as it does not directly follow the maker of its value."""
        late: list[int] = []
        if not len(problem.moves):
            return late
        seen: set[int] = set()
        for before, op in pairwise((-1, *self.order)):
            if problem.moves[op] and op not in seen and before != problem.producer()[problem.inputs(op)[0]]:
                late.append(op)
            seen.add(op)
        return late


def check_schedule(problem: Problem, schedule: Schedule, fixed_order: bool = False) -> None:
    """Raise ValueError unless `schedule` is one the rewriter could write.

    Every op occurs; an op runs after the producers of its inputs, and before an input is overwritten; ops that must not
    be recomputed occur once. With `fixed_order`, first occurrences also follow the ops' numbering.
    """
    life = problem.lifetimes
    count = np.zeros(problem.n_ops, np.int64)
    for step, op in enumerate(schedule.order):
        if not 0 <= op < problem.n_ops:
            raise ValueError(f"step {step} runs op {op}, which does not exist")
        for value in problem.inputs(op):
            maker, renewing = life.maker[value], life.renewed_by[life.root[value]]
            if maker >= 0 and not count[maker]:
                raise ValueError(f"step {step} runs op {op} before op {maker}, whose output it reads")
            if renewing >= 0 and renewing != op and count[renewing]:
                raise ValueError(f"step {step} runs op {op} after op {renewing}, which overwrites its input")
        if fixed_order and op and not count[op - 1]:
            raise ValueError(f"step {step} runs op {op} before op {op - 1}, which comes first in the fixed order")
        count[op] += 1
    if not count.all():
        raise ValueError(f"op {int(np.argmin(count))} never runs")
    if ((count > 1) & ~life.recomputable).any():
        raise ValueError(f"op {int(np.argmax((count > 1) & ~life.recomputable))} must not run twice")


def _lifetimes(problem: Problem) -> Lifetimes:
    """Compute the table of lifetimes of a problem."""
    n_ops, n_values, out_values = problem.n_ops, problem.n_values, problem.out_values
    reader = np.repeat(np.arange(n_ops, dtype=np.int32), np.diff(problem.in_ptr))
    writer = np.repeat(np.arange(n_ops, dtype=np.int32), np.diff(problem.out_ptr))
    maker = np.full(n_values, -1, np.int32)
    maker[out_values] = writer
    root = _roots(problem, writer)
    reader_ptr, readers = _csr(root[problem.in_values], reader, n_values, n_ops)
    donates = problem.donates if len(problem.donates) else np.full(n_values, -1, np.int32)
    donees = np.flatnonzero(donates >= 0)
    renewed_by = np.full(n_values, -1, np.int32)
    renewed_by[donates[donees]] = maker[donees]
    renewing = renewed_by[root[problem.in_values]]
    _check_donations(problem, root, maker, donees, renewing == reader)
    nbytes = problem.nbytes.copy()
    nbytes[problem.resident] = nbytes[donees] = 0
    least = nbytes.copy()
    np.minimum.at(least, root, nbytes)
    place = problem.alias_slot.copy()
    place[donates[out_values] >= 0] = IN_RESIDENT
    take_ptr, take = _in_place_inputs(problem, writer, place)
    recomputable = problem.recomputable.copy()
    recomputable[maker[donees]] = False
    source, waits = maker[problem.in_values], (renewing >= 0) & (renewing != reader)
    first = np.concatenate([source[source >= 0], reader[waits]])
    then = np.concatenate([reader[source >= 0], renewing[waits]])
    return Lifetimes(
        problem.in_ptr, problem.in_values, problem.out_ptr, out_values, problem.shape_class, problem.poolable,
        problem.droppable, problem.workspace, problem.rerun_workspace, problem.hold_unread, maker, root, reader_ptr,
        readers, nbytes, least, problem.is_output & ~problem.resident, place, take_ptr, take, renewed_by, recomputable,
        *_csr(first, then, n_ops, n_ops),
    )  # fmt: skip


def _roots(problem: Problem, writer: Ints) -> Ints:
    """Return the value in whose buffer each value lies, following mandatory aliases only. Shape (n_values,)."""
    root = np.arange(problem.n_values, dtype=np.int32)
    slots = np.flatnonzero((problem.alias_slot >= 0) & ~problem.is_output[problem.out_values])
    viewed = problem.in_values[problem.in_ptr[writer[slots]] + problem.alias_slot[slots]]
    root[problem.out_values[slots]] = viewed
    while not np.array_equal(further := root[root], root):
        root = further
    return root


def _in_place_inputs(problem: Problem, writer: Ints, place: Ints) -> tuple[Ints, Ints]:
    """Per output slot, inputs of its shape class whose buffer it may reuse; none for one in a resident's memory."""
    slot = np.repeat(np.arange(len(problem.out_values)), np.diff(problem.inplace_ptr))
    wanted = problem.shape_class[problem.out_values[slot]]
    taken = problem.shape_class[problem.in_values[problem.in_ptr[writer[slot]] + problem.inplace_slots]]
    fair = (wanted == taken) & (wanted >= 0) & (place[slot] != IN_RESIDENT)
    count = np.bincount(slot[fair], minlength=len(problem.out_values))
    return np.concatenate([[0], np.cumsum(count)]).astype(np.int32), problem.inplace_slots[fair]


def _csr(keys: Ints, entries: Ints, n_keys: int, n_entries: int) -> tuple[Ints, Ints]:
    """Return the distinct entries of each key as CSR arrays, ascending."""
    pairs = np.unique(keys.astype(np.int64) * n_entries + entries)
    ptr = np.searchsorted(pairs, np.arange(n_keys + 1, dtype=np.int64) * n_entries).astype(np.int32)
    return ptr, (pairs % max(n_entries, 1)).astype(np.int32)


def _check_donations(problem: Problem, root: Ints, maker: Ints, donees: npt.NDArray[np.int64], own: Flags) -> None:
    """Raise ValueError unless each donation gives one resident to one value whose op may overwrite it."""
    if not len(donees):
        return
    onto = problem.donates[donees]
    if len(np.unique(onto)) < len(onto):
        raise ValueError("two values replace the same resident")
    if (~problem.resident[onto] | problem.is_output[onto]).any():
        raise ValueError("a value replaces one that is not resident, or a resident that is a graph output")
    if (problem.resident[donees] | (root[donees] != donees)).any():
        raise ValueError("a resident or a view replaces a resident")
    by_own_op = np.zeros(problem.n_values, np.bool_)
    by_own_op[root[problem.in_values[own]]] = True
    may_read = problem.donee_may_read[donees] if len(problem.donee_may_read) else np.zeros(len(donees), np.bool_)
    if (by_own_op[onto] & ~may_read).any():
        value = int(donees[np.argmax(by_own_op[onto] & ~may_read)])
        raise ValueError(f"op {int(maker[value])} reads the resident that value {value} replaces: its kernel must not")
