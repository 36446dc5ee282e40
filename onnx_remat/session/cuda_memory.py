"""A block of a CUDA device's memory of exactly the requested size, and copies to and from the device.

onnxruntime's Python interface allocates on a device from an arena whose regions double, and its kernels fill at most
2^31 elements. The CUDA runtime, which onnxruntime has loaded by the time a session exists, has neither limitation.
"""

from __future__ import annotations

import ctypes
import os
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_remat.errors import ModelError
from onnx_remat.messages import Message, Setting
from onnx_remat.units import format_bytes

_UP, _DOWN, _WITHIN = 1, 2, 3  # cudaMemcpyKind
_NO_MEMORY = 2  # cudaErrorMemoryAllocation
_DEVICE = 0  # on which sessions run


class Block:
    """Zero-initialised bytes on the device; freed when the object is no longer referenced.

    Parameters
    ----------
    nbytes : int
        Size; at least one byte is allocated.

    Attributes
    ----------
    address : int

    Raises
    ------
    ModelError
        The device has no free block of this size, or this process has not loaded a CUDA runtime.
    """

    def __init__(self, nbytes: int) -> None:
        found, size = ctypes.c_void_p(), ctypes.c_size_t(max(nbytes, 1))
        with runtime() as cuda:
            check(cuda.cudaMalloc(ctypes.byref(found), size), f"allocate {nbytes} bytes")
            self.address = int(found.value or 0)
            weakref.finalize(self, cuda.cudaFree, found).atexit = False  # exiting frees it anyway
            check(cuda.cudaMemset(found, 0, size), "clear its memory")
            check(cuda.cudaDeviceSynchronize(), "clear its memory")

    def write(self, offset: int, array: npt.NDArray[Any]) -> None:
        """Copy an array to `offset` bytes after the start of the block."""
        write(self.address + offset, array)

    def read(self, offset: int, into: npt.NDArray[Any]) -> None:
        """Fill a contiguous array with the bytes at `offset`."""
        read(self.address + offset, into)


class HostBlock:
    """Zero-initialised bytes for a step's state on the host; freed when the object is no longer referenced.

    Parameters
    ----------
    nbytes : int
        Size; at least one byte is allocated.

    Attributes
    ----------
    address : int

    Raises
    ------
    ModelError
        The host has too little memory of this kind.
    """

    def __init__(self, nbytes: int) -> None:
        with runtime() as cuda:
            self.address = pinned(cuda, nbytes, Message("plan without {}", Setting("offload_state", True)))
            weakref.finalize(self, cuda.cudaFreeHost, ctypes.c_void_p(self.address)).atexit = False
        ctypes.memset(self.address, 0, nbytes)


def pinned(cuda: Any, nbytes: int, advice: Message) -> int:
    """Return the address of bytes of the host that a device can copy from, which ``cudaFreeHost`` frees.

    Raises
    ------
    ModelError
        The host has too little memory of this kind, and `advice` says how to plan; or another reason.
    """
    found = ctypes.c_void_p()
    status = cuda.cudaHostAlloc(ctypes.byref(found), ctypes.c_size_t(max(nbytes, 1)), ctypes.c_uint(0))
    if status == _NO_MEMORY:
        cuda.cudaGetLastError()  # which later calls would report
        raise ModelError("the host has no {} of memory for what is moved there: {}", format_bytes(nbytes), advice)
    check(status, f"get {nbytes} bytes of the host")
    return int(found.value or 0)


def write(address: int, array: npt.NDArray[Any]) -> None:
    """Copy an array to an address of the device."""
    array = np.ascontiguousarray(array)
    _copy(address, array.ctypes.data, array.nbytes, _UP)
    # A copy from pageable memory may return before it has finished, and sessions wait for their own stream only.
    wait()


def read(address: int, into: npt.NDArray[Any]) -> None:
    """Fill a contiguous array with the bytes at an address of the device."""
    _copy(into.ctypes.data, address, into.nbytes, _DOWN)


def move(address: int, source: int, nbytes: int) -> None:
    """Copy bytes from one address of the device to another."""
    _copy(address, source, nbytes, _WITHIN)
    wait()


def wait() -> None:
    """Wait for all that the device has been asked to do."""
    with runtime() as cuda:
        check(cuda.cudaDeviceSynchronize(), "finish what it was asked to do")


def _copy(to: int, source: int, nbytes: int, kind: int) -> None:
    if nbytes:
        with runtime() as cuda:
            done = cuda.cudaMemcpy(
                ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_size_t(nbytes), ctypes.c_int(kind)
            )
            check(done, "copy its memory")


@contextmanager
def runtime() -> Iterator[Any]:
    """Return the runtime; within the block its calls are for the device of sessions, whatever other code has chosen."""
    cuda, chosen = _runtime(), ctypes.c_int()
    check(cuda.cudaGetDevice(ctypes.byref(chosen)), "be found")
    check(cuda.cudaSetDevice(ctypes.c_int(_DEVICE)), "be chosen")
    try:
        yield cuda
    finally:
        cuda.cudaSetDevice(chosen)


@cache
def _runtime() -> Any:
    """Return the CUDA runtime that onnxruntime has loaded."""
    maps = Path("/proc/self/maps")
    loaded = _loaded(os.fsdecode(maps.read_bytes())) if maps.exists() else ""
    if not loaded:
        raise ModelError("no CUDA runtime (libcudart) is loaded: sessions on CUDA need Linux and onnxruntime-gpu")
    try:
        return ctypes.CDLL(loaded)
    except OSError as error:
        raise ModelError(f"the CUDA runtime cannot be opened ({error}): restart this process") from error


def _loaded(maps: str) -> str:
    """Return the path of the CUDA runtime in a process's memory map, whose sixth column has paths; empty if none.

    >>> _loaded("7f00-7f01 r-xp 00000000 fe:01 173 /home/me/my env/lib/libcudart-d0da41ae.so.12.8.90")
    '/home/me/my env/lib/libcudart-d0da41ae.so.12.8.90'
    """
    found = re.search(r"(?m)^(?:\S+ +){5}(/.*libcudart[\w.-]*\.so[\d.]*)(?: \(deleted\))?$", maps)
    return found[1] if found else ""


def check(status: int, what: str) -> None:
    """Raise ModelError where a call of the runtime failed; `what` the device could not do."""
    if status:
        _runtime().cudaGetLastError()  # which later calls would report
        name = _runtime().cudaGetErrorName
        name.restype = ctypes.c_char_p
        raise ModelError(f"the CUDA device could not {what}: {name(status).decode()}")
