"""The one simulator: an execution order -> ONNX Runtime's buffer plan -> bytes at every step -> peak.

ONNX Runtime fixes its buffers when a session is made (allocation_planner.cc, ``ComputeSingleStreamReusePlan`` and
``GenerateDeallocationPlan``). Walking the nodes in execution order, each output takes, in this order,

1. the buffer of an input it must alias (Reshape, Squeeze, Identity, ...),
2. the buffer of an input that dies here, if the kernel allows it and shape and element size match,
3. the most recently freed buffer of the same shape and element size,
4. a new buffer.

A buffer is returned to the allocator only after the last reader of its *last* tenant, so rule 3 can keep memory
through gaps where nothing in it is alive: peaks are above what plain liveness says. Graph inputs and outputs take no
part in 2 and 3. A value that nobody reads always gets a new buffer, which later values may take over but which is
otherwise never returned. Every rule is deterministic, hence emulated here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

from onnx_remat.problem import Ints, Longs, Problem, Schedule

_RESIDENT = -1  # buffer number of a graph input or initializer: never allocated, freed or taken over
_DROPPED = -2  # an optional output of a recompute that nobody reads


@dataclass(frozen=True, slots=True)
class Timeline:
    """What one execution of a schedule holds.

    Attributes
    ----------
    step_bytes : int64 (n_steps,)
        Bytes held while each step runs: residents, buffers and the step's own workspace.
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
    """Price a schedule in bytes.

    Parameters
    ----------
    problem : Problem
        The graph.
    schedule : Schedule or sequence of int
        A valid execution order (see `check_schedule`).

    Returns
    -------
    Timeline
        Bytes step by step, the peak, and the buffers behind it.
    """
    order = schedule.array() if isinstance(schedule, Schedule) else np.asarray(schedule, np.int32)
    step_bytes, start, end, size, owner, tenant_of = plan_buffers(order, *arrays(problem))
    step_bytes += problem.base_bytes
    peak_step = int(np.argmax(step_bytes)) if len(step_bytes) else 0
    peak = int(step_bytes[peak_step]) if len(step_bytes) else problem.base_bytes
    return Timeline(step_bytes, peak, peak_step, start, end, size, owner, tenant_of)


def arrays(problem: Problem) -> tuple[object, ...]:
    """The arguments of `plan_buffers` after the order, for selectors that call it many times."""
    return (
        problem.in_ptr, problem.in_values, problem.out_ptr, problem.out_values, problem.nbytes,
        problem.is_output, problem.shape_class, problem.poolable, problem.alias_slot, problem.inplace_ptr,
        problem.inplace_slots, problem.droppable, problem.workspace, problem.rerun_workspace,
        problem.hold_unread,
    )  # fmt: skip


