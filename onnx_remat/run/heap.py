"""Memory of this process, from Python: pages of one's own, and what glibc keeps though nobody uses it."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64
"""Of every address that is bound, in bytes: what ONNX Runtime aligns its own buffers to."""


def reserve(nbytes: int) -> npt.NDArray[np.uint8]:
    """Pages of one's own: they come when they are written to, and go when nobody refers to them any more."""
    if not nbytes:
        return np.empty(0, np.uint8)
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def trim() -> None:
    """Give free memory of the C library's heap back to the system, where it can."""
    if found := getattr(ctypes.CDLL(None), "malloc_trim", None):
        found(0)
