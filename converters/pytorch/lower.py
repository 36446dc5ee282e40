"""Translation of the traced graph to an ONNX graph of standard operators, with the step's names and phases."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
import onnxscript.optimizer
import torch
from onnx_ir.passes import common
from onnxscript import opset20

from onnx_remat.errors import ConversionError

from .. import names
from ..passes import order
from .arrays import array
from .private_torch import remembering
from .program import program
from .refusals import untranslated
from .trace import Trace, quiet

FOLDED = 4096
"""Elements of the largest constant computed by the converter; the run computes larger ones, and can free them."""

_ALLOWS_BFLOAT16 = 22
"""First opset in which all operators with floating-point inputs take bfloat16."""

_WATCHED = "watched."


def lower(
    trace: Trace,
    inputs: Mapping[str, torch.Tensor],
    opset: int,
    dynamic: Mapping[str, Mapping[int, str]],
    loss_parts: int | None = None,
    attention_parts: int | None = None,
) -> ir.Model:
    """Translate every operator; give inputs and outputs their names, and every node its phase.

    Outputs that equal an input (buffers that the step only reads) are dropped. The watched values follow the outputs;
    `finish` removes them.

    Raises
    ------
    ConversionError
        An operator has no translation; the message names it.
    """
    with quiet(), remembering():
        try:
            made = torch.onnx.export(
                program(trace.graph), (), opset_version=opset, dynamo=True, verbose=False, optimize=False,
                custom_translation_table={torch.ops.aten.sym_numel.default: opset20.Size},
            )  # fmt: skip
        except Exception as error:
            raise untranslated(error, trace.graph.graph, trace.lines) from error
    assert made is not None
    model = made.model
    _round_outputs(model.graph, trace.graph)
    _name_dimensions(model.graph, list(inputs), dynamic)
    _label(model.graph)
    with _one_output(model.graph):
        common.InlinePass()(model)
        onnxscript.optimizer.fold_constants(model, output_size_limit=FOLDED)
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    outputs = [*trace.outputs, *(f"{_WATCHED}{index}" for index in range(trace.watched))]
    _interface(model.graph, list(inputs), outputs)
    common.RemoveUnusedNodesPass()(model)
    _infer_shapes(model)
    order.PYTORCH.run(
        model,
        {
            "loss_in_parts": {"wanted": loss_parts},
            "attention_in_parts": {"wanted": attention_parts, "watched": watched(outputs)},
        },
    )
    return model


def _round_outputs(graph: ir.Graph, traced: torch.fx.GraphModule) -> None:
    """Give outputs the types that they have in torch: the exporter returns sums in half precision before it rounds."""
    made: Any = traced.graph.output_node().args[0]
    for index, (value, source) in enumerate(zip(graph.outputs, made, strict=True)):
        expected = ir.DataType.from_numpy(array(torch.empty(0, dtype=source.meta["val"].dtype)).dtype)
        if value.dtype not in (None, expected):
            cast = ir.node("Cast", [value], {"to": int(expected)})
            cast.meta["node"] = source
            cast.outputs[0].shape, cast.outputs[0].type = value.shape, ir.TensorType(expected)
            cast.outputs[0].name = f"{value.name}.rounded.{index}"
            graph.append(cast)
            graph.outputs[index] = cast.outputs[0]


def _infer_shapes(model: ir.Model) -> None:
    """Infer types and shapes, in bfloat16 by an opset that allows it everywhere: else inference fails as a whole.

    Nodes that their own opset forbids are widened later (`widen_halves`).
    """
    opset = model.opset_imports[""]
    if any(value.dtype == ir.DataType.BFLOAT16 for node in model.graph for value in node.outputs):
        model.opset_imports[""] = max(opset, _ALLOWS_BFLOAT16)
    common.ShapeInferencePass()(model)
    model.opset_imports[""] = opset


@contextmanager
def _one_output(graph: ir.Graph) -> Iterator[None]:
    """Join all outputs in one node inside the context: passes search all outputs for every node that they remove.

    Names of outputs may change inside the context.
    """
    last = ir.node("Outputs", list(graph.outputs), domain="onnx_remat")
    graph.append(last)
    graph.outputs[:] = last.outputs
    yield
    graph.outputs[:] = [value for value in last.inputs if value is not None]
    graph.remove(last, safe=True)


def _name_dimensions(graph: ir.Graph, inputs: Sequence[str], dynamic: Mapping[str, Mapping[int, str]]) -> None:
    """Give the symbols of the trace the names of the inputs' dimensions."""
    called: dict[str, str] = {}
    for value, name in zip(graph.inputs, inputs, strict=False):
        assert value.shape is not None
        for axis, wanted in dynamic.get(name, {}).items():
            symbol = value.shape[axis]
            if isinstance(symbol, int):
                raise ConversionError(f"dynamic_dims: the step works only if axis {axis} of {name} is {symbol}")
            if called.setdefault(str(symbol), wanted) != wanted:
                raise ConversionError(
                    f"dynamic_dims: the step works only if {called[str(symbol)]!r} and {wanted!r} are equal: "
                    "give both the same name"
                )
    for value in [*graph.inputs, *(value for node in graph for value in node.outputs)]:
        if called and value.shape is not None and not value.shape.is_static():
            value.shape = ir.Shape([dim if isinstance(dim, int) else _renamed(str(dim), called) for dim in value.shape])


