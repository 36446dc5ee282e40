"""Chains of Transpose, and of reshapes: each as one node."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..dims import sizes
from ..values import replace, static

RESHAPES = {"Reshape", "Squeeze", "Unsqueeze", "Flatten"}


def fuse_chain(node: ir.Node) -> None:
    """Merge two successive Transposes, or two successive reshapes, into one node."""
    source = node.inputs[0] if node.inputs else None
    before = source.producer() if source is not None else None
    if before is None or node.domain or before.domain or source is None:
        return
    if node.op_type == before.op_type == "Transpose":
        first, second = perm_of(before), perm_of(node)
        if first is not None and second is not None:
            node.attributes["perm"] = ir.AttrInt64s("perm", [first[i] for i in second])
            begun = before.inputs[0]
            node.replace_input_with(0, begun)
            if begun is not None and [first[i] for i in second] == sorted(first):
                replace(node.outputs[0], begun)
    elif node.op_type in RESHAPES and before.op_type in RESHAPES:
        begun = before.inputs[0]
        if begun is not None and (known := sizes(begun)) is not None and known == sizes(node.outputs[0]):
            replace(node.outputs[0], begun)
            return
        shape = static(node.outputs[0])
        if shape is not None and before.inputs[0] is not None:
            to_reshape(node, before.inputs[0], shape)
            if static(before.inputs[0]) == shape:
                replace(node.outputs[0], before.inputs[0])


def to_reshape(node: ir.Node, source: ir.Value, shape: tuple[int, ...]) -> None:
    """Make a node the Reshape of `source` to a static shape."""
    assert node.graph is not None
    name = f"{node.outputs[0].name}.shape"
    while name in node.graph.initializers:  # an earlier run of the pass may have given the name to another node's shape
        name += "'"
    target = ir.Value(name=name, const_value=ir.tensor(np.array(shape, np.int64)))
    target.shape, target.type = ir.Shape([len(shape)]), ir.TensorType(ir.DataType.INT64)
    node.graph.register_initializer(target)
    node.op_type = "Reshape"
    node.attributes.clear()
    if 0 in shape:  # or it would mean the size of the source
        node.attributes["allowzero"] = ir.AttrInt64("allowzero", 1)
    node.resize_inputs(2)
    node.replace_input_with(0, source)
    node.replace_input_with(1, target)


def perm_of(node: ir.Node) -> list[int] | None:
    """Return the order in which a Transpose puts the axes of its input; None if the file does not say."""
    if "perm" in node.attributes:
        return [int(i) for i in node.attributes["perm"].as_ints()]
    rank = node.outputs[0].shape.rank() if node.outputs[0].shape is not None else None
    return list(range(rank))[::-1] if rank is not None else None
