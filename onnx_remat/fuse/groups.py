"""Selection of the nodes that are fused: a pure function of their order, their shapes and their lifetimes.

Model
    Nodes run at places 0, 1, 2, ... A group runs at the place of one of its nodes, after all makers of its inputs and
    before all readers of its outputs, so that groups never depend on one another in a cycle. A value that is made and
    read within one group has no buffer. A kernel goes through its elements along some axes (`loops`); each value has a
    position, its strides over these axes (`positions`): a Transpose changes it, and costs nothing.
Algorithm
    For the values of nodes that kernels can compute, first those that one node alone reads, the largest first: merge
    the group that makes it with a group that reads it if both have as many elements, or one has an element for each
    row of the other, a kernel exists (`loops`), a valid place exists, and **live bytes never exceed the step's peak**.
    Convexity alone would let peaks grow threefold: a group reads early values late. Before all others come merges along
    values that are live at the peak: they lower it, and no later merge may raise it again. In the end, smaller groups
    join the only group that reads them, if they can be computed elementwise there.
Complexity
    A few trials per value, each linear in the places of the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

import numpy as np
import numpy.typing as npt
import onnx

from onnx_remat.fuse import spaces
from onnx_remat.fuse.code import FLOAT, KINDS
from onnx_remat.fuse.moves import Piece, move_of
from onnx_remat.fuse.ops import OPS, VIEWS, Call, call_of
from onnx_remat.fuse.rows import REDUCTIONS, ROWS, row_of
from onnx_remat.fuse.spaces import Position, Steps
from onnx_remat.ir.shapes import Tensor

MOST_ENDS = 48
"""Maximum number of inputs, and of outputs, of a kernel; ``shim.c`` allows 64."""

MOST_NODES = 96
"""Maximum number of nodes of a group: larger kernels take long to compile, and run out of registers."""

MOST_DEPTH = 2
"""Maximum number of nodes like Exp of a group that wait for one another's results: meanwhile the processor idles."""

MOST_RANK = 16

LEAST_RUN = 8
"""Minimum number of elements of the innermost axis, where elements are moved: a run costs some dozen instructions."""

MOST_PASSES = 20
"""Maximum number of times that all values are tried which are live at the step's peak."""

MOST_REDUCTIONS = 8
"""Maximum number of nodes of a group that work along rows: a kernel holds a chunk of what each reduces on its stack."""


