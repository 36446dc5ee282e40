"""Minimum cuts that trade bytes kept against the cost of recomputes.

With two kinds of 0/1 variables, "this result is needed" and "this op runs again", every term of the trade-off is
pairwise submodular, so one minimum cut solves it: source -> needed result -> the op that makes it -> the op's inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from ortools.graph.python import max_flow

from onnx_remat.memory.problem import Flags, Floats, Ints

_COST_UNITS = 10**9  # integer capacity that stands for the cost of all ops; capacities are rounded down
_UNLIMITED = 10**15  # capacity of an arc that no minimum cut contains


def arcs(tails: ArrayLike, heads: ArrayLike) -> Ints:
    """Return arcs as `Network` stores them, int32 (n, 2); either end may be one vertex for all arcs.

    >>> arcs(0, [2, 3]).tolist()
    [[0, 2], [0, 3]]
    """
    return np.stack(np.broadcast_arrays(tails, heads), 1).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Cut:
    """A minimum cut: its value (rounded down), the bytes kept, the cost of the recomputes, and their arcs."""

    value: float
    size: float
    cost: float
    again: Ints


@dataclass(frozen=True, slots=True)
class Network:
    """A flow network, its arcs by kind. Vertex 0 is the source, 1 the sink; the caller numbers the others.

    Attributes
    ----------
    certain : int32 (n, 2)
        Implications, never cut: from the source to a needed result, from a recomputed op to its inputs.
    kept : int32 (n_kept, 2)
        From a result to the op that makes it, or to the sink if that must not run again: keeping the result cuts it.
    sizes : float64 (n_kept,)
        Bytes of each such result.
    again : int32 (n_again, 2)
        From an op to the sink, or to the vertex for "it has not run yet": recomputing the op cuts it.
    costs : float64 (n_again,)
        Cost of each such op.
    """

    certain: Ints
    kept: Ints
    sizes: Floats
    again: Ints
    costs: Floats

    def cut(self, price: float, cost: float = 1.0) -> Cut:
        """Minimise ``price * bytes kept + cost * cost of the recomputed ops``."""
        scale = _COST_UNITS / (float(self.costs.sum()) or 1.0)
        tails, heads = np.concatenate([self.certain, self.kept, self.again]).T
        capacity = np.full(len(tails), _UNLIMITED, np.int64)
        first, middle = len(self.certain), len(self.certain) + len(self.kept)
        capacity[first:middle] = np.minimum(self.sizes * price * scale, 0.01 * _UNLIMITED).astype(np.int64)
        capacity[middle:] = (self.costs * cost * scale).astype(np.int64)
        flow = max_flow.SimpleMaxFlow()
        flow.add_arcs_with_capacity(np.ascontiguousarray(tails), np.ascontiguousarray(heads), capacity)
        flow.solve(0, 1)
        near: Flags = np.zeros(int(max(tails.max(initial=1), heads.max(initial=1))) + 1, np.bool_)
        near[np.asarray(flow.get_source_side_min_cut(), np.int64)] = True
        near[0] = True
        kept, again = (near[arcs[:, 0]] & ~near[arcs[:, 1]] for arcs in (self.kept, self.again))
        return Cut(
            flow.optimal_flow() / scale, float(self.sizes[kept].sum()), float(self.costs[again].sum()),
            np.flatnonzero(again).astype(np.int32),
        )  # fmt: skip
