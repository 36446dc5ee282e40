"""Preparation of a model for all stages: its graph, shapes and facts, compiled into the `Problem` of planning."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx

from onnx_remat.errors import ModelError, UsageError, did_you_mean
from onnx_remat.ir import dropout, graph, phases, shapes
from onnx_remat.ir.graph import Graph, Op
from onnx_remat.ir.op_semantics import overwritten
from onnx_remat.ir.shapes import Tensor
from onnx_remat.ir.training_ops import first_training_op
from onnx_remat.memory.order import default_order, sizes_first
from onnx_remat.memory.problem import Problem, Schedule
from onnx_remat.messages import Setting
from onnx_remat.ort.compile import OpTable, compile_problem, tabulate
from onnx_remat.ort.kernels import costs
from onnx_remat.ort.kernels.base import Kernels
from onnx_remat.ort.shape_askers import SHAPE_ASKERS


@dataclass(frozen=True, slots=True)
class Preparation:
    """Settings for a model in addition to its file.

    Attributes
    ----------
    kernels : Kernels
        Facts about the kernels of the provider that is to run it.
    dims : mapping of str to int
        Sizes of symbolic dimensions.
    allow_recompute : sequence of str
        Custom ops, ``domain::op``, that are pure, so that they may be recomputed.
    keep : sequence of str
        Values that must not be recomputed.
    loss : str or None
        Name of the loss, needed if nodes are unlabelled and several outputs could be it.
    costs : str
        A preset of `costs.PRESETS`, or the path of a profile written by ONNX Runtime.
    must_load : bool
        ONNX Runtime, where it is installed, must be able to load the model, custom ops included.
    fixed : bool
        ONNX Runtime is given those sizes at load time, as in a `Session`: no step computes anything from them.
    checkpoints : sequence of str
        Values that a selector is to keep.
    """

    kernels: Kernels
    dims: Mapping[str, int] = field(default_factory=dict)
    allow_recompute: Sequence[str] = ()
    keep: Sequence[str] = ()
    loss: str | None = None
    costs: str = "cpu"
    must_load: bool = True
    fixed: bool = False
    checkpoints: Sequence[str] = ()

    @property
    def load_dims(self) -> Mapping[str, int]:
        """Sizes of symbolic dimensions that ONNX Runtime is given when it loads the model."""
        return self.dims if self.fixed else {}


@dataclass(frozen=True, slots=True)
class Compiled:
    """A model in every form the stages need, for one provider's kernels."""

    graph: Graph
    tensors: Mapping[str, Tensor]
    kernels: Kernels
    table: OpTable
    problem: Problem

    def default_order(self) -> Schedule:
        """Return the order in which ONNX Runtime executes this file without graph optimisations."""
        made_by = self.problem.producer()
        by_index = sorted(range(self.problem.n_ops), key=lambda op: self.graph.ops[op].expanded)
        index = {op: i for i, op in enumerate(by_index)}
        producers = [[index[int(made_by[v])] for v in self.problem.inputs(op) if made_by[v] >= 0] for op in by_index]
        order = default_order(producers)
        if first_training_op(self.graph.model) is not None:
            sizes = [self.graph.ops[op].node.op_type in ("Shape", "Size") for op in by_index]
            order = sizes_first(order, producers, sizes)
        return Schedule(tuple(by_index[i] for i in order))


def prepare(model: onnx.ModelProto, stated: Preparation) -> Compiled:
    """Compile graph, shapes, facts, costs and phases of a model into a `Problem`; split Dropouts (`dropout`).

    Raises
    ------
    UsageError
        `stated` names a value, op or dimension that the model does not have.
    ModelError
        The model is not usable; ShapeError if a value has no known size.
    """
    ir = graph.build(model, stated.kernels.no_kernel)
    checked = shapes.check_declared(ir.model)
    _check_overwritten(ir, stated.kernels)
    _check_allowed(ir, stated.allow_recompute)
    tensors = shapes.infer(ir, stated.dims, askers=SHAPE_ASKERS, checked=checked)
    ir = dropout.split(ir, tensors)
    kernels = stated.kernels
    table = _keeping(ir, tabulate(ir, tensors, kernels, stated.allow_recompute), stated.keep)
    for name in stated.checkpoints:
        computed(name, ir.makers, "checkpoints")
    seconds = costs.price(ir, tensors, kernels, stated.costs)
    problem = compile_problem(ir, tensors, table, kernels, seconds, phases.split(ir, tensors, stated.loss))
    return Compiled(ir, tensors, kernels, table, problem)


