"""ONNX's native code in a separate process (`worker`): type inference, inliner, checker.

The functions that start with ``do_`` run there.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import onnx
from onnx import TypeProto, inliner, shape_inference

from onnx_remat.errors import ModelError
from onnx_remat.ir.body import bodies
from onnx_remat.ir.constant_nodes import tensor_of
from onnx_remat.process import worker
from onnx_remat.process.child import Limit

_SECONDS, _NODES_PER_SECOND = 5.0, 2000  # measured: inference takes 25 microseconds per node, here
_BYTES, _COPIES = 768 * 2**20, 64  # memory for any model, and per byte of it
_ONNX = "ONNX's inference"

Types = dict[str, TypeProto]
REFUSALS = (
    shape_inference.InferenceError, onnx.checker.ValidationError, onnx.defs.SchemaError, ValueError, RuntimeError,
)  # fmt: skip


def limit(nodes: int, size: int) -> Limit:
    """Return the limit of time and memory for a model of so many nodes and bytes."""
    return Limit(_SECONDS + nodes / _NODES_PER_SECOND, _BYTES + _COPIES * size)


def infer_types(model: onnx.ModelProto, data_prop: bool = True, strict: bool = False) -> Types:
    """Infer the types of a model's values, stated ones included; with `data_prop`, ONNX also propagates small values.

    Raises
    ------
    ModelError
        The model contradicts itself, or costs more than the limit.
    """
    return infer_fully(model, data_prop, strict)[0]


def infer_fully(model: onnx.ModelProto, data_prop: bool = True, strict: bool = False) -> tuple[Types, bool]:
    """Return what `infer_types` does, and whether it took the propagation of small values, which no runtime does."""
    data = model.SerializeToString(deterministic=True)
    key = hashlib.sha256(data).digest(), data_prop, strict
    with _asking:
        took, made = _inferred.pop(key, (False, b""))
        if not made:
            took, made = worker.ask(
                _ONNX, "onnx_remat.ir.native:do_infer", limit(len(model.graph.node), len(data)), data,
                data_prop=data_prop, strict=strict,
            )  # fmt: skip
        _inferred[key] = took, made
        while sum(len(made) for _, made in _inferred.values()) > _REMEMBERED_BYTES:
            del _inferred[next(iter(_inferred))]
    return stated(onnx.GraphProto.FromString(made)), took


_REMEMBERED_BYTES = 1 << 24
_inferred: dict[tuple[bytes, bool, bool], tuple[bool, bytes]] = {}
"""Cache of the latest results of `infer_fully`: each optimisation level needs the types of the same file."""
_asking = threading.Lock()


def do_infer(data: bytes, data_prop: bool, strict: bool) -> tuple[bool, bytes]:
    """Infer for `infer_fully`.

    If inference without data propagation finds all shapes, data adds nothing. Otherwise infer again with data, but
    without ops on long vectors: a shape has few dimensions, and ONNX makes an entry for every element.
    """
    model = onnx.ModelProto.FromString(data)
    named = _named_dims(model.graph)
    try:
        inferred = shape_inference.infer_shapes(model, strict_mode=strict, data_prop=False).graph
        types = stated(inferred)
        names = [name for node in model.graph.node for name in node.output if name]
        took = data_prop and any(concrete(types.get(name)) is None for name in names)
        if took:
            _leave_out_long_vectors(model.graph, types)
            try:
                again = shape_inference.infer_shapes(model, strict_mode=strict, data_prop=True).graph
            except MemoryError:  # a long vector could not be left out; other askers may know the missing shapes
                again = inferred
            types |= stated(again)
    except REFUSALS as error:
        raise ModelError(f"ONNX shape inference refuses the model: {first_line(error)}") from error
    made = onnx.GraphProto()
    made.value_info.extend(onnx.ValueInfoProto(name=name, type=kind) for name, kind in types.items())
    for dim in _dims(made):
        if dim.dim_param and dim.dim_param not in named:
            dim.ClearField("dim_param")  # ONNX names each unknown size; for ONNX Runtime no two of them are equal
    return took, made.SerializeToString()


def _named_dims(graph: onnx.GraphProto) -> set[str]:
    """Return the names of symbolic dimensions that a graph, or a body in it, states."""
    named = {dim.dim_param for dim in _dims(graph)}
    return named.union(*(_named_dims(body) for node in graph.node for body in bodies(node)))


def _dims(graph: onnx.GraphProto) -> Iterator[onnx.TensorShapeProto.Dimension]:
    for values in (graph.value_info, graph.input, graph.output):
        for value in values:
            yield from value.type.tensor_type.shape.dim


_LONG = 1024  # elements above which a vector is not a shape


def _leave_out_long_vectors(graph: onnx.GraphProto, types: Mapping[str, TypeProto]) -> None:
    """Turn results of known shape into graph inputs if they, or the inputs of their ops, are long vectors."""

    def long(name: str) -> bool:
        shape = concrete(types.get(name))
        return shape is not None and len(shape) == 1 and shape[0] > _LONG

    kept, given = [], []
    for node in graph.node:
        made = [name for name in node.output if name]
        known = all(concrete(types.get(name)) is not None for name in made)
        if known and any(long(name) for name in (*node.input, *made)):
            given += made
        else:
            kept.append(node)
    if given:
        graph.ClearField("node")
        graph.node.extend(kept)
        graph.input.extend(onnx.ValueInfoProto(name=name, type=types[name]) for name in given)


def stated(graph: onnx.GraphProto) -> Types:
    """Return the types that a graph states for its values, by name."""
    types = {value.name: value.type for values in (graph.value_info, graph.input, graph.output) for value in values}
    for tensor in graph.initializer:
        types[tensor.name] = onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
    for node in graph.node:
        if (tensor := tensor_of(node)) is not None and node.output[0] not in types:
            types[node.output[0]] = onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
    return types


def concrete(kind: TypeProto | None) -> tuple[int, ...] | None:
    """Return the shape of a tensor type if every dimension is a number, otherwise None."""
    return None if kind is None else _concrete(kind.SerializeToString())


@lru_cache(1 << 16)
def _concrete(data: bytes) -> tuple[int, ...] | None:
    """Compute `concrete`, cached: graphs have far fewer types than values."""
    kind = TypeProto.FromString(data)
    if not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
        return None
    dims = kind.tensor_type.shape.dim
    return tuple(d.dim_value for d in dims) if all(d.HasField("dim_value") for d in dims) else None


MOST_INLINED = 300_000
"""Nodes up to which local functions are inlined: thirty functions, each calling the next twice, make a billion."""


def inlined(light: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model without weights with its local functions inlined.

    Raises
    ------
    ModelError
        Functions cannot be inlined, or expand to more than `MOST_INLINED` nodes.
    """
    count = _expanded(light)
    if count > MOST_INLINED:
        raise ModelError(f"the model's functions expand to {count} nodes: the limit for inlining is {MOST_INLINED}")
    data = light.SerializeToString()
    _, made = worker.ask("ONNX's inliner", "onnx_remat.ir.native:do_inline", limit(count, len(data)), data)
    model: onnx.ModelProto = onnx.ModelProto.FromString(made)
    return model


