"""Problems for planner tests: built by hand, chains, and random ones with every buffer rule in play."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
from hypothesis import strategies as st

from onnx_remat.memory.donation import after_readers, donatable
from onnx_remat.memory.problem import BACKWARD, FORWARD, Problem, Schedule, check_schedule
from onnx_remat.plan.selectors.revolve import table


def build(
    ops: Sequence[tuple[Sequence[int], Sequence[int]]],
    nbytes: Sequence[int],
    outputs: Sequence[int],
    *,
    resident: Sequence[int] = (),
    shape_class: Sequence[int] | None = None,
    poolable: Sequence[bool] | None = None,
    alias: Mapping[int, int] | None = None,
    inplace: Mapping[int, Sequence[int]] | None = None,
    droppable: Sequence[int] = (),
    workspace: Sequence[int] | None = None,
    rerun_workspace: Sequence[int] | None = None,
    cost: Sequence[float] | None = None,
    fixed: Sequence[int] = (),
    phase: Sequence[int] | None = None,
    hold_unread: bool = True,
    donates: Mapping[int, int] | None = None,
    donee_may_read: Sequence[int] = (),
) -> Problem:
    """A problem from (inputs, outputs) per op; the four mappings are keyed by output value."""
    n, n_values = len(ops), len(nbytes)
    slots = [v for _, made in ops for v in made]
    lists = [list((inplace or {}).get(v, ())) for v in slots]

    def flags(chosen: Sequence[int], length: int) -> np.ndarray:
        result = np.zeros(length, np.bool_)
        result[list(chosen)] = True
        return result

    def pointers(lengths: list[int]) -> np.ndarray:
        return np.cumsum([0, *lengths]).astype(np.int32)

    classes = np.asarray([-1] * n_values if shape_class is None else shape_class, np.int32)
    here = flags(resident, n_values)
    return Problem(
        in_ptr=pointers([len(read) for read, _ in ops]),
        in_values=np.array([v for read, _ in ops for v in read], np.int32),
        out_ptr=pointers([len(made) for _, made in ops]),
        out_values=np.array(slots, np.int32),
        nbytes=np.asarray(nbytes, np.int64),
        resident=here,
        is_output=flags(outputs, n_values),
        shape_class=classes,
        poolable=classes >= 0 if poolable is None else np.asarray(poolable, np.bool_),
        alias_slot=np.array([(alias or {}).get(v, -1) for v in slots], np.int32),
        inplace_ptr=pointers([len(tried) for tried in lists]),
        inplace_slots=np.array([k for tried in lists for k in tried], np.int32),
        droppable=np.array([v in droppable for v in slots], np.int8),
        workspace=np.asarray([0] * n if workspace is None else workspace, np.int64),
        rerun_workspace=np.asarray([0] * n if rerun_workspace is None else rerun_workspace, np.int64),
        cost=np.asarray([1.0] * n if cost is None else cost, np.float64),
        recomputable=~flags(fixed, n),
        phase=np.asarray([FORWARD] * n if phase is None else phase, np.int8),
        base_bytes=int(np.asarray(nbytes, np.int64)[here].sum()),
        hold_unread=hold_unread,
        donates=np.array([(donates or {}).get(v, -1) for v in range(n_values)], np.int32),
        donee_may_read=flags(donee_may_read, n_values),
    )


def chain(n: int) -> Problem:
    """n forward ops in a row; gradient i reads activation i and gradient i + 1. Every value is one unit."""
    forward = [([i - 1] if i else [], [i]) for i in range(n)]
    backward = [([n - 1 - i] + ([n + i - 1] if i else []), [n + i]) for i in range(n)]
    phase = [FORWARD] * n + [BACKWARD] * n
    return build(ops=forward + backward, nbytes=[1] * (2 * n), outputs=[2 * n - 1], phase=phase)


def random_problem(seed: int, n_ops: int, facts: bool = True) -> Problem:
    """A random DAG; `facts` brings in aliases, in-place outputs, pooling, workspace, fixed ops, residents."""
    rng = np.random.default_rng(seed)
    classes = [-1, 0, 0, 1, 2] if facts else [-1]
    size_of = {0: 6, 1: 4, 2: 9}
    nbytes, kinds, ops = [], [], []
    alias: dict[int, int] = {}
    inplace: dict[int, list[int]] = {}
    resident = []
    for _ in range(int(rng.integers(0, 3)) if facts else 0):
        resident.append(len(nbytes))
        kinds.append(int(rng.choice(classes)))
        nbytes.append(size_of.get(kinds[-1], int(rng.integers(0, 9))))
    for _ in range(n_ops):
        reach = len(nbytes)
        read = sorted({int(reach - 1 - min(reach - 1, rng.geometric(0.3) - 1)) for _ in range(rng.integers(0, 4))})
        read = [int(v) for v in rng.permutation(read)] if reach else []
        if facts and read and rng.random() < 0.1:
            read.append(read[0])
        made = []
        for _ in range(2 if facts and rng.random() < 0.2 else 1):
            v = len(nbytes)
            kinds.append(int(rng.choice(classes)))
            nbytes.append(size_of.get(kinds[-1], int(rng.integers(0, 9))))
            if facts and read and rng.random() < 0.2:
                alias[v] = int(rng.integers(len(read)))
                kinds[v], nbytes[v] = kinds[read[alias[v]]], nbytes[read[alias[v]]]
            elif facts and read and rng.random() < 0.5:
                inplace[v] = [int(k) for k in rng.permutation(len(read))[:2]]
            made.append(v)
        viewed = {read[alias[v]] for v in made if v in alias}
        for v in made:  # no kernel writes over what it passes on
            inplace[v] = [k for k in inplace.get(v, ()) if read[k] not in viewed]
        ops.append((read, made))
    slots = [v for _, made in ops for v in made]
    return build(
        ops, nbytes, outputs=sorted({slots[-1], int(rng.choice(slots))}), resident=resident,
        shape_class=kinds, alias=alias, inplace=inplace,
        droppable=[v for v in slots if facts and rng.random() < 0.1],
        workspace=[int(rng.integers(0, 4)) if facts else 0 for _ in ops],
        cost=rng.integers(1, 9, n_ops).tolist(),
        fixed=[i for i in range(n_ops) if facts and rng.random() < 0.1],
        phase=[FORWARD if i < n_ops // 2 else BACKWARD for i in range(n_ops)],
        hold_unread=bool(rng.random() < 0.7),
        rerun_workspace=[int(rng.integers(0, 6)) if facts and rng.random() < 0.3 else 0 for _ in ops],
    )  # fmt: skip


def donating_problem(seed: int, n_ops: int, facts: bool = True) -> Problem:
    """A random problem with up to three new residents that are read here and there, viewed, and renewed in place."""
    problem = random_problem(seed, n_ops, facts)
    rng = np.random.default_rng(seed + 1)
    inputs = [problem.inputs(op) for op in range(n_ops)]
    slots = [k for k in range(len(problem.out_values)) if problem.alias_slot[k] < 0]
    chosen = [int(problem.out_values[k]) for k in rng.permutation(slots)[: int(rng.integers(1, 4))]]
    writer = np.repeat(np.arange(n_ops), np.diff(problem.out_ptr))
    pairs, may_read = [], np.zeros(problem.n_values + len(chosen), np.bool_)
    for i, value in enumerate(chosen):
        resident = problem.n_values + i
        pairs.append((value, resident))
        may_read[value] = rng.random() < 0.5
        for op in rng.integers(0, n_ops, int(rng.integers(1, 4))).tolist():
            inputs[op].append(resident)
        for k in np.flatnonzero(problem.alias_slot >= 0):
            if rng.random() < 0.4:  # now a view of the resident
                inputs[writer[k]][problem.alias_slot[k]] = resident
    more = len(chosen)
    problem = replace(
        problem,
        in_ptr=np.cumsum([0, *map(len, inputs)]).astype(np.int32),
        in_values=np.array([v for read in inputs for v in read], np.int32),
        nbytes=np.concatenate([problem.nbytes, problem.nbytes[chosen]]),
        resident=np.concatenate([problem.resident, np.ones(more, np.bool_)]),
        is_output=np.concatenate([problem.is_output, np.zeros(more, np.bool_)]),
        shape_class=np.concatenate([problem.shape_class, problem.shape_class[chosen]]),
        poolable=np.concatenate([problem.poolable, problem.poolable[chosen]]),
        base_bytes=problem.base_bytes + int(problem.nbytes[chosen].sum()),
        donates=np.empty(0, np.int32),
        donee_may_read=may_read,
    )
    return donatable(problem, pairs).apply(problem)


def problems(most: int = 14) -> st.SearchStrategy[Problem]:
    """Random problems of up to `most` ops."""
    return st.builds(random_problem, st.integers(0, 2**31), st.integers(1, most), st.booleans())


def liveness_only(problem: Problem) -> Problem:
    """The problem without shared buffers and views; the unread is freed at once, first runs need what recomputes do."""
    return replace(
        problem,
        poolable=np.zeros_like(problem.poolable),
        alias_slot=np.full_like(problem.alias_slot, -1),
        workspace=problem.workspace + problem.rerun_workspace,
        rerun_workspace=np.zeros_like(problem.rerun_workspace),
        hold_unread=False,
    )


def random_order(problem: Problem, rng: np.random.Generator) -> list[int]:
    """A random topological order."""
    made_by = problem.producer()
    waiting = [{int(made_by[v]) for v in problem.inputs(op)} - {-1} for op in range(problem.n_ops)]
    life = problem.lifetimes
    for op in range(problem.n_ops):
        for v in problem.inputs(op):
            renewing = int(life.renewed_by[life.root[v]])
            if renewing not in (-1, op):
                waiting[renewing].add(op)
    order: list[int] = []
    while len(order) < problem.n_ops:
        ready = [op for op in range(problem.n_ops) if op not in order and waiting[op] <= set(order)]
        order.append(int(rng.choice(ready)))
    return order


def random_schedule(problem: Problem, seed: int) -> list[int]:
    """A random topological order with random recomputes put in."""
    rng = np.random.default_rng(seed)
    order = random_order(problem, rng)
    for _ in range(int(rng.integers(0, 5))):
        at = int(rng.integers(1, len(order) + 1))
        op = int(rng.choice(order[:at]))
        longer = [*order[:at], op, *order[at:]]
        try:
            check_schedule(problem, Schedule(tuple(longer)))
        except ValueError:
            continue
        order = longer
    return order


def baseline(problem: Problem) -> Schedule:
    """The ops' numbering as a schedule, changed only where donations need it."""
    return Schedule(tuple(after_readers(problem, range(problem.n_ops)).tolist()))


