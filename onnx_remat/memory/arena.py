"""Emulation of ONNX Runtime's arena: buffers -> chunks of regions -> bytes taken from the system.

With its arena on (the default), ONNX Runtime allocates memory from the system in *regions*, serves requests with
*chunks* of them, and releases no region while the session lives. The rules (bfc_arena.cc) are deterministic, hence
emulated here:

1. A request is rounded up to a multiple of 256 bytes and served with the smallest free chunk that is large enough; of
   equals, the one at the lowest address (best fit).
2. If that chunk is at least twice as large as the request, or 128 MiB larger, the remainder is split off as a free
   chunk; otherwise the whole chunk is used.
3. If no chunk is large enough, the arena adds a region: as large as the request (``kSameAsRequested``), or of a size
   that starts at 1 MiB and doubles until it suffices, at least once per region, up to 1 GiB
   (``kNextPowerOfTwo``, the default).
4. A freed chunk merges with its free neighbours in the region.

The system chooses the addresses of regions. The emulation assumes that each lies below the earlier ones, as Linux maps
them. Initializers have memory of their own, and so do inputs, unless they are outputs of an earlier step.
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
"""Steps to emulate where state stays in the arena: on the samples it stops growing by then, or grows by 4 % more."""

_MOST_EVENTS = 1_000_000  # over all steps: large graphs are emulated for fewer steps, at least three

_FIRST_CAPACITY = 1024  # chunks in a new table, plus two per buffer
_LANES = 10  # of the skip list of free chunks: enough for a million, see `_best_fit`
UNIT = 256
"""Bytes: every request is rounded up to a multiple."""

MAX_DEAD = 128 << 20
"""Bytes of slack at which a chunk is split in any case (``max_dead_bytes_per_chunk``)."""

_FIRST_REGION = 1 << 20  # bytes
_LARGEST_GROWTH = 1 << 30  # bytes

_AT, _SIZE, _LEFT, _RIGHT, _REGION, _FREE = range(6)
"""Rows of `_ChunkTable.chunks`: address, bytes, neighbours in the region (-1 for none), region, whether it is free."""


@dataclass(frozen=True, slots=True)
class Requests:
    """A step as the allocator sees it.

    Attributes
    ----------
    events : int32 (n_events,)
        In order of time, ``b`` where buffer ``b`` is allocated, ``~b`` where it is freed. A buffer that is never freed
        outlives the step.
    size : int64 (n_buffers,)
        Bytes of each buffer.
    owner : int32 (n_buffers,)
        First value that the buffer is allocated for, -1 if it is a kernel's workspace.
    """

    events: Ints
    size: Longs
    owner: Ints


@dataclass(frozen=True, slots=True)
class Arena:
    """Size of an arena after some steps, in bytes.

    Attributes
    ----------
    in_use : int
        Peak of the chunks in use, including the slack of rules 1 and 2.
    touched : int
        Part of the regions that was ever in use: the rest is never written, so it is not resident in the process.
    reserved : int
        All regions. With ``kSameAsRequested``, which reserves no more than it must, the smallest sufficient limit.
    """

    in_use: int
    touched: int
    reserved: int

    @property
    def resident(self) -> int:
        """Resident bytes of the process: the touched part, and eight of bookkeeping for every 256 of the regions."""
        return self.touched + self.reserved // 32


def requests(order: Schedule, timeline: Timeline, scratch: Sequence[Sequence[int]], first: Sequence[bool]) -> Requests:
    """Return the allocator calls of a simulated step: per op its outputs, its workspace, and the buffers it frees.

    Parameters
    ----------
    order : Schedule
    timeline : Timeline
        Result of `buffers.simulate` for it.
    scratch : sequence of sequences of int
        Bytes of every block of workspace that an op allocates from the arena, per op.
    first : sequence of bool
        Whether an op allocates its workspace before its outputs.
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
    """Emulate a fresh arena that serves a step repeatedly.

    Parameters
    ----------
    step : Requests
    doubling : bool
        ``kNextPowerOfTwo`` if true, else ``kSameAsRequested``.
    kept : bool (n_values,), optional
        Outputs that the next step reads: they are freed at its end, all others at the end of their own step.
    steps : int, optional
        Repetitions; `MOST_STEPS` by default, fewer for a large step. Where nothing is kept, the arena stops growing
        after two or three.
    """
    if steps is None:
        steps = min(MOST_STEPS, max(3, _MOST_EVENTS // max(1, len(step.events))))
    keep = np.zeros(len(step.size), np.bool_) if kept is None else (step.owner >= 0) & kept[step.owner]
    capacity = _FIRST_CAPACITY + 2 * len(step.size)
    while True:
        table = _ChunkTable.of(capacity, len(step.size))
        in_use, n_regions, reserved = replay(step.events, step.size, keep, bool(keep.any()), steps, doubling, table)
        if reserved >= 0:
            return Arena(int(in_use), int(table.regions[1, :n_regions].sum()), int(reserved))
        capacity *= 2


class _ChunkTable(NamedTuple):
    """State of the arena. Python allocates its arrays: array creation in compiled code takes seconds to compile.

    Attributes
    ----------
    chunks : int64 (6, capacity)
    lanes : int32 (_LANES, capacity + 1)
        Skip list of the free chunks by size and address, see `_best_fit`; the last column is the head of each lane.
    before : int64 (_LANES,)
        Predecessors that the latest search of the skip list found.
    spare : int64 (capacity,)
        Unused numbers, of chunks that were merged into others.
    regions : int64 (2, capacity)
        Address, and bytes from there that were ever in use.
    of_step, of_last : int64 (n_buffers,)
        Chunk of each buffer; the same for the buffers kept from the step before.
    """

    chunks: Longs
    lanes: Ints
    before: Longs
    spare: Longs
    regions: Longs
    of_step: Longs
    of_last: Longs

    @staticmethod
    def of(capacity: int, n_buffers: int) -> _ChunkTable:
        return _ChunkTable(
            np.full((6, capacity), -1, np.int64), np.full((_LANES, capacity + 1), -1, np.int32),
            np.zeros(_LANES, np.int64), np.empty(capacity, np.int64),
            np.zeros((2, capacity), np.int64), np.full(n_buffers, -1, np.int64), np.full(n_buffers, -1, np.int64),
        )  # fmt: skip


@compiled
def replay(events, sizes, keep, any_kept, steps, doubling, table):  # type: ignore[no-untyped-def]
    """Return the peak bytes in use, the number of regions, and their bytes, -1 if the chunk table is too small."""
    n_buffers = len(sizes)
    chunks, spare, regions, of_step, of_last = table.chunks, table.spare, table.regions, table.of_step, table.of_last
    # Not literals: numba would compile the functions that take these twice, for the literal type and for integers.
    n_chunks, n_spare, n_regions = np.int64(0), np.int64(0), np.int64(0)
    growth, reserved, in_use, most = _FIRST_REGION, np.int64(0), 0, 0
    for _ in range(steps):
        before = reserved
        for i in range(len(events) + 2 * n_buffers):
            if i < len(events) and events[i] >= 0:
                b = events[i]
                requested = (sizes[b] + UNIT - 1) // UNIT * UNIT
                if requested == 0:
                    continue
                if n_chunks + 2 > len(spare):
                    return most, n_regions, np.int64(-1)
                c = _best_fit(table, requested, -reserved)
                if c >= 0:
                    _remove(table, c)
                else:
                    extent = requested
                    if doubling and requested <= _LARGEST_GROWTH:
                        ready = requested <= growth
                        while growth < requested:
                            growth *= 2
                        extent = growth
                        if ready:
                            growth = min(2 * growth, _LARGEST_GROWTH)
                    reserved += extent
                    c, n_chunks, n_spare = _new_chunk(spare, n_spare, n_chunks)
                    chunks[_AT, c], chunks[_SIZE, c], chunks[_REGION, c] = -reserved, extent, n_regions
                    chunks[_LEFT, c], chunks[_RIGHT, c], chunks[_FREE, c] = -1, -1, 0
                    regions[0, n_regions] = -reserved
                    n_regions += 1
                rest = chunks[_SIZE, c] - requested
                if rest >= requested or rest >= MAX_DEAD:
                    r, n_chunks, n_spare = _new_chunk(spare, n_spare, n_chunks)
                    right = chunks[_RIGHT, c]
                    chunks[_AT, r], chunks[_SIZE, r] = chunks[_AT, c] + requested, rest
                    chunks[_LEFT, r], chunks[_RIGHT, r] = c, right
                    chunks[_REGION, r], chunks[_FREE, r] = chunks[_REGION, c], 0
                    if right >= 0:
                        chunks[_LEFT, right] = r
                    chunks[_SIZE, c], chunks[_RIGHT, c] = requested, r
                    _insert(table, r)
                of_step[b] = c
                in_use += chunks[_SIZE, c]
                most = max(most, in_use)
                home = chunks[_REGION, c]
                regions[1, home] = max(regions[1, home], chunks[_AT, c] + requested - regions[0, home])
                continue
            # A chunk is freed: during the step, or after it those kept from the step before, then the step's own.
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
                _remove(table, other)
                a, z = (c, other) if side == _RIGHT else (other, c)
                chunks[_SIZE, a] += chunks[_SIZE, z]
                chunks[_RIGHT, a] = chunks[_RIGHT, z]
                if chunks[_RIGHT, z] >= 0:
                    chunks[_LEFT, chunks[_RIGHT, z]] = a
                spare[n_spare] = z
                n_spare += 1
                c = a
            _insert(table, c)
        if reserved == before and not any_kept:
            break  # everything is free again: further steps repeat this one
    return most, n_regions, reserved


@inlined
def _best_fit(table, size, at):  # type: ignore[no-untyped-def]
    """Return the first free chunk, ordered by (size, address), that is not below (`size`, `at`); negative if none.

    The free chunks form a skip list (Pugh, 1990): each lane links about every fourth chunk of the lane below.
    `table.before` receives the predecessor in each lane.
    """
    chunks, lanes, before = table.chunks, table.lanes, table.before
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
    """Number of lanes of a chunk: a hash of its number replaces the coin flips of a skip list."""
    bits, height = (np.uint64(c) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32), 1
    while height < most and bits & np.uint64(3) == np.uint64(0):
        bits >>= np.uint64(2)
        height += 1
    return height


@inlined
def _insert(table, c):  # type: ignore[no-untyped-def]
    _best_fit(table, table.chunks[_SIZE, c], table.chunks[_AT, c])
    for lane in range(_height(c, len(table.lanes))):
        table.lanes[lane, c] = table.lanes[lane, table.before[lane]]
        table.lanes[lane, table.before[lane]] = c
    table.chunks[_FREE, c] = 1


@inlined
def _remove(table, c):  # type: ignore[no-untyped-def]
    _best_fit(table, table.chunks[_SIZE, c], table.chunks[_AT, c])
    for lane in range(_height(c, len(table.lanes))):
        table.lanes[lane, table.before[lane]] = table.lanes[lane, c]
    table.chunks[_FREE, c] = 0


@inlined
def _new_chunk(spare, n_spare, n_chunks):  # type: ignore[no-untyped-def]
    """Return an unused chunk number, and the new counts of chunks and spare numbers."""
    if n_spare:
        return spare[n_spare - 1], n_chunks, n_spare - 1
    return n_chunks, n_chunks + 1, n_spare
