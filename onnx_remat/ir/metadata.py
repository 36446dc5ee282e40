"""Metadata of a model and of its nodes: the keys that onnx-remat writes, reading and writing.

This module does not import onnx: a training loop needs the keys too, and onnx would take its memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

TAG = "onnx_remat."
"""Prefix of these keys and of every name that rewriting creates. In a dimension's name, ``=`` and the real size or
dimension follow."""

VERSION_KEY = TAG + "version"
BUDGET_KEY = TAG + "budget_bytes"
RUN_BY_KEY = TAG + "run_by"
"""What the file was planned to be run by, see `Options.run_by`."""
PEAK_KEY = TAG + "original_peak_bytes"
PLANNED_PEAK_KEY = TAG + "planned_peak_bytes"
DIMS_KEY = TAG + "dims"
"""The sizes of symbolic dimensions that a rewrite was planned for, as JSON."""
PROVIDER_KEY = TAG + "provider"
WORKSPACE_KEY = TAG + "cudnn_workspace_bytes"
LEVEL_KEY = TAG + "level"
ARENA_KEY = TAG + "arena"
FUSE_KEY = TAG + "fuse"

CLONES_KEY = TAG + "recomputed"
"""First results of the recomputed nodes, as a JSON list."""
EDGES_KEY = TAG + "control_edges"
"""First results of the control edges' Unsqueezes, as a JSON list."""
MOVES_KEY = TAG + "moved"
"""Names of the values that moves copy back from the host, as a JSON list; only in files with moves."""
COPIES_KEY = TAG + "copies"
"""How copies to the host and back run, as JSON, see `session.copies.Stated`."""
SHAPES_KEY = TAG + "shapes"
"""Shapes that a rewrite hides on purpose, as JSON: value -> data type and dimensions."""
BODY_KEY = TAG + "body"
"""The graph is one ``If`` whose then-branch is the step."""

INITIAL_KEY = TAG + "initial"
"""Initial values of a converted step's scalar states, as JSON: input -> number."""

RECOMPUTE_KEY = TAG + "recompute_of"
"""Of a node: the name of the node that it repeats."""
CONTROL_KEY = TAG + "control_edge"
"""Of a node of a control edge: the value that the edge waits for."""


def is_of_a_plan(key: str) -> bool:
    """Whether a key of a model's metadata describes one rewrite instead of the step, so that the next one drops it.

    >>> is_of_a_plan(BUDGET_KEY), is_of_a_plan(INITIAL_KEY), is_of_a_plan("check.error")
    (True, False, False)
    """
    return key.startswith(TAG) and key != INITIAL_KEY


def entries(of: onnx.ModelProto | onnx.NodeProto) -> dict[str, str]:
    """Return the metadata of a model or node."""
    return {entry.key: entry.value for entry in of.metadata_props}


def set_entry(of: onnx.ModelProto | onnx.NodeProto, key: str, value: str) -> None:
    """Set one entry where it is, else append it; a copy of a large model would take as much memory again."""
    entry = next((entry for entry in of.metadata_props if entry.key == key), None)
    if entry is None:
        of.metadata_props.add(key=key, value=value)
    else:
        entry.value = value


def set_entries(of: onnx.ModelProto | onnx.NodeProto, wanted: Mapping[str, str]) -> None:
    """Replace the metadata of a model or node, in this order."""
    del of.metadata_props[:]
    for key, value in wanted.items():
        of.metadata_props.add(key=key, value=value)
