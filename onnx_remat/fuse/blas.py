"""The matrix product of OpenBLAS, which numpy's wheels contain: it is faster than ONNX Runtime's.

The library is a copy of numpy's under another name, so that it has settings of its own: one thread, as ONNX Runtime's
threads call it side by side. numpy's own products keep their threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
from functools import cache
from pathlib import Path

import numpy as np

from onnx_remat.errors import ModelError
from onnx_remat.fuse.machine_code import has_avx512
from onnx_remat.messages import Setting
from onnx_remat.process.cache import cache_folder, count_as_used, replacing, tidy

_PATTERN = "libscipy_openblas64_*.so"
_PRODUCT, _SET_THREADS = "scipy_cblas_sgemm64_", "scipy_openblas_set_num_threads64_"
_THREADS = "OPENBLAS_NUM_THREADS"

PACKED, PACKED_AVX512 = 320, 448
"""Most terms, and most columns, that OpenBLAS packs at a time: for Haswell and Zen, and for processors with AVX-512."""

MOST_THREADS = 64
"""Threads that numpy's OpenBLAS is built for: with more calls at a time than twice as many it ends the process."""


@cache
def why_not() -> str:
    """Return why this process has no faster product than ONNX Runtime's, or an empty text."""
    if (os.cpu_count() or 1) > MOST_THREADS:
        return f"OpenBLAS serves at most {MOST_THREADS} threads at a time"
    if _installed() is None:
        return "numpy's OpenBLAS is not where its wheels have it"
    try:
        address()
    except (OSError, AttributeError, ModelError) as error:
        return f"numpy's OpenBLAS cannot be loaded: {error}"
    return ""


def packed() -> int:
    """Return the most terms, and the most columns, that this processor's product packs at a time."""
    return PACKED_AVX512 if has_avx512() else PACKED


@cache
def address() -> int:
    """Return the address of ``cblas_sgemm`` with integers of 64 bits, which runs in the thread that calls it.

    Raises
    ------
    ModelError
        There is no folder for the copy of the library.
    OSError, AttributeError
        It cannot be loaded.
    """
    source, folder = _installed(), cache_folder()
    if source is None or folder is None:
        raise ModelError("matrix products of OpenBLAS are planned but not found: pass {}", Setting("fuse", False))
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = "1"  # read when it is loaded: it starts no threads
    try:
        library = ctypes.CDLL(str(_copied(source, folder)), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    finally:
        if before is None:
            del os.environ[_THREADS]
        else:
            os.environ[_THREADS] = before
    getattr(library, _SET_THREADS)(1)
    found = ctypes.cast(getattr(library, _PRODUCT), ctypes.c_void_p).value
    assert found is not None
    return found


def _installed() -> Path | None:
    """Return numpy's library."""
    folder = Path(np.__file__).parents[1] / "numpy.libs"
    return next(iter(sorted(folder.glob(_PATTERN))), None)


def _copied(source: Path, folder: Path) -> Path:
    """Return a copy of the library, which the loader takes for another one."""
    status = source.stat()
    version = hashlib.sha256(f"{source} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:16]
    target = folder / f"libonnx_remat_blas-{version}.so"
    if target.is_file() and target.stat().st_size == status.st_size:
        count_as_used(target)
    else:
        with replacing(target) as partial:
            shutil.copyfile(source, partial)
        tidy(folder)
    return target
