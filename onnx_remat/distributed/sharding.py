"""Shard an optimizer's update: each rank updates its share of the parameters and keeps its share of the state (ZeRO-1).

Shares are slices of the flat buffer of parameters, so that all have the same size whatever the sizes of the parameters:
two ranks update a parameter on their border, each its part. This requires an update whose ops are elementwise and read
the gradient of one parameter only, as those of SGD, Adam and similar optimizers. An update that reads a norm over a
parameter (LAMB), its rows (Adafactor), a product with it (Muon), or all gradients (a clip inside the step) does not
shard.

References
----------
Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx

from onnx_remat.distributed.flat import Flat
from onnx_remat.errors import ModelError
from onnx_remat.ir import graph as graphs
from onnx_remat.ir import shapes
from onnx_remat.ir.graph import Graph, Op
from onnx_remat.ir.naming import GRADIENT, renewals
from onnx_remat.ir.op_semantics import is_elementwise
from onnx_remat.ir.shapes import Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a value that a rank has: elements `start` to `stop` of `size`, as a flat array."""

    start: int
    stop: int
    size: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's update, an ONNX file, empty where it has nothing to update; and its pieces of the state.

    `pieces` are parts of parameters and of state of the same size; a rank has all other state in full.
    """

    model: bytes
    pieces: Mapping[str, Piece]


@dataclass(frozen=True, slots=True)
class Sharding:
    """An update that shards, and the number of ranks.

    Attributes
    ----------
    graph : Graph
    owners : dict of str to str
        Parameter whose gradient each output depends on; empty for none: every rank computes such an output.
    inputs : dict of str to tuple of str
        By parameter, itself and the state of the same size, which are divided into pieces.
    flats : tuple of Flat
        Layout of the parameters.
    ranks : int
    """

    graph: Graph
    owners: Mapping[str, str]
    inputs: Mapping[str, tuple[str, ...]]
    flats: tuple[Flat, ...]
    ranks: int

    @classmethod
    def of(cls, update: onnx.ModelProto, flats: tuple[Flat, ...], ranks: int) -> Sharding:
        """Analyse an update, as of `split.Split`.

        Raises
        ------
        ModelError
            The update does not shard; the message names the node.
        """
        graph = graphs.build(update)
        tensors = shapes.infer(graph)
        owners = _owners(graph, tensors)
        inputs = {}
        for slot in (slot for flat in flats for slot in flat.slots):
            outputs = [output for output, owner in owners.items() if owner == slot.name]
            own = [name for name in _own(graph, tensors, outputs) if tensors[name].shape == tensors[slot.name].shape]
            divided = [name for name in own if tensors[name].shape and name != GRADIENT + slot.name]
            inputs[slot.name] = tuple(dict.fromkeys([slot.name, *divided]))
        return cls(graph, owners, inputs, flats, ranks)

    def shard(self, rank: int) -> Shard:
        """Return a rank's update and pieces."""
        model = self.model(rank)
        return Shard(b"" if model is None else model.SerializeToString(), self.pieces(rank))

    def pieces(self, rank: int) -> dict[str, Piece]:
        """Return a rank's pieces of parameters and of state of the same size; it has all other state in full."""
        return {
            name: Piece(start - slot.start, stop - slot.start, slot.stop - slot.start)
            for flat in self.flats
            for slot, start, stop in flat.owned(rank, self.ranks)
            for name in self.inputs[slot.name]
        }

    def model(self, rank: int) -> onnx.ModelProto | None:
        """Return a rank's update, None where it has nothing to update."""
        pieces = self.pieces(rank)
        outputs = [output for output, owner in self.owners.items() if not owner or owner in pieces]
        return _cut_down(self.graph, outputs, pieces) if outputs else None


