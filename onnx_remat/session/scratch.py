"""One pool for the scratch memory of kernels, shared by all `Session`s of this process.

Kernels allocate scratch memory while they run and free it. From the system, each allocation maps and zeroes its pages
again. In the C library's heap, it fragments. Here it comes from ONNX Runtime's own arena, whose first region is as
large as the largest scratch memory of a step: every kernel finds it empty, so every request fits.
"""

from __future__ import annotations

import threading
from typing import Any

from onnx_remat.errors import ModelError

LEAST = 1 << 20
"""Least scratch memory, in bytes, for which a pool is made."""

UNIT = 256
"""Bytes to a multiple of which the arena rounds up every request."""

_registered = False
_registering = threading.Lock()


def pool_size(nbytes: int) -> int:
    """Return the size of a pool for `nbytes` of scratch memory and a step's small values; 0 where none pays off."""
    return nbytes + nbytes // 64 + (1 << 17) if nbytes >= LEAST else 0


def use_pool(options: Any, nbytes: int) -> None:
    """Let a session with these ``SessionOptions`` take its scratch memory from the pool.

    The first session of a process sets the pool's size to `nbytes`; the pool grows where a later session needs more,
    and is kept when sessions are closed.
    """
    with _registering:
        _register(nbytes)
    options.enable_cpu_mem_arena = True
    options.add_session_config_entry("session.use_env_allocators", "1")
    # Weights would fill the pool.
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")


def _register(nbytes: int) -> None:
    """Make the pool, unless there is one: ours, or one that the program registered itself."""
    import onnxruntime

    global _registered
    if not _registered:
        where = onnxruntime.OrtMemoryInfo(
            "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
        )
        limits = {"max_mem": 0, "arena_extend_strategy": 0, "initial_chunk_size_bytes": nbytes,
                  "max_dead_bytes_per_chunk": -1, "initial_growth_chunk_size_bytes": _GROWTH,
                  "max_power_of_two_extend_bytes": _GROWTH}  # fmt: skip
        try:
            onnxruntime.create_and_register_allocator(where, onnxruntime.OrtArenaCfg(limits))
        except Exception as error:
            if "already" not in str(error):
                raise ModelError(f"onnxruntime cannot make a pool for scratch memory: {error}") from error
        _registered = True


_GROWTH = 1 << 18
