"""Lifetimes and sizes -> offsets in one slab: a static memory plan.

Each buffer is a rectangle: its lifetime is given, its offset is free. No two may overlap, and the layout should be as
low as possible::

    bytes
      ^   +---------+  +-----------+      <- height: bytes of the slab
      |   |    c    |  |     e     |
      |   +----+----+--+--+--------+
      |   | b  |    |  d  |               the gap left of d is wasted: no buffer
      |   +----+----+-----+------+        live then is small enough for it
      |   |         a            |
      0   +----------------------+------> steps
          lower of a             upper of a

No layout is lower than the largest sum of sizes live at once; every stage stops when it reaches this bound:

1. *Greedy*: place buffer by buffer, longest, largest or busiest first, into a gap that is free for its whole lifetime.
2. *Local search*: move the buffers at the top of the best layout to earlier places of the order, and place again.
3. *Tree search*, for a target height between the bound and the best so far, in two ways that find different layouts:
   place buffers in the order of their offsets (`layout_ascending`), and on the lowest ledge (`layout_ledges`).

Stages 2 and 3 alternate; a turn is a fixed amount of work, until the effort or the time is used up. The problem
(dynamic storage allocation) is NP-hard (Garey and Johnson, SR2). The sequence of work depends on the input alone: the
same input with the same effort gives the same layout.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from onnx_remat.memory import layout_ascending, layout_ledges
from onnx_remat.memory.layout_sections import highest, sections
from onnx_remat.memory.problem import Longs
from onnx_remat.process.compiled import compiled

ALIGNMENT = 64
"""Bytes: offsets are multiples, as ONNX Runtime's own allocator aligns for vector instructions."""

EFFORT = 20
"""Default number of search turns; a turn takes about a third of a second."""

