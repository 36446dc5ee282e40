"""Attention, a few heads or queries at a time: the scores never all exist at once, and none is kept for the gradient.

The nodes between the product that makes the scores and the products that read them compute each head of each text
separately, in the forward and the backward pass. The pass writes these nodes once for each part of the texts and heads,
or for each block of queries where a mask hides many keys, see `attention_rows`. The backward pass recomputes the scores
of a part from queries and keys, instead of reading those of the forward pass::

    forward     q1, k1, v1 -> scores -> softmax -> output 1 -+
                q2, k2, v2 -> scores -> softmax -> output 2 -+-> Concat

    backward    output's gradient --waits--> q1, k1 -> scores -> softmax -> gradients of q1, k1, v1 -+
                                  +--waits--> q2, k2 -> scores -> softmax -> gradients of q2, k2, v2 -+-> Concats

No sum crosses parts of heads, so their numbers are the same; gradients of keys and values are sums over blocks of
queries. Each part of the backward pass waits for the one before it, and the first for the gradient of the output;
otherwise ONNX Runtime's order might begin with the scores of all parts. The recomputation of scores is FlashAttention's
idea (Dao et al., NeurIPS 2022), whose kernels go further: they never store all scores of one head.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes import common

from ..tape import Tape
from ..values import replace, static
from . import attention_masks
from .attention_part import Part, PartWriter
from .attention_regions import Region, Shape, find, is_forward, known
from .attention_rows import Block, Rows, visible_blocks
from .base import Fact, rewrite

_LEAST_BYTES = 1 << 24
"""Size of an attention's scores from which it is divided by default."""
_PART_BYTES = 1 << 23
"""Size of the scores of one part, at most, by default."""
_MOST = 8
"""Approximate limit on the number of parts by default."""
_LEAST_BLOCKS = 4
"""Blocks of rows by default, at least, where a mask hides keys: more save more of the scores."""
_WORTH = 2
"""Only scores are divided whose rows and columns are longer than this many times the length of a query."""


@rewrite(requires=[Fact.SHAPES, Fact.PHASES, Fact.LEAN])
def attention_in_parts(model: ir.Model, wanted: int | None = None, watched: Collection[str] = ()) -> None:
    """Rewrite, in place, each attention of a step to process its heads or queries in parts, one after the other.

    Parameters
    ----------
    model : onnx_ir.Model
        A training step. Attentions with open sizes, or whose scores other nodes read, stay unchanged.
    wanted : int or None
        Number of parts of each attention, rounded up until each part is some heads of one text or all heads of some
        texts. 1 changes nothing. By default (None), attentions with scores of 16 MiB or more are divided into parts of
        at most 8 MiB, or into about 8 parts if that would be more, and into 4 at least if a part is a block of queries.
    watched : collection of str
        Temporary outputs of the graph.
    """
    graph = model.graph
    if wanted == 1:
        return
    place = {node: index for index, node in enumerate(graph)}
    found: list[tuple[Region, Rows | None, tuple[Part, ...]]] = []
    taken: set[ir.Node] = set()
    for node in graph:
        count = _count(node, wanted) if node not in taken else None
        region = find(place, node, watched) if count is not None else None
        if region is not None and count is not None and taken.isdisjoint(region.nodes):
            taken.update(region.nodes)
            rows, parts = _parts(region, count, wanted)
            found.append((region, rows, parts))
    attention_masks.forget(graph)
    tape = Tape(graph)
    stands_for: dict[ir.Value, ir.Value] = {}
    for region, rows, parts in found:
        if len(parts) > 1:
            _Division(tape, region, place, rows, parts, stands_for).write()
    if found:
        common.RemoveUnusedNodesPass()(model)
        graph.sort()


