"""What is fused, as plans and bounds see it: prices of recomputes within kernels, and problems that leave it out."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import numpy as np

from onnx_remat.fuse.moves import MOVES
from onnx_remat.fuse.ops import VIEWS, is_exact, may_fuse
from onnx_remat.ir.graph import Graph
from onnx_remat.memory.problem import Flags, Floats, Problem
from onnx_remat.ort.prepare import Compiled
from onnx_remat.session.fusing import replaceable

LEAST_SHARE, LEAST_SHARE_OF_FUNCTION = 0.05, 0.3
"""Least share of a node's time within a kernel, where nothing it reads or writes is in memory; of a node like Exp."""


def fused_cost(problem: Problem, graph: Graph) -> Floats:
    """Return the cost of recomputing each op next to elementwise readers, so that one kernel computes both.

    The cost is the op's own time times the share of its bytes that still pass through memory: inputs from elementwise
    nodes do not, nor do results that only elementwise nodes read.
    """
    life, cost = problem.lifetimes, problem.cost.copy()
    can = _fusible(graph) & ~_named(graph, MOVES)  # whether one moves elements within a kernel depends on its sizes
    for op in np.flatnonzero(can).tolist():
        moved = left = 0
        for value in dict.fromkeys(problem.inputs(op)):
            maker, nbytes = life.maker[life.root[value]], int(problem.nbytes[value])
            moved += nbytes
            left += nbytes if maker < 0 or not can[maker] else 0
        for value in problem.outputs(op):
            readers = life.readers[life.reader_ptr[value] : life.reader_ptr[value + 1]]
            moved += int(problem.nbytes[value])
            left += int(problem.nbytes[value]) if problem.is_output[value] or not can[readers].all() else 0
        if moved:
            exact = is_exact(graph.ops[op].node)
            cost[op] *= max(left / moved, LEAST_SHARE if exact else LEAST_SHARE_OF_FUNCTION)
    return cost


def outside_kernels(problem: Problem, compiled: Compiled) -> Problem:
    """Return a problem whose bounds hold for any session that fuses, with any fusion.

    While a kernel runs, its inner values have no buffer and its results may overwrite any of its inputs: so nothing is
    counted while a node runs that may be part of a kernel, and no workspace of a convolution that oneDNN may compute.
    While any other node runs, every kernel has finished or not begun, and the same values are allocated as if its nodes
    ran one after the other. What such nodes make may be computed again inside a kernel, so their cost is not counted.
    """
    problem = outside_pads(problem, compiled)
    graph, workspace = compiled.graph, problem.workspace.copy()
    several, single = replaceable(compiled)
    workspace[list(single)] = np.minimum(workspace[list(single)], 0)
    inside = _fusible(graph) | _named(graph, VIEWS)
    cost = np.where(inside, 0.0, problem.cost)
    inside[list(several)] = True
    if (
        compiled.kernels.device != "cpu"
    ):  # slices side by side, and products of them, may be one value: `session.windows`
        inside |= _named(graph, {"Concat"})
    return _uncounted(replace(problem, workspace=workspace, cost=cost), inside)


def outside_slab(problem: Problem, least: int) -> Problem:
    """Return a problem that counts no value of less than `least` bytes, but outputs: such a value lies outside of a
    session's slab, and a loop's bookkeeping contains it."""
    small = (problem.nbytes < least) & ~problem.is_output & ~problem.resident
    return replace(problem, nbytes=np.where(small, 0, problem.nbytes))


def outside_pads(problem: Problem, compiled: Compiled) -> Problem:
    """Return a problem whose bounds hold where ONNX Runtime lets the reader of a Pad pad by itself.

    In a rewritten file that may happen where it does not in the original, as a recomputed Pad may have one reader.
    """
    pads = _named(compiled.graph, {"Pad"})
    if not pads.any():
        return problem
    free = replace(problem, cost=np.where(pads, 0.0, problem.cost))
    return _uncounted(free, _with_readers(problem, pads))


def outside_fusions(problem: Problem, compiled: Compiled, optimized: Graph) -> Problem:
    """Return a problem whose bounds hold for what ONNX Runtime merges or fuses; `optimized` is its graph of the step.

    A value that `optimized` lacks has no buffer. In a rewritten file ONNX Runtime may fuse more, as a recomputed value
    has fewer readers. As in `outside_kernels`, nothing is counted while a node runs that may be within a fused node, or
    that may read, in place of its input, what this was made of.
    """
    graph, life = compiled.graph, problem.lifetimes
    gone = np.array([name not in optimized.values for name in graph.values], np.bool_) & (life.maker >= 0)
    passed = _named(graph, _PASSED_OVER) | _scales(compiled)
    passed[life.maker[gone]] = True
    inside = _fusible(graph) | _named(graph, VIEWS) | _with_readers(problem, passed)
    kept = np.zeros(problem.n_values, np.bool_)
    kept[life.root[~gone]] = True  # the buffer of a view that is left
    nbytes, cost = np.where(gone & ~kept, 0, problem.nbytes), np.where(inside, 0.0, problem.cost)
    return _uncounted(replace(problem, nbytes=nbytes, cost=cost), inside)


def _uncounted(problem: Problem, ops: Flags) -> Problem:
    """Return a problem that counts nothing while some ops run."""
    return replace(problem, workspace=np.where(ops, -int(problem.nbytes.sum()), problem.workspace))


def _with_readers(problem: Problem, ops: Flags) -> Flags:
    """Return some ops and those that read their results."""
    life, found = problem.lifetimes, ops.copy()
    for op in np.flatnonzero(ops).tolist():
        for value in problem.outputs(op):
            root = life.root[value]
            found[life.readers[life.reader_ptr[root] : life.reader_ptr[root + 1]]] = True
    return found


_PASSED_OVER = MOVES | {"Cast", "Concat", "Dropout", "Gather", "Identity", "Pad"}
"""Nodes whose readers ONNX Runtime may let read their inputs."""


def _scales(compiled: Compiled) -> Flags:
    """Return which ops multiply or divide by a single number, as a product may within itself."""
    tensors = compiled.tensors
    return np.array(
        [
            op.node.op_type in ("Div", "Mul") and any(math.prod(tensors[name].shape) == 1 for name in op.node.input)
            for op in compiled.graph.ops
        ],
        np.bool_,
    )


def _fusible(graph: Graph) -> Flags:
    """Return which ops may be part of a fused kernel, their types and shapes aside."""
    return np.array([may_fuse(op.node) for op in graph.ops], np.bool_)


def _named(graph: Graph, names: Collection[str]) -> Flags:
    return np.array([not op.node.domain and op.node.op_type in names for op in graph.ops], np.bool_)
