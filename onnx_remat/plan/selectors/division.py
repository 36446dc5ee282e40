"""The division tree of a graph: nested closed sets, divided by splitting vertices, into branches, or otherwise.

A *closed set* lies between two vertices, its entry and its exit, and no edge joins its members to any other vertex.

References
----------
Jianwei Feng, Dong Huang: Optimal gradient checkpoint search for arbitrary computation graphs, CVPR 2021,
section 4.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import networkx as nx


@dataclass(frozen=True, slots=True)
class Closed:
    """A closed set and its division.

    Attributes
    ----------
    weight : int
        Sum over all members.
    members : tuple of int
        Ascending, which is a topological order.
    line : tuple of int
        Splitting vertices, through which every path goes, in order; `parts` are then the sets before, between
        and after them. Empty for the other two kinds of division.
    joints : tuple of int
        Members in none of the `parts`, if the set has neither splitting vertices nor branches.
    parts : tuple of Closed
        With a `line`, the sets that it separates; otherwise branches, or maximal closed sets between `joints`.
    """

    weight: int
    members: tuple[int, ...]
    line: tuple[int, ...] = ()
    joints: tuple[int, ...] = ()
    parts: tuple[Closed, ...] = ()


@dataclass(frozen=True, slots=True)
class _Division:
    """A closed set's division before its parts are divided; `parts` are their places in a list of divisions."""

    members: tuple[int, ...]
    line: tuple[int, ...]
    joints: tuple[int, ...]
    parts: range


def divide(graph: nx.DiGraph, weight: dict[int, int], entry: int, exit_: int, inside: Iterable[int]) -> Closed:
    """Return the division tree of the closed set `inside`, between `entry` and `exit_`.

    Vertices are numbered in topological order; every member is on a path from `entry` to `exit_`. The tree may be as
    deep as the graph.
    """
    todo: list[_Region] = [(entry, exit_, sorted(inside))]
    divisions: list[_Division] = []
    for region in todo:  # which grows
        line, joints, parts = _divided(graph, *region)
        divisions.append(_Division(tuple(region[2]), line, joints, range(len(todo), len(todo) + len(parts))))
        todo += parts
    made: dict[int, Closed] = {}
    for place, of in reversed(list(enumerate(divisions))):
        total = sum(weight[v] for v in of.members)
        made[place] = Closed(total, of.members, of.line, of.joints, tuple(made.pop(part) for part in of.parts))
    return made[0]


_Region = tuple[int, int, list[int]]  # entry, exit, members


def _divided(
    graph: nx.DiGraph, entry: int, exit_: int, inside: list[int]
) -> tuple[tuple[int, ...], tuple[int, ...], list[_Region]]:
    """Return a closed set's line, joints and parts, see `Closed`."""
    members = tuple(inside)
    if not members:
        return (), (), []
    if line := _splitting(graph, entry, exit_, members):
        bounds = [entry, *line, exit_]
        parts: list[list[int]] = [[]]
        for v in members:
            if len(parts) <= len(line) and v == line[len(parts) - 1]:
                parts.append([])
            else:
                parts[-1].append(v)
        return tuple(line), (), [(bounds[i], bounds[i + 1], part) for i, part in enumerate(parts)]
    branches = sorted(sorted(part) for part in nx.weakly_connected_components(graph.subgraph(members)))
    if len(branches) > 1:
        return (), (), [(entry, exit_, part) for part in branches]
    regions = _maximal_regions(graph, entry, exit_, members)
    covered = {v for _, _, part in regions for v in part}
    return (), tuple(v for v in members if v not in covered), regions


def _splitting(graph: nx.DiGraph, entry: int, exit_: int, members: tuple[int, ...]) -> list[int]:
    """Return the members that no edge bypasses, so that every path goes through them."""
    found = []
    known = set(members)
    farthest = max((v for v in graph.successors(entry) if v in known), default=entry)
    for v in members:
        if farthest <= v:
            found.append(v)
        farthest = max(farthest, *graph.successors(v))
    return found


def _maximal_regions(graph: nx.DiGraph, entry: int, exit_: int, members: tuple[int, ...]) -> list[_Region]:
    """Return disjoint proper closed subsets of `members`, each maximal: none can grow without becoming the whole."""
    inner = nx.DiGraph(graph.subgraph([entry, *members, exit_]))
    inner.remove_edges_from([(entry, exit_)])
    above = nx.immediate_dominators(inner, entry)
    below = nx.immediate_dominators(inner.reverse(copy=False), exit_)
    covered: set[int] = set()
    regions: list[_Region] = []

    def common(tree: dict[int, int], vertices: set[int], sign: int) -> int:
        """Return the nearest common dominator: the farthest vertex (`sign` 1: the latest) climbs until all meet."""
        now = set(vertices)
        while len(now) > 1:
            far = max(now, key=lambda v: sign * v)
            now.remove(far)
            now.add(tree[far])
        return now.pop()

    def closure(start: Iterable[int]) -> _Region | None:
        """Return the smallest closed set around `start`; None if it is the whole or overlaps another region."""
        region, todo = set(start), list(start)
        while True:
            while todo:
                v = todo.pop()
                if v in (entry, exit_) or v in covered:
                    return None
            before = {p for v in region for p in inner.predecessors(v)} - region
            after = {s for v in region for s in inner.successors(v)} - region
            top, end = common(above, before, 1), common(below, after, -1)
            if (top, end) == (entry, exit_):
                return None  # without branches, this closed set is the whole
            todo = sorted((before - {top}) | (after - {end}))
            if not todo:
                return top, end, sorted(region)
            region.update(todo)

    for v in members:
        if v in covered:
            continue
        best = closure([v])
        while best:
            larger = next((r for x in (best[1], best[0]) if (r := closure([*best[2], x]))), None)
            if larger is None:
                break
            best = larger
        if best:
            regions.append(best)
            covered.update(best[2])
    return regions
