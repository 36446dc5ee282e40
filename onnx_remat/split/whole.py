"""A whole training step, and which of its values depend on the batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx

from onnx_remat.errors import ModelError, UsageError
from onnx_remat.ir import graph as graphs
from onnx_remat.ir import phases, shapes
from onnx_remat.ir.graph import Graph, Op
from onnx_remat.ir.metadata import entries
from onnx_remat.ir.naming import renewals
from onnx_remat.ir.op_semantics import semantics
from onnx_remat.ir.shapes import Tensor
from onnx_remat.messages import Setting


@dataclass(frozen=True, slots=True)
class StepParts:
    """A whole step and the parts that a split needs to know.

    Attributes
    ----------
    graph, tensors
        The IR and its shapes.
    loss : str
    renews : dict of str to str
        Input by the output that renews it.
    forward : set of int
        Ops that the loss depends on, or that are labelled as forward pass.
    batch : set of str
        Inputs that no output renews and a forward op reads.
    maker : dict of str to int
        Index of the op that produces each value.
    """

    graph: Graph
    tensors: Mapping[str, Tensor]
    loss: str
    renews: Mapping[str, str]
    forward: Collection[int]
    batch: Collection[str]
    maker: Mapping[str, int]

    @classmethod
    def of(cls, model: onnx.ModelProto, loss: str | None, dims: Mapping[str, int] | None) -> StepParts:
        """Analyse a model; ModelError where it has no loss, UsageError where `loss` is not an output."""
        graph = graphs.build(model)
        tensors = shapes.infer(graph, dims if dims is not None else any_dims(model))
        if loss is not None and not (loss in graph.values and graph.values[loss].is_output):
            raise UsageError(f"the model has no output {loss!r} to take as the loss")
        if (found := loss or phases.find_loss(graph, tensors)) is None:
            raise ModelError("the step cannot be split: no output is a loss; name it with {}", Setting("loss"))
        stored = {tensor.name for tensor in graph.model.graph.initializer}
        inputs = [value.name for value in graph.model.graph.input if value.name not in stored]
        forward = phases.ancestors(graph, [found])
        forward |= {op.index for op in graph.ops if labelled(op, "forward")}
        renews = renewals(inputs, (value.name for value in graph.model.graph.output))
        read = {name for index in forward for name in graph.ops[index].reads}
        batch = {name for name in inputs if name in read and name not in renews.values()}
        return cls(graph, tensors, found, renews, forward, batch, graph.makers)

    def known_to(self, without: Collection[str] = ()) -> set[str]:
        """Return the values that depend on the batch, or on random draws of the forward pass, except by `without`."""
        found = set(self.batch)
        for op in self.graph.ops:
            drawn = op.index in self.forward and semantics(op.node.domain, op.node.op_type).random
            if drawn or any(name in found for name in op.reads):
                found.update(name for name in op.writes if name not in without)
        return found

    def trained(self, known: Collection[str]) -> dict[str, str]:
        """Return the parameters, on which the loss depends and which the backward pass renews, and their new values."""
        read = {name for index in self.forward for name in self.graph.ops[index].reads}
        return {
            name: output
            for output, name in self.renews.items()
            if name in read and output in known and self.maker.get(output, -1) not in {-1, *self.forward}
        }

    def label(self, value: str) -> str:
        """Return the node that produces a value, for messages."""
        op = self.graph.ops[self.maker[value]]
        return f"node {op.label!r} ({op.node.op_type})"


def labelled(op: Op, phase: str) -> bool:
    """Is the op labelled with this phase?"""
    return entries(op.node).get("phase") == phase


def any_dims(model: onnx.ModelProto) -> dict[str, int]:
    """Return an arbitrary, distinct size for every symbolic dimension of the inputs."""
    symbols = dict.fromkeys(
        dim.dim_param
        for value in model.graph.input
        for dim in value.type.tensor_type.shape.dim
        if dim.HasField("dim_param") and dim.dim_param
    )
    return {name: 8 * number for number, name in enumerate(symbols, start=1)}


def descendants(graph: Graph, names: Collection[str]) -> set[str]:
    """Return `names` and all values that depend on them."""
    found = set(names)
    for op in graph.ops:
        if any(name in found for name in op.reads):
            found.update(op.writes)
    return found


def needed(step: StepParts, outputs: Sequence[str], given: Collection[str]) -> list[Op]:
    """Return the ops that compute `outputs` from `given` values and the step's inputs."""
    found: set[int] = set()
    pending = [step.maker[name] for name in outputs if name in step.maker and name not in given]
    while pending:
        index = pending.pop()
        if index not in found:
            found.add(index)
            reads = (name for name in step.graph.ops[index].reads if name not in given)
            pending.extend(step.maker[name] for name in reads if name in step.maker)
    return [op for op in step.graph.ops if op.index in found]