def _renamed(expression: str, called: Mapping[str, str]) -> str:
    """Return an expression such as `s5 * s7` with the symbols renamed.

    >>> _renamed("2*s5", {"s5": "batch"})
    '2*batch'
    """
    return re.sub(r"[A-Za-z_]\w*", lambda symbol: called.get(symbol[0], symbol[0]), expression)


def watched(outputs: Sequence[str]) -> list[str]:
    """Return the outputs that exist for the check alone."""
    return [name for name in outputs if name.startswith(_WATCHED)]


def finish(model: ir.Model, batch: int, gradients: bool = True) -> None:
    """Remove the watched outputs, nodes that only they needed, and state that is neither read nor updated.

    State that is updated but not read (the vectors of a spectral norm) stays, because the training loop keeps it by the
    name of its input. Without `gradients`, the gradients are not outputs either.
    """
    graph = model.graph
    off = (_WATCHED,) if gradients else (_WATCHED, names.gradient(""))
    graph.outputs[:] = [value for value in graph.outputs if not str(value.name).startswith(off)]
    for index, value in enumerate(value for node in graph for value in node.outputs if not value.is_graph_output()):
        if str(value.name).startswith(off):
            value.name = f"backward.{index}.{value.name}"
    common.RemoveUnusedNodesPass()(model)
    order.PYTORCH_OUTPUTS.run(model)
    first = len(graph.inputs) - batch
    state, rest = list(graph.inputs[:first]), list(graph.inputs[first:])
    renewed = {value.name for value in graph.outputs}
    graph.inputs[:] = [value for value in state if value.uses() or names.new(str(value.name)) in renewed] + rest


def _label(graph: ir.Graph) -> None:
    """Give every node the phase and the module of the operator that it translates, and no other metadata."""
    for node in graph:
        source = node.meta.get("node")
        label = source.meta.get("custom", {}) if source is not None else {}
        node.metadata_props.clear()
        node.metadata_props.update({key: label[key] for key in ("phase", "module") if label.get(key)})


def _interface(graph: ir.Graph, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Name inputs and outputs, and make each output a separate value; drop outputs of buffers that equal their
    input."""
    if len(graph.inputs) != len(inputs) or len(graph.outputs) != len(outputs):
        raise ConversionError("torch's exporter changed the step's interface")
    of = dict(zip(graph.inputs, inputs, strict=True))
    kept = []
    for value, name in zip(graph.outputs, outputs, strict=True):
        source = _source(value)
        if source not in of or name != names.new(of[source]):
            kept.append((source, name))
    taken = {*inputs, *outputs}
    for index, node in enumerate(graph):
        for value in node.outputs:
            if value.name is None or value.name in taken:
                value.name = f"{value.name or 'value'}.{index}"
    for value in list(graph.initializers.values()):
        if value.name in taken:
            value.name = f"{value.name}.constant"
    for value, name in of.items():
        value.name = name
    graph.outputs.clear()
    seen = set(graph.inputs)
    for value, name in kept:
        if value in seen or value.is_initializer():
            copy = ir.node("Identity", [value], metadata_props={"phase": "backward"})
            copy.outputs[0].shape, copy.outputs[0].type = value.shape, value.type
            graph.append(copy)
            value = copy.outputs[0]
        value.name = name
        seen.add(value)
        graph.outputs.append(value)


def _source(value: ir.Value) -> ir.Value:
    """Return the input of a chain of Identity nodes."""
    while (node := value.producer()) is not None and node.op_type == "Identity" and node.inputs[0] is not None:
        value = node.inputs[0]
    return value
