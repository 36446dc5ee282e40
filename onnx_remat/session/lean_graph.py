"""The lean graph of a step, which a `Session` loads: without control edges, nodes in execution order.

ONNX Runtime's default order needs control edges to enforce a schedule. A temporary copy needs none: without graph
optimisations and with ``ExecutionOrder.PRIORITY_BASED``, ONNX Runtime runs the nodes in the order of the file.

However, ONNX Runtime changes some graphs whenever it loads them: it inserts casts around ops without a half-precision
kernel, removes adjacent casts, duplicates a DequantizeLinear with two readers, inlines functions. A layout is valid for
one order of one graph only, so `difference` compares the graph `as_loaded` with the lean graph.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto

from onnx_remat import files
from onnx_remat.fuse.shim import DOMAIN as FUSED_DOMAIN
from onnx_remat.ir import graph, shape_arithmetic
from onnx_remat.ir.body import bodies, rename_captures
from onnx_remat.ir.op_semantics import semantics
from onnx_remat.ir.opsets import canonical
from onnx_remat.ir.shapes import Tensor
from onnx_remat.memory.order import priority_order
from onnx_remat.ort import runtime
from onnx_remat.ort.kernels.base import Kernels
from onnx_remat.ort.moves import DOWN, UP
from onnx_remat.process.worker import ask


@dataclass(frozen=True)
class LeanNode:
    """One node as it will run.

    Attributes
    ----------
    node : onnx.NodeProto
        The node, with inputs and outputs by slot.
    captured : tuple of str
        Outer values that its bodies read.
    plain : frozenset of int, optional
        For a fused node, the input slots that its kernel reads element by element, see `fuse.nodes`.
    segments : int
        For a fused node, the number of kernels that it joins, each with an equal share of the inputs and outputs.
    """

    node: onnx.NodeProto
    captured: tuple[str, ...] = ()
    plain: frozenset[int] | None = None
    segments: int = 1

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Values that the node reads, without absent inputs."""
        return tuple(name for name in (*self.node.input, *self.captured) if name)

    @cached_property
    def writes(self) -> tuple[str, ...]:
        """Values that the node produces, without absent outputs."""
        return tuple(name for name in self.node.output if name)

    @property
    def label(self) -> str:
        """Name of the node in messages."""
        return plain_name(self.node.name) or f"{self.node.op_type}->{next(iter(self.writes), '?')}"


def without_control_edges(
    ops: Sequence[graph.Op], model: onnx.ModelProto, tensors: Mapping[str, Tensor]
) -> list[LeanNode]:
    """Return the nodes of a graph, in the order of `ops`, without those that only enforce the order.

    An Unsqueeze by no axes returns its input unchanged, and so do a Concat with an empty vector (see `write.barriers`)
    and a Where that chooses between a value and itself by the Xor of another with itself, as converters write it: their
    readers read that input instead. What computes such axes, vectors and conditions is removed when it has no reader
    left. Graph outputs stay, and so do other Wheres: ONNX Runtime's turns -0.0 into 0.0.

    Parameters
    ----------
    ops : sequence of Op
        In execution order.
    model : onnx.ModelProto
        The model of `ops`; it is not changed.
    tensors : mapping of str to Tensor
        Types and shapes of its values.
    """
    kept = {value.name for value in model.graph.output}
    instead: dict[str, str] = {}
    waited_for: set[str] = set()
    never: set[str] = set()
    steps: list[LeanNode] = []
    for op in ops:
        name = next(iter(op.writes))
        if op.node.op_type == "Xor" and not op.node.domain and op.inputs[0] == op.inputs[1]:
            never.add(name)
        same = _unchanged(op, tensors, instead, never)
        if same and name not in kept:
            instead[name] = instead.get(same, same)
            waited_for.update(instead.get(each, each) for each in op.inputs)
        else:
            steps.append(_reading(op, instead))
    return _without_unread(steps, kept, waited_for)


