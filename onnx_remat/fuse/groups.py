"""Selection of the nodes that are fused: a pure function of their order, their shapes and their lifetimes.

Model
    Nodes run at places 0, 1, 2, ... A group runs at the place of one of its nodes, after all makers of its inputs and
    before all readers of its outputs, so that groups never depend on one another in a cycle. A value that is made and
    read within one group has no buffer.
Algorithm
    For the values of nodes that kernels can compute, first those that one node alone reads, the largest first: merge
    the group that makes it with a group that reads it if both have as many elements, or one has an element for each
    row of the other, a kernel exists (`members.space_of`), a valid place exists, and **live bytes never exceed the
    step's peak**. Convexity alone would let peaks grow threefold: a group reads early values late. Before all others
    come merges along values that are live at the peak: they lower it, and no later merge may raise it again. In the
    end, smaller groups join the only group that reads them, if they can be computed elementwise there.
Complexity
    A few trials per value, each linear in the places of the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cache
from math import prod

from onnx_remat.fuse.live import LiveBytes
from onnx_remat.fuse.members import MOST_DEPTH, Candidate, Member, depth, is_rounded, members_of
from onnx_remat.fuse.moves import Piece
from onnx_remat.fuse.ordered import OrderedStep

MOST_ENDS = 48
"""Maximum number of inputs, and of outputs, of a kernel; ``shim.c`` allows 512, of joined kernels."""

MOST_NODES = 96
"""Maximum number of nodes of a group: larger kernels take long to compile, and run out of registers."""

MOST_PASSES = 20
"""Maximum number of times that all values are tried which are live at the step's peak."""


@dataclass(frozen=True)
class Group(Candidate):
    """Nodes that one kernel computes.

    Attributes
    ----------
    place : int
        Where it runs: the place of one of its members.
    makes : tuple of str
        Values that nodes outside the group read; each has the group's number of elements, or one element of each row.
    """

    place: int
    makes: tuple[str, ...]


def find(ordered: OrderedStep) -> tuple[Group, ...]:
    """Return the groups of a step, sorted by place; no two of them can be merged."""
    grouping = Grouping(ordered)
    grouping.grow()
    return grouping.kernels()


