"""Nodes that a kernel can compute, and the axes and positions over which one kernel computes several.

A kernel goes through its elements along some axes. Each value has a position: its offset, and its strides over these
axes. A Transpose changes the position, and costs nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod

import numpy as np

from onnx_remat.fuse import spaces
from onnx_remat.fuse.code import FLOAT, KINDS
from onnx_remat.fuse.moves import Move, move_of
from onnx_remat.fuse.ops import OPS, Call, call_of
from onnx_remat.fuse.ordered import OrderedStep, Runs, Uses
from onnx_remat.fuse.rows import LEAST_OF_CHANNEL, REDUCTIONS, ROWS, can_run_on_device, chunk_of, row_of
from onnx_remat.fuse.spaces import Position, Steps

MOST_DEPTH = 2
"""Maximum number of nodes like Exp of a group that wait for one another's results: meanwhile the processor idles."""

MOST_RANK = 16

LEAST_RUN = 8
"""Minimum number of elements of the innermost axis, where elements are moved: a run costs some dozen instructions."""

MOST_REDUCTIONS = 8
"""Maximum number of reductions along rows in a group, two for a Softmax: a kernel holds a chunk of what each reduces on
its stack, which a thread with 256 KiB has room for."""


@dataclass(frozen=True)
class Read:
    """An input of a member.

    Attributes
    ----------
    name : str
        The value in whose memory it lies.
    shape : tuple of int
        The shape in which the member reads it.
    dtype : int
    offset, moved : int, Steps or None
        Where the member reads it, if it is a Transpose, a Slice or the like, see `moves`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: int
    offset: int = 0
    moved: Steps | None = None

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Member:
    """A node that a kernel can compute.

    Attributes
    ----------
    at : int
        Its place in the step.
    call : Call
    reads : tuple of Read or None
        By slot; None for an absent input.
    made : str
        Its output.
    shape : tuple of int
        Shape of its output; of its input, if it is one of `rows`.
    result : tuple of int
        Shape of its output.
    columns, run : int
        Elements of a row, and of each of its runs; 0 if it is elementwise.
    again : bool
        Whether it computes its value once more, for its own group, see `recompute`.
    """

    at: int
    call: Call
    reads: tuple[Read | None, ...]
    made: str
    shape: tuple[int, ...]
    result: tuple[int, ...]
    columns: int = 0
    run: int = 0
    again: bool = False

    @cached_property
    def size(self) -> int:
        """Number of elements that it computes with."""
        return prod(self.shape)

    @cached_property
    def reduces(self) -> bool:
        """Whether it makes one element of a row."""
        return self.call.op in REDUCTIONS

    @cached_property
    def makes(self) -> int:
        """Number of elements of its output."""
        return prod(self.result)

    @cached_property
    def inputs(self) -> list[Read]:
        """Inputs without absent ones."""
        return [read for read in self.reads if read is not None]

    @cached_property
    def moves(self) -> bool:
        """Whether it only moves elements."""
        return any(read.moved is not None for read in self.inputs)


def is_function(member: Member) -> bool:
    """Whether a member calls a function such as exp for every element."""
    return not member.columns and not OPS[member.call.op].exact


def is_rounded(member: Member) -> bool:
    """Whether a member's results equal ONNX Runtime's within rounding only."""
    return member.columns > 0 or is_function(member)


def depth(members: Iterable[Member]) -> int:
    """Return the largest number of functions of which each needs the result of the one before; in the step's order."""
    found: dict[str, int] = {}
    for member in members:
        before = max((found.get(read.name, 0) for read in member.inputs), default=0)
        found[member.made] = before + is_function(member)
    return max(found.values())


def row_length(members: Iterable[Member]) -> tuple[int, int]:
    """Return the number of elements of a row, and of each of its runs; 0 if all nodes are elementwise."""
    return max(((member.columns, member.run) for member in members), default=(0, 0))


