"""Lightest checkpoints of an arbitrary graph, for every limit on the weight that is recomputed at once.

The memory model is the weight of the checkpoints plus the heaviest closed set without a checkpoint inside (the
*max-term*). For a given max-term the method finds the lightest checkpoints, set by set of the division tree: along
splitting vertices by a shortest path in the *accessibility graph*, whose edges join vertices between which no
checkpoint is needed; branch by branch otherwise. All max-terms that occur are tried.

Limits: the method ignores time: every forward op runs again once, except the checkpoints and the last segment; in a
set with neither splitting vertices nor branches, either none or all of the joints are checkpoints; of more than a few
hundred max-terms only some are tried.

References
----------
Jianwei Feng, Dong Huang: Optimal gradient checkpoint search for arbitrary computation graphs, CVPR 2021.
"""

from __future__ import annotations

from collections.abc import Iterator

import networkx as nx
import numpy as np

from onnx_remat.memory.problem import Ints, Longs, Problem, Schedule
from onnx_remat.plan.request import Deadline, Request, register
from onnx_remat.plan.search.candidates import cheapest_within
from onnx_remat.plan.search.core import LivenessModel, liveness_model
from onnx_remat.plan.selectors.division import Closed, divide
from onnx_remat.plan.selectors.materialize import materialize, split_step

_MOST_TERMS = 300  # max-terms tried
_MOST_SPANS = 2000  # splitting vertices of one set up to which the spans between them are listed
_Checkpoints = tuple[int, tuple[int, ...]]  # total weight, vertices


def forward_tree(view: LivenessModel, base_order: Ints, split: int) -> tuple[Closed, dict[int, int]]:
    """Return the division tree of the forward pass, and the weights of its vertices in bytes.

    Vertices are the ops before step `split`, numbered by step from 1, on paths from the source that reaches the most
    vertices to the sink that the most vertices reach. Side branches, a transposed weight or a running mean say, are
    omitted: they would hide every splitting vertex.
    """
    core = view.core
    part = np.zeros(view.problem.n_ops, np.bool_)
    part[view.ops] = True
    number = {int(base_order[step]): step + 1 for step in range(split) if part[base_order[step]]}
    graph = nx.DiGraph()
    graph.add_nodes_from(number.values())
    weight = {0: 0}
    for op, v in number.items():
        read = core.in_values[core.in_ptr[op] : core.in_ptr[op + 1]]
        graph.add_edges_from((number[int(maker)], v) for maker in core.made_by[read] if int(maker) in number)
        weight[v] = int(core.nbytes[core.out_values[core.out_ptr[op] : core.out_ptr[op + 1]]].sum())
    if not number:
        return Closed(0, ()), weight
    reached: set[int] = max((nx.descendants(graph, v) | {v} for v in graph if not graph.in_degree(v)), key=len)
    graph = nx.DiGraph(graph.subgraph(sorted(reached)))
    leading: set[int] = max((nx.ancestors(graph, v) | {v} for v in graph if not graph.out_degree(v)), key=len)
    members = sorted(leading)
    graph = nx.DiGraph(graph.subgraph(members))
    graph.add_edges_from([(0, members[0]), (members[-1], split + 1)])
    return divide(graph, weight, 0, split + 1, members), weight


def every_set(tree: Closed) -> Iterator[Closed]:
    """Yield a closed set and all sets inside it."""
    todo = [tree]
    while todo:
        closed = todo.pop()
        yield closed
        todo += closed.parts


def max_terms(tree: Closed, weight: dict[int, int]) -> list[int]:
    """Return the max-terms that can occur: weights of closed sets, and of spans between splitting vertices."""
    terms = {closed.weight for closed in every_set(tree)}
    for closed in every_set(tree):
        ends = spans_of(closed, weight)
        if 1 < len(ends) <= _MOST_SPANS:
            terms.update(np.unique(ends[None, :, 0] - ends[:, None, 1]).tolist())
    found = sorted(term for term in terms if term >= 0)
    if len(found) > _MOST_TERMS:
        found = [found[i] for i in np.unique(np.linspace(0, len(found) - 1, _MOST_TERMS).astype(int)).tolist()]
    return found


