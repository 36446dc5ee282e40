"""Dropout and BatchNormalization in training mode: statistics of the batch, running statistics as state."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_remat.errors import ConversionError

from ..constants import static
from ..tape import Tape
from .rules_norm import BATCH_STATISTICS

_RATIO = 0.5
"""Share of entries that a Dropout without a ratio drops."""


def into_training(graph: ir.Graph) -> None:
    """Set every Dropout and every BatchNormalization to training mode, in place.

    Raises
    ------
    ConversionError
        A body contains one in inference mode: nodes of bodies stay as they are.
    """
    for node in ir.traversal.RecursiveGraphIterator(graph):
        if node.graph is not graph and node.op_type in ("Dropout", "BatchNormalization") and not _trains(node):
            name = node.name or node.outputs[0].name
            raise ConversionError(
                f"node {name!r} ({node.op_type}) is in a body, where it stays in inference mode: move it out of there"
            )
    for node in graph:
        if node.op_type == "Dropout":
            yes = ir.Value(name=f"{node.name}.training", const_value=ir.tensor(np.asarray(True)))
            yes.shape, yes.type = ir.Shape([]), ir.TensorType(ir.DataType.BOOL)
            graph.register_initializer(yes)
            node.resize_inputs(3)
            if node.inputs[1] is None:
                ratio = ir.Value(name=f"{node.name}.ratio", const_value=ir.tensor(np.float32(_RATIO)))
                ratio.shape, ratio.type = ir.Shape([]), ir.TensorType(ir.DataType.FLOAT)
                graph.register_initializer(ratio)
                node.replace_input_with(1, ratio)
            node.replace_input_with(2, yes)
            if len(node.outputs) < 2:
                node.resize_outputs(2)
                node.outputs[1].name = f"{node.name}.mask"
        if node.op_type == "BatchNormalization":
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
            node.resize_outputs(3)
            for value, what in zip(node.outputs[1:], ("mean", "var"), strict=True):
                value.name = value.name or f"{node.name}.{what}"


def running_statistics(graph: ir.Graph) -> list[ir.Value]:
    """Return running mean and variance of every BatchNormalization in training mode."""
    return list(dict.fromkeys(v for node in _trained(graph) for v in node.inputs[3:5] if v is not None))


def _trained(graph: ir.Graph) -> list[ir.Node]:
    return [node for node in graph if node.op_type == "BatchNormalization" and _trains(node)]


def _trains(node: ir.Node) -> bool:
    """Return whether a Dropout or a BatchNormalization is in training mode in every run."""
    if node.op_type == "Dropout":
        given = node.inputs[2] if len(node.inputs) > 2 else None
        return given is not None and bool(static(given))
    return "training_mode" in node.attributes and bool(node.attributes["training_mode"].as_int())


def use_batch_statistics(t: Tape, graph: ir.Graph) -> dict[ir.Value, ir.Value]:
    """Divide each BatchNormalization in training mode into the statistics of the batch and the inference form.

    The inference form has a kernel on every device. The training form has none on CUDA, and does not output the
    statistics.

    Returns
    -------
    dict of Value to Value
        The new value of each running statistic.
    """
    updated: dict[ir.Value, ir.Value] = {}
    for node in _trained(graph):
        x, mean_before, variance_before = node.inputs[0], node.inputs[3], node.inputs[4]
        assert x is not None and x.shape is not None and mean_before is not None and variance_before is not None
        others = [i for i in range(len(x.shape)) if i != 1]
        momentum = node.attributes["momentum"].as_float() if "momentum" in node.attributes else 0.9
        with t.ahead_of(node):
            if x.dtype is not None and x.dtype.bitwidth == 16:  # squares overflow in it
                x = t.cast(x, ir.DataType.FLOAT)
            mean = t.reduce("ReduceMean", x, others)
            centred = t.sub(x, mean)
            variance = t.reduce("ReduceMean", t.mul(centred, centred), others, keepdims=False)
            mean = t.reshape(mean, tuple(mean_before.shape or ()))  # type: ignore[arg-type]
        for slot, before, found in ((3, mean_before, mean), (4, variance_before, variance)):
            with t.ahead_of(node):
                now = t.cast(found, before.dtype or ir.DataType.FLOAT)
                latest, share = updated.get(before), t.mul(now, 1 - momentum)
                own = t.add(t.mul(before, momentum), share)
                # Of a module that is called several times, each call goes on from the one before.
                updated[before] = own if latest is None else t.add(t.mul(latest, momentum), share)
            node.replace_input_with(slot, now)
            if len(node.outputs) > slot - 2:
                node.outputs[slot - 2].replace_all_uses_with(own, replace_graph_outputs=True)
        node.resize_outputs(1)
        del node.attributes["training_mode"]
        node.meta[BATCH_STATISTICS] = True
    return updated