def _count(node: ir.Node, wanted: int | None) -> int | None:
    """Return into how many parts to divide the scores that a node makes; None if that is not worth it."""
    if node.domain or node.op_type != "MatMul" or not is_forward(node):
        return None
    left, made, dtype = static(node.inputs[0]), static(node.outputs[0]), node.outputs[0].dtype
    if left is None or made is None or len(made) < 3 or len(left) < 2 or dtype is None:
        return None
    if min(made[-2:]) <= _WORTH * left[-1]:
        return None
    if wanted is not None:
        return wanted
    total = math.prod(made) * dtype.itemsize
    if total < _LEAST_BYTES:
        return None
    return min(math.ceil(total / _PART_BYTES), _MOST)


def _parts(region: Region, count: int, wanted: int | None) -> tuple[Rows | None, tuple[Part, ...]]:
    """Return the parts of an attention: blocks of rows if its mask hides keys from them, of some heads if need be."""
    matrices = region.stack.count
    rows = visible_blocks(region, count if wanted is not None else max(count, _LEAST_BLOCKS))
    if rows is None:
        heads = ranges(region.factors, math.ceil(matrices / count))
        return None, tuple(Part(begin, end) for begin, end in heads)
    heads = ranges(region.factors, math.ceil(matrices / math.ceil(count / len(rows.blocks))))
    return rows, tuple(Part(begin, end, block) for begin, end in heads for block in rows.blocks)


