"""From the traced graph to an ONNX graph in standard operators, with the step's own names and labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir
import torch

from onnx_remat.errors import ConversionError

from .. import names
from .trace import quiet


def lower(
    graph: torch.fx.GraphModule, inputs: Mapping[str, torch.Tensor], outputs: Sequence[str], opset: int
) -> ir.Model:
    """Translate every operator; inputs and outputs get the names given, every node its phase.

    Outputs that are an input unchanged (buffers the step only reads) are dropped.

    Raises
    ------
    ConversionError
        An operator has no translation: it is named.
    """
    with quiet():
        try:
            program = torch.onnx.export(graph, tuple(inputs.values()), opset_version=opset, dynamo=True, verbose=False)
        except Exception as error:
            raise ConversionError(_reason(error)) from error
    assert program is not None
    model = program.model
    _label(model.graph)
    kept = [i for i, value in enumerate(model.graph.outputs) if not _is_own_input(value, outputs[i], model, inputs)]
    values = [model.graph.outputs[i] for i in kept]
    model.graph.outputs[:] = values
    _name(model.graph, list(inputs), [outputs[i] for i in kept])
    return model


def _is_own_input(value: ir.Value, output: str, model: ir.Model, inputs: Mapping[str, torch.Tensor]) -> bool:
    """Is it `new.<input>` and that very input?"""
    while (node := value.producer()) is not None and node.op_type == "Identity" and node.inputs[0] is not None:
        value = node.inputs[0]
    names_of = dict(zip(model.graph.inputs, inputs, strict=True))
    return value in names_of and output == names.new(names_of[value])


def _reason(error: Exception) -> str:
    """The message of the innermost cause, which names the operator."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return f"the step cannot be written in ONNX: {' '.join(str(cause).split())[:300]}"


def _label(graph: ir.Graph) -> None:
    """Phases of nodes that the optimizer of torch's exporter made follow from their neighbours'."""
    phases: dict[ir.Node, str] = {}
    for node in graph:
        source = node.meta.get("node")
        if source is not None and "phase" in source.meta.get("custom", {}):
            phases[node] = source.meta["custom"]["phase"]
    for node in reversed(graph):
        if node not in phases:
            readers = [phases[user.node] for value in node.outputs for user in value.uses() if user.node in phases]
            phases[node] = "forward" if "forward" in readers or not readers else "backward"
    for node in graph:
        node.metadata_props.clear()
        node.metadata_props["phase"] = phases[node]


def _name(graph: ir.Graph, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Give the interface its names; whatever else bears one of them gets another; every output is a value of its own."""
    if len(graph.inputs) != len(inputs) or len(graph.outputs) != len(outputs):
        raise ConversionError("torch's exporter changed the step's interface")
    seen: set[ir.Value] = set(graph.inputs)
    for index, value in enumerate(graph.outputs):
        if value in seen or value.is_initializer():
            copy = ir.node("Identity", [value], metadata_props={"phase": "backward"})
            copy.outputs[0].shape, copy.outputs[0].type = value.shape, value.type
            graph.append(copy)
            graph.outputs[index] = copy.outputs[0]
        seen.add(graph.outputs[index])
    taken = {*inputs, *outputs}
    for index, node in enumerate(graph):
        for value in node.outputs:
            if value.name is None or value.name in taken:
                value.name = f"{value.name or 'value'}.{index}"
    for value in list(graph.initializers.values()):
        if value.name in taken:
            value.name = f"{value.name}.constant"
    for value, name in [*zip(graph.inputs, inputs, strict=True), *zip(graph.outputs, outputs, strict=True)]:
        value.name = name
