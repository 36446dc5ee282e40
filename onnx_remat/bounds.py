"""Lower bounds: what no schedule can beat, each with the class of schedules it holds for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numba import njit

from onnx_remat.schedule import Floats, Ints, Longs, Problem


def lower_bound(problem: Problem) -> int:
    """Bytes below which no schedule of the problem peaks: the working-set floor.

    Class: every valid schedule, any order, any number of recomputes, under the simulator's buffer rules. When
    an op runs for the first time, the buffers it reads and those it writes are all allocated; only an alias
    lets two live values share one, and only an in-place output joins an input. In the end all graph outputs
    are held.

    Parameters
    ----------
    problem : Problem
        The graph.

    Returns
    -------
    int
        Bytes, residents included.
    """
    floor = int(problem.nbytes[problem.is_output & ~problem.resident].sum())
    root = _alias_groups(problem)
    for op in range(problem.n_ops):
        floor = max(floor, _reads(problem, op, root) + _writes(problem, op) + int(problem.workspace[op]))
    return problem.base_bytes + floor


def cost_lower_bound(problem: Problem, budget: int, base_order: Sequence[int] | None = None) -> float:
    """Overhead below which no schedule within `budget` stays: the cut-knapsack bound.

    Class: schedules whose first executions follow `base_order` (the ops' numbering unless given), any number
    of recomputes anywhere. When op v runs for the first time, each earlier result still to be read by v's
    successors' first executions is allocated or will be made again at its producer's cost. Dropping what
    exceeds the budget at the least cost is a covering knapsack, bounded by its linear relaxation; the largest
    over all v counts.

    Parameters
    ----------
    problem : Problem
        The graph.
    budget : int
        Bytes of peak, residents included.

    Returns
    -------
    float
        As `Schedule.overhead` counts it; infinite where the budget is below the working set of some op.

    References
    ----------
    Jain et al.: Checkmate, MLSys 2020, whose linear relaxation this matches or beats where both were run.
    """
    order = np.arange(problem.n_ops, dtype=np.int32) if base_order is None else np.asarray(base_order, np.int32)
    total = float(problem.cost.sum())
    if budget < lower_bound(problem):
        return math.inf
    if not total:
        return 0.0
    root = _alias_groups(problem)
    made_by = problem.producer()
    position = np.empty(problem.n_ops, np.int64)
    position[order] = np.arange(problem.n_ops)
    born, death, size = _spans(problem, order, position, root)
    group = np.flatnonzero((death > born) & (size > 0))
    maker = made_by[group]
    pinned = problem.is_output[group] | ~problem.recomputable[maker]
    share = size[group] / np.bincount(made_by[made_by >= 0], size[made_by >= 0], problem.n_ops)[maker]
    cost = np.where(pinned, np.inf, problem.cost[maker] * share)  # one run makes all outputs: each bears its part
    rank = np.argsort(cost / size[group], kind="stable")
    group = group[rank]
    fixed = np.array([_writes(problem, int(op)) + int(problem.workspace[op]) for op in order], np.int64)
    reading = np.full(problem.n_values, -1, np.int32)
    worst = _worst_cut(
        born[group], death[group], size[group], cost[rank], group, fixed, order, problem.in_ptr,
        root[problem.in_values], reading, budget - problem.base_bytes,
    )  # fmt: skip
    return float(worst) / total


def _alias_groups(problem: Problem) -> Ints:
    """Value in whose buffer each value may live while that one is alive: itself unless aliased."""
    root = np.arange(problem.n_values, dtype=np.int32)
    for op in range(problem.n_ops):
        for k in range(problem.out_ptr[op], problem.out_ptr[op + 1]):
            if problem.alias_slot[k] >= 0:
                root[problem.out_values[k]] = root[problem.in_values[problem.in_ptr[op] + problem.alias_slot[k]]]
    return root


def _reads(problem: Problem, op: int, root: Ints) -> int:
    """Bytes surely allocated for what `op` reads."""
    held: dict[int, int] = {}
    for value in problem.inputs(op):
        shared = int(root[value])
        if not problem.resident[shared]:
            size = min(int(problem.nbytes[shared]), int(problem.nbytes[value]))
            held[shared] = min(held.get(shared, size), size)
    return sum(held.values())


def _writes(problem: Problem, op: int) -> int:
    """Bytes surely allocated for what `op` writes the first time, beside what it reads."""
    inputs = problem.inputs(op)
    total = 0
    for k in range(problem.out_ptr[op], problem.out_ptr[op + 1]):
        value = problem.out_values[k]
        if not problem.is_output[value]:
            if problem.alias_slot[k] >= 0:
                continue
            slots = problem.inplace_slots[problem.inplace_ptr[k] : problem.inplace_ptr[k + 1]]
            same = [problem.shape_class[inputs[slot]] == problem.shape_class[value] >= 0 for slot in slots]
            if any(same):
                continue
        total += int(problem.nbytes[value])
    return total


def _spans(problem: Problem, order: Ints, position: Longs, root: Ints) -> tuple[Longs, Longs, Longs]:
    """Step that makes each alias group's root, last step that reads the group, and bytes it surely takes."""
    born = np.full(problem.n_values, len(order), np.int64)
    death = np.full(problem.n_values, -1, np.int64)
    size = problem.nbytes.copy()
    np.minimum.at(size, root, problem.nbytes)
    born[problem.out_values] = np.repeat(position, np.diff(problem.out_ptr))
    steps = np.repeat(position, np.diff(problem.in_ptr))
    np.maximum.at(death, root[problem.in_values], steps)
    death[root[problem.is_output]] = -1  # a graph output and its views live in buffers of their own
    death[problem.is_output & ~problem.resident & (root == np.arange(problem.n_values))] = len(order)
    return born, death, size


@njit(cache=True)
def _worst_cut(
    born: Longs, death: Longs, size: Longs, cost: Floats, group: Longs, fixed: Longs, order: Ints,
    in_ptr: Ints, in_group: Ints, reading: Ints, budget: int,
) -> float:  # fmt: skip
    """Largest relaxed covering knapsack over the steps; items come cheapest per byte first."""
    worst = 0.0
    for t in range(len(order)):
        op = order[t]
        for k in range(in_ptr[op], in_ptr[op + 1]):
            reading[in_group[k]] = t
        excess = fixed[t] - budget
        for i in range(len(group)):
            if born[i] < t <= death[i]:
                excess += size[i]
        price = 0.0
        for i in range(len(group)):
            if excess <= 0:
                break
            if born[i] < t <= death[i] and reading[group[i]] != t:
                if cost[i] == np.inf:
                    break
                price += cost[i] * min(1.0, excess / size[i])
                excess -= size[i]
        worst = max(worst, price)
    return worst
