"""Schedule -> file: choose the control edges and private values that make ONNX Runtime keep it, then write it down."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from onnx_remat.compile import OpTable, attributes
from onnx_remat.graph import Graph, Op
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
    slots = [pin_slot(graph, tensors, op, fused) for op in graph.ops]
    pinnable = np.array([slot is not None for slot in slots], np.bool_)
    pins = choose_pins(problem, schedule, heavy, pinnable, table.foldable, ~absorbed)
    can_hide = pinnable[schedule.array()]
    can_hide[list(exposed)] = False
    sharing = choose_private(unrolled, limit, light, can_hide, sorted(private))
    return rewrite(graph, tensors, schedule, unrolled, slots, pins, sharing.group, sharing.leaders, metadata)


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
