"""A whole step in the body of an ``If``: ONNX Runtime makes no memory patterns there, whatever the session's options.

With default options a session records in its first step the lifetimes of values, and from the second step on allocates
one block with a place for each (a memory pattern); the plan's values then need up to twice their peak. ONNX Runtime
makes no pattern for a graph with an input that is not a tensor, and values captured by the body of an ``If`` are its
inputs. The body therefore captures a small sequence, whose length is the condition: no optimiser folds that away.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import onnx
from onnx import TensorProto, helper

from onnx_remat.errors import ModelError
from onnx_remat.ir.constant_nodes import tensor_of
from onnx_remat.ir.dtypes import tensor_bytes
from onnx_remat.ir.metadata import BODY_KEY, TAG, entries, set_entries, set_entry
from onnx_remat.ir.naming import Unused
from onnx_remat.ir.opsets import opset_of
from onnx_remat.messages import Setting

_OWN = TAG + "body."
"""Prefix of names made here; the body's outputs are the outputs' names with this prefix."""

_OLDEST = 11  # first opset with sequences
_UNWANTED = Setting("patterns", False)  # the option that requires a body


def bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the bodies of If, Loop, Scan and similar ops."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs


def bytes_in_bodies(nodes: Iterable[onnx.NodeProto]) -> int:
    """Return the bytes of all constants in the bodies of some nodes: a session keeps them from start to end."""
    return sum(constant_bytes(body) for node in nodes for body in bodies(node))


def constant_bytes(body: onnx.GraphProto) -> int:
    """Return the bytes of all constants of a body, and of the bodies in it."""
    tensors = [*body.initializer, *filter(None, map(tensor_of, body.node))]
    return sum(tensor_bytes(tensor.data_type, tensor.dims) for tensor in tensors) + bytes_in_bodies(body.node)


def rename_captures(node: onnx.NodeProto, renamed: Mapping[str, str]) -> None:
    """Rename the outer values that a node's bodies read."""
    for body in bodies(node) if renamed else ():
        inner = defined_in(body)
        outer = {name: new for name, new in renamed.items() if name not in inner}
        for inside in body.node:
            inside.input[:] = [outer.get(name, name) for name in inside.input]
            rename_captures(inside, outer)
        for value in body.output:
            value.name = outer.get(value.name, value.name)


def defined_in(body: onnx.GraphProto) -> set[str]:
    """Return the names that a body defines itself: they shadow outer values."""
    inner = {value.name for value in body.input} | {tensor.name for tensor in body.initializer}
    inner.update(sparse.values.name for sparse in body.sparse_initializer)
    inner.update(name for inside in body.node for name in inside.output if name)
    return inner


def unshadow(graph: onnx.GraphProto) -> None:
    """Rename, in place, values of bodies that have the name of an outer value.

    ONNX requires unique names. Graphs that ONNX Runtime saves violate this: it names the casts that it inserts, inside
    and outside of a body, after the value that they convert.
    """
    _unshadow(graph, set(), Unused(names_in(graph), first=1))


def _unshadow(graph: onnx.GraphProto, outer: set[str], names: Unused) -> None:
    visible = outer | defined_in(graph)
    for node in graph.node:
        for body in bodies(node):
            new = {name: names.fresh(name) for name in sorted(visible & defined_in(body))}
            rename_values(body.node, new)
            for values in (body.input, body.output, body.initializer, body.value_info):
                for value in values:
                    value.name = new.get(value.name, value.name)
            for sparse in body.sparse_initializer:
                sparse.values.name = new.get(sparse.values.name, sparse.values.name)
            _unshadow(body, visible, names)


def names_in(graph: onnx.GraphProto, nodes: bool = True) -> Iterator[str]:
    """Yield every name of a value, and with `nodes` of a node, in a graph and its bodies."""
    for values in (graph.input, graph.output, graph.initializer):
        yield from (value.name for value in values)
    for sparse in graph.sparse_initializer:
        yield sparse.values.name
    for node in graph.node:
        if nodes:
            yield node.name
        yield from node.output
        for body in bodies(node):
            yield from names_in(body, nodes)


def is_body(model: onnx.ModelProto) -> bool:
    """Whether the step of this model is in a body, as `into_body` writes it."""
    return _step_in(model) is not None


def check_fits(model: onnx.ModelProto) -> None:
    """Check that `into_body` will succeed; it depends only on names and types, so that this precedes planning.

    Raises
    ------
    ModelError
        The model's opset has no sequences, an output is not a tensor of a known type, or a name has the prefix of names
        made here.
    """
    opset = opset_of(model)
    if not opset:
        raise ModelError("{} needs opset {} of ONNX's own ops, which the model does not import", _UNWANTED, _OLDEST)
    if opset < _OLDEST:
        raise ModelError("{} needs opset {}: convert the model from opset {} first", _UNWANTED, _OLDEST, opset)
    if odd := next((name for name in names_in(model.graph) if name.startswith(_OWN)), None):
        raise ModelError("{0}: the name {1!r} is needed for the body; rename it, or leave {0} out", _UNWANTED, odd)
    outputs = _made_outputs(model.graph)
    if not outputs:
        raise ModelError("{}: every output is an input or a constant, so a body would compute nothing", _UNWANTED)
    for value in outputs:
        if not value.type.tensor_type.elem_type:
            raise ModelError("{0}: output {1!r} is not a tensor of a known type; leave {0} out", _UNWANTED, value.name)


