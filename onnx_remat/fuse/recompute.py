"""Recomputation that costs nothing: a kernel computes a value again, instead of reading it, from what is live anyway.

Between the forward and the backward pass, a step keeps what the gradients' formulas read: the tanh of a GELU, a mask, a
sigmoid. If a kernel reads such a value, and all that it is made of is live where the kernel runs, the kernel computes
it itself. If no other node reads it, the value has no buffer at all. The kernel reads no more bytes than were written
and read before, so that it takes no longer. PyTorch's min-cut partitioner has the same rule: recompute what fuses.

Values are visited from the last one made to the first, so that a value that others are recomputed from is live when
their turn comes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from onnx_remat.fuse.groups import MOST_ENDS, MOST_NODES, Grouping
from onnx_remat.fuse.members import MOST_DEPTH, Candidate, Member, depth, is_rounded

MOST_MEMBERS = 24
"""Maximum number of nodes that a kernel computes for one value."""

MOST_COSTLY = 2
"""Maximum number of functions and nodes along rows that a kernel computes again: one takes about as long as to write
and read a value."""


def recompute(grouping: Grouping) -> None:
    """Let kernels compute values again; `Grouping.unneeded` becomes the nodes whose values nothing reads any more."""
    made = [(at, member.made) for at, member in grouping.member.items()]
    for _, name in sorted(made, key=lambda each: (-grouping.at[each[0]], -each[0])):
        if grouping.ordered.counted.get(name) and name not in grouping.final and name not in grouping.inner:
            _recompute(grouping, name)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A group with members that compute a value again."""

    place: int
    group: Candidate
    reads: tuple[str, ...]
    added_bytes: int


def _recompute(grouping: Grouping, name: str) -> None:
    """Compute a value again in all kernels that read it, if that costs nothing and its buffer is freed earlier."""
    home = grouping.at[grouping.maker[name]]
    places = {grouping.at[user] for user in grouping.users[name]} - {home}
    copies = [copy for place in sorted(places) if (copy := _copy(grouping, name, place)) is not None]
    start, end = grouping.span(name)
    others = places - {copy.place for copy in copies}
    nbytes = grouping.ordered.counted[name]
    saved = nbytes * (len(copies) + (not others))
    if not copies or max(others, default=start) >= end or sum(copy.added_bytes for copy in copies) > saved:
        return
    _apply(grouping, name, copies)


def _copy(grouping: Grouping, name: str, place: int) -> _Copy | None:
    """Return the group at a place that reads a value, with the members that compute it; None if there is no kernel."""
    found = grouping.open.get(place)
    if found is None or not found.members:
        return None
    cone: dict[str, Member] = {}
    reads: set[str] = set()
    rest = [name]
    while rest:
        value = rest.pop()
        if value in cone or value in reads:
            continue
        if value != name and _is_live(grouping, value, place):
            reads.add(value)
            continue
        member = grouping.member.get(grouping.maker.get(value, -1))
        if member is None or len(cone) == MOST_MEMBERS:
            return None
        cone[value] = member
        rest += [read.name for read in member.inputs]
    if any(member.size > found.size for member in cone.values()):
        return None
    inside = {member.made for member in found.members}
    again = [replace(member, again=True) for value, member in cone.items() if value not in inside]
    members = tuple(sorted((*again, *found.members), key=lambda member: member.at))
    costly = [member for member in members if member.again and is_rounded(member)]
    if len(members) > MOST_NODES or len(costly) > MOST_COSTLY or depth(members) > MOST_DEPTH:
        return None
    new = Candidate(members)
    if not grouping.has_kernel(new):
        return None
    if len(new.reads) > MOST_ENDS or any(not _may_read(grouping, value, place) for value in new.reads):
        return None
    counted = grouping.ordered.counted
    added = [value for value in new.reads if value not in found.reads]
    return _Copy(place, new, tuple(reads), sum(counted.get(value, 0) for value in added))


def _is_live(grouping: Grouping, value: str, place: int) -> bool:
    """Whether a value lies in memory at a place."""
    if value not in grouping.maker:
        return True
    if value in grouping.inner:
        return False
    start, end = grouping.span(value)
    return start < place <= end


def _may_read(grouping: Grouping, value: str, place: int) -> bool:
    """Whether a value is not overwritten by its next one before, or at, a place."""
    return value not in grouping.renewer or grouping.at[grouping.renewer[value]] > place


def _apply(grouping: Grouping, name: str, copies: Iterable[_Copy]) -> None:
    """Replace groups by those that compute a value again; undo that if it raises the peak, or a group has no kernel."""
    names, places = {name}, {grouping.at[grouping.maker[name]]}
    for copy in copies:
        names.update(copy.reads)
        places.add(copy.place)
    live_bytes, saved = grouping.live_bytes.copy(), list(grouping.saved)
    groups, users = grouping.open.copy(), grouping.users.copy()
    inner, unneeded = grouping.inner.copy(), grouping.unneeded.copy()
    touched = set(places)

    def leave(value: str) -> None:
        """Take the bytes of a value away until they are known again."""
        if value in left:
            return
        names.add(value)
        if value in grouping.maker and value not in grouping.inner:
            touched.add(grouping.span(value)[1])
            grouping.add_bytes(value, -1)
        left.add(value)

    left: set[str] = set()
    for value in sorted(names):
        leave(value)
    for copy in copies:
        reader = next(user for user in grouping.users[name] if grouping.at[user] == copy.place)
        grouping.users[name] = [user for user in grouping.users[name] if grouping.at[user] != copy.place]
        for value in copy.reads:
            if reader not in grouping.users[value]:
                grouping.users[value] = [*grouping.users[value], reader]
        grouping.open[copy.place] = copy.group
    rest = [name]
    while rest:
        value = rest.pop()
        at = grouping.maker.get(value, -1)
        if grouping.users[value] or value in grouping.final or at not in grouping.member or at in grouping.unneeded:
            continue
        grouping.unneeded.add(at)
        place = grouping.at[at]
        places.add(place)
        touched.add(place)
        kept = tuple(each for each in grouping.open[place].members if each.again or each.at != at)
        grouping.open[place] = Candidate(kept)
        for read in dict.fromkeys(read.name for read in grouping.member[at].inputs):
            leave(read)
            grouping.users[read] = [user for user in grouping.users[read] if user != at]
            rest.append(read)
    for value in names:
        if value in grouping.maker:
            home = grouping.at[grouping.maker[value]]
            needed = value in grouping.final or any(grouping.at[user] != home for user in grouping.users[value])
            if grouping.maker[value] in grouping.member and not needed:
                grouping.inner.add(value)
            if value not in grouping.inner:
                grouping.add_bytes(value, 1)
                touched.add(grouping.span(value)[1])
    grouping.update_savings(sorted(touched))
    computed = [found for place in places if (found := grouping.open[place]).members]
    if not grouping.keeps_peak() or not all(map(grouping.has_kernel, computed)):
        grouping.live_bytes, grouping.saved = live_bytes, saved
        grouping.open, grouping.users = groups, users
        grouping.inner, grouping.unneeded = inner, unneeded