def _unchanged(op: graph.Op, tensors: Mapping[str, Tensor], instead: Mapping[str, str], never: Set[str]) -> str:
    """Return the input that an op returns unchanged, empty if there is none; see `without_control_edges`."""
    if op.node.domain or not all(op.inputs):
        return ""
    if op.node.op_type in ("Unsqueeze", "Concat") and len(op.inputs) == 2:
        first, second = (tensors[name] for name in op.inputs)
        vector = len(first.shape) == 1 or op.node.op_type == "Unsqueeze"
        return op.inputs[0] if second.shape == (0,) and vector and first.dtype != TensorProto.UNDEFINED else ""
    if op.node.op_type == "Where" and op.inputs[0] in never:
        chosen, other = (instead.get(name, name) for name in op.inputs[1:])
        return chosen if chosen == other and tensors[chosen].shape == tensors[op.node.output[0]].shape else ""
    return ""


def _reading(op: graph.Op, instead: Mapping[str, str]) -> LeanNode:
    node = onnx.NodeProto()
    node.CopyFrom(op.node)
    node.input[:] = [instead.get(name, name) for name in node.input]
    rename_captures(node, {name: instead[name] for name in op.captured if name in instead})
    return LeanNode(node, tuple(instead.get(name, name) for name in op.captured))


def _without_unread(steps: list[LeanNode], kept: Iterable[str], waited_for: Iterable[str]) -> list[LeanNode]:
    """Return `steps` without those that computed only values in `waited_for`."""
    wanted, lost = set(kept), set(waited_for)
    left = []
    for step in reversed(steps):
        if wanted.isdisjoint(step.writes) and not lost.isdisjoint(step.writes):
            lost.update(step.reads)
            continue
        wanted.update(step.reads)
        left.append(step)
    return left[::-1]


_EXACT = {
    "Add", "And", "Cast", "Concat", "Div", "Equal", "Gather", "Greater", "GreaterOrEqual", "Identity", "Less",
    "LessOrEqual", "Max", "Min", "Mul", "Neg", "Not", "Or", "Range", "ReduceMax", "ReduceMin", "ReduceProd",
    "ReduceSum", "Reshape", "Shape", "Size", "Slice", "Squeeze", "Sub", "Transpose", "Unsqueeze", "Where",
}  # fmt: skip
"""Ops on sizes whose results are bit-identical in every implementation."""

_EXACT_OF_INTEGERS = {"Max", "Min", "Range", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Where"}
"""Those that are so for integers alone: sums have an order, and ONNX Runtime's choices may turn -0.0 into 0.0."""

_INTEGERS = frozenset({TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL})
_HALVES = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16})  # a Cast to them may round twice


def without_sizes(
    steps: Sequence[LeanNode], model: onnx.ModelProto, tensors: Mapping[str, Tensor]
) -> tuple[list[LeanNode], tuple[onnx.TensorProto, ...]]:
    """Return `steps` without those that only compute with sizes, and their outputs that others read as constants.

    All sizes are known here, but a step with a symbolic batch computes them from its inputs. On a device, each such
    number is computed on the host, which waits for it.
    """
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    fed, kept = ({value.name for value in values} for values in (model.graph.input, model.graph.output))
    data = {each.name: each for each in model.graph.initializer if each.name not in fed and _is_small(each)}
    given = set(data)

    def shape_of(name: str) -> tuple[int, ...] | None:
        found = tensors.get(name)
        return found.shape if found is not None and found.dtype != TensorProto.UNDEFINED else None

    left = []
    for step in steps:
        made = {tensors[name].dtype for name in step.writes}
        rounds = step.node.op_type in _EXACT_OF_INTEGERS and not made <= _INTEGERS
        rounds |= step.node.op_type == "Cast" and not made.isdisjoint(_HALVES)
        copied = step.node.op_type in ("MemcpyFromHost", "MemcpyToHost")  # a weight is already where it is read
        exact = copied or (step.node.op_type in _EXACT and not rounds)
        if exact and not step.captured and kept.isdisjoint(step.writes):
            node = onnx.helper.make_node("Identity", step.reads, step.writes) if copied else step.node
            shape_arithmetic.compute(node, shape_of, data, opsets)
            for name in set(step.writes) & data.keys():  # onnx's evaluator takes some axes and ends in other ways
                found = data[name]
                if (found.data_type, tuple(found.dims)) != (tensors[name].dtype, tensors[name].shape):
                    del data[name]
        if not any(name in data for name in step.writes):
            left.append(step)
    read = {name for step in left for name in step.reads}
    return left, tuple(found for name, found in data.items() if name in read and name not in given)


