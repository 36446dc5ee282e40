"""A block of a CUDA device's memory, of exactly the size that is asked for.

onnxruntime's Python interface allocates on a device from an arena whose regions double, and its kernels fill at most
2^31 elements. The CUDA runtime, which it has loaded by the time that a session exists, does neither.
"""

from __future__ import annotations

import ctypes
import re
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_remat.errors import ModelError

_UP, _DOWN = 1, 2  # cudaMemcpyKind


class Block:
    """Bytes on the device, all of them zero at first; given back when nobody refers to it any more.

    Parameters
    ----------
    nbytes : int
        At least one is taken.

    Attributes
    ----------
    address : int

    Raises
    ------
    ModelError
        The device has no so large block left, or there is no CUDA runtime in this process.
    """

    def __init__(self, nbytes: int) -> None:
        runtime, found, size = _runtime(), ctypes.c_void_p(), ctypes.c_size_t(max(nbytes, 1))
        _check(runtime.cudaMalloc(ctypes.byref(found), size), f"allocate {nbytes} bytes")
        self.address = int(found.value or 0)
        weakref.finalize(self, runtime.cudaFree, found).atexit = False  # the process gives back all it has
        _check(runtime.cudaMemset(found, 0, size), "clear its memory")
        _check(runtime.cudaDeviceSynchronize(), "clear its memory")

    def write(self, offset: int, array: npt.NDArray[Any]) -> None:
        """Copy an array to so many bytes after the block's begin."""
        array = np.ascontiguousarray(array)
        self._copy(self.address + offset, array.ctypes.data, array.nbytes, _UP)
        # What is copied from ordinary memory may still be on its way, and sessions wait for their own stream alone.
        _check(_runtime().cudaDeviceSynchronize(), "copy to its memory")

    def read(self, offset: int, into: npt.NDArray[Any]) -> None:
        """Fill a contiguous array with what lies there."""
        self._copy(into.ctypes.data, self.address + offset, into.nbytes, _DOWN)

    def _copy(self, to: int, source: int, nbytes: int, kind: int) -> None:
        if nbytes:
            done = _runtime().cudaMemcpy(
                ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_size_t(nbytes), ctypes.c_int(kind)
            )
            _check(done, "copy its memory")


@cache
def _runtime() -> Any:
    """The CUDA runtime that onnxruntime has loaded."""
    maps = Path("/proc/self/maps")
    loaded = re.findall(r"/\S*libcudart[\w.-]*\.so[\d.]*", maps.read_text()) if maps.exists() else []
    if not loaded:
        raise ModelError("no CUDA runtime (libcudart) is loaded: sessions on CUDA need Linux and onnxruntime-gpu")
    return ctypes.CDLL(loaded[0])


def _check(status: int, what: str) -> None:
    if status:
        name = _runtime().cudaGetErrorName
        name.restype = ctypes.c_char_p
        raise ModelError(f"the CUDA device could not {what}: {name(status).decode()}")
