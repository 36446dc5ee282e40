"""Tree search behind `layout`: place buffers from the bottom up, always on the lowest ledge.

The *floor* of a section (see `layout_sections`) is the top of the buffers placed in it::

    target height     - - - - - - - - - - - - -
                                                   floor + bytes still to place <= height, in every section:
          +-----+           +-----+                otherwise this branch is dead
          |     |           |     +-----+
          |     |   ledge   |     |     |          either a buffer that fits on the ledge lies there,
          |     +-----------+     |     |          or the floor rises to where the next could lie at all
          +-----+-----------+-----+-----+
            0     1  2   3    4     5              sections

Every layout can be pushed down until each buffer rests on another or on the ground. The search therefore branches at
the tightest section of the lowest ledge: one branch for each buffer that fits on the ledge there, and one in which none
does. Four techniques keep the tree small:

- *Parts*: if no unplaced buffer spans two adjacent sections, both sides are independent; the leftmost is solved first.
- *Backjumping*: a dead branch records the conflicting sections. Choices that touch none of them are skipped
  (conflict-directed backjumping; Prosser, 1993).
- *Nogoods*: a hash table recognises a part with given floors and unplaced buffers that was proved infeasible.
- *Restarts*: a search without an early answer seldom finds one later, so the order of branches is randomised again
  after a number of iterations (Luby, Sinclair and Zuckerman, 1993). The hash table stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from onnx_remat.memory.layout_sections import Answer, luby, members
from onnx_remat.memory.problem import Flags, Longs
from onnx_remat.process.compiled import compiled, inlined

Codes = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]

_MOST_WORDS = 4_000_000  # of the bit sets of sections per buffer: larger inputs are left to others
_FIRST_WEIGHTS = ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0))  # of duration and size, in the first orders of branches
_NOGOOD_ENTRIES = 1 << 20
_FOUND, _IMPOSSIBLE, _UNDECIDED = 1, 2, 0


@dataclass(frozen=True, slots=True)
class Tree:
    """Input of the search: arrays as in `layout_sections.sections`, and the hash table of infeasible parts (`dead`)."""

    first: Longs
    last: Longs
    size: Longs
    codes: Codes
    dead: Codes

    @staticmethod
    def of(first: Longs, last: Longs, size: Longs) -> Tree | None:
        """Return the input of a search, None if it is too large."""
        if len(first) * int(last.max()) // 64 > _MOST_WORDS:
            return None
        codes = np.random.default_rng(0).integers(1, 1 << 63, len(first), dtype=np.uint64)
        return Tree(first, last, size, codes, np.zeros(_NOGOOD_ENTRIES, np.uint64))

    def search(self, height: int, turn: int, work: int) -> Answer:
        """Search for a layout of at most `height`, with restarts, for `work` iterations; `turn` seeds the orders."""
        rng = np.random.default_rng(turn)
        initial = _initial_state(self.first, self.last, self.size, self.codes)
        if initial.rest.max() > height:
            return Answer(None, True)
        lasts, restart = np.log(self.last - self.first), 0
        while work > 0:
            duration, bytes_ = _FIRST_WEIGHTS[restart] if restart < len(_FIRST_WEIGHTS) and not turn else rng.random(2)
            noise = rng.standard_normal(len(self.size)) * rng.choice([0.0, 0.1, 0.3, 1.0])
            order = np.argsort(-(duration * lasts + bytes_ * np.log(self.size) + noise), kind="stable")
            share = luby(restart + 1) * 2_000_000
            state = _ordered_copy(initial, order)
            verdict, done = search_ledges(state, self.dead, height, min(share, work))
            if verdict != _UNDECIDED:
                return Answer(state.offsets if verdict == _FOUND else None, verdict == _IMPOSSIBLE)
            work -= max(done, 1)
            restart += 1
        return Answer(None, False)


class _SearchState(NamedTuple):
    """State of a search; the arrays from `floor` on have one row per section."""

    first: Longs  # per buffer, as in `layout_sections.sections`
    last: Longs
    size: Longs
    codes: Codes  # random bits of each buffer, for the hash
    reach: Codes  # (n_buffers, n_words): bit set of the sections each buffer is live in
    placed: Flags
    offsets: Longs
    ptr: Longs  # CSR: buffers of each section, in the order of branches
    members: Longs
    starts: Longs  # CSR: buffers whose first section each is
    beginners: Longs
    floor: Longs  # unplaced buffers lie at or above it
    rest: Longs  # bytes of unplaced buffers
    waits: Longs  # number of unplaced buffers
    cross: Longs  # how many of them are also live in the section before
    code: Codes  # sum of the codes of unplaced buffers whose first section it is


def _initial_state(first: Longs, last: Longs, size: Longs, codes: Codes) -> _SearchState:
    """Return the initial state: no buffer is placed, all floors are 0, the order of branches is still arbitrary."""
    n, n_sections = len(first), int(last.max())
    code = np.zeros(n_sections, np.uint64)
    np.add.at(code, first, codes)
    one = np.ones(n, np.int64)
    rest, waits, cross = (
        _summed(n_sections, begin, last, what) for begin, what in ((first, size), (first, one), (first + 1, one))
    )
    ptr, members = np.append(0, np.cumsum(waits)), np.empty(int(waits.sum()), np.int64)
    beginners = np.argsort(first, kind="stable")
    starts = np.searchsorted(first[beginners], np.arange(n_sections + 1))
    placed, offsets, floor = np.zeros(n, np.bool_), np.zeros(n, np.int64), np.zeros(n_sections, np.int64)
    csr = (ptr, members, starts, beginners)
    return _SearchState(
        first, last, size, codes, _reach(first, last), placed, offsets, *csr, floor, rest, waits, cross, code
    )


def _summed(n_sections: int, begin: Longs, end: Longs, what: Longs) -> Longs:
    """Return, for each section, the sum of `what` over the buffers live in it, from `begin` to before `end`."""
    steps = np.zeros(n_sections + 1, np.int64)
    np.add.at(steps, begin, what)
    np.subtract.at(steps, end, what)
    return np.cumsum(steps)[:-1]


def _reach(first: Longs, last: Longs) -> Codes:
    """Return the sections from `first` to before `last` as bit sets."""
    words, final = np.arange(-(-int(last.max()) // 64)), last - 1
    within = (words >= (first >> 6)[:, None]) & (words <= (final >> 6)[:, None])
    reach = np.where(within, ~np.uint64(0), np.uint64(0))
    rows = np.arange(len(first))
    reach[rows, first >> 6] &= ~np.uint64(0) << (first & 63).astype(np.uint64)
    reach[rows, final >> 6] &= ~np.uint64(0) >> (63 - (final & 63)).astype(np.uint64)
    return reach


def _ordered_copy(initial: _SearchState, order: Longs) -> _SearchState:
    """Return a copy of the initial state to search in, with the buffers of each section in the order of branches."""
    ordered = members(initial.first[order], initial.last[order], order)
    changing = ("placed", "offsets", "floor", "rest", "waits", "cross", "code")
    return initial._replace(members=ordered, **{name: getattr(initial, name).copy() for name in changing})


@inlined
def _lowest_ledge(state, height):  # type: ignore[no-untyped-def]
    """Find the leftmost part, the tightest section of its lowest ledge, and a hash of the part.

    Returns
    -------
    left, right : int
        The part is the sections left .. right - 1.
    section : int
    key : uint64
    """
    n_sections = len(state.floor)
    left = 0
    while state.waits[left] == 0:
        left += 1
    s, best = left, left
    key = np.uint64(height)
    while True:
        low, slack = state.floor[s], height - state.floor[s] - state.rest[s]
        if low < state.floor[best] or (low == state.floor[best] and slack < height - low - state.rest[best]):
            best = s
        bits = np.uint64(low + 1) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(s) * np.uint64(0xC2B2AE3D27D4EB4F)
        bits = (bits ^ (bits >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9) + state.code[s]
        key = (key ^ bits ^ (bits >> np.uint64(32))) * np.uint64(0x94D049BB133111EB)
        s += 1
        if s == n_sections or state.cross[s] == 0:
            return left, s, best, key


@inlined
def _highest_floor(state, b):  # type: ignore[no-untyped-def]
    """Return the lowest offset at which a buffer can lie."""
    found = state.floor[state.first[b]]
    for s in range(state.first[b] + 1, state.last[b]):
        found = max(found, state.floor[s])
    return found


@inlined
def _branches(state, section, height, out, blame):  # type: ignore[no-untyped-def]
    """Collect the buffers that may be placed next on the ledge of `section`, and its next floor if none is.

    Returns
    -------
    n_out : int
        Branches written to `out`; the sections the answer depends on are added to `blame`.
    rise : int
        A lower bound on the offset above the ledge at which the next buffer of this section can lie. Buffers that do
        not fit into the section's slack are ignored.
    done : int
        Iterations of the inner loops.
    """
    level = state.floor[section]
    slack = height - level - state.rest[section]
    n_out, rise, done = 0, np.int64(1) << 62, 0
    left, right = section, section + 1
    for k in range(state.ptr[section], state.ptr[section + 1]):
        b = state.members[k]
        done += 1
        if state.placed[b]:
            continue
        blame |= state.reach[b]
        done += state.last[b] - state.first[b] + len(blame)
        lowest = _highest_floor(state, b)
        if lowest > level:
            rise = min(rise, lowest)
            continue
        left, right = min(left, state.first[b]), max(right, state.last[b])
        twin = False
        for j in range(n_out):
            c = out[j]
            if state.first[c] == state.first[b] and state.last[c] == state.last[b] and state.size[c] == state.size[b]:
                twin = True
        if not twin:
            out[n_out] = b
            n_out += 1
    # If a buffer of this section lies above the ledge, it rests on a buffer outside the section.
    if slack > 0 and n_out > 0:
        met = state.ptr[left + 1] - state.ptr[left]
        for k in range(met + state.starts[right] - state.starts[left + 1]):
            c = state.members[state.ptr[left] + k] if k < met else state.beginners[state.starts[left + 1] + k - met]
            done += 1
            if state.placed[c] or state.size[c] > slack or state.first[c] <= section < state.last[c]:
                continue
            blame |= state.reach[c]
            done += state.last[c] - state.first[c] + len(blame)
            rise = min(rise, _highest_floor(state, c) + state.size[c])
    return n_out, rise, done


@inlined
def _place_buffer(state, b, height, trail, t, blame):  # type: ignore[no-untyped-def]
    """Place a buffer on its ledge and save the floors below it; if a section overflows, blame it and return False."""
    at = state.floor[state.first[b]]
    top = at + state.size[b]
    for s in range(state.first[b], state.last[b]):
        if top + state.rest[s] - state.size[b] > height:
            blame[s >> 6] |= np.uint64(1) << np.uint64(s & 63)
            return False
    for s in range(state.first[b], state.last[b]):
        trail[t + s - state.first[b]] = state.floor[s]
        state.floor[s] = top
        state.rest[s] -= state.size[b]
        state.waits[s] -= 1
        state.cross[s] -= s > state.first[b]
    state.code[state.first[b]] -= state.codes[b]
    state.placed[b], state.offsets[b] = True, at
    return True


@inlined
def _unplace_buffer(state, b, trail, t):  # type: ignore[no-untyped-def]
    """Undo `_place_buffer`."""
    for s in range(state.first[b], state.last[b]):
        state.floor[s] = trail[t + s - state.first[b]]
        state.rest[s] += state.size[b]
        state.waits[s] += 1
        state.cross[s] += s > state.first[b]
    state.code[state.first[b]] += state.codes[b]
    state.placed[b] = False


_NEW, _NEXT, _DEAD = 0, 1, 2  # action at a depth: compute its branches, try the next one, backtrack


@compiled
def search_ledges(state, dead, height, work):  # type: ignore[no-untyped-def]
    """Search depth first until an answer or for `work` iterations of an inner loop; the offsets are left in the state.

    Returns
    -------
    verdict, done
        One of `_FOUND`, `_IMPOSSIBLE` and `_UNDECIDED`; iterations done.
    """
    n, n_sections, n_words = len(state.size), len(state.floor), state.reach.shape[1]
    deepest = 4 * (n + n_sections) + 8
    section, rise, chosen = np.zeros((3, deepest), np.int64)
    key, blame = np.zeros(deepest, np.uint64), np.zeros((deepest, n_words), np.uint64)
    branch, next_, undo = np.zeros((3, deepest + 1), np.int64)  # per depth: first branch, next branch, start in `trail`
    branches = np.empty(64 * n + 4096, np.int64)
    trail = np.empty(len(state.members) + deepest, np.int64)
    why = np.zeros(n_words, np.uint64)  # conflicting sections of the branch just abandoned
    mask = np.uint64(len(dead) - 1)
    done, d, n_left, todo = 0, 0, n, _NEW
    while True:
        if todo == _NEW:
            if n_left == 0:
                return _FOUND, done
            if done > work or d + 2 > deepest or branch[d] + n > len(branches):
                return _UNDECIDED, done
            left, right, s, key[d] = _lowest_ledge(state, height)
            done += 4 * (right - left)
            if dead[key[d] & mask] == key[d]:
                why[:] = 0
                for q in range(left, right):
                    why[q >> 6] |= np.uint64(1) << np.uint64(q & 63)
                todo = _DEAD
                continue
            blame[d] = 0
            section[d] = s
            found, rise[d], steps = _branches(state, s, height, branches[branch[d] :], blame[d])
            done += steps
            branch[d + 1], next_[d] = branch[d] + found, branch[d]
            todo = _NEXT
        elif todo == _NEXT:
            i, s = next_[d], section[d]
            next_[d] += 1
            if i < branch[d + 1]:
                b = branches[i]
                if not _place_buffer(state, b, height, trail, undo[d], blame[d]):
                    continue
                n_left -= 1
                done += 4 * (state.last[b] - state.first[b])
                chosen[d], undo[d + 1] = b, undo[d] + state.last[b] - state.first[b]
            elif i == branch[d + 1]:
                if rise[d] + state.rest[s] > height:
                    continue
                trail[undo[d]], state.floor[s] = state.floor[s], rise[d]
                chosen[d], undo[d + 1] = -1, undo[d] + 1
            else:
                dead[key[d] & mask] = key[d]
                for w in range(n_words):  # element by element: array expressions take seconds to compile
                    why[w] = blame[d, w]
                todo = _DEAD
                continue
            d += 1
            todo = _NEW
        else:
            d -= 1
            if d < 0:
                return _IMPOSSIBLE, done
            s, b = section[d], chosen[d]
            if b >= 0:
                _unplace_buffer(state, b, trail, undo[d])
                n_left += 1
                met = False
                for w in range(n_words):
                    met |= why[w] & state.reach[b, w] != 0
            else:
                state.floor[s] = trail[undo[d]]
                met = (why[s >> 6] >> np.uint64(s & 63)) & np.uint64(1) != np.uint64(0)
            if met:
                for w in range(n_words):
                    blame[d, w] |= why[w]
                todo = _NEXT
