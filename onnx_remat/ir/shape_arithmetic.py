"""Shape arithmetic: node-by-node inference of types that also evaluates small values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
from onnx import TypeProto, numpy_helper
from onnx.reference import ReferenceEvaluator

from onnx_remat.ir.native import concrete, limit, stated
from onnx_remat.ir.op_semantics import semantics
from onnx_remat.process import worker

MOST = 1024
"""Elements up to which a value is evaluated."""

_TYPED_MASKS = 10
"""Opset from which on a Dropout's mask is boolean; before, it has the data's type, which ONNX does not infer."""


def ask(model: onnx.ModelProto, types: Mapping[str, TypeProto]) -> dict[str, TypeProto]:
    """Run `propagate` in the worker under its limits: small inputs may lead to values of any size."""
    query = _query(model, types)
    data = query.SerializeToString()
    _, made = worker.ask(
        "computing shapes", "onnx_remat.ir.shape_arithmetic:do_propagate", limit(len(query.graph.node), len(data)), data
    )
    return dict(types) | stated(onnx.GraphProto.FromString(made))


def values(model: onnx.ModelProto, types: Mapping[str, TypeProto], names: Sequence[str]) -> dict[str, onnx.TensorProto]:
    """Return those of the named values that follow from a model's shapes and constants; runs in the worker."""
    query = _query(model, types)
    data = query.SerializeToString()
    _, made = worker.ask(
        "computing shapes", "onnx_remat.ir.shape_arithmetic:do_values", limit(len(query.graph.node), len(data)), data,
        names=list(names),
    )  # fmt: skip
    return {tensor.name: tensor for tensor in onnx.GraphProto.FromString(made).initializer}


def _query(model: onnx.ModelProto, types: Mapping[str, TypeProto]) -> onnx.ModelProto:
    """Return a copy of a model with these types as its only value_info."""
    query = onnx.ModelProto()
    query.CopyFrom(model)
    query.graph.ClearField("value_info")
    query.graph.value_info.extend(onnx.ValueInfoProto(name=name, type=kind) for name, kind in types.items())
    return query


def do_values(data: bytes, names: Sequence[str]) -> tuple[None, bytes]:
    """Compute for `values`; runs in the worker."""
    model = onnx.ModelProto.FromString(data)
    computed = _walk(model, {value.name: value.type for value in model.graph.value_info})[1]
    return None, onnx.GraphProto(initializer=[computed[n] for n in names if n in computed]).SerializeToString()


def do_propagate(data: bytes) -> tuple[None, bytes]:
    """Propagate for `ask`; runs in the worker."""
    model = onnx.ModelProto.FromString(data)
    types = {value.name: value.type for value in model.graph.value_info}
    found = propagate(model, types)
    made = onnx.GraphProto()
    new = (name for name in found if name not in types or concrete(types[name]) is None)
    made.value_info.extend(onnx.ValueInfoProto(name=name, type=found[name]) for name in new)
    return None, made.SerializeToString()


def propagate(model: onnx.ModelProto, types: Mapping[str, TypeProto]) -> dict[str, TypeProto]:
    """Infer types from inputs of known shape where ONNX's own data propagation fails.

    Parameters
    ----------
    model : onnx.ModelProto
        Its nodes in a topological order; values without data are inputs.
    types : mapping of str to TypeProto
        Known types, by value.

    Returns
    -------
    dict of str to TypeProto
        `types`, and the inferred ones.
    """
    return _walk(model, types)[0]


def _walk(
    model: onnx.ModelProto, types: Mapping[str, TypeProto]
) -> tuple[dict[str, TypeProto], dict[str, onnx.TensorProto]]:
    """Return types as `propagate` does, and the small values that were evaluated on the way."""
    known = dict(types)
    given = {value.name for value in model.graph.input}  # a caller may override an initializer among them
    data = {t.name: t for t in model.graph.initializer if np.prod(t.dims) <= MOST and t.name not in given}
    opsets = {opset.domain: opset.version for opset in model.opset_import}

    def shape_of(name: str) -> tuple[int, ...] | None:
        return concrete(known.get(name))

    for node in model.graph.node:
        compute(node, shape_of, data, opsets)
        if node.domain not in opsets or any(name not in known for name in node.input if name):
            continue
        if node.op_type == "Dropout" and opsets[node.domain] < _TYPED_MASKS:
            known.update({name: known[node.input[0]] for name in node.output[1:] if name})
        if all(not name or (name in known and concrete(known[name]) is not None) for name in node.output):
            continue
        try:
            schema = onnx.defs.get_schema(node.op_type, opsets[node.domain], node.domain)
            made = onnx.shape_inference.infer_node_outputs(
                schema, node, {name: known[name] for name in node.input if name},
                {name: data[name] for name in node.input if name in data},
                opset_imports=list(model.opset_import), ir_version=model.ir_version,
            )  # fmt: skip
        except _REFUSALS:
            continue  # the caller reports missing types
        known.update({name: kind for name, kind in made.items() if concrete(kind) is not None})
    return known, data


def compute(
    node: onnx.NodeProto,
    shape_of: Callable[[str], tuple[int, ...] | None],
    data: dict[str, onnx.TensorProto],
    opsets: Mapping[str, int],
) -> None:
    """Add a node's output to `data` if it is small and follows from shapes and known data.

    Parameters
    ----------
    node : onnx.NodeProto
    shape_of : callable
        Returns the shape of a value, None if unknown.
    data : dict of str to onnx.TensorProto
        Known small values.
    opsets : mapping of str to int
        Version by domain.
    """
    if node.domain or len(node.output) != 1 or not (node.input or node.op_type == "Constant"):
        return
    result: object
    if node.op_type in ("Shape", "Size"):
        if (shape := shape_of(node.input[0])) is None:
            return
        span = {a.name: a.i for a in node.attribute}
        cut = shape[span.get("start", 0) : span.get("end", len(shape))]
        result = np.array(cut if node.op_type == "Shape" else math.prod(shape), np.int64)
    else:
        if any(name not in data for name in node.input if name) or any(a.HasField("g") for a in node.attribute):
            return
        if semantics(node.domain, node.op_type).random:
            return
        try:
            run = ReferenceEvaluator(_alone(node, opsets))
            (result,) = run.run(None, {name: numpy_helper.to_array(data[name]) for name in node.input if name})
        except Exception:  # an output that the evaluator cannot compute stays unknown
            return
    if isinstance(result, np.ndarray | np.generic) and result.size <= MOST:
        data[node.output[0]] = numpy_helper.from_array(np.asarray(result), node.output[0])


_REFUSALS = (
    onnx.defs.SchemaError, onnx.shape_inference.InferenceError, onnx.checker.ValidationError, RuntimeError, ValueError,
)  # fmt: skip


def _alone(node: onnx.NodeProto, opsets: Mapping[str, int]) -> onnx.ModelProto:
    """Return a model of one node."""
    ends = [
        [onnx.ValueInfoProto(name=name) for name in dict.fromkeys(names) if name] for names in (node.input, node.output)
    ]
    graph = onnx.GraphProto(name="alone", node=[node], input=ends[0], output=ends[1])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opsets.get("", 1))])
