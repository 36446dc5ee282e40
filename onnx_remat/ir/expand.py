"""Expansion of standard operators without a kernel into the nodes of their ONNX definitions.

ONNX Runtime does this when it loads a file, even with graph optimisations off; a plan needs the nodes that will run.
ONNX has no definition of BatchNormalization in training mode: `batch_norm` provides it. A Conv with a large window has
a kernel, but a slow one: `large_windows` defines it by matrix products.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import onnx
from onnx import inliner, shape_inference

from onnx_remat.errors import ModelError
from onnx_remat.ir import batch_norm, large_windows, native
from onnx_remat.ir.body import names_in, rename_captures
from onnx_remat.ir.light import without_weights
from onnx_remat.ir.naming import Unused
from onnx_remat.ir.opsets import canonical, opset_of
from onnx_remat.ir.training_ops import with_stand_ins
from onnx_remat.process import worker

_DEEPEST = 5  # levels of nested definitions
Ops = Collection[tuple[str, str]]


def expand(model: onnx.ModelProto, replaced: Ops) -> tuple[onnx.ModelProto, frozenset[str]]:
    """Return a model without nodes of the operators `replaced`, and the outputs of the nodes that replace them.

    The nodes of the definition take the node's place and metadata; their names are new. If there is nothing to replace,
    the model itself is returned. Operators in bodies stay: bodies are not planned.

    Raises
    ------
    ModelError
        ONNX cannot expand a node.
    """
    wanted = [i for i, node in enumerate(model.graph.node) if _lacks_kernel(node, replaced)]
    if not wanted:
        return model, frozenset()
    light = without_weights(model)
    data = light.SerializeToString()
    _, made = worker.ask(
        "ONNX's inliner", "onnx_remat.ir.expand:do_expand", native.limit(len(light.graph.node), len(data)), data,
        wanted=wanted, replaced=sorted(map(list, replaced)),
    )  # fmt: skip
    bodies = {int(f.name): f.node for f in onnx.ModelProto.FromString(made).functions}
    if not bodies:
        return model, frozenset()
    unused = Unused(names_in(model.graph))
    nodes: list[onnx.NodeProto] = []
    new: set[str] = set()
    for i, node in enumerate(model.graph.node):
        body = list(_renamed(bodies[i], node, unused)) if i in bodies else [node]
        nodes += body
        if i in bodies:
            new.update(name for inner in body for name in inner.output)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.graph.ClearField("node")
    copy.graph.node.extend(nodes)
    return copy, frozenset(new)


def _lacks_kernel(node: onnx.NodeProto, replaced: Ops) -> bool:
    """Whether to replace a node; of BatchNormalization only nodes in training mode."""
    op = (canonical(node.domain), node.op_type)
    if op == large_windows.OP:
        return op in replaced and large_windows.may_be_large(node)
    return op in replaced and (op != batch_norm.OP or batch_norm.trains(node))


def _renamed(body: Collection[onnx.NodeProto], whole: onnx.NodeProto, unused: Unused) -> Iterator[onnx.NodeProto]:
    """Yield the nodes that define `whole`, with unused names; its inputs and outputs keep theirs."""
    label = whole.name or next(filter(None, whole.output))
    names = {name: name for name in (*whole.input, *whole.output, "")}
    for node in body:
        made = onnx.NodeProto()
        made.CopyFrom(node)
        for name in node.output:
            if name not in names:
                names[name] = unused.fresh(f"{label}/{name}")
        made.input[:] = [names[name] for name in node.input]
        rename_captures(made, names)
        made.output[:] = [names[name] for name in node.output]
        made.name = unused.fresh(f"{label}/{node.op_type}")
        made.ClearField("metadata_props")
        made.metadata_props.extend(whole.metadata_props)
        made.doc_string = whole.doc_string
        yield made


def do_expand(data: bytes, wanted: list[int], replaced: list[list[str]]) -> tuple[None, bytes]:
    """Expand nodes for `expand`: return a model with a function per node in `wanted`, named by its index."""
    model = onnx.ModelProto.FromString(data)
    known = with_stand_ins(model, stock=True).SerializeToString()
    types = native.stated(onnx.GraphProto.FromString(native.do_infer(known, data_prop=True, strict=False)[1]))
    answer = onnx.ModelProto()
    for i in wanted:
        node = model.graph.node[i]
        try:
            body = _definition(node, model, types, {(domain, op) for domain, op in replaced})
        except native.REFUSALS as error:
            raise ModelError(
                f"{_where(node)} cannot be replaced by the operators that define it: {native.reason(error)}"
            ) from error
        if body:
            answer.functions.append(onnx.FunctionProto(name=str(i), node=body))
    return None, answer.SerializeToString()


def _definition(
    node: onnx.NodeProto, model: onnx.ModelProto, types: native.Types, replaced: Ops
) -> Collection[onnx.NodeProto]:
    """Return the nodes that define a node, recursively."""
    if (canonical(node.domain), node.op_type) == batch_norm.OP:
        x, statistics = (types.get(node.input[slot], onnx.TypeProto()) for slot in (0, 3))
        return batch_norm.definition(node, x, statistics, opset_of(model))
    if (canonical(node.domain), node.op_type) == large_windows.OP:
        large = large_windows.is_large(node, types, opset_of(model))
        return large_windows.definition(node, types) if large else []
    alone = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    alone.graph.name = "definition"
    named = [name for name in node.input if name]
    for name in dict.fromkeys(named):
        if name not in types:
            raise ModelError(
                f"{_where(node)} is replaced by the operators that define it, for which the type of its input {name!r} "
                "must be known: add value_info for it"
            )
        alone.graph.input.append(onnx.ValueInfoProto(name=name, type=types[name]))
    alone.graph.output.extend(onnx.ValueInfoProto(name=n, type=types.get(n)) for n in node.output if n)
    alone.graph.node.append(node)
    for _ in range(_DEEPEST):
        left = {(canonical(n.domain), n.op_type) for n in alone.graph.node} & set(replaced)
        if not left:
            return list(alone.graph.node)
        for inner in alone.graph.node:
            if (canonical(inner.domain), inner.op_type) in left:
                inner.domain = ""
                _state_defaults(inner, opset_of(model))
        typed = shape_inference.infer_shapes(alone)
        typed.graph.value_info.extend(_beyond(typed.graph))
        alone = inliner.inline_selected_functions(typed, sorted(left), inline_schema_functions=True)
    raise ModelError(f"{_where(node)} has no definition by other operators")


def _where(node: onnx.NodeProto) -> str:
    return f"node {node.name or next(filter(None, node.output), '')!r} ({node.op_type})"


def _beyond(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    """Yield the values in bodies, and the absent input, whose types the inliner expects in the graph."""
    yield onnx.ValueInfoProto(name="", type=onnx.TypeProto())
    for body in (attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")):
        yield from (*body.input, *body.value_info, *body.output)
        yield from (value for value in _beyond(body) if value.name)


def _state_defaults(node: onnx.NodeProto, opset: int) -> None:
    """Add a node's default attributes, which the inliner does not know."""
    given = {attribute.name for attribute in node.attribute}
    declared = onnx.defs.get_schema(node.op_type, opset, "").attributes
    node.attribute.extend(a.default_value for name, a in declared.items() if name not in given and a.default_value.type)
