"""Schedule -> ModelProto: clone what is recomputed, put nodes in schedule order, pin that order with control edges.

A control edge passes one input of the step that must wait through an Unsqueeze by no axes, which are computed from the
value to wait for (see `barriers`): the value and its buffer are unchanged, no shape needs to be known, and nothing is
copied; yet the step now depends on the trigger.

Where the step's result is to be private (see `private_buffers`), nothing states the shape of what the Unsqueeze makes.
On paper it then has no rank and the step's result no shape; for who reads the file again, the model's metadata tells
it. Where a group of values is to share one private buffer, ``value_info`` states made-up symbolic dimensions for them
instead: ``onnx_remat.p<group>.<axis>=<size>``. Not where there is no need: the runtime, loading the file, compares
every value of a stated shape with every free buffer of one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import TensorProto, helper

from onnx_remat.errors import ModelError
from onnx_remat.ir.body import names_in, rename_captures
from onnx_remat.ir.dropout import is_draw, is_product, kept, spelled_out, whole
from onnx_remat.ir.graph import Graph, Op, is_constant
from onnx_remat.ir.op_semantics import overwritten, semantics
from onnx_remat.ir.opsets import opset_of
from onnx_remat.ir.shapes import SHAPES_KEY, TAG, Dim, Tensor, is_of_a_plan
from onnx_remat.ort.moves import DOWN, UP, is_move, made_by
from onnx_remat.write.barriers import MIN_OPSET, Barriers
from onnx_remat.write.control_edges import held_slots
from onnx_remat.write.decided import (
    CLONES_KEY,
    CONTROL_KEY,
    EDGES_KEY,
    MOVES_KEY,
    RECOMPUTE_KEY,
    Decisions,
    Rewritten,
)


def rewrite(
    graph: Graph, tensors: Mapping[str, Tensor], decisions: Decisions, metadata: Mapping[str, str]
) -> Rewritten:
    """Write a schedule down as a model that stock ONNX Runtime executes in that order, with those buffers.

    Parameters
    ----------
    graph, tensors
        The original.
    decisions : Decisions
        What to write.
    metadata : mapping of str to str
        Model metadata to record, keys without prefix.

    Raises
    ------
    ModelError
        The model's opset is too old to write control edges in.
    """
    writer = _Writer(graph, tensors, decisions)
    writer.write()
    model = onnx.ModelProto()
    model.CopyFrom(graph.model)
    del model.graph.node[:]
    del model.graph.value_info[:]
    model.graph.node.extend(node for node in graph.model.graph.node if is_constant(node))
    model.graph.node.extend(writer.nodes)
    model.graph.initializer.extend(writer.initializers)
    model.graph.value_info.extend(writer.value_info.values())
    plan = {CLONES_KEY: writer.clones, EDGES_KEY: writer.edges, SHAPES_KEY: writer.shapes}
    plan |= {MOVES_KEY: writer.back} if writer.back else {}
    _set_metadata(
        model, {TAG + key: value for key, value in metadata.items()} | {k: json.dumps(v) for k, v in plan.items()}
    )
    return Rewritten(
        model, tuple(writer.recomputed), len(writer.edges), int((decisions.group >= 0).sum()),
        len(writer.nodes) - graph.n_nodes(), tuple(writer.occurrences), moved=tuple(writer.moved),
    )  # fmt: skip


def _set_metadata(model: onnx.ModelProto, metadata: Mapping[str, str]) -> None:
    kept = [(p.key, p.value) for p in model.metadata_props if not is_of_a_plan(p.key)]
    del model.metadata_props[:]
    for key, value in [*kept, *metadata.items()]:
        model.metadata_props.add(key=key, value=value)


@dataclass(frozen=True, slots=True)
class _Occurrence:
    """A step to write.

    Attributes
    ----------
    op : Op
    number : int
        0 the first time, then of the recompute.
    slot : int or None
        Input that a control edge or the hiding of a shape goes through.
    trigger : str or None
        Value to wait for.
    hide : bool
        Is the shape of what it makes to be hidden?
    makes : mapping of str to int
        Private group, or -1, of each value it makes.
    drops : tuple of str
        Of these, the ones that nobody reads and that are to be freed at once.
    kept : str
        The first of the others: it stands for the step where another has to wait for that.
    """

    op: Op
    number: int
    slot: int | None
    trigger: str | None
    hide: bool
    makes: Mapping[str, int]
    drops: tuple[str, ...]
    kept: str


class _Writer:
    """Turns steps into nodes; remembers which name holds each value's latest occurrence."""

    def __init__(self, graph: Graph, tensors: Mapping[str, Tensor], decisions: Decisions) -> None:
        self.graph = graph
        self.tensors = tensors
        self._decisions = decisions
        self._views = set(decisions.views)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.recomputed: list[str] = []
        self.clones: list[str] = []
        self.edges: list[str] = []
        self.moved: list[str] = []
        self.back: list[str] = []
        self.occurrences: list[str] = []
        self._down: list[tuple[int, onnx.NodeProto]] = []  # copies to the host, and the nodes that they come before
        self._made_at: dict[str, int] = {}  # how many nodes there are once a value is made
        self.value_info = {v.name: v for v in graph.model.graph.value_info}
        self.shapes: dict[str, tuple[int | str, ...]] = {}
        self._interface = {v.name: v.type for v in (*graph.model.graph.input, *graph.model.graph.output)}
        self._taken = set(names_in(graph.model.graph))
        self._latest = {name: name for name in graph.values}
        self._homes = {op.inputs[0]: op.outputs[0] for op in graph.ops if is_move(op)}
        self._maker = {made_by(op): op.index for op in graph.ops if not is_move(op)} if self._homes else {}
        self._names = list(graph.values)
        self._held: dict[tuple[str, str | None, bool, bool], str] = {}
        self._held_views: set[str] = set()  # what a step stands for, where that is a control edge's view
        self._unknown = 0
        sizes = Counter(decisions.group.tolist())
        self._shared = {number for number, members in sizes.items() if number >= 0 and members > 1}
        runs = Counter(decisions.schedule.order)
        again = any(count > 1 and is_product(graph.ops[index]) for index, count in runs.items())
        needed = decisions.pins or decisions.leaders or decisions.drops or again
        self._barriers = self._make_barriers() if needed else None

    def write(self) -> None:
        """Append the nodes of every step, each behind the control edge or the Unsqueeze that it needs."""
        what = self._decisions
        after = {pin.step: pin.after for pin in what.pins}
        hidden = {int(what.unrolled.step[i]) for i in what.leaders}
        count = [0] * len(self.graph.ops)
        made: list[str] = []  # what stands for each step
        occurrence = 0
        draw: Op | None = None
        for step, index in enumerate(what.schedule.order):
            op = self.graph.ops[index]
            ours = range(occurrence, occurrence + len(op.writes))
            occurrence = ours.stop
            names = {i: self._names[what.unrolled.source[i]] for i in ours}
            makes = {name: int(what.group[i]) for i, name in names.items()}
            drops = tuple(name for i, name in names.items() if i in what.drops)
            steps = (step,) if draw is None else (step - 1, step)
            trigger = next((made[after[s]] for s in steps if s in after), None)
            hide = not hidden.isdisjoint(steps)
            kept = next(name for i, name in names.items() if not what.unrolled.dropped[i])
            here = _Occurrence(op, count[index], what.slots[index], trigger, hide, makes, drops, kept)
            if is_draw(op):  # its Dropout is written with the product, which is the next step
                draw = op
                self._occur(op.outputs[0], op.outputs[0], makes[op.outputs[0]])
            elif is_product(op) and here.number:
                self._multiply(here)
            elif is_move(op):
                self._move(here, there=what.schedule.order[step - 1] == self._maker[op.outputs[0]])
            else:
                self._write_node(here, draw)
                self._drop(here)
                draw = None
            count[index] += 1
            made.append(self._latest[kept])
        for at, node in sorted(self._down, key=lambda each: -each[0]):
            self.nodes.insert(at, node)

    def _write_node(self, here: _Occurrence, draw: Op | None) -> None:
        """Append the node of a step; with its draw, a product is a Dropout."""
        op = here.op
        inputs = [self._latest[name] if name else "" for name in op.inputs]
        for slot in overwritten(op.node) if here.number else ():
            inputs[slot] = self._copy(inputs[slot])
        if here.trigger or here.hide:
            assert here.slot is not None, op.label
            for slot in held_slots(self.graph, op, here.slot):
                is_shape = slot in semantics(op.node.domain, op.node.op_type).shapes
                inputs[slot] = self._hold(inputs[slot], op.inputs[slot], here.trigger, here.hide, is_shape)
        if draw is None:
            node = onnx.NodeProto()
            node.CopyFrom(op.node)
        else:
            node = whole(draw, op)
            inputs = [inputs[0], *(self._latest[name] if name else "" for name in draw.inputs[1:])]
        node.input[:] = inputs
        rename_captures(node, {n: self._latest[n] for n in op.captured if self._latest[n] != n})
        self._name_outputs(node, here)
        self.nodes.append(node)
        self._made_at |= dict.fromkeys(node.output, len(self.nodes))

    def _move(self, here: _Occurrence, there: bool) -> None:
        """A value that the host kept, again; `there`: the step before made it.

        Each move is two copies of its own: ONNX Runtime would make one of two copies up of the same.
        """
        (value,) = here.op.outputs
        if there and not here.number:
            self._occur(value, value, here.makes[value])
            return
        held, number = self._latest[value], len(self.moved)
        home, back = (self._fresh(f"{value}__{what}{number}") for what in ("home", "back"))
        down = helper.make_node(DOWN, [held], [home], name=home)
        up = helper.make_node(UP, [home], [back], name=back)
        for node in (down, up):
            node.metadata_props.extend(here.op.node.metadata_props)
        _backward(up)
        self._down.append((self._made_at[held], down))
        self._declare(home, value, -1)
        self._occur(back, value, here.makes[value])
        self.nodes.append(up)
        self._made_at[back] = len(self.nodes)
        self.moved.append(value)
        self.back.append(back)

    def _drop(self, here: _Occurrence) -> None:
        """Give readers to what a recompute makes for nobody: what is read of it waits for them.

        The runtime holds a value without readers to the end of the step. A recompute without it would not do either:
        the runtime may refuse it, or take another kernel.
        """
        trigger = None
        for name in (*here.drops, here.kept) if here.drops else ():
            held = self._hold(self._latest[name], name, trigger, False) if trigger else self._latest[name]
            trigger = self._latest[name] = held
        if trigger:
            self._held_views.add(trigger)

    def _multiply(self, here: _Occurrence) -> None:
        """A Dropout's product again, spelled out; of a mask of unseen shape, what comes in between shares no buffer."""
        (result,), (source, mask) = here.op.outputs, (self._latest[name] for name in here.op.inputs)
        tensor = self.tensors[result]
        mask = self._hold(mask, here.op.inputs[1], here.trigger or source, True)
        divisor = self._fresh(f"{TAG}keep")
        self.initializers.append(helper.make_tensor(divisor, tensor.dtype, (), [kept(here.op)]))
        between = [self._fresh(f"{result}__{what}{here.number}") for what in ("mask", "masked")]
        for name in between:
            self.shapes[name] = _open_shape(tensor)
        nodes = spelled_out(here.op, source, mask, divisor, between, tensor.dtype)
        for node in nodes[:-1]:
            self._mark(node, here.op)
        self._name_outputs(nodes[-1], here)
        self.nodes += nodes

    def _make_barriers(self) -> Barriers:
        """What values pass through to wait; computed from the smallest input, which some versions copy to the host."""
        opset = opset_of(self.graph.model)
        if opset < MIN_OPSET:
            raise ModelError(
                f"the model uses opset {opset}; pinning an order needs {MIN_OPSET} or later: "
                "convert it with onnx.version_converter first"
            )
        inputs = [v.name for v in self.graph.model.graph.input if _is_tensor(v)]
        source = min(inputs, key=lambda name: self.tensors[name].nbytes)
        return Barriers(opset, source, self._helper, self._fresh, self._add_vector)

    def _name_outputs(self, node: onnx.NodeProto, here: _Occurrence) -> None:
        """Name what a step makes and say what its node is."""
        op, number = here.op, here.number
        if number:
            self.recomputed.append(op.label)
            node.name = self._fresh(f"{op.node.name or op.node.op_type}__remat{number}")
            self._mark(node, op)
        for slot, name in enumerate(op.outputs):
            if name and name in self._homes:  # the host's copy, to a plan
                node.output[slot] = self._homes[name]
                self._latest[name] = self._latest[self._homes[name]] = self._homes[name]
                self.occurrences.append(name)
            elif name:
                node.output[slot] = self._fresh(f"{name}__remat{number}") if number else name
                self._occur(node.output[slot], name, here.makes[name])
        if number:
            self.clones.append(next(name for name in node.output if name))

    def _mark(self, node: onnx.NodeProto, op: Op) -> None:
        """Say that a node is a recompute, and so part of the backward pass."""
        node.metadata_props.add(key=RECOMPUTE_KEY, value=op.label)
        _backward(node)

    def _occur(self, new: str, value: str, group: int) -> None:
        """From here on `value` is called `new`."""
        self._latest[value] = new
        self.occurrences.append(new)
        self._declare(new, value, group)

    def _hold(self, held: str, original: str, trigger: str | None, hide: bool, is_shape: bool = False) -> str:
        """Pass `held` through an Unsqueeze, after `trigger` if there is one; returns the name to read instead.

        Equal ones are made once. A shape that a kernel reads passes through a Concat.
        """
        hide = hide or original in self._views or held in self._held_views
        key = held, trigger, hide, is_shape
        if key in self._held:
            return self._held[key]
        assert self._barriers is not None
        stem = self._fresh(f"{held}__after" if trigger else f"{held}__private")
        if trigger:
            self.edges.append(stem)
        if is_shape:
            self._barriers.hold_shape(held, stem, trigger or "")
        else:
            self._barriers.hold(held, stem, trigger or "", hide)
        if held in self.shapes:
            self.shapes[stem] = self.shapes[held]
        elif not hide:
            info = self.value_info.get(held)
            info_type = info.type if info is not None else self._interface.get(held)
            if info_type is not None and all(_is_told(dim) for dim in info_type.tensor_type.shape.dim):
                self.value_info[stem] = onnx.ValueInfoProto(name=stem, type=info_type)
            else:
                self._declare(stem, original, -1)
        self._held[key] = stem
        return stem

    def _helper(self, op_type: str, inputs: Sequence[str], output: str, trigger: str, **attributes: int) -> None:
        node = helper.make_node(op_type, inputs, [output], name=output)
        node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
        if trigger:
            node.metadata_props.add(key=CONTROL_KEY, value=trigger)
        self.nodes.append(node)

    def _add_vector(self, name: str, entries: Sequence[int]) -> None:
        self.initializers.append(helper.make_tensor(name, TensorProto.INT64, (len(entries),), entries))

    def _copy(self, name: str) -> str:
        """A copy of a value, for a recompute to overwrite: Concat copies even a single input."""
        copy = self._fresh(f"{name}__copy")
        self.nodes.append(helper.make_node("Concat", [name], [copy], name=copy, axis=0))
        return copy

    def _declare(self, name: str, like: str, group: int) -> None:
        """value_info for a value: its own shape to share buffers by, or its group's made-up one; alone in it, none."""
        tensor = self.tensors[like]
        if name in self._interface or tensor.dtype == TensorProto.UNDEFINED:
            return
        if group >= 0 and group not in self._shared:
            self.value_info.pop(name, None)
            self.shapes[name] = _open_shape(tensor)
            return
        if group >= 0:
            dims: tuple[Dim, ...] | None = tuple(
                f"{TAG}p{group}.{axis}={size if known is None else known}"
                for axis, (size, known) in enumerate(_dims(tensor))
            )
        else:
            known = [dim for _, dim in _dims(tensor)]
            if None not in known and like in self.value_info and name != like:
                self.value_info[name] = onnx.ValueInfoProto(name=name, type=self.value_info[like].type)
                return
            # What the runtime cannot tell from the file it must not be told, for it would share buffers by it; a name
            # of its own says no more to it than nothing would, and keeps the size for who reads the file again.
            self._unknown += None in known
            dims = tuple(
                f"{TAG}u{self._unknown}.{axis}={size}" if dim is None else dim
                for axis, (size, dim) in enumerate(_dims(tensor))
            )
        kind = helper.make_tensor_type_proto(tensor.dtype, dims)
        self.value_info[name] = onnx.ValueInfoProto(name=name, type=kind)

    def _fresh(self, wish: str) -> str:
        name, suffix = wish, 1
        while name in self._taken:
            suffix += 1
            name = f"{wish}_{suffix}"
        self._taken.add(name)
        return name


def _backward(node: onnx.NodeProto) -> None:
    for prop in node.metadata_props:
        if prop.key == "phase":
            prop.value = "backward"


def _dims(tensor: Tensor) -> list[tuple[int, Dim]]:
    """Per axis the size, and what the runtime will know of it."""
    return list(zip(tensor.shape, tensor.symbolic or (None,) * len(tensor.shape), strict=True))


def _open_shape(tensor: Tensor) -> tuple[int | str, ...]:
    """Data type and dimensions as `SHAPES_KEY` records them."""
    return tensor.dtype, *(size if dim is None else dim for size, dim in _dims(tensor))


def _is_told(dim: onnx.TensorShapeProto.Dimension) -> bool:
    return dim.HasField("dim_value") or bool(dim.dim_param)


def _is_tensor(value: onnx.ValueInfoProto) -> bool:
    return bool(value.type.HasField("tensor_type"))
