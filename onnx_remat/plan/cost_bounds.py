"""Lower bounds on extra compute: what no schedule within a budget can stay below.

When op v runs for the first time, a result that exists by then and is read later is either allocated or made
again after v. Which results those are depends on the class of schedules:

- *any order*: v's ancestors have run, its descendants have not, the rest is open;
- *fixed order*: what stands before v in the order of first executions has run, the rest has not.

In both, any op may run again any number of times, anywhere. Two relaxations are taken at one op each:

- the *knapsack*: drop what exceeds the budget where it costs least per byte (fractions allowed); of what is open
  nothing is held;
- the *priced cut*: what is made again needs its inputs, allocated or made again themselves, and what is open has
  either run, so that what it made is held where it is still read, or has not, so that what it reads is. With a price
  per byte this is a minimum cut (see `flow`), and the best price is the Lagrangian dual.

The cut is taken at the ops where most bytes surely are allocated or made again.

References
----------
Jain et al.: Checkmate, MLSys 2020, whose linear relaxation the knapsack matches or beats where both were run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from onnx_remat.memory.problem import Flags, Floats, Ints, Longs, Problem
from onnx_remat.plan.bounds import lower_bound, writes
from onnx_remat.plan.flow import Network, arcs
from onnx_remat.process.compiled import compiled

_WORK = 400_000_000  # places looked at; beyond it only every k-th op is a candidate, which leaves the bound valid
_CUTS, _CUT_WORK = 48, 200_000  # ops the cut is taken at, and the size of all these graphs together
_MOST_CUT_OPS = 20_000  # size of graph from which on it is left out
_PRICES = 16  # minimum cuts per op
_FREE, _LIVE, _FORCED = 0, 1, 2


def cost_lower_bound(
    problem: Problem,
    budget: int,
    first: Sequence[int] | None = None,
    until: Callable[[], bool] = lambda: False,
    per_rerun: int = 0,
) -> float:
    """Overhead below which no schedule within `budget` stays.

    Class: every valid schedule, any order; with `first`, those whose first executions follow that order. Any
    number of recomputes anywhere.

    Parameters
    ----------
    problem : Problem
        The graph.
    budget : int
        Bytes of peak, residents included.
    first : sequence of int or None
        Order of the first executions, where that is fixed.
    until : function
        Whether to leave it at what is found; the bound is valid at any time.
    per_rerun : int
        Bytes that every op that runs again takes throughout: what a runtime keeps for its node.

    Returns
    -------
    float
        As `Schedule.overhead` counts it; infinite where no schedule keeps the budget.
    """
    total = float(problem.cost.sum())
    if budget < lower_bound(problem):
        return math.inf
    if not total:
        return 0.0
    space = _Space.of(problem, first)
    room = budget - problem.base_bytes
    step = max(1, problem.n_ops * space.places // _WORK)
    ops = np.arange(0, problem.n_ops, step)
    found, bytes_ = space.knapsacks(ops, room)
    best = float(found.max(initial=0.0))
    if problem.n_ops > _MOST_CUT_OPS:
        return best / total
    for op in ops[np.argsort(-bytes_, kind="stable")[: min(_CUTS, _CUT_WORK // problem.n_ops)]].tolist():
        if math.isinf(best) or until():
            break
        best = max(best, space.cut(op, room, per_rerun))
    return best / total


class _Groups(NamedTuple):
    """What occupies memory, by alias group, and who reads it, as kernels take it; cheapest per byte first.

    Attributes
    ----------
    size, maker, held : (n_groups,)
        Bytes it surely takes, op that makes it, whether it is a graph output.
    share : float64 (n_groups,)
        Cost to make it again, of an op's several results each its part by size; infinite where impossible.
    read_ptr, readers : int32 (n_groups + 1,), (n,)
        Ops that read each group.
    fixed : int64 (n_ops,)
        Bytes an op needs beside what it reads.
    position : int64 (n_ops,)
        Places in the order of first executions; empty where the order is free.
    down, up : CSR arrays
        Ops that come after an op, as they read its results or renew what it reads; ops that come before it.
    """

    size: Longs
    maker: Ints
    held: Flags
    share: Floats
    read_ptr: Ints
    readers: Ints
    fixed: Longs
    position: Longs
    down: tuple[Ints, Ints]
    up: tuple[Ints, Ints]


@dataclass(frozen=True, slots=True)
class _Space:
    """A problem with its groups; `index`, int32 (n_values,), is each value's group, -1 for none."""

    problem: Problem
    groups: _Groups
    index: Ints

    @property
    def places(self) -> int:
        """Places looked at for one op."""
        return self.problem.n_ops + 2 * len(self.groups.down[1]) + len(self.groups.readers) + len(self.groups.size)

    @classmethod
    def of(cls, problem: Problem, first: Sequence[int] | None) -> _Space:
        life = problem.lifetimes
        group = np.flatnonzero((life.root == np.arange(problem.n_values)) & (life.maker >= 0) & (life.least > 0))
        size, maker = life.least[group], life.maker[group]
        weight = np.bincount(maker, size, problem.n_ops)
        share = np.where(life.recomputable[maker], problem.cost[maker] * size / weight[maker], np.inf)
        rank = np.argsort(share / size, kind="stable")
        group, size, maker, share = group[rank], size[rank], maker[rank], share[rank]
        index = np.full(problem.n_values, -1, np.int32)
        index[group] = np.arange(len(group))
        readers = [life.readers[life.reader_ptr[g] : life.reader_ptr[g + 1]] for g in group.tolist()]
        read_ptr = np.concatenate([[0], np.cumsum(np.diff(life.reader_ptr)[group])]).astype(np.int32)
        position = np.zeros(0, np.int64)
        if first is not None:
            position = np.empty(problem.n_ops, np.int64)
            position[np.asarray(first, np.int64)] = np.arange(problem.n_ops)
        down = life.next_ptr, life.next_ops
        sources = np.repeat(np.arange(problem.n_ops, dtype=np.int32), np.diff(down[0]))
        up_ptr = np.searchsorted(np.sort(down[1]), np.arange(problem.n_ops + 1)).astype(np.int32)
        up = up_ptr, sources[np.argsort(down[1], kind="stable")]
        fixed = np.array([writes(problem, op) for op in range(problem.n_ops)], np.int64) + problem.workspace
        groups = _Groups(
            size, maker, life.kept[group], share, read_ptr,
            np.concatenate([*readers, np.zeros(0, np.int32)]).astype(np.int32), fixed, position, down, up,
        )  # fmt: skip
        return cls(problem, groups, index[life.root])

    def knapsacks(self, ops: Longs, room: int) -> tuple[Floats, Longs]:
        """The knapsack bound at each of `ops`, in units of cost; bytes surely allocated then or made again later."""
        return _knapsacks(ops, self.groups, room)  # type: ignore[no-any-return]

    def cut(self, op: int, room: int, per_rerun: int) -> float:
        """The priced cut at `op`, in units of cost."""
        before, after, state = _at(op, self.groups)
        excess = float(self.groups.fixed[op] + self.groups.size[state == _FORCED].sum()) - room
        return _dual(self._network(before, after, state, per_rerun), excess)

    def _network(self, before: Flags, after: Flags, state: Ints, per_rerun: int) -> Network:
        """What may be held or made again at an op; by then the ops in `before` have run, those in `after` have not.

        Of every op there is a vertex for "it has not run yet" and one for "it runs from now on, then or again", the
        sink or the source where that is known, and the same one for both where it may not run again.
        """
        problem, groups, n_ops, n_groups = self.problem, self.groups, self.problem.n_ops, len(self.groups.size)
        ops, recomputable = np.arange(n_ops), problem.lifetimes.recomputable
        first = np.where(before, 1, np.where(after, 0, 2 + n_groups + n_ops + ops))
        runs = np.where(recomputable & ~after, 2 + n_groups + ops, first)
        unknown, again = ~before & ~after, runs != first
        made = ~after[groups.maker] & (state != _FORCED)
        kept = np.flatnonzero(made & ~groups.held)
        outputs = np.flatnonzero(made & groups.held)
        reader = np.repeat(ops, np.diff(problem.in_ptr))
        read = self.index[problem.in_values]
        wanted = np.zeros(n_groups + 1, np.bool_)  # the last: residents
        wanted[kept] = True
        reads = wanted[read] & (runs[reader] != 1)
        earlier = np.repeat(ops, np.diff(groups.down[0]))
        both = unknown[earlier] & unknown[groups.down[1]]
        certain = (
            arcs(runs[reader[reads]], 2 + read[reads]),
            arcs(first[earlier[both]], first[groups.down[1][both]]),
            arcs(first[unknown & again], runs[unknown & again]),
        )
        reruns = arcs(runs[again], first[again])
        return Network(
            np.concatenate(certain),
            np.concatenate([arcs(2 + kept, runs[groups.maker[kept]]), arcs(0, first[groups.maker[outputs]]), reruns]),
            np.concatenate([groups.size[kept], groups.size[outputs], np.full(len(reruns), float(per_rerun))]),
            reruns,
            problem.cost[again],
        )


