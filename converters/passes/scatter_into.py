"""Scatter directly into a value, instead of into zeros that are then added to it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..dims import sizes

_SCATTERS = ("ScatterElements", "ScatterND")


def scatter_into(node: ir.Node) -> None:
    """Rewrite, in place, ``Add(x, Scatter(zeros, where, rows))`` as ``Scatter(x, where, rows)``; both scatters add.

    An example is the gradient of a language model's embedding whose matrix also makes the logits. The zeros and the sum
    are each as large as that matrix, whereas the kernel of Scatter can write into the memory of its input.
    """
    if node.domain or node.op_type != "Add":
        return
    for scattered, other in (node.inputs, node.inputs[::-1]):
        made = scattered.producer() if scattered is not None else None
        if made is None or made.domain or made.op_type not in _SCATTERS or scattered is None or other is None:
            continue
        adds = "reduction" in made.attributes and made.attributes["reduction"].as_string() == "add"
        if not adds or scattered.is_graph_output() or len(scattered.uses()) > 1 or not filled_with(made.inputs[0], 0.0):
            continue
        if sizes(other) is None or sizes(other) != sizes(scattered):
            continue
        node.op_type = made.op_type
        node.attributes.update(made.attributes)
        node.resize_inputs(3)
        for slot, value in enumerate((other, *made.inputs[1:])):
            node.replace_input_with(slot, value)
        return


def filled_with(value: ir.Value | None, number: float) -> bool:
    """Return whether every entry of a value is this number; the value may be a constant expanded to a batch's size."""
    if value is None or value.is_graph_input():
        return False
    node = value.producer()
    if node is not None and not node.domain and node.op_type in ("Expand", "Reshape", "Unsqueeze"):
        return filled_with(node.inputs[0], number)
    if node is not None and not node.domain and node.op_type == "ConstantOfShape":
        filled = node.attributes["value"].as_tensor().numpy() if "value" in node.attributes else np.zeros(1)
        return bool((filled == number).all())
    known = value.const_value
    return known is not None and bool((known.numpy() == number).all())
