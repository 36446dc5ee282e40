"""The tree search behind `layout`: from the bottom up, which buffer lies next on the lowest ledge?

Steps at which the same buffers live, or fewer than at a neighbour, tell nothing new: what is left are *sections*, the
maximal cliques of the interval graph. Above what is placed each section has a *floor*::

    height asked for  - - - - - - - - - - - - -
                                                   floor + bytes still to place <= height, in every section:
          +-----+           +-----+                else this branch is dead
          |     |           |     +-----+
          |     |   ledge   |     |     |          either a buffer that fits on the ledge lies there,
          |     +-----------+     |     |          or the floor rises to where the next could lie at all
          +-----+-----------+-----+-----+
            0     1  2   3    4     5              sections

Every pile can be pushed down until each buffer rests on another or on the ground, so the lowest ledge and its tightest
section leave two kinds of branches: one for each buffer that fits on the ledge there, and one in which none does. What
keeps the tree small:

- *Parts*: where no buffer left spans two sections the sides are independent; the leftmost is finished first.
- *Backjumping*: a dead branch names the sections that killed it. Choices that touched none of them are skipped
  (conflict-directed backjumping; Prosser, 1993).
- *Memory*: a part with given floors and buffers that was found impossible is recognised (a table of hashes).
- *Restarts*: a search that meets no answer soon seldom does later, so the order of branches is drawn anew after a
  while (Luby, Sinclair and Zuckerman, 1993). The table stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from onnx_remat.memory.problem import Flags, Longs
from onnx_remat.process.compiled import compiled

Codes = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]

_MOST_WORDS = 4_000_000  # of the sets of sections that the buffers live in: larger inputs are left to the local search
_PLAIN = ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0))  # weights of duration and size in the first orders of branches
_TABLE = 1 << 20
_FOUND, _IMPOSSIBLE, _UNDECIDED = 1, 2, 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a search has come to: offsets, or that there are none, or neither."""

    offsets: Longs | None
    impossible: bool


@dataclass(frozen=True, slots=True)
class Tree:
    """An input of the search; arrays as in `sections`, and what is known to be impossible."""

    first: Longs
    last: Longs
    size: Longs
    codes: Codes
    dead: Codes

    @staticmethod
    def of(first: Longs, last: Longs, size: Longs) -> Tree | None:
        """None if the input is too large."""
        if len(first) * int(last.max()) // 64 > _MOST_WORDS:
            return None
        codes = np.random.default_rng(0).integers(1, 1 << 63, len(first), dtype=np.uint64)
        return Tree(first, last, size, codes, np.zeros(_TABLE, np.uint64))

    def search(self, height: int, turn: int, work: int) -> Answer:
        """Look for a pile of at most `height`, restarting until the work is done; `turn` seeds the orders."""
        rng = np.random.default_rng(turn)
        ground = _ground(self.first, self.last, self.size, self.codes)
        lasts, restart = np.log(self.last - self.first), 0
        while work > 0:
            duration, bytes_ = (
                [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)][restart] if restart < 3 and not turn else rng.random(2)
            )
            noise = rng.standard_normal(len(self.size)) * rng.choice([0.0, 0.1, 0.3, 1.0])
            order = np.argsort(-(duration * lasts + bytes_ * np.log(self.size) + noise), kind="stable")
            share = _luby(restart + 1) * 2_000_000
            pile = _begin(ground, order)
            verdict, done = _search(pile, self.dead, height, min(share, work))
            if verdict != _UNDECIDED:
                return Answer(pile.offsets if verdict == _FOUND else None, verdict == _IMPOSSIBLE)
            work -= max(done, 1)
            restart += 1
        return Answer(None, False)


