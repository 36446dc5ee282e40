"""Sums of padded parts, which frameworks write for the gradient of a split, as a Concat."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..dims import dims
from ..values import constant
from .sums import addends, is_part


def concat_padded_sums(node: ir.Node) -> None:
    """Rewrite, in place, a sum of parts that are padded with zeros and do not overlap into their Concat.

    The gradient of a split is such a sum. It writes and reads one tensor of full size for each part.
    """
    result = node.outputs[0]
    if node.domain or node.op_type != "Add" or result.shape is None:
        return
    if any(value is None or not (is_part(value, node) or _padded(value)) for value in node.inputs):
        return  # without a walk along the whole sum, from each Add of a long one
    leaves = addends(node)
    if any(leaf is None or leaf.shape is None or dims(leaf) != dims(result) for leaf in leaves):
        return
    found = [_padded(leaf) for leaf in leaves]
    parts = sorted((part for part in found if part is not None), key=lambda part: part[1])
    if len(parts) < len(leaves) or len({axis for axis, _, _, _ in parts}) > 1:
        return
    ends = [0, *(end for _, _, end, _ in parts)]
    axis = parts[0][0]
    if ends[-1] != result.shape[axis] or any(begin != end for (_, begin, _, _), end in zip(parts, ends, strict=False)):
        return
    node.op_type = "Concat"
    node.attributes["axis"] = ir.AttrInt64("axis", axis)
    node.resize_inputs(len(parts))
    for index, (_, _, _, source) in enumerate(parts):
        node.replace_input_with(index, source)


def _padded(value: ir.Value | None) -> tuple[int, int, int, ir.Value] | None:
    """Return axis, begin, end and source of a value padded with zeros along one axis; None for any other value."""
    node = value.producer() if value is not None else None
    if value is None or node is None or node.domain or node.op_type != "Pad" or len(node.inputs) > 3:
        return None
    if "mode" in node.attributes and node.attributes["mode"].as_string() != "constant":
        return None
    source, pads = node.inputs[0], (constant(node.inputs[1]) if len(node.inputs) > 1 else None)
    fill = constant(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else np.zeros(())
    if source is None or source.shape is None or pads is None or fill is None or fill.any() or (pads < 0).any():
        return None
    rank = source.shape.rank()
    axes = [axis for axis in range(rank) if pads[axis] or pads[rank + axis]]
    size = source.shape[axes[0]] if len(axes) == 1 else None
    if not isinstance(size, int):
        return None
    begin = int(pads[axes[0]])
    return axes[0], begin, begin + size, source
