"""The custom-op library: where it lies, and the kernels that it is given for as long as a model is loaded."""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from onnx_remat.errors import ModelError
from onnx_remat.fuse import build
from onnx_remat.fuse.kernels import cache_folder
from onnx_remat.messages import Setting

DOMAIN = "onnx_remat"
OP = "Fused"

OLDEST_RUNTIME = (1, 22)
"""ONNX Runtime whose bits kernels have. In 1.19 Sqrt, Floor and Ceil differ by where in an array an element lies."""


@cache
def find() -> tuple[Path | None, str]:
    """The library of this checkout or wheel, compiled now where it is missing; None and why where there is none."""
    name = build.library_name()
    shipped = Path(__file__).with_name(name)
    if shipped.is_file():
        return shipped, ""
    folder = cache_folder()
    if folder is None:
        return None, "no folder can be written to compile the custom-op library into"
    if not (folder / name).is_file() and (why_not := build.build(folder)):
        return None, why_not
    return folder / name, ""


def too_old(installed: Sequence[int]) -> str:
    """Why kernels lack the bits of an ONNX Runtime of that version, or nothing."""
    if tuple(installed[:2]) >= OLDEST_RUNTIME:
        return ""
    oldest, found = (".".join(map(str, version)) for version in (OLDEST_RUNTIME, installed))
    return f"kernels have the bits of onnxruntime {oldest} and newer, not of {found}"


def why_not() -> str:
    """Why fused nodes cannot run in this process, or nothing."""
    path, reason = find()
    if path is None:
        return reason
    try:
        _loaded()
    except OSError as error:
        return f"{path.name} cannot be loaded: {error}"
    return ""


def new_secret() -> int:
    """What the nodes of one model name their kernels with: nobody else can know it."""
    return secrets.randbits(62) + 1


@contextmanager
def offered(secret: int, code: bytes, kernels: Sequence[Sequence[int]]) -> Iterator[None]:
    """While this lasts, models that are loaded may have Fused nodes with this secret; they keep their kernels.

    Parameters
    ----------
    secret : int
    code : bytes
        Machine code of all kernels.
    kernels : sequence of sequence of int
        What ``fused_add`` of ``shim.c`` takes for each, by handle.

    Raises
    ------
    ModelError
        The system lets no memory be executed, or a kernel's description does not add up.
    """
    if not kernels:
        yield
        return
    library = _loaded()
    if library.fused_open(secret, code, len(code), len(kernels)):
        raise ModelError(
            "the system gives no memory for fused kernels that may be executed: pass {}", Setting("fuse", False)
        )
    try:
        for handle, numbers in enumerate(kernels):
            if library.fused_add(secret, handle, (ctypes.c_int64 * len(numbers))(*numbers), len(numbers)):
                raise ModelError(f"fused kernel {handle} is not described as the library takes it")
        yield
    finally:
        library.fused_close(secret)


def register(options: Any) -> None:
    """Let sessions with these ``SessionOptions`` have Fused nodes."""
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
    library.fused_close.argtypes = (ctypes.c_int64,)
    library.fused_close.restype = None
    library.fused_is_open.argtypes = (ctypes.c_int64,)
    return library