def sections(lower: Longs, upper: Longs, size: Longs) -> tuple[Longs, Longs, Longs]:
    """Lifetimes in sections: who overlaps whom stays the same.

    Returns
    -------
    first, last : int64 (n_buffers,)
        Buffer b lives in the sections first[b] .. last[b] - 1.
    live : int64 (n_sections,)
        Sum of the sizes that live in each.
    """
    n = len(lower)
    when = np.concatenate([upper, lower])
    begins = np.repeat([False, True], n)
    order = np.lexsort((begins, when))  # at the same step ends come first
    begins = begins[order]
    # A section ends where, after a begin, a buffer ends.
    closes = np.append(False, begins[:-1]) & ~begins
    number = np.empty(2 * n, np.int64)
    number[order] = np.cumsum(closes)
    last, first = number[:n], number[n:]
    live = np.zeros(int(last.max()) + 1, np.int64)
    np.add.at(live, first, size)
    np.subtract.at(live, last, size)
    return first, last, np.cumsum(live)[:-1]


@compiled
def highest(first, last, live):  # type: ignore[no-untyped-def]
    """The largest of `live` within each lifetime."""
    out = np.zeros(len(first), np.int64)
    for b in range(len(first)):
        for s in range(first[b], last[b]):
            out[b] = max(out[b], live[s])
    return out


def _luby(i: int) -> int:
    """The i-th term (from 1) of 1, 1, 2, 1, 1, 2, 4, ..."""
    while (i + 1) & i:
        i -= (1 << (i.bit_length() - 1)) - 1
    return (i + 1) // 2


class _Pile(NamedTuple):
    """The state of a search; sections are rows of the arrays after `offsets`."""

    first: Longs  # per buffer, as in `sections`
    last: Longs
    size: Longs
    codes: Codes  # random bits, for the hash
    reach: Codes  # (n_buffers, n_words): set of sections each buffer lives in
    placed: Flags
    offsets: Longs
    ptr: Longs  # buffers of each section, in the order of branches
    members: Longs
    starts: Longs  # the same of the buffers that begin in each
    beginners: Longs
    floor: Longs  # nothing to come lies lower
    rest: Longs  # bytes still to place
    waits: Longs  # buffers still to place
    cross: Longs  # of which also live in the section before
    code: Codes  # sum of the codes of those that begin here


def _ground(first: Longs, last: Longs, size: Longs, codes: Codes) -> _Pile:
    """Nothing placed, all floors on the ground; buffers of each section in no order yet."""
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
    return _Pile(first, last, size, codes, _reach(first, last), placed, offsets, *csr, floor, rest, waits, cross, code)


def _summed(n_sections: int, begin: Longs, end: Longs, what: Longs) -> Longs:
    """For each section the sum of `what` over those that span it, from `begin` to before `end`."""
    steps = np.zeros(n_sections + 1, np.int64)
    np.add.at(steps, begin, what)
    np.subtract.at(steps, end, what)
    return np.cumsum(steps)[:-1]


