"""Arrays that another library holds in a device's memory: PyTorch, CuPy, Numba and JAX all show them in one way.

The protocol is the `CUDA array interface <https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html>`_,
version 2 or 3. A stream that it names is not waited for by itself: a session waits for the whole device instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnx_remat.errors import UsageError
from onnx_remat.session.apart import check_apart

ALIGNMENT = 16
"""Bytes: kernels read as many at a time."""


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """A contiguous array in a device's memory.

    Attributes
    ----------
    owner : object
        The other library's array, which keeps the memory.
    address : int
    dtype : numpy.dtype
    shape : tuple of int
    read_only : bool
    """

    owner: Any
    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    read_only: bool

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def device_array(name: str, value: Any, wanted: bool = True) -> DeviceArray | None:
    """Return an input's value as an array of a device; None if it is none.

    Raises
    ------
    UsageError
        It is one, but not `wanted`, as no `Session` on a device runs the step; it is not contiguous; or its library
        does not show it (PyTorch, for one that requires gradients or is of type bfloat16).
    """
    if isinstance(value, np.ndarray):
        return None
    try:
        shown = getattr(value, "__cuda_array_interface__", None)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"input {name!r}: {error}") from error
    if shown is None:
        return None
    if not wanted:
        raise UsageError(
            f"input {name!r} lies on a device, where only an onnx_remat.Session on that device reads it: pass an array "
            "of the host, or open a Session there"
        )
    dtype, shape, strides = np.dtype(shown["typestr"]), tuple(shown["shape"]), shown.get("strides")
    if strides is not None and 0 not in shape:
        dense = [*itertools.accumulate(shape[:0:-1], lambda a, b: a * b, initial=dtype.itemsize)][::-1]
        if any(size > 1 and a != b for size, a, b in zip(shape, strides, dense, strict=True)):
            raise UsageError(f"input {name!r} is not contiguous: pass a contiguous copy")
    address, read_only = shown["data"]
    if address % ALIGNMENT:
        raise UsageError(f"input {name!r} does not begin at a multiple of {ALIGNMENT} bytes: pass a copy")
    return DeviceArray(value, int(address), dtype, shape, bool(read_only))


def check_renewable(arrays: Mapping[str, DeviceArray], renewed: Container[str]) -> None:
    """Raise UsageError if an array that is to be renewed may not be written, or shares memory with another."""
    for name, array in arrays.items():
        if name in renewed and array.read_only:
            raise UsageError(f"input {name!r} is renewed in place: pass a writeable array")
    check_apart(((a.address, a.nbytes, name) for name, a in arrays.items()), renewed, "pass a copy of one")