class Runs(Protocol):
    """A node as it will run, see `session.lean_graph.LeanNode`."""

    @property
    def node(self) -> onnx.NodeProto: ...

    @property
    def captured(self) -> tuple[str, ...]: ...

    @property
    def reads(self) -> tuple[str, ...]: ...

    @property
    def writes(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """A step's nodes in execution order, and the values in its slab.

    Attributes
    ----------
    steps : sequence of Runs
        In execution order.
    tensors : mapping of str to Tensor
    outputs : collection of str
        Graph outputs.
    root : mapping of str to str
        Value in whose memory each view lies; other values are absent.
    counted : mapping of str to int
        Bytes of each value in the slab.
    renewed : mapping of str to str
        Input in whose memory an output lies.
    constants : mapping of str to float
        Values known to be a single number.
    overwrites : callable
        Whether the node at a place may write one value over another that it reads.
    integers : mapping of str to tuple of int
        Values known to be a vector of integers.
    products, convolutions : bool
        Whether large matrix products, and convolutions, become kernels, see `products` and `convolutions`.
    workspace : callable
        Bytes of scratch memory of ONNX Runtime for the nodes at some places.
    """

    steps: Sequence[Runs]
    tensors: Mapping[str, Tensor]
    outputs: Collection[str]
    root: Mapping[str, str]
    counted: Mapping[str, int]
    renewed: Mapping[str, str]
    constants: Mapping[str, float]
    overwrites: Callable[[int, str, str], bool]
    integers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    products: bool = False
    convolutions: bool = False
    workspace: Callable[[Sequence[int]], int] = lambda places: 0


@dataclass(frozen=True, slots=True)
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

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
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
    columns : int
        Elements of a row; 0 if it is elementwise.
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
    again: bool = False

    @property
    def size(self) -> int:
        """Number of elements that it computes with."""
        return prod(self.shape)

    @property
    def reduces(self) -> bool:
        """Whether it makes one element of a row."""
        return self.call.op in REDUCTIONS

    @property
    def makes(self) -> int:
        """Number of elements of its output."""
        return prod(self.result)

    @property
    def inputs(self) -> list[Read]:
        """Inputs without absent ones."""
        return [read for read in self.reads if read is not None]

    @property
    def moves(self) -> bool:
        """Whether it only moves elements."""
        return any(read.moved is not None for read in self.inputs)


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes that one kernel computes.

    Attributes
    ----------
    place : int
        Where it runs: the place of one of its members.
    members : tuple of Member
        In the step's order.
    reads, makes : tuple of str
        Inputs from, and outputs for, nodes outside the group; every output has the group's number of elements, or one
        element of each row.
    """

    place: int
    members: tuple[Member, ...]
    reads: tuple[str, ...]
    makes: tuple[str, ...]

    @property
    def size(self) -> int:
        """Number of elements that the kernel computes."""
        return max(member.size for member in self.members)


def find(schedule: Schedule) -> tuple[Group, ...]:
    """Return the groups of a step, sorted by place; no two of them can be merged."""
    grouping = Grouping(schedule)
    grouping.grow()
    return grouping.kernels()


def live_bytes(schedule: Schedule) -> npt.NDArray[np.int64]:
    """Return the bytes of the slab that are live at each place, without any groups."""
    return Grouping(schedule).live_bytes


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


def row_length(members: Iterable[Member]) -> int:
    """Return the number of elements of a row; 0 if all nodes are elementwise."""
    return max(member.columns for member in members)


def loops(members: Iterable[Member]) -> tuple[int, ...]:
    """Return the extents of the axes over which one kernel computes nodes, outermost first; none if no kernel can.

    Nodes with fewer elements than the largest are computed where they are read: only scalars may be broadcast in them.
    If a node works along rows, the innermost axis is a row.
    """
    members = list(members)
    size, columns = max(member.size for member in members), row_length(members)
    if any(member.moves for member in members):
        return _axes_with_moves(members, size, columns)
    cuts: set[int] = {columns} if columns else set()
    for member in members:
        if member.columns and (member.columns, member.size) != (columns, size):
            return ()
        for read in member.inputs:
            if spaces.is_broadcast(read.shape, member.shape):
                if member.size != size:
                    return ()
                cuts |= spaces.cuts(read.shape, member.shape)
    found = spaces.axes(size, cuts)
    if columns and found and not _can_run_by_rows(members, columns, found):
        return ()
    return found


def _axes_with_moves(members: Sequence[Member], size: int, columns: int) -> tuple[int, ...]:
    """Return the axes of a group in which elements are moved; none if it has no kernel."""
    cuts: set[int] = {columns} if columns else set()
    if any(member.columns and (member.columns, member.size) != (columns, size) for member in members):
        return ()
    while found := spaces.axes(size, cuts):
        at = positions(members, found)
        if isinstance(at, set):
            cuts |= at
            continue
        if at is None:
            return ()
        return found if not columns or _can_run_by_rows(members, columns, found, at) else ()
    return ()


def positions(members: Sequence[Member], axes: tuple[int, ...]) -> dict[str, set[Position]] | set[int] | None:
    """Return the positions at which a kernel over some axes reads and computes each value.

    Each value with as many elements as the group is computed at one position, and completely. A moved value that the
    group only writes is written where its input's elements belong. If the axes must be divided further, the cuts are
    returned; None if there is no kernel.
    """
    size, columns, found = prod(axes), row_length(members), defaultdict[str, set[Position]](set)
    whole, rows = Position(0, spaces.full(axes)), Position(0, spaces.of_rows(axes))
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


def _can_run_by_rows(
    members: Sequence[Member], columns: int, axes: tuple[int, ...], at: Mapping[str, set[Position]] | None = None
) -> bool:
    """Whether rows are whole, and what is reduced from a row is read in that row only; by `positions`, if some move."""
    size = prod(axes)
    if axes[-1] != columns or sum(member.columns > 0 for member in members) > MOST_REDUCTIONS:
        return False
    reduced = {member.made for member in members if member.reduces}
    for member in members:  # in the step's order
        of_row = [read for read in member.inputs if read.name in reduced]
        if not of_row:
            continue
        if member.size * columns == size:
            reduced.add(member.made)
            continue
        moved = at is not None and at[member.made] != {Position(0, spaces.full(axes))}
        if moved or member.size != size or any(
            read.size * columns != size
            or spaces.strides(read.shape, member.shape, axes) != spaces.of_rows(axes)
            for read in of_row
        ):  # fmt: skip
            return False
    return True


def plainly_read(members: Iterable[Member], name: str) -> bool:
    """Whether a group reads a value elementwise only, so that an output may overwrite it."""
    members = list(members)
    size = max(member.size for member in members)
    if any(member.moves for member in members):
        axes = loops(members)
        at = positions(members, axes)
        whole = {Position(0, spaces.full(axes))}
        assert isinstance(at, dict)
        if at[name] != whole or any(at[m.made] != whole for m in members if m.size == size and not m.reduces):
            return False
    return all(read.size == member.size == size for member in members for read in member.inputs if read.name == name)


def views(schedule: Schedule) -> frozenset[str]:
    """Return the values that are others in another shape; any other value in foreign memory may be written there."""
    found: set[str] = set()
    for step in schedule.steps:
        if step.node.op_type in VIEWS and not step.node.domain and step.node.output[0] in schedule.root:
            viewed = step.node.input[0]
            if viewed not in schedule.root or viewed in found:
                found.add(step.node.output[0])
    return frozenset(found)


class Uses:
    """Which nodes make and read each value of a step, and which values lie in memory of their own.

    Views count as the value in whose memory they lie, not as readers of it.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.viewed = views(schedule)
        self.shared = {owner for name, owner in schedule.root.items() if name not in self.viewed}
        self.maker = {name: i for i, step in enumerate(schedule.steps) for name in step.writes}
        self.users: dict[str, list[int]] = defaultdict(list)
        for i, step in enumerate(schedule.steps):
            if not self.is_view(step):
                for name in dict.fromkeys(self.root(name) for name in step.reads):
                    self.users[name].append(i)
        self.kept = frozenset(self.root(name) for name in schedule.outputs)

    def root(self, name: str) -> str:
        """Return the value in whose memory one lies."""
        return self.schedule.root.get(name, name)

    def is_view(self, step: Runs) -> bool:
        """Whether a node only makes views."""
        return bool(step.writes) and all(name in self.viewed for name in step.writes)

    def is_own(self, name: str) -> bool:
        """Whether no other node writes into a value's memory."""
        return (name not in self.schedule.root or name in self.viewed) and self.root(name) not in self.shared

    def only_for(self, name: str, place: int) -> bool:
        """Whether only the node at a place reads a value."""
        return self.users[self.root(name)] == [place] and self.root(name) not in self.kept

    def made_by(self, name: str, op: str) -> int:
        """Return the place of the node with this operator that makes a value, -1 if there is none."""
        place = self.maker.get(self.root(name), -1)
        node = self.schedule.steps[place].node if place >= 0 else None
        return place if node is not None and node.op_type == op and node.domain in ("", "ai.onnx") else -1


@dataclass(frozen=True, slots=True)
class Open:
    """A group that may still grow; it has no members for a node that kernels cannot compute."""

    members: tuple[Member, ...]

    @property
    def size(self) -> int:
        return max((member.size for member in self.members), default=0)


class Grouping:
    """Mutable state of the algorithm: the groups, and the live bytes at each place."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        steps, root = schedule.steps, schedule.root
        self.uses = Uses(schedule)
        self.users = self.uses.users
        self.maker = {name: i for i, step in enumerate(steps) for name in step.writes if name not in root}
        members = [self._member(i, step) for i, step in enumerate(steps)]
        self.member = {i: member for i, member in enumerate(members) if member is not None}
        self.open = {i: Open((member,) if member else ()) for i, member in enumerate(members)}
        self.at = list(range(len(steps)))  # the place of each node
        self.renewer = {name: self.maker[output] for output, name in schedule.renewed.items() if output in self.maker}
        self.final = self.uses.kept
        self.inner: set[str] = set()  # values without a buffer
        self.axes: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.unneeded: set[int] = set()  # nodes whose values nothing reads any more, see `recompute`
        self.live_bytes = np.zeros(len(steps), np.int64)
        for name in self.maker:
            self.add_bytes(name, 1)
        self.saved = [0] * len(steps)
        self.update_savings(range(len(steps)))
        self.peak = int(self.live_bytes.max(initial=0))

    def _member(self, at: int, step: Runs) -> Member | None:
        """Return a node as a member of a group; None if kernels cannot compute it."""
        tensors, root = self.schedule.tensors, self.schedule.root
        if step.captured or self.uses.is_view(step) or len(step.writes) != 1:
            return None
        node, made = step.node, step.writes[0]
        if not self.users[made] and made not in self.schedule.outputs:
            return None  # no node reads it
        columns, shape = 0, tensors[made].shape
        move = move_of(node, made, tensors, self.schedule.integers)
        call: Call | None
        if move is not None:
            dtype = tensors[made].dtype
            call, slots = Call("Identity", {}, dtype, dtype) if dtype in KINDS else None, [node.input[0]]
        elif node.op_type in ROWS:
            read = tensors[node.input[0]]
            row = row_of(node, read.dtype, read.shape, self.schedule.integers)
            if row is None:
                return None
            call, columns, shape = Call(row.op, {}, FLOAT, FLOAT), row.columns, read.shape
            slots = [node.input[0]]
        else:
            types = [tensors[name].dtype if name else None for name in node.input]
            call = call_of(node, types, tensors[made].dtype, self.schedule.constants.get)
            slots = list(node.input)
        if call is None or not prod(shape) or len(shape) > MOST_RANK:
            return None
        slots = slots[: 1 if call.op == "Pow" else None]
        if not all(map(self.uses.is_own, slots)):
            return None
        if move is not None:
            moved = Read(root.get(slots[0], slots[0]), shape, call.dtype, move.offset, move.steps)
            return Member(at, call, (moved,), made, shape, shape)
        if any(name and np.broadcast_shapes(tensors[name].shape, shape) != shape for name in slots):
            return None
        reads = [Read(root.get(n, n), tensors[n].shape, tensors[n].dtype) if n else None for n in slots]
        return Member(at, call, tuple(reads), made, shape, tensors[made].shape, columns)

    # ---- liveness ----

    def span(self, name: str) -> tuple[int, int]:
        """Return the first and the last place at which a value is live."""
        start = self.at[self.maker[name]]
        if name in self.final:
            return start, len(self.at) - 1
        return start, max((self.at[user] for user in self.users[name]), default=start)

    def add_bytes(self, name: str, sign: int) -> None:
        """Add (`sign` 1) or subtract (-1) the bytes of a value at the places where it is live."""
        nbytes = self.schedule.counted.get(name, 0)
        if nbytes and name in self.maker:
            start, end = self.span(name)
            if start <= end:
                self.live_bytes[start : end + 1] += sign * nbytes

    def update_savings(self, places: Iterable[int]) -> None:
        """Update, at some places, the bytes that in-place outputs save."""
        for place in places:
            saved = self._in_place_bytes(place)
            if saved != self.saved[place]:
                self.live_bytes[place] += self.saved[place] - saved
                self.saved[place] = saved

    def _in_place_bytes(self, place: int) -> int:
        """Return the bytes of a place's outputs that overwrite inputs that die there."""
        found = self.open.get(place)
        if found is None or place in self.unneeded:
            return 0
        counted = self.schedule.counted
        if len(found.members) > 1:
            reads, makes = self.ends(found.members)
        else:
            step, root = self.schedule.steps[place], self.schedule.root
            reads, makes = tuple(dict.fromkeys(root.get(n, n) for n in step.reads)), step.writes
        dying = [n for n in reads if counted.get(n) and n in self.maker and self.span(n)[1] == place]
        dying = [name for name in dying if name not in self.final]
        saved = 0
        for made in makes:
            if counted.get(made):
                over = next((name for name in dying if self._may_overwrite(place, found, made, name)), None)
                if over is not None:
                    dying.remove(over)
                    saved += counted[made]
        return saved

    def _may_overwrite(self, place: int, found: Open, made: str, read: str) -> bool:
        if len(found.members) < 2:
            return self.schedule.overwrites(place, made, read)
        new, old = self.schedule.tensors[made], self.schedule.tensors[read]
        alike = (new.dtype, prod(new.shape)) == (old.dtype, prod(old.shape))
        return alike and plainly_read(found.members, read)

    # ---- groups ----

    def ends(self, members: Sequence[Member]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return a group's inputs, and its outputs that other nodes read."""
        inside = {member.at for member in members if not member.again}
        made = dict.fromkeys(member.made for member in members)
        reads = dict.fromkeys(read.name for m in members for read in m.inputs if read.name not in made)
        makes = [
            member.made
            for member in members
            if not member.again
            and (member.made in self.final or any(user not in inside for user in self.users[member.made]))
        ]
        return tuple(reads), tuple(makes)

    def kernels(self) -> tuple[Group, ...]:
        """Return the groups, sorted by place: of several nodes, or of one that is inexact or has workspace in ONNX
        Runtime."""
        return tuple(
            Group(place, found.members, *self.ends(found.members))
            for place, found in sorted(self.open.items())
            if len(found.members) > 1
            or (found.members and (is_rounded(found.members[0]) or self._is_piece(found.members[0])))
            or self.schedule.workspace([member.at for member in found.members])
        )

    def _is_piece(self, member: Member) -> bool:
        return isinstance(self.schedule.steps[member.at], Piece)

    def grow(self) -> None:
        """Merge groups until no merge is possible."""
        counted = self.schedule.counted
        edges = [(self.maker[read.name], member.at, read.name) for member in self.member.values()
                 for read in member.inputs if self.maker.get(read.name) in self.member]  # fmt: skip
        kept = {name for _, _, name in edges if len(self.users[name]) > 1 or name in self.final}
        edges.sort(key=lambda edge: (edge[2] in kept, -counted.get(edge[2], 0), edge[1], edge[0]))
        self._lower_peak(edges)
        for _ in range(2):  # a merge without a valid place may have one after others
            self._merge_along(edges)
        more = True
        while more:
            more = False
            for place in sorted(self.open, reverse=True):
                found = self.open.get(place)
                if found is None or not found.members:
                    continue
                only = self._only_reader(found)
                if only is not None and found.size < self.open[only].size:
                    more |= self._merge(place, only)
        if any(member.columns for member in self.member.values()):  # smaller groups may have joined them
            self._merge_along(edges)

    def _lower_peak(self, edges: Sequence[tuple[int, int, str]]) -> None:
        """Merge along values that are live where most bytes are, and lower the peak that no merge may exceed."""
        edges = [edge for edge in edges if self.schedule.counted.get(edge[2])]
        merged, passes = bool(edges), 0
        while merged and passes < MOST_PASSES:
            merged, passes, top = False, passes + 1, int(self.live_bytes.argmax())
            for edge in edges:
                if edge[2] in self.inner or not self.at[edge[0]] <= top <= self.span(edge[2])[1]:
                    continue
                if self._merge_along([edge]):
                    merged, top = True, int(self.live_bytes.argmax())
                    self.peak = int(self.live_bytes[top])

    def _merge_along(self, edges: Iterable[tuple[int, int, str]]) -> bool:
        """Merge, where possible, groups with equally many elements, or one element for each row of the other."""
        merged = False
        for maker, reader, _name in edges:
            a, b = self.at[maker], self.at[reader]
            if a != b and (self.open[a].size == self.open[b].size or self._are_of_rows(a, b)):
                merged |= self._merge(a, b)
        return merged

    def _are_of_rows(self, a: int, b: int) -> bool:
        """Whether one of two groups works along rows, and the other has an element for each of them."""
        small, large = sorted((self.open[a], self.open[b]), key=lambda found: found.size)
        columns = row_length(large.members)
        return columns > 0 and small.size * columns == large.size

    def _only_reader(self, found: Open) -> int | None:
        """Return the place of the only other group that reads a group's values, None if there is not exactly one."""
        inside = {member.at for member in found.members}
        if any(member.made in self.final for member in found.members):
            return None
        places = {self.at[u] for member in found.members for u in self.users[member.made] if u not in inside}
        return places.pop() if len(places) == 1 else None

    def _merge(self, a: int, b: int) -> bool:
        """Merge the groups at two places if possible; return whether that happened."""
        members = tuple(sorted((*self.open[a].members, *self.open[b].members), key=lambda member: member.at))
        if len(members) > MOST_NODES or depth(members) > MOST_DEPTH or not self._loops(members):
            return False
        reads, makes = self.ends(members)
        size, columns = max(member.size for member in members), row_length(members)
        wanted = {size, size // columns} if columns else {size}
        if len(reads) > MOST_ENDS or len(makes) > MOST_ENDS or any(
            member.made in makes and member.makes not in wanted for member in members
        ):  # fmt: skip
            return False
        after, before = self._between(members, reads, makes)
        values = dict.fromkeys((*reads, *(member.made for member in members)))
        return any(self._try_place(members, place, a, b, values) for place in (a, b) if after < place < before)

    def _loops(self, members: tuple[Member, ...]) -> tuple[int, ...]:
        """Return `loops`, which is asked for the same members several times."""
        key = tuple(member.at for member in members)
        if key not in self.axes:
            self.axes[key] = loops(members)
        return self.axes[key]

    def _between(self, members: Sequence[Member], reads: Sequence[str], makes: Sequence[str]) -> tuple[int, int]:
        """Return the two places that a group must lie strictly between; an empty range if it is impossible."""
        inside = {member.at for member in members}
        after = [self.at[self.maker[name]] for name in reads if name in self.maker]
        before = [self.at[user] for name in makes for user in self.users[name] if user not in inside]
        for name in reads:
            if name in self.renewer:  # the new value overwrites this one, which no node may read afterwards
                if self.renewer[name] not in inside:
                    before.append(self.at[self.renewer[name]])
                elif not plainly_read(members, name):
                    return 0, 0
        for output, name in self.schedule.renewed.items():
            if output in self.maker and self.maker[output] in inside:
                after += [self.at[user] for user in self.users[name] if user not in inside]
        return max(after, default=-1), min(before, default=len(self.at))

    def _try_place(self, members: tuple[Member, ...], place: int, a: int, b: int, values: Iterable[str]) -> bool:
        """Place the merged group; undo that and return False if it raises the peak."""
        inner = set(values) - set().union(*self.ends(members))
        old_at = {member.at: self.at[member.at] for member in members}
        old_open = self.open[a], self.open[b]
        live_bytes, saved = self.live_bytes.copy(), list(self.saved)
        touched = {a, b}
        made = [name for name in values if name in self.maker and name not in self.inner]
        for name in made:
            touched.add(self.span(name)[1])
            self.add_bytes(name, -1)
        for member in members:
            self.at[member.at] = place
        del self.open[a], self.open[b]
        self.open[place] = Open(members)
        for name in made:
            if name not in inner:
                touched.add(self.span(name)[1])
                self.add_bytes(name, 1)
        self.update_savings(sorted(touched))
        if self.live_bytes.max() <= self.peak:
            self.inner |= inner
            return True
        self.live_bytes, self.saved = live_bytes, saved
        for at, was in old_at.items():
            self.at[at] = was
        del self.open[place]
        self.open[a], self.open[b] = old_open
        return False
