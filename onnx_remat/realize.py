"""Schedule -> file: choose the control edges and private values that make ONNX Runtime keep it, then write it down."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from onnx_remat.compile import OpTable, attributes
from onnx_remat.graph import Graph, Op
from onnx_remat.memory import simulate
from onnx_remat.pins import choose_pins, heavy_steps, light_limit
from onnx_remat.rewrite import Rewritten, pin_slot, rewrite
from onnx_remat.schedule import Problem, Schedule
from onnx_remat.shapes import Tensor
from onnx_remat.sharing import choose_private, unroll


def realize(
    graph: Graph,
    tensors: Mapping[str, Tensor],
    table: OpTable,
    problem: Problem,
    schedule: Schedule,
    limit: int,
    metadata: Mapping[str, str],
    private: Collection[int] = (),
    exposed: Collection[int] = (),
) -> Rewritten:
    """Write a schedule so that stock ONNX Runtime executes it in order and within its liveness peak.

    Parameters
    ----------
    graph, tensors, table, problem
        The original in its views.
    schedule : Schedule
        What to write.
    limit : int
        Bytes of peak that sharing of buffers must not exceed.
    metadata : mapping of str to str
        Model metadata to record.
    private : collection of int
        Occurrences that must be private because the file, as ONNX Runtime optimises it, exceeded the limit otherwise.
    exposed : collection of int
        Steps whose shapes turned out to be known all the same.
    """
    absorbed = np.array([_is_absorbed(graph, op) for op in graph.ops], np.bool_)
    fused = {name for op in graph.ops if absorbed[op.index] for name in op.writes}
    unrolled = unroll(problem, schedule)
    light = light_limit(problem, schedule, limit)
    heavy = heavy_steps(problem, schedule, light)
    views = problem.alias_slot[problem.out_ptr[:-1]] >= 0 if problem.n_ops else np.zeros(0, np.bool_)
    views_made = {name for op in graph.ops if views[op.index] for name in op.writes}
    slots = [pin_slot(graph, tensors, op, fused) for op in graph.ops]
    pinnable = np.array([slot is not None for slot in slots], np.bool_)
    pins = choose_pins(problem, schedule, heavy, pinnable, table.foldable, ~absorbed)
    can_hide = pinnable[schedule.array()]
    can_hide[list(exposed)] = False
    sharing = choose_private(unrolled, limit, light, can_hide, sorted(private))
    return rewrite(
        graph, tensors, schedule, unrolled, slots, pins, sharing.group, sharing.leaders, views_made, metadata
    )


def settle(graph: Graph, problem: Problem, schedule: Schedule, limit: int) -> Schedule:
    """Move each absorbed Transpose to just before its first reader, where that keeps the peak at or under `limit`.

    The runtime computes it there, as part of its reader, or not at all; elsewhere in the schedule it would only seem
    to stand in for its input.
    """
    order = list(schedule.order)
    absorbed = {op.index for op in graph.ops if _is_absorbed(graph, op)}
    reads = [set(problem.inputs(op)) for op in range(problem.n_ops)]
    for step in reversed(range(len(order))):
        op = order[step]
        if op not in absorbed:
            continue
        made = problem.outputs(op)[0]
        reader = next((t for t in range(step + 1, len(order)) if made in reads[order[t]]), step)
        if reader > step + 1:
            moved = [*order[:step], *order[step + 1 : reader], op, *order[reader:]]
            if _same_inputs(problem, order, step, reader) and simulate(problem, moved).peak <= limit:
                order = moved
    return Schedule(tuple(order))


def _same_inputs(problem: Problem, order: Sequence[int], step: int, reader: int) -> bool:
    """Are the inputs of a step not made anew before `reader`?"""
    inputs = set(problem.inputs(order[step]))
    return not any(inputs.intersection(problem.outputs(op)) for op in order[step + 1 : reader])


def _is_absorbed(graph: Graph, op: Op) -> bool:
    """Is it a Transpose that ONNX Runtime makes part of the matrix products (or Transposes) that read it?

    Nothing is put between it and them, and it triggers nothing, lest it become a copy of its own again.
    """
    if op.node.op_type != "Transpose":
        return False
    perm = list(attributes(op.node).get("perm", ()))  # type: ignore[call-overload]
    last = len(perm) - 1
    if last < 1 or perm != [*range(last - 1), last, last - 1]:
        return False
    readers = [graph.ops[i].node.op_type for i in graph.nx.successors(op.outputs[0])]
    return bool(readers) and all(reader in ("MatMul", "Gemm", "Transpose") for reader in readers)
