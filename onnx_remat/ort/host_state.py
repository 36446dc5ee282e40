"""What lies on the host: state between steps, and values that a file moves there; both as plans count them.

State is copied to the device before its update, and back after it. In a file it is an input that only a
`MemcpyFromHost` reads, and an output that a `MemcpyToHost` makes::

    m -> update -> new.m     becomes     m -> MemcpyFromHost -> update -> MemcpyToHost -> new.m

So it also lies on the host in ONNX Runtime's own session; `session.overlap` copies it alongside the kernels.

References
----------
Ren et al.: ZeRO-Offload, USENIX ATC 2021, section 4 (there the update runs on the host as well).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx
from onnx import helper

from onnx_remat.ir.body import rename_values
from onnx_remat.ir.graph import INPUT, Graph, Op
from onnx_remat.ir.metadata import TAG
from onnx_remat.ir.model_io import Source
from onnx_remat.ir.naming import renewals
from onnx_remat.ir.phases import ancestors, label_of
from onnx_remat.memory.problem import FORWARD, OPTIMIZER
from onnx_remat.ort.compile import compile_problem
from onnx_remat.ort.moves import DOWN, LEAST, UP
from onnx_remat.ort.prepare import Compiled


def own_state(compiled: Compiled) -> dict[str, str]:
    """Return the inputs that only their own update reads, of at least `LEAST` bytes, and the output that renews each.

    They are an optimizer's moments, but no weights. A step's other outputs do not depend on them. State that is on the
    host already is left out.
    """
    graph = compiled.graph
    stored = {tensor.name for tensor in graph.model.graph.initializer}
    inputs = [value.name for value in graph.model.graph.input if value.name not in stored]
    outputs = [value.name for value in graph.model.graph.output]
    pairs = renewals(inputs, outputs)
    needed = ancestors(graph, [name for name in outputs if name not in pairs])
    return {
        name: output
        for output, name in pairs.items()
        if (readers := graph.readers[name])
        and compiled.tensors[name].nbytes >= LEAST
        and all(op not in needed and _may_update(compiled, graph.ops[op]) for op in readers)
        and not any(copies_state(compiled, graph.ops[op]) for op in readers)
    }


def _may_update(compiled: Compiled, op: Op) -> bool:
    """Is an op part of the update by its label, or without one outside the forward section?

    By structure the first reader of a state need not be: an Identity, a Sqrt or a Max.
    """
    return label_of(op) == OPTIMIZER or (label_of(op) is None and compiled.problem.phase[op.index] != FORWARD)


def movable_state(compiled: Compiled) -> dict[str, str]:
    """Return the part of `own_state` that copies can bring to the device and take back."""
    graph, tensors = compiled.graph, compiled.tensors
    captured = {name for op in graph.ops for name in op.captured}
    renewed = Counter(renewals(graph.fed, [name for name, value in graph.values.items() if value.is_output]).values())
    return {
        name: output
        for name, output in own_state(compiled).items()
        if output in graph.makers
        and renewed[name] == 1
        and (tensors[name].dtype, tensors[name].shape) == (tensors[output].dtype, tensors[output].shape)
        and not graph.values[name].is_output
        and captured.isdisjoint((name, output))
    }


NOT_MOVABLE = (
    "its new value has another type or shape or is made by no node, two outputs renew it, a subgraph uses it, or it is "
    "an output itself"
)
"""Why some state of `own_state` is not movable: what `movable_state` asks for."""


def with_state_on_host(source: Source, state: Mapping[str, str]) -> Source:
    """Return a step that copies the inputs in `state` to the device, and their new values back; see `movable_state`."""
    model = onnx.ModelProto()
    model.CopyFrom(source.model)
    graph = model.graph
    kinds = {value.name: value for value in (*graph.input, *graph.output)}
    there = {name: f"{TAG}there.{name}" for pair in state.items() for name in pair}
    rename_values(graph.node, there)
    nodes: list[onnx.NodeProto] = []
    made = {there[output]: output for output in state.values()}
    first: dict[str, int] = {}  # reader of each value
    for at, node in enumerate(graph.node):
        for name in node.input:
            first.setdefault(name, at)
    coming: dict[int, list[str]] = {}
    for name in state:
        coming.setdefault(first[there[name]], []).append(name)
    for at, node in enumerate(graph.node):
        nodes += [_copy(UP, name, there[name]) for name in coming.get(at, ())]
        nodes.append(node)
        nodes += [_copy(DOWN, name, made[name]) for name in node.output if name in made]
    copied = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copied)
    for name, inner in there.items():
        value = graph.value_info.add()
        value.CopyFrom(kinds[name])
        value.name = inner
    return replace(source, model=model)


def _copy(kind: str, read: str, made: str) -> onnx.NodeProto:
    node = helper.make_node(kind, [read], [made], name=f"{kind} of {read}")
    node.metadata_props.add(key="phase", value="optimizer")
    return node


def copies_state(compiled: Compiled, op: Op) -> bool:
    """Is an op a copy of state to the device, or back?"""
    values = compiled.graph.values
    return (op.node.op_type == UP and values[op.inputs[0]].kind == INPUT) or (
        op.node.op_type == DOWN and values[op.outputs[0]].is_output
    )


def state_bytes(compiled: Compiled) -> int:
    """Return the bytes of the state that copies bring to the device."""
    copies = [op for op in compiled.graph.ops if op.node.op_type == UP and copies_state(compiled, op)]
    return sum(compiled.tensors[name].nbytes for name in {op.inputs[0] for op in copies})


def is_copy(op: Op) -> bool:
    """Is an op a copy to the host, or back?"""
    return op.node.op_type in (DOWN, UP)


def _on_host(op: Op) -> str:
    """Return the end of a copy that lies on the host."""
    return (op.inputs if op.node.op_type == UP else op.outputs)[0]


def runs_when_due(compiled: Compiled, op: Op) -> bool:
    """Is an op a copy of state, or of a value that is `counted` to the host?"""
    return copies_state(compiled, op) or (is_copy(op) and not compiled.tensors[_on_host(op)].nbytes)


def counted(compiled: Compiled, state: bool = True) -> Compiled:
    """Return a device's step whose values on the host take no bytes, nor `state` there, and its copies no time.

    What other nodes read or make on the host keeps both: it is copied for ONNX Runtime's own kernels.
    """
    graph, problem = compiled.graph, compiled.problem
    copies = [op for op in graph.ops if is_copy(op) and (state or not copies_state(compiled, op))]
    names = {name for name in map(_on_host, copies) if _only_copied(graph, name)}
    if not names or compiled.kernels.device == "cpu":
        return compiled
    tensors = dict(compiled.tensors)
    for name in names:
        tensors[name] = replace(tensors[name], nbytes=0)
    seconds = problem.cost.tolist()
    for op in copies:
        if _on_host(op) in names:
            seconds[op.index] = 0.0
    table = replace(
        compiled.table,
        recomputable=tuple(
            each and not is_copy(op) for each, op in zip(compiled.table.recomputable, graph.ops, strict=True)
        ),
    )
    found = compile_problem(graph, tensors, table, compiled.kernels, seconds, problem.phase.tolist())
    there = np.array([name in names for name in graph.values], np.bool_)  # in no buffer of the device
    return replace(compiled, tensors=tensors, table=table, problem=replace(found, poolable=found.poolable & ~there))


def _only_copied(graph: Graph, name: str) -> bool:
    """Do only copies read and make a value?"""
    ops = [*graph.readers[name], *([graph.makers[name]] if name in graph.makers else [])]
    return all(is_copy(graph.ops[op]) for op in ops)


def when_due(compiled: Compiled, order: Sequence[int]) -> list[int]:
    """Return an order in which what is copied comes right before its first reader, and leaves as soon as it is made.

    A copy to the host of an input, or of what comes from there, stays where it is.
    """
    graph, problem = compiled.graph, compiled.problem
    maker, read = problem.producer(), {value for op in order for value in problem.inputs(op)}
    up: dict[int, int] = {}
    down: dict[int, list[int]] = {}  # a node may make several
    for op in (op.index for op in graph.ops if runs_when_due(compiled, op)):
        made = int(maker[problem.inputs(op)[0]])
        if graph.ops[op].node.op_type == UP and problem.outputs(op)[0] in read:
            up[problem.outputs(op)[0]] = op
        elif graph.ops[op].node.op_type == DOWN and made >= 0 and not is_copy(graph.ops[made]):
            down.setdefault(made, []).append(op)
    moving = {*up.values(), *(op for ops in down.values() for op in ops)}
    found: list[int] = []
    for op in order:
        if op in moving:
            continue
        found += [up.pop(value) for value in problem.inputs(op) if value in up]
        found.append(op)
        found += down.pop(op, [])
    return found
