"""Peaks on a CUDA device: the smallest memory limit under which training runs, and the driver's own count."""

from __future__ import annotations

import os
from collections.abc import Callable

from onnx_remat.errors import OnnxRematError

RESOLUTION = 1 << 20
"""Precision, in bytes, to which a peak on the device is found."""

OUT_OF_MEMORY = ("Failed to allocate memory", "Available memory of", "CUDA out of memory", "CUDA failure 2")
"""Texts in ONNX Runtime's messages that mean that an arena is at its limit or the device is full."""


def provider_options(limit: int) -> dict[str, str]:
    """Return CUDA provider options: an arena that grows by the size of each request, up to `limit` bytes (0: none)."""
    options = {"arena_extend_strategy": "kSameAsRequested"}
    return options | {"gpu_mem_limit": str(limit)} if limit else options


def smallest_limit(
    runs_within: Callable[[int], bool], most: int, least: int = 0, resolution: int = RESOLUTION
) -> int:  # fmt: skip
    """Return the smallest limit, in bytes and to a resolution, for which ``runs_within(limit)``.

    It holds for `most`, and does not for `least`.

    >>> smallest_limit(lambda limit: limit >= 300_000_000, 1 << 30) - 300_000_000 < RESOLUTION
    True
    """
    low, high = least, most
    while high - low > resolution:
        middle = (low + high) // 2
        low, high = (low, middle) if runs_within(middle) else (middle, high)
    return high


def _nvml() -> object:
    try:
        import pynvml  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise OnnxRematError("nvidia-ml-py is not installed: pip install 'onnx-remat[gpu]'") from error
    pynvml.nvmlInit()
    return pynvml


def driver_bytes() -> int:
    """Return the bytes that the driver counts to this process on device 0, its CUDA context included."""
    nvml = _nvml()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)  # type: ignore[attr-defined]
    running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)  # type: ignore[attr-defined]
    return next((int(p.usedGpuMemory or 0) for p in running if p.pid == os.getpid()), 0)


def total_memory() -> int:
    """Return the bytes of memory of device 0."""
    nvml = _nvml()
    return int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(0)).total)  # type: ignore[attr-defined]