_WORK = 100_000_000  # inner-loop iterations per tree and turn, about a nanosecond each
_LOCAL_WORK = 25_000_000  # of the local search per turn, likewise
_GREEDY_WORK = 1_000_000_000  # inner-loop iterations of the greedy start, beyond the first orders
_FEWEST_ORDERS = 3
_BOUND_TURNS = 6  # one of so many turns searches for a layout at the bound
_REACHES = (0.25, 0.95)  # of target heights, from the bound (0) to the best (1): the boldest, and where to begin again


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets of buffers in a slab.

    Attributes
    ----------
    offsets : int64 (n_buffers,)
        First byte of each buffer, a multiple of the alignment.
    height : int
        Bytes of the slab.
    lower_bound : int
        Largest sum of sizes (rounded up to the alignment) live at once: no slab is smaller.
    optimal : bool
        Whether no smaller slab exists: the bound is reached, or a search ruled all smaller heights out.
    turns : int
        Turns of search that ran.
    """

    offsets: Longs
    height: int
    lower_bound: int
    optimal: bool
    turns: int


def solve(
    lower: ArrayLike,
    upper: ArrayLike,
    size: ArrayLike,
    *,
    alignment: int = ALIGNMENT,
    effort: int = EFFORT,
    time_limit: float | None = None,
) -> Layout:
    """Find offsets such that no two buffers live at the same time share a byte.

    Parameters
    ----------
    lower, upper : int (n_buffers,)
        A buffer lives in the half-open interval [lower, upper).
    size : int (n_buffers,)
        Bytes, rounded up to the alignment.
    alignment : int
        Bytes that every offset is a multiple of.
    effort : int
        Turns of search after the greedy start, none if 0.
    time_limit : float, optional
        Seconds after which no further turn begins. If it takes effect, the layout depends on the machine.

    Raises
    ------
    ValueError
        If the arrays differ in length, a lifetime is empty, a size is negative or the alignment is not positive.

    Examples
    --------
    >>> solve([0, 1, 2], [2, 3, 4], [64, 128, 64]).offsets.tolist()
    [128, 0, 128]
    """
    began = time.monotonic()
    start, stop, units = _checked(lower, upper, size, alignment)
    # Empty buffers may lie anywhere; the others are measured in units that divide all sizes.
    real = np.flatnonzero(units)
    offsets = np.zeros(len(units), np.int64)
    if not len(real):
        return Layout(offsets, 0, 0, True, 0)
    start, stop, units = start[real], stop[real], units[real]
    unit = int(np.gcd.reduce(units))
    units, unit = units // unit, unit * alignment
    first, last, live = sections(start, stop, units)
    bound = int(live.max())
    best, order, height = _greedy(first, last, units, live)
    proven, turn, reach = bound, 0, 0.5
    trees = _trees(first, last, units, live, stop - start) if effort and height > bound else ()
    while turn < effort and height > proven and (time_limit is None or time.monotonic() - began < time_limit):
        share, before = 0.0 if turn % _BOUND_TURNS == 0 else reach, (height, proven)
        best, order, at = _improve(order, best, first, last, units, height, proven, _LOCAL_WORK, turn)
        height = int(at)
        for tree in trees:
            if height <= proven:
                break
            target = int(proven + share * (height - 1 - proven))
            answer = tree.search(target, turn, _WORK)
            if answer.offsets is not None:
                best, order = answer.offsets, np.argsort(answer.offsets, kind="stable")
                height = int((best + units).max())
            elif answer.impossible:
                proven = target + 1
        if share and (height, proven) == before:
            reach = (1 + reach) / 2 if reach < _REACHES[1] else _REACHES[0]
        turn += 1
    offsets[real] = best * unit
    return Layout(offsets, height * unit, bound * unit, height <= proven, turn)


def _trees(
    first: Longs, last: Longs, size: Longs, live: Longs, steps: Longs
) -> tuple[layout_ascending.Tree | layout_ledges.Tree, ...]:
    """Return the inputs of the tree searches, without those that are too large."""
    both = layout_ascending.Tree.of(first, last, size, live, steps), layout_ledges.Tree.of(first, last, size)
    return tuple(tree for tree in both if tree is not None)


def load_greedy() -> None:
    """Load, or compile at first use, the kernels that every call of `solve` needs."""
    one = np.ones(1, np.int64)
    _greedy(one - 1, one, one, one)
    _improve(one - 1, one - 1, one - 1, one, one, 2, 1, 1, 0)


def load_search() -> None:
    """Load, or compile at first use, the first tree search: needed where other stages miss the bound."""
    one = np.ones(1, np.int64)
    tree = layout_ascending.Tree.of(one - 1, one, one, one, one)
    assert tree is not None
    tree.search(1, 0, 1)


def load_later_searches() -> None:
    """Load, or compile at first use, the second tree search: needed where the first one misses the bound."""
    one = np.ones(1, np.int64)
    tree = layout_ledges.Tree.of(one - 1, one, one)
    assert tree is not None
    tree.search(1, 0, 1)


def _checked(lower: ArrayLike, upper: ArrayLike, size: ArrayLike, alignment: int) -> tuple[Longs, Longs, Longs]:
    """Return the arrays as int64, sizes in units of the alignment."""
    start, stop, nbytes = (np.asarray(column, np.int64) for column in (lower, upper, size))
    if not start.shape == stop.shape == nbytes.shape or start.ndim != 1:
        raise ValueError(
            f"lower, upper and size must be flat and equally long, not {start.shape, stop.shape, nbytes.shape}"
        )
    if alignment < 1:
        raise ValueError(f"alignment must be at least 1, not {alignment}")
    for wrong, what in ((start >= stop, "an empty lifetime"), (nbytes < 0, "a negative size")):
        if wrong.any():
            raise ValueError(f"buffer {int(np.argmax(wrong))} has {what}")
    return start, stop, -(-nbytes // alignment)


def _greedy(first: Longs, last: Longs, size: Longs, live: Longs) -> tuple[Longs, Longs, int]:
    """Return offsets, order and height of the best of several orders and two ways to choose a gap."""
    lasts = last - first
    pressure = highest(first, last, live)
    keys = [
        (-size, -lasts),
        (-lasts, -size),
        (-size, -lasts * size),
        (-size, -lasts, -pressure),
        (-size, first),
        (first, -size),
    ]
    bound, height = int(live.max()), int(size.sum()) + 1
    best = chosen = np.empty(0, np.int64)
    tries = [(key, tightest) for key in keys for tightest in (True, False)]
    for key, tightest in tries[: max(_FEWEST_ORDERS, _GREEDY_WORK // len(size) ** 2)]:
        order = np.lexsort(key)
        offsets, at = place(order, first, last, size, tightest, height)
        if at < height:
            best, chosen, height = offsets, order, int(at)
        if height == bound:
            break
    return best, chosen, height


@compiled
def place(order, first, last, size, tightest, limit):  # type: ignore[no-untyped-def]
    """Place buffers one by one into the tightest or the lowest gap; stop as soon as the height reaches `limit`.

    Returns
    -------
    offsets, height
        Of the buffers placed so far, if stopped.
    """
    n = len(order)
    offsets = np.zeros(n, np.int64)
    placed = np.empty((4, n), np.int64)  # placed buffers, sorted by offset: offset, top, first, last
    height = np.int64(0)
    for k in range(n):
        b = order[k]
        a, z, bytes_ = first[b], last[b], size[b]
        top, at, slack = np.int64(0), np.int64(-1), np.int64(1) << 62
        for i in range(k):
            if placed[2, i] < z and a < placed[3, i]:
                gap = placed[0, i] - top
                if bytes_ <= gap < slack + bytes_:
                    at, slack = top, gap - bytes_
                    if not tightest or slack == 0:
                        break
                top = max(top, placed[1, i])
        if at < 0:
            at = top
        offsets[b] = at
        height = max(height, at + bytes_)
        if height >= limit:
            return offsets, height
        rank, above = 0, k  # binary search by hand: np.searchsorted takes longer to compile than this whole function
        while rank < above:
            middle = (rank + above) // 2
            if placed[0, middle] < at:
                rank = middle + 1
            else:
                above = middle
        for row in range(4):
            for j in range(k, rank, -1):
                placed[row, j] = placed[row, j - 1]
        placed[0, rank], placed[1, rank], placed[2, rank], placed[3, rank] = at, at + bytes_, a, z
    return offsets, height


@compiled
def _improve(order, offsets, first, last, size, height, target, work, seed):  # type: ignore[no-untyped-def]
    """Repeatedly move the buffers at the top to an earlier place of the order, and keep the result if it is not higher.

    Returns
    -------
    offsets, order, height
        The best found; the arguments themselves if nothing is better.
    """
    n = len(order)
    state = np.uint64(seed * 2 + 1) * np.uint64(0x9E3779B97F4A7C15)
    best, chosen = offsets, order
    done = 0
    while done < work and height > target:
        done += n * n // 4 + n
        trial = chosen.copy()
        state ^= state << np.uint64(13)
        state ^= state >> np.uint64(7)
        state ^= state << np.uint64(17)
        tightest = (state >> np.uint64(33)) & np.uint64(3) != np.uint64(0)
        moved = 0
        for k in range(n):
            b = chosen[k]
            state ^= state << np.uint64(13)
            state ^= state >> np.uint64(7)
            state ^= state << np.uint64(17)
            at_top = best[b] + size[b] >= height
            if k > 0 and (at_top or (state >> np.uint64(20)) % np.uint64(n) < np.uint64(2)):
                to = np.int64((state >> np.uint64(11)) % np.uint64(k))
                for i in range(k, to, -1):
                    trial[i] = trial[i - 1]
                trial[to] = b
                moved += 1
        if not moved:
            continue
        found, at = place(trial, first, last, size, tightest, height + 1)
        if at <= height:
            best, chosen, height = found, trial, at
    return best, chosen, height
