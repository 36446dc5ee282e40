"""Offload: values that a plan may move to the host's memory and back, for devices with little memory.

The planner sees two ops in place of the one that makes such a value. The first runs once and leaves a copy in host
memory, which takes no device memory; the second, a `Move`, makes the value from that copy, and may run again::

    op -> value              becomes              op -> the host's copy -> Move -> value

A Move right after its op does nothing: the value is already on the device. Any other Move is a copy to the host, after
the op or Move that made the value before, and a copy back. How much of their time adds to that of the step is not
known before planning: a plan assumes a share, and what `session.overlap` predicts for it is the share of the next.

References
----------
Rhu et al.: vDNN, MICRO 2016. Peng et al.: Capuchin, ASPLOS 2020 (which values to move and which to compute again).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import helper

from onnx_remat.ir.graph import NODE, Graph, Op, Value
from onnx_remat.ir.metadata import TAG
from onnx_remat.ir.op_semantics import MOVE, SPLIT
from onnx_remat.ir.opsets import STANDARD_DOMAINS
from onnx_remat.ir.shapes import Tensor
from onnx_remat.memory.buffers import simulate
from onnx_remat.memory.problem import Flags, Longs, Problem, Schedule
from onnx_remat.ort.compile import OpTable, compile_problem
from onnx_remat.ort.kernels.in_place import may_overwrite
from onnx_remat.ort.prepare import Compiled

DOWN, UP = "MemcpyToHost", "MemcpyFromHost"
"""ONNX Runtime's own ops that copy between a device and the host; on the CPU they change nothing."""

LEAST = 1 << 16
"""Bytes of the smallest values that are moved: a smaller copy takes as long to start as to transfer."""

START_SECONDS = 10e-6
"""To start a copy."""

_NEAR_PEAK = 0.97  # of the peak: values live across steps above it are worth moving


@dataclass(frozen=True, slots=True)
class Link:
    """The link to the host: bytes per second in either direction, and the share of a copy that kernels wait for."""

    bandwidth: float
    waited: float = 1.0

    def seconds(self, nbytes: int) -> float:
        """Return the time by which a step grows that copies a value to the host and back."""
        return self.waited * (2 * nbytes / self.bandwidth + 2 * START_SECONDS)


@dataclass(frozen=True, slots=True)
class Moved:
    """The moves of a schedule.

    Attributes
    ----------
    values : tuple of str
        One entry per move, in execution order.
    nbytes : int
        Bytes copied back from the host, and at most as many to it.
    share : float
        Time that kernels wait for copies, as a fraction of the time of a plain step.
    covered : float
        The part of the copies' time in which kernels run, from 0 to 1.
    """

    values: tuple[str, ...]
    nbytes: int
    share: float
    covered: float = 0.0


def is_move(op: Op) -> bool:
    """Whether an op is a `Move`."""
    return (op.node.domain, op.node.op_type) == (SPLIT, MOVE)


def _home(name: str) -> str:
    """Return the name that plans give to the host's copy of a value."""
    return f"{TAG}home.{name}"


def made_by(op: Op) -> str:
    """Return the value that an op makes in the file: its first output, even if plans call that the host's copy."""
    return op.outputs[0] if is_move(op) else next(filter(None, op.node.output))