def prepare_for_simulation(model: onnx.ModelProto, stated: Preparation) -> Compiled:
    """Prepare a model for simulation alone: as `prepare`, but costs and phases, irrelevant to memory, are all zero.

    `stated.dims` may name dimensions that this model does not have.
    """
    ir = graph.build(model, stated.kernels.no_kernel)
    tensors = shapes.infer(ir, stated.dims, derived=True, askers=SHAPE_ASKERS)
    table = tabulate(ir, tensors, stated.kernels, stated.allow_recompute)
    nothing = [0] * len(ir.ops)
    problem = compile_problem(ir, tensors, table, stated.kernels, nothing, nothing)
    return Compiled(ir, tensors, stated.kernels, table, problem)


def _keeping(ir: Graph, table: OpTable, keep: Sequence[str]) -> OpTable:
    """Return `table` with the producers of the values named in `keep` marked as not recomputable."""
    producer = ir.makers
    kept = {producer[computed(name, producer, "keep")] for name in keep}
    return replace(table, recomputable=tuple(r and i not in kept for i, r in enumerate(table.recomputable)))


def _check_overwritten(ir: Graph, kernels: Kernels) -> None:
    """Check that memory overwritten by a kernel has no other reader: the order would decide which value it reads.

    A value and its views (`Kernels.aliases`) lie in the same memory.
    """
    outputs = {name for name, value in ir.values.items() if value.is_output}
    lies_in: dict[str, str] = {}
    readers: dict[str, list[int]] = {}
    overwriting: list[tuple[Op, int]] = []
    for op in ir.ops:
        slots = overwritten(op.node, outputs)
        overwriting += ((op, slot) for slot in slots)
        pairs = [pair for pair in kernels.aliases(op.node) if pair[0] not in slots]
        views = {i: name for i, out in pairs for name in op.outputs[out : out + 1] if name and name not in outputs}
        for slot, name in enumerate((*op.inputs, *op.captured)):
            if slot in views:
                lies_in[views[slot]] = lies_in.get(name, name)
            else:
                readers.setdefault(lies_in.get(name, name), []).append(op.index)
    for op, slot in overwriting:
        name = lies_in.get(op.inputs[slot], op.inputs[slot])
        others = [i for i in readers[name] if i != op.index]
        if others:
            raise ModelError(
                f"node {op.label!r} ({op.node.op_type}) overwrites {name!r}, which node "
                f"{ir.ops[others[0]].label!r} reads too: give each an input of its own"
            )


def _check_allowed(ir: Graph, allow: Sequence[str]) -> None:
    """Check that each entry of `allow` is an op of the model."""
    have = list(dict.fromkeys(f"{op.node.domain}::{op.node.op_type}" for op in ir.ops))
    setting = Setting("allow_recompute")
    for name in allow:
        if "::" not in name:
            raise UsageError("{}: {!r} is not DOMAIN::OP, e.g. com.example::MyOp", setting, name)
        if name not in have:
            raise UsageError("{}: the model has no op {!r}{}", setting, name, did_you_mean(name, have))


def computed(name: str, names: Collection[str], argument: str) -> str:
    """Return `name` if it is in `names`, the values that nodes compute; else raise UsageError with a suggestion."""
    if name in names:
        return name
    raise UsageError("{}: no node makes a value {!r}{}", Setting(argument), name, did_you_mean(name, names))