@njit(cache=True, nogil=True)
def plan_buffers(  # type: ignore[no-untyped-def]
    order, in_ptr, in_values, out_ptr, out_values, nbytes, is_output, shape_class, poolable, alias_slot,
    inplace_ptr, inplace_slots, droppable, workspace, rerun_workspace, hold_unread,
):  # fmt: skip
    """Emulate the runtime's buffer plan for `order`; see the module's docstring for the rules.

    Returns
    -------
    step_bytes, start, end, size, owner, tenant_of
        As in `Timeline`, without the residents in `step_bytes`.
    """
    n_steps, n_values = len(order), len(nbytes)
    # Pass 1: which instance each input slot reads, and how often each instance is read.
    n_inst = 0
    n_reads = 0
    for t in range(n_steps):
        n_inst += out_ptr[order[t] + 1] - out_ptr[order[t]]
        n_reads += in_ptr[order[t] + 1] - in_ptr[order[t]]
    latest = np.full(n_values, -1, np.int32)
    reads = np.empty(n_reads, np.int32)
    uses = np.zeros(n_inst, np.int32)
    first = np.zeros(n_inst, np.bool_)
    i, r = 0, 0
    for t in range(n_steps):
        op = order[t]
        for k in range(in_ptr[op], in_ptr[op + 1]):
            reads[r] = latest[in_values[k]]
            if reads[r] >= 0:
                uses[reads[r]] += 1
            r += 1
        for k in range(out_ptr[op], out_ptr[op + 1]):
            first[i] = latest[out_values[k]] < 0
            latest[out_values[k]] = i
            i += 1
    # Pass 2: hand out buffers.
    n_classes = 0
    for v in range(n_values):
        n_classes = max(n_classes, shape_class[v] + 1)
    freed_head = np.full(n_classes, -1, np.int32)  # per class, a stack of dead buffers: head and links
    freed_next = np.full(n_inst, -1, np.int32)
    buffer_of = np.full(n_inst, _RESIDENT, np.int32)
    start = np.empty(n_inst, np.int32)
    end = np.full(n_inst, -1, np.int32)  # last read so far, -1: never read
    size = np.empty(n_inst, np.int64)
    owner = np.empty(n_inst, np.int32)
    held = np.zeros(n_inst, np.bool_)
    pending = np.zeros(n_inst, np.int32)  # reads still to come, over all tenants, plus one while it is being made
    n_buf = 0
    i, r = 0, 0
    for t in range(n_steps):
        op = order[t]
        i0 = i
        for k in range(out_ptr[op], out_ptr[op + 1]):
            v = out_values[k]
            is_out = is_output[v] and first[i]
            buf = -3
            if droppable[k] and not first[i] and uses[i] == 0:
                buf = _DROPPED
            elif not is_out:
                if alias_slot[k] >= 0:
                    inst = reads[r + alias_slot[k]]
                    buf = buffer_of[inst] if inst >= 0 else _RESIDENT
                else:
                    for c in range(inplace_ptr[k], inplace_ptr[k + 1]):
                        inst = reads[r + inplace_slots[c]]
                        if inst < 0 or shape_class[v] < 0:
                            continue
                        b = buffer_of[inst]
                        same = shape_class[in_values[in_ptr[op] + inplace_slots[c]]] == shape_class[v]
                        if b >= 0 and not held[b] and pending[b] == 1 and same:
                            buf = b
                            break
                    pool = uses[i] > 0 and shape_class[v] >= 0 and poolable[v]
                    if buf == -3 and pool and freed_head[shape_class[v]] >= 0:
                        buf = freed_head[shape_class[v]]
                        freed_head[shape_class[v]] = freed_next[buf]
            if buf == -3:
                buf = n_buf
                n_buf += 1
                start[buf], size[buf], owner[buf], held[buf] = t, nbytes[v], v, is_out
            buffer_of[i] = buf
            if buf >= 0:
                pending[buf] += uses[i] + 1
            i += 1
        for _k in range(in_ptr[op], in_ptr[op + 1]):
            b = buffer_of[reads[r]] if reads[r] >= 0 else _RESIDENT
            r += 1
            if b >= 0:
                end[b] = t
                pending[b] -= 1
                if pending[b] == 0 and not held[b]:
                    c = shape_class[owner[b]]
                    if c >= 0 and poolable[owner[b]]:
                        freed_next[b] = freed_head[c]
                        freed_head[c] = b
        for j in range(i0, i):
            b = buffer_of[j]
            if b >= 0:
                pending[b] -= 1
                if pending[b] == 0 and not held[b]:
                    c = shape_class[owner[b]]
                    if c >= 0 and poolable[owner[b]]:
                        freed_next[b] = freed_head[c]
                        freed_head[c] = b
    # Pass 3: bytes over time.
    step_bytes = np.zeros(n_steps + 1, np.int64)
    for b in range(n_buf):
        if held[b]:
            end[b] = n_steps - 1
        elif end[b] < 0:
            end[b] = n_steps - 1 if hold_unread else start[b]
        step_bytes[start[b]] += size[b]
        step_bytes[end[b] + 1] -= size[b]
    for t in range(1, n_steps):
        step_bytes[t] += step_bytes[t - 1]
    ran = np.zeros(len(workspace), np.bool_)
    for t in range(n_steps):
        step_bytes[t] += workspace[order[t]]
        if ran[order[t]]:
            step_bytes[t] += rerun_workspace[order[t]]
        ran[order[t]] = True
    return step_bytes[:n_steps], start[:n_buf], end[:n_buf], size[:n_buf], owner[:n_buf], buffer_of
