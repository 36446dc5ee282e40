"""The CUDA driver: it translates PTX for the device, and launches kernels on ONNX Runtime's stream.

Kernels are loaded into the context that CUDA's runtime, and with it ONNX Runtime, uses on device 0. They stay loaded as
long as the process, and a step that is opened again finds them.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from onnx_remat.errors import ModelError
from onnx_remat.messages import Setting

FAILS = "the CUDA driver cannot"
"""Start of the messages of its errors."""


def _check(what: str, error: int) -> None:
    if error:
        text = ctypes.c_char_p()
        _library().cuGetErrorString(error, ctypes.byref(text))
        reason = (text.value or b"an unknown error").decode()
        raise ModelError(f"{FAILS} {what}: {reason} ({error}); pass {{}}", Setting("fuse", False))


@cache
def _library() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ModelError(f"{FAILS} be loaded: {error}") from None


@cache
def _context() -> ctypes.c_void_p:
    library, device, context = _library(), ctypes.c_int(), ctypes.c_void_p()
    _check("start", library.cuInit(0))
    _check("find device 0", library.cuDeviceGet(ctypes.byref(device), 0))
    _check("use device 0", library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    return context


def launcher() -> int:
    """Return the address of the driver's function that launches a kernel.

    Raises
    ------
    ModelError
        There is no CUDA driver.
    """
    return ctypes.cast(_library().cuLaunchKernel, ctypes.c_void_p).value or 0


@cache
def loaded(ptx: bytes) -> ctypes.c_void_p:
    """Return the driver's handle of a module in PTX, which ends in a zero byte.

    Raises
    ------
    ModelError
        There is no CUDA driver, or it cannot translate the text.
    """
    library, module, popped = _library(), ctypes.c_void_p(), ctypes.c_void_p()
    _check("use device 0", library.cuCtxPushCurrent_v2(_context()))
    try:
        _check("load fused kernels", library.cuModuleLoadData(ctypes.byref(module), ptx))
    finally:
        library.cuCtxPopCurrent_v2(ctypes.byref(popped))
    return module


def function(module: ctypes.c_void_p, name: str) -> int:
    """Return the driver's handle of a kernel in a module."""
    found = ctypes.c_void_p()
    _check(f"find {name}", _library().cuModuleGetFunction(ctypes.byref(found), module, name.encode()))
    return found.value or 0