def cheapest(problem: Problem, budget: int, fixed_order: bool = True) -> float | None:
    """Least overhead under a budget by Dijkstra over what has run and what is alive.

    First executions in the order of `baseline`, or in any. For problems without outputs, views and shared buffers;
    None if nothing fits.
    """
    n = problem.n_ops
    here = problem.resident
    reads = [frozenset(v for v in problem.inputs(op) if not here[v]) for op in range(n)]
    donates = dict(enumerate(problem.donates.tolist()))
    size = [0 if donates.get(v, -1) >= 0 else bytes_ for v, bytes_ in enumerate(problem.nbytes.tolist())]
    made = [problem.outputs(op)[0] for op in range(n)]
    once = [not problem.recomputable[op] or donates.get(made[op], -1) >= 0 for op in range(n)]
    ends = [{q for q in range(n) if q != op and donates.get(made[q], -1) in problem.inputs(op)} for op in range(n)]
    first = baseline(problem).order
    budget -= problem.base_bytes
    nothing: frozenset[int] = frozenset()
    best = {(nothing, nothing): 0.0}
    queue: list[tuple[float, int, frozenset[int], frozenset[int]]] = [(0.0, 0, nothing, nothing)]
    pushed = 0
    while queue:
        cost, _, done, live = heapq.heappop(queue)
        if cost > best[done, live]:
            continue
        if len(done) == n:
            return cost / float(problem.cost.sum()) - 1.0
        for op in range(n):
            known = op in done
            if (known and once[op]) or not reads[op] <= live or ends[op] & done:
                continue
            if fixed_order and not known and op != first[len(done)]:
                continue
            others = sorted(live - reads[op] - {made[op]})
            for kept in (c for k in range(len(others) + 1) for c in combinations(others, k)):
                now = reads[op] | set(kept) | {made[op]}
                scratch = int(problem.workspace[op]) + (int(problem.rerun_workspace[op]) if known else 0)
                if sum(size[v] for v in now) + scratch > budget:
                    continue
                state = (done | {op}, frozenset(now))
                price = cost + float(problem.cost[op])
                if price < best.get(state, math.inf):
                    best[state] = price
                    pushed += 1
                    heapq.heappush(queue, (price, pushed, *state))
    return None


def chain_optimum(n: int, slots: int) -> Schedule:
    """The plan that dynamic programming finds, in ops of a `chain`."""
    order: list[int] = []
    for first, end in table(n, slots).stages(n, slots):
        order += range(first, end) if first < end else [2 * n - 1 - first]
    return Schedule(tuple(order))
