"""Minimum cuts that weigh bytes held against the cost of what runs again.

Two 0/1 variables, "this result is available" and "this op runs again", make every term of that trade pairwise
submodular, hence one cut: source -> what must be available -> the op that makes it -> the results which that
one reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ortools.graph.python import max_flow

from onnx_remat.problem import Flags, Floats, Ints

_UNITS = 10**9  # the cost of all ops in integer capacities, rounded down
_FOREVER = 10**15


@dataclass(frozen=True, slots=True)
class Cut:
    """A minimum cut: its value (rounded down), the bytes held and the cost of the ops in it, and those ops."""

    value: float
    size: float
    cost: float
    again: Ints


@dataclass(frozen=True, slots=True)
class Network:
    """The arcs by kind; vertices are 0, the source, 1, the sink, and whatever numbers the caller gives.

    Attributes
    ----------
    needed : int32 (n,)
        Result vertices that must be available.
    held : int32 (n_held, 2)
        From a result to the op that makes it (1 where that must not run again): holding the result cuts it.
    sizes : float64 (n_held,)
        Bytes of each such result.
    ops : int32 (n_ops,)
        Vertices of the ops that may run again: running one cuts its arc to the sink.
    costs : float64 (n_ops,)
        Cost of each.
    reads : int32 (n, 2)
        From an op to a result it reads.
    """

    needed: Ints
    held: Ints
    sizes: Floats
    ops: Ints
    costs: Floats
    reads: Ints

    def cut(self, price: float, cost: float = 1.0) -> Cut:
        """The least ``price * bytes held + cost * cost of the ops that run again``."""
        scale = _UNITS / (float(self.costs.sum()) or 1.0)
        tails = np.concatenate([np.zeros_like(self.needed), self.held[:, 0], self.ops, self.reads[:, 0]])
        heads = np.concatenate([self.needed, self.held[:, 1], np.ones_like(self.ops), self.reads[:, 1]])
        capacity = np.full(len(tails), _FOREVER, np.int64)
        first = len(self.needed)
        middle, last = first + len(self.held), first + len(self.held) + len(self.ops)
        capacity[first:middle] = np.minimum(self.sizes * price * scale, 0.01 * _FOREVER).astype(np.int64)
        capacity[middle:last] = (self.costs * cost * scale).astype(np.int64)
        flow = max_flow.SimpleMaxFlow()
        flow.add_arcs_with_capacity(tails.astype(np.int32), heads.astype(np.int32), capacity)
        flow.solve(0, 1)
        near: Flags = np.zeros(int(max(tails.max(initial=1), heads.max(initial=1))) + 1, np.bool_)
        near[np.asarray(flow.get_source_side_min_cut(), np.int64)] = True
        kept = near[self.held[:, 0]] & ~near[self.held[:, 1]]
        again = near[self.ops]
        return Cut(
            flow.optimal_flow() / scale, float(self.sizes[kept].sum()), float(self.costs[again].sum()),
            self.ops[again],
        )  # fmt: skip
