"""One part of an attention: some of its matrices, or a block of their rows, written as nodes of their own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ..emit import Phase
from ..tape import Tape
from ..tape import number as scalar
from .attention_regions import ENTRY_BY_ENTRY, STACKED, Region, Shape, known
from .attention_rows import Block, Rows
from .rowwise import RESHAPE

_WITHOUT_END = 2**63 - 1


def box(sizes: Shape, begin: int, end: int) -> list[tuple[int, int]]:
    """Return the range along each axis of a stack that a range of its matrices covers.

    >>> box((2, 4), 4, 6), box((2, 4), 0, 8), box((8,), 4, 6)
    ([(1, 2), (0, 2)], [(0, 2), (0, 4)], [(4, 6)])
    """
    found = []
    for axis, size in enumerate(sizes):
        tail = math.prod(sizes[axis + 1 :])
        first = begin // tail % size
        found.append((first, first + min((end - 1) // tail - begin // tail + 1, size)))
    return found


@dataclass(frozen=True, slots=True)
class Part:
    """A range of matrices, and a block of their rows; by default all rows."""

    begin: int
    end: int
    block: Block | None = None


@dataclass(slots=True)
class PartWriter:
    """Writes one part of a region in one pass.

    Attributes
    ----------
    tape : Tape
    region : Region
    phase : str
    part : Part
    rows : Rows, optional
        How blocks divide the values.
    stands_for : mapping of onnx_ir.Value to onnx_ir.Value
        The value in whose place a result of another division is.
    known : dict of onnx_ir.Value to onnx_ir.Value
        The part of each value that is written so far; grows.
    never : onnx_ir.Value, optional
        A value that is false and available once the part may begin.
    waiting : frozenset of onnx_ir.Value
        Operands from outside that wait for `never`.
    """

    tape: Tape
    region: Region
    phase: Phase
    part: Part
    rows: Rows | None
    stands_for: Mapping[ir.Value, ir.Value]
    known: dict[ir.Value, ir.Value]
    never: ir.Value | None = None
    waiting: frozenset[ir.Value] = frozenset()
    slices: dict[tuple[ir.Value, tuple[tuple[int, int, int], ...]], ir.Value] = field(default_factory=dict)

    def write(self, nodes: Iterable[ir.Node]) -> None:
        """Append a copy of each node for this part."""
        for node in nodes:
            inputs = [self._operand(node, slot, value) for slot, value in enumerate(node.inputs)]
            again = node.op_type == "Dropout" and self.phase == "backward"
            made = (self._drop_again(node, inputs),) if again else self._write(node, inputs)
            for value, part in zip(node.outputs, made, strict=False):
                self.known[value] = part
            self._label(node, made[0])

    def _write(self, node: ir.Node, inputs: Sequence[ir.Value | None]) -> tuple[ir.Value, ...]:
        op_type, attributes = node.op_type, dict(node.attributes)
        shapes = [self._shape(value) for value in node.outputs]
        if op_type in RESHAPE:
            op_type, attributes = "Reshape", {}
        if op_type in ("Reshape", "Expand"):
            inputs = [inputs[0], self.tape.ints(*shapes[0])]
        made = self.tape.many(op_type, *inputs, outputs=len(shapes), **attributes)  # type: ignore[arg-type]
        for part, shape, value in zip(made, shapes, node.outputs, strict=True):
            part.shape, part.type = ir.Shape(shape), value.type
        return made

    def _drop_again(self, node: ir.Node, inputs: Sequence[ir.Value | None]) -> ir.Value:
        """Recompute the result of a Dropout from its mask, in its kernel's arithmetic; see `onnx_remat.ir.dropout`."""
        x, mask, ratio = inputs[0], self.known[node.outputs[1]], node.inputs[1] if len(node.inputs) > 1 else None
        assert x is not None and x.dtype is not None
        kept = np.float32(1) - np.float32(0.5 if ratio is None else scalar(ratio))
        scaled = self.tape.mul(x, self.tape.cast(mask, x.dtype))
        return self.tape.op("Div", scaled, self.tape.scalar(float(kept), x), shape=known(x))

    def _shape(self, value: ir.Value) -> Shape:
        """Return the shape of this part of a value."""
        shape = known(value)
        lead = self.region.stack.lead(shape)
        assert lead is not None
        part, sizes = self.part, list(shape)
        sizes[:lead] = (end - begin for begin, end in box(shape[:lead], part.begin, part.end))
        for axis, (begin, end) in self._cuts(value).items():
            sizes[axis] = end - begin
        return tuple(sizes)

    def _cuts(self, value: ir.Value) -> dict[int, tuple[int, int]]:
        """Return the ranges of the axes of a value that this part's block of rows needs."""
        if self.rows is None or self.part.block is None:
            return {}
        return self.rows.cuts(self.stands_for.get(value, value), self.part.block)

    def _operand(self, node: ir.Node, slot: int, value: ir.Value | None) -> ir.Value | None:
        """Return the operand of a node in this part: a part of the value, or the value itself if all parts share it."""
        if value is None or value in self.known:
            return None if value is None else self.known[value]
        shape, lead = known(value), self.region.stack.lead
        if node.op_type in ENTRY_BY_ENTRY or node.op_type == "MatMul":
            made = known(node.outputs[0])
            sizes = made[: lead(made)]
            missing = len(made) - len(shape)
            axes = {
                axis - missing: limits for axis, limits in enumerate(box(sizes, self.part.begin, self.part.end))
                if axis >= missing and shape[axis - missing] == sizes[axis]
            }  # fmt: skip
        elif slot == 0 or node.op_type in STACKED:
            axes = dict(enumerate(box(shape[: lead(shape)], self.part.begin, self.part.end)))
        else:
            axes = {}
        axes |= self._cuts(value)
        cut = tuple((axis, *limits) for axis, limits in axes.items() if limits != (0, shape[axis]))
        if (value, cut) not in self.slices:
            part = self._slice(value, cut) if cut else value
            if self.never is not None and value in self.waiting:
                part = self.tape.select(self.never, part, part)
            if part is not value:
                self._label(node, part)
            self.slices[value, cut] = part
        return self.slices[value, cut]

    def _slice(self, value: ir.Value, cut: Sequence[tuple[int, int, int]]) -> ir.Value:
        """Slice some axes of a value, in the backward pass with positions counted from the end.

        Otherwise ONNX Runtime would merge the equal slices of both passes, and keep that of the forward pass until the
        backward pass.
        """
        shape = list(known(value))
        starts, ends = [begin for _, begin, _ in cut], [end for _, _, end in cut]
        if self.phase == "backward":
            starts = [begin - shape[axis] for axis, begin, _ in cut]
            ends = [end - shape[axis] if end < shape[axis] else _WITHOUT_END for axis, _, end in cut]
        for axis, begin, end in cut:
            shape[axis] = end - begin
        axes = [axis for axis, _, _ in cut]
        ints = self.tape.ints
        return self.tape.op("Slice", value, ints(*starts), ints(*ends), ints(*axes), shape=tuple(shape))

    def _label(self, node: ir.Node, made: ir.Value) -> None:
        """Copy the metadata of a node, such as its module, to a node written for it."""
        maker = made.producer()
        assert maker is not None
        maker.metadata_props.update({key: text for key, text in node.metadata_props.items() if key != "phase"})