def _is_small(weight: onnx.TensorProto) -> bool:
    return math.prod(weight.dims) <= shape_arithmetic.MOST and weight.data_location != TensorProto.EXTERNAL


def moved_when_due(steps: Sequence[LeanNode], kernels: Kernels) -> list[LeanNode]:
    """Return `steps` with copies to the host as early, and copies from it as late as possible, of state as well.

    Control edges cannot enforce this: an edge would run through the host's copy, on the device.
    """
    down = {step.node.output[0]: step for step in steps if step.node.op_type == DOWN}
    made = {name for step in steps for name in step.writes}
    late: dict[str, LeanNode] = {}  # copies up of state and of what was copied down, and views of them
    for step in steps:
        (first, *_), viewed = step.node.input or ("",), {slot for slot, _ in kernels.aliases(step.node)}
        if (step.node.op_type == UP and (first in down or first not in made)) or (0 in viewed and first in late):
            late[step.node.output[0]] = step
    read = {step.node.input[0] for step in late.values()}
    used = {name for step in steps for name in step.reads}
    early: dict[str, list[LeanNode]] = {}
    for name, step in down.items():
        if (name in read or name not in used) and step.node.input[0] in made:
            early.setdefault(step.node.input[0], []).append(step)
    waiting = {id(step) for step in (*late.values(), *(step for each in early.values() for step in each))}
    result: list[LeanNode] = []
    done: set[int] = set()

    def take(step: LeanNode) -> None:
        done.add(id(step))
        for name in step.reads:
            name = down[name].node.input[0] if name in down else name
            if name in late and id(late[name]) not in done:
                take(late[name])
        result.append(step)
        for name in step.writes:
            result.extend(early.get(name, ()))

    for step in steps:
        if id(step) not in waiting:
            take(step)
    left = (step for step in late.values() if id(step) not in done)  # graph outputs, if any
    for step in left:
        take(step)
    return result


def edges(steps: Sequence[LeanNode]) -> tuple[list[list[int]], list[bool]]:
    """Return for each node the nodes whose outputs it reads, and whether it is a Shape or a Size."""
    maker = {name: i for i, step in enumerate(steps) for name in step.writes}
    producers = [[maker[name] for name in step.reads if name in maker] for step in steps]
    return producers, [step.node.op_type in ("Shape", "Size") and not step.node.domain for step in steps]


def as_run(steps: Sequence[LeanNode]) -> list[LeanNode]:
    """Return `steps` in the order in which ONNX Runtime runs them from a file with this order."""
    order = priority_order(*edges(steps))
    assert len(order) == len(steps), "each of some nodes waits for another of them"
    return [steps[i] for i in order]