@dataclass(frozen=True, slots=True)
class Space:
    """What a kernel goes through.

    Attributes
    ----------
    axes : tuple of int
        Extents, outermost first.
    positions : mapping of str to set of Position
        Where each value is read or computed; empty unless a node moves elements.
    outer, inner : int
        How many of the first and of the last axes a row consists of, if a node works along rows. A run is the last one.
    """

    axes: tuple[int, ...]
    positions: Mapping[str, set[Position]]
    outer: int = 0
    inner: int = 1

    @property
    def has_runs(self) -> bool:
        """Whether a row consists of several runs."""
        return (self.outer, self.inner) != (0, 1)

    @property
    def of_rows(self) -> Position:
        """Position of a value that has one element for each row."""
        return Position(0, spaces.of_rows(self.axes, self.outer, self.inner))


def space_of(members: Sequence[Member]) -> Space | None:
    """Return the axes over which one kernel computes nodes; None if no kernel can.

    Nodes with fewer elements than the largest are computed where they are read: only scalars may be broadcast in them.
    """
    size, (columns, run) = max(member.size for member in members), row_length(members)
    if any(member.columns and (member.columns, member.run, member.size) != (columns, run, size) for member in members):
        return None
    cuts: set[int] = {run, size // (columns // run)} if columns else set()
    found = _space(members, size, cuts)
    if found is None or not columns:
        return found
    if found.has_runs and (part := gcd(found.axes[-1], chunk_of(columns, run))) < found.axes[-1]:
        found = _space(members, size, cuts | {part})
    return found if found is not None and _can_run_by_rows(members, found) else None


def _space(members: Sequence[Member], size: int, cuts: set[int]) -> Space | None:
    """Return the axes of nodes whose elements are divided at some cuts at least; None if cuts do not nest."""
    if any(member.moves for member in members):
        return _space_with_moves(members, size, cuts)
    for member in members:
        for read in member.inputs:
            if spaces.is_broadcast(read.shape, member.shape):
                if member.size != size:
                    return None
                cuts |= spaces.cuts(read.shape, member.shape)
    axes = spaces.axes(size, cuts)
    return Space(axes, {}, *_axes_of_row(members, axes)) if axes else None


def _space_with_moves(members: Sequence[Member], size: int, cuts: set[int]) -> Space | None:
    while axes := spaces.axes(size, cuts):
        at = positions(members, axes)
        if isinstance(at, set):
            cuts |= at
            continue
        return None if at is None else Space(axes, at, *_axes_of_row(members, axes))
    return None


def _axes_of_row(members: Sequence[Member], axes: tuple[int, ...]) -> tuple[int, int]:
    """Return how many of the first and of the last axes a row consists of; 0 and 1 if no node works along rows."""
    columns, run = row_length(members)
    if not columns:
        return 0, 1
    outer = next(i for i in range(len(axes)) if prod(axes[:i]) == columns // run)
    return outer, next(i for i in range(1, len(axes) + 1) if prod(axes[len(axes) - i :]) == run)


def positions(members: Sequence[Member], axes: tuple[int, ...]) -> dict[str, set[Position]] | set[int] | None:
    """Return the positions at which a kernel over some axes reads and computes each value.

    Each value with as many elements as the group is computed at one position, and completely. A moved value that the
    group only writes is written where its input's elements belong. If the axes must be divided further, the cuts are
    returned; None if there is no kernel.
    """
    size, columns, found = prod(axes), row_length(members)[0], defaultdict[str, set[Position]](set)
    whole, rows = Position(0, spaces.full(axes)), Position(0, spaces.of_rows(axes, *_axes_of_row(members, axes)))
    made = {member.made for member in members}
    for member in reversed(members):
        own = found[member.made]
        if not own and member.moves and member.size == size and member.inputs[0].name in made:
            written = _written(member, whole, axes)
            if not isinstance(written, Position):
                return written
            own.add(written)
        if not own or (columns and member.makes * columns == size):
            own.add(whole if member.makes == size else rows)
        if member.columns:
            if own - ({rows} if member.reduces else {whole}):
                return None
            own = {whole}
        elif is_function(member) and member.size < size and any(at.strides[-1] for at in own):
            return None  # it would be computed for every element of the group
        elif member.size == size and (len(own) > 1 or not spaces.is_bijective(next(iter(own)), axes)):
            return None
        for at in own:
            for read in member.inputs:
                where = _position(read, member, at, axes)
                if not isinstance(where, Position):
                    return where
                found[read.name].add(where)
    return dict(found)


def steps_of(read: Read, member: Member) -> Steps | None:
    """Return how a member reads an input; None if element by element."""
    if read.moved is not None or read.size == member.size:
        return read.moved
    return spaces.steps(read.shape, member.shape)


def _position(read: Read, member: Member, at: Position, axes: tuple[int, ...]) -> Position | set[int] | None:
    """Return where a member at a position reads a value; otherwise, as `positions`."""
    steps = steps_of(read, member)
    if steps is None:
        return at
    if cuts := spaces.missing_cuts(steps, at, axes):
        return cuts
    where = spaces.composed(steps, read.offset, at, axes)
    return where if where is not None and can_read(tuple(zip(axes, where.strides, strict=True))) else None


def can_read(steps: Steps) -> bool:
    """Whether runs are long enough, and the cache holds the lines that a kernel reads in turns."""
    count, held = spaces.lines(steps)
    return count <= held and (len(steps) < 2 or steps[-1][0] >= LEAST_RUN)


def _written(member: Member, whole: Position, axes: tuple[int, ...]) -> Position | set[int] | None:
    """Return where a kernel writes what a member moves, if it computes the member's input in the order of elements.

    That is `whole` instead, and the input is computed in another order, if single elements were written far apart.
    """
    read = member.inputs[0]
    assert read.moved is not None
    if read.offset or prod(extent for extent, _ in read.moved) != prod(axes):
        return None
    back = spaces.inverse(read.moved)
    if back and back[-1][1] != 1:
        return whole
    if cuts := spaces.missing_cuts(back, whole, axes):
        return cuts
    return spaces.composed(back, 0, whole, axes)


def _can_run_by_rows(members: Sequence[Member], space: Space) -> bool:
    """Whether rows are whole, and what is reduced from a row is read in that row only."""
    axes, at, (columns, run) = space.axes, space.positions, row_length(members)
    size = prod(axes)
    if sum(1 if member.reduces else 2 for member in members if member.columns) > MOST_REDUCTIONS:  # Softmax: two
        return False
    if space.has_runs and (
        axes[-1] < LEAST_OF_CHANNEL
        or chunk_of(columns, run) % axes[-1]
        or any(member.columns and not member.reduces for member in members)
    ):  # fmt: skip
        return False
    reduced = {member.made for member in members if member.reduces}
    for member in members:  # in the step's order
        of_row = [read for read in member.inputs if read.name in reduced]
        if not of_row:
            continue
        if member.size * columns == size:
            reduced.add(member.made)
            continue
        moved = at and at[member.made] != {Position(0, spaces.full(axes))}
        if moved or member.size != size or any(
            read.size * columns != size
            or spaces.strides(read.shape, member.shape, axes) != space.of_rows.strides
            for read in of_row
        ):  # fmt: skip
            return False
    return True


@dataclass(frozen=True)
class Candidate:
    """Nodes that one kernel may compute, in the step's order; none for a node that kernels cannot compute."""

    members: tuple[Member, ...]

    @cached_property
    def places(self) -> frozenset[int]:
        """Places of the nodes, without those that compute their values once more."""
        return frozenset(member.at for member in self.members if not member.again)

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Values that the kernel reads from nodes outside."""
        made = {member.made for member in self.members}
        return tuple(dict.fromkeys(read.name for m in self.members for read in m.inputs if read.name not in made))

    @cached_property
    def size(self) -> int:
        """Number of elements that the kernel computes."""
        return max((member.size for member in self.members), default=0)

    @cached_property
    def columns(self) -> int:
        """Number of elements of a row; 0 if all nodes are elementwise."""
        return row_length(self.members)[0]

    @cached_property
    def space(self) -> Space | None:
        """See `space_of`."""
        return space_of(self.members)

    @cached_property
    def plain(self) -> frozenset[str]:
        """Values that the kernel reads elementwise only, so that an output may overwrite them."""
        size, space = self.size, self.space
        every = [(read.name, read.size == member.size == size) for member in self.members for read in member.inputs]
        plain = {name for name, _ in every} - {name for name, elementwise in every if not elementwise}
        if space is None or not space.positions:
            return frozenset(plain)
        at, whole = space.positions, {Position(0, spaces.full(space.axes))}
        if any(at[member.made] != whole for member in self.members if member.size == size and not member.reduces):
            return frozenset()
        return frozenset(name for name in plain if at[name] == whole)


def members_of(ordered: OrderedStep, uses: Uses) -> list[Member | None]:
    """Return each node of a step as a member of a group; None if kernels cannot compute it."""
    return [_member_of(ordered, uses, at, step) for at, step in enumerate(ordered.steps)]


def is_on_host(ordered: OrderedStep, names: Iterable[str]) -> bool:
    """Return whether one of these values lies in host memory, where a device's kernels do not read."""
    return not ordered.on_host.isdisjoint(names)


def reads_far_apart(ordered: OrderedStep, move: Move) -> bool:
    """Return whether threads of a device that run together would read elements that lie far apart."""
    return ordered.device and bool(move.steps) and move.steps[-1][1] != 1


def _member_of(ordered: OrderedStep, uses: Uses, at: int, step: Runs) -> Member | None:
    tensors, writes = ordered.tensors, step.writes
    if step.captured or uses.is_view(step) or len(writes) != 1:
        return None
    node, made = step.node, writes[0]
    if not uses.users[made] and made not in ordered.outputs:
        return None  # no node reads it
    columns, run, shape = 0, 0, tensors[made].shape
    move = move_of(node, made, tensors, ordered.integers)
    call: Call | None
    if is_on_host(ordered, (made, *node.input)):
        return None
    if move is not None:
        if reads_far_apart(ordered, move):
            return None
        dtype = tensors[made].dtype
        call, slots = Call("Identity", {}, dtype, dtype) if dtype in KINDS else None, [node.input[0]]
    elif node.op_type in ROWS:
        read = tensors[node.input[0]]
        row = row_of(node, read.dtype, read.shape, ordered.integers)
        if row is None or (ordered.device and not can_run_on_device(row, prod(read.shape))):
            return None
        call, columns, run, shape = Call(row.op, {}, FLOAT, FLOAT), row.columns, row.run, read.shape
        slots = [node.input[0]]
    else:
        types = [tensors[name].dtype if name else None for name in node.input]
        call = call_of(node, types, tensors[made].dtype, ordered.constants.get)
        slots = list(node.input)
        if call is not None and node.op_type == "Pow":
            slots = slots[1:] if call.base else slots[:1]
            if not call.base and tensors[slots[0]].shape[-1:] in ((), (1,)):
                return None  # ONNX Runtime calls pow there, whose last bit may be another than a product's
    if call is None or not prod(shape) or len(shape) > MOST_RANK:
        return None
    if not all(map(uses.is_own, slots)):
        return None
    if move is not None:
        moved = Read(uses.root(slots[0]), shape, call.dtype, move.offset, move.steps)
        return Member(at, call, (moved,), made, shape, shape)
    if any(name and np.broadcast_shapes(tensors[name].shape, shape) != shape for name in slots):
        return None
    if call.op == "Where" and _repeats(tensors[slots[0]].shape, tensors[slots[2]].shape, shape):
        return None
    reads = [Read(uses.root(n), tensors[n].shape, tensors[n].dtype) if n else None for n in slots]
    return Member(at, call, tuple(reads), made, shape, tensors[made].shape, columns, run)


def _repeats(condition: Sequence[int], other: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether a Where repeats what it chooses of its third input along the last axis.

    There ONNX Runtime keeps a -0.0 from the second input, which it otherwise turns into 0.0.
    """
    chosen = np.broadcast_shapes(tuple(condition), tuple(other))
    sizes = (1,) * (len(shape) - len(chosen)) + chosen
    return next((one != size for one, size in zip(sizes[::-1], shape[::-1], strict=True) if size > 1), False)
