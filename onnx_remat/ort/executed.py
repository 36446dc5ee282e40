"""A model in every form the stages need, and as ONNX Runtime will execute it."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx

from onnx_remat.errors import ModelError, UsageError
from onnx_remat.ir import dropout, graph, model_io, phases, shapes
from onnx_remat.ir.graph import INPUT, Graph
from onnx_remat.ir.shapes import Tensor
from onnx_remat.ir.training_ops import first_training_op
from onnx_remat.options import Options
from onnx_remat.ort import runtime
from onnx_remat.ort.compile import OpTable, compile_problem, tabulate
from onnx_remat.ort.kernels import costs
from onnx_remat.ort.kernels.cpu import facts
from onnx_remat.ort.kernels.cpu_workspace import ASKED_FOR_FIRST, BY_MALLOC
from onnx_remat.ort.simulate import arena, buffers
from onnx_remat.ort.simulate.order import default_order, sizes_first
from onnx_remat.problem import Problem, Schedule
from onnx_remat.report import Holding, Peak, Reserves
from onnx_remat.run.training import renewals

THREADS = 8
"""Threads per op that workspace is reckoned for: a fixed figure, so that every machine writes the same file."""


@dataclass(frozen=True, slots=True)
class View:
    """A model in every form the stages need."""

    graph: Graph
    tensors: Mapping[str, Tensor]
    table: OpTable
    problem: Problem

    def default_order(self) -> Schedule:
        """The order ONNX Runtime executes this file in, its graph optimisations aside."""
        made_by = self.problem.producer()
        producers = [
            [int(made_by[v]) for v in self.problem.inputs(op) if made_by[v] >= 0] for op in range(self.problem.n_ops)
        ]
        order = default_order(producers)
        if first_training_op(self.graph.model) is not None:
            order = sizes_first(order, producers, [op.node.op_type in ("Shape", "Size") for op in self.graph.ops])
        return Schedule(tuple(order))


@dataclass(frozen=True, slots=True)
class Executed:
    """A model as ONNX Runtime will execute it: its optimised graph and the order of its nodes.

    `emulated`: why the runtime was not asked or could not load it, so that this is the file's own graph; or nothing.
    """

    view: View
    order: Schedule
    emulated: str = ""

    def timeline(self) -> buffers.Timeline:
        return buffers.simulate(self.view.problem, self.order)


def make_view(model: onnx.ModelProto, options: Options) -> View:
    """Graph, shapes, facts, costs and phases of a model, compiled into a `Problem`; Dropouts are split (`draws`)."""
    ir = graph.build(model)
    shapes.check_declared(ir.model)
    _check_overwritten(ir)
    _check_allowed(ir, options.allow_recompute)
    tensors = shapes.infer(ir, options.dims)
    ir = dropout.split(ir, tensors)
    table = _keeping(ir, tabulate(ir, tensors, THREADS, options.allow_recompute), options.keep)
    problem = compile_problem(
        ir, tensors, table, costs.price(ir, tensors, options.costs), phases.split(ir, tensors, options.loss)
    )
    return View(ir, tensors, table, problem)


def _keeping(ir: Graph, table: OpTable, keep: Sequence[str]) -> OpTable:
    """`table` with the producers of the values named in `keep` marked as not to be recomputed."""
    producer = ir.producer()
    kept = {producer[known(name, producer, "--keep")] for name in keep}
    return replace(table, recomputable=tuple(r and i not in kept for i, r in enumerate(table.recomputable)))


def _check_overwritten(ir: Graph) -> None:
    """What a kernel overwrites, nobody else may read: the plan would decide who sees which."""
    readers = ir.consumers()
    for op in ir.ops:
        for slot in facts(op.node.domain, op.node.op_type).overwrites:
            others = [i for i in readers[op.inputs[slot]] if i != op.index]
            if others:
                raise ModelError(
                    f"node {op.label!r} ({op.node.op_type}) overwrites {op.inputs[slot]!r}, which node "
                    f"{ir.ops[others[0]].label!r} reads too: give each an input of its own"
                )


def _check_allowed(ir: Graph, allow: Sequence[str]) -> None:
    """Each entry of --allow-recompute must be an op of the model."""
    have = list(dict.fromkeys(f"{op.node.domain}::{op.node.op_type}" for op in ir.ops))
    for name in allow:
        if "::" not in name:
            raise UsageError(f"--allow-recompute: {name!r} is not DOMAIN::OP, e.g. com.example::MyOp")
        if name not in have:
            close = difflib.get_close_matches(name, have, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UsageError(f"--allow-recompute: the model has no op {name!r}{hint}")


def known(name: str, names: Collection[str], flag: str) -> str:
    """`name` if it is one of `names`; UsageError with the nearest match otherwise."""
    if name in names:
        return name
    close = difflib.get_close_matches(name, names, n=1)
    raise UsageError(f"{flag}: no node makes a value {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))


_CUSTOM_OPS = (
    "onnxruntime cannot load this model's custom ops here: the plan follows the file as it is, and neither graph "
    "optimisations nor the memory of custom kernels were checked"
)
_MANY_NODES = (
    f"onnxruntime takes a minute for each load of more than {runtime.MOST_NODES} nodes: it was not asked, the plan "
    "follows the file as it is, and graph optimisations were not checked (onnx-remat-bench measures both files)"
)


def as_executed(model: onnx.ModelProto, folder: Path | None, level: str, options: Options) -> Executed:
    """What ONNX Runtime makes of a model at an optimisation level; emulated from the file where it is not installed."""
    plain = replace(options, keep=(), loss=None, costs="cpu")
    if level == "disable" or not runtime.available():
        view = _structural_view(model, plain)
        return Executed(view, view.default_order())
    if len(model.graph.node) > runtime.MOST_NODES:
        view = _structural_view(model, plain)
        return Executed(view, view.default_order(), _MANY_NODES)
    try:
        if model_io.weight_bytes(model) > runtime.MOST_WEIGHTS:
            optimized = _optimized_without_weights(model, plain, level)
        else:
            optimized = runtime.optimized(shapes.declared(model), folder, level)
    except ModelError as error:
        if not _has_custom_ops(model):
            raise
        if options.verify != "none":
            hint = "--verify none plans from the file alone, for a runtime that has these ops"
            raise ModelError(f"{error} ({hint})") from error
        view = _structural_view(model, plain)
        return Executed(view, view.default_order(), _CUSTOM_OPS)
    view = _structural_view(optimized, plain)
    return Executed(view, Schedule(tuple(range(view.problem.n_ops))))


def _optimized_without_weights(model: onnx.ModelProto, options: Options, level: str) -> onnx.ModelProto:
    """As `runtime.optimized`, of a model whose weights are too many to show to the runtime.

    Weights, and what it would compute from them alone when it loads the file, are inputs to it. In the answer they are
    initializers again, whose contents nobody asks for.
    """
    view = _structural_view(model, options)
    light = model_io.without_weights(shapes.declared(model))
    inputs = {value.name: value for value in model.graph.input}
    weights = {value.name: None for value in light.graph.input if value.name not in inputs}
    folded: set[str] = set()
    for op in view.graph.ops:
        made = [(view.graph.values[name], view.tensors[name]) for name in op.writes]
        large = all(tensor.nbytes > model_io.INLINE_LIMIT and not value.is_output for value, tensor in made)
        if view.table.foldable[op.index] and large and any(name in weights for name in op.reads):
            weights |= dict.fromkeys(op.writes)
            folded.update(op.writes)
    kept = [node for node in light.graph.node if folded.isdisjoint(node.output)]
    read = {name for op in view.graph.ops if folded.isdisjoint(op.writes) for name in op.reads}
    shown = {n: view.tensors[n] for n in weights if n in read or view.graph.values[n].is_output}
    light.graph.ClearField("node")
    light.graph.node.extend(kept)
    light.graph.ClearField("input")
    light.graph.input.extend(inputs.values())
    light.graph.input.extend(
        onnx.helper.make_tensor_value_info(name, tensor.dtype, tensor.shape) for name, tensor in shown.items()
    )
    optimized = runtime.optimized(light, None, level)
    optimized.graph.ClearField("input")
    optimized.graph.input.extend(inputs.values())
    optimized.graph.initializer.extend(
        onnx.TensorProto(
            name=name, data_type=tensor.dtype, dims=tensor.shape, data_location=onnx.TensorProto.EXTERNAL
        )
        for name, tensor in shown.items()
    )  # fmt: skip
    return optimized


def _has_custom_ops(model: onnx.ModelProto) -> bool:
    return any(node.domain not in ("", "ai.onnx") for node in model.graph.node)


def _structural_view(model: onnx.ModelProto, options: Options) -> View:
    """A view for simulation alone: costs and phases do not matter to memory."""
    ir = graph.build(model)
    tensors = shapes.infer(ir, options.dims, derived=True)
    table = tabulate(ir, tensors, THREADS, options.allow_recompute)
    nothing = [0] * len(ir.ops)
    return View(ir, tensors, table, compile_problem(ir, tensors, table, nothing, nothing))


def describe(executed: Executed, timeline: buffers.Timeline) -> Peak:
    """Split a peak into inputs, weights, activations, outputs and workspace."""
    view, problem = executed.view, executed.view.problem
    names = list(view.graph.values)
    inputs = sum(view.tensors[n].nbytes for n, v in view.graph.values.items() if v.kind == INPUT)
    alive = np.flatnonzero((timeline.start <= timeline.peak_step) & (timeline.end >= timeline.peak_step))
    outputs = int(sum(timeline.size[b] for b in alive if problem.is_output[timeline.owner[b]]))
    op = executed.order.order[timeline.peak_step] if executed.order.order else -1
    workspace = int(problem.workspace[op]) if op >= 0 else 0
    producer = view.graph.producer()
    largest = sorted(alive.tolist(), key=lambda b: (-int(timeline.size[b]), b))[:10]
    return Peak(
        total=timeline.peak,
        inputs=inputs,
        weights=problem.base_bytes - inputs,
        activations=timeline.peak - problem.base_bytes - outputs - workspace,
        outputs=outputs,
        workspace=workspace,
        at=f"{view.graph.ops[op].node.op_type} {view.graph.ops[op].label}" if op >= 0 else "",
        top=tuple(
            Holding(name, view.graph.ops[producer[name]].node.op_type, int(timeline.size[b]))
            for b in largest
            for name in (names[timeline.owner[b]],)
        ),
    )


def requests(executed: Executed, timeline: buffers.Timeline) -> arena.Requests:
    """A step as ONNX Runtime's arena sees it."""
    scratch, types = executed.view.table.workspace, [op.node.op_type for op in executed.view.graph.ops]
    asked = [() if kind in BY_MALLOC else blocks for kind, blocks in zip(types, scratch, strict=True)]
    return arena.requests(executed.order, timeline, asked, [kind in ASKED_FOR_FIRST for kind in types])