def ranges(factors: Shape, most: int) -> tuple[tuple[int, int], ...]:
    """Divide matrices into ranges of at most `most`, or 1, each a box: some entries of one axis, all of the later axes.

    >>> ranges((2, 4), 3), ranges((4, 2), 5)
    (((0, 2), (2, 4), (4, 6), (6, 8)), ((0, 4), (4, 8)))
    """
    tails = [math.prod(factors[axis + 1 :]) for axis in range(len(factors))]
    axis = next(axis for axis, tail in enumerate(tails) if tail <= max(most, 1))
    size, tail = factors[axis], tails[axis]
    pieces = math.ceil(size / max(most // tail, 1))
    lengths = [size // pieces + (piece < size % pieces) for piece in range(pieces)]
    found, begin = [], 0
    for length in lengths * math.prod(factors[:axis]):
        found.append((begin, begin + length * tail))
        begin += length * tail
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Division:
    """An attention to divide.

    Attributes
    ----------
    tape : Tape
    region : Region
    place : mapping of onnx_ir.Node to int
    rows : Rows, optional
        How blocks divide the values; None where parts are matrices.
    parts : tuple of Part
    stands_for : dict of onnx_ir.Value to onnx_ir.Value
        The value in whose place each result of a division is; grows.
    """

    tape: Tape
    region: Region
    place: Mapping[ir.Node, int]
    rows: Rows | None
    parts: tuple[Part, ...]
    stands_for: dict[ir.Value, ir.Value]

    def write(self) -> None:
        """Write a region's nodes once for each part, and put their results together."""
        region, tape = self.region, self.tape
        stored: dict[Part, dict[ir.Value, ir.Value]] = {}
        whole = {value: _Whole(self, value) for value in region.made(region.forward)}
        nodes = _run(region, region.forward, self.place, frozenset())
        with tape.ahead_of(region.forward[-1], "forward"):
            for part in self.parts:
                writer = PartWriter(tape, region, "forward", part, self.rows, self.stands_for, {})
                writer.write(nodes)
                stored[part] = writer.known
                for value, made in whole.items():
                    made.add(part, writer.known[value])
            self._replace(whole)
        if not region.backward:
            return
        kept = _kept(region)
        whole = {value: _Whole(self, value) for value in region.made(region.backward)}
        nodes = _run(region, region.backward, self.place, kept)
        waiting = _sources(region, nodes)
        trigger: Sequence[ir.Value] = _late(region)
        here = waiting.difference(trigger)
        with tape.ahead_of(region.backward[-1], "backward"):
            # Shares of sums are for the keys that a block sees: under a causal mask the last sees all, and comes first.
            for part in self.parts if self.rows is None else self.parts[::-1]:
                known = {value: stored[part][value] for value in kept}
                never = _never(tape, trigger) if trigger else None
                writer = PartWriter(tape, region, "backward", part, self.rows, self.stands_for, known, never, here)
                writer.write(nodes)
                trigger = [made.add(part, writer.known[value]) for value, made in whole.items()]
                here = waiting
            self._replace(whole)

    def _replace(self, whole: Mapping[ir.Value, _Whole]) -> None:
        """Let readers of each result read it as it is put together.

        Only the check reads a wide one: the backward pass has the parts.
        """
        own = set(self.region.nodes)
        for value, parts in whole.items():
            made = parts.joined()
            self.stands_for[made] = self.stands_for.get(value, value)
            inside = [use for use in value.uses() if use.node in own] if self.region.stack.is_wide(value) else []
            replace(value, made)
            for use in inside:
                use.node.replace_input_with(use.idx, value)


class _Whole:
    """A result of an attention, to be put together from its parts."""

    def __init__(self, division: _Division, value: ir.Value) -> None:
        self._tape, self._region, self._rows = division.tape, division.region, division.rows
        self._value, self._shape = value, known(value)
        self._lead = self._region.stack.lead(self._shape) or 0
        self._pieces: dict[tuple[int, int], list[tuple[int, int, ir.Value]]] = {}

    def add(self, part: Part, made: ir.Value) -> ir.Value:
        """Note what a part made, and return what the next one is to wait for."""
        pieces = self._pieces.setdefault((part.begin, part.end), [])
        if self._rows is None or part.block is None:
            pieces.append((0, 0, made))
        elif self._rows.is_sum(self._value):
            pieces[:] = self._added(pieces, *part.block.keys, made)
            return pieces[0][2]
        else:
            pieces.append((*part.block.rows, self._widened(made, part.block)))
        return made

    def _widened(self, made: ir.Value, block: Block) -> ir.Value:
        """Add the keys that a block does not see to what a Dropout draws, which only the check reads."""
        assert self._rows is not None
        _, keys = self._rows.axes_of[self._value]
        if keys is None:
            return made
        begin, end = block.keys
        before, after = (self._unseen(made, keys, count) for count in (begin, self._shape[keys] - end))
        pieces = [piece for piece in (before, made, after) if piece is not None]
        sizes = (*known(made)[:keys], self._shape[keys], *known(made)[keys + 1 :])
        return self._tape.op("Concat", *pieces, shape=sizes, axis=keys)

    def _unseen(self, like: ir.Value, keys: int, count: int) -> ir.Value | None:
        """Append a Dropout for keys that a block does not see; return its output that `like` is of another."""
        node, sizes = self._value.producer(), (*known(like)[:keys], count, *known(like)[keys + 1 :])
        assert node is not None and node.inputs[0] is not None and like.dtype is not None
        if not count:
            return None
        source = node.inputs[0].dtype
        assert source is not None
        drawn = self._tape.many("Dropout", self._tape.zeros(sizes, source), *node.inputs[1:], outputs=2)
        for value, dtype in zip(drawn, (source, ir.DataType.BOOL), strict=True):
            value.shape, value.type = ir.Shape(sizes), ir.TensorType(dtype)
        return drawn[self._value.index() or 0]

    def _axis(self) -> int:
        assert self._rows is not None
        queries, keys = self._rows.axes_of[self._value]
        axis = keys if queries is None else queries
        assert axis is not None
        return axis

    def _added(
        self, pieces: Sequence[tuple[int, int, ir.Value]], begin: int, end: int, share: ir.Value
    ) -> list[tuple[int, int, ir.Value]]:
        """Add a share of the sums of some keys to pieces of the sums of all."""
        tape, axis = self._tape, self._axis()
        found, at = [], begin
        for first, last, value in pieces:
            if at < min(first, end):
                found.append((at, min(first, end), tape.slice(share, axis, at - begin, min(first, end) - at)))
                at = min(first, end)
            low, high = max(first, begin), min(last, end)
            if low >= high:
                found.append((first, last, value))
                continue
            if first < low:
                found.append((first, low, tape.slice(value, axis, 0, low - first)))
            both = tape.slice(value, axis, low - first, high - low), tape.slice(share, axis, low - begin, high - low)
            found.append((low, high, tape.add(*both)))
            if high < last:
                found.append((high, last, tape.slice(value, axis, high - first, last - high)))
            at = max(at, high)
        if at < end:
            found.append((at, end, tape.slice(share, axis, at - begin, end - at)))
        return sorted(found, key=lambda piece: piece[0])

    def joined(self) -> ir.Value:
        """Append the nodes that put the parts together, and return the whole."""
        tape, shape = self._tape, self._shape
        stacks = []
        for begin, end in sorted(self._pieces):
            pieces = [value for _, _, value in sorted(self._pieces[begin, end], key=lambda piece: piece[0])]
            stack = pieces[0]
            if len(pieces) > 1:
                axis = self._axis()
                sizes = (*known(stack)[:axis], shape[axis], *known(stack)[axis + 1 :])
                stack = tape.op("Concat", *pieces, shape=sizes, axis=axis)
            stacks.append(stack)
        if len(stacks) == 1:
            return tape.reshape(stacks[0], shape)
        rest = shape[self._lead :]
        flat = [tape.reshape(each, (math.prod(known(each)) // math.prod(rest), *rest)) for each in stacks]
        whole = tape.op("Concat", *flat, shape=(self._region.stack.count, *rest), axis=0)
        return tape.reshape(whole, shape)


def _kept(region: Region) -> frozenset[ir.Value]:
    """Return the values that the backward pass does not recompute: random masks, and values with one number for each
    row."""
    return frozenset(
        value for node in region.forward for index, value in enumerate(node.outputs)
        if not region.stack.is_wide(value) or (node.op_type == "Dropout" and index == 1)
    )  # fmt: skip


def _run(
    region: Region, side: Iterable[ir.Node], place: Mapping[ir.Node, int], kept: Collection[ir.Value]
) -> list[ir.Node]:
    """Return the nodes of one pass and the nodes of the region that recompute their inputs except `kept`, in order."""
    own = set(region.nodes)
    run = dict.fromkeys(side)
    todo = list(run)
    while todo:
        for value in todo.pop().inputs:
            maker = value.producer() if value is not None and value not in kept else None
            if maker is not None and maker in own and maker not in run:
                run[maker] = None
                todo.append(maker)
    return sorted(run, key=place.__getitem__)


def _sources(region: Region, nodes: Iterable[ir.Node]) -> frozenset[ir.Value]:
    """Return one operand of each wide product: the product waits if this operand does."""
    forming = set(region.forming)
    found = set()
    for node in nodes:
        if node.op_type != "MatMul" or not region.stack.is_wide(node.outputs[0]):
            continue
        source = node.inputs[0]
        while source is not None and (maker := source.producer()) is not None and maker in forming:
            source = maker.inputs[0]
        if source is not None:
            found.add(source)
    return frozenset(found)


def _late(region: Region) -> list[ir.Value]:
    """Return the values from outside that are computed in the backward pass: the gradient of the attention's output."""
    own = set(region.nodes)
    inputs = (value for node in (*region.forming, *region.backward) for value in node.inputs)
    makers = {value: value.producer() for value in inputs if value is not None}
    return [
        value for value, maker in makers.items()
        if maker is not None and maker not in own and not is_forward(maker) and region.stack.lead(static(value))
    ]  # fmt: skip


def _never(tape: Tape, values: Sequence[ir.Value]) -> ir.Value:
    """Return a scalar that is false and is computed from all of `values`; see `after_loss`."""
    entries = [tape.op("GatherND", v, tape.ints(*[0] * len(known(v))), shape=()) for v in reversed(values)]
    assert entries[0].dtype is not None
    alike = [tape.cast(entry, entries[0].dtype) for entry in entries]
    total = tape.op("Sum", *alike, shape=()) if len(alike) > 1 else alike[0]
    nonzero = tape.op("Cast", total, shape=(), dtype=ir.DataType.BOOL, to=int(ir.DataType.BOOL))
    return tape.op("Xor", nonzero, nonzero, shape=())
