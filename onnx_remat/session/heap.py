"""Memory of this process, controlled from Python: private pages, and free memory that glibc keeps."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from onnx_remat.errors import ModelError

ALIGNMENT = 64
"""Alignment of every bound address in bytes, equal to that of ONNX Runtime's own buffers."""


def reserve(nbytes: int) -> npt.NDArray[np.uint8]:
    """Reserve private pages: they become resident when written to and are freed with the array.

    Raises
    ------
    ModelError
        The system has no room for them.
    """
    if not nbytes:
        return np.empty(0, np.uint8)
    try:
        if sys.platform == "win32":
            return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        return np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    except (OSError, OverflowError) as error:
        raise ModelError(f"the system cannot map {nbytes} bytes for a step: use a smaller batch or budget") from error


def give_back_large_blocks() -> None:
    """Make glibc map blocks of 128 kB or more one by one, and return them to the system when they are freed.

    glibc starts like this. But when the first such block is freed, it raises the threshold and keeps blocks of up to
    32 MB in its heap, which fragments: a ResNet's step, whose kernels need 9 MB of scratch memory at once, kept 28 MB
    more resident. Other C libraries are left alone.
    """
    if found := _of_c("mallopt"):
        found(_M_MMAP_THRESHOLD, _LARGE_BLOCK)


_M_MMAP_THRESHOLD = -3  # from malloc.h
_LARGE_BLOCK = 128 * 1024  # glibc's initial threshold


def trim() -> None:
    """Return free memory of the C library's heap to the system, where the library can."""
    if found := _of_c("malloc_trim"):
        found(0)


_due = 0.0
"""Time of the next trim by `keep_trimmed`, on the clock of `time.perf_counter`."""

_SHARE = 1 / 400
"""Share of the time that `keep_trimmed` may take."""


def keep_trimmed() -> None:
    """Call `trim` before a step, at most for a quarter of a percent of the time, and once after each `trim_soon`.

    glibc keeps freed blocks below 128 kB: when the owner of a checkpoint of many small arrays drops it after a `Loop`
    has made its copies, most of that memory would stay resident during training. A trim takes about 0.4 ms.
    """
    global _due
    if (begun := time.perf_counter()) < _due:
        return
    trim()
    ended = time.perf_counter()
    _due = ended + (ended - begun) / _SHARE


def trim_soon() -> None:
    """Make the next `keep_trimmed` trim: the caller received or passed in arrays and may drop them now."""
    global _due
    _due = 0.0


@functools.cache
def _of_c(name: str) -> Callable[..., int] | None:
    """Return a function of the C library, None where it has none of that name."""
    return None if sys.platform == "win32" else getattr(ctypes.CDLL(None), name, None)
