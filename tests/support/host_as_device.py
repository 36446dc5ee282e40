"""Host memory that stands for a device's: a CUDA runtime that records its calls, and sessions on it.

monkeypatch.setattr(cuda_memory, "_runtime", lambda: runtime)
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import onnx

from onnx_remat.session.on_device import DeviceMemory
from onnx_remat.session.session import Session

MOST = 1 << 30
"""Bytes of the largest block."""


class Runtime:
    """A CUDA runtime; `calls` are the functions that were called, in order, and `used` the devices chosen then."""

    def __init__(self, current: int = 0) -> None:
        self.calls: list[str] = []
        self.current = current
        self.used: set[int] = set()
        self._blocks: list[Any] = []
        self.cudaGetErrorName = lambda status: b"cudaErrorMemoryAllocation"  # a function has attributes, a method none

    def _called(self, what: str) -> None:
        self.calls.append(what)
        self.used.add(self.current)

    def cudaMalloc(self, found: Any, size: ctypes.c_size_t) -> int:
        if size.value > MOST:
            return 2
        self._called("malloc")
        self._blocks.append(ctypes.create_string_buffer(size.value + 256))
        address = -(-ctypes.addressof(self._blocks[-1]) // 256) * 256
        found._obj.value = address
        return 0

    def cudaFree(self, _: Any) -> int:
        return 0

    def cudaMemset(self, address: ctypes.c_void_p, value: int, size: ctypes.c_size_t) -> int:
        self._called("set")
        ctypes.memset(address.value, value, size.value)
        return 0

    def cudaMemcpy(self, to: ctypes.c_void_p, source: ctypes.c_void_p, size: ctypes.c_size_t, kind: Any) -> int:
        self._called({1: "write", 2: "read", 3: "move"}[kind.value])
        ctypes.memmove(to.value, source.value, size.value)
        return 0

    def cudaDeviceSynchronize(self) -> int:
        self._called("wait")
        return 0

    def cudaGetLastError(self) -> int:
        return 0

    def cudaGetDevice(self, found: Any) -> int:
        found._obj.value = self.current
        return 0

    def cudaSetDevice(self, device: int) -> int:
        self.current = int(getattr(device, "value", device))
        return 0


class Held:
    """An array that another library holds on the device."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = np.empty(array.nbytes + 16, np.uint8)
        skip = -self.array.ctypes.data % 16
        self.array = self.array[skip : skip + array.nbytes].view(array.dtype).reshape(array.shape)
        self.array[...] = array
        self.__cuda_array_interface__ = {
            "shape": array.shape, "typestr": array.dtype.str, "data": (self.array.ctypes.data, False), "version": 3,
            "strides": None,
        }  # fmt: skip


class DeviceSession(Session):
    """A session that takes the host for a device, whose runtime is a `Runtime`."""

    def __init__(self, model: onnx.ModelProto) -> None:
        super().__init__(model, donate=True)
        self._memory = DeviceMemory(self._binding, self._step, "cpu")
