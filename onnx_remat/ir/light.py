"""Models without their weights: all that analyses need."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

INLINE_LIMIT = 1024
"""Bytes of initializers whose contents analyses see, as they may determine shapes; of larger ones only the type."""


def without_weights(model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto] | None = None) -> onnx.ModelProto:
    """Return a copy in which large initializers are typed graph inputs: enough for analyses, without the weights.

    With `nodes`, the copy has these nodes of the model alone, and states nothing of what others make.
    """
    light = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    light.functions.extend(model.functions)
    light.metadata_props.extend(model.metadata_props)
    graph = light.graph
    graph.name = model.graph.name or "graph"
    for field in ("node", "input", "output", "value_info") if nodes is None else ("input",):
        getattr(graph, field).extend(getattr(model.graph, field))
    if nodes is not None:
        graph.node.extend(nodes)
        made = {name for node in nodes for name in node.output}
        for field in ("output", "value_info"):
            getattr(graph, field).extend(value for value in getattr(model.graph, field) if value.name in made)
    known = {value.name for value in graph.input}
    for tensor in model.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL and tensor.ByteSize() <= INLINE_LIMIT:
            graph.initializer.append(tensor)
        elif tensor.name not in known:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    for sparse in model.graph.sparse_initializer:  # the runtime stores them dense, under this name
        graph.input.append(onnx.helper.make_tensor_value_info(sparse.values.name, sparse.values.data_type, sparse.dims))
    return light
