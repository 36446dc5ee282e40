"""Type, shape and bytes of every value, or an error that names what is missing; nothing is guessed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TypeAlias

import onnx
from onnx import TensorProto, TypeProto

from onnx_remat.errors import ModelError, ShapeError
from onnx_remat.ir import native, sequences, shape_arithmetic
from onnx_remat.ir.dims import bind, check_dims, symbols_of, typed_values
from onnx_remat.ir.dtypes import tensor_bytes
from onnx_remat.ir.graph import Graph, captures, is_constant
from onnx_remat.ir.light import without_weights
from onnx_remat.ir.metadata import SHAPES_KEY, TAG, entries
from onnx_remat.ir.op_semantics import is_elementwise, nearest_op
from onnx_remat.ir.training_ops import with_stand_ins
from onnx_remat.messages import Message, Setting

Dim: TypeAlias = int | str | None
"""A known size, a symbolic name, or None for an unknown size."""

UNSEEN = TAG + "unseen"
"""Prefix of empty vectors that cannot be folded: an Unsqueeze by one, or a Concat with it, changes nothing."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Facts about one value with symbolic dimensions bound.

    Attributes
    ----------
    dtype : int
        onnx.TensorProto data type; UNDEFINED for sequences and optionals.
    shape : tuple of int
        Concrete sizes; () is a scalar.
    nbytes : int
        Storage, sub-byte types packed as in ONNX.
    symbolic : tuple of int, str or None, or None
        The shape that the runtime will infer from the file alone, dims unbound; None if it will not infer the rank.
    """

    dtype: int
    shape: tuple[int, ...]
    nbytes: int
    symbolic: tuple[Dim, ...] | None


Types: TypeAlias = Mapping[str, TypeProto]
"""Types by value name."""

Asker: TypeAlias = Callable[[onnx.ModelProto, Sequence[str], Types], Types]
"""A source of types: given the model, the names of values without a shape, and all types known so far, it returns the
types of some values."""


def infer(
    graph: Graph,
    dims: Mapping[str, int] | None = None,
    derived: bool = False,
    askers: Sequence[Asker] = (),
    checked: Types | None = None,
) -> dict[str, Tensor]:
    """Infer types, shapes and bytes of every value of a graph.

    ONNX's own inference with data propagation comes first. For missing shapes, sizes are computed node by node
    (`shape_arithmetic`), then backwards from results whose shapes the file states; then each asker is queried in turn,
    and its results are propagated node by node.

    Parameters
    ----------
    graph : Graph
    dims : mapping of str to int, optional
        Sizes of symbolic dimensions.
    derived : bool
        The graph was made of a checked one, by ONNX Runtime or by our writer: shapes that it states are believed, and
        `dims`, from `all_dims`, may name dimensions that it does not have.
    askers : sequence of Asker
        Other sources of shapes: ONNX Runtime, see `ort.shape_askers.SHAPE_ASKERS`.
    checked : Types, optional
        What `check_declared` returned for the graph's model.

    Raises
    ------
    UsageError
        `dims` names a dimension the model does not have.
    ShapeError
        Symbolic dimensions are unbound (one message names all), or a value's shape cannot be inferred.
    ModelError
        The model contradicts itself.
    """
    dims = dict(dims or {})
    _check_inputs(graph.model)
    check_dims(graph.model, dims, derived)
    left_open = _left_open(graph.model, dims)
    if checked and not left_open and all(_shape(checked.get(name)) is not None for name in graph.values):
        return _tensors(graph, checked, checked, {})
    if derived and (parted := _apart(graph.model)):
        as_stated, rest = parted
        types, as_written, _ = _infer(rest, dims, left_open)
        types, as_written = {**as_stated, **types}, {**as_stated, **as_written}
        if all(_shape(types.get(name)) is not None for name in graph.values):
            return _tensors(graph, types, as_written, {})
    light = without_weights(graph.model)
    types, as_written, bound = _infer(light, dims, left_open)
    if loops := _loop_types(bound):
        bound = _with_types(bound, {k: v for k, v in loops.items() if _shape(types.get(k)) is None})
        types = native.infer_types(bound)
    container_bytes = sequences.sizes(graph, types, _bytes)
    missing = [n for n in graph.values if n not in container_bytes and _shape(types.get(n)) is None]
    for ask in (_by_arithmetic, _by_results, *askers, _by_arithmetic):
        if missing:
            wanted = set(missing)
            types |= {k: v for k, v in ask(bound, missing, types).items() if k in wanted}
            container_bytes = sequences.sizes(graph, types, _bytes)
            missing = [n for n in missing if n not in container_bytes and _shape(types.get(n)) is None]
    if missing:
        native.infer_types(bound, strict=True)  # raises if the model is contradictory
        raise ShapeError(_cannot_size(graph, missing, types, derived))
    return _tensors(graph, types, as_written, container_bytes)


def _infer(
    light: onnx.ModelProto, dims: Mapping[str, int], left_open: Types
) -> tuple[dict[str, TypeProto], Types, onnx.ModelProto]:
    """Return the types by ONNX's inference with sizes bound, those of the file as it is, and the model with them bound.

    Raises
    ------
    ModelError
        The model contradicts itself.
    """
    written = with_stand_ins(light, as_runtime=True)
    as_written = native.infer_types(written, data_prop=False)  # the runtime propagates no computed shapes either
    bound = onnx.ModelProto()
    bound.CopyFrom(with_stand_ins(light))
    bind(bound, dims)
    _see_through(bound)
    made = [name for node in light.graph.node for name in node.output if name]
    complete = bound == written and all(_shape(as_written.get(name)) is not None for name in made)
    types = dict(as_written) if complete else native.infer_types(bound)
    if unknown_yet := {k: v for k, v in left_open.items() if _shape(types.get(k)) is None}:
        bound = _with_types(bound, unknown_yet)
        types = native.infer_types(bound)
    _check_left_open(left_open, types)
    return types, as_written, bound


def _apart(model: onnx.ModelProto) -> tuple[dict[str, TypeProto], onnx.ModelProto] | None:
    """Return the types of the values whose shapes a model states, and the part of it that makes the others.

    What this part reads of the rest is an input of it. None are returned if shapes stated in the model are not those
    that inference works with (`with_stand_ins`), or if that spares less than half of the nodes.
    """
    if with_stand_ins(model) is not model:
        return None
    as_stated = {name: kind for name, kind in native.stated(model.graph).items() if _shape(kind) is not None}
    nodes = [
        node for node in model.graph.node
        if is_constant(node) or any(name and name not in as_stated for name in node.output)
    ]  # fmt: skip
    if 2 * len(nodes) > len(model.graph.node):
        return None
    rest = without_weights(model, nodes)
    given = {value.name for value in (*rest.graph.input, *rest.graph.initializer)}
    given.update(name for node in nodes for name in node.output)
    read = dict.fromkeys(name for node in nodes for name in (*node.input, *captures(node)))
    rest.graph.input.extend(
        onnx.ValueInfoProto(name=name, type=as_stated[name]) for name in read if name in as_stated and name not in given
    )
    return as_stated, rest


def _tensors(graph: Graph, types: Types, as_written: Types, container_bytes: Mapping[str, int]) -> dict[str, Tensor]:
    """Return a `Tensor` per value, equal ones shared, from the types with dimensions bound and those of the file."""
    alike: dict[tuple[bytes, bytes | None], Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for name in graph.values:
        if name in container_bytes:
            tensors[name] = Tensor(TensorProto.UNDEFINED, (), container_bytes[name], None)
            continue
        kind, unbound = types[name], as_written.get(name)
        key = kind.SerializeToString(), None if unbound is None else unbound.SerializeToString()
        tensors[name] = alike[key] = alike.get(key) or _tensor(name, kind, unbound)
    return tensors


def all_dims(tensors: Mapping[str, Tensor], dims: Mapping[str, int]) -> dict[str, int]:
    """Return `dims` and the sizes of every other symbolic dimension of the graph's values, derived ones included."""
    known = dict(dims)
    for tensor in tensors.values():
        for size, name in zip(tensor.shape, tensor.symbolic or (), strict=False):
            if isinstance(name, str) and not name.startswith(TAG):
                known.setdefault(name, size)
    return known