def _dual(network: Network, excess: float) -> float:
    """Largest over the prices of ``cut(price) + price * excess``, `excess` being what is allocated in any case.

    That is a concave function made of lines; the crossing of a rising and a falling one is the next price.
    """
    everything, dearest = float(network.sizes.sum()), float(network.costs.sum())
    if not everything:
        return math.inf if excess > 0 else 0.0
    least = network.cut((dearest or 1.0) / everything, 0.0)
    rising, falling = (0.0, everything + excess), (least.cost, least.size + excess)
    if falling[1] > 0:
        return math.inf
    best = 0.0
    for _ in range(_PRICES):
        if rising[1] <= 0 or rising[1] - falling[1] <= 0:
            break
        price = (falling[0] - rising[0]) / (rising[1] - falling[1])
        cut = network.cut(price)
        best = max(best, cut.value + price * excess)
        line = (cut.cost, cut.size + excess)
        if line in (rising, falling):
            break
        if line[1] > 0:
            rising = line
        else:
            falling = line
    return best


@compiled
def _at(op, groups):  # type: ignore[no-untyped-def]
    """At the first execution of `op`: ops surely run before, ops surely not, and the state of every group."""
    position, maker, readers = groups.position, groups.maker, groups.readers
    n = len(groups.fixed)
    done, todo = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
    if len(position):
        for other in range(n):
            done[other] = position[other] < position[op]
            todo[other] = not done[other]
    else:
        stack = np.empty(n, np.int32)
        for way in range(2):
            ptr, nodes = groups.up if way == 0 else groups.down
            flag = done if way == 0 else todo
            stack[0], top = op, 1
            flag[op] = True
            while top > 0:
                top -= 1
                other = stack[top]
                for k in range(ptr[other], ptr[other + 1]):
                    if not flag[nodes[k]]:
                        flag[nodes[k]] = True
                        stack[top] = nodes[k]
                        top += 1
        done[op] = False
    state = np.zeros(len(maker), np.int8)
    for g in range(len(maker)):
        if not done[maker[g]]:
            continue
        if groups.held[g]:
            state[g] = _FORCED
        for k in range(groups.read_ptr[g], groups.read_ptr[g + 1]):
            if readers[k] == op:
                state[g] = _FORCED
            elif todo[readers[k]] and state[g] == _FREE:
                state[g] = _LIVE
    return done, todo, state


@compiled
def _knapsacks(ops, groups, room):  # type: ignore[no-untyped-def]
    """Relaxed covering knapsack at each op, and its bytes; groups come cheapest per byte first."""
    size, share = groups.size, groups.share
    result, most = np.zeros(len(ops), np.float64), np.zeros(len(ops), np.int64)
    for i in range(len(ops)):
        _, _, state = _at(ops[i], groups)
        excess = groups.fixed[ops[i]] - room
        for g in range(len(size)):
            if state[g] != _FREE:
                excess += size[g]
        most[i] = excess + room
        for g in range(len(size)):
            if excess <= 0:
                break
            if state[g] == _LIVE:
                if share[g] == np.inf:
                    break
                result[i] += share[g] * min(1.0, excess / size[g])
                excess -= size[g]
    return result, most
