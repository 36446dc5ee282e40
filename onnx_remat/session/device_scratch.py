"""Size of a session's arena on a device that contains kernel workspace and nothing else.

The rules are those of `memory.arena`, plus one: a kernel that allocates outside the stream (`Kernels.off_stream`) gets
no chunk that the stream has used in this step. So the arena may need two chunks of a size where one would do. There
are few chunks, hence lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onnx_remat.ir.graph import Op
from onnx_remat.memory.arena import MAX_DEAD, UNIT
from onnx_remat.ort.prepare import Compiled

_STEPS = 3
"""Number of steps after which the arena stops growing: a chunk that one step splits is missing in the next."""


@dataclass(frozen=True, slots=True)
class Requests:
    """Blocks of one kernel's workspace in bytes, and whether they are requested outside the stream."""

    blocks: Sequence[int]
    off_stream: bool = False


@dataclass(slots=True, eq=False)
class _Chunk:
    size: int
    used: bool = False  # by the stream, in this step
    free: bool = True


def workspace(compiled: Compiled, ops: Iterable[Op]) -> int:
    """Return `reserved` for the workspace of `ops`, in the order they run, as their kernels' facts state it."""
    table, off = compiled.table.workspace, compiled.kernels.off_stream
    return reserved([Requests(table[op.index], op.kind in off) for op in ops])


def reserved(requests: Sequence[Requests]) -> int:
    """Return the bytes of all regions of an arena that grows by the size of each request (``kSameAsRequested``).

    Parameters
    ----------
    requests : sequence of Requests
        One per kernel, in execution order.

    Examples
    --------
    >>> reserved([Requests([1024]), Requests([2048]), Requests([256, 256])])
    3072
    >>> reserved([Requests([2048]), Requests([1024, 1024], off_stream=True)])
    4096
    """
    regions: list[list[_Chunk]] = []
    for _ in range(_STEPS):
        for kernel in requests:
            taken = [_take(regions, size, kernel.off_stream) for size in kernel.blocks if size]
            for chunk in taken:
                chunk.free = True
                _merge(regions)
        for chunk in (chunk for region in regions for chunk in region):
            chunk.used = False
        _merge(regions)
    return sum(chunk.size for region in regions for chunk in region)


def _take(regions: list[list[_Chunk]], size: int, off_stream: bool) -> _Chunk:
    size = -(-size // UNIT) * UNIT
    fits = [
        (chunk.size, r, c)
        for r, region in enumerate(regions)
        for c, chunk in enumerate(region)
        if chunk.free and chunk.size >= size and not (off_stream and chunk.used)
    ]
    if not fits:
        regions.append([_Chunk(size)])
        fits = [(size, len(regions) - 1, 0)]
    _, r, c = min(fits)
    chunk = regions[r][c]
    if chunk.size >= 2 * size or chunk.size - size >= MAX_DEAD:
        regions[r].insert(c + 1, _Chunk(chunk.size - size, chunk.used))
        chunk.size = size
    chunk.free, chunk.used = False, chunk.used or not off_stream
    return chunk


def _merge(regions: list[list[_Chunk]]) -> None:
    """Merge adjacent free chunks if the stream has used both or neither."""
    for region in regions:
        for c in range(len(region) - 1, 0, -1):
            left, right = region[c - 1], region[c]
            if left.free and right.free and left.used == right.used:
                left.size += right.size
                del region[c]
