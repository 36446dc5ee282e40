"""Small edits of a graph, for both parts of a step."""

from __future__ import annotations

from typing import Any

import onnx
from onnx import helper


def append(graph: onnx.GraphProto, op_type: str, inputs: list[str], output: str, **more: Any) -> None:
    """Append a node, labelled as backward pass."""
    node = helper.make_node(op_type, inputs, [output], name=f"{op_type}->{output}", **more)
    node.metadata_props.add(key="phase", value="backward")
    graph.node.append(node)
