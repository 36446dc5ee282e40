"""Graphs of one output per node, counted by plain liveness: published ones, from JSON, and synthetic ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from onnx_remat.memory.problem import BACKWARD, FORWARD, Problem


def problem_of(
    nbytes: Sequence[int], cost: Sequence[float], edges: Sequence[Sequence[int]], backward: Sequence[int]
) -> Problem:
    """A graph with one output per node as a `Problem` counted by plain liveness."""
    n = len(nbytes)
    reads: list[list[int]] = [[] for _ in range(n)]
    for producer, consumer in edges:
        reads[consumer].append(producer)
    none = np.zeros(n, np.bool_)
    return Problem(
        in_ptr=np.cumsum([0, *map(len, reads)]).astype(np.int32),
        in_values=np.array([v for read in reads for v in read], np.int32),
        out_ptr=np.arange(n + 1, dtype=np.int32),
        out_values=np.arange(n, dtype=np.int32),
        nbytes=np.asarray(nbytes, np.int64),
        resident=none,
        is_output=none,
        shape_class=np.full(n, -1, np.int32),
        poolable=none,
        alias_slot=np.full(n, -1, np.int32),
        inplace_ptr=np.zeros(n + 1, np.int32),
        inplace_slots=np.zeros(0, np.int32),
        droppable=np.zeros(n, np.int8),
        workspace=np.zeros(n, np.int64),
        rerun_workspace=np.zeros(n, np.int64),
        cost=np.asarray(cost, np.float64),
        recomputable=~none,
        phase=np.where(np.asarray(backward, np.bool_), BACKWARD, FORWARD).astype(np.int8),
        base_bytes=0,
        hold_unread=False,
    )


def load(path: Path) -> tuple[Problem, int]:
    """A published graph and its peak without recompute."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return problem_of(data["bytes"], data["cost"], data["edges"], data["backward"]), int(data["base_peak"])


def synthetic(n_ops: int, seed: int = 0) -> Problem:
    """A training step of repeated blocks: chains of ops with skips, mirrored by a backward pass."""
    rng = np.random.default_rng(seed)
    block = 16
    sizes, costs = rng.integers(1, 64, block) * 1024, rng.integers(1, 100, block)
    n = n_ops // 2
    edges = [(i - 1, i) for i in range(1, n)] + [(i - block, i) for i in range(block, n, block)]
    edges += [(2 * n - 1 - b, 2 * n - 1 - a) for a, b in edges] + [(i, 2 * n - 1 - i) for i in range(n)]
    edges = sorted(set(edges), key=lambda edge: (edge[1], edge[0]))
    place = np.concatenate([np.arange(n), np.arange(n)[::-1]]) % block
    return problem_of(sizes[place].tolist(), costs[place].tolist(), edges, [0] * n + [1] * n)