def copy_of(
    model: onnx.ModelProto,
    steps: Sequence[LeanNode],
    bound: Iterable[str],
    constants: Iterable[onnx.TensorProto] = (),
    without: Container[str] = (),
) -> onnx.ModelProto:
    """Return the model to load: `steps` in their order, with the values in `bound` as additional graph outputs.

    `constants` are added to the model's weights; inputs and outputs in `without` are left out. Names of nodes start
    with their positions. Documentation and metadata are left out, since ONNX Runtime would keep them in memory.
    """
    source = model.graph
    copy = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    copy.graph.name = "step"
    for field in ("input", "output"):
        getattr(copy.graph, field).extend(value for value in getattr(source, field) if value.name not in without)
    copy.graph.initializer.extend(source.initializer)
    copy.graph.sparse_initializer.extend(source.sparse_initializer)
    copy.graph.initializer.extend(constants)
    copy.graph.node.extend(node for node in source.node if graph.is_constant(node))
    stated: dict[str, None] = {}
    for i, step in enumerate(steps):
        node = copy.graph.node.add()
        node.CopyFrom(step.node)
        node.name = named(i, plain_name(step.node.name))
        node.ClearField("doc_string")
        node.ClearField("metadata_props")
        if semantics(node.domain, node.op_type).stated:
            stated |= dict.fromkeys(step.writes)
    own = {value.name for value in source.output}
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in bound if name not in own)
    copy.graph.value_info.extend(value for value in source.value_info if value.name in stated)
    if any(step.node.domain == FUSED_DOMAIN for step in steps):
        copy.opset_import.append(onnx.helper.make_opsetid(FUSED_DOMAIN, 1))
    return copy


def as_loaded(copy: onnx.ModelProto, path: Path, providers: Sequence[str]) -> onnx.ModelProto:
    """Return the graph that ONNX Runtime has after loading a lean graph, weights included.

    Parameters
    ----------
    copy : onnx.ModelProto
        The lean graph.
    path : Path
        File of the lean graph.
    providers : sequence of str

    Raises
    ------
    ModelError
        ONNX Runtime cannot load it.
    """
    with files.scratch() as folder:
        target = str(folder / "loaded.onnx")
        ask(
            "ONNX Runtime", "onnx_remat.session.loading:load_and_save", runtime.limit(copy, providers[0]),
            on_device=providers[0] not in runtime.HOST, path=str(path), target=target, providers=[*providers],
        )  # fmt: skip
        return onnx.load(target, load_external_data=False)


def difference(planned: onnx.ModelProto, loaded: onnx.ModelProto) -> str:
    """Describe the first node in which two graphs differ, for a message; empty where they are equal.

    Nodes are compared by name: op, inputs, outputs, and the nodes of their bodies. Their order in the two files is
    ignored, since ONNX Runtime saves a graph in another order than it runs it.
    """
    made = {node.name: node for node in loaded.graph.node}
    for node in planned.graph.node:
        if graph.is_constant(node):
            continue  # an initializer once it is loaded
        other = made.pop(node.name, None)
        if other is None or _facts(node) != _facts(other):
            return f"node {plain_name(node.name)!r} ({node.op_type}) is {'gone' if other is None else 'another'}"
    if made:
        name, node = next(iter(made.items()))
        return f"node {plain_name(name)!r} ({node.op_type}) is new"
    return ""


def _facts(node: onnx.NodeProto) -> tuple[Any, ...]:
    inputs, outputs = (_without_absent(names) for names in (node.input, node.output))
    inner = [sorted(map(_facts, body.node), key=repr) for body in bodies(node)]
    return canonical(node.domain), node.op_type, inputs, outputs, inner


def _without_absent(names: Sequence[str]) -> tuple[str, ...]:
    """Return names of slots without empty ones at the end, which have no meaning."""
    last = max((i for i, name in enumerate(names) if name), default=-1)
    return tuple(names[: last + 1])


def named(position: int, name: str) -> str:
    """Return the name of a node in a lean graph: its position and its name in the step."""
    return f"{position}:{name}"


def plain_name(name: str) -> str:
    """Return a node's name in the step.

    >>> plain_name(named(7, "fc1/MatMul")), plain_name("InsertedPrecisionFreeCast_x")
    ('fc1/MatMul', 'InsertedPrecisionFreeCast_x')
    """
    return re.sub(r"^\d+:", "", name)
