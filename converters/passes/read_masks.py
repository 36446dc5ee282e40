"""Give every Dropout in training mode a reader of its mask."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .base import Fact, rewrite


@rewrite(requires=[Fact.SHAPES], ensures=[Fact.MASKS])
def read_masks(model: ir.Model) -> None:
    """Add, in place, a reader of the mask of every Dropout in training mode.

    Only the gradient reads a mask, and a Dropout behind frozen layers has no gradient. ONNX Runtime removes a Dropout
    whose mask is unused, as if it were in inference mode. The pass runs last, when no other pass can add or remove
    readers.
    """
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        if node.op_type != "Dropout" or node.domain or len(node.inputs) < 3 or node.inputs[2] is None:
            continue
        training, made = node.inputs[2].const_value, node.outputs[0]
        if training is not None and not training.numpy().any():
            continue
        if len(node.outputs) < 2:
            node.resize_outputs(2)
        mask = node.outputs[1]
        if not mask.uses() and not mask.is_graph_output():
            mask.name = mask.name or f"{made.name}.mask"
            mask.shape, mask.type = made.shape, ir.TensorType(ir.DataType.BOOL)
            _drop_again(model.graph, node)


def _drop_again(root: ir.Graph, node: ir.Node) -> None:
    """Set the dropped entries, which are zero already, to zero by the mask."""
    made, mask = node.outputs
    assert made.dtype is not None and node.graph is not None
    name = f"safe_forms.zero.{made.dtype.name.lower()}"
    zero = root.initializers.get(name)
    if zero is None:
        zero = ir.Value(name=name, const_value=ir.tensor(np.zeros((), made.dtype.numpy()), made.dtype))
        zero.shape, zero.type = ir.Shape([]), ir.TensorType(made.dtype)
        root.register_initializer(zero)
    kept = ir.node("Where", [mask, made, zero], metadata_props=dict(node.metadata_props), name=f"node.{made.name}.kept")
    kept.outputs[0].shape, kept.outputs[0].type, kept.outputs[0].name = made.shape, made.type, made.name
    made.name = f"{made.name}.dropped"
    made.replace_all_uses_with(kept.outputs[0], replace_graph_outputs=True)
    kept.replace_input_with(1, made)
    node.graph.insert_after(node, kept)
