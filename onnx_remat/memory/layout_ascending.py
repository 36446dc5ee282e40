"""Tree search behind `layout`: place buffers in the order of their offsets.

If there is a layout, there is one in which no buffer can be lowered. The search places the buffers of such a layout
from the bottom up, equally low ones in a given order; each lies as low as it can. There is one branch for each buffer
that may be the next. A buffer above the top of another one, if that lay as low as it can, is not the next: the other
could be lowered (canonical solutions; Moffitt, MiniMalloc, ASPLOS 2023)::

    target height     - - - - - - - - - - - - -

          +---------+     +-----------+            the next buffer cannot lie on c: b, below it, comes first
          |    a    | +-+ |     c     |
          |         | |b| |           |            the floor of a section is where its lowest unplaced buffer can lie:
          +---------+-+-+-+-----------+            floor + bytes still to place <= height, or this branch is dead
            0     1    2   3    4     5  sections

Placing a buffer raises floors, which raises the lowest offsets of buffers that live there, which raises floors
elsewhere. Two techniques keep the tree small:

- *Parts*: if no unplaced buffer spans two adjacent sections, both sides are independent. If one is infeasible, no other
  layout of the other side is tried.
- *Restarts*: most matters which branch is tried first. The best order is by the most bytes that are live with a buffer,
  then by its duration. A search without an early answer seldom finds one later, so other orders follow after some time.

`layout_ledges` finds conflicts between few buffers; this search knows of all sections what still has to fit there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from onnx_remat.memory.layout_sections import Answer, highest, luby, members
from onnx_remat.memory.problem import Flags, Floats, Longs
from onnx_remat.process.compiled import compiled, inlined

_MOST_BUFFERS = 5_000  # each branch goes through all buffers; larger inputs are left to others
_MOST_MEMBERS = 1_000_000  # sections of all buffers
_MOST_RISES = 4_000_000  # to be undone; a search that needs more is given up
_MOST_ENTRIES = 4_000_000  # of the stack, likewise
_FOUND, _IMPOSSIBLE, _UNDECIDED = 1, 2, 0

_PRESSURE, _STEPS, _SECTIONS, _SIZE = range(4)
_FIRST_ORDERS = (
    (_PRESSURE, _STEPS, _SIZE), (_STEPS, _SIZE), (_PRESSURE, _SECTIONS, _SIZE), (_SECTIONS, _SIZE), (_SIZE, _STEPS),
)  # fmt: skip
_FIRST_SHARE, _LATER_SHARE = 3, 16  # part of the work: for each search by a first order, and by a random one at least


@dataclass(frozen=True, slots=True)
class Tree:
    """Input of the search: arrays as in `layout_sections.sections`, and features by which buffers are ordered.

    `features` are logarithms, by row: of the most bytes that are live with a buffer, of its duration in steps and in
    sections, and of its size.
    """

    first: Longs
    last: Longs
    size: Longs
    features: Floats

    @staticmethod
    def of(first: Longs, last: Longs, size: Longs, live: Longs, steps: Longs) -> Tree | None:
        """Return the input of a search, None if it is too large; `steps` are durations."""
        lasts = last - first
        if len(first) > _MOST_BUFFERS or int(lasts.sum()) > _MOST_MEMBERS:
            return None
        features: Floats = np.log(np.array([highest(first, last, live), steps, lasts, size], np.float64))
        return Tree(first, last, size, np.round(features, 9))  # the last bits differ between processors

    def search(self, height: int, turn: int, work: int) -> Answer:
        """Search for a layout of at most `height`, with restarts, for `work` iterations; `turn` seeds the orders."""
        rng, restart, left = np.random.default_rng(turn), 0, work
        order = np.lexsort([-self.features[each] for each in reversed(_FIRST_ORDERS[turn % len(_FIRST_ORDERS)])])
        while left > 0:
            if restart > 1 and restart % 2 == 0:
                weights = rng.random(4) * (rng.choice([1, 8, 64]), 1, 1, 1)
                noise = rng.standard_normal(len(self.size)) * rng.choice([0.0, 0.1, 0.3])
                order = np.argsort(-((weights[:, np.newaxis] * self.features).sum(axis=0) + noise), kind="stable")
            share = work // _FIRST_SHARE if restart < 2 else luby(restart // 2) * (work // _LATER_SHARE)
            state = _initial_state(self.first[order], self.last[order], self.size[order])
            if state.rest.max() > height:
                return Answer(None, True)
            verdict, done = search_ascending(
                state, _Stack.of(len(order), len(state.floor)), height, restart % 2 == 1, min(share, left)
            )
            if verdict == _FOUND:
                offsets = np.empty(len(order), np.int64)
                offsets[order] = state.offsets
                return Answer(offsets, False)
            if verdict == _IMPOSSIBLE:
                return Answer(None, True)
            left -= done + len(state.members)
            restart += 1
        return Answer(None, False)


class _SearchState(NamedTuple):
    """State of a search; buffers are numbered by the given order."""

    first: Longs  # per buffer, as in `layout_sections.sections`
    last: Longs
    size: Longs
    placed: Flags
    offsets: Longs  # of a buffer that is not placed: none is lower
    ptr: Longs  # CSR: buffers of each section
    members: Longs
    floor: Longs  # per section: no unplaced buffer is lower
    rest: Longs  # bytes of unplaced buffers
    may_rise: Flags  # whether the floor has to be computed again
    undo: Longs  # (3, ...): see `_undo`


def _initial_state(first: Longs, last: Longs, size: Longs) -> _SearchState:
    """Return the initial state: no buffer is placed, all floors are 0."""
    n, n_sections = len(first), int(last.max())
    by_section, count = members(first, last, np.arange(n)), np.zeros(n_sections + 1, np.int64)
    np.add.at(count, first, 1)
    np.subtract.at(count, last, 1)
    ptr = np.append(0, np.cumsum(np.cumsum(count)[:-1]))
    rest = np.zeros(n_sections + 1, np.int64)
    np.add.at(rest, first, size)
    np.subtract.at(rest, last, size)
    placed, offsets = np.zeros(n, np.bool_), np.zeros(n, np.int64)
    floor, may_rise = np.zeros(n_sections, np.int64), np.zeros(n_sections, np.bool_)
    undo = np.empty((3, len(by_section) + n + min(_MOST_RISES, n * (n + n_sections))), np.int64)
    return _SearchState(
        first, last, size, placed, offsets, ptr, by_section, floor, np.cumsum(rest)[:-1], may_rise, undo
    )  # fmt: skip


class _Stack(NamedTuple):
    """Nodes, whose branches are tried in turn, and splits, whose parts must all be placed."""

    begin: Longs  # first of its branches or parts in `entries`; those of the next one follow
    next: Longs  # the one to be tried next
    mark: Longs  # entries in `undo` before it
    left: Longs  # first section of its part
    right: Longs  # section after the last
    least: Longs  # offset of the buffer placed last before it
    before: Longs  # this buffer
    is_split: Flags
    entries: Longs  # (2, ...): a branch has a buffer and its offset, a part as `_parts` writes it
    unplaced: Longs  # scratch, per buffer
    reach: Longs  # scratch, per section

    @staticmethod
    def of(n: int, n_sections: int) -> _Stack:
        """Return an empty stack for buffers and sections."""
        deepest = 2 * n + 3
        begin, next_, mark, left, right, least, before = np.zeros((7, deepest), np.int64)
        is_split, entries = (
            np.zeros(deepest, np.bool_),
            np.empty((2, min(n * (n + 5) // 2, _MOST_ENTRIES) + n), np.int64),
        )
        scratch = np.empty(n, np.int64), np.empty(n_sections, np.int64)
        return _Stack(begin, next_, mark, left, right, least, before, is_split, entries, *scratch)


@inlined
def _unplaced(state, left, right, out):  # type: ignore[no-untyped-def]
    """Write the unplaced buffers of a part to `out`; return how many."""
    n = 0
    for b in range(len(state.size)):
        if not state.placed[b] and left <= state.first[b] and state.last[b] <= right:
            out[n] = b
            n += 1
    return n


@inlined
def _parts(state, stack, d, n, start):  # type: ignore[no-untyped-def]
    """Write the independent parts of `n` buffers, as a first section and the one after the last; return how many."""
    left, right, unplaced, reach, out = stack.left[d], stack.right[d], stack.unplaced, stack.reach, stack.entries
    for s in range(left, right):
        reach[s] = 0
    for i in range(n):
        b = unplaced[i]
        reach[state.first[b]] = max(reach[state.first[b]], state.last[b])
    n_out, until = start, left
    for s in range(left, right):
        if s >= until and reach[s] > 0:
            out[0, n_out] = s
            n_out += 1
        if reach[s] > until:
            until = out[1, n_out - 1] = reach[s]
    return n_out - start


@inlined
def _branches(state, stack, d, n, lowest_first):  # type: ignore[no-untyped-def]
    """Write the buffers that may be the next, and their offsets, as entries of a node; return how many, and iterations.

    They lie as high as the buffer placed last or higher, and higher if the order has them before it.
    """
    least, before, unplaced, out, start = stack.least[d], stack.before[d], stack.unplaced, stack.entries, stack.begin[d]
    limit = np.int64(1) << 62
    for i in range(n):
        b = unplaced[i]
        limit = min(limit, max(state.offsets[b], least + (b < before)) + state.size[b])
    end, done = start, n
    for i in range(n):
        b = unplaced[i]
        at = max(state.offsets[b], least + (b < before))
        if at >= limit:
            continue
        to, twin = end, False
        while to > start and lowest_first and out[1, to - 1] > at:
            to -= 1
        done += end - start
        for j in range(start, to):
            c = out[0, j]
            if state.first[c] == state.first[b] and state.last[c] == state.last[b] and state.size[c] == state.size[b]:
                twin = twin or out[1, j] == at
        if twin:
            continue
        for j in range(end, to, -1):
            out[0, j], out[1, j] = out[0, j - 1], out[1, j - 1]
        out[0, to], out[1, to] = b, at
        end += 1
    return end - start, done


@inlined
def _place_buffer(state, b, at, height, t):  # type: ignore[no-untyped-def]
    """Place a buffer; return the entries in `undo`, -1 if what is unplaced does not fit above it."""
    top = at + state.size[b]
    for s in range(state.first[b], state.last[b]):
        if top + state.rest[s] - state.size[b] > height:
            return -1
    for s in range(state.first[b], state.last[b]):
        state.undo[0, t], state.undo[1, t], state.undo[2, t] = s, state.floor[s], state.size[b]
        state.floor[s] = top
        state.rest[s] -= state.size[b]
        t += 1
    state.undo[0, t], state.undo[1, t] = -1 - b, state.offsets[b]
    state.placed[b], state.offsets[b] = True, at
    return t + 1


@inlined
def _raise_floors(state, part, height, unplaced, n, t):  # type: ignore[no-untyped-def]
    """Raise floors and lowest offsets as far as they follow from a buffer that was placed.

    Parameters
    ----------
    part : tuple of int
        First section, the one after the last, the offset of the buffer, and the buffer.
    unplaced : int64
        The part's unplaced buffers, `n` in all.
    t : int
        Entries in `undo`.

    Returns
    -------
    verdict, t, done : int
        `_IMPOSSIBLE` if what is unplaced does not fit below `height`, `_UNDECIDED` if `undo` is full, else `_FOUND`;
        entries in `undo`; iterations.
    """
    left, right, least, placed = part
    most = state.undo.shape[1] - len(state.members) - len(state.size)
    done = n + right - left
    low, high = state.first[placed], state.last[placed]  # sections whose floors rose
    for s in range(low, high):
        state.may_rise[s] = True
    while low < high:
        begin, end = low, high  # sections whose floors may rise
        for i in range(n):
            b = unplaced[i]
            if state.first[b] >= high or state.last[b] <= low:
                continue
            at = state.offsets[b]
            for s in range(max(state.first[b], low), min(state.last[b], high)):
                at = max(at, state.floor[s])
            done += high - low
            if at > state.offsets[b]:
                if t >= most:
                    return _UNDECIDED, t, done
                before = max(state.offsets[b], least)
                state.undo[0, t], state.undo[1, t] = len(state.floor) + b, state.offsets[b]
                state.offsets[b] = at
                t += 1
                for s in range(state.first[b], state.last[b]):
                    if max(state.floor[s], least) == before:  # it may have been the lowest one there
                        state.may_rise[s] = True
                begin, end = min(begin, state.first[b]), max(end, state.last[b])
                done += state.last[b] - state.first[b]
        done += n
        low, high, fits = right, left, True
        for s in range(begin, end):
            if not state.may_rise[s]:
                continue
            state.may_rise[s] = False
            if state.rest[s] == 0 or not fits:
                continue
            at = height
            for k in range(state.ptr[s], state.ptr[s + 1]):
                if not state.placed[state.members[k]]:
                    at = min(at, max(state.offsets[state.members[k]], least))
            done += state.ptr[s + 1] - state.ptr[s]
            fits = at + state.rest[s] <= height
            if at > state.floor[s]:
                if t >= most:
                    return _UNDECIDED, t, done
                state.undo[0, t], state.undo[1, t], state.undo[2, t] = s, state.floor[s], 0
                state.floor[s] = at
                t += 1
                low, high = min(low, s), max(high, s + 1)
        if not fits:
            return _IMPOSSIBLE, t, done
    for s in range(left, right):
        if state.rest[s] > 0 and max(state.floor[s], least) + state.rest[s] > height:
            return _IMPOSSIBLE, t, done
    return _FOUND, t, done


@inlined
def _undo(state, t, until):  # type: ignore[no-untyped-def]
    """Undo the latest changes, `t` in all, down to the first `until`.

    An entry is a section with its floor before and the bytes that were placed there, or the number of sections plus a
    buffer whose lowest offset rose, or -1 minus a buffer that was placed, with its offset before.
    """
    while t > until:
        t -= 1
        s = state.undo[0, t]
        if s < 0:
            state.placed[-1 - s] = False
            state.offsets[-1 - s] = state.undo[1, t]
        elif s >= len(state.floor):
            state.offsets[s - len(state.floor)] = state.undo[1, t]
        else:
            state.floor[s] = state.undo[1, t]
            state.rest[s] += state.undo[2, t]


_ENTER, _NEXT, _PLACED, _DEAD = 0, 1, 2, 3  # a part begins; an entry's next branch or part; all is placed; none is left


@compiled
def search_ascending(state, stack, height, lowest_first, work):  # type: ignore[no-untyped-def]
    """Search depth first until an answer or for `work` iterations of an inner loop; the offsets are left in the state.

    Returns
    -------
    verdict, done
        One of `_FOUND`, `_IMPOSSIBLE` and `_UNDECIDED`; iterations done.
    """
    n, entries = len(state.size), stack.entries
    zero = np.int64(0)  # typed, so that no function is compiled twice
    left, right, least, placed = zero, zero + len(state.floor), zero, zero - 1
    d, t, done, todo, is_new = zero - 1, zero, zero, _ENTER, False
    while True:
        if todo == _ENTER:
            start = stack.begin[d + 1]
            if done > work or d + 3 > len(stack.begin) or start + n > entries.shape[1]:
                return _UNDECIDED, done
            found = _unplaced(state, left, right, stack.unplaced)
            done += n
            if found == 0:
                todo = _PLACED
                continue
            if is_new:
                verdict, t, steps = _raise_floors(state, (left, right, least, placed), height, stack.unplaced, found, t)
                done += steps
                if verdict == _UNDECIDED:
                    return _UNDECIDED, done
                if verdict == _IMPOSSIBLE:
                    todo = _DEAD
                    continue
            d += 1
            stack.left[d], stack.right[d], stack.least[d], stack.before[d] = left, right, least, placed
            found_parts = _parts(state, stack, d, found, start)
            stack.is_split[d], stack.next[d], stack.mark[d] = found_parts > 1, start, t
            stack.begin[d + 1] = start + found_parts
            if found_parts == 1:
                stack.left[d], stack.right[d] = entries[0, start], entries[1, start]
                found_branches, steps = _branches(state, stack, d, found, lowest_first)
                stack.begin[d + 1] = start + found_branches
                done += steps
            todo = _NEXT
        elif todo == _NEXT:
            i = stack.next[d]
            stack.next[d] += 1
            if i == stack.begin[d + 1]:
                todo = _PLACED if stack.is_split[d] else _DEAD
                d -= 1
            elif stack.is_split[d]:
                left, right, least, placed = entries[0, i], entries[1, i], stack.least[d], stack.before[d]
                todo, is_new = _ENTER, False
            else:
                end = _place_buffer(state, entries[0, i], entries[1, i], height, t)
                if end > 0:
                    left, right, least, placed = stack.left[d], stack.right[d], entries[1, i], entries[0, i]
                    t, todo, is_new = end, _ENTER, True
        elif todo == _PLACED:
            while d >= 0 and not stack.is_split[d]:
                d -= 1
            if d < 0:
                return _FOUND, done
            todo = _NEXT
        else:
            while d >= 0 and stack.is_split[d]:
                d -= 1
            if d < 0:
                return _IMPOSSIBLE, done
            _undo(state, t, stack.mark[d])
            t, todo = stack.mark[d], _NEXT
