"""Lists of elementwise ops, reductions and reshapes, and readers of their attributes."""

from __future__ import annotations

import onnx_ir as ir

from ..dims import dims

ELEMENTWISE = {
    "Abs", "Add", "And", "Cast", "Clip", "Div", "Equal", "Exp", "Greater", "GreaterOrEqual", "Identity", "Less",
    "LessOrEqual", "Log", "Max", "Min", "Mul", "Neg", "Not", "Or", "Pow", "Reciprocal", "Relu", "Sigmoid", "Sqrt",
    "Sub", "Sum", "Tanh", "Where", "Xor",
}  # fmt: skip
REDUCE = {"ReduceSum", "ReduceMax", "ReduceMin", "ReduceMean", "ReduceLogSumExp", "ReduceProd"}
RESHAPE = {"Reshape", "Squeeze", "Unsqueeze"}


def number(node: ir.Node, name: str, default: int) -> int:
    """Return an integer attribute of a node, or `default`."""
    return node.attributes[name].as_int() if name in node.attributes else default


def axes(node: ir.Node) -> list[int] | None:
    """Return the axes of a reduction as non-negative numbers; None if the node does not state them."""
    source = node.inputs[0]
    if source is None or source.shape is None:
        return None
    stated = node.attributes["axes"].as_ints() if "axes" in node.attributes else None
    if stated is None and len(node.inputs) > 1 and node.inputs[1] is not None:
        known = node.inputs[1].const_value
        stated = None if known is None or node.inputs[1].is_graph_input() else known.numpy().tolist()
    return None if stated is None else [int(a) % len(dims(source)) for a in stated]
