"""A training step cut in two: one that ends at the gradients, and the optimizer's update.

Between the two lies a *cut*: one value per parameter, of the parameter's type and shape, through which all that the
update learns of the batch must pass. It is a minimum cut of the graph, the one nearest to the forward pass, so that
whatever is done to gradients (clipping, weight decay) is the update's::

    batch --> forward --> backward --> | grad.w | --> clip, momentum, ... --> new.w
                                       | grad.b |     learning rate, state -> new.b

Run one after the other, both compute what the step computes, to the last bit. In between, gradients can be summed over
batches and averaged over processes, see `onnx_remat.distributed`.

References
----------
Ford & Fulkerson, "Maximal flow through a network", Canadian Journal of Mathematics 8 (1956).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper
from ortools.graph.python import max_flow

from onnx_remat import files
from onnx_remat.errors import ModelError, UsageError
from onnx_remat.ir import graph as graphs
from onnx_remat.ir import model_io, phases, shapes
from onnx_remat.ir.body import rename_captures
from onnx_remat.ir.graph import Graph, Op
from onnx_remat.ir.naming import GRADIENT, NEW, WEIGHT, gradients, renewals
from onnx_remat.ir.op_semantics import is_elementwise, semantics
from onnx_remat.ir.shapes import Tensor

_WHOLE = 10**9
"""Capacity of what cannot be cut."""


@dataclass(frozen=True, slots=True)
class Split:
    """A training step in two parts.

    Attributes
    ----------
    gradients : onnx.ModelProto
        Puts out the loss, ``grad.<name>`` for every parameter, and what it renews itself, such as running statistics.
    update : onnx.ModelProto
        Takes parameters, optimizer state, ``grad.<name>`` and learning rates, and puts out their next values.
    parameters : tuple of str
        Those that have a gradient, in the order of the step's outputs.
    folder : Path or None
        Where external data lies.
    """

    gradients: onnx.ModelProto
    update: onnx.ModelProto
    parameters: tuple[str, ...]
    folder: Path | None = None

    def save(self, gradients: str | os.PathLike[str], update: str | os.PathLike[str], force: bool = False) -> None:
        """Write both parts, or none."""
        files.check_uses([], [files.Use(gradients, "the step"), files.Use(update, "the update")])
        targets = [files.check_target(path, None, force) for path in (gradients, update)]
        with files.together():
            for model, path in zip((self.gradients, self.update), targets, strict=True):
                model_io.save(model, path, self.folder)


def split_step(model: model_io.Model, *, loss: str | None = None, dims: Mapping[str, int] | None = None) -> Split:
    """Split a training step into one that puts out gradients, and the update.

    Parameters
    ----------
    model : path, bytes, onnx.ModelProto or Source
        A whole step: outputs ``new.<name>`` for inputs ``<name>``.
    loss : str, optional
        The output that is the loss, where it is neither called so nor the only scalar.
    dims : mapping of str to int, optional
        Sizes of symbolic dimensions, to tell shapes apart; they stay symbolic. By default 8, 16, 24 and so on.

    Raises
    ------
    ModelError
        The step cannot be split: it has no update, or one that knows more of the batch than gradients.

    Examples
    --------
    >>> from sample_models.chain import chain
    >>> parts = split_step(chain(2, 16, 8))
    >>> [value.name for value in parts.gradients.graph.output], [value.name for value in parts.update.graph.input]
    (['loss', 'grad.bias'], ['bias', 'grad.bias'])
    """
    source = model_io.load(model)
    step = _Step.of(source.model, loss, dims)
    cut = _cut(step)
    after = step.known_to(cut.values())
    update, left = _sides(step, cut, after)
    _check(step, cut, update, left)
    return Split(_first_part(step, cut, left), _second_part(step, cut, update), tuple(cut), source.folder)


@dataclass(frozen=True, slots=True)
class _Step:
    """A whole step and what is known of it.

    Attributes
    ----------
    graph, tensors
        The IR and its shapes.
    loss : str
    renews : dict of str to str
        Input by the output that renews it.
    forward : set of int
        Ops that the loss depends on, or that are labelled so.
    batch : set of str
        Inputs that no output renews and a forward op reads.
    maker : dict of str to int
    """

    graph: Graph
    tensors: Mapping[str, Tensor]
    loss: str
    renews: Mapping[str, str]
    forward: Collection[int]
    batch: Collection[str]
    maker: Mapping[str, int]

    @classmethod
    def of(cls, model: onnx.ModelProto, loss: str | None, dims: Mapping[str, int] | None) -> _Step:
        graph = graphs.build(model)
        tensors = shapes.infer(graph, dims if dims is not None else _any_dims(model))
        if loss is not None and not (loss in graph.values and graph.values[loss].is_output):
            raise UsageError(f"the model has no output {loss!r} to take as the loss")
        if (found := loss or phases.find_loss(graph, tensors)) is None:
            raise ModelError("the step cannot be split: no output is a loss; name it with --loss")
        stored = {tensor.name for tensor in graph.model.graph.initializer}
        inputs = [value.name for value in graph.model.graph.input if value.name not in stored]
        forward = phases.ancestors(graph, [found])
        forward |= {op.index for op in graph.ops if _is(op, "forward")}
        renews = renewals(inputs, (value.name for value in graph.model.graph.output))
        read = {name for index in forward for name in graph.ops[index].reads}
        batch = {name for name in inputs if name in read and name not in renews.values()}
        return cls(graph, tensors, found, renews, forward, batch, graph.producer())

    def known_to(self, without: Collection[str] = ()) -> set[str]:
        """Values that depend on the batch, or on what the forward pass draws, in another way than by those named."""
        found = set(self.batch)
        for op in self.graph.ops:
            drawn = op.index in self.forward and semantics(op.node.domain, op.node.op_type).random
            if drawn or any(name in found for name in op.reads):
                found.update(name for name in op.writes if name not in without)
        return found

    def trained(self, known: Collection[str]) -> dict[str, str]:
        """Parameters, which the loss depends on and the backward pass renews, and their new values."""
        read = {name for index in self.forward for name in self.graph.ops[index].reads}
        return {
            name: output
            for output, name in self.renews.items()
            if name in read and output in known and self.maker.get(output, -1) not in {-1, *self.forward}
        }

    def label(self, value: str) -> str:
        """The node that makes a value, as messages call it."""
        op = self.graph.ops[self.maker[value]]
        return f"node {op.label!r} ({op.node.op_type})"


def _is(op: Op, phase: str) -> bool:
    """Is it labelled so?"""
    return any((p.key, p.value) == ("phase", phase) for p in op.node.metadata_props)


def _any_dims(model: onnx.ModelProto) -> dict[str, int]:
    """Some size for every symbolic dimension of the inputs."""
    symbols = dict.fromkeys(
        dim.dim_param
        for value in model.graph.input
        for dim in value.type.tensor_type.shape.dim
        if dim.HasField("dim_param") and dim.dim_param
    )
    return {name: 8 * number for number, name in enumerate(symbols, start=1)}


def _cut(step: _Step) -> dict[str, str]:
    """Gradient of every parameter that has one: a minimum cut between forward pass and new parameters."""
    known = step.known_to()
    trained = step.trained(known)
    if not trained:
        raise ModelError(_nothing_to_split(step))
    able = {name: _candidates(step, name, output, known) for name, output in trained.items()}
    near = _nearest_cut(step, known, set().union(*able.values()), list(trained.values()))
    cut: dict[str, str] = {}
    for name, output in trained.items():
        found = [value for value in near if value in able[name]]
        if len(found) > 1 or output in found:
            raise ModelError(
                f"the step cannot be split: the update of {name!r} reads more of the batch than one gradient, by "
                f"{step.label(found[-1])}; export it without an optimizer"
            )
        if found:
            cut[name] = _with_the_backward_pass(step, found[0], known, able[name])
    return cut


_LINEAR = ("Where", "Mul", "Div", "Add", "Sub", "Neg", "Identity")


def _with_the_backward_pass(step: _Step, value: str, known: Collection[str], able: Collection[str]) -> str:
    """The last value that follows from a gradient alone, by ops that are labelled as of the backward pass.

    Those are masks of rows that get no gradient, and terms of the loss that only parameters have a part in.
    """
    while True:
        readers = [op for op in step.graph.ops if value in op.reads] if value not in step.renews else []
        if len(readers) != 1 or not _is(readers[0], "backward") or readers[0].node.op_type not in _LINEAR:
            return value
        op = readers[0]
        if sum(name in known for name in op.reads) != 1 or op.writes[0] not in able:
            return value
        value = op.writes[0]


def _nothing_to_split(step: _Step) -> str:
    outputs = [value.name for value in step.graph.model.graph.output]
    if found := gradients(outputs):
        return (
            f"the step ends at gradients already ({next(iter(found))!r}): there is no update to split off; export it "
            "with an optimizer, or let the framework's own make the update"
        )
    return f"the step cannot be split: no output {NEW}<name> renews an input <name> by a gradient of {step.loss!r}"


def _candidates(step: _Step, name: str, output: str, known: Collection[str]) -> set[str]:
    """Values on the way to a parameter's new one, all the way of its type and shape, by elementwise ops.

    What is labelled a part of the optimizer may be any op.
    """
    wanted = step.tensors[name]
    found, pending = {output}, [output]
    while pending:
        op = step.graph.ops[step.maker[pending.pop()]]
        if not is_elementwise(op.node.domain, op.node.op_type) and not _is(op, "optimizer"):
            continue
        for read in op.reads:
            index, tensor = step.maker.get(read, -1), step.tensors[read]
            if read in found or read not in known or index < 0 or index in step.forward:
                continue
            if (tensor.dtype, tensor.shape) == (wanted.dtype, wanted.shape):
                found.add(read)
                pending.append(read)
    return found


def _nearest_cut(step: _Step, known: Collection[str], able: Collection[str], ends: Sequence[str]) -> list[str]:
    """The fewest of the values in `able` that all ways from the batch to `ends` pass, nearest to the batch."""
    ops = [op for op in step.graph.ops if op.index not in step.forward]
    values = [name for op in ops for name in op.writes if name in known]
    number = {name: 2 + 2 * i for i, name in enumerate(values)}  # where it is made; one more: where it is read
    flow = max_flow.SimpleMaxFlow()
    for op in ops:
        for read in dict.fromkeys(name for name in op.reads if name in known):
            tail = number[read] + 1 if read in number else 0
            for name in op.writes:
                flow.add_arc_with_capacity(tail, number[name], _WHOLE)
    for name, vertex in number.items():
        flow.add_arc_with_capacity(vertex, vertex + 1, 1 if name in able else _WHOLE)
    for name in ends:
        flow.add_arc_with_capacity(number[name] + 1, 1, _WHOLE)
    flow.solve(0, 1)
    near = set(map(int, flow.get_source_side_min_cut()))
    return [name for name, vertex in number.items() if vertex in near and vertex + 1 not in near]


def _sides(step: _Step, cut: Mapping[str, str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """Outputs of the update, and those that are left: the loss, what the batch decides, and what the update needs not.

    A renewal that depends on neither, such as a count of steps, goes where its input is read.
    """
    outputs = [value.name for value in step.graph.model.graph.output]
    follows = _descendants(step.graph, cut.values())
    update = [name for name in outputs if name in follows and name not in {*known, *cut.values()}]
    open_yet = [name for name in outputs if name in step.renews and name not in {*update, *known}]
    while True:
        read = {name for op in _needed(step, update, cut.values()) for name in op.reads}
        if not (found := [name for name in open_yet if step.renews[name] in read and name not in update]):
            break
        update += found
    update = [name for name in outputs if name in update]
    return update, [name for name in outputs if name not in update]


def _descendants(graph: Graph, names: Collection[str]) -> set[str]:
    found = set(names)
    for op in graph.ops:
        if any(name in found for name in op.reads):
            found.update(op.writes)
    return found


def _needed(step: _Step, outputs: Sequence[str], given: Collection[str]) -> list[Op]:
    """Ops that make some values, where others are given."""
    found: set[int] = set()
    pending = [step.maker[name] for name in outputs if name in step.maker and name not in given]
    while pending:
        index = pending.pop()
        if index not in found:
            found.add(index)
            reads = (name for name in step.graph.ops[index].reads if name not in given)
            pending.extend(step.maker[name] for name in reads if name in step.maker)
    return [op for op in step.graph.ops if op.index in found]


def _check(step: _Step, cut: Mapping[str, str], update: Sequence[str], left: Sequence[str]) -> None:
    """ModelError where the two parts would not compute what the step computes, or not from gradients alone."""
    first, second = _needed(step, [*left, *cut.values()], ()), _needed(step, update, cut.values())
    renewed = {step.renews[name] for name in left if name in step.renews}
    for op in second:
        if name := next((name for name in op.reads if name in renewed), None):
            raise ModelError(
                f"the step cannot be split: node {op.label!r} ({op.node.op_type}) of the update reads {name!r}, which "
                "is renewed before it; export it without an optimizer"
            )
    state = {name for name in step.renews.values() if name not in cut and step.tensors[name].shape}
    for op in _needed(step, list(cut.values()), ()):  # a number, such as the scale of a loss, may be state
        if op.index not in step.forward and (name := next((name for name in op.reads if name in state), None)):
            raise ModelError(
                f"the step cannot be split: node {op.label!r} ({op.node.op_type}) mixes {name!r}, state of the "
                "optimizer, with the batch before there is a gradient; export it without an optimizer"
            )
    both = {op.index for op in first} & {op.index for op in second}
    for op in second:
        says = semantics(op.node.domain, op.node.op_type)
        if op.index in both and (says.random or says.stateful):
            raise ModelError(
                f"the step cannot be split: both parts need what node {op.label!r} ({op.node.op_type}) makes, and it "
                "makes something else every time; pass that in as an input"
            )
    taken = [name for name in map(GRADIENT.__add__, cut) if name in step.graph.values and name not in cut.values()]
    if taken:
        raise ModelError(f"the step cannot be split: it has a value {taken[0]!r} of its own; rename it")


def _first_part(step: _Step, cut: Mapping[str, str], outputs: Sequence[str]) -> onnx.ModelProto:
    """The step up to its gradients; inputs that nobody reads stay with it."""
    read = {name for op in step.graph.ops for name in op.reads}
    model = _part(step, _needed(step, [*outputs, *cut.values()], ()), outputs, "gradients")
    model.graph.input.extend(value for value in step.graph.model.graph.input if value.name not in read)
    names = _names(cut)
    rename(model.graph, names)
    del model.graph.output[:]
    declared = {value.name: value for value in step.graph.model.graph.output}
    gradient = {GRADIENT + name for name in cut}
    model.graph.output.extend(declared[name] for name in outputs if name not in gradient)
    for name in outputs:
        if name in names and name not in gradient:  # a gradient that the step puts out by a name of its own
            _append(model.graph, "Identity", [names[name]], name)
    for name, value in cut.items():
        if names[value] != GRADIENT + name:  # one value is the gradient of two parameters, of a sum's summands say
            _append(model.graph, "Identity", [names[value]], GRADIENT + name)
        model.graph.output.append(_typed(step, GRADIENT + name, value))
    return model


def _second_part(step: _Step, cut: Mapping[str, str], outputs: Sequence[str]) -> onnx.ModelProto:
    """The update. Where parameters share a gradient, each has an input of its own."""
    ops = _needed(step, outputs, cut.values())
    model = _part(step, ops, outputs, "update")
    names = _names(cut)
    shared = {value for name, value in cut.items() if names[value] != GRADIENT + name}
    leads = _led_to(step, ops, cut) if shared else {}
    for op, node in zip(ops, (node for node in model.graph.node if not graphs.is_constant(node)), strict=True):
        for slot, read in enumerate(node.input):
            if read in shared and len(parameters := leads[op.index]) == 1:
                node.input[slot] = GRADIENT + next(iter(parameters))
    rename(model.graph, names)
    read = {name for node in model.graph.node for name in node.input}
    read |= {names.get(name, name) for op in ops for name in op.captured}
    found = [GRADIENT + name for name in cut if GRADIENT + name in read]
    by_name = {GRADIENT + name: value for name, value in cut.items()}
    model.graph.input.extend(_typed(step, name, by_name[name]) for name in found)
    return model


def _names(cut: Mapping[str, str]) -> dict[str, str]:
    """What the values of a cut are called in both parts: after the first parameter that they are the gradient of."""
    return {value: GRADIENT + name for name, value in reversed(list(cut.items()))}


def _led_to(step: _Step, ops: Sequence[Op], cut: Mapping[str, str]) -> dict[int, set[str]]:
    """Parameters whose new value each op of the update has a part in."""
    ends = {output: name for output, name in step.renews.items() if name in cut}
    after: dict[str, set[str]] = {}
    found: dict[int, set[str]] = {}
    for op in reversed(ops):
        found[op.index] = set().union(*(after.get(name, set()) | {ends.get(name, "")} for name in op.writes)) - {""}
        for name in op.reads:
            after.setdefault(name, set()).update(found[op.index])
    return found


def _part(step: _Step, ops: Sequence[Op], outputs: Sequence[str], title: str) -> onnx.ModelProto:
    """Some nodes as a model of their own, with what they read of inputs and constants."""
    whole = step.graph.model.graph
    read = {name for op in ops for name in op.reads} | set(outputs)
    made = {name for op in ops for name in op.writes}
    model = onnx.ModelProto(ir_version=step.graph.model.ir_version, producer_name=step.graph.model.producer_name)
    model.opset_import.extend(step.graph.model.opset_import)
    for prop in step.graph.model.metadata_props:  # a plan's promises, its budget say, are of the whole step
        if prop.key == shapes.SHAPES_KEY or not prop.key.startswith(shapes.TAG):
            model.metadata_props.append(prop)
    part = model.graph
    part.name = f"{whole.name or 'graph'}.{title}"
    part.node.extend(n for n in whole.node if made.intersection(filter(None, n.output)) or _stated(n, read))
    part.initializer.extend(tensor for tensor in whole.initializer if tensor.name in read)
    part.sparse_initializer.extend(tensor for tensor in whole.sparse_initializer if tensor.values.name in read)
    part.input.extend(value for value in whole.input if value.name in read)
    part.value_info.extend(value for value in whole.value_info if value.name in made)
    declared = {value.name: value for value in whole.output}
    part.output.extend(declared[name] for name in outputs)
    return model


def _stated(node: onnx.NodeProto, read: Collection[str]) -> bool:
    return graphs.is_constant(node) and node.output[0] in read


def _typed(step: _Step, title: str, like: str) -> onnx.ValueInfoProto:
    tensor = step.tensors[like]
    return helper.make_tensor_value_info(title, tensor.dtype, tensor.shape)


def rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Give values new names wherever nodes, and bodies of nodes, make or read them."""
    for node in graph.node:
        for field in (node.input, node.output):
            for slot, name in enumerate(field):
                if name in names:
                    field[slot] = names[name]
        rename_captures(node, names)
    for value in (*graph.output, *graph.value_info):
        value.name = names.get(value.name, value.name)


