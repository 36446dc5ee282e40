"""One pool for the scratch memory of kernels, shared by all sessions of ours in this process.

Kernels ask for scratch memory while they run and give it back. If the system gives it each time, it makes and zeroes
the pages each time. If the C library keeps it, gaps form that fit nothing. Here ONNX Runtime's own arena keeps it, made
at its first use as large as the largest scratch memory of a step: every kernel finds it empty, so all of it fits.
"""

from __future__ import annotations

from typing import Any

LEAST = 1 << 20
"""Bytes of scratch memory from which on it is pooled."""

UNIT = 256
"""Bytes to a multiple of which the arena rounds every request up."""

_registered = False


def pool_size(nbytes: int) -> int:
    """Bytes of a pool for `nbytes` of scratch memory and the small values of a step; 0 where none pays."""
    return nbytes + nbytes // 64 + (1 << 17) if nbytes >= LEAST else 0


def use_pool(options: Any, nbytes: int) -> None:
    """Let a session with these ``SessionOptions`` take its scratch memory from the pool.

    The first one of a process decides how large it is, `nbytes`; it grows by what a later one needs more, and stays
    when sessions are closed.
    """
    import onnxruntime

    global _registered
    if not _registered:
        where = onnxruntime.OrtMemoryInfo(
            "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
        )
        limits = {"max_mem": 0, "arena_extend_strategy": 0, "initial_chunk_size_bytes": nbytes,
                  "max_dead_bytes_per_chunk": -1, "initial_growth_chunk_size_bytes": _GROWTH,
                  "max_power_of_two_extend_bytes": _GROWTH}  # fmt: skip
        onnxruntime.create_and_register_allocator(where, onnxruntime.OrtArenaCfg(limits))
        _registered = True
    options.enable_cpu_mem_arena = True
    options.add_session_config_entry("session.use_env_allocators", "1")
    # Weights would fill the pool.
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")


_GROWTH = 1 << 18
