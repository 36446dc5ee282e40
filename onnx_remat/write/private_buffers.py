"""Private buffers: keep ONNX Runtime's buffer reuse from raising the peak above plain liveness.

The runtime reuses a freed buffer for the next value of the same shape (see `memory`), and the buffer stays allocated
until its last tenant is dead, including the gap between two tenants. On real networks these gaps add 5 to 30 % to the
peak. A value whose shape the runtime cannot infer from the file takes no part in the reuse: it gets a buffer of its
own, which is freed as soon as the value is dead. Passing an input of the value's op through an Unsqueeze with computed
axes (see `barriers`) stops shape inference at no cost. Such a value is called *private* here.

::

    step                 0    1    2    3    4    5
    buffer shared        [a       ]----------[d       ]      d reuses a's buffer: allocated through steps 2 and 3
    d is private         [a       ]
                                             [d       ]      nothing is allocated through the gap, where the peak is

Values that are computed in place of a private value form a group with it: they share one symbolic shape, so that the
runtime still sees equal shapes and works in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnx_remat.memory.buffers import Timeline, simulate
from onnx_remat.memory.problem import Flags, Ints, Problem, Schedule
from onnx_remat.process.compiled import compiled

_ANY_OCCURRENCE = 2  # a value of `Problem.droppable`


@dataclass(frozen=True, slots=True)
class Unrolled:
    """A schedule as a problem of its own: every step is an op, every occurrence of a value is a value.

    Attributes
    ----------
    problem : Problem
        Ops are the schedule's steps; residents keep their numbers, occurrences follow in order of production.
    base : int
        Number of the first occurrence: occurrence i is value ``base + i``.
    source : int32 (n_occurrences,)
        Value of the original problem.
    step : int32 (n_occurrences,)
        Step that makes it.
    dropped : bool (n_occurrences,)
        Whether the occurrence has no reader and is freed right after its step.
    """

    problem: Problem
    base: int
    source: Ints
    step: Ints

    @property
    def dropped(self) -> Flags:
        return self.problem.droppable > 0


def unroll(problem: Problem, schedule: Schedule) -> Unrolled:
    """Give every occurrence of a value in a schedule its own number."""
    base = problem.n_values
    latest = np.arange(base, dtype=np.int64)
    read_later = read_occurrences(problem, schedule)
    in_ptr, in_values, out_ptr, out_values = [0], [], [0], []
    slots: list[int] = []
    source: list[int] = []
    steps: list[int] = []
    drops: list[int] = []
    for step, op in enumerate(schedule.order):
        in_values.extend(latest[problem.inputs(op)].tolist())
        in_ptr.append(len(in_values))
        for slot in range(problem.out_ptr[op], problem.out_ptr[op + 1]):
            value = int(problem.out_values[slot])
            first = latest[value] == value
            unread = not read_later[len(source)]
            drops.append(_ANY_OCCURRENCE if unread and problem.droppable[slot] > first else 0)
            latest[value] = base + len(source)
            out_values.append(base + len(source))
            slots.append(slot)
            source.append(value)
            steps.append(step)
        out_ptr.append(len(out_values))
    origin = np.concatenate([np.arange(base), np.asarray(source, np.int64)]).astype(np.int32)
    first_time = np.ones(len(origin), np.bool_)
    first_time[base:] = ~repeated(np.asarray(source, np.int32))
    donates = problem.donates[origin] if len(problem.donates) else problem.donates
    donates[:base] = -1
    order = schedule.array()
    lengths = np.diff(problem.inplace_ptr)[slots]
    picks = [problem.inplace_slots[problem.inplace_ptr[s] : problem.inplace_ptr[s + 1]] for s in slots]
    unrolled = replace(
        problem,
        in_ptr=np.asarray(in_ptr, np.int32),
        in_values=np.asarray(in_values, np.int32),
        out_ptr=np.asarray(out_ptr, np.int32),
        out_values=np.asarray(out_values, np.int32),
        nbytes=problem.nbytes[origin],
        resident=problem.resident[origin],
        is_output=problem.is_output[origin] & first_time,
        shape_class=problem.shape_class[origin],
        poolable=problem.poolable[origin],
        alias_slot=problem.alias_slot[slots],
        inplace_ptr=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        inplace_slots=np.concatenate([*picks, np.zeros(0, np.int32)]).astype(np.int32),
        droppable=np.asarray(drops, np.int8),
        workspace=problem.workspace[order] + np.where(repeated(order), problem.rerun_workspace[order], 0),
        rerun_workspace=np.zeros(len(order), np.int64),
        cost=problem.cost[order],
        recomputable=problem.recomputable[order],
        moves=np.empty(0, np.bool_),
        phase=problem.phase[order],
        donates=donates,
        donee_may_read=problem.donee_may_read[origin] if len(problem.donee_may_read) else problem.donee_may_read,
    )
    return Unrolled(unrolled, base, np.asarray(source, np.int32), np.asarray(steps, np.int32))


def repeated(numbers: Ints) -> Flags:
    """Return a flag per entry: whether it occurred before."""
    again = np.ones(len(numbers), np.bool_)
    again[np.unique(numbers, return_index=True)[1]] = False
    return again


def read_occurrences(problem: Problem, schedule: Schedule) -> list[bool]:
    """Return, per occurrence (one per output slot of each step), whether some step reads it."""
    latest: dict[int, int] = {}
    read: list[bool] = []
    for op in schedule.order:
        for value in problem.inputs(op):
            if value in latest:
                read[latest[value]] = True
        for value in problem.outputs(op):
            latest[value] = len(read)
            read.append(False)
    return read


def gap_tenants(problem: Problem, order: Sequence[int], timeline: Timeline, limit: int) -> list[int]:
    """Return the values in a reused buffer that stayed allocated, through a gap, during a step above `limit` bytes.

    Parameters
    ----------
    problem : Problem
    order : sequence of int
        Runs every op once.
    timeline : Timeline
        Of that order.
    limit : int
        Bytes; only steps above it count.
    """
    steps = np.asarray(order, np.int32)
    hot = np.concatenate([[0], np.cumsum(timeline.step_bytes > limit)]).astype(np.int64)
    flagged = flag_gaps(steps, problem.lifetimes, timeline.tenant_of, len(timeline.start), hot)
    return [int(v) for v in np.flatnonzero(flagged)]


@compiled
def flag_gaps(order, life, tenant_of, n_buffers, hot):  # type: ignore[no-untyped-def]
    """Flag the values that `gap_tenants` returns; `hot` counts the steps above the limit before each step."""
    last_read = np.full(len(life.nbytes), -1, np.int32)
    for step in range(len(order)):
        op = order[step]
        for v in life.in_values[life.in_ptr[op] : life.in_ptr[op + 1]]:
            last_read[v] = step
    busy_until = np.full(n_buffers, -1, np.int32)
    flagged = np.zeros(len(life.nbytes), np.bool_)
    i = 0
    for step in range(len(order)):
        op = order[step]
        for value in life.out_values[life.out_ptr[op] : life.out_ptr[op + 1]]:
            buffer = tenant_of[i]
            i += 1
            if buffer < 0:
                continue
            if busy_until[buffer] >= 0 and hot[step] > hot[busy_until[buffer] + 1]:
                flagged[value] = True
            busy_until[buffer] = max(busy_until[buffer], last_read[value], step)
    return flagged


@dataclass(frozen=True, slots=True)
class Sharing:
    """Groups of values with private buffers.

    Attributes
    ----------
    group : int32 (n_occurrences,)
        Number of an occurrence's private group, -1 for occurrences with ordinary reuse.
    leaders : tuple of int
        Occurrences whose step must hide their shape; the other members join the group as in-place outputs.
    timeline : Timeline
        Simulation of the schedule with these groups.
    """

    group: Ints
    leaders: tuple[int, ...]
    timeline: Timeline


def choose_private(unrolled: Unrolled, limit: int, light: int, can_hide: Flags, start: Sequence[int] = ()) -> Sharing:
    """Make values private until the steps of a schedule stay at or below a limit, or no further value helps.

    Parameters
    ----------
    unrolled : Unrolled
        The schedule.
    limit : int
        Bytes of peak.
    light : int
        Values of up to this many bytes are not made private.
    can_hide : bool (n_steps,)
        Steps whose outputs' shapes can be hidden.
    start : sequence of int
        Occurrences to make private unconditionally, if their shapes can be hidden.
    """
    problem, base = unrolled.problem, unrolled.base
    steps = range(problem.n_ops)
    hideable = can_hide[unrolled.step] & (problem.alias_slot < 0)
    private = np.zeros(len(unrolled.source), np.bool_)
    private[list(start)] = hideable[list(start)]
    while True:
        group = _group(unrolled, private)
        classes = problem.shape_class.copy()
        classes[base:] = np.where(group >= 0, int(classes.max(initial=0)) + 1 + group, classes[base:])
        grouped = replace(problem, shape_class=classes)
        timeline = simulate(grouped, steps)
        found = np.array(gap_tenants(grouped, steps, timeline, limit), np.int64) - base
        new = found[~private[found] & hideable[found] & (problem.nbytes[found + base] > light)]
        if not len(new):
            return Sharing(group, tuple(np.flatnonzero(private).tolist()), timeline)
        private[new] = True


def _group(unrolled: Unrolled, private: Flags) -> Ints:
    """Number the groups: a private occurrence starts one, an occurrence that may be made in place of a member joins."""
    problem, base = unrolled.problem, unrolled.base
    group = np.full(len(private), -1, np.int32)
    count = 0
    for i in range(len(private)):  # output slots and occurrences are numbered alike
        step = int(unrolled.step[i])
        if private[i]:
            group[i] = count
            count += 1
            continue
        for slot in problem.inplace_slots[problem.inplace_ptr[i] : problem.inplace_ptr[i + 1]]:
            value = int(problem.in_values[problem.in_ptr[step] + slot])
            same = problem.shape_class[value] == problem.shape_class[base + i] >= 0
            if value >= base and group[value - base] >= 0 and same:
                group[i] = group[value - base]
                break
    return group
