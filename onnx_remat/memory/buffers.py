"""The one simulator of plans: an execution order -> ONNX Runtime's buffer plan -> bytes at every step -> peak.

The memory of a file in a loop, whose values lie in one slab, is `session.prediction`'s.

ONNX Runtime fixes its buffers when a session is made (allocation_planner.cc, ``ComputeSingleStreamReusePlan`` and
``GenerateDeallocationPlan``). Walking the nodes in execution order, each output takes, in this order,

1. the buffer of an input it must alias (Reshape, Squeeze, Identity, ...),
2. the buffer of an input that dies here, if the kernel allows it and shape and element size match,
3. the most recently freed buffer of the same shape and element size,
4. a new buffer.

A buffer is returned to the allocator only after the last reader of its *last* tenant, so rule 3 can keep memory
through gaps in which no tenant is live: peaks exceed those of plain liveness. Graph inputs and outputs take no part in
rules 2 and 3. A value without a reader always gets a new buffer, which later values may reuse but which is otherwise
never returned; the file gives a reader to those that a schedule drops (`Problem.droppable`). A value in a resident's
memory (a view of a weight, or an updated weight that replaces the old one in place) has no buffer. Every rule is
deterministic, hence emulated here::

    step             0    1    2    3    4    5
    op               a    b    c    d    e    f
    reads                 a    b    c    d    e
    buffer 0         [a        ]         [e        ]      e has a's shape: rule 3; the gap at step 2 stays allocated
    buffer 1              [b        ]
    buffer 2                   [c   d         ]           d is computed in place of c, which dies there: rule 2
    buffer 3                                  [f   >      a graph output: never returned
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnx_remat.memory.problem import IN_RESIDENT, Ints, Longs, Problem, Schedule
from onnx_remat.process.compiled import compiled

_RESIDENT = -1  # buffer number of a value in a resident's memory: never allocated, freed or reused
_NEW = -2  # buffer number of a value that needs a new buffer
_NEVER = -1  # last read of a buffer that no op has read so far


@dataclass(frozen=True, slots=True)
class Timeline:
    """Memory of one execution of a schedule.

    Attributes
    ----------
    step_bytes : int64 (n_steps,)
        Bytes allocated while each step runs: residents, buffers and the step's own workspace.
    peak : int
        Largest of `step_bytes` (the residents alone when there is no step).
    peak_step : int
        First step that reaches it.
    start, end : int32 (n_buffers,)
        First and last step at which each buffer is allocated.
    size : int64 (n_buffers,)
        Bytes of each buffer.
    owner : int32 (n_buffers,)
        Value each buffer was first allocated for.
    tenant_of : int32 (n_instances,)
        Buffer of each value instance, in order of production (step by step, slot by slot); negative if it has none.
    """

    step_bytes: Longs
    peak: int
    peak_step: int
    start: Ints
    end: Ints
    size: Longs
    owner: Ints
    tenant_of: Ints


def simulate(problem: Problem, schedule: Schedule | Sequence[int]) -> Timeline:
    """Simulate the memory of a schedule.

    Parameters
    ----------
    problem : Problem
        The graph.
    schedule : Schedule or sequence of int
        A valid execution order (see `check_schedule`).

    Returns
    -------
    Timeline
        Bytes of every step, the peak, and the buffers.
    """
    order = schedule.array() if isinstance(schedule, Schedule) else np.asarray(schedule, np.int32)
    life = problem.lifetimes
    reads, uses, first = _occurrences(order, life)
    start, end, size, owner, tenant_of = _assign_buffers(order, life, reads, uses, first)
    step_bytes = _bytes_over_time(order, life, start, end, size) + problem.base_bytes
    peak_step = int(np.argmax(step_bytes)) if len(step_bytes) else 0
    peak = int(step_bytes[peak_step]) if len(step_bytes) else problem.base_bytes
    return Timeline(step_bytes, peak, peak_step, start, end, size, owner, tenant_of)


@compiled
def _occurrences(order, life):  # type: ignore[no-untyped-def]
    """Number the results (value instances) of all steps in order of production, and find their readers.

    Returns
    -------
    reads : int32 (n_reads,)
        Result that each input slot of each step reads, -1 for residents.
    uses : int32 (n_results,)
        Number of reads of each result.
    first : bool (n_results,)
        Whether it is the first result of its value.
    """
    n_results, n_reads = 0, 0
    for op in order:
        n_results += life.out_ptr[op + 1] - life.out_ptr[op]
        n_reads += life.in_ptr[op + 1] - life.in_ptr[op]
    latest = np.full(len(life.nbytes), -1, np.int32)
    reads = np.empty(n_reads, np.int32)
    uses = np.zeros(n_results, np.int32)
    first = np.zeros(n_results, np.bool_)
    i, r = 0, 0
    for op in order:
        for k in range(life.in_ptr[op], life.in_ptr[op + 1]):
            reads[r] = latest[life.in_values[k]]
            if reads[r] >= 0:
                uses[reads[r]] += 1
            r += 1
        for k in range(life.out_ptr[op], life.out_ptr[op + 1]):
            first[i] = latest[life.out_values[k]] < 0
            latest[life.out_values[k]] = i
            i += 1
    return reads, uses, first


@compiled
def _assign_buffers(order, life, reads, uses, first):  # type: ignore[no-untyped-def]
    """Assign a buffer to every result by the rules in the module's docstring.

    The function is one long loop over the steps: its parts share ten arrays, and every compiled function that takes
    them costs seconds of compiling.

    Returns
    -------
    start, end, size, owner, tenant_of
        As in `Timeline`.
    """
    n_results, n_classes = len(uses), 0
    for c in life.shape_class:
        n_classes = max(n_classes, c + 1)
    freed_head = np.full(n_classes, -1, np.int32)  # per class, a stack of freed buffers: head and links
    freed_next = np.full(n_results, -1, np.int32)
    buffer_of = np.full(n_results, _RESIDENT, np.int32)
    start = np.empty(n_results, np.int32)
    end = np.full(n_results, _NEVER, np.int32)
    size = np.empty(n_results, np.int64)
    owner = np.empty(n_results, np.int32)
    kept = np.zeros(n_results, np.bool_)
    pending = np.zeros(n_results, np.int32)  # outstanding reads of all tenants, plus one while its op runs
    n_buffers = 0
    i, r = 0, 0  # first result and first read of the step
    for t in range(len(order)):
        op = order[t]
        n_in, n_out = life.in_ptr[op + 1] - life.in_ptr[op], life.out_ptr[op + 1] - life.out_ptr[op]
        for j in range(n_out):
            k = life.out_ptr[op] + j
            v = life.out_values[k]
            keep = life.kept[v] and first[i + j]
            dropped = uses[i + j] == 0 and life.droppable[k] > first[i + j]
            shape = life.shape_class[v]
            b = _NEW
            if life.place[k] == IN_RESIDENT:
                b = _RESIDENT
            elif keep:
                pass
            elif life.place[k] >= 0:
                source = reads[r + life.place[k]]
                b = buffer_of[source] if source >= 0 else _RESIDENT
            else:
                for c in range(life.take_ptr[k], life.take_ptr[k + 1]):
                    source = reads[r + life.take[c]]
                    old = buffer_of[source] if source >= 0 else _RESIDENT
                    if old >= 0 and not kept[old] and pending[old] == 1:
                        b = old
                        break
                pool = (uses[i + j] > 0 or dropped) and shape >= 0 and life.poolable[v]
                if b == _NEW and pool and freed_head[shape] >= 0:
                    b = freed_head[shape]
                    freed_head[shape] = freed_next[b]
            if b == _NEW:
                b = n_buffers
                n_buffers += 1
                start[b], size[b], owner[b], kept[b] = t, life.nbytes[v], v, keep
            buffer_of[i + j] = b
            if b >= 0:
                pending[b] += uses[i + j] + 1
                if dropped:
                    end[b] = t
        for j in range(n_in + n_out):  # the inputs, then the outputs, some of which have no reader
            source = reads[r + j] if j < n_in else i + j - n_in
            b = buffer_of[source] if source >= 0 else _RESIDENT
            if b < 0:
                continue
            if j < n_in:
                end[b] = t
            pending[b] -= 1
            shape = life.shape_class[owner[b]]
            if pending[b] == 0 and not kept[b] and shape >= 0 and life.poolable[owner[b]]:
                freed_next[b] = freed_head[shape]
                freed_head[shape] = b
        i, r = i + n_out, r + n_in
    last = len(order) - 1
    for b in range(n_buffers):
        if kept[b]:
            end[b] = last
        elif end[b] == _NEVER:
            end[b] = last if life.hold_unread else start[b]
    return start[:n_buffers], end[:n_buffers], size[:n_buffers], owner[:n_buffers], buffer_of


@compiled
def _bytes_over_time(order, life, start, end, size):  # type: ignore[no-untyped-def]
    """Return the bytes of the buffers and the workspace of each step."""
    step_bytes = np.zeros(len(order) + 1, np.int64)
    for b in range(len(start)):
        step_bytes[start[b]] += size[b]
        step_bytes[end[b] + 1] -= size[b]
    ran = np.zeros(len(life.workspace), np.bool_)
    allocated = np.int64(0)
    for t in range(len(order)):
        op = order[t]
        allocated += step_bytes[t]
        step_bytes[t] = allocated + life.workspace[op] + (life.rerun_workspace[op] if ran[op] else 0)
        ran[op] = True
    return step_bytes[:-1]
