"""What is decided about a file before it is written, what came of it, and where the file says so."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import onnx

from onnx_remat.ir.shapes import TAG
from onnx_remat.memory.problem import Ints, Schedule
from onnx_remat.write.control_edges import Pin
from onnx_remat.write.private_buffers import Unrolled

RECOMPUTE_KEY = TAG + "recompute_of"
CONTROL_KEY = TAG + "control_edge"
BUDGET_KEY = TAG + "budget_bytes"
RUN_BY_KEY, PROVIDER_KEY = TAG + "run_by", TAG + "provider"
WORKSPACE_KEY = TAG + "cudnn_workspace_bytes"
CLONES_KEY, EDGES_KEY = TAG + "recomputed", TAG + "control_edges"
"""Model metadata: first results of the recomputed nodes and of the control edges' Unsqueezes, as JSON lists."""
MOVES_KEY = TAG + "moved"
"""Model metadata, where values are moved to the host and back: their names once back, as a JSON list."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A rewritten model and what was done to it.

    Attributes
    ----------
    model : onnx.ModelProto
    recomputed : tuple of str
        Labels of the recomputed nodes, once per recompute, in execution order.
    control_edges : int
        Edges added to pin the order, a node each.
    private_values : int
        Values given a buffer of their own.
    nodes_added : int
        Recomputes and the nodes that make up control edges and hide shapes.
    occurrences : tuple of str
        Name of each occurrence of a value, numbered as in `private_buffers.Unrolled`.
    rounded : tuple of str
        Values around which ONNX Runtime rounds in one of the two files only; see `rounding`.
    moved : tuple of str
        Values that were brought back from the host, once per move.
    """

    model: onnx.ModelProto
    recomputed: tuple[str, ...]
    control_edges: int
    private_values: int
    nodes_added: int
    occurrences: tuple[str, ...]
    rounded: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Decisions:
    """All that is decided about a file before it is written.

    Attributes
    ----------
    schedule, unrolled : Schedule, Unrolled
        What to write.
    slots : sequence of int or None
        Per op, the input slot that control edges and shape hiding go through, from `control_edges.pin_slot`.
    pins : sequence of Pin
        Control edges, from `control_edges.choose_pins`.
    group : int32 (n_occurrences,)
        Private group of each occurrence, -1 for none, from `private_buffers.choose_private`.
    leaders : sequence of int
        Occurrences whose own step must hide their shape; the other members of a group inherit it.
    drops : collection of int
        Dropped occurrences to give a reader, so that the runtime frees them; the rest are too small to matter.
    views : collection of str
        Values made by Reshape and its like: the runtime fuses a Reshape of known shape into the one before it, and
        the control edge would be lost, so an edge through one of these hides its shape in any case.
    """

    schedule: Schedule
    unrolled: Unrolled
    slots: Sequence[int | None]
    pins: Sequence[Pin]
    group: Ints
    leaders: Sequence[int]
    drops: Collection[int]
    views: Collection[str]


def listed(text: str) -> list[str]:
    """The names that one of these keys lists; ValueError for anything else."""
    names = json.loads(text)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("not a list of names")
    return names
