"""Liveness model: a `Problem` without its views for the search, and the way back to a schedule.

An op whose outputs all alias an input takes no memory: a reader of a view reads the underlying buffer. The search omits
such ops. In the schedule, each view is taken again just before its first reader after every recompute of the viewed
value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from onnx_remat.memory.problem import Flags, Floats, Ints, Longs, Problem


class Core(NamedTuple):
    """Arrays of the liveness model; ops and values keep the problem's numbers, views have no slots.

    Attributes
    ----------
    in_ptr, in_values : int32
        Buffers that an op reads (their root values), each once, without residents.
    out_ptr, out_values : int32
        Values that an op writes.
    take_ptr, take : int32 (n_slots + 1,), (n,)
        Inputs, as indices into the op's list, whose buffer each output slot may reuse.
    made_by : int32 (n_values,)
        Op that writes each value, -1 for residents and views.
    kept : bool (n_values,)
        Graph outputs: live from their first execution to the end.
    droppable : bool (n_values,)
        See `Problem.droppable`.
    workspace : int64 (n_ops,)
        Workspace of a recompute, which may take more than the first run.
    closed_ptr, closed : int32 (n_ops + 1,), (n,)
        Ops after which an op must not run: they overwrite an input of it, or of a view that it reads.
    """

    in_ptr: Ints
    in_values: Ints
    out_ptr: Ints
    out_values: Ints
    take_ptr: Ints
    take: Ints
    made_by: Ints
    nbytes: Longs
    kept: Flags
    droppable: Flags
    workspace: Longs
    cost: Floats
    recomputable: Flags
    hold_unread: bool
    closed_ptr: Ints
    closed: Ints


@dataclass(frozen=True, slots=True)
class LivenessModel:
    """The liveness model of a problem: the problem without its views.

    Attributes
    ----------
    core : Core
        Arrays that the search works on.
    ops : int32 (n,)
        The ops of the model, ascending: all but views.
    taken : _ViewDependencies
        Dependencies that decide when the views run.
    """

    problem: Problem
    core: Core
    ops: Ints
    root: Ints
    taken: _ViewDependencies
    fixed_order: bool

    def contract(self, order: Sequence[int] | Ints) -> Ints:
        """Return `order` without views."""
        part = np.zeros(self.problem.n_ops, np.bool_)
        part[self.ops] = True
        steps = np.asarray(order, np.int32)
        return steps[part[steps]]

    def expand(self, order: Sequence[int] | Ints) -> tuple[int, ...]:
        """Return `order` with each view inserted before its first reader after every run of the viewed value's op."""
        if len(self.ops) == self.problem.n_ops:
            return tuple(np.asarray(order).tolist())
        return _with_views(self.problem, self.contract(order), self.ops, self.taken, self.fixed_order)


def liveness_model(problem: Problem, fixed_order: bool = False) -> LivenessModel:
    """Return the liveness model of `problem`."""
    life = problem.lifetimes
    root, n_ops = life.root, problem.n_ops
    is_view = _views(problem)
    made_by = life.maker.copy()
    made_by[root != np.arange(problem.n_values)] = -1
    in_ptr, in_values = [0], []
    out_ptr, out_values = [0], []
    take_ptr, take = [0], []
    closed_ptr, closed = [0], []
    readers = np.zeros(problem.n_values, np.int64)
    for op in range(n_ops):
        if not is_view[op]:
            slots = [int(root[v]) for v in problem.inputs(op)]
            needs = list(dict.fromkeys([*slots, *_other_view_inputs(problem, op)]))
            reads = [v for v in needs if made_by[v] >= 0]
            closed += sorted({int(life.renewed_by[v]) for v in needs} - {-1, op})
            in_values += reads
            readers[reads] += 1
            for k in range(problem.out_ptr[op], problem.out_ptr[op + 1]):
                v = int(problem.out_values[k])
                if root[v] != v:
                    continue
                out_values.append(v)
                taken = [slots[j] for j in life.take[life.take_ptr[k] : life.take_ptr[k + 1]]]
                take += [reads.index(v) for v in taken if v in reads and slots.count(v) == 1]
                take_ptr.append(len(take))
        in_ptr.append(len(in_values))
        out_ptr.append(len(out_values))
        closed_ptr.append(len(closed))
    droppable = np.zeros(problem.n_values, np.bool_)
    droppable[problem.out_values[problem.droppable > 0]] = True
    # Readers of a graph output would read a second result instead of the kept one: ops of such outputs run once.
    once = made_by[life.kept & (readers > 0)]
    recomputable = life.recomputable & ~is_view
    recomputable[once[once >= 0]] = False
    recomputable &= ~_behind_single_views(problem, is_view)
    core = Core(
        _ints(in_ptr), _ints(in_values), _ints(out_ptr), _ints(out_values), _ints(take_ptr), _ints(take),
        made_by, life.nbytes, life.kept, droppable, problem.workspace + problem.rerun_workspace, problem.cost,
        recomputable, problem.hold_unread, _ints(closed_ptr), _ints(closed),
    )  # fmt: skip
    ops = np.flatnonzero(~is_view).astype(np.int32)
    return LivenessModel(problem, core, ops, root, _view_dependencies(problem, is_view), fixed_order)


