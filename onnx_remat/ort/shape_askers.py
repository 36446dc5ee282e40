"""Shape inference by ONNX Runtime, where onnx's fails, for `ir.shapes.infer`; finds nothing if it is not installed."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import TensorProto

from onnx_remat.ir.native import stated
from onnx_remat.ir.shapes import UNSEEN, Asker, Types, stating
from onnx_remat.ort import runtime


def _by_loading(model: onnx.ModelProto, names: Sequence[str], known: Types) -> Types:
    """Infer types by ONNX Runtime, which knows its contrib ops, from the types known so far."""
    query = stating(model, known)
    # The hiding vectors have no reader any more, and in a model of IR version 3 ONNX Runtime refuses them.
    kept = [weight for weight in query.graph.initializer if not weight.name.startswith(UNSEEN)]
    del query.graph.initializer[:]
    query.graph.initializer.extend(kept)
    return {
        name: onnx.helper.make_tensor_type_proto(_ELEMENTS[kind], dims)
        for name, (kind, dims) in runtime.infer_shapes(query, names).items()
        if kind in _ELEMENTS and dims and all(isinstance(dim, int) for dim in dims)  # [] may also mean unknown
    }


_ELEMENTS = {f"tensor({name.lower()})": number for name, number in TensorProto.DataType.items()}


def _node_by_node(model: onnx.ModelProto, names: Sequence[str], known: Types) -> Types:
    """Infer types from only the nodes that make these values and the types of their inputs.

    ONNX Runtime may fail to load the rest of a graph that it saved itself: in a step in half precision, nested bodies
    have casts of the same name.
    """
    wanted = set(names)
    query = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    query.graph.name = model.graph.name
    query.graph.node.extend(node for node in model.graph.node if not wanted.isdisjoint(node.output))
    made = {name for node in query.graph.node for name in node.output}
    read = dict.fromkeys(name for node in query.graph.node for name in node.input if name not in made)
    weights = [weight for weight in model.graph.initializer if weight.name in read]
    query.graph.initializer.extend(weights)
    given = read.keys() - {weight.name for weight in weights}
    query.graph.input.extend(onnx.ValueInfoProto(name=n, type=known[n]) for n in read if n in given and n in known)
    return _by_loading(query, names, {})


def _symbolically(model: onnx.ModelProto, _names: Sequence[str], _known: Types) -> Types:
    """Infer types by ONNX Runtime's symbolic inference, which propagates more values; it needs sympy."""
    inferred = runtime.infer_shapes_symbolically(model)
    return stated(inferred.graph) if inferred is not None else {}


SHAPE_ASKERS: Sequence[Asker] = (_by_loading, _node_by_node, _symbolically)
"""Askers in the order of their use."""
