"""Emulation of the order in which ONNX Runtime executes a file.

The default order is a depth-first search backwards from the leaves (nodes whose outputs no node reads): leaves are
taken from the highest node index down, and at each node the producers of its inputs from the highest index down; a
node runs when all its producers have run. (onnxruntime/core/graph: ``GraphViewer`` and ``Graph::ReverseDFSFrom``.)
The index of a node is its position in the file, unless an optimisation replaced the node.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from onnx_remat.memory.problem import Ints
from onnx_remat.process.compiled import compiled


def default_order(producers: Sequence[Sequence[int]]) -> list[int]:
    """Return the execution order of a graph under ``ExecutionOrder.DEFAULT``.

    Parameters
    ----------
    producers : for each node, in file order, the nodes whose outputs it reads (repeats allowed)

    Returns
    -------
    list of int
        Node positions in the order they run.

    Examples
    --------
    Node 3 is the highest leaf, so its chain runs first; of its two inputs the later one in the file leads.

    >>> default_order([[], [], [0], [1, 0]])
    [1, 0, 3, 2]
    """
    ptr = np.zeros(len(producers) + 1, np.int32)
    ptr[1:] = np.cumsum([len(p) for p in producers])
    flat = np.fromiter((p for some in producers for p in sorted(some)), np.int32, int(ptr[-1]))
    return [int(n) for n in _reverse_dfs(ptr, flat)]


def sizes_first(order: Sequence[int], producers: Sequence[Sequence[int]], sizes: Sequence[bool]) -> list[int]:
    """Return the default order as the training build changes it: each Shape and Size (`sizes`) follows its producer.

    >>> sizes_first([0, 1, 2], [[], [0], [0]], [False, False, True])
    [0, 2, 1]
    """
    following: dict[int, list[int]] = {}
    for node, of in enumerate(producers):
        if sizes[node]:
            for producer in of:
                following.setdefault(producer, []).append(node)
    return list(dict.fromkeys(n for node in order for n in (node, *following.get(node, ()))))


def priority_order(producers: Sequence[Sequence[int]], sizes: Sequence[bool]) -> list[int]:
    """Return the order under ``ExecutionOrder.PRIORITY_BASED``: the file's, except for Shape and Size.

    Of the nodes whose producers have run, a Shape or Size (`sizes`) runs next, otherwise the lowest node index.
    (onnxruntime/core/graph: ``Graph::KahnsTopologicalSort`` with ``PriorityNodeCompare``.)

    >>> priority_order([[], [0], [0], [2]], [False, False, True, False])
    [0, 2, 1, 3]
    """
    readers: list[list[int]] = [[] for _ in producers]
    for node, of in enumerate(producers):
        for producer in dict.fromkeys(of):
            readers[producer].append(node)
    return topological(readers, [not size for size in sizes])


def topological(later: Sequence[Sequence[int]], rank: Sequence[int]) -> list[int]:
    """Return an order in which each node precedes those in `later`; of those ready, the lowest rank runs, then index.

    Nodes on a cycle, and all after them, are left out. (Kahn's algorithm with a heap.)

    >>> topological([[2], [2], []], [1, 0, 0])
    [1, 0, 2]
    """
    waiting = [0] * len(later)
    for nodes in later:
        for node in nodes:
            waiting[node] += 1
    ready = [(rank[node], node) for node, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for other in later[node]:
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, (rank[other], other))
    return order


@compiled
def _reverse_dfs(ptr: Ints, producers: Ints) -> Ints:
    n = len(ptr) - 1
    is_leaf = np.ones(n, np.bool_)
    for producer in producers:
        is_leaf[producer] = False
    order = np.empty(n, np.int32)
    done = 0
    visited = np.zeros(n, np.bool_)
    stack = np.empty(n + len(producers) + n + 1, np.int64)  # node, or ~node when its producers are done
    top = 0
    for node in range(n):
        if is_leaf[node]:
            stack[top] = node
            top += 1
    while top:
        top -= 1
        entry = stack[top]
        if entry < 0:
            order[done] = ~entry
            done += 1
            continue
        if visited[entry]:
            continue
        visited[entry] = True
        stack[top] = ~entry
        top += 1
        for k in range(ptr[entry], ptr[entry + 1]):
            if not visited[producers[k]]:
                stack[top] = producers[k]
                top += 1
    return order