def do_inline(data: bytes) -> tuple[None, bytes]:
    """Inline for `inlined`."""
    try:
        made = inliner.inline_local_functions(onnx.ModelProto.FromString(data), True)
    except REFUSALS as error:
        raise ModelError(f"the model's functions cannot be inlined: {reason(error)}") from error
    return None, made.SerializeToString()


def _expanded(model: onnx.ModelProto) -> int:
    """Return the number of nodes, bodies included, after inlining every call of a local function."""
    functions = {(f.domain, f.name, f.overload): f.node for f in model.functions}
    sizes: dict[Any, int] = {}

    def nodes(some: Iterable[onnx.NodeProto]) -> list[onnx.NodeProto]:
        flat = []
        for node in some:
            flat.append(node)
            for attribute in node.attribute:
                flat += nodes(attribute.g.node)
                for body in attribute.graphs:
                    flat += nodes(body.node)
        return flat

    bodies = {key: nodes(body) for key, body in functions.items()} | {None: nodes(model.graph.node)}
    pending: list[Any] = [None]  # an explicit stack: functions may call each other deeper than Python does
    open_: set[Any] = set()
    while pending:
        key = pending[-1]
        calls = [called for node in bodies[key] if (called := (node.domain, node.op_type, node.overload)) in functions]
        todo = [called for called in dict.fromkeys(calls) if called not in sizes and called not in open_]
        if todo and key not in open_:
            open_.add(key)
            pending += todo
            continue
        pending.pop()
        sizes[key] = len(bodies[key]) - len(calls) + sum(sizes.get(called, 1) for called in calls)  # cycles: once
    return sizes[None]


def check(model: onnx.ModelProto) -> str:
    """Return the complaint of ONNX's checker about a model, empty if it is valid."""
    data = model.SerializeToString()
    why, _ = worker.ask(
        "ONNX's checker", "onnx_remat.ir.native:do_check", limit(len(model.graph.node), len(data)), data
    )
    return str(why)


def do_check(data: bytes) -> tuple[str, bytes]:
    """Check for `check`."""
    try:
        onnx.checker.check_model(onnx.ModelProto.FromString(data), full_check=False)
    except (onnx.checker.ValidationError, UnicodeDecodeError) as error:  # the latter: it quotes a broken name
        return str(error).splitlines()[0] if str(error).strip() else type(error).__name__, b""
    return "", b""


def reason(error: Exception) -> str:
    """Return ONNX's inliner's reason for a refusal, unless it is an assertion of its source code."""
    text = " ".join(str(error).split())
    return "ONNX's inliner fails on it" if re.search(r"\bassert", text, re.IGNORECASE) else text[:200]


def first_line(error: Exception) -> str:
    """Return the first informative line of an error."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if len(line.split()) > 3), type(error).__name__)
