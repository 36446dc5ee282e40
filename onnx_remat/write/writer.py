"""Schedule -> ModelProto: clone recomputed nodes, put nodes in schedule order, pin that order with control edges.

A control edge passes one input of the waiting step through an Unsqueeze whose empty vector of axes is computed from the
value to wait for, the *trigger* (see `barriers`): the value and its buffer are unchanged, no shape needs to be known,
and nothing is copied; yet the step now depends on the trigger.

If the step's result is private (see `private_buffers`), the file states no shape for the Unsqueeze's output. It then
has no inferable rank and the step's result no inferable shape; the model's metadata records it for tools that read the
file again. If a group of values shares one private buffer, ``value_info`` states artificial symbolic dimensions for
them instead: ``onnx_remat.p<group>.<axis>=<size>``, but only if necessary: when it loads the file, the runtime compares
every value of a stated shape with every free buffer of one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass

import onnx
from onnx import TensorProto, helper

from onnx_remat.errors import ModelError
from onnx_remat.ir.body import names_in, rename_captures
from onnx_remat.ir.dropout import is_draw, is_product, kept, spelled_out, whole
from onnx_remat.ir.graph import Graph, Op, is_constant
from onnx_remat.ir.metadata import (
    CLONES_KEY,
    CONTROL_KEY,
    EDGES_KEY,
    MOVES_KEY,
    RECOMPUTE_KEY,
    SHAPES_KEY,
    TAG,
    entries,
    is_of_a_plan,
    set_entries,
)
from onnx_remat.ir.naming import Unused
from onnx_remat.ir.op_semantics import overwritten, semantics
from onnx_remat.ir.opsets import opset_of
from onnx_remat.ir.shapes import Dim, Tensor
from onnx_remat.ort.moves import DOWN, UP, is_move, made_by
from onnx_remat.write.barriers import MIN_OPSET, Barriers
from onnx_remat.write.control_edges import waiting_slots
from onnx_remat.write.decided import Decisions, Rewritten

_MAY_OMIT_INPUTS = 4
"""First IR version in which an initializer need not be an input. A file keeps its version and its inputs: in later
versions callers may feed an initializer that is an input, so that ONNX Runtime no longer takes it as a constant."""


def rewrite(
    graph: Graph, tensors: Mapping[str, Tensor], decisions: Decisions, metadata: Mapping[str, str]
) -> Rewritten:
    """Write a schedule as a model that stock ONNX Runtime executes in that order, with the decided private buffers.

    Parameters
    ----------
    graph, tensors
        The original.
    decisions : Decisions
        The schedule, its control edges and private buffers.
    metadata : mapping of str to str
        Model metadata to record.

    Raises
    ------
    ModelError
        The model's opset is too old for control edges.
    """
    model = onnx.ModelProto()
    model.CopyFrom(graph.model)
    del model.graph.node[:]
    del model.graph.value_info[:]
    writer = _Writer(graph, tensors, decisions, model.graph.node)
    writer.write()
    constants = [node for node in graph.model.graph.node if is_constant(node)]
    if model.ir_version < _MAY_OMIT_INPUTS:
        constants += [helper.make_node("Constant", [], [v.name], value=v) for v in writer.initializers]
    else:
        model.graph.initializer.extend(writer.initializers)
    n_helpers = len(writer.nodes) - graph.n_nodes()
    if constants:
        nodes = list(model.graph.node)
        del model.graph.node[:]
        model.graph.node.extend(constants + nodes)
    given = {v.name: v for v in graph.model.graph.value_info if v.name not in graph.makers}
    for name, kind in writer.types.items():
        model.graph.value_info.append(given.get(name) or onnx.ValueInfoProto(name=name, type=kind))
    plan = {CLONES_KEY: writer.clones, EDGES_KEY: writer.edges, SHAPES_KEY: writer.shapes}
    plan |= {MOVES_KEY: writer.back} if writer.back else {}
    _set_metadata(model, dict(metadata) | {key: json.dumps(names) for key, names in plan.items()})
    return Rewritten(
        model, tuple(writer.recomputed), len(writer.edges), int((decisions.group >= 0).sum()),
        n_helpers, tuple(writer.occurrences), moved=tuple(writer.moved),
    )  # fmt: skip


def _set_metadata(model: onnx.ModelProto, metadata: Mapping[str, str]) -> None:
    kept = {key: value for key, value in entries(model).items() if not is_of_a_plan(key)}
    set_entries(model, kept | dict(metadata))


@dataclass(frozen=True, slots=True)
class _Occurrence:
    """A step to write.

    Attributes
    ----------
    op : Op
    number : int
        0 for the first run, then the number of the recompute.
    slot : int or None
        Input slot for a control edge or for hiding a shape.
    trigger : str or None
        Value to wait for.
    hide : bool
        Whether to hide the shapes of its outputs.
    makes : mapping of str to int
        Private group, or -1, of each output.
    drops : tuple of str
        Outputs without a reader that must be freed at once.
    kept : str
        The first of the other outputs: steps that wait for this one wait for it.
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
    """Converts steps to nodes, which it appends to `nodes`; records the name of each value's latest occurrence."""

    def __init__(
        self, graph: Graph, tensors: Mapping[str, Tensor], decisions: Decisions, nodes: MutableSequence[onnx.NodeProto]
    ) -> None:
        self.graph = graph
        self.tensors = tensors
        self._decisions = decisions
        self._views = set(decisions.views)
        self.nodes = nodes
        self.initializers: list[onnx.TensorProto] = []
        self.recomputed: list[str] = []
        self.clones: list[str] = []
        self.edges: list[str] = []
        self.moved: list[str] = []
        self.back: list[str] = []
        self.occurrences: list[str] = []
        self._down: list[tuple[int, onnx.NodeProto]] = []  # copies to the host, and the node index to insert them at
        self._made_at: dict[str, int] = {}  # number of nodes once a value is made
        self.types = {v.name: v.type for v in graph.model.graph.value_info if v.name in graph.values}
        self._made_types: dict[tuple[int, tuple[Dim, ...] | None], onnx.TypeProto] = {}
        self.shapes: dict[str, tuple[int | str, ...]] = {}
        self._interface = {v.name: v.type for v in (*graph.model.graph.input, *graph.model.graph.output)}
        self._fresh = Unused(names_in(graph.model.graph)).fresh
        self._latest = {name: name for name in graph.values}
        self._homes = {op.inputs[0]: op.outputs[0] for op in graph.ops if is_move(op)}
        self._maker = {made_by(op): op.index for op in graph.ops if not is_move(op)} if self._homes else {}
        self._names = list(graph.values)
        self._delayed_names: dict[tuple[str, str | None, bool, bool], str] = {}
        self._dropped = decisions.unrolled.dropped
        self._delayed_views: set[str] = set()  # names that stand for a step and are views made by a control edge
        self._unknown = 0
        sizes = Counter(decisions.group.tolist())
        self._shared = {number for number, members in sizes.items() if number >= 0 and members > 1}
        runs = Counter(decisions.schedule.order)
        again = any(count > 1 and is_product(graph.ops[index]) for index, count in runs.items())
        needed = decisions.pins or decisions.leaders or decisions.drops or again
        self._barriers = self._make_barriers() if needed else None

    def write(self) -> None:
        """Append the nodes of every step, each after the control edge or the Unsqueeze that it needs."""
        what = self._decisions
        after = {pin.step: pin.after for pin in what.pins}
        hidden = {int(what.unrolled.step[i]) for i in what.leaders}
        count = [0] * len(self.graph.ops)
        made: list[str] = []  # per step, the name to wait for
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
            kept = next(name for i, name in names.items() if not self._dropped[i])
            here = _Occurrence(op, count[index], what.slots[index], trigger, hide, makes, drops, kept)
            if is_draw(op):  # the product, the next step, writes the Dropout
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
        """Append the node of a step; a product together with its draw is a Dropout."""
        op = here.op
        inputs = [self._latest[name] if name else "" for name in op.inputs]
        for slot in overwritten(op.node) if here.number else ():
            inputs[slot] = self._copy(inputs[slot])
        if here.trigger or here.hide:
            assert here.slot is not None, op.label
            for slot in waiting_slots(self.graph, self.tensors, op, here.slot):
                is_shape = slot in semantics(op.node.domain, op.node.op_type).shapes
                inputs[slot] = self._delayed(inputs[slot], op.inputs[slot], here.trigger, here.hide, is_shape)
        made = op.node if draw is None else whole(draw, op)
        if draw is not None:
            inputs = [inputs[0], *(self._latest[name] if name else "" for name in draw.inputs[1:])]
        self.nodes.append(made)
        node = self.nodes[-1]
        node.input[:] = inputs
        rename_captures(node, {n: self._latest[n] for n in op.captured if self._latest[n] != n})
        self._name_outputs(node, here)
        if self._comes_back(op):
            self.back.append(node.output[0])
        self._made_at |= dict.fromkeys(node.output, len(self.nodes))

    def _comes_back(self, op: Op) -> bool:
        """Is an op a copy back to the device of what the graph itself moved to the host?"""
        maker = self.graph.makers.get(op.inputs[0]) if op.node.op_type == UP else None
        return maker is not None and self.graph.ops[maker].node.op_type == DOWN

    def _move(self, here: _Occurrence, there: bool) -> None:
        """Write a move, which copies a value back from the host; `there`: the previous step made the value.

        Each move has two copies of its own: ONNX Runtime would merge two copies from the same host value into one.
        """
        (value,) = here.op.outputs
        if there and not here.number:
            self._occur(value, value, here.makes[value])
            return
        current, number = self._latest[value], len(self.moved)
        home, back = (self._fresh(f"{value}__{what}{number}") for what in ("home", "back"))
        down = helper.make_node(DOWN, [current], [home], name=home)
        up = helper.make_node(UP, [home], [back], name=back)
        for node in (down, up):
            node.metadata_props.extend(here.op.node.metadata_props)
        _backward(up)
        self._down.append((self._made_at[current], down))
        self._declare(home, value, -1)
        self._occur(back, value, here.makes[value])
        self.nodes.append(up)
        self._made_at[back] = len(self.nodes)
        self.moved.append(value)
        self.back.append(back)

    def _drop(self, here: _Occurrence) -> None:
        """Give a reader to each dropped output of a recompute: the output that is read waits for the dropped ones.

        The runtime keeps a value without readers to the end of the step. Omitting the output is not possible either:
        the runtime may refuse the node, or take another kernel.
        """
        trigger = None
        for name in (*here.drops, here.kept) if here.drops else ():
            current = self._delayed(self._latest[name], name, trigger, False) if trigger else self._latest[name]
            trigger = self._latest[name] = current
        if trigger:
            self._delayed_views.add(trigger)

    def _multiply(self, here: _Occurrence) -> None:
        """Write a recompute of a Dropout's product as three nodes; the mask's hidden shape keeps buffers private."""
        (result,), (source, mask) = here.op.outputs, (self._latest[name] for name in here.op.inputs)
        tensor = self.tensors[result]
        mask = self._delayed(mask, here.op.inputs[1], here.trigger or source, True)
        divisor = self._fresh(f"{TAG}keep")
        self.initializers.append(helper.make_tensor(divisor, tensor.dtype, (), [kept(here.op)]))
        between = [self._fresh(f"{result}__{what}{here.number}") for what in ("mask", "masked")]
        for name in between:
            self.shapes[name] = _open_shape(tensor)
        nodes = spelled_out(here.op, source, mask, divisor, between, tensor.dtype)
        for node in nodes[:-1]:
            self._mark(node, here.op)
        self._name_outputs(nodes[-1], here)
        self.nodes.extend(nodes)

    def _make_barriers(self) -> Barriers:
        """Return the barriers, computed from the smallest input, as some versions copy that input to the host.

        Not of a weight, from which ONNX Runtime would compute them when it loads the file, and rather not of state on
        the host, which nothing but its copy reads.
        """
        opset = opset_of(self.graph.model)
        if opset < MIN_OPSET:
            raise ModelError(
                f"the model uses opset {opset}; pinning an order needs {MIN_OPSET} or later: "
                "convert it with onnx.version_converter first"
            )
        stored = {tensor.name for tensor in self.graph.model.graph.initializer}
        inputs = [v.name for v in self.graph.model.graph.input if _is_tensor(v) and v.name not in stored]
        if not inputs:
            raise ModelError(
                "the model has no input, from whose size an order is pinned: make one of its values an input"
            )
        copied = {name for op in self.graph.ops if op.node.op_type == UP for name in op.reads}
        source = min(inputs, key=lambda n: (n in copied, self.tensors[n].dtype not in _SIZED, self.tensors[n].nbytes))
        sized = self.tensors[source].dtype in _SIZED
        return Barriers(opset, source, self._helper, self._fresh, self._add_vector, sized)

    def _name_outputs(self, node: onnx.NodeProto, here: _Occurrence) -> None:
        """Name the outputs of a step's node, and label a recompute as such."""
        op, number = here.op, here.number
        if number:
            self.recomputed.append(op.label)
            node.name = self._fresh(f"{op.node.name or op.node.op_type}__remat{number}")
            self._mark(node, op)
        for slot, name in enumerate(op.outputs):
            if name and name in self._homes:  # the plan calls it the host's copy
                node.output[slot] = self._homes[name]
                self._latest[name] = self._latest[self._homes[name]] = self._homes[name]
                self.occurrences.append(name)
            elif name:
                node.output[slot] = self._fresh(f"{name}__remat{number}") if number else name
                self._occur(node.output[slot], name, here.makes[name])
        if number:
            self.clones.append(next(name for name in node.output if name))

    def _mark(self, node: onnx.NodeProto, op: Op) -> None:
        """Label a node as a recompute, and so part of the backward pass."""
        node.metadata_props.add(key=RECOMPUTE_KEY, value=op.label)
        _backward(node)

    def _occur(self, new: str, value: str, group: int) -> None:
        """Record `new` as the name of the latest occurrence of `value`."""
        self._latest[value] = new
        self.occurrences.append(new)
        self._declare(new, value, group)

    def _delayed(self, current: str, original: str, trigger: str | None, hide: bool, is_shape: bool = False) -> str:
        """Pass `current` through an Unsqueeze, after `trigger` if there is one, and return the name to read instead.

        Equal Unsqueezes are shared. A shape that a kernel reads passes through a Concat.
        """
        hide = hide or original in self._views or current in self._delayed_views
        key = current, trigger, hide, is_shape
        if key in self._delayed_names:
            return self._delayed_names[key]
        assert self._barriers is not None
        stem = self._fresh(f"{current}__after" if trigger else f"{current}__private")
        if trigger:
            self.edges.append(stem)
        if is_shape:
            self._barriers.delay_shape(current, stem, trigger or "")
        else:
            self._barriers.delay(current, stem, trigger or "", hide)
        if current in self.shapes:
            self.shapes[stem] = self.shapes[current]
        elif not hide:
            kind = self.types.get(current) or self._interface.get(current)
            if kind is not None and all(_is_stated(dim) for dim in kind.tensor_type.shape.dim):
                self.types[stem] = kind
            else:
                self._declare(stem, original, -1)
        self._delayed_names[key] = stem
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
        """Append a copy of a value for a recompute to overwrite, and return its name: Concat copies a single input."""
        copy = self._fresh(f"{name}__copy")
        self.nodes.append(helper.make_node("Concat", [name], [copy], name=copy, axis=0))
        return copy

    def _declare(self, name: str, like: str, group: int) -> None:
        """State a value's shape in value_info: its own, or its group's artificial one; none for a group of one."""
        tensor = self.tensors[like]
        if name in self._interface or tensor.dtype == TensorProto.UNDEFINED:
            return
        if group >= 0 and group not in self._shared:
            self.types.pop(name, None)
            self.shapes[name] = _open_shape(tensor)
            return
        if group >= 0:
            dims: tuple[Dim, ...] | None = tuple(
                f"{TAG}p{group}.{axis}={size if known is None else known}"
                for axis, (size, known) in enumerate(_dims(tensor))
            )
        else:
            known = [dim for _, dim in _dims(tensor)]
            if None not in known and like in self.types and name != like:
                self.types[name] = self.types[like]
                return
            # The file must not state a size that the runtime cannot infer from it, as the runtime would share buffers
            # by it; a unique symbolic name tells it nothing, and records the size for tools that read the file again.
            self._unknown += None in known
            dims = tuple(
                f"{TAG}u{self._unknown}.{axis}={size}" if dim is None else dim
                for axis, (size, dim) in enumerate(_dims(tensor))
            )
        if (tensor.dtype, dims) not in self._made_types:
            self._made_types[tensor.dtype, dims] = helper.make_tensor_type_proto(tensor.dtype, dims)
        self.types[name] = self._made_types[tensor.dtype, dims]


