"""A graph in an order and with names that follow from its structure alone.

tf2onnx merges, sorts and names nodes by sets of objects and by counters, so that no two runs write one model alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import onnx

from onnx_remat.ir.body import bodies, rename_values
from onnx_remat.ir.graph import captures
from onnx_remat.ir.naming import Unused

_COUNTS = re.compile(r"__\d+|(?<=einsum)\d+")
"""What tf2onnx adds to names: its counter, and the address of an object."""


def settle(model: onnx.ModelProto) -> None:
    """Sort and rename, in place, all nodes and values except the graph's inputs and outputs.

    Nodes come in the order in which the outputs need them, node by node from the first input on; those that no output
    needs are removed, as are constants. Values have the names of the nodes that make them, constants those of their
    first readers.
    """
    graph = model.graph
    kept = {value.name for value in (*graph.input, *graph.output)}
    _settle(graph, kept, Unused(kept))


def _settle(graph: onnx.GraphProto, kept: set[str], names: Unused) -> None:
    nodes = list(_needed(graph))
    renamed: dict[str, str] = {}
    for node in nodes:
        node.name = names.fresh(_COUNTS.sub("", node.name) or node.op_type)
        for slot, name in enumerate(node.output):
            if name and name not in kept:
                renamed[name] = names.fresh(f"{node.name}.{slot}")
    constants = {tensor.name: tensor for tensor in graph.initializer}
    used: dict[str, onnx.TensorProto] = {}
    for node in nodes:
        for slot, name in enumerate((*node.input, *captures(node))):
            if name in constants and name not in used:
                used[name] = constants[name]
                renamed[name] = names.fresh(f"{node.name}.constant.{slot}")
    for name in (value.name for value in graph.output):
        if name in constants:
            used.setdefault(name, constants[name])
    for node in nodes:
        for body in bodies(node):
            inside = {value.name: names.fresh(f"{node.name}.input.{i}") for i, value in enumerate(body.input)}
            _rename(body, inside)
            _settle(body, {*inside.values()}, names)
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(used.values())
    known = {value.name: value for value in graph.value_info}
    del graph.value_info[:]
    graph.value_info.extend(known[name] for name in renamed if name in known)
    _rename(graph, renamed)


def _needed(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield copies of the nodes that the outputs need, each after those that make what it reads."""
    maker = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    done: set[int] = set()
    for value in graph.output:
        stack = [(maker[value.name], False)] if value.name in maker else []
        while stack:
            place, read = stack.pop()
            if place in done:
                continue
            node = graph.node[place]
            if read:
                done.add(place)
                copy = onnx.NodeProto()
                copy.CopyFrom(node)
                yield copy
                continue
            stack.append((place, True))
            reads = (*node.input, *captures(node))
            stack += [(maker[name], False) for name in reversed(reads) if name in maker and maker[name] not in done]


def _rename(graph: onnx.GraphProto, renamed: dict[str, str]) -> None:
    """Rename values of a graph, also where bodies in it read them."""
    for values in (graph.input, graph.output, graph.initializer, graph.value_info):
        for value in values:
            value.name = renamed.get(value.name, value.name)
    rename_values(graph.node, renamed)
