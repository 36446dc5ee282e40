"""Stacks of equal layers: plan a small problem with a few of the layers, and extend its plan to all layers.

A file contains the layers of a stack one after the other, and their gradients in reverse order: two *runs* of ops that
repeat with a period. The middle layers are removed, their readers read the layer before the gap instead, and the rest
is a small problem, searched as any other::

    forward    e [0] [1] [2] [3] [4] [5] h            e [0] [1] . . . . [5] h
    backward             h' [5] [4] [3] [2] [1] [0]                      h' [5] . . . . [1] [0]

A plan for it decides for each layer which results are dropped and when its ops run. The layers of the whole problem
copy these decisions from those of the small one, in equal shares: the first of many from the first of few. The planning
time therefore does not grow with the number of layers; the subsequent search improves the seams.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from onnx_remat.memory.buffers import simulate
from onnx_remat.memory.donation import after_readers
from onnx_remat.memory.problem import Flags, Floats, Ints, Longs, Problem, Schedule
from onnx_remat.plan.selectors.materialize import materialize, split_step

_LEAST_KEPT_LAYERS, _LEAST_KEPT_OPS = 6, 600  # of the small problem: of thin layers, more are kept
_LEAST_RATIO = 2  # layers of the stack per kept layer from which the method is worthwhile
_MOST_LAYER_OPS = 4000
_LEAST_RUN_SHARE = 0.5  # of a problem's ops that must lie in its runs
_MOST_BUDGETS = 4  # of the small problem that are tried
_TOLERANCE, _OVERSHOOT = 0.015, 0.003  # of the budget: slack that ends the tries; excess correction of a try

Solve = Callable[[Problem, int, Ints], Schedule]
"""Plans a problem for a budget, from an order without recompute."""


@dataclass(frozen=True, slots=True)
class Run:
    """Repeating ops: `layers` times the same `period` ops, in the file from op `first` on."""

    first: int
    period: int
    layers: int

    def layer(self, op: Ints) -> Ints:
        """Return the layer of each op; outside 0 .. layers - 1 for ops outside the run."""
        return (op - self.first) // self.period


@dataclass(frozen=True, slots=True)
class Stack:
    """Structure of a problem that is a stack of layers.

    Attributes
    ----------
    runs : tuple of Run
        The forward run and the backward run.
    meet : int
        Layer i of the forward run and layer ``meet - i`` of the backward run belong together.
    kept : int
        Number of layers of the small problem.
    home : int32 (n_ops, 2)
        Run and layer that each op belongs to or follows, -1 for none: an update follows the gradient it reads.
    role : int32 (n_ops,)
        Position of an op in its layer: corresponding ops of different layers have equal roles.
    """

    runs: tuple[Run, Run]
    meet: int
    kept: int
    home: Ints
    role: Ints


def find(problem: Problem) -> Stack | None:
    """Return the structure of a problem that is a stack of enough layers, None for any other."""
    signatures = _signatures(problem)
    split = split_step(problem, np.arange(problem.n_ops, dtype=np.int32))
    forward, backward = _longest_run(signatures[:split], 0), _longest_run(signatures[split:], split)
    if forward is None or backward is None:
        return None
    kept = max(_LEAST_KEPT_LAYERS, -(-_LEAST_KEPT_OPS // (forward.period + backward.period)))
    if min(forward.layers, backward.layers) < _LEAST_RATIO * kept:
        return None
    if sum(run.layers * run.period for run in (forward, backward)) < _LEAST_RUN_SHARE * problem.n_ops:
        return None
    home, role = _homes(problem, (forward, backward), signatures)
    reader = np.repeat(np.arange(problem.n_ops), np.diff(problem.in_ptr))
    source = problem.lifetimes.maker[problem.in_values]
    crosses = (source >= 0) & (home[reader, 0] == 1) & (home[source, 0] == 0)
    if not crosses.any():
        return None
    meets = home[reader[crosses], 1] + home[source[crosses], 1]
    return Stack((forward, backward), int(np.bincount(meets).argmax()), kept, home, role)


def _signatures(problem: Problem) -> Longs:
    """Return a number per op, equal for ops of equal cost, workspace, phase, and sizes of inputs and outputs."""
    numbers: dict[tuple[object, ...], int] = {}
    found = np.empty(problem.n_ops, np.int64)
    nbytes, resident = problem.nbytes, problem.resident
    for op in range(problem.n_ops):
        reads = problem.in_values[problem.in_ptr[op] : problem.in_ptr[op + 1]]
        writes = problem.out_values[problem.out_ptr[op] : problem.out_ptr[op + 1]]
        look = (
            float(problem.cost[op]), int(problem.workspace[op]), int(problem.phase[op]), nbytes[reads].tobytes(),
            resident[reads].tobytes(), nbytes[writes].tobytes(),
        )  # fmt: skip
        found[op] = numbers.setdefault(look, len(numbers))
    return found


def _longest_run(signatures: Longs, first: int) -> Run | None:
    """Return the run that covers the most of a range of ops from op `first` on, the shortest period among equals."""
    best, covered = None, 0
    for period in range(2, min(_MOST_LAYER_OPS, len(signatures) // (_LEAST_RATIO * _LEAST_KEPT_LAYERS)) + 1):
        alike = np.flatnonzero(np.diff(np.concatenate(([0], signatures[:-period] == signatures[period:], [0]))))
        if not len(alike):
            continue
        lengths = alike[1::2] - alike[::2]
        longest = int(lengths.argmax())
        if int(lengths[longest]) + period > covered + period // 2:
            covered = int(lengths[longest]) + period
            best = Run(first + int(alike[2 * longest]), period, covered // period)
    return best


def _homes(problem: Problem, runs: tuple[Run, Run], signatures: Longs) -> tuple[Ints, Ints]:
    """Compute `Stack.home` and `Stack.role`."""
    ops = np.arange(problem.n_ops, dtype=np.int32)
    home = np.full((problem.n_ops, 2), -1, np.int32)
    role = np.full(problem.n_ops, -1, np.int32)
    base = 0
    for number, run in enumerate(runs):
        inside = (ops >= run.first) & (ops < run.first + run.period * run.layers)
        home[inside] = np.stack([np.full(len(ops), number), run.layer(ops)], 1)[inside]
        role[inside] = base + (ops[inside] - run.first) % run.period
        base += run.period
    names: dict[tuple[object, ...], int] = {}
    maker = problem.lifetimes.maker
    for op in np.flatnonzero(home[:, 0] < 0).tolist():
        sources = [int(maker[v]) for v in problem.inputs(op) if maker[v] >= 0]
        homes = [tuple(home[s].tolist()) for s in sources if home[s, 0] >= 0]
        if not homes:
            continue
        home[op] = mine = max(homes)
        name = (
            int(signatures[op]), mine[0], *((int(role[s]), int(home[s, 0]), int(home[s, 1]) - mine[1]) for s in sources)
        )  # fmt: skip
        role[op] = base + names.setdefault(name, len(names))
    return home, role


@dataclass(frozen=True, slots=True)
class Small:
    """A problem with layers removed; `ops` are the ops kept, `gone` the layers removed from each run, as ranges."""

    problem: Problem
    ops: Ints
    gone: tuple[tuple[int, int], tuple[int, int]]


def shrink(problem: Problem, stack: Stack) -> Small | None:
    """Return the problem with a few of the layers; None if kept ops read removed ones in an irregular way."""
    forward, backward = stack.runs
    less = forward.layers - stack.kept
    start = stack.kept // 2
    gone = ((start, start + less), (stack.meet - start - less + 1, stack.meet - start + 1))
    if gone[1][0] < 1 or gone[1][1] >= backward.layers:
        return None
    low, high = np.array(gone).T
    run, layer = stack.home.T
    out = (run >= 0) & (layer >= low[run]) & (layer < high[run])
    by_role = {(*stack.home[op].tolist(), int(stack.role[op])): op for op in np.flatnonzero(run >= 0).tolist()}
    instead = _replacement_reads(problem, stack, out, gone, by_role)
    if instead is None:
        return None
    ops = np.flatnonzero(~out).astype(np.int32)
    return Small(_restricted(problem, ops, instead), ops, gone)


def _replacement_reads(
    problem: Problem,
    stack: Stack,
    out: Flags,
    gone: tuple[tuple[int, int], tuple[int, int]],
    by_role: Mapping[tuple[int, int, int], int],
) -> Ints | None:
    """Return the value that each kept op reads in each input slot: its own, or the same one of a kept layer."""
    life = problem.lifetimes
    reads = problem.in_values.copy()
    reader = np.repeat(np.arange(problem.n_ops), np.diff(problem.in_ptr))
    source = life.maker[problem.in_values]
    less = gone[0][1] - gone[0][0]
    for slot in np.flatnonzero((source >= 0) & ~out[reader] & out[source]).tolist():
        op, made = int(reader[slot]), int(source[slot])
        run, layer = stack.home[made].tolist()
        shifts = (-less, less) if stack.home[op, 0] == run or stack.home[op, 1] < gone[1][0] else (less, -less)
        names = ((run, layer + shift, int(stack.role[made])) for shift in shifts)
        like = next((by_role[name] for name in names if name in by_role and not out[by_role[name]]), -1)
        if like < 0:
            return None
        writes = problem.outputs(made).index(int(problem.in_values[slot]))
        if writes >= len(problem.outputs(like)) or like >= op:
            return None
        reads[slot] = problem.outputs(like)[writes]
    return reads


def _restricted(problem: Problem, ops: Ints, reads: Ints) -> Problem:
    """Return the problem of some of the ops, whose input slots read `reads`; its values are residents and outputs."""
    values = np.sort(np.concatenate([np.flatnonzero(problem.producer() < 0), *map(problem.outputs, ops)]).astype(int))
    number = np.full(problem.n_values, -1, np.int32)
    number[values] = np.arange(len(values))
    in_slots = np.concatenate([np.arange(problem.in_ptr[op], problem.in_ptr[op + 1]) for op in ops]).astype(int)
    out_slots = np.concatenate([np.arange(problem.out_ptr[op], problem.out_ptr[op + 1]) for op in ops]).astype(int)
    taken = np.concatenate(
        [np.arange(problem.inplace_ptr[k], problem.inplace_ptr[k + 1]) for k in out_slots] or [np.zeros(0)]
    ).astype(int)

    def ptr(of: Ints, chosen: Ints | Longs) -> Ints:
        return np.concatenate([[0], np.cumsum(np.diff(of)[chosen])]).astype(np.int32)

    donates = problem.donates[values] if len(problem.donates) else problem.donates
    if len(donates):
        donates = np.where(donates >= 0, number[donates], -1).astype(np.int32)
    return replace(
        problem,
        in_ptr=ptr(problem.in_ptr, ops), in_values=number[reads[in_slots]],
        out_ptr=ptr(problem.out_ptr, ops), out_values=number[problem.out_values[out_slots]],
        nbytes=problem.nbytes[values], resident=problem.resident[values], is_output=problem.is_output[values],
        shape_class=problem.shape_class[values], poolable=problem.poolable[values],
        alias_slot=problem.alias_slot[out_slots], inplace_ptr=ptr(problem.inplace_ptr, out_slots),
        inplace_slots=problem.inplace_slots[taken], droppable=problem.droppable[out_slots],
        workspace=problem.workspace[ops], rerun_workspace=problem.rerun_workspace[ops], cost=problem.cost[ops],
        moves=np.empty(0, np.bool_), recomputable=problem.recomputable[ops], phase=problem.phase[ops], donates=donates,
        donee_may_read=problem.donee_may_read[values] if len(problem.donee_may_read) else problem.donee_may_read,
    )  # fmt: skip


def stretch(problem: Problem, stack: Stack, small: Small, plan: Schedule) -> Schedule:
    """Extend the plan of a small problem to the whole."""
    place, again = _first_occurrences(small, plan)
    counterpart = _counterparts(problem, stack, small)
    when = _times(stack, small, place, counterpart)
    order = after_readers(problem, np.argsort(when, kind="stable").astype(np.int32))
    dropped = again[counterpart] & (counterpart >= 0)
    return materialize(problem, order, dropped, split_step(problem, order))


def _first_occurrences(small: Small, plan: Schedule) -> tuple[Longs, Flags]:
    """Return the rank of every op's first occurrence among first occurrences, and whether the op occurs again."""
    order, first = np.unique(plan.array(), return_index=True)
    place = np.empty(len(small.ops), np.int64)
    place[order[np.argsort(first)]] = np.arange(len(small.ops))
    return place, np.bincount(plan.array(), minlength=len(small.ops)) > 1


