"""What ONNX Runtime's arena makes of a plan: buffers -> chunks of regions -> bytes taken from the system.

With its arena on, as it is by default, ONNX Runtime takes memory in *regions*, hands out *chunks* of them, and gives no
region back while the session lives. The rules (bfc_arena.cc) are deterministic, hence emulated here:

1. A request is rounded up to 256 bytes and gets the smallest free chunk that is large enough; of equals, the one at the
   lowest address.
2. If that chunk has twice the bytes or more, or 128 MiB more, the rest is split off; else it is handed out whole.
3. Where no chunk is large enough there is a new region: as large as the request (``kSameAsRequested``), or of a size
   that starts at 1 MiB and doubles until it will do, at every region once at least, up to 1 GiB
   (``kNextPowerOfTwo``, the default).
4. A chunk that comes back merges with its free neighbours in the region.

Where regions lie is up to the system. Each is reckoned to lie below those before it, as Linux maps them. Initializers
have memory of their own, and so do inputs, unless they are what an earlier step put out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from onnx_remat.memory.buffers import Timeline
from onnx_remat.memory.problem import Flags, Ints, Longs, Schedule
from onnx_remat.process.compiled import compiled, inlined

MOST_STEPS = 50
"""Steps after which an arena is looked at where state stays in it: on the samples it grows no more then, or by 4 %."""

_MOST_EVENTS = 1_000_000  # in all these steps: those of larger graphs are fewer, three at least

_ROOM = 1024  # chunks at first, and two for every buffer
_LANES = 10  # of the free chunks: good for a million, see `_smallest`
UNIT = 256
"""Bytes to a multiple of which every request is rounded up."""

MAX_DEAD = 128 << 20
"""Bytes to spare from which on a chunk is split in any case."""

_FIRST_REGION = 1 << 20
_LARGEST_GROWTH = 1 << 30

_AT, _SIZE, _LEFT, _RIGHT, _REGION, _FREE = range(6)
"""What is known of a chunk: address, bytes, neighbours in its region or -1, region, whether nobody has it."""


@dataclass(frozen=True, slots=True)
class Requests:
    """A step as the allocator sees it.

    Attributes
    ----------
    events : int32 (n_events,)
        In order of time, ``b`` where buffer ``b`` is asked for, ``~b`` where it is given back. What is never given back
        outlives the step.
    size : int64 (n_buffers,)
        Bytes of each buffer.
    owner : int32 (n_buffers,)
        Value the buffer is first for, -1 if it is a kernel's scratch memory.
    """

    events: Ints
    size: Longs
    owner: Ints


@dataclass(frozen=True, slots=True)
class Arena:
    """What an arena has come to after some steps; all in bytes.

    Attributes
    ----------
    in_use : int
        The most that was handed out at once, with what rules 1 and 2 add.
    touched : int
        What of the regions was ever handed out: the rest is never written, and so is not in a process's memory.
    reserved : int
        All regions. With ``kSameAsRequested``, which takes no more than it must, the smallest limit that will do.
    """

    in_use: int
    touched: int
    reserved: int

    @property
    def resident(self) -> int:
        """Bytes of a process's memory: what was touched, and eight of bookkeeping for every 256 of the regions."""
        return self.touched + self.reserved // 32


def requests(order: Schedule, timeline: Timeline, scratch: Sequence[Sequence[int]], first: Sequence[bool]) -> Requests:
    """Spell out a simulated step: op by op its outputs, its scratch memory, and what dies with it.

    Parameters
    ----------
    order : Schedule
    timeline : Timeline
        What `buffers.simulate` says of it.
    scratch : sequence of sequences of int
        Bytes of every block of scratch memory that is asked of the arena, per op.
    first : sequence of bool
        Whether an op asks for its scratch memory before it asks for its outputs.
    """
    blocks = [(step, size, first[op]) for step, op in enumerate(order.order) for size in scratch[op]]
    of_step, of_block, early = np.array(blocks, np.int64).reshape(-1, 3).T
    n_buffers, last = len(timeline.size), len(order.order) - 1
    buffers, extra = np.arange(n_buffers), n_buffers + np.arange(len(blocks))
    dying = np.flatnonzero(timeline.end < last)
    start, end = timeline.start.astype(np.int64), timeline.end.astype(np.int64)
    when = np.concatenate([5 * start + 1, 5 * of_step + 2 - 2 * early, 5 * of_step + 3, 5 * end[dying] + 4])
    what = np.concatenate([buffers, extra, ~extra, ~dying]).astype(np.int32)
    return Requests(
        events=what[np.argsort(when, kind="stable")],
        size=np.concatenate([timeline.size, of_block]),
        owner=np.concatenate([timeline.owner, np.full(len(blocks), -1, np.int32)]),
    )


