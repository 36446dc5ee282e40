"""The two parts of a step, on either side of a cut."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import helper

from onnx_remat import files
from onnx_remat.errors import ModelError
from onnx_remat.ir import graph as graphs
from onnx_remat.ir import model_io
from onnx_remat.ir.graph import Op
from onnx_remat.ir.metadata import COPIES_KEY, SHAPES_KEY, entries, is_of_a_plan
from onnx_remat.ir.naming import GRADIENT
from onnx_remat.ir.op_semantics import semantics
from onnx_remat.ir.state import rename
from onnx_remat.ort.host_state import is_copy
from onnx_remat.split.cut import find_cut
from onnx_remat.split.edit import append
from onnx_remat.split.whole import StepParts, descendants, needed


@dataclass(frozen=True, slots=True)
class Split:
    """A training step in two parts.

    Attributes
    ----------
    gradients : onnx.ModelProto
        The step that outputs the loss, ``grad.<name>`` for every parameter, and state such as running statistics.
    update : onnx.ModelProto
        The update, which reads parameters, optimizer state, ``grad.<name>`` and learning rates, and outputs new state.
    parameters : tuple of str
        Parameters with a gradient, in the order of the step's outputs.
    loss : str
        The step's output that is the loss.
    folder : Path or None
        Folder of external data.
    data : tuple of str
        Relative paths of the step's data files, see `model_io.Source`.
    """

    gradients: onnx.ModelProto
    update: onnx.ModelProto
    parameters: tuple[str, ...]
    loss: str
    folder: Path | None = None
    data: tuple[str, ...] = ()

    def save(self, gradients: str | os.PathLike[str], update: str | os.PathLike[str], force: bool = False) -> None:
        """Write both parts, or none."""
        files.check_uses([], [files.Use(gradients, "the step"), files.Use(update, "the update")])
        targets = [files.check_target(path, None, force) for path in (gradients, update)]
        with files.together():
            for model, path in zip((self.gradients, self.update), targets, strict=True):
                model_io.save(model, path, self.folder, force, self.data)


def split_step(model: model_io.Model, *, loss: str | None = None, dims: Mapping[str, int] | None = None) -> Split:
    """Split a training step into a step that outputs gradients, and the update.

    Parameters
    ----------
    model : path, bytes, onnx.ModelProto or Source
        A whole step: outputs ``new.<name>`` for inputs ``<name>``.
    loss : str, optional
        Name of the output that is the loss, unless it is ``loss`` or the only scalar.
    dims : mapping of str to int, optional
        Sizes of symbolic dimensions, to distinguish shapes; they stay symbolic. By default 8, 16, 24 and so on.

    Raises
    ------
    ModelError
        The step cannot be split: it has no update, or one that depends on the batch not only through gradients.

    Examples
    --------
    >>> from sample_models.chain import chain
    >>> parts = split_step(chain(2, 16, 8))
    >>> [value.name for value in parts.gradients.graph.output], [value.name for value in parts.update.graph.input]
    (['loss', 'grad.bias'], ['bias', 'grad.bias'])
    """
    source = model_io.load(model)
    step = StepParts.of(source.model, loss, dims)
    cut = find_cut(step)
    after = step.known_to(cut.values())
    update, left = _sides(step, cut, after)
    _check(step, cut, update, left)
    first, second = _first_part(step, cut, left), _second_part(step, cut, update)
    return Split(first, second, tuple(cut), step.loss, source.folder, source.data)


def _sides(step: StepParts, cut: Mapping[str, str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the outputs of the update, and those of the first part: the loss, and all that do not need the update.

    A renewal that depends on neither part, such as a count of steps, belongs to the part that reads its input. One that
    neither reads, such as an average of weights, belongs to the update if it reads what the update renews: it would
    be repeated for every batch whose gradients are summed.
    """
    outputs = [value.name for value in step.graph.model.graph.output]
    follows = descendants(step.graph, cut.values())
    update = [name for name in outputs if name in follows and name not in {*known, *cut.values()}]
    open_yet = [name for name in outputs if name in step.renews and name not in {*update, *known}]
    forward = {name for index in step.forward for name in step.graph.ops[index].reads}

    def reads(names: Sequence[str]) -> set[str]:
        return {name for op in needed(step, names, cut.values()) for name in op.reads}

    while True:
        read, renewed = reads(update), {step.renews[name] for name in update if name in step.renews}
        found = [
            name
            for name in open_yet
            if name not in update
            and (step.renews[name] in read or (step.renews[name] not in forward and renewed & reads([name])))
        ]
        if not found:
            break
        update += found
    update = [name for name in outputs if name in update]
    return update, [name for name in outputs if name not in update]


