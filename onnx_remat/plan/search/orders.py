"""List schedules: topological orders that keep little alive, without any recompute."""

from __future__ import annotations

import numpy as np

from onnx_remat.memory.problem import Ints, Problem
from onnx_remat.plan.search.tuning import FEW_DESCENDANTS
from onnx_remat.process.compiled import compiled, inlined

EAGER_SHRINK, GREEDY, LEAVES_FIRST = 0, 1, 2
_FIRST = 1 << 60  # more bytes than any problem has


@compiled
def _descendants(ptr: Ints, nodes: Ints) -> Ints:
    """Return the number of ops reachable from each op, counted up to FEW_DESCENDANTS + 1."""
    n = len(ptr) - 1
    result = np.zeros(n, np.int32)
    found = np.empty(FEW_DESCENDANTS + 1, np.int32)
    for op in range(n):
        count, todo = 0, -1
        while todo < count and count <= FEW_DESCENDANTS:
            source = op if todo < 0 else found[todo]
            todo += 1
            for k in range(ptr[source], ptr[source + 1]):
                known = False
                for j in range(count):
                    known = known or found[j] == nodes[k]
                if not known and count <= FEW_DESCENDANTS:
                    found[count] = nodes[k]
                    count += 1
        result[op] = count
    return result


@compiled
def _buffers_read(life):  # type: ignore[no-untyped-def]
    """Return, per input slot, the buffer that its op reads there for the first time; -1 for repeats."""
    buffers = np.full(len(life.in_values), -1, np.int32)
    last = np.full(len(life.root), -1, np.int32)
    for op in range(len(life.in_ptr) - 1):
        for k in range(life.in_ptr[op], life.in_ptr[op + 1]):
            r = life.root[life.in_values[k]]
            if last[r] != op:
                last[r] = op
                buffers[k] = r
    return buffers


@inlined
def _key(net, rank, few, mode):  # type: ignore[no-untyped-def]
    """Return the primary sort key of a ready op, before its rank; preferred ops have the lowest keys."""
    if mode == GREEDY:
        return net
    if net < 0 or (mode == LEAVES_FIRST and few <= FEW_DESCENDANTS):
        return net - _FIRST
    return np.int64(rank)


@inlined
def _push(heap, n, key, rank):  # type: ignore[no-untyped-def]
    """Push a key and a rank onto a binary heap of `n`; numba compiles heapq on tuples more slowly."""
    i = n
    while i > 0:
        above = (i - 1) // 2
        if heap[0, above] < key or (heap[0, above] == key and heap[1, above] <= rank):
            break
        heap[0, i], heap[1, i] = heap[0, above], heap[1, above]
        i = above
    heap[0, i], heap[1, i] = key, rank
    return n + 1


@inlined
def _pop(heap, n):  # type: ignore[no-untyped-def]
    """Pop the least of `n` entries off the heap: its key and its rank."""
    found = heap[0, 0], heap[1, 0]
    n -= 1
    key, rank = heap[0, n], heap[1, n]
    i, below = 0, 1
    while below < n:
        for other in range(below, min(below + 2, n)):
            less = heap[0, other] < heap[0, below]
            if less or (heap[0, other] == heap[0, below] and heap[1, other] < heap[1, below]):
                below = other
        if key < heap[0, below] or (key == heap[0, below] and rank <= heap[1, below]):
            break
        heap[0, i], heap[1, i] = heap[0, below], heap[1, below]
        i, below = below, 2 * below + 1
    heap[0, i], heap[1, i] = key, rank
    return found


@compiled
def _run(life, buffers, rank, few, mode):  # type: ignore[no-untyped-def]
    """Return the list schedule of one mode; one long function, as its parts share most of its arrays."""
    in_ptr, nbytes = life.in_ptr, life.nbytes
    n = len(in_ptr) - 1
    waiting = np.zeros(n, np.int32)
    for op in life.next_ops:
        waiting[op] += 1
    kept = np.zeros(len(nbytes), np.bool_)
    for v in range(len(nbytes)):
        if life.kept[v] or life.maker[life.root[v]] < 0:
            kept[life.root[v]] = True
    left = np.empty(len(nbytes), np.int32)  # readers of a buffer that have not run yet
    for r in range(len(nbytes)):
        left[r] = life.reader_ptr[r + 1] - life.reader_ptr[r]
    net = np.zeros(n, np.int64)  # change of the live bytes if the op ran now
    for op in range(n):
        for v in life.out_values[life.out_ptr[op] : life.out_ptr[op + 1]]:
            if life.root[v] == v:
                net[op] += nbytes[v]
        for k in range(in_ptr[op], in_ptr[op + 1]):
            r = buffers[k]
            if r >= 0 and not kept[r] and left[r] == 1:
                net[op] -= nbytes[r]
    op_of = np.empty(n, np.int32)
    for op in range(n):
        op_of[rank[op]] = op
    # An entry is stale once its op has run or its net has changed: a newer entry replaces it.
    heap, n_ready = np.empty((2, n + len(nbytes)), np.int64), 0
    for op in range(n):
        if waiting[op] == 0:
            n_ready = _push(heap, n_ready, _key(net[op], rank[op], few[op], mode), np.int64(rank[op]))
    done = np.zeros(n, np.bool_)
    order = np.empty(n, np.int32)
    for step in range(n):
        key, op = np.int64(0), -1
        while op < 0 or done[op] or key != _key(net[op], rank[op], few[op], mode):
            key, place = _pop(heap, n_ready)
            n_ready -= 1
            op = op_of[place]
        done[op] = True
        order[step] = op
        for k in range(in_ptr[op], in_ptr[op + 1]):
            r = buffers[k]
            if r < 0:
                continue
            left[r] -= 1
            if left[r] != 1 or kept[r]:
                continue
            for other in life.readers[life.reader_ptr[r] : life.reader_ptr[r + 1]]:
                if not done[other]:
                    net[other] -= nbytes[r]
                    if waiting[other] == 0:
                        n_ready = _push(
                            heap, n_ready, _key(net[other], rank[other], few[other], mode), np.int64(rank[other])
                        )
        for o in life.next_ops[life.next_ptr[op] : life.next_ptr[op + 1]]:
            waiting[o] -= 1
            if waiting[o] == 0:
                n_ready = _push(heap, n_ready, _key(net[o], rank[o], few[o], mode), np.int64(rank[o]))
    return order


def list_schedules(problem: Problem, baseline: Ints) -> list[Ints]:
    """Return distinct greedy orders, ties broken by file position and by position in `baseline`."""
    life = problem.lifetimes
    few, buffers = _descendants(life.next_ptr, life.next_ops), _buffers_read(life)
    file_rank = np.arange(problem.n_ops, dtype=np.int32)
    base_rank = np.empty(problem.n_ops, np.int32)
    base_rank[baseline] = file_rank
    found: list[Ints] = []
    for rank in (file_rank, base_rank):
        for mode in (EAGER_SHRINK, GREEDY, LEAVES_FIRST):
            order = _run(life, buffers, rank, few, mode)
            if not any(np.array_equal(order, other) for other in found):
                found.append(order)
    return found
