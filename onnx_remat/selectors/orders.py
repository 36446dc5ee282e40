"""List schedules: topological orders that keep little alive, without any recompute."""

from __future__ import annotations

import numpy as np
from numba import njit

from onnx_remat.schedule import Ints, Problem, alias_roots, successors

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
def _run(  # type: ignore[no-untyped-def]
    in_ptr, in_values, out_ptr, out_values, nbytes, is_output, made_by, root, ptr, nodes, rank, few, mode
):
    n = len(ptr) - 1
    waiting = np.zeros(n, np.int32)
    for op in nodes:
        waiting[op] += 1
    reads = np.zeros(len(nbytes), np.int32)  # reads of a buffer still to come
    kept = np.zeros(len(nbytes), np.bool_)
    for v in in_values:
        reads[root[v]] += 1
    for v in range(len(nbytes)):
        if is_output[v] or made_by[root[v]] < 0:
            kept[root[v]] = True
    ready, n_ready = np.empty(n, np.int32), 0
    for op in range(n):
        if waiting[op] == 0:
            ready[n_ready] = op
            n_ready += 1
    order = np.empty(n, np.int32)
    for step in range(n):
        best, best_group, best_key = -1, 9, 0
        for i in range(n_ready):
            op = ready[i]
            net = nbytes[0] * 0
            for k in range(out_ptr[op], out_ptr[op + 1]):
                if root[out_values[k]] == out_values[k]:
                    net += nbytes[out_values[k]]
            for k in range(in_ptr[op], in_ptr[op + 1]):
                r = root[in_values[k]]
                mine, again = 0, False
                for j in range(in_ptr[op], in_ptr[op + 1]):
                    if root[in_values[j]] == r:
                        mine += 1
                        again = again or j < k
                if not again and not kept[r] and reads[r] == mine:
                    net -= nbytes[r]
            group, key = 1, net
            if mode == EAGER_SHRINK:
                group, key = (0, net) if net < 0 else (1, rank[op])
            elif mode == LEAVES_FIRST:
                group, key = (0, net) if few[op] <= _FEW or net < 0 else (1, rank[op])
            better = group < best_group or (group == best_group and key < best_key)
            if better or (group == best_group and key == best_key and rank[op] < rank[ready[best]]):
                best, best_group, best_key = i, group, key
        op = ready[best]
        n_ready -= 1
        ready[best] = ready[n_ready]
        order[step] = op
        for k in range(in_ptr[op], in_ptr[op + 1]):
            reads[root[in_values[k]]] -= 1
        for k in range(ptr[op], ptr[op + 1]):
            waiting[nodes[k]] -= 1
            if waiting[nodes[k]] == 0:
                ready[n_ready] = nodes[k]
                n_ready += 1
    return order


def list_schedules(problem: Problem, baseline: Ints) -> list[Ints]:
    """Distinct greedy orders, ties broken by file position and by position in `baseline`."""
    root = alias_roots(problem)
    ptr, nodes = successors(problem)
    few = _descendants(ptr, nodes)
    file_rank = np.arange(problem.n_ops, dtype=np.int32)
    base_rank = np.empty(problem.n_ops, np.int32)
    base_rank[baseline] = file_rank
    found: list[Ints] = []
    for rank in (file_rank, base_rank):
        for mode in (EAGER_SHRINK, GREEDY, LEAVES_FIRST):
            order = _run(
                problem.in_ptr, problem.in_values, problem.out_ptr, problem.out_values, problem.nbytes,
                problem.is_output, problem.producer(), root, ptr, nodes, rank, few, mode,
            )  # fmt: skip
            if not any(np.array_equal(order, other) for other in found):
                found.append(order)
    return found
