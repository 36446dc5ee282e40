"""The IR: an immutable bipartite graph of op and value vertices in file order, also as a networkx graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial, wraps
from sys import intern
from typing import Any, ParamSpec, TypeVar

import networkx as nx
import onnx

from onnx_remat.errors import ModelError, OnnxRematError
from onnx_remat.ir import native
from onnx_remat.ir.body import bodies, defined_in
from onnx_remat.ir.constant_nodes import tensor_of
from onnx_remat.ir.expand import Ops, expand
from onnx_remat.ir.light import without_weights
from onnx_remat.ir.op_semantics import nearest_op, semantics
from onnx_remat.ir.opsets import STANDARD, STANDARD_DOMAINS, canonical, one_name_for_the_standard, opsets_of

_Rule = ParamSpec("_Rule")
_Result = TypeVar("_Result")

INPUT, INITIALIZER, NODE = "input", "initializer", "node"

_OVERRIDABLE = 4  # IR version from which on a caller may feed an input that has an initializer of the same name


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor (or sequence, or optional) by its name; `kind` is its origin: INPUT, INITIALIZER or NODE."""

    name: str
    kind: str
    is_output: bool


@dataclass(frozen=True, slots=True)
class Op:
    """One node.

    Attributes
    ----------
    index : int
        Counts executable nodes in file order.
    captured : tuple of str
        The outer values that its bodies read.
    expanded : bool
        The node is not in the file but was made by `expand`; ONNX Runtime numbers it after those in the file.
    kind : (str, str)
        Its operator: canonical domain and op type.
    has_body : bool
        Whether it is an If, a Loop, a Scan or similar.
    reads : tuple of str
        Every value it depends on, by slot, captures of bodies last, without absent inputs.
    writes : tuple of str
        Every value it makes, by slot, without absent outputs.
    """

    index: int
    node: onnx.NodeProto = field(repr=False, compare=False)
    inputs: tuple[str, ...]
    captured: tuple[str, ...]
    outputs: tuple[str, ...]
    expanded: bool = False
    kind: tuple[str, str] = field(init=False, repr=False, compare=False)
    has_body: bool = field(init=False, repr=False, compare=False)
    reads: tuple[str, ...] = field(init=False, repr=False, compare=False)
    writes: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        derive = partial(object.__setattr__, self)
        derive("kind", _kind(self.node.domain, self.node.op_type))
        derive("has_body", any(True for _ in bodies(self.node)))
        derive("reads", _present(self.inputs + self.captured))
        derive("writes", _present(self.outputs))

    @property
    def label(self) -> str:
        """Name for messages."""
        return self.node.name or f"{self.node.op_type}->{next(filter(None, self.outputs), '?')}"


@cache
def _kind(domain: str, op_type: str) -> tuple[str, str]:
    return canonical(domain), op_type


