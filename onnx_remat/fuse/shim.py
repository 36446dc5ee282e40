"""The custom-op library: find or build it, and pass it the kernels while a model is loaded."""

from __future__ import annotations

import ctypes
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from onnx_remat.errors import ModelError
from onnx_remat.fuse import build, driver
from onnx_remat.messages import Setting
from onnx_remat.process.cache import cache_folder

DOMAIN = "onnx_remat"
OP, DEVICE_OP = "Fused", "FusedOnDevice"
"""Of a CPU, and of a device: with one name, ONNX Runtime would run a node on the CPU that reads from there."""

COPY_OP = "Copy"
"""Of a copy between a device and the host, and of a wait for one; the attribute `kind` says which."""

OUT, IN, WAIT = 2, 1, 0
"""Kinds of it: a copy to the host, one to the device, and a wait of the kernels' stream for one. As in ``shim.c``."""

COPIES = -2000
"""What their description begins with, as in ``shim.c``."""

OLDEST_RUNTIME = (1, 22)
"""Oldest ONNX Runtime with the kernels' bits. In 1.19, Sqrt, Floor and Ceil vary with an element's place."""


@cache
def find() -> tuple[Path | None, str]:
    """Return the library of this checkout or wheel, compiling it if it is missing; otherwise None and the reason."""
    name = build.library_name()
    shipped = Path(__file__).with_name(name)
    if shipped.is_file():
        return shipped, ""
    folder = cache_folder()
    if folder is None:
        return None, "no folder is writable for the custom-op library"
    if not (folder / name).is_file() and (why_not := build.build(folder)):
        return None, why_not
    return folder / name, ""


def too_old(installed: Sequence[int]) -> str:
    """Return why kernels do not give the bits of an ONNX Runtime of that version, or an empty text."""
    if tuple(installed[:2]) >= OLDEST_RUNTIME:
        return ""
    oldest, found = (".".join(map(str, version)) for version in (OLDEST_RUNTIME, installed))
    return f"kernels have the bits of onnxruntime {oldest} and newer, not of {found}"


def why_not() -> str:
    """Return why fused nodes cannot run in this process, or an empty text."""
    path, reason = find()
    if path is None:
        return reason
    try:
        _loaded()
    except OSError as error:
        return f"{path.name} cannot be loaded: {error}"
    return ""


def new_secret() -> int:
    """Return a random number by which only the nodes of one model can name its kernels."""
    return secrets.randbits(62) + 1


@contextmanager
def offered(
    secret: int,
    code: bytes,
    kernels: Sequence[Sequence[int]],
    ptx: bytes = b"",
    on_device: Mapping[int, str] = MappingProxyType({}),
) -> Iterator[None]:
    """Allow models loaded inside this context to have Fused nodes with this secret; they keep their kernels afterwards.

    Parameters
    ----------
    secret : int
    code : bytes
        Machine code of all kernels.
    kernels : sequence of sequence of int
        Arguments of ``fused_add`` of ``shim.c`` for each, by handle.
    ptx : bytes
        Module of those that run on a CUDA device.
    on_device : mapping of int to str
        Their names in it, by handle.

    Raises
    ------
    ModelError
        The system refuses executable memory, a kernel's description is inconsistent, or the driver cannot load one.
    """
    if not kernels:
        yield
        return
    library = _loaded()
    with _OFFERING:
        if library.fused_open(secret, code, len(code), len(kernels)):
            raise ModelError("the system refuses executable memory for fused kernels: pass {}", Setting("fuse", False))
        try:
            for handle, numbers in enumerate(kernels):
                if library.fused_add(secret, handle, (ctypes.c_int64 * len(numbers))(*numbers), len(numbers)):
                    raise ModelError(f"the library rejects the description of fused kernel {handle}")
            for handle, name in on_device.items():
                function = driver.function(driver.loaded(ptx), name)
                if library.fused_on_device(secret, handle, function, driver.launcher()):
                    raise ModelError(f"the library rejects fused kernel {handle} of a device")
            yield
        finally:
            library.fused_close(secret)


def describe_copy(secret: int, handle: int, fields: Sequence[int]) -> None:
    """Within `offered`, describe a copy by the fields of ``Copy`` of ``shim.c``; ModelError where it is refused."""
    if _loaded().fused_copies(secret, handle, (ctypes.c_int64 * len(fields))(*fields)):
        raise ModelError(f"the library rejects the description of copy {handle}")


def give(secret: int, thing: int, destroy: int) -> None:
    """Within `offered`, hand over what is to be destroyed by the function at `destroy` once no model needs it."""
    if _loaded().fused_own(secret, thing, destroy):
        raise ModelError("no memory is left")


_OFFERING = threading.RLock()
"""Two sessions of one plan have the same secret: one model is loaded at a time."""


def register(options: Any) -> None:
    """Register the library, so that sessions with these ``SessionOptions`` accept Fused nodes."""
    path, reason = find()
    if path is None:
        raise ModelError(f"fused nodes cannot run: {reason}")
    options.register_custom_ops_library(str(path))


@cache
def _loaded() -> ctypes.CDLL:
    path, _ = find()
    library = ctypes.CDLL(str(path))
    library.fused_open.argtypes = (ctypes.c_int64, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t)
    library.fused_add.argtypes = (ctypes.c_int64, ctypes.c_size_t, ctypes.POINTER(ctypes.c_int64), ctypes.c_size_t)
    library.fused_on_device.argtypes = (ctypes.c_int64, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p)
    library.fused_copies.argtypes = (ctypes.c_int64, ctypes.c_size_t, ctypes.POINTER(ctypes.c_int64))
    library.fused_own.argtypes = (ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
    library.fused_close.argtypes = (ctypes.c_int64,)
    library.fused_close.restype = None
    library.fused_is_open.argtypes = (ctypes.c_int64,)
    return library