def held(executed: Executed, timeline: buffers.Timeline) -> int:
    """What a process on the CPU holds with ONNX Runtime's default arena, if outputs are dropped or copied."""
    return _outside(executed) + arena.run(requests(executed, timeline), doubling=True).resident


def reserves(executed: Executed, timeline: buffers.Timeline) -> Reserves:
    """What ONNX Runtime's arena adds to a peak, in one-off steps and where outputs renew inputs without a copy."""
    view, outside = executed.view, _outside(executed)
    values = view.graph.values
    inputs = [name for name, value in values.items() if value.kind == INPUT]
    renewed = renewals(inputs, [name for name, value in values.items() if value.is_output])
    kept = np.array([name in renewed for name in values], np.bool_)
    weights = view.problem.base_bytes - sum(view.tensors[name].nbytes for name in inputs)
    replaced = sum(view.tensors[name].nbytes for name in renewed.values())
    step = requests(executed, timeline)
    return Reserves(
        held=outside + arena.run(step, doubling=True).resident,
        held_fed_back=outside - replaced + arena.run(step, doubling=True, kept=kept).resident,
        limit=weights + arena.run(step, doubling=False).reserved,
        limit_fed_back=weights + arena.run(step, doubling=False, kept=kept).reserved,
    )


def _outside(executed: Executed) -> int:
    """Bytes that the arena has no part in: inputs, weights, and the most that a kernel takes with malloc."""
    ops, scratch = executed.view.graph.ops, executed.view.table.workspace
    taken = (sum(blocks) for op, blocks in zip(ops, scratch, strict=True) if op.node.op_type in BY_MALLOC)
    return executed.view.problem.base_bytes + max(taken, default=0)
