"""Decisions about a file before it is written, the result of writing it, and its metadata."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx

from onnx_remat.errors import ModelError
from onnx_remat.ir.metadata import (
    ARENA_KEY,
    BUDGET_KEY,
    CLONES_KEY,
    DIMS_KEY,
    EDGES_KEY,
    FUSE_KEY,
    LEVEL_KEY,
    MOVES_KEY,
    PEAK_KEY,
    PROVIDER_KEY,
    RUN_BY_KEY,
    WORKSPACE_KEY,
    entries,
    set_entries,
)
from onnx_remat.memory.problem import Ints, Schedule
from onnx_remat.ort.kernels.registry import PROVIDERS
from onnx_remat.units import Budget, check_dims, parse_budget
from onnx_remat.write.control_edges import Pin
from onnx_remat.write.private_buffers import Unrolled


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A rewritten model and a record of the changes.

    Attributes
    ----------
    model : onnx.ModelProto
    recomputed : tuple of str
        Labels of the recomputed nodes, once per recompute, in execution order.
    control_edges : int
        Number of control edges that pin the order.
    private_values : int
        Number of values with a buffer of their own.
    nodes_added : int
        Number of recomputes and of helper nodes for control edges and hidden shapes.
    occurrences : tuple of str
        Name of each occurrence of a value, numbered as in `private_buffers.Unrolled`.
    rounded : tuple of str
        Values around which ONNX Runtime rounds in only one of the two files; see `rounding`.
    moved : tuple of str
        Values copied back from the host, once per move.
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
    """All decisions about a file before it is written.

    Attributes
    ----------
    schedule, unrolled : Schedule, Unrolled
        The schedule to write.
    slots : sequence of int or None
        Per op, the input slot for control edges and shape hiding, from `control_edges.pin_slot`.
    pins : sequence of Pin
        Control edges, from `control_edges.choose_pins`.
    group : int32 (n_occurrences,)
        Private group of each occurrence, -1 for none, from `private_buffers.choose_private`.
    leaders : sequence of int
        Occurrences whose own step must hide their shape; the other members of a group inherit it.
    drops : collection of int
        Unread occurrences that get a reader, so that the runtime frees them; the others are too small to matter.
    views : collection of str
        Values made by Reshape and similar ops: the runtime fuses a Reshape of known shape into the one before it and
        would drop the control edge between them, so an edge through one of these always hides its shape.
    """

    schedule: Schedule
    unrolled: Unrolled
    slots: Sequence[int | None]
    pins: Sequence[Pin]
    group: Ints
    leaders: Sequence[int]
    drops: Collection[int]
    views: Collection[str]


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan in a rewritten file's metadata.

    Attributes
    ----------
    budget, original_peak : int
        Bytes of its budget, and of the peak of the original's tensors.
    recomputed, control_edges, moved : sequence of str
        First results of the recomputed nodes and of the control edges' Unsqueezes, and values copied back.
    dims : mapping of str to int
        Sizes of symbolic dimensions.
    run_by, provider, level : str
        As in `Options`; `level` of a plain session.
    workspace : int or None
        Bytes allowed for a library's workspace, if it was planned for a device.
    fuse, arena : bool
        As in `Options`.
    """

    budget: int
    original_peak: int
    recomputed: Sequence[str]
    control_edges: Sequence[str]
    moved: Sequence[str]
    dims: Mapping[str, int]
    run_by: str
    provider: str
    workspace: int | None
    level: str
    fuse: bool
    arena: bool = False


def planned(model: onnx.ModelProto, name: str) -> Planned:
    """Read the plan from a file's metadata; messages call the file `name`.

    Raises
    ------
    ModelError
        The metadata lacks the plan: the file was not rewritten, or a tool dropped or damaged its metadata.
    """
    notes = entries(model)
    try:
        budget, provider = parse_budget(Budget(int(notes[BUDGET_KEY]))).bytes, notes.get(PROVIDER_KEY, "cpu")
        if budget is None or provider not in PROVIDERS:
            raise ValueError(provider)
        return Planned(
            budget, int(notes[PEAK_KEY]), _listed(notes[CLONES_KEY]), _listed(notes[EDGES_KEY]),
            _listed(notes.get(MOVES_KEY, "[]")), check_dims(json.loads(notes[DIMS_KEY])),
            notes.get(RUN_BY_KEY, "session"), provider, int(notes[WORKSPACE_KEY]) if WORKSPACE_KEY in notes else None,
            notes.get(LEVEL_KEY, "every"), notes.get(FUSE_KEY) != "0", notes.get(ARENA_KEY) == "1",
        )  # fmt: skip
    except (KeyError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{name} does not say what was planned: onnx-remat did not write it, or a tool dropped or damaged its "
            "metadata"
        ) from error


def recorded(model: onnx.ModelProto, metadata: Mapping[str, str]) -> onnx.ModelProto:
    """Return a copy of a model that keeps a budget as it is, with the metadata of a plan.

    What an earlier rewrite said of the nodes still holds.
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    before = {key: value for key, value in entries(model).items() if key not in _OF_OPTIONS}
    set_entries(made, {CLONES_KEY: "[]", EDGES_KEY: "[]"} | before | dict(metadata))
    return made


_OF_OPTIONS = (PROVIDER_KEY, LEVEL_KEY, WORKSPACE_KEY, FUSE_KEY, ARENA_KEY)
"""Model metadata that some plans have and others lack."""


def _listed(text: str) -> list[str]:
    """Parse a JSON list of names; raise ValueError for anything else."""
    names = json.loads(text)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("not a list of names")
    return names