def spans_of(closed: Closed, weight: dict[int, int]) -> Longs:
    """Return the weight before and through each vertex of the line, entry and exit included. Shape (n + 2, 2)."""
    total, ends = 0, [(0, 0)]
    for v, part in zip(closed.line, closed.parts, strict=False):
        total += part.weight
        ends.append((total, total + weight[v]))
        total += weight[v]
    return np.array([*ends, (closed.weight, closed.weight)], np.int64)


def lightest(closed: Closed, weight: dict[int, int], term: int, spans: dict[int, Longs]) -> _Checkpoints:
    """Return the lightest checkpoints within a closed set such that every part between them weighs at most `term`.

    If no choice achieves this (a single result may weigh more), every candidate of the division is a checkpoint.
    """
    found: dict[int, _Checkpoints] = {}
    for inner in reversed(list(every_set(closed))):  # parts before what they are parts of
        parts = [found[id(part)] for part in inner.parts]
        found[id(inner)] = (0, ()) if inner.weight <= term else _joined(inner, parts, weight, term, spans)
    return found[id(closed)]


def _joined(
    closed: Closed, parts: list[_Checkpoints], weight: dict[int, int], term: int, spans: dict[int, Longs]
) -> _Checkpoints:
    """Return the lightest checkpoints of a set that is too heavy, from those of its parts."""
    if not closed.line:
        kept = (*closed.joints, *(v for _, inside in parts for v in inside))
        return sum(weight[v] for v in closed.joints) + sum(price for price, _ in parts), kept
    ends = spans[id(closed)]
    n = len(ends)
    price = np.zeros(n, np.int64)
    back = np.zeros(n, np.int64)
    for i in range(1, n):
        low = int(np.searchsorted(ends[:, 1], ends[i, 0] - term))  # first point from which a span to i is light enough
        own = weight[closed.line[i - 1]] if i < n - 1 else 0
        price[i], back[i] = price[i - 1] + parts[i - 1][0], -1
        if low < i:
            j = low + int(np.argmin(price[low:i]))
            if price[j] <= price[i]:
                price[i], back[i] = price[j], j
        price[i] += own
    kept_here: list[int] = []
    i = n - 1
    while i > 0:
        if back[i] < 0:
            kept_here += parts[i - 1][1]
            i -= 1
        else:
            i = int(back[i])
        if i:
            kept_here.append(closed.line[i - 1])
    return int(price[-1]), tuple(kept_here)


def _plan(view: LivenessModel, base_order: Ints, split: int, tree: Closed, kept: set[int]) -> Schedule:
    """Recompute every op that is not kept, except those after the last kept splitting vertex of the whole graph."""
    problem = view.problem
    last = max((v for v in tree.line if v in kept), default=0)
    tail = last if not any(v > last for v in kept) else split + 1
    dropped = np.zeros(problem.n_ops, np.bool_)
    dropped[base_order[: tail - 1]] = True
    dropped[base_order[[v - 1 for v in kept]]] = False
    return materialize(problem, base_order, dropped, split)


def optimal_plans(problem: Problem, base_order: Ints, deadline: Deadline) -> list[Schedule]:
    """Return one plan for each distinct set of checkpoints over all max-terms that there is time for."""
    split = split_step(problem, base_order)
    view = liveness_model(problem)
    tree, weight = forward_tree(view, base_order, split)
    spans = {id(closed): spans_of(closed, weight) for closed in every_set(tree)}
    plans: dict[tuple[int, ...], Schedule] = {}
    for term in max_terms(tree, weight):
        if deadline.passed():
            break
        kept = tuple(sorted(lightest(tree, weight, term, spans)[1]))
        if kept and kept not in plans:
            plans[kept] = _plan(view, base_order, split, tree, set(kept))
    return list(plans.values())


@register("optimal_dag")
def optimal_dag(request: Request) -> Schedule:
    """Feng & Huang 2021: checkpoints of any graph by its division tree, least memory for each max-term."""
    plans = optimal_plans(request.problem, request.baseline.array(), request.deadline)
    return cheapest_within(request, [request.baseline, *plans])