def split(compiled: Compiled, names: Collection[str], link: Link) -> Compiled:
    """Return the same step with moves for the values in `names`, which are then not recomputed.

    Parameters
    ----------
    compiled : Compiled
        Its donations are dropped, see `renewed.with_donations`.
    names : collection of str
        Some of `movable`.
    link : Link
    """
    graph, tensors, problem, table = compiled.graph, dict(compiled.tensors), compiled.problem, compiled.table
    ops: list[Op] = []
    source: list[int] = []  # per op, its row in the original's tables
    values = dict(graph.values)
    for op in graph.ops:
        source.append(op.index)
        name = made_by(op)
        if name not in names:
            ops.append(replace(op, index=len(ops)))
            continue
        home = _home(name)
        values[home] = Value(home, NODE, False)
        tensors[home] = Tensor(tensors[name].dtype, (0,), 0, (0,))
        move = helper.make_node(MOVE, [home], [name], name=op.label, domain=SPLIT)
        move.metadata_props.extend(op.node.metadata_props)
        ops.append(replace(op, index=len(ops), outputs=tuple(home if n == name else n for n in op.outputs)))
        ops.append(Op(len(ops), move, (home,), (), (name,), op.expanded))
        source.append(op.index)
    moves = np.array([is_move(op) for op in ops], np.bool_)
    made = np.append(moves[1:], False)  # ops followed by the move of their result
    whole = Graph(tuple(ops), values, graph.model)
    rows = OpTable(
        recomputable=tuple(
            bool(m) or (table.recomputable[i] and not d) for i, m, d in zip(source, moves, made, strict=True)
        ),
        foldable=tuple(table.foldable[i] for i in source),
        workspace=tuple(() if m else table.workspace[i] for i, m in zip(source, moves, strict=True)),
        rerun_workspace=tuple(0 if m else table.rerun_workspace[i] for i, m in zip(source, moves, strict=True)),
    )
    seconds = [link.seconds(tensors[op.outputs[0]].nbytes) if is_move(op) else problem.cost[i]
               for op, i in zip(ops, source, strict=True)]  # fmt: skip
    phases = problem.phase[source].tolist()
    found = compile_problem(whole, tensors, rows, compiled.kernels, seconds, phases)
    return Compiled(whole, tensors, compiled.kernels, rows, replace(found, moves=moves))


def host_copy_bytes(compiled: Compiled) -> Longs:
    """Return the bytes that each op needs for a result that the plan counts as the host's copy. Shape (n_ops,).

    Zero if the result may overwrite an input that dies there: the following Move counts it, and the other live values.
    """
    graph, tensors, problem = compiled.graph, compiled.tensors, compiled.problem
    found = np.zeros(problem.n_ops, np.int64)
    for move in np.flatnonzero(problem.moves).tolist():
        op, made = graph.ops[problem.producer()[problem.inputs(move)[0]]], tensors[graph.ops[move].outputs[0]]
        over = any(
            (tensors[name].dtype, tensors[name].shape) == (made.dtype, made.shape)
            and may_overwrite(compiled.kernels, op.node, slot, 0, made.dtype)
            for slot, name in enumerate(op.inputs)
            if name
        )
        found[op.index] = 0 if over else made.nbytes
    return found


def adjoined(problem: Problem, order: Sequence[int], limit: int | None = None) -> Schedule:
    """Return an order in which the first occurrence of each move directly follows the op that makes its value.

    With a `limit` in bytes, shift only the moves that keep the peak at or below it, unless all together do.
    """
    late = Schedule(tuple(order)).late_moves(problem)
    together = _shifted(problem, order, set(late))
    if limit is None or not late or simulate(problem, together).peak <= limit:
        return Schedule(tuple(together))
    chosen: set[int] = set()
    for move in late:
        if simulate(problem, _shifted(problem, order, chosen | {move})).peak <= limit:
            chosen.add(move)
    return Schedule(tuple(_shifted(problem, order, chosen)))


def _shifted(problem: Problem, order: Sequence[int], moves: Collection[int]) -> list[int]:
    """Return `order` with the first occurrence of some moves shifted to directly after their ops."""
    behind = {int(problem.producer()[problem.inputs(move)[0]]): move for move in moves}
    result: list[int] = []
    gone: set[int] = set()
    for op in order:
        if op in moves and op not in gone:
            gone.add(op)
            continue
        result.append(op)
        if op in behind:
            result.append(behind[op])
    return result


def carried(order: Sequence[int], of: Compiled, to: Compiled) -> Schedule:
    """Translate a schedule of a step into one of the same step in which other values may be moved.

    A recompute of a value that may be moved now becomes a move, and recomputes needed only for it are dropped.
    """
    plain = {made_by(op): op.index for op in to.graph.ops if not is_move(op)}
    moves = {op.outputs[0]: op.index for op in to.graph.ops if is_move(op)}
    found: list[int] = []
    seen: set[int] = set()
    for number in order:
        op = of.graph.ops[number]
        name, first = made_by(op), number not in seen
        seen.add(number)
        if not is_move(op):
            found += [plain[name]] if first or name not in moves else []
            if name in moves and not (first and _may_move(of, name)):
                found.append(moves[name])
        elif name in moves or not first:
            found.append(moves.get(name, plain[name]))
    return Schedule(tuple(_without_unread(to.problem, found)))


def _may_move(compiled: Compiled, name: str) -> bool:
    return _home(name) in compiled.graph.values