def _backward(node: onnx.NodeProto) -> None:
    for prop in node.metadata_props:
        if prop.key == "phase":
            prop.value = "backward"


def _dims(tensor: Tensor) -> list[tuple[int, Dim]]:
    """Return, per axis, the size, and the size or name that the runtime will know, if any."""
    return list(zip(tensor.shape, tensor.symbolic or (None,) * len(tensor.shape), strict=True))


def _open_shape(tensor: Tensor) -> tuple[int | str, ...]:
    """Return the data type and dimensions as `SHAPES_KEY` records them."""
    return tensor.dtype, *(size if dim is None else dim for size, dim in _dims(tensor))


def _is_stated(dim: onnx.TensorShapeProto.Dimension) -> bool:
    return dim.HasField("dim_value") or bool(dim.dim_param)


_SIZED = frozenset(
    {
        TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BOOL, TensorProto.INT8,
        TensorProto.INT16, TensorProto.INT32, TensorProto.INT64, TensorProto.UINT8, TensorProto.UINT16,
        TensorProto.UINT32, TensorProto.UINT64, TensorProto.STRING,
    }
)  # fmt: skip
"""Types of which ONNX Runtime can compute the size on every provider."""


def _is_tensor(value: onnx.ValueInfoProto) -> bool:
    return bool(value.type.HasField("tensor_type"))