def _ints(numbers: list[int]) -> Ints:
    return np.asarray(numbers, np.int32)


def _views(problem: Problem) -> Flags:
    """Return the ops that the search omits: all their outputs are views.

    An unread view of a resident that is overwritten is not omitted: it has no reader that determines its place.
    """
    life, n_ops = problem.lifetimes, problem.n_ops
    writer = np.repeat(np.arange(n_ops), np.diff(problem.out_ptr))
    viewed = life.root[problem.out_values] != problem.out_values
    count = np.bincount(writer, viewed, n_ops)
    read = np.bincount(problem.in_values, minlength=problem.n_values) > 0
    wanted = np.bincount(writer, read[problem.out_values], n_ops) > 0
    reader = np.repeat(np.arange(n_ops), np.diff(problem.in_ptr))
    renewed = np.bincount(reader, life.renewed_by[life.root[problem.in_values]] >= 0, n_ops) > 0
    is_view: Flags = (count == np.diff(problem.out_ptr)) & (count > 0) & (wanted | ~renewed)
    return is_view


def _other_view_inputs(problem: Problem, op: int) -> list[int]:
    """Return the other inputs of the views that `op` reads, besides the viewed values: a computed shape, say."""
    root, made_by = problem.lifetimes.root, problem.lifetimes.maker
    found: list[int] = []
    seen: set[int] = set()
    todo = [v for v in problem.inputs(op) if root[v] != v]
    while todo:
        if (view := todo.pop()) in seen:
            continue
        seen.add(view)
        maker = int(made_by[view])
        inputs = problem.inputs(maker)
        found += [v for v in problem.outputs(maker) if root[v] == v]  # made by the same op as a view: stands for the op
        found += [int(root[v]) for v in inputs]
        todo += [v for v in inputs if root[v] != v]
    return found


def _behind_single_views(problem: Problem, is_view: Flags) -> Flags:
    """Return the ops with a result that is read through a view that must not be taken again."""
    stuck = np.zeros(problem.n_ops, np.bool_)
    life = problem.lifetimes
    for op in np.flatnonzero(is_view)[::-1].tolist():
        if not life.recomputable[op] or stuck[op]:
            sources = life.maker[problem.inputs(op)]
            stuck[sources[sources >= 0]] = True
    return stuck


class _ViewDependencies(NamedTuple):
    """Dependencies of views, by op.

    Attributes
    ----------
    views : the omitted ops that make the views it reads
    behind : the makers of its inputs, for an omitted op
    again : whether it may run again
    """

    views: list[list[int]]
    behind: list[list[int]]
    again: list[bool]


def _view_dependencies(problem: Problem, is_view: Flags) -> _ViewDependencies:
    made_by, left_out = problem.producer().tolist(), is_view.tolist()
    makers = [[made_by[v] for v in problem.inputs(op) if made_by[v] >= 0] for op in range(problem.n_ops)]
    views = [[maker for maker in some if left_out[maker]] for some in makers]
    behind = [some if left else [] for some, left in zip(makers, left_out, strict=True)]
    return _ViewDependencies(views, behind, problem.recomputable.tolist())


def _with_views(
    problem: Problem, order: Ints, ops: Ints, taken: _ViewDependencies, fixed_order: bool
) -> tuple[int, ...]:
    stamp = [-1] * problem.n_ops  # step of each op's latest occurrence
    result: list[int] = []
    views = np.setdiff1d(np.arange(problem.n_ops), ops).tolist()
    next_view = 0

    def fresh(op: int) -> None:
        """Take the views that `op` reads again if they are older than the viewed value."""
        waiting = [(op, iter(taken.views[op]))]  # a stack, as views of views may be many
        seen: set[int] = set()
        while waiting:
            if (source := next(waiting[-1][1], None)) is not None:
                if source not in seen:
                    seen.add(source)
                    waiting.append((source, iter(taken.views[source])))
                continue
            view, _ = waiting.pop()
            behind = max((stamp[maker] for maker in taken.behind[view]), default=-1)
            if waiting and (stamp[view] < 0 or (stamp[view] < behind and taken.again[view])):
                emit(view)

    def emit(op: int) -> None:
        stamp[op] = len(result)
        result.append(op)

    for op in order.tolist():
        if fixed_order:  # views keep their place in the numbering
            while next_view < len(views) and views[next_view] < op and stamp[op] < 0:
                if stamp[views[next_view]] < 0:
                    fresh(views[next_view])
                    emit(views[next_view])
                next_view += 1
        fresh(op)
        emit(op)
    for view in views:
        if stamp[view] < 0:
            fresh(view)
            emit(view)
    return tuple(result)
