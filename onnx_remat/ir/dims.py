"""Symbolic dimensions of a model: their names, the sizes that users and plans give them, binding."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import onnx

from onnx_remat.errors import ShapeError, UsageError, did_you_mean
from onnx_remat.ir.metadata import DIMS_KEY, TAG, entries
from onnx_remat.messages import Setting, Word
from onnx_remat.units import check_dims as check_sizes


def symbols_of(model: onnx.ModelProto) -> list[str]:
    """Return the symbolic dimension names in order of first mention, the inputs' first."""
    names = [d.dim_param for v in model.graph.input for d in v.type.tensor_type.shape.dim if d.dim_param]
    names += [d.dim_param for d in _every_dim(model) if d.dim_param and not d.dim_param.startswith(TAG)]
    return list(dict.fromkeys(names))


def check_dims(model: onnx.ModelProto, dims: Mapping[str, int], derived: bool = False) -> None:
    """Raise UsageError if `dims` names a dimension the model lacks, ShapeError if a dimension of an input is unbound.

    `derived` is that of `shapes.infer`.
    """
    symbols = symbols_of(model)
    if not derived and (unknown := sorted(set(dims) - set(symbols))):
        if not symbols:
            raise UsageError(f"all sizes of the model are fixed: it has no symbolic dimension {unknown[0]!r}")
        hint = did_you_mean(unknown[0], symbols)
        raise UsageError(f"the model has no symbolic dimension {unknown[0]!r}: it has {', '.join(symbols)}{hint}")
    of_inputs = _symbols_of_inputs(model)
    if open_symbols := [s for s in symbols if s not in dims and s in of_inputs]:
        sizes = Setting("dims", dict.fromkeys(open_symbols, Word("SIZE")))
        raise ShapeError("symbolic dimensions are not bound: {}; pass {}", ", ".join(open_symbols), sizes)


def planned_dims(model: onnx.ModelProto) -> dict[str, int]:
    """Return the sizes that a rewrite was planned for, of symbolic dimensions the model still has; else empty."""
    try:
        known = check_sizes(json.loads(entries(model).get(DIMS_KEY, "{}")))
    except (UsageError, ValueError, RecursionError):  # a tool damaged it: the user must state the sizes
        return {}
    symbols = symbols_of(model)
    return {name: size for name, size in known.items() if name in symbols}


def with_planned(model: onnx.ModelProto, dims: Mapping[str, int]) -> dict[str, int]:
    """Return `dims` with the sizes that a rewrite was planned for, of dimensions that it does not name.

    Where one of `dims` has another size than was planned, that holds only for dimensions of inputs: others follow from
    them, such as the rows of a batch, and must be inferred again.
    """
    known = planned_dims(model)
    if any(known.get(name, size) != size for name, size in dims.items()):
        own = _symbols_of_inputs(model)
        known = {name: size for name, size in known.items() if name in own}
    return known | dict(dims)


def bind(model: onnx.ModelProto, dims: Mapping[str, int]) -> None:
    """Replace symbolic dimensions by their sizes; those of another name are left open, without a name."""
    for dim in _every_dim(model):
        name = dim.dim_param.partition("=")[2] if dim.dim_param.startswith(TAG) else dim.dim_param
        if name in dims:
            dim.dim_value = dims[name]
        elif name.isdigit() and name != dim.dim_param:
            dim.dim_value = int(name)
        elif dim.HasField("dim_param"):
            dim.ClearField("dim_param")  # inference finds the size of a derived name, such as "2*batch"


def typed_values(graph: onnx.GraphProto) -> Iterable[onnx.ValueInfoProto]:
    """Yield the values whose types a graph states; those of its outputs may repeat."""
    yield from graph.value_info
    yield from graph.input
    yield from graph.output


def _every_dim(model: onnx.ModelProto) -> Iterable[onnx.TensorShapeProto.Dimension]:
    for value in typed_values(model.graph):
        yield from value.type.tensor_type.shape.dim


def _symbols_of_inputs(model: onnx.ModelProto) -> set[str]:
    return {dim.dim_param for value in model.graph.input for dim in value.type.tensor_type.shape.dim}
