"""Minimum cuts that weigh bytes held against the cost of what runs again.

Two 0/1 variables, "this result is needed" and "this op runs again", make every term of that trade pairwise
submodular, hence one cut: source -> what is needed -> the op that makes it -> the results which that one reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from ortools.graph.python import max_flow

from onnx_remat.memory.problem import Flags, Floats, Ints

_UNITS = 10**9  # the cost of all ops in integer capacities, rounded down
_FOREVER = 10**15


def arcs(tails: ArrayLike, heads: ArrayLike) -> Ints:
    """Arcs as `Network` has them, int32 (n, 2); one end may be the same of all.

    >>> arcs(0, [2, 3]).tolist()
    [[0, 2], [0, 3]]
    """
    return np.stack(np.broadcast_arrays(tails, heads), 1).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Cut:
    """A minimum cut: its value (rounded down), the bytes held, the cost of what runs again, and which arcs that are."""

    value: float
    size: float
    cost: float
    again: Ints


@dataclass(frozen=True, slots=True)
class Network:
    """The arcs by kind; vertices are 0, the source, 1, the sink, and whatever numbers the caller gives.

    Attributes
    ----------
    certain : int32 (n, 2)
        What follows from what: from the source to a result that is needed, from an op that runs to what it reads.
    held : int32 (n_held, 2)
        From a result to the op that makes it (1 where that must not run again): holding the result cuts it.
    sizes : float64 (n_held,)
        Bytes of each such result.
    again : int32 (n_again, 2)
        From an op to the sink, or to what says that it has not run before: running it again cuts it.
    costs : float64 (n_again,)
        Cost of each such op.
    """

    certain: Ints
    held: Ints
    sizes: Floats
    again: Ints
    costs: Floats

    def cut(self, price: float, cost: float = 1.0) -> Cut:
        """The least ``price * bytes held + cost * cost of the ops that run again``."""
        scale = _UNITS / (float(self.costs.sum()) or 1.0)
        tails, heads = np.concatenate([self.certain, self.held, self.again]).T
        capacity = np.full(len(tails), _FOREVER, np.int64)
        first, middle = len(self.certain), len(self.certain) + len(self.held)
        capacity[first:middle] = np.minimum(self.sizes * price * scale, 0.01 * _FOREVER).astype(np.int64)
        capacity[middle:] = (self.costs * cost * scale).astype(np.int64)
        flow = max_flow.SimpleMaxFlow()
        flow.add_arcs_with_capacity(np.ascontiguousarray(tails), np.ascontiguousarray(heads), capacity)
        flow.solve(0, 1)
        near: Flags = np.zeros(int(max(tails.max(initial=1), heads.max(initial=1))) + 1, np.bool_)
        near[np.asarray(flow.get_source_side_min_cut(), np.int64)] = True
        near[0] = True
        kept, again = (near[arcs[:, 0]] & ~near[arcs[:, 1]] for arcs in (self.held, self.again))
        return Cut(
            flow.optimal_flow() / scale, float(self.sizes[kept].sum()), float(self.costs[again].sum()),
            np.flatnonzero(again).astype(np.int32),
        )  # fmt: skip
