"""List schedules: topological orders that keep little alive, without any recompute."""

from __future__ import annotations

import heapq

import numpy as np
from numba import njit

from onnx_remat.problem import Ints, Problem

EAGER_SHRINK, GREEDY, LEAVES_FIRST = 0, 1, 2
_FEW = 8  # an op with at most this many descendants belongs to a leaf branch, such as a weight's update


@njit(cache=True)
def _descendants(ptr: Ints, nodes: Ints) -> Ints:
    """Number of ops reachable from each op, counted up to a few."""
    n = len(ptr) - 1
    result = np.zeros(n, np.int32)
    found = np.empty(_FEW + 1, np.int32)
    for op in range(n):
        count, todo = 0, -1
        while todo < count and count <= _FEW:
            source = op if todo < 0 else found[todo]
            todo += 1
            for k in range(ptr[source], ptr[source + 1]):
                known = False
                for j in range(count):
                    known = known or found[j] == nodes[k]
                if not known and count <= _FEW:
                    found[count] = nodes[k]
                    count += 1
        result[op] = count
    return result


@njit(cache=True)
def _readers(in_ptr, in_values, root):  # type: ignore[no-untyped-def]
    """Per buffer the ops that read it, each once: offsets, ops; and per op the buffers it reads, in place of values."""
    buffers = np.full(len(in_values), -1, np.int32)
    ptr = np.zeros(len(root) + 1, np.int32)
    last = np.full(len(root), -1, np.int32)
    for op in range(len(in_ptr) - 1):
        for k in range(in_ptr[op], in_ptr[op + 1]):
            r = root[in_values[k]]
            if last[r] != op:
                last[r] = op
                buffers[k] = r
                ptr[r + 1] += 1
    ptr = np.cumsum(ptr).astype(np.int32)
    ops, filled = np.empty(ptr[-1], np.int32), ptr[:-1].copy()
    for op in range(len(in_ptr) - 1):
        for k in range(in_ptr[op], in_ptr[op + 1]):
            if buffers[k] >= 0:
                ops[filled[buffers[k]]] = op
                filled[buffers[k]] += 1
    return ptr, ops, buffers


@njit(cache=True)
def _entry(op, net, rank, few, mode):  # type: ignore[no-untyped-def]
    """What a ready op is sorted by: the group, the key in it, and the rank that breaks ties."""
    first = net < 0 or (mode == LEAVES_FIRST and few <= _FEW)
    if mode == GREEDY:
        return np.int64(1), np.int64(net), np.int64(rank)
    return np.int64(not first), np.int64(net if first else rank), np.int64(rank)


@njit(cache=True)
def _run(  # type: ignore[no-untyped-def]
    in_ptr, in_values, out_ptr, out_values, nbytes, is_output, made_by, root, ptr, nodes, rank, few, mode
):
    n = len(ptr) - 1
    waiting = np.zeros(n, np.int32)
    for op in nodes:
        waiting[op] += 1
    kept = np.zeros(len(nbytes), np.bool_)
    for v in range(len(nbytes)):
        if is_output[v] or made_by[root[v]] < 0:
            kept[root[v]] = True
    reader_ptr, readers, buffers = _readers(in_ptr, in_values, root)
    left = np.diff(reader_ptr)  # readers of a buffer still to come
    net = np.zeros(n, np.int64)  # bytes by which an op would change what is held, if it ran now
    for op in range(n):
        for k in range(out_ptr[op], out_ptr[op + 1]):
            if root[out_values[k]] == out_values[k]:
                net[op] += nbytes[out_values[k]]
        for k in range(in_ptr[op], in_ptr[op + 1]):
            r = buffers[k]
            if r >= 0 and not kept[r] and left[r] == 1:
                net[op] -= nbytes[r]
    op_of = np.empty(n, np.int32)
    for op in range(n):
        op_of[rank[op]] = op
    # An entry is stale once its op has run or its net has changed: it has then been entered anew.
    ready = [_entry(op, net[op], rank[op], few[op], mode) for op in range(n) if waiting[op] == 0]
    heapq.heapify(ready)
    done = np.zeros(n, np.bool_)
    order = np.empty(n, np.int32)
    for step in range(n):
        entry = heapq.heappop(ready)
        op = op_of[entry[2]]
        while done[op] or entry != _entry(op, net[op], rank[op], few[op], mode):
            entry = heapq.heappop(ready)
            op = op_of[entry[2]]
        done[op] = True
        order[step] = op
        for k in range(in_ptr[op], in_ptr[op + 1]):
            r = buffers[k]
            if r < 0:
                continue
            left[r] -= 1
            if left[r] != 1 or kept[r]:
                continue
            for j in range(reader_ptr[r], reader_ptr[r + 1]):
                other = readers[j]
                if not done[other]:
                    net[other] -= nbytes[r]
                    if waiting[other] == 0:
                        heapq.heappush(ready, _entry(other, net[other], rank[other], few[other], mode))
        for k in range(ptr[op], ptr[op + 1]):
            o = nodes[k]
            waiting[o] -= 1
            if waiting[o] == 0:
                heapq.heappush(ready, _entry(o, net[o], rank[o], few[o], mode))
    return order


def list_schedules(problem: Problem, baseline: Ints) -> list[Ints]:
    """Distinct greedy orders, ties broken by file position and by position in `baseline`."""
    life = problem.lifetimes
    few = _descendants(life.next_ptr, life.next_ops)
    file_rank = np.arange(problem.n_ops, dtype=np.int32)
    base_rank = np.empty(problem.n_ops, np.int32)
    base_rank[baseline] = file_rank
    found: list[Ints] = []
    for rank in (file_rank, base_rank):
        for mode in (EAGER_SHRINK, GREEDY, LEAVES_FIRST):
            order = _run(
                life.in_ptr, life.in_values, life.out_ptr, life.out_values, life.nbytes,
                life.kept, life.maker, life.root, life.next_ptr, life.next_ops, rank, few, mode,
            )  # fmt: skip
            if not any(np.array_equal(order, other) for other in found):
                found.append(order)
    return found