def run(step: Requests, *, doubling: bool, kept: Flags | None = None, steps: int | None = None) -> Arena:
    """Let a fresh arena serve a step again and again.

    Parameters
    ----------
    step : Requests
    doubling : bool
        ``kNextPowerOfTwo`` if true, else ``kSameAsRequested``.
    kept : bool (n_values,), optional
        Outputs that the next step reads: they come back at its end, all others at the end of their own step.
    steps : int, optional
        How often; `MOST_STEPS` unless given, fewer of a large step. Where nothing is kept, two or three tell all.
    """
    if steps is None:
        steps = min(MOST_STEPS, max(3, _MOST_EVENTS // max(1, len(step.events))))
    keep = np.zeros(len(step.size), np.bool_) if kept is None else (step.owner >= 0) & kept[step.owner]
    room = _ROOM + 2 * len(step.size)
    while True:
        books = _Books.of(room, len(step.size))
        in_use, n_regions, reserved = replay(step.events, step.size, keep, bool(keep.any()), steps, doubling, books)
        if reserved >= 0:
            return Arena(int(in_use), int(books.regions[1, :n_regions].sum()), int(reserved))
        room *= 2


class _Books(NamedTuple):
    """What an arena keeps, made here: arrays made in compiled code take seconds to compile.

    Attributes
    ----------
    chunks : int64 (6, room)
    lanes : int32 (_LANES, room + 1)
        Free chunks by size and address, see `_smallest`; the last column leads to the first of each lane.
    before : int64 (_LANES,)
    spare : int64 (room,)
        Numbers of chunks that were merged into others.
    regions : int64 (2, room)
        Address, and bytes from there that were handed out.
    of_step, of_last : int64 (n_buffers,)
        Chunk of each buffer; the same of what was kept from the step before.
    """

    chunks: Longs
    lanes: Ints
    before: Longs
    spare: Longs
    regions: Longs
    of_step: Longs
    of_last: Longs

    @staticmethod
    def of(room: int, n_buffers: int) -> _Books:
        return _Books(
            np.full((6, room), -1, np.int64), np.full((_LANES, room + 1), -1, np.int32),
            np.zeros(_LANES, np.int64), np.empty(room, np.int64),
            np.zeros((2, room), np.int64), np.full(n_buffers, -1, np.int64), np.full(n_buffers, -1, np.int64),
        )  # fmt: skip


@compiled
def replay(events, sizes, keep, any_kept, steps, doubling, books):  # type: ignore[no-untyped-def]
    """Most bytes in use, number of regions, bytes of them all: -1 where the books have too little room."""
    n_buffers = len(sizes)
    chunks, spare, regions, of_step, of_last = books.chunks, books.spare, books.regions, books.of_step, books.of_last
    # Not literals: the functions that take these would be compiled for the literals and for integers.
    n_chunks, n_spare, n_regions = np.int64(0), np.int64(0), np.int64(0)
    growth, reserved, in_use, most = _FIRST_REGION, np.int64(0), 0, 0
    for _ in range(steps):
        before = reserved
        for i in range(len(events) + 2 * n_buffers):
            if i < len(events) and events[i] >= 0:
                b = events[i]
                asked = (sizes[b] + UNIT - 1) // UNIT * UNIT
                if asked == 0:
                    continue
                if n_chunks + 2 > len(spare):
                    return most, n_regions, np.int64(-1)
                c = _smallest(books, asked, -reserved)
                if c >= 0:
                    _remove(books, c)
                else:
                    extent = asked
                    if doubling and asked <= _LARGEST_GROWTH:
                        ready = asked <= growth
                        while growth < asked:
                            growth *= 2
                        extent = growth
                        if ready:
                            growth = min(2 * growth, _LARGEST_GROWTH)
                    reserved += extent
                    c, n_chunks, n_spare = _number(spare, n_spare, n_chunks)
                    chunks[_AT, c], chunks[_SIZE, c], chunks[_REGION, c] = -reserved, extent, n_regions
                    chunks[_LEFT, c], chunks[_RIGHT, c], chunks[_FREE, c] = -1, -1, 0
                    regions[0, n_regions] = -reserved
                    n_regions += 1
                rest = chunks[_SIZE, c] - asked
                if rest >= asked or rest >= MAX_DEAD:
                    r, n_chunks, n_spare = _number(spare, n_spare, n_chunks)
                    right = chunks[_RIGHT, c]
                    chunks[_AT, r], chunks[_SIZE, r] = chunks[_AT, c] + asked, rest
                    chunks[_LEFT, r], chunks[_RIGHT, r] = c, right
                    chunks[_REGION, r], chunks[_FREE, r] = chunks[_REGION, c], 0
                    if right >= 0:
                        chunks[_LEFT, right] = r
                    chunks[_SIZE, c], chunks[_RIGHT, c] = asked, r
                    _insert(books, r)
                of_step[b] = c
                in_use += chunks[_SIZE, c]
                most = max(most, in_use)
                home = chunks[_REGION, c]
                regions[1, home] = max(regions[1, home], chunks[_AT, c] + asked - regions[0, home])
                continue
            # A chunk comes back: in the step, or after it what was kept from the step before, then the step's own.
            if i < len(events):
                b, holder = ~events[i], of_step
            else:
                b, holder = (i - len(events)) % n_buffers, of_last if i < len(events) + n_buffers else of_step
            c = holder[b]
            holder[b] = -1
            if i >= len(events) + n_buffers and keep[b]:
                of_last[b] = c
                continue
            if c < 0:
                continue
            in_use -= chunks[_SIZE, c]
            for side in (_RIGHT, _LEFT):
                other = chunks[side, c]
                if other < 0 or not chunks[_FREE, other]:
                    continue
                _remove(books, other)
                a, z = (c, other) if side == _RIGHT else (other, c)
                chunks[_SIZE, a] += chunks[_SIZE, z]
                chunks[_RIGHT, a] = chunks[_RIGHT, z]
                if chunks[_RIGHT, z] >= 0:
                    chunks[_LEFT, chunks[_RIGHT, z]] = a
                spare[n_spare] = z
                n_spare += 1
                c = a
            _insert(books, c)
        if reserved == before and not any_kept:
            break  # everything is free again: the next step is like this one
    return most, n_regions, reserved


@inlined
def _smallest(books, size, at):  # type: ignore[no-untyped-def]
    """The first free chunk, by size and then address, of this size at this address or more; a negative if none is.

    The free chunks are a skip list (Pugh, 1990): in each lane the next chunk that it leads to, every fourth of the lane
    below. What comes before is left in `books.before`, lane by lane.
    """
    chunks, lanes, before = books.chunks, books.lanes, books.before
    c = lanes.shape[1] - 1  # before all chunks
    for lane in range(len(lanes) - 1, -1, -1):
        while True:
            d = lanes[lane, c]
            if d < 0 or chunks[_SIZE, d] > size or (chunks[_SIZE, d] == size and chunks[_AT, d] >= at):
                break
            c = np.int64(d)
        before[lane] = c
    return np.int64(lanes[0, c])


@inlined
def _height(c, most):  # type: ignore[no-untyped-def]
    """In how many lanes a chunk is: by its number, which is as good as by chance."""
    bits, height = (np.uint64(c) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32), 1
    while height < most and bits & np.uint64(3) == np.uint64(0):
        bits >>= np.uint64(2)
        height += 1
    return height


@inlined
def _insert(books, c):  # type: ignore[no-untyped-def]
    _smallest(books, books.chunks[_SIZE, c], books.chunks[_AT, c])
    for lane in range(_height(c, len(books.lanes))):
        books.lanes[lane, c] = books.lanes[lane, books.before[lane]]
        books.lanes[lane, books.before[lane]] = c
    books.chunks[_FREE, c] = 1


@inlined
def _remove(books, c):  # type: ignore[no-untyped-def]
    _smallest(books, books.chunks[_SIZE, c], books.chunks[_AT, c])
    for lane in range(_height(c, len(books.lanes))):
        books.lanes[lane, books.before[lane]] = books.lanes[lane, c]
    books.chunks[_FREE, c] = 0


@inlined
def _number(spare, n_spare, n_chunks):  # type: ignore[no-untyped-def]
    """A number for a new chunk."""
    if n_spare:
        return spare[n_spare - 1], n_chunks, n_spare - 1
    return n_chunks, n_chunks + 1, n_spare