def _loop_types(model: onnx.ModelProto) -> dict[str, TypeProto]:
    """Return the types of Loop outputs whose bodies state the same shape for a carried value's input and output.

    ONNX does not infer these shapes, since an iteration might change them.
    """
    types: dict[str, TypeProto] = {}
    for node in model.graph.node:
        body = next((a.g for a in node.attribute if a.name == "body"), None)
        if node.op_type == "Loop" and body is not None:
            for into, out, name in zip(body.input[2:], body.output[1:], node.output, strict=False):
                if name and into.type == out.type and into.type.tensor_type.HasField("shape"):
                    types[name] = into.type
    return types


def _bytes(kind: TypeProto | None) -> int | None:
    shape = _shape(kind)
    return None if shape is None or kind is None else tensor_bytes(kind.tensor_type.elem_type, shape)


def _with_types(model: onnx.ModelProto, types: Mapping[str, TypeProto]) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    kept = [value for value in copy.graph.value_info if value.name not in types]
    del copy.graph.value_info[:]
    copy.graph.value_info.extend(kept)
    copy.graph.value_info.extend(onnx.ValueInfoProto(name=name, type=kind) for name, kind in types.items())
    return copy


def _check_inputs(model: onnx.ModelProto) -> None:
    """Check that graph inputs have types and shapes: everything else follows from them."""
    for value in model.graph.input:
        kind = value.type
        if kind.WhichOneof("value") is None or (kind.HasField("tensor_type") and not kind.tensor_type.elem_type):
            raise ModelError(f"graph input {value.name!r} has no type")
        if kind.HasField("tensor_type") and not kind.tensor_type.HasField("shape"):
            raise ShapeError(f"graph input {value.name!r} has no shape: state its dimensions, symbolic ones by name")
        if any(dim.dim_value < 0 for dim in kind.tensor_type.shape.dim):
            raise ModelError(f"graph input {value.name!r} has a negative dimension: give unknown ones a name instead")


