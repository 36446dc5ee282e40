"""Sums into rows: what is scattered into zeros and then added to something is scattered into that."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..dims import sizes

_SCATTERS = ("ScatterElements", "ScatterND")


def scatter_into(node: ir.Node) -> None:
    """Turn, in place, ``Add(x, Scatter(zeros, where, rows))`` into ``Scatter(x, where, rows)``, both adding.

    The gradient of a language model's embedding, for one, whose matrix makes the logits as well: the zeros and the sum
    are each as large as the matrix, and the kernel scatters into its input's memory.
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
    """Is every entry that number, also of a constant made as large as a batch is?"""
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