def _counterparts(problem: Problem, stack: Stack, small: Small) -> Ints:
    """Return the op of the small problem that each op of the whole copies: itself, or its counterpart in a kept layer.

    -1 for an op without one.
    """
    mine = {int(op): i for i, op in enumerate(small.ops)}
    by_role = {
        (*stack.home[op].tolist(), int(stack.role[op])): i for op, i in mine.items() if stack.home[op, 0] >= 0
    }  # fmt: skip
    counterpart = np.full(problem.n_ops, -1, np.int32)
    for op in range(problem.n_ops):
        run, layer = stack.home[op].tolist()
        if run < 0:
            counterpart[op] = mine[op]
        else:
            name = (run, _copied_layer(stack, small, run, layer), int(stack.role[op]))
            counterpart[op] = by_role.get(name, mine.get(op, -1))
    return counterpart


def _copied_layer(stack: Stack, small: Small, run: int, layer: int) -> int:
    """Return the kept layer that a layer of the whole copies, in equal shares.

    The shares cover the layers in both runs; any other layer, at an end of the stack, copies itself.
    """
    forward, backward = stack.runs
    first, last = max(0, stack.meet - backward.layers + 1), min(forward.layers - 1, stack.meet)
    of = layer if run == 0 else stack.meet - layer
    low, high = small.gone[0]
    if first <= of <= last:
        left = [*range(first, low), *range(high, last + 1)]
        of = left[(of - first) * len(left) // (last - first + 1)]
    return of if run == 0 else stack.meet - of


def _times(stack: Stack, small: Small, place: Longs, counterpart: Ints) -> Floats:
    """Return a time for every op of the whole, by which the ops are ordered: the layers follow one another.

    A layer lasts as long as the kept layer it copies, counted from its first op; times outside the layers are
    interpolated.
    """
    when = np.full(len(counterpart), -1.0)
    n_left = len(small.ops)
    left = np.full(len(counterpart), -1, np.int64)
    left[small.ops] = np.arange(n_left)
    knots: list[tuple[float, float]] = []  # corresponding times of the small problem and of the whole
    shift = 0.0
    for number, run in enumerate(stack.runs):
        low, high = small.gone[number]
        kept = [layer for layer in range(run.layers) if not low <= layer < high]
        begin = {layer: float(place[left[run.first + layer * run.period]]) for layer in kept}
        follows = dict(pairwise(kept))
        last = max(1.0, begin[kept[-1]] - begin[kept[-2]])
        time = begin[kept[0]] + shift
        for layer in range(run.layers):
            like = _copied_layer(stack, small, number, layer)
            if layer in (0, run.layers - 1):
                knots.append((begin[kept[0 if layer == 0 else -1]], time))
            mine = (stack.home[:, 0] == number) & (stack.home[:, 1] == layer) & (counterpart >= 0)
            when[mine] = time + place[counterpart[mine]] - begin[like]
            time += max(1.0, begin[follows[like]] - begin[like]) if like in follows else last
        shift = knots[-1][1] - knots[-1][0]
    knots.sort()
    xs, ys = map(np.asarray, zip(*knots, strict=True))
    rest = np.flatnonzero(when < 0)
    known = rest[left[rest] >= 0]
    at = place[left[known]].astype(np.float64)
    inside = np.interp(at, xs, ys)
    when[known] = np.where(at < xs[0], at + ys[0] - xs[0], np.where(at > xs[-1], at + ys[-1] - xs[-1], inside))
    return when


def layered(problem: Problem, base_order: Ints, budget: int, solve: Solve) -> list[Schedule]:
    """Return plans of the whole derived from plans of a few of its layers, none if it is not a stack.

    Parameters
    ----------
    problem : Problem
    base_order : int32 (n_ops,)
        An order without recompute.
    budget : int
        Bytes for the whole.
    solve : callable
        Plans the small problem.
    """
    stack = find(problem)
    small = stack and shrink(problem, stack)
    if not stack or not small:
        return []
    position = np.empty(problem.n_ops, np.int64)
    position[base_order] = np.arange(problem.n_ops)
    small_order = after_readers(small.problem, np.argsort(position[small.ops], kind="stable").astype(np.int32))
    whole_peak = simulate(problem, Schedule(tuple(base_order.tolist()))).peak
    small_peak = simulate(small.problem, Schedule(tuple(small_order.tolist()))).peak
    share = stack.kept / stack.runs[0].layers
    fixed = small_peak - share / (1 - share) * (whole_peak - small_peak)  # bytes independent of the number of layers
    found: list[Schedule] = []
    kept, missed = 0, 0  # budgets of the small problem: the largest that met `budget`, the smallest that did not
    small_budget = int(fixed + (budget - fixed) * share)
    for _ in range(_MOST_BUDGETS):
        found.append(stretch(problem, stack, small, solve(small.problem, small_budget, small_order)))
        over = simulate(problem, found[-1]).peak - budget
        if -_TOLERANCE * budget < over <= 0:
            break
        if over > 0:
            missed = small_budget
        else:
            kept = small_budget
        step = int((over + np.sign(over) * _OVERSHOOT * budget) * share)
        small_budget = (kept + missed) // 2 if kept and missed else small_budget - step
    return found