def check_declared(model: onnx.ModelProto) -> Types:
    """Check the types that a model states for its values against those inferred from its inputs, and return the latter.

    None are returned if some take the propagation of small values, which the runtime does not do.

    Raises
    ------
    ModelError
        They contradict each other; the message names the first value and both types.
    """
    bare = without_weights(model)
    del bare.graph.value_info[:]
    for output in bare.graph.output:
        if output.type.HasField("tensor_type"):
            output.type.tensor_type.ClearField("shape")
    try:
        made, propagated = native.infer_fully(bare)
    except ModelError:
        return {}  # with custom ops, inference needs the stated types
    made |= {value.name: value.type for value in model.graph.input}  # an output may be an input, too
    for value in (*model.graph.value_info, *model.graph.output):
        kind, other = value.type, made.get(value.name)
        if other is None or not (kind.HasField("tensor_type") and other.HasField("tensor_type")):
            continue
        stated, found = _dims(kind), _dims(other)
        same_rank = stated is None or found is None or len(stated) == len(found)
        agree = same_rank and all(
            a == b for a, b in zip(stated or (), found or (), strict=False) if isinstance(a, int) and isinstance(b, int)
        )
        if not agree or 0 != kind.tensor_type.elem_type != other.tensor_type.elem_type != 0:
            raise ModelError(
                f"the model states {_text(kind)} for value {value.name!r}, but by shape inference it is {_text(other)}"
            )
    return {} if propagated else made


def _text(kind: TypeProto) -> str:
    name = TensorProto.DataType.Name(kind.tensor_type.elem_type).lower()
    dims = _dims(kind)
    return name if dims is None else f"{name}[{', '.join('?' if d is None else str(d) for d in dims)}]"


