"""Schedule -> file: choose the control edges and private values that make ONNX Runtime keep it, then write it down."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from onnx_remat.compile import OpTable
from onnx_remat.graph import Graph
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
    unrolled = unroll(problem, schedule)
    light = light_limit(problem, schedule, limit)
    heavy = heavy_steps(problem, schedule, light)
    pinnable = [pin_slot(graph, tensors, op) is not None for op in graph.ops]
    pins = choose_pins(problem, schedule, heavy, pinnable, table.foldable)
    can_hide = np.array(pinnable, np.bool_)[schedule.array()]
    can_hide[list(exposed)] = False
    sharing = choose_private(unrolled, limit, light, can_hide, sorted(private))
    return rewrite(graph, tensors, schedule, unrolled, pins, sharing.group, sharing.leaders, metadata)