class Grouping(LiveBytes):
    """Mutable state of the algorithm: the groups, and the live bytes at each place."""

    def __init__(self, ordered: OrderedStep) -> None:
        steps, self.uses = ordered.steps, ordered.uses
        members = members_of(ordered, self.uses)
        self.member = {i: member for i, member in enumerate(members) if member is not None}
        self.open = {i: Candidate((member,) if member else ()) for i, member in enumerate(members)}
        self.inner: set[str] = set()  # values without a buffer
        self.unneeded: set[int] = set()  # nodes whose values nothing reads any more, see `recompute`
        self.candidates: dict[tuple[int, ...], Candidate] = {}
        self.overwrites = cache(ordered.overwrites)
        maker = {name: i for name, i in self.uses.maker.items() if name not in ordered.root}
        self.renewer = {name: maker[output] for output, name in ordered.renewed.items() if output in maker}
        self.renewed: dict[int, list[str]] = {}  # by node
        for name, at in self.renewer.items():
            self.renewed.setdefault(at, []).append(name)
        users = self.uses.users.copy()  # `recompute` changes it
        super().__init__(ordered, maker, users, len(steps), ordered.slack)

    # ---- liveness ----

    def running(self, place: int) -> Sequence[tuple[int, Iterable[str], Iterable[str]]]:
        found = self.open.get(place)
        if found is None or place in self.unneeded:
            return ()
        return [(place, found.reads, self.makes(found))] if len(found.members) > 1 else super().running(place)

    def may_overwrite(self, node: int, made: str, read: str) -> bool:
        found = self.open[node]
        if len(found.members) < 2:
            return self.overwrites(node, made, read)
        new, old = self.ordered.tensors[made], self.ordered.tensors[read]
        return (new.dtype, prod(new.shape)) == (old.dtype, prod(old.shape)) and read in found.plain

    # ---- groups ----

    def makes(self, found: Candidate) -> tuple[str, ...]:
        """Return the values that a group makes and other nodes read."""
        inside, users = found.places, self.users
        return tuple(
            member.made
            for member in found.members
            if not member.again and (member.made in self.final or not inside.issuperset(users[member.made]))
        )

    def kernels(self) -> tuple[Group, ...]:
        """Return the groups, sorted by place: of several nodes, or of one that has workspace in ONNX Runtime or, on a
        CPU, is inexact."""
        return tuple(
            Group(found.members, place, self.makes(found))
            for place, found in sorted(self.open.items())
            if len(found.members) > 1
            or (found.members and (self._is_faster_alone(found.members[0]) or self._is_piece(found.members[0])))
            or self.ordered.workspace([member.at for member in found.members])
        )

    def singles(self) -> Iterator[Group]:
        """Yield single nodes, sorted by place, that a kernel computes element by element."""
        for place, found in sorted(self.open.items()):
            if len(found.members) == 1 and not found.columns and self.has_kernel(found):
                yield Group(found.members, place, self.makes(found))

    def _is_faster_alone(self, member: Member) -> bool:
        return is_rounded(member) and not self.ordered.device

    def _is_piece(self, member: Member) -> bool:
        return isinstance(self.ordered.steps[member.at], Piece)

    def has_kernel(self, found: Candidate) -> bool:
        """Whether one kernel can compute some nodes, and write what other nodes read of them."""
        if found.space is None:
            return False
        makes, sizes = self.makes(found), {found.size, found.size // max(found.columns, 1)}
        return all(member.makes in sizes for member in found.members if member.made in makes)

    def grow(self) -> None:
        """Merge groups until no merge is possible."""
        counted = self.ordered.counted
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
        edges = [edge for edge in edges if self.row.get(edge[2])]
        merged, passes = bool(edges), 0
        while merged and passes < MOST_PASSES:
            merged, passes, top = False, passes + 1, int(self.live_bytes[1].argmax())
            for edge in edges:
                if edge[2] in self.inner or not self.at[edge[0]] <= top <= self.span(edge[2])[1]:
                    continue
                if self._merge_along([edge]):
                    merged, top = True, int(self.live_bytes[1].argmax())
                    self.peak[1] = self.live_bytes[1, top]

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
        return large.columns > 0 and small.size * large.columns == large.size

    def _only_reader(self, found: Candidate) -> int | None:
        """Return the place of the only other group that reads a group's values, None if there is not exactly one."""
        inside = found.places
        if any(member.made in self.final for member in found.members):
            return None
        places = {self.at[u] for member in found.members for u in self.users[member.made] if u not in inside}
        return places.pop() if len(places) == 1 else None

    def _merge(self, a: int, b: int) -> bool:
        """Merge the groups at two places if possible; return whether that happened."""
        members = tuple(sorted((*self.open[a].members, *self.open[b].members), key=lambda member: member.at))
        if len(members) > MOST_NODES:
            return False
        new = self.candidates.setdefault(tuple(member.at for member in members), Candidate(members))
        reads, makes = new.reads, self.makes(new)
        after, before = self._between(new, reads, makes)
        places = [place for place in (a, b) if after < place < before]
        if not places or depth(members) > MOST_DEPTH or not self.has_kernel(new):
            return False
        if len(reads) > MOST_ENDS or len(makes) > MOST_ENDS:
            return False
        inner = {*reads, *(member.made for member in members)} - {*reads, *makes}
        values = dict.fromkeys((*reads, *(member.made for member in members)))
        return any(self._try_place(new, place, (a, b), values, inner) for place in places)

    def _between(self, new: Candidate, reads: Sequence[str], makes: Sequence[str]) -> tuple[int, int]:
        """Return the two places that a group must lie strictly between; an empty range if it is impossible."""
        inside = new.places
        after = [self.at[self.maker[name]] for name in reads if name in self.maker]
        before = [self.at[user] for name in makes for user in self.users[name] if user not in inside]
        for name in reads:
            if name in self.renewer:  # the new value overwrites this one, which no node may read afterwards
                if self.renewer[name] not in inside:
                    before.append(self.at[self.renewer[name]])
                elif name not in new.plain:
                    return 0, 0
        for name in (name for at in inside for name in self.renewed.get(at, ())):
            after += [self.at[user] for user in self.users[name] if user not in inside]
        return max(after, default=-1), min(before, default=len(self.at))

    def _try_place(
        self, new: Candidate, place: int, old: tuple[int, int], values: Iterable[str], inner: Set[str]
    ) -> bool:
        """Place the merged group; undo that and return False if it raises the peak."""
        old_at = {member.at: self.at[member.at] for member in new.members}
        old_open = {each: self.open[each] for each in old}
        live_bytes, saved = self.live_bytes.copy(), list(self.saved)
        touched = set(old)
        made = [name for name in values if name in self.maker and name not in self.inner]
        for name in made:
            touched.add(self.span(name)[1])
            self.add_bytes(name, -1)
        for member in new.members:
            self.at[member.at] = place
        for each in old:
            del self.open[each]
        self.open[place] = new
        for name in made:
            if name not in inner:
                touched.add(self.span(name)[1])
                self.add_bytes(name, 1)
        self.update_savings(sorted(touched))
        if self.keeps_peak():
            self.inner |= inner
            return True
        self.live_bytes, self.saved = live_bytes, saved
        for at, was in old_at.items():
            self.at[at] = was
        del self.open[place]
        self.open.update(old_open)
        return False