def declared(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model with ``value_info`` for every value whose shape follows from the file.

    ONNX Runtime infers the same shapes, but loses those of the values around the ops it fuses.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    known = {value.name for value in typed_values(model.graph)}
    inferred = native.infer_types(with_stand_ins(without_weights(model), as_runtime=True), data_prop=False)
    made = {name for node in model.graph.node for name in node.output}
    copy.graph.value_info.extend(
        onnx.ValueInfoProto(name=name, type=kind)
        for name, kind in inferred.items()
        if name in made and name not in known and _dims(kind) is not None
    )
    return copy


def _tensor(name: str, kind: TypeProto, as_written: TypeProto | None) -> Tensor:
    shape = _shape(kind)
    assert shape is not None
    if any(size < 0 for size in shape):
        raise ModelError(f"value {name!r} has a negative dimension: {shape}")
    dtype = kind.tensor_type.elem_type
    return Tensor(dtype, shape, tensor_bytes(dtype, shape), _dims(as_written))


def axes(kind: TypeProto) -> tuple[Dim, ...]:
    """Return the axes of a type: sizes, names of open ones, None for unknown ones; empty for an unknown rank."""
    return _dims(kind) or ()


def _dims(kind: TypeProto | None) -> tuple[Dim, ...] | None:
    if kind is None or not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
        return None
    return tuple(d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in kind.tensor_type.shape.dim)


def _shape(kind: TypeProto | None) -> tuple[int, ...] | None:
    return native.concrete(kind) if kind is not None and kind.tensor_type.elem_type else None


def _left_open(model: onnx.ModelProto, dims: Mapping[str, int]) -> dict[str, TypeProto]:
    """Return the shapes that an earlier rewrite hid, of the model's values; `dims` binds symbolic dimensions.

    Raises
    ------
    ModelError
        The metadata with these shapes is damaged.
    """
    text = entries(model).get(SHAPES_KEY, "{}")
    made = {name for node in model.graph.node for name in node.output}
    stating = onnx.ModelProto()
    try:
        for name, (dtype, *sizes) in json.loads(text).items():
            if not all(isinstance(size, str) or (isinstance(size, int) and size >= 0) for size in sizes):
                raise ValueError("not a shape")
            tensor_bytes(dtype, [size for size in sizes if isinstance(size, int)])
            if name in made:
                stating.graph.value_info.append(onnx.helper.make_tensor_value_info(name, dtype, sizes))
    except (ValueError, TypeError, AttributeError, RecursionError, ShapeError) as error:
        raise ModelError(f"the model's metadata {SHAPES_KEY!r} is damaged: rewrite the original again") from error
    bind(stating, dims)
    return {value.name: value.type for value in stating.graph.value_info}


def _check_left_open(left_open: Mapping[str, TypeProto], types: Mapping[str, TypeProto]) -> None:
    for name, kind in left_open.items():
        found = types.get(name)
        if found is not None and _shape(kind) is not None and _shape(found) not in (None, _shape(kind)):
            raise ModelError(
                f"the model's metadata {SHAPES_KEY!r} states {_text(kind)} for value {name!r}, but by shape inference "
                f"it is {_text(found)}: rewrite the original again"
            )


def _see_through(model: onnx.ModelProto) -> None:
    """Replace by Identity the Unsqueezes and Concats with which an earlier rewrite hid shapes, and copies."""
    for node in model.graph.node:
        if node.op_type in ("MemcpyFromHost", "MemcpyToHost"):  # between a device and the host
            node.op_type = "Identity"
        if node.op_type in ("Unsqueeze", "Concat") and any(name.startswith(UNSEEN) for name in node.input[1:]):
            node.op_type = "Identity"
            del node.input[1:]
            del node.attribute[:]


def _by_arithmetic(model: onnx.ModelProto, _: Sequence[str], known: Types) -> Types:
    """Infer types node by node with shape arithmetic."""
    return shape_arithmetic.ask(model, known)


def _by_results(model: onnx.ModelProto, _: Sequence[str], known: Types) -> Types:
    """Infer inputs of elementwise ops backwards from results of known shape, if only scalars are broadcast."""
    found = dict(known)
    for node in reversed(model.graph.node):
        like = (node.domain, node.op_type) == ("", "CastLike")
        shape = _shape(found.get(node.output[0])) if like or is_elementwise(node.domain, node.op_type) else None
        reads = [name for name in dict.fromkeys(node.input[:1] if like else node.input) if name]
        unknown = [name for name in reads if _shape(found.get(name)) is None]
        if shape is None or len(unknown) != 1 or any(_shape(found[name]) for name in reads if name not in unknown):
            continue
        kind = found.get(unknown[0])
        if kind is not None and kind.tensor_type.elem_type:
            found[unknown[0]] = onnx.helper.make_tensor_type_proto(kind.tensor_type.elem_type, shape)
    return found


def stating(model: onnx.ModelProto, known: Types) -> onnx.ModelProto:
    """Return a copy of a model that states the known types of the values it computes, except its outputs."""
    made = {name for node in model.graph.node for name in node.output} - {value.name for value in model.graph.output}
    return _with_types(model, {n: kind for n, kind in known.items() if n in made and _shape(kind) is not None})


def _cannot_size(graph: Graph, missing: list[str], types: Mapping[str, TypeProto], derived: bool) -> str:
    name = missing[0]
    producer = graph.makers.get(name)
    where = (
        f"made by node {graph.ops[producer].label!r} ({graph.ops[producer].node.op_type})"
        if producer is not None
        else (f"a graph {graph.values[name].kind}")
    )
    kind = types.get(name)
    more = f" (and {len(missing) - 1} more values)" if len(missing) > 1 else ""
    if kind is not None and kind.WhichOneof("value") not in (None, "tensor_type"):
        form = str(kind.WhichOneof("value")).removesuffix("_type")
        return f"value {name!r}, {where}, is a {form}, whose size is not known before it runs{more}"
    if producer is None and graph.values[name].kind == "input":
        return f"a size of input {name!r} is open and has no name: give it one in the model, or a number"
    if producer is not None and (hint := nearest_op(graph.ops[producer].node.domain, graph.ops[producer].node.op_type)):
        more += f" (did you mean the op {hint!r}?)"
    if derived:  # a graph that ONNX Runtime made of the file, whose values and nodes may be its own
        where_from = "in the graph that ONNX Runtime makes of the file: add value_info for the file's values around it"
        return f"the shape of value {name!r}, {where}, cannot be inferred{more} {where_from}"
    lacking = [package for package in ("onnxruntime", "sympy") if find_spec(package) is None]
    advice = f", or install {' and '.join(lacking)} for symbolic inference" if lacking else ""
    if symbols_of(graph.model):
        advice = Message(", bind its symbolic dimensions with {}{}", Setting("dims"), advice)
    return Message(
        "the shape of value {!r}, {}, cannot be inferred{}: add value_info for it{}", name, where, more, advice
    )