def _without_unread(problem: Problem, order: Sequence[int]) -> list[int]:
    """Return `order` without recomputes whose outputs have no reader."""
    count = np.bincount(np.asarray(order, np.int64), minlength=problem.n_ops)
    wanted: set[int] = set()
    kept: list[int] = []
    for op in reversed(order):
        count[op] -= 1
        outputs = problem.outputs(op)
        if count[op] and wanted.isdisjoint(outputs):
            continue
        wanted.difference_update(outputs)
        wanted.update(problem.inputs(op))
        kept.append(op)
    return kept[::-1]


def movable(compiled: Compiled, least: int = LEAST) -> list[str]:
    """Return the values that may be moved: single outputs of ops, of at least `least` bytes, that own their memory.

    New state that lives on the host is none of them: ONNX Runtime would merge its two copies to the host.
    """
    graph, problem, tensors = compiled.graph, compiled.problem, compiled.tensors
    leaving = {op.inputs[0] for op in graph.ops if op.node.op_type == DOWN}
    found = []
    for op in graph.ops:
        name = op.outputs[0] if len(op.writes) == 1 else ""
        if (
            name
            and op.node.domain in STANDARD_DOMAINS
            and op.node.op_type not in (DOWN, UP)
            and op.node.op_type != "Transpose"  # ONNX Runtime may merge it into its readers
            and not graph.values[name].is_output
            and name not in leaving
            and problem.alias_slot[problem.out_ptr[op.index]] < 0
            and not compiled.table.foldable[op.index]
            and tensors[name].nbytes >= least
            and not op.has_body
        ):
            found.append(name)
    return found


def worth_moving(compiled: Compiled, schedule: Schedule, link: Link, at_any_price: bool = False) -> list[str]:
    """Return movable values that a plan moves, keeps live across its peak, or recomputes at a higher cost.

    Parameters
    ----------
    compiled : Compiled
        The step that the plan is for; some of its values may already have moves.
    schedule : Schedule
    link : Link
    at_any_price : bool
        Include every recomputed value, whatever its cost, if no other plan fits.
    """
    problem, graph = compiled.problem, compiled.graph
    number = {name: i for i, name in enumerate(graph.values)}
    already = [op.outputs[0] for op in graph.ops if is_move(op)]
    runs = np.bincount(schedule.array(), minlength=problem.n_ops)
    live = _live_across_peak(problem, schedule)
    late = set(schedule.late_moves(problem))
    found = []
    for name in dict.fromkeys([*movable(compiled), *already]):
        maker = int(problem.producer()[number[name]])
        again = runs[maker] > 1 or maker in late
        expensive = at_any_price or (len(problem.moves) and problem.moves[maker])
        expensive = expensive or problem.cost[maker] > link.seconds(int(problem.nbytes[number[name]]))
        if live[number[name]] or (again and expensive):
            found.append(name)
    return found


def _live_across_peak(problem: Problem, schedule: Schedule) -> Flags:
    """Flag the values that are live across a step near the peak without being used by it. Shape (n_values,)."""
    life = problem.lifetimes
    near = simulate(problem, schedule).step_bytes
    hot = np.concatenate([[0], np.cumsum(near > _NEAR_PEAK * near.max(initial=0))])
    found = np.zeros(problem.n_values, np.bool_)
    used: dict[int, int] = {}  # root -> step that last made or read it
    for step, op in enumerate(schedule.order):
        for root in {int(life.root[v]) for v in problem.inputs(op)}:
            if root in used and hot[step] > hot[used[root] + 1]:
                found[root] = True
            used[root] = step
        used.update(dict.fromkeys((int(life.root[v]) for v in problem.outputs(op)), step))
    return found


def moved(compiled: Compiled, schedule: Schedule) -> Moved | None:
    """Return the moves of a schedule at the prices that it was planned with, None if it has none."""
    problem = compiled.problem
    if not len(problem.moves):
        return None
    late, seen = set(schedule.late_moves(problem)), set[int]()
    again = []
    for op in schedule.order:
        if problem.moves[op] and (op in seen or op in late):
            again.append(op)
        seen.add(op)
    if not again:
        return None
    total = problem.plain_cost()
    return Moved(
        tuple(compiled.graph.ops[op].outputs[0] for op in again),
        sum(int(problem.nbytes[problem.outputs(op)[0]]) for op in again),
        float(problem.cost[again].sum()) / total if total else 0.0,
    )
