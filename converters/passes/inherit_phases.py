"""Label the nodes that other passes added without a phase."""

from __future__ import annotations

import onnx_ir as ir

from .base import Fact, rewrite


@rewrite(ensures=[Fact.PHASES])
def inherit_phases(model: ir.Model) -> None:
    """Label a node without a phase as forward if the forward pass reads it, and as backward otherwise."""
    for node in reversed(model.graph):
        if "phase" not in node.metadata_props:
            readers = [user.metadata_props["phase"] for value in node.outputs for user, _ in value.uses()]
            node.metadata_props["phase"] = "forward" if "forward" in readers else "backward"