def _present(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(filter(None, names)) if "" in names else names


def blames_the_node(rule: Callable[_Rule, _Result]) -> Callable[_Rule, _Result]:
    """Decorator: turn arithmetic errors in a rule about an op into a ModelError that names the node.

    ONNX's inference accepts nodes that no kernel runs: a group of 0, attributes that contradict the shapes.
    """

    @wraps(rule)
    def guarded(*arguments: _Rule.args, **more: _Rule.kwargs) -> _Result:
        try:
            return rule(*arguments, **more)
        except OnnxRematError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            op = next(a for a in arguments if isinstance(a, Op))
            where, why = f"node {op.label!r} ({op.node.op_type})", f"{type(error).__name__}: {error}"
            raise ModelError(f"{where} is not as its operator is defined: {why}") from error

    return guarded


@dataclass(frozen=True)
class Graph:
    """A model's main graph.

    Attributes
    ----------
    ops : tuple of Op
        In file order. ``Constant`` nodes are initializers here, as in ONNX Runtime.
    values : dict of Value by name
        Inputs, initializers and node outputs in order of definition.
    model : onnx.ModelProto
        The model read, with model-local functions inlined and operators expanded: the writer changes a copy of it.
    """

    ops: tuple[Op, ...]
    values: Mapping[str, Value]
    model: onnx.ModelProto

    @cached_property
    def nx(self) -> nx.DiGraph:
        """The same as a networkx graph, built on first use: analyses read `makers` and `readers`, a tenth of its size.

        Vertices are op indices (int) with attribute ``op`` and value names (str) with attribute ``value``; an edge
        value -> op or op -> value carries ``slots``, since one value may feed two inputs of an op.
        """
        graph = nx.DiGraph()
        graph.add_nodes_from((name, {"value": value}) for name, value in self.values.items())
        for op in self.ops:
            graph.add_node(op.index, op=op)
            graph.add_edges_from((name, op.index, {"slots": s}) for name, s in _slots(op.inputs + op.captured).items())
            graph.add_edges_from((op.index, name, {"slots": s}) for name, s in _slots(op.outputs).items())
        return graph

    @cached_property
    def makers(self) -> Mapping[str, int]:
        """The op index of each value that an op makes."""
        return {name: op.index for op in self.ops for name in op.writes}

    @cached_property
    def fed(self) -> frozenset[str]:
        """The inputs that a caller feeds, or may feed: before IR version 4 those with an initializer are constants."""
        inputs = (value.name for value in self.model.graph.input)
        overridable = self.model.ir_version >= _OVERRIDABLE
        return frozenset(name for name in inputs if overridable or self.values[name].kind == INPUT)

    def n_nodes(self) -> int:
        """Return the number of executable nodes of the model: as many as `ops`, unless some ops were split."""
        return sum(not is_constant(node) for node in self.model.graph.node)

    @cached_property
    def readers(self) -> Mapping[str, Sequence[int]]:
        """The indices of the ops that read each value, ascending, without repeats; of unread values none."""
        readers: dict[str, list[int]] = {name: [] for name in self.values}
        for op in self.ops:
            for name in dict.fromkeys(op.reads):
                readers[name].append(op.index)
        return readers


def build(model: onnx.ModelProto, replaced: Ops = ()) -> Graph:
    """Build the `Graph` of a model, with nodes of the operators `replaced` expanded into their definitions (`expand`).

    Raises
    ------
    ModelError
        Undefined, doubly defined or cyclically defined values, nodes out of topological order or of unknown ops, no
        outputs, no opset import.
    """
    _check_opsets(model)
    model = one_name_for_the_standard(model)
    if model.functions:
        model = _inlined(model)
    model, expanded = expand(model, replaced)
    proto, versions = model.graph, opsets_of(model)
    values: dict[str, Value] = {}
    outputs = {value.name for value in proto.output}
    if not outputs:
        raise ModelError("the graph has no outputs: nothing to compute")
    if len(outputs) < len(proto.output):
        twice = next(v.name for i, v in enumerate(proto.output) if v.name in {o.name for o in proto.output[:i]})
        raise ModelError(f"graph output {twice!r} is listed twice")

    def define(name: str, kind: str, where: str) -> None:
        if not name:
            raise ModelError(f"a {where} has no name")
        if name in values and not (kind == INITIALIZER and values[name].kind == INPUT):
            raise ModelError(f"value {name!r} is defined twice ({where}): names must be unique")
        values[name] = Value(name, kind, name in outputs)

    for value in proto.input:
        define(value.name, INPUT, "graph input")
    for tensor in proto.initializer:
        define(tensor.name, INITIALIZER, "initializer")
    for sparse in proto.sparse_initializer:
        define(sparse.values.name, INITIALIZER, "sparse initializer")
    ops: list[Op] = []
    for node in proto.node:
        where = f"node {node.name or node.op_type!r}"
        reads, makes = tuple(node.input), tuple(node.output)
        if bytes in map(type, (node.name, node.op_type, node.domain, *reads, *makes)):
            raise ModelError(f"node {len(ops)} has a name that is not UTF-8")  # protobuf then hands out bytes
        if not any(makes):
            raise ModelError(f"{where} makes nothing: it has no outputs")
        if is_constant(node):
            define(makes[0], INITIALIZER, where)
            continue
        _check_op(node, where, versions)
        reads, makes = tuple(map(intern, reads)), tuple(map(intern, makes))  # one string for all mentions of a name
        op = Op(len(ops), node, reads, captures(node), makes, makes[0] in expanded)
        for name in op.reads:
            if name not in values:
                raise ModelError(f"{where} reads {name!r}, which {_why_missing(name, proto)}")
        for name in op.writes:
            define(name, NODE, where)
        ops.append(op)
    for value in proto.output:
        if not value.name:
            raise ModelError("a graph output has no name")
        if value.name not in values:
            raise ModelError(f"graph output {value.name!r} is made by no node")
    return Graph(tuple(ops), values, model)


def constants(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Return the constants of a graph, by name: ``Constant`` nodes, and initializers that no caller may override."""
    inputs = {value.name for value in graph.input}
    stated = {tensor.name: tensor for tensor in graph.initializer if tensor.name not in inputs}
    given = ((node, tensor_of(node)) for node in graph.node)
    return stated | {node.output[0]: tensor for node, tensor in given if tensor is not None}


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Return a node's attributes as Python values, without bodies."""
    return {
        a.name: onnx.helper.get_attribute_value(a)
        for a in node.attribute
        if a.type not in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
    }


def is_constant(node: onnx.NodeProto) -> bool:
    """Whether a node is a ``Constant``, which ONNX Runtime turns into an initializer when it loads the file."""
    return node.op_type == "Constant" and canonical(node.domain) == STANDARD


def _check_opsets(model: onnx.ModelProto) -> None:
    """Check that the IR version and, for every domain, the only opset version exist."""
    if model.ir_version > onnx.IR_VERSION:
        raise ModelError(f"the model has IR version {model.ir_version}: onnx here knows up to {onnx.IR_VERSION}")
    if not model.opset_import:
        raise ModelError("the model imports no operator set: it is not a valid ONNX model")
    versions: dict[str, int] = {}
    newest = onnx.defs.onnx_opset_version()
    for opset in model.opset_import:
        domain = canonical(opset.domain)
        if versions.setdefault(domain, opset.version) != opset.version:
            raise ModelError(f"the model imports two versions of opset {domain or 'ai.onnx'!r}")
        if domain == STANDARD and not 1 <= opset.version <= newest:
            raise ModelError(f"the model uses opset {opset.version}: the installed onnx package knows 1 to {newest}")


def _check_op(node: onnx.NodeProto, where: str, versions: Mapping[str, int]) -> None:
    """Check that a standard op exists and has its required inputs and attributes; other domains have no schema."""
    if node.domain not in STANDARD_DOMAINS:
        if node.domain not in versions:
            raise ModelError(f"{where} is of domain {node.domain!r}, which the model does not import")
        return
    version = versions.get(STANDARD, 0)
    if not version:
        raise ModelError(f"{where} is a standard op, but the model does not import the standard operator set")
    rules = _rules(node.op_type, version)
    if rules is None:
        if not semantics("", node.op_type).known:
            close = nearest_op("", node.op_type)
            hint = f"; did you mean {close!r}?" if close else ""
            raise ModelError(f"{where}: there is no operator {node.op_type!r} in opset {version}{hint}")
        return
    for attribute in node.attribute:
        kind, kind_name = rules.attributes.get(attribute.name, (attribute.type, ""))
        if attribute.type != kind and not attribute.ref_attr_name:
            raise ModelError(f"{where} ({node.op_type}): attribute {attribute.name!r} must be of type {kind_name}")
    for name in rules.required:
        if all(attribute.name != name for attribute in node.attribute):
            raise ModelError(f"{where} ({node.op_type}) lacks its attribute {name!r}")
    for slot, name in rules.inputs:
        if slot >= len(node.input) or not node.input[slot]:
            raise ModelError(f"{where} ({node.op_type}) lacks its input {name!r}")


@dataclass(frozen=True, slots=True)
class _Rules:
    """Requirements for a node of an operator.

    Attributes
    ----------
    attributes : mapping of str to (int, str)
        Types of attributes, as a number and a name.
    required : tuple of str
        Required attributes.
    inputs : tuple of (int, str)
        Slots of the required inputs, and their names.
    """

    attributes: Mapping[str, tuple[int, str]]
    required: tuple[str, ...]
    inputs: tuple[tuple[int, str], ...]


@cache
def _rules(op_type: str, version: int) -> _Rules | None:
    """Return the requirements of a standard operator's schema, None if it has no schema."""
    try:
        schema = onnx.defs.get_schema(op_type, version, "")
    except onnx.defs.SchemaError:
        return None
    single = onnx.defs.OpSchema.FormalParameterOption.Single
    return _Rules(
        {name: (a.type.value, a.type.name) for name, a in schema.attributes.items()},  # type: ignore[attr-defined]
        tuple(name for name, attribute in schema.attributes.items() if attribute.required),
        tuple((slot, wanted.name) for slot, wanted in enumerate(schema.inputs) if wanted.option == single),
    )


def _inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy that calls no local functions; their definitions stay in the file."""
    made = native.inlined(without_weights(model))
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for part in ("node", "value_info"):
        copy.graph.ClearField(part)
        getattr(copy.graph, part).extend(getattr(made.graph, part))
    copy.ClearField("opset_import")
    copy.opset_import.extend(made.opset_import)
    return copy


def _why_missing(name: str, proto: onnx.GraphProto) -> str:
    if any(name in node.output for node in proto.node):
        return "is made only later: sort the nodes topologically first (or the graph has a cycle)"
    return "nothing defines: the model is invalid or was cut out of a larger one"


def captures(node: onnx.NodeProto) -> tuple[str, ...]:
    """Return the outer values read by the node's bodies, each once, in order of first use."""
    seen: dict[str, None] = {}
    for body in bodies(node):
        inner = defined_in(body)
        for inside in body.node:
            seen.update(dict.fromkeys(n for n in (*inside.input, *captures(inside)) if n and n not in inner))
        seen.update(dict.fromkeys(value.name for value in body.output if value.name not in inner))
    return tuple(seen)


def _slots(names: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    slots: dict[str, list[int]] = {}
    for slot, name in enumerate(names):
        if name:
            slots.setdefault(name, []).append(slot)
    return {name: tuple(found) for name, found in slots.items()}