def into_body(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the same step in the body of an ``If``: equal results, no memory patterns.

    Inputs, outputs and initializers keep their names and places; nodes and the value_info of their results move.

    Raises
    ------
    ModelError
        See `check_fits`.
    """
    if is_body(model):
        return model
    check_fits(model)
    made, graph = _frame(model), model.graph
    outputs = _made_outputs(graph)
    names = {value.name: _OWN + value.name for value in outputs}
    step = onnx.GraphProto(name="step", node=graph.node, value_info=graph.value_info)
    rename_values(step.node, names)
    other = onnx.GraphProto(name="other")
    for value in outputs:
        step.output.append(_renamed(value, names[value.name]))
        other.node.append(_nothing(value))
        kind = value.type.tensor_type.elem_type
        other.output.append(helper.make_tensor_value_info(other.node[-1].output[0], kind, None))
    for body in (step, other):
        body.node.insert(0, _capture(body.name))
    made.graph.node.extend(_condition())
    made.graph.node.append(
        helper.make_node(
            "If", [f"{_OWN}always"], [value.name for value in outputs], name=f"{_OWN}step", then_branch=step,
            else_branch=other,
        )
    )  # fmt: skip
    set_entry(made, BODY_KEY, "1")
    return made


def out_of_body(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the step as it was before `into_body`; any other model unchanged.

    Raises
    ------
    ModelError
        Its metadata state that the step is in a body, but the graph differs from that.
    """
    if BODY_KEY not in entries(model):
        return model
    if (step := _step_in(model)) is None:
        raise ModelError(
            "by its metadata the step is in the body of an If ({}), but the graph is not as onnx-remat "
            "wrote it: rewrite the original again, and apply other tools before that",
            _UNWANTED,
        )
    made = _frame(model)
    made.graph.node.extend(step.node[1:])
    made.graph.value_info.extend(step.value_info)
    rename_values(made.graph.node, {value.name: value.name.removeprefix(_OWN) for value in step.output})
    return made


def _condition() -> list[onnx.NodeProto]:
    """Return nodes that compute a true condition that no optimiser folds."""
    zero = helper.make_tensor("zero", TensorProto.INT64, [], [0])
    return [
        helper.make_node("Constant", [], [f"{_OWN}zero"], value=zero),
        helper.make_node("SequenceConstruct", [f"{_OWN}zero"], [f"{_OWN}sequence"]),
        helper.make_node("SequenceLength", [f"{_OWN}sequence"], [f"{_OWN}length"]),
        helper.make_node("Greater", [f"{_OWN}length", f"{_OWN}zero"], [f"{_OWN}always"]),
    ]


def _capture(body: str) -> onnx.NodeProto:
    """Return the node by which a body captures the sequence."""
    return helper.make_node("SequenceLength", [f"{_OWN}sequence"], [f"{_OWN}length.{body}"])


def _step_in(model: onnx.ModelProto) -> onnx.GraphProto | None:
    """Return the body that is the step; None unless the graph does nothing else, whatever the metadata state."""
    nodes, wanted = model.graph.node, _condition()
    if len(nodes) != len(wanted) + 1 or BODY_KEY not in entries(model):
        return None
    last = nodes[-1]
    step = next((a.g for a in last.attribute if a.name == "then_branch"), None)
    if step is None or not step.node or step.input or step.initializer or step.sparse_initializer:
        return None
    if not all(map(_same, (*nodes[:-1], step.node[0]), (*wanted, _capture("step")))):
        return None
    led = (last.op_type, last.domain, list(last.input)) == ("If", "", [f"{_OWN}always"])
    return step if led and [value.name for value in step.output] == [_OWN + name for name in last.output] else None


def _same(node: onnx.NodeProto, wanted: onnx.NodeProto) -> bool:
    """Whether two nodes compute the same from the same inputs; names and similar annotations do not matter."""
    return all(getattr(node, part) == getattr(wanted, part) for part in ("op_type", "domain", "input", "output")) and (
        sorted(a.SerializeToString() for a in node.attribute) == sorted(a.SerializeToString() for a in wanted.attribute)
    )


def _made_outputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """Return the outputs made by nodes; the others are inputs or initializers."""
    made = {name for node in graph.node for name in node.output}
    return [value for value in graph.output if value.name in made]


def _frame(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of the model without nodes and value_info."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    del made.graph.node[:], made.graph.value_info[:]
    set_entries(made, {key: value for key, value in entries(made).items() if key != BODY_KEY})
    return made


def rename_values(nodes: Iterable[onnx.NodeProto], names: Mapping[str, str]) -> None:
    """Rename values wherever nodes read or write them, also in bodies."""
    for node in nodes:
        for place in (node.input, node.output):
            for index, name in enumerate(place):
                if name in names:
                    place[index] = names[name]
        rename_captures(node, names)


def _renamed(value: onnx.ValueInfoProto, name: str) -> onnx.ValueInfoProto:
    made = onnx.ValueInfoProto()
    made.CopyFrom(value)
    made.name = name
    return made


def _nothing(value: onnx.ValueInfoProto) -> onnx.NodeProto:
    """Return a node that makes an empty tensor of an output's type, for the branch that is never taken."""
    tensor = TensorProto(data_type=value.type.tensor_type.elem_type, dims=[0])
    return helper.make_node("Constant", [], [f"{_OWN}no.{value.name}"], value=tensor)
