"""Checkpoints of an arbitrary graph by the least sum of what is kept, for every limit on what is run again at
once.

Memory is taken to be what checkpoints weigh, plus the heaviest closed set without any inside (the *max-term*).
For a given max-term the lightest checkpoints are found set by set of the division tree: along splitting
vertices as a shortest path in the *accessibility graph*, whose edges join vertices between which nothing need
be kept; branch by branch otherwise. All max-terms that occur are tried.

Limits: time is not part of the method, every forward op but the kept ones and the last segment runs again,
once; where a set has neither splitting vertices nor branches, either none or all of its joints are kept; of
more than a few hundred max-terms only some are tried.

References
----------
Jianwei Feng, Dong Huang: Optimal gradient checkpoint search for arbitrary computation graphs, CVPR 2021.
"""

from __future__ import annotations

from collections.abc import Iterator

import networkx as nx
import numpy as np

from onnx_remat.memory.problem import Ints, Longs, Problem, Schedule
from onnx_remat.plan.request import Request, register
from onnx_remat.plan.search.core import Viewless, viewless
from onnx_remat.plan.search.plans import cheapest_within
from onnx_remat.plan.selectors.division import Closed, divide
from onnx_remat.plan.selectors.materialize import materialize, split_step

_MOST_TERMS = 300  # max-terms tried
_MOST_SPANS = 2000  # splitting vertices of one set between which spans are listed
_Answer = tuple[int, tuple[int, ...]]  # weight of the checkpoints, and which they are


def forward_tree(view: Viewless, base_order: Ints, split: int) -> tuple[Closed, dict[int, int]]:
    """Division tree of the forward pass, and the weights of its vertices in bytes.

    Vertices are the ops before step `split`, numbered by step from 1, that lie on the way from the source that
    reaches most to the sink that most lead to: what hangs off it, a transposed weight or a running mean say,
    would hide every splitting vertex.
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
    """A closed set and all sets within."""
    todo = [tree]
    while todo:
        closed = todo.pop()
        yield closed
        todo += closed.parts


def max_terms(tree: Closed, weight: dict[int, int]) -> list[int]:
    """Weights of closed sets, and of spans between splitting vertices: the max-terms that can occur."""
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
    """Weight before and up to each point of the line, entry and exit included. Shape (n + 2, 2)."""
    total, ends = 0, [(0, 0)]
    for v, part in zip(closed.line, closed.parts, strict=False):
        total += part.weight
        ends.append((total, total + weight[v]))
        total += weight[v]
    return np.array([*ends, (closed.weight, closed.weight)], np.int64)


def lightest(closed: Closed, weight: dict[int, int], term: int, spans: dict[int, Longs]) -> _Answer:
    """The lightest checkpoints within a closed set, such that what lies between them weighs at most `term`.

    Where no choice achieves that (a single result may weigh more), all that the division offers is kept.
    """
    if closed.weight <= term:
        return 0, ()
    parts = [lightest(part, weight, term, spans) for part in closed.parts]
    if not closed.line:
        kept = (*closed.joints, *(v for _, inside in parts for v in inside))
        return sum(weight[v] for v in closed.joints) + sum(price for price, _ in parts), kept
    ends = spans[id(closed)]
    n = len(ends)
    price = np.zeros(n, np.int64)
    back = np.zeros(n, np.int64)
    for i in range(1, n):
        low = int(np.searchsorted(ends[:, 1], ends[i, 0] - term))  # from here on a span to i is light enough
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


def _plan(view: Viewless, base_order: Ints, split: int, tree: Closed, kept: set[int]) -> Schedule:
    """Run again what is not kept, but for what follows the last kept splitting vertex of the whole."""
    problem = view.problem
    last = max((v for v in tree.line if v in kept), default=0)
    tail = last if not any(v > last for v in kept) else split + 1
    dropped = np.zeros(problem.n_ops, np.bool_)
    dropped[base_order[: tail - 1]] = True
    dropped[base_order[[v - 1 for v in kept]]] = False
    return materialize(problem, base_order, dropped, split)


def optimal_plans(problem: Problem, base_order: Ints) -> list[Schedule]:
    """One plan for each different set of checkpoints that some max-term leads to."""
    split = split_step(problem, base_order)
    view = viewless(problem)
    tree, weight = forward_tree(view, base_order, split)
    spans = {id(closed): spans_of(closed, weight) for closed in every_set(tree)}
    plans: dict[tuple[int, ...], Schedule] = {}
    for term in max_terms(tree, weight):
        kept = tuple(sorted(lightest(tree, weight, term, spans)[1]))
        if kept and kept not in plans:
            plans[kept] = _plan(view, base_order, split, tree, set(kept))
    return list(plans.values())


@register("optimal_dag")
def optimal_dag(request: Request) -> Schedule:
    """Feng & Huang 2021: checkpoints of any graph by its division tree, least memory for each max-term."""
    plans = optimal_plans(request.problem, request.baseline.array())
    return cheapest_within(request, [request.baseline, *plans])
