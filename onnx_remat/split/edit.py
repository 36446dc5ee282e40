"""Small edits of a graph, for both parts of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
from onnx import helper

from onnx_remat.ir.body import rename_captures


def rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Rename values wherever nodes, and bodies of nodes, produce or read them."""
    for node in graph.node:
        for field in (node.input, node.output):
            for slot, name in enumerate(field):
                if name in names:
                    field[slot] = names[name]
        rename_captures(node, names)
    for value in (*graph.output, *graph.value_info):
        value.name = names.get(value.name, value.name)


def append(graph: onnx.GraphProto, op_type: str, inputs: list[str], output: str, **more: Any) -> None:
    """Append a node, labelled as backward pass."""
    node = helper.make_node(op_type, inputs, [output], name=f"{op_type}->{output}", **more)
    node.metadata_props.add(key="phase", value="backward")
    graph.node.append(node)
