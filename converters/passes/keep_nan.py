"""Maxima and minima that are NaN where an element is, as in JAX.

ONNX Runtime's CPU kernels compare each element with the best so far, which drops most NaNs: the loss stays finite, and
training goes on with a broken batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from ..dims import dims
from ..tape import Tape
from .base import Fact, rewrite

_EXTREMES = {"ReduceMax", "ReduceMin", "ArgMax", "ArgMin", "MaxPool"}
_FLOATS = {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
_OF_ROWS = {"Abs", "Cast", "Expand", "Less", "Max", "Reshape", "Squeeze", "Transpose", "Unsqueeze", "Where"}
"""Operators between the maximum of a row and the softmax that subtracts it."""
_OF_TERMS = {"Cast", "Mul", "Reshape", "Transpose", "Where"}
"""Operators between an exponential and its sum."""


@rewrite(requires=[Fact.SHAPES], breaks=[Fact.LEAN])
def keep_nan(model: ir.Model) -> None:
    """Let readers of a maximum or minimum of floats read NaN where an element is NaN, and of its place the first NaN's.

    A softmax, or the logarithm of a sum of exponentials, reads the maximum itself: a NaN makes its sum NaN anyway.
    """
    for tape in list(Tape(model.graph).with_bodies()):
        for node in list(tape.graph):
            x = node.inputs[0] if node.inputs else None
            if _is_extreme(node) and x is not None and x.dtype in _FLOATS:
                _rewrite(tape, node, x)


def _is_extreme(node: ir.Node) -> bool:
    scatters = node.op_type == "ScatterElements" and "reduction" in node.attributes
    if scatters and node.attributes["reduction"].as_string() not in ("max", "min"):
        return False
    return not node.domain and (scatters or node.op_type in _EXTREMES)


def _rewrite(tape: Tape, node: ir.Node, x: ir.Value) -> None:
    made = node.outputs[0]
    readers = [use for use in made.uses() if node.op_type != "ReduceMax" or not _is_shift(use.node, made, node)]
    if not readers and not made.is_graph_output():
        return
    with tape.ahead_of(node, node.metadata_props.get("phase", "forward")):  # type: ignore[arg-type]
        lost = tape.op("IsNaN", x, shape=dims(x), dtype=ir.DataType.BOOL)
        kept = _kept(tape, node, x, lost)
    first = lost.producer()
    assert first is not None
    tape.graph.remove(node)
    tape.graph.insert_before(first, node)
    if made.is_graph_output():
        made.name, kept.name = kept.name, made.name
        tape.graph.outputs[tape.graph.outputs.index(made)] = kept
    for user, number in readers:
        user.replace_input_with(number, kept)


def _kept(tape: Tape, node: ir.Node, x: ir.Value, lost: ir.Value) -> ir.Value:
    """Return the result of a node with the NaNs that it drops."""
    made, shape, rest = node.outputs[0], dims(node.outputs[0]), node.inputs[1:]
    if node.op_type in ("ArgMax", "ArgMin"):
        assert x.dtype is not None
        flags = tape.cast(lost, x.dtype)  # CUDA has kernels for floats alone
        place = tape.op("ArgMax", flags, shape=shape, dtype=ir.DataType.INT64, **_attributes(node))
        axes, keepdims = [node.attributes["axis"].as_int()], len(shape) == len(dims(x))
        return tape.select(tape.cast(tape.reduce("ReduceMax", flags, axes, keepdims), ir.DataType.BOOL), place, made)
    op_type = "ReduceMax" if node.op_type == "ReduceMin" else node.op_type
    attributes = _attributes(node)
    if op_type == "ScatterElements":
        indices, updates = rest
        assert updates is not None
        lost_updates = tape.op("IsNaN", updates, shape=dims(updates), dtype=ir.DataType.BOOL)
        attributes["reduction"], rest = "max", (indices, tape.cast(lost_updates, ir.DataType.UINT8))
    flags = tape.op(op_type, tape.cast(lost, ir.DataType.UINT8), *rest, shape=shape, **attributes)
    return tape.select(tape.cast(flags, ir.DataType.BOOL), tape.scalar(math.nan, made), made)


def _attributes(node: ir.Node) -> dict[str, Any]:
    return {name: attribute.value for name, attribute in node.attributes.items()}


def _is_shift(reader: ir.Node, largest: ir.Value, node: ir.Node) -> bool:
    """Return whether a reader of a ReduceMax, or one behind it, subtracts it in exponentials that a ReduceSum adds."""
    if reader.op_type == "Sub" and reader.inputs[1] is largest and _source(reader.inputs[0]) is _source(node.inputs[0]):
        return any(each.op_type == "Exp" and _is_summed(each, node.inputs[1:]) for each in _readers(reader))
    return reader.op_type in _OF_ROWS and any(_is_shift(each, reader.outputs[0], node) for each in _readers(reader))


def _is_summed(node: ir.Node, axes: Sequence[ir.Value | None]) -> bool:
    return any(
        (each.op_type == "ReduceSum" and each.inputs[1:] == axes)
        or (each.op_type in _OF_TERMS and _is_summed(each, axes))
        for each in _readers(node)
    )


def _readers(node: ir.Node) -> list[ir.Node]:
    return [use.node for use in node.outputs[0].uses()]


def _source(value: ir.Value | None) -> ir.Value | None:
    """Return the value behind casts and other layouts."""
    node = None if value is None else value.producer()
    same = node is not None and node.op_type in ("Cast", "Reshape", "Transpose")
    return _source(node.inputs[0]) if same else value  # type: ignore[union-attr]
