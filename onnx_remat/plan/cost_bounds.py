"""Lower bounds on the extra compute of every schedule within a budget.

When op v runs for the first time, a result that was made earlier and is read later is either allocated or recomputed
after v. The class of schedules determines these results:

- *any order*: v's ancestors have run, its descendants have not, the position of all other ops is undetermined;
- *fixed order*: the ops before v in the order of first executions have run, all others have not.

In both, any op may run again any number of times, anywhere. Two relaxations, each for a single op v:

- the *knapsack*: drop the bytes above the budget where that costs least per byte (fractions allowed); results of ops
  with undetermined position take no memory;
- the *priced cut*: a recomputed value needs its inputs, kept or recomputed; an op of undetermined position has either
  run (its live outputs are allocated) or not (its inputs are). With a price per byte this is a minimum cut (see
  `flow`), and the best price is the Lagrangian dual.

The cut is solved at the ops with the most bytes that must be allocated or recomputed later.

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

_WORK = 400_000_000  # places visited; beyond it only every k-th op is a candidate, which leaves the bound valid
_CUTS, _CUT_WORK = 48, 200_000  # number of ops to solve the cut at, and the total ops of these networks
_MOST_CUT_OPS = 20_000  # ops of a graph above which the cut is skipped
_PRICES = 16  # minimum cuts per op
_FREE, _LIVE, _FORCED = 0, 1, 2


def cost_lower_bound(
    problem: Problem,
    budget: int,
    first: Sequence[int] | None = None,
    until: Callable[[], bool] = lambda: False,
    per_rerun: int = 0,
    total: float | None = None,
) -> float:
    """Return a lower bound on the overhead of every schedule within `budget`.

    Class: every valid schedule, any order; with `first`, those whose first executions follow that order. Any
    number of recomputes anywhere.

    Parameters
    ----------
    problem : Problem
        The graph.
    budget : int
        Bytes of peak, residents included.
    first : sequence of int or None
        Order of the first executions, if it is fixed.
    until : function
        Returns True to stop early; the bound is valid at any time.
    per_rerun : int
        Bytes that every recomputed op takes throughout the step: a runtime's bookkeeping for its node. Ops that cost
        nothing take none.
    total : float or None
        Cost of the step, of which the overhead is a fraction; None for that of all ops of the problem.

    Returns
    -------
    float
        As `Schedule.overhead` counts it; infinite if no schedule meets the budget.
    """
    total = float(problem.cost.sum()) if total is None else total
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
    """Alias groups (values that share a buffer) and their readers, as arrays for kernels; cheapest per byte first.

    Attributes
    ----------
    size, maker, kept : (n_groups,)
        Lower bound on its bytes, op that makes it, whether it is a graph output.
    share : float64 (n_groups,)
        Cost to recompute it, split by size among an op's results; infinite if it must not be recomputed.
    read_ptr, readers : int32 (n_groups + 1,), (n,)
        Ops that read each group.
    fixed : int64 (n_ops,)
        Bytes an op needs in addition to its inputs.
    position : int64 (n_ops,)
        Places in the order of first executions; empty if the order is free.
    down, up : CSR arrays
        Ops that must follow an op, as they read its results or overwrite its inputs; ops that must precede it.
    """

    size: Longs
    maker: Ints
    kept: Flags
    share: Floats
    read_ptr: Ints
    readers: Ints
    fixed: Longs
    position: Longs
    down: tuple[Ints, Ints]
    up: tuple[Ints, Ints]


@dataclass(frozen=True, slots=True)
class _Space:
    """A problem with its alias groups; `index`, int32 (n_values,), is each value's group, -1 for none."""

    problem: Problem
    groups: _Groups
    index: Ints

    @property
    def places(self) -> int:
        """Number of places visited for one op."""
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
        """Return, at each of `ops`, the knapsack bound in units of cost, and bytes allocated or recomputed later."""
        return _knapsacks(ops, self.groups, room)  # type: ignore[no-any-return]

    def cut(self, op: int, room: int, per_rerun: int) -> float:
        """Return the bound of the priced cut at `op`, in units of cost."""
        before, after, state = _at(op, self.groups)
        excess = float(self.groups.fixed[op] + self.groups.size[state == _FORCED].sum()) - room
        return _dual(self._network(before, after, state, per_rerun), excess)

    def _network(self, before: Flags, after: Flags, state: Ints, per_rerun: int) -> Network:
        """Return the network of values to keep or recompute at an op before which `before` ran, and `after` did not.

        Every op has one vertex for "it has not run yet" and one for "it runs from now on, for the first time or again".
        A vertex whose answer is known is the sink or the source, and both are the same vertex for an op that must not
        run again.
        """
        problem, groups, n_ops, n_groups = self.problem, self.groups, self.problem.n_ops, len(self.groups.size)
        ops, recomputable = np.arange(n_ops), problem.lifetimes.recomputable
        first = np.where(before, 1, np.where(after, 0, 2 + n_groups + n_ops + ops))
        runs = np.where(recomputable & ~after, 2 + n_groups + ops, first)
        unknown, again = ~before & ~after, runs != first
        made = ~after[groups.maker] & (state != _FORCED)
        kept = np.flatnonzero(made & ~groups.kept)
        outputs = np.flatnonzero(made & groups.kept)
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
            np.concatenate(
                [groups.size[kept], groups.size[outputs], np.where(problem.cost[again] > 0, float(per_rerun), 0.0)]
            ),
            reruns,
            problem.cost[again],
        )


def _dual(network: Network, excess: float) -> float:
    """Maximise ``cut(price) + price * excess`` over prices; `excess` is the bytes allocated in any case minus the room.

    The function is concave and piecewise linear; the next price is where a rising and a falling line cross.
    """
    everything, dearest = float(network.sizes.sum()), float(network.costs.sum())
    if not everything:
        return math.inf if excess > 0 else 0.0
    first = (dearest or 1.0) / everything
    least = network.cut(first, 0.0)
    if least.value / first + excess > 0:  # the value is rounded down, the size of this cut may be above the least
        return math.inf
    rising, falling = (0.0, everything + excess), (least.cost, min(0.0, least.size + excess))
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
    """Return, at the first execution of `op`, the ops that have run, those that have not, and each group's state."""
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
        if groups.kept[g]:
            state[g] = _FORCED
        for k in range(groups.read_ptr[g], groups.read_ptr[g + 1]):
            if readers[k] == op:
                state[g] = _FORCED
            elif todo[readers[k]] and state[g] == _FREE:
                state[g] = _LIVE
    return done, todo, state


@compiled
def _knapsacks(ops, groups, room):  # type: ignore[no-untyped-def]
    """Solve the relaxed covering knapsack at each op; return bounds and bytes. Groups come cheapest per byte first."""
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