def accumulating(step: onnx.ModelProto) -> onnx.ModelProto:
    """A step that adds its gradients, times `WEIGHT`, to sums: ``new.grad.<name>`` renews the input ``grad.<name>``.

    Each gradient is gone as soon as it is added, and the sums can lie one after the other in one flat buffer.

    Parameters
    ----------
    step : onnx.ModelProto
        Puts out ``grad.<name>``, as `Split.gradients` does.

    Raises
    ------
    ModelError
        It puts out no gradients, or a value has a name that is needed.

    Examples
    --------
    >>> from sample_models.chain import chain
    >>> summing = accumulating(split_step(chain(2, 16, 8)).gradients)
    >>> [value.name for value in summing.graph.output], summing.graph.input[-1].name
    (['loss', 'new.grad.bias'], 'gradient_weight')
    """
    found = gradients(value.name for value in step.graph.output)
    if not found:
        raise ModelError("the step puts out no gradients: split it first, with onnx-remat split")
    model = onnx.ModelProto()
    model.CopyFrom(step)
    graph, values = model.graph, graphs.build(step).values
    raw = {name: f"one.{name}" for name in found}
    if taken := next((n for n in (WEIGHT, *raw.values(), *(NEW + name for name in found)) if n in values), None):
        raise ModelError(f"the step has a value {taken!r} of its own: rename it")
    kinds = {value.name: value.type.tensor_type.elem_type for value in graph.output}
    rename(graph, raw)
    factors: dict[int, str] = {TensorProto.FLOAT: WEIGHT}
    for value in graph.output:
        name = value.name.removeprefix("one.")
        if name not in found:
            continue
        if (kind := kinds[name]) not in factors:
            factors[kind] = f"{WEIGHT}.{kind}"
            _append(graph, "Cast", [WEIGHT], factors[kind], to=kind)
        _append(graph, "Mul", [raw[name], factors[kind]], f"weighed.{name}")
        _append(graph, "Add", [name, f"weighed.{name}"], NEW + name)
        value.name = NEW + name
        total = onnx.ValueInfoProto(name=name)
        total.type.CopyFrom(value.type)
        graph.input.append(total)
    graph.input.append(helper.make_tensor_value_info(WEIGHT, TensorProto.FLOAT, []))
    return model


def _append(graph: onnx.GraphProto, op_type: str, inputs: list[str], output: str, **more: Any) -> None:
    node = helper.make_node(op_type, inputs, [output], name=f"{op_type}->{output}", **more)
    node.metadata_props.add(key="phase", value="backward")
    graph.node.append(node)
