"""Schedule -> file: choose the control edges and private values that make ONNX Runtime follow it, then write it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from onnx_remat.ir.dropout import is_draw, is_product, with_draws_at_products
from onnx_remat.ir.graph import Op, attributes
from onnx_remat.ir.op_semantics import semantics
from onnx_remat.ir.opsets import STANDARD
from onnx_remat.memory.buffers import simulate
from onnx_remat.memory.problem import Problem, Schedule
from onnx_remat.ort.host_state import runs_when_due
from onnx_remat.ort.known_bugs import unsqueezed_badly
from onnx_remat.ort.moves import is_move
from onnx_remat.ort.prepare import Compiled
from onnx_remat.write.control_edges import (
    choose_pins,
    heavy_steps,
    light_limit,
    never_waiting,
    pin_slot,
    unsqueezable,
)
from onnx_remat.write.decided import Decisions, Rewritten
from onnx_remat.write.private_buffers import choose_private, repeated, unroll
from onnx_remat.write.writer import rewrite


def realize(
    compiled: Compiled,
    schedule: Schedule,
    limit: int,
    metadata: Mapping[str, str],
    private: Collection[int] = (),
    exposed: Collection[int] = (),
    direct: Collection[str] = (),
) -> Rewritten:
    """Write a schedule so that stock ONNX Runtime executes it in order and within its liveness peak.

    Parameters
    ----------
    compiled : Compiled
        The original.
    schedule : Schedule
        The schedule to write.
    limit : int
        Bytes of peak that buffer reuse must not exceed.
    metadata : mapping of str to str
        Model metadata to record.
    private : collection of int
        Occurrences that must be private because a file without this exceeded the limit after ONNX Runtime's
        optimisations.
    exposed : collection of int
        Steps whose shapes ONNX Runtime inferred although they were hidden.
    direct : collection of str
        Values that no helper node may read or pass on: with one there, ONNX Runtime would round differently.
    """
    graph, tensors, problem = compiled.graph, compiled.tensors, compiled.problem
    schedule = with_draws_at_products(graph, problem, schedule)
    direct = unsqueezed_badly(graph, tensors).union(direct)
    absorbed = np.array([_is_absorbed(compiled, op) for op in graph.ops], np.bool_)
    when_due = [is_move(op) or runs_when_due(compiled, op) for op in graph.ops]  # by `session.lean_graph`
    moves = np.array(when_due, np.bool_)
    fused = {name for op in graph.ops if absorbed[op.index] for name in op.writes}
    unrolled = unroll(problem, schedule)
    light = light_limit(problem, schedule, limit)
    heavy = heavy_steps(problem, schedule, light) & ~moves[schedule.array()]
    views = problem.alias_slot[problem.out_ptr[:-1]] >= 0 if problem.n_ops else np.zeros(0, np.bool_)
    views_made = {name for op in graph.ops if views[op.index] for name in op.writes}
    on_host = [compiled.kernels.host_slots(op.node) for op in graph.ops]
    unpinned = never_waiting(graph, tensors)
    slots = [
        None
        if when_due[op.index] or op.index in unpinned
        else pin_slot(graph, tensors, op, fused, direct, on_host[op.index])
        for op in graph.ops
    ]
    # A draw and the first product are written as one Dropout. It waits through the input that both read, or not at all:
    # its mask exists only after it. A recomputed product waits through the mask.
    stuck = {op.inputs[1] for op in graph.ops if is_product(op) and slots[op.index] != 0}
    slots = [slots[op.index] if stuck.isdisjoint(_mask(op)) else None for op in graph.ops]
    products = np.array([is_product(op) for op in graph.ops], np.bool_)
    able = np.array([slot is not None for slot in slots], np.bool_)
    pinnable = able[schedule.array()] | (products[schedule.array()] & repeated(schedule.array()))
    tensor = np.array([unsqueezable(tensors[op.writes[0]].dtype) for op in graph.ops], np.bool_)
    plain = np.array([direct.isdisjoint(op.writes) for op in graph.ops], np.bool_)
    triggers = ~absorbed & tensor & ~moves & plain
    pins = choose_pins(problem, schedule, heavy, pinnable, compiled.table.foldable, triggers)
    stated = np.array([semantics(op.node.domain, op.node.op_type).stated for op in graph.ops], np.bool_)
    can_hide = pinnable & ~stated[schedule.array()]
    can_hide[list(exposed)] = False
    sharing = choose_private(unrolled, limit, light, can_hide, sorted(private))
    dropped = np.flatnonzero(unrolled.dropped & plain[schedule.array()[unrolled.step]]).tolist()
    drops = [i for i in dropped if problem.nbytes[unrolled.source[i]] > light]
    decisions = Decisions(
        schedule,
        unrolled,
        slots,
        pins,
        sharing.group,
        sharing.leaders,
        frozenset(drops),
        frozenset(views_made),
    )
    return rewrite(graph, tensors, decisions, metadata)


def _mask(op: Op) -> tuple[str, ...]:
    """Return the mask of either part of a split Dropout, nothing for other ops."""
    return op.outputs[:1] if is_draw(op) else op.inputs[1:2] if is_product(op) else ()


_MOST_SINGLE_SHIFTS = 300  # simulated one by one if shifting all of them at once does not fit


def settle(compiled: Compiled, problem: Problem, schedule: Schedule, limit: int) -> Schedule:
    """Place ops where they will run: draws next to their products, absorbed Transposes just before their first readers.

    Transposes are shifted if that keeps the peak at or below `limit`. The runtime computes them there, as part of their
    readers, or not at all; a schedule that keeps an earlier Transpose instead of its input would be misleading.
    `problem` is the compiled one, or one with other rules for buffer reuse.
    """
    graph = compiled.graph
    schedule = with_draws_at_products(graph, problem, schedule)
    targets = _first_readers(problem, schedule, {op.index for op in graph.ops if _is_absorbed(compiled, op)})
    order = list(schedule.order)
    together = _shifted(order, targets)
    if simulate(problem, together).peak <= limit:
        return Schedule(tuple(together))
    chosen: dict[int, int] = {}
    for step, reader in list(targets.items())[:_MOST_SINGLE_SHIFTS]:
        if simulate(problem, _shifted(order, chosen | {step: reader})).peak <= limit:
            chosen[step] = reader
    return Schedule(tuple(_shifted(order, chosen)))


def _first_readers(problem: Problem, schedule: Schedule, absorbed: Collection[int]) -> dict[int, int]:
    """Map each absorbed step to its first reader, if not adjacent and if the step would read the same values there."""
    next_read: dict[int, int] = {}
    next_made: dict[int, int] = {}
    next_renewed: dict[int, int] = {}  # per resident, the step that overwrites it
    life = problem.lifetimes
    targets: dict[int, int] = {}
    for step in reversed(range(len(schedule.order))):
        op = schedule.order[step]
        if op in absorbed:
            reader = next_read.get(problem.outputs(op)[0], step)
            remade = min((next_made.get(v, reader) for v in problem.inputs(op)), default=reader)
            renewed = min((next_renewed.get(int(life.root[v]), reader) for v in problem.inputs(op)), default=reader)
            if reader > step + 1 and min(remade, renewed) >= reader:
                targets[step] = reader
        for value in problem.outputs(op):
            next_made[value] = step
            next_read.pop(value, None)
            if len(problem.donates) and problem.donates[value] >= 0:
                next_renewed[int(problem.donates[value])] = step
        next_read.update(dict.fromkeys(problem.inputs(op), step))
    return targets


def _shifted(order: Sequence[int], targets: Mapping[int, int]) -> list[int]:
    """Return `order` with each step in `targets` shifted to just before the step it maps to."""
    before: dict[int, list[int]] = {}
    for step in sorted(targets):
        before.setdefault(targets[step], []).append(order[step])
    result: list[int] = []
    for step, op in enumerate(order):
        result.extend(before.get(step, ()))
        if step not in targets:
            result.append(op)
    return result


def _is_absorbed(compiled: Compiled, op: Op) -> bool:
    """Whether an op is a Transpose that ONNX Runtime merges into the matrix products (or Transposes) that read it.

    No helper is inserted between them, and it triggers no control edge: it would become a separate copy again.
    """
    if op.kind != (STANDARD, "Transpose"):
        return False
    perm = list(attributes(op.node).get("perm", ()))
    last = len(perm) - 1
    if last < 1 or perm != [*range(last - 1), last, last - 1]:
        return False
    graph = compiled.graph
    readers = [graph.ops[i].kind for i in graph.readers[op.outputs[0]]]
    return bool(readers) and all(reader in compiled.kernels.absorbs_transpose for reader in readers)