def _reach(first: Longs, last: Longs) -> Codes:
    """The sections from `first` to before `last` as sets of bits."""
    words, final = np.arange(-(-int(last.max()) // 64)), last - 1
    within = (words >= (first >> 6)[:, None]) & (words <= (final >> 6)[:, None])
    reach = np.where(within, ~np.uint64(0), np.uint64(0))
    rows = np.arange(len(first))
    reach[rows, first >> 6] &= ~np.uint64(0) << (first & 63).astype(np.uint64)
    reach[rows, final >> 6] &= ~np.uint64(0) >> (63 - (final & 63)).astype(np.uint64)
    return reach


def _begin(ground: _Pile, order: Longs) -> _Pile:
    """A pile to work on, with the buffers of each section in the order of branches."""
    lasts = (ground.last - ground.first)[order]
    ends = np.cumsum(lasts)
    section = np.arange(ends[-1]) + np.repeat(ground.first[order] - ends + lasts, lasts)
    small = section.astype(np.min_scalar_type(len(ground.floor)))  # sorted by radix, where they have 16 bits
    members = np.repeat(order, lasts)[np.argsort(small, kind="stable")]
    changing = ("placed", "offsets", "floor", "rest", "waits", "cross", "code")
    return ground._replace(members=members, **{name: getattr(ground, name).copy() for name in changing})


@compiled
def _ledge(pile, height):  # type: ignore[no-untyped-def]
    """The leftmost part, the tightest section of its lowest ledge, and a hash of the part.

    Returns
    -------
    left, right : int
        The part is the sections left .. right - 1.
    section : int
    key : uint64
    """
    n_sections = len(pile.floor)
    left = 0
    while pile.waits[left] == 0:
        left += 1
    s, best = left, left
    key = np.uint64(height)
    while True:
        low, slack = pile.floor[s], height - pile.floor[s] - pile.rest[s]
        if low < pile.floor[best] or (low == pile.floor[best] and slack < height - low - pile.rest[best]):
            best = s
        bits = np.uint64(low + 1) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(s) * np.uint64(0xC2B2AE3D27D4EB4F)
        bits = (bits ^ (bits >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9) + pile.code[s]
        key = (key ^ bits ^ (bits >> np.uint64(32))) * np.uint64(0x94D049BB133111EB)
        s += 1
        if s == n_sections or pile.cross[s] == 0:
            return left, s, best, key


@compiled
def _branches(pile, section, height, out, blame):  # type: ignore[no-untyped-def]
    """Buffers that may lie next on the ledge of `section`, and where its floor is if none does.

    Returns
    -------
    n_out : int
        Branches written to `out`; the sections the answer depends on are added to `blame`.
    rise : int
        The lowest offset above the ledge at which anything can lie in this section; of those that leave it too little
        room no more is known than that.
    done : int
        Steps of an inner loop.
    """
    level = pile.floor[section]
    slack = height - level - pile.rest[section]
    n_out, rise, done = 0, np.int64(1) << 62, 0
    left, right = section, section + 1
    for k in range(pile.ptr[section], pile.ptr[section + 1]):
        b = pile.members[k]
        done += 1
        if pile.placed[b]:
            continue
        blame |= pile.reach[b]
        done += pile.last[b] - pile.first[b] + len(blame)
        lowest = pile.floor[pile.first[b] : pile.last[b]].max()
        if lowest > level:
            rise = min(rise, lowest)
            continue
        left, right = min(left, pile.first[b]), max(right, pile.last[b])
        twin = False
        for j in range(n_out):
            c = out[j]
            if pile.first[c] == pile.first[b] and pile.last[c] == pile.last[b] and pile.size[c] == pile.size[b]:
                twin = True
        if not twin:
            out[n_out] = b
            n_out += 1
    # A buffer that fits but lies higher rests on one that is not in this section.
    if slack > 0 and n_out > 0:
        met = pile.ptr[left + 1] - pile.ptr[left]
        for k in range(met + pile.starts[right] - pile.starts[left + 1]):
            c = pile.members[pile.ptr[left] + k] if k < met else pile.beginners[pile.starts[left + 1] + k - met]
            done += 1
            if pile.placed[c] or pile.size[c] > slack or pile.first[c] <= section < pile.last[c]:
                continue
            blame |= pile.reach[c]
            done += pile.last[c] - pile.first[c] + len(blame)
            rise = min(rise, pile.floor[pile.first[c] : pile.last[c]].max() + pile.size[c])
    return n_out, rise, done


@compiled
def _put(pile, b, height, trail, t, blame):  # type: ignore[no-untyped-def]
    """Place a buffer on its ledge and note the floors below it; blame the section that overflows, if one does."""
    at = pile.floor[pile.first[b]]
    top = at + pile.size[b]
    for s in range(pile.first[b], pile.last[b]):
        if top + pile.rest[s] - pile.size[b] > height:
            blame[s >> 6] |= np.uint64(1) << np.uint64(s & 63)
            return False
    for s in range(pile.first[b], pile.last[b]):
        trail[t + s - pile.first[b]] = pile.floor[s]
        pile.floor[s] = top
        pile.rest[s] -= pile.size[b]
        pile.waits[s] -= 1
        pile.cross[s] -= s > pile.first[b]
    pile.code[pile.first[b]] -= pile.codes[b]
    pile.placed[b], pile.offsets[b] = True, at
    return True


@compiled
def _take(pile, b, trail, t):  # type: ignore[no-untyped-def]
    """Undo `_put`."""
    for s in range(pile.first[b], pile.last[b]):
        pile.floor[s] = trail[t + s - pile.first[b]]
        pile.rest[s] += pile.size[b]
        pile.waits[s] += 1
        pile.cross[s] += s > pile.first[b]
    pile.code[pile.first[b]] += pile.codes[b]
    pile.placed[b] = False


_NEW, _NEXT, _DEAD = 0, 1, 2  # what to do at a depth: branch, go on with its branches, return from the one below


@compiled
def _search(pile, dead, height, work):  # type: ignore[no-untyped-def]
    """Depth first, until an answer or `work` steps of an inner loop; the offsets are left in the pile.

    Returns
    -------
    verdict, done
    """
    n, n_sections, n_words = len(pile.size), len(pile.floor), pile.reach.shape[1]
    if pile.rest.max() > height:
        return _IMPOSSIBLE, 0
    deepest = 4 * (n + n_sections) + 8
    section, rise, chosen = np.zeros((3, deepest), np.int64)
    key, blame = np.zeros(deepest, np.uint64), np.zeros((deepest, n_words), np.uint64)
    branch, next_, undo = np.zeros((3, deepest + 1), np.int64)  # where those of each depth start in the two stacks
    branches = np.empty(64 * n + 4096, np.int64)
    trail = np.empty(len(pile.members) + deepest, np.int64)
    why = np.zeros(n_words, np.uint64)  # the sections that killed the branch just left
    mask = np.uint64(len(dead) - 1)
    done, d, n_left, todo = 0, 0, n, _NEW
    while True:
        if todo == _NEW:
            if n_left == 0:
                return _FOUND, done
            if done > work or d + 2 > deepest or branch[d] + n > len(branches):
                return _UNDECIDED, done
            left, right, s, key[d] = _ledge(pile, height)
            done += 4 * (right - left)
            if dead[key[d] & mask] == key[d]:
                why[:] = 0
                for q in range(left, right):
                    why[q >> 6] |= np.uint64(1) << np.uint64(q & 63)
                todo = _DEAD
                continue
            blame[d] = 0
            section[d] = s
            found, rise[d], steps = _branches(pile, s, height, branches[branch[d] :], blame[d])
            done += steps
            branch[d + 1], next_[d] = branch[d] + found, branch[d]
            todo = _NEXT
        elif todo == _NEXT:
            i, s = next_[d], section[d]
            next_[d] += 1
            if i < branch[d + 1]:
                b = branches[i]
                if not _put(pile, b, height, trail, undo[d], blame[d]):
                    continue
                n_left -= 1
                done += 4 * (pile.last[b] - pile.first[b])
                chosen[d], undo[d + 1] = b, undo[d] + pile.last[b] - pile.first[b]
            elif i == branch[d + 1]:
                if rise[d] + pile.rest[s] > height:
                    continue
                trail[undo[d]], pile.floor[s] = pile.floor[s], rise[d]
                chosen[d], undo[d + 1] = -1, undo[d] + 1
            else:
                dead[key[d] & mask] = key[d]
                for w in range(n_words):  # element by element: expressions of arrays take seconds to compile
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
                _take(pile, b, trail, undo[d])
                n_left += 1
                met = False
                for w in range(n_words):
                    met |= why[w] & pile.reach[b, w] != 0
            else:
                pile.floor[s] = trail[undo[d]]
                met = (why[s >> 6] >> np.uint64(s & 63)) & np.uint64(1) != np.uint64(0)
            if met:
                for w in range(n_words):
                    blame[d, w] |= why[w]
                todo = _NEXT