def _check(step: StepParts, cut: Mapping[str, str], update: Sequence[str], left: Sequence[str]) -> None:
    """Raise ModelError where the two parts would differ from the step, or the update would need more than gradients."""
    first, second = needed(step, [*left, *cut.values()], ()), needed(step, update, cut.values())
    renewed = {step.renews[name] for name in left if name in step.renews}
    for op in second:
        if name := next((name for name in op.reads if name in renewed), None):
            raise ModelError(
                f"the step cannot be split: node {op.label!r} ({op.node.op_type}) of the update reads {name!r}, which "
                "is renewed before it; export it without an optimizer"
            )
    state = {name for name in step.renews.values() if name not in cut and step.tensors[name].shape}
    for op in needed(step, list(cut.values()), ()):  # a number, such as the scale of a loss, may be state
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
                f"the step cannot be split: both parts need the outputs of node {op.label!r} ({op.node.op_type}), "
                "which differ in every run; make them inputs"
            )
    taken = [name for name in map(GRADIENT.__add__, cut) if name in step.graph.values and name not in cut.values()]
    if taken:
        raise ModelError(f"the step cannot be split: it has a value {taken[0]!r} of its own; rename it")


def _first_part(step: StepParts, cut: Mapping[str, str], outputs: Sequence[str]) -> onnx.ModelProto:
    """Return the step up to its gradients, including inputs without readers."""
    read = {name for op in step.graph.ops for name in op.reads}
    model = _part(step, needed(step, [*outputs, *cut.values()], ()), outputs, "gradients")
    whole, has = step.graph.model.graph, {value.name for value in model.graph.input}
    unread = {value.name for value in whole.input} - read - has
    model.graph.input.extend(value for value in whole.input if value.name in unread)
    model.graph.initializer.extend(default for default in whole.initializer if default.name in unread)
    names = _names(cut)
    rename(model.graph, names)
    del model.graph.output[:]
    declared = {value.name: value for value in whole.output}
    gradient = {GRADIENT + name for name in cut}
    model.graph.output.extend(declared[name] for name in outputs if name not in gradient)
    for name in outputs:
        if name in names and name not in gradient:  # a gradient that the step outputs under another name
            append(model.graph, "Identity", [names[name]], name)
    for name, value in cut.items():
        if names[value] != GRADIENT + name:  # one value is the gradient of two parameters, e.g. of summands
            append(model.graph, "Identity", [names[value]], GRADIENT + name)
        model.graph.output.append(_gradient_of(step, name, value))
    return model


def _second_part(step: StepParts, cut: Mapping[str, str], outputs: Sequence[str]) -> onnx.ModelProto:
    """Return the update. Where parameters share a gradient, each has an input of its own."""
    ops = needed(step, outputs, cut.values())
    model = _part(step, ops, outputs, "update")
    for node in model.graph.node:  # without the batch, a new value that is a number would pass for the loss
        if "phase" not in entries(node):
            node.metadata_props.add(key="phase", value="optimizer")
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
    model.graph.input.extend(_gradient_of(step, n, v) for n, v in cut.items() if GRADIENT + n in read)
    return model


def _names(cut: Mapping[str, str]) -> dict[str, str]:
    """Return the names of a cut's values in both parts: after the first parameter of which each is the gradient."""
    return {value: GRADIENT + name for name, value in reversed(list(cut.items()))}


def _led_to(step: StepParts, ops: Sequence[Op], cut: Mapping[str, str]) -> dict[int, set[str]]:
    """Return for each op of the update the parameters whose new values depend on it."""
    ends = {output: name for output, name in step.renews.items() if name in cut}
    after: dict[str, set[str]] = {}
    found: dict[int, set[str]] = {}
    for op in reversed(ops):
        found[op.index] = set().union(*(after.get(name, set()) | {ends.get(name, "")} for name in op.writes)) - {""}
        for name in op.reads:
            after.setdefault(name, set()).update(found[op.index])
    return found


def _part(step: StepParts, ops: Sequence[Op], outputs: Sequence[str], title: str) -> onnx.ModelProto:
    """Return a model of some nodes, with the inputs and constants that they read."""
    whole = step.graph.model.graph
    read = {name for op in ops for name in op.reads} | set(outputs)
    made = {name for op in ops for name in op.writes}
    model = onnx.ModelProto(ir_version=step.graph.model.ir_version, producer_name=step.graph.model.producer_name)
    model.opset_import.extend(step.graph.model.opset_import)
    # A plan's metadata, such as its budget, describes the whole step. So does what may be live while copies run: a part
    # that copies keeps it, and takes no more than the step.
    kept = {SHAPES_KEY, COPIES_KEY} if any(map(is_copy, ops)) else {SHAPES_KEY}
    for prop in step.graph.model.metadata_props:
        if prop.key in kept or not is_of_a_plan(prop.key):
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


def _gradient_of(step: StepParts, parameter: str, value: str) -> onnx.ValueInfoProto:
    """Return a parameter's gradient with the type of its value; symbolic dimensions of the parameter stay."""
    tensor = step.tensors[value]
    made = helper.make_tensor_value_info(GRADIENT + parameter, tensor.dtype, tensor.shape)
    declared = next(v for v in step.graph.model.graph.input if v.name == parameter).type.tensor_type.shape
    if len(declared.dim) == len(tensor.shape):
        for dim, given in zip(made.type.tensor_type.shape.dim, declared.dim, strict=True):
            if given.dim_param:
                dim.dim_param = given.dim_param
    return made