def _owners(graph: Graph, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the parameter whose gradient each output depends on; empty for none."""
    known = {value.name: value.name.removeprefix(GRADIENT) for value in graph.model.graph.input}
    known = {name: parameter for name, parameter in known.items() if name != parameter}
    shape = {parameter: tensors[name].shape for name, parameter in known.items()}
    for op in graph.ops:
        found = sorted({known[name] for name in op.reads if name in known})
        if len(found) > 1:
            raise ModelError(
                f"the update does not shard: {_label(op)} reads the gradients of {found[0]!r} and {found[1]!r}; "
                "leave a clip out of the step and pass clip_norm, or train without zero"
            )
        known |= dict.fromkeys(op.writes if found else (), next(iter(found), ""))
    outputs = {value.name: known.get(value.name, "") for value in graph.model.graph.output}
    by_owner = {
        owner: [n for n, other in outputs.items() if other == owner] for owner in dict.fromkeys(outputs.values())
    }
    state: dict[str, str] = {}
    for owner, mine in by_owner.items():
        _check_elementwise(graph, tensors, owner, shape.get(owner, ()), mine)
        for name in _own(graph, tensors, mine) if owner else ():
            state.setdefault(name, owner)
    for owner, mine in by_owner.items():
        for name in _inputs_of(graph, mine):
            if not owner and name in state:
                raise ModelError(
                    f"the update does not shard: an output that depends on no gradient reads {name!r}, which is "
                    f"renewed with {state[name]!r}; train without zero"
                )
            if state.get(name, owner) != owner:
                raise ModelError(
                    f"the update does not shard: {state[name]!r} and {owner!r} are both renewed by {name!r}; train "
                    "without zero"
                )
    return outputs


def _own(graph: Graph, tensors: Mapping[str, Tensor], outputs: Sequence[str]) -> list[str]:
    """Return the inputs that only ranks with a part of a parameter keep up to date, by the outputs that depend on it.

    All ranks have an input of one element that these outputs do not renew, such as a learning rate.
    """
    names = _inputs_of(graph, outputs)
    renewed = set(renewals(names, outputs).values())
    return [name for name in names if name in renewed or tensors[name].shape not in {(), (1,)}]


def _check_elementwise(
    graph: Graph, tensors: Mapping[str, Tensor], owner: str, shape: tuple[int, ...], outputs: Sequence[str]
) -> None:
    """Raise ModelError unless all ops that compute some outputs are elementwise, on values of one shape or numbers."""
    for op in _needed(graph, outputs):
        sizes = {tensors[name].shape for name in (*op.reads, *op.writes)} - {()}
        if sizes <= {(1,)} and shape not in sizes:
            continue
        if not sizes <= {shape, (1,)} or not is_elementwise(op.node.domain, op.node.op_type):
            what = f"the new value of {owner!r}" if owner else "an output that depends on no gradient"
            raise ModelError(
                f"the update does not shard: {_label(op)}, which {what} needs, is not elementwise; train without zero"
            )
    stored = {value.name for value in graph.values.values() if value.kind == graphs.INITIALIZER}
    read = {name for op in _needed(graph, outputs) for name in op.reads}
    if large := [name for name in graph.values if name in stored & read and tensors[name].shape not in {(), (1,)}]:
        raise ModelError(f"the update does not shard: it reads the constant {large[0]!r}; train without zero")


def _label(op: Op) -> str:
    return f"node {op.label!r} ({op.node.op_type})"


def _needed(graph: Graph, outputs: Collection[str]) -> list[Op]:
    """Return the ops that some outputs depend on."""
    wanted, found = set(outputs), []
    for op in reversed(graph.ops):
        if wanted.intersection(op.writes):
            wanted.update(op.reads)
            found.append(op)
    return found[::-1]


def _inputs_of(graph: Graph, outputs: Sequence[str]) -> list[str]:
    """Return the graph inputs that some outputs depend on or renew."""
    read = {name for op in _needed(graph, outputs) for name in op.reads}
    names = [value.name for value in graph.values.values() if value.kind == graphs.INPUT]
    read.update(renewals(names, outputs).values())
    return [name for name in names if name in read]


def _cut_down(graph: Graph, outputs: Sequence[str], pieces: Mapping[str, Piece]) -> onnx.ModelProto:
    """Return the model of some outputs; inputs and outputs of which the rank has a piece get the piece's length."""
    made = {name for op in _needed(graph, outputs) for name in op.writes}
    read = {name for op in _needed(graph, outputs) for name in op.reads}
    model = onnx.ModelProto()
    model.CopyFrom(graph.model)
    whole = graph.model.graph
    keep = [n for n in whole.node if made.intersection(filter(None, n.output)) or read.intersection(n.output)]
    for field, kept in (
        (model.graph.node, keep),
        (model.graph.initializer, [tensor for tensor in whole.initializer if tensor.name in read]),
        (model.graph.input, [value for value in whole.input if value.name in read]),
        (model.graph.output, [value for value in whole.output if value.name in outputs]),
        (model.graph.value_info, []),
    ):
        del field[:]
        field.extend(kept)
    renewed = renewals([value.name for value in whole.input], outputs)
    for value in (*model.graph.input, *model.graph.output):
        name = renewed.get(value.name, value.name.removeprefix(GRADIENT))
        kind = value.type.tensor_type
        if name in pieces and len(kind.shape.dim):
            del kind.shape.dim[:]
            kind.shape.dim.add(dim_value=pieces[name].stop - pieces[name].start)
    return model
