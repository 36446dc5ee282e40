"""Memory of this process, from Python: pages of one's own, and what glibc keeps though nobody uses it."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64
"""Of every address that is bound, in bytes: what ONNX Runtime aligns its own buffers to."""


def reserve(nbytes: int) -> npt.NDArray[np.uint8]:
    """Pages of one's own: they come when they are written to, and go when nobody refers to them any more."""
    if not nbytes:
        return np.empty(0, np.uint8)
    if sys.platform == "win32":
        return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def give_back_large_blocks() -> None:
    """Let glibc, from now on, take blocks of 128 kB or more from the system and give them back when they are freed.

    That is how it starts. But with the first such block that is freed it begins to keep them, up to 32 MB each, in a
    heap whose gaps fit nothing: of a ResNet's step, whose kernels need 9 MB of scratch memory at once, 28 MB more
    stayed resident. Other C libraries are left alone.
    """
    if found := _of_c("mallopt"):
        found(_M_MMAP_THRESHOLD, _LARGE_BLOCK)


_M_MMAP_THRESHOLD = -3  # of malloc.h
_LARGE_BLOCK = 128 * 1024  # where it starts


def trim() -> None:
    """Give free memory of the C library's heap back to the system, where it can."""
    if found := _of_c("malloc_trim"):
        found(0)


_due = 0.0
"""When `keep_trimmed` is to act next, on the clock of `time.perf_counter`."""

_SHARE = 1 / 400


def keep_trimmed() -> None:
    """`trim` before a step, so often that it takes a quarter of a percent of the time, and whenever `trim_soon` says.

    glibc keeps blocks below 128 kB that are freed: of a checkpoint of many small arrays, which its owner drops once a
    `Loop` has its copies, most would stay for as long as training takes. A trim takes about 0.4 ms.
    """
    global _due
    if (begun := time.perf_counter()) < _due:
        return
    trim()
    ended = time.perf_counter()
    _due = ended + (ended - begun) / _SHARE


def trim_soon() -> None:
    """Let the next `keep_trimmed` act: somebody was handed arrays, or gave some away, and may drop his own."""
    global _due
    _due = 0.0


@functools.cache
def _of_c(name: str) -> Callable[..., int] | None:
    """A function of the C library, where it has one of that name."""
    return None if sys.platform == "win32" else getattr(ctypes.CDLL(None), name, None)
