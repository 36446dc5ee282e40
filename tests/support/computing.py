"""Seconds of computing, whatever else the machine does meanwhile."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

from onnx_remat.process import worker


def reader() -> Path | None:
    """What the system says of the process that reads models, where it lives."""
    return Path(f"/proc/{worker._running[1].process.pid}") if worker._running and worker._running[1].lives() else None


def computed() -> float:
    """Seconds that this process, the one that reads and all that have ended have computed."""
    ended, live = resource.getrusage(resource.RUSAGE_CHILDREN), 0
    if there := reader():
        live = sum(map(int, (there / "stat").read_text().rpartition(")")[2].split()[11:13]))
    return time.process_time() + ended.ru_utime + ended.ru_stime + live / os.sysconf("SC_CLK_TCK")
