"""How late an answer is: the command's wall time against its limit, with the machine idle and with all cores busy.

Each file is rewritten in a process of its own, started as a user starts it. From its wall time goes what the limit does
not cover: the start of Python, and the load of the file as the report states it (a refusal has no report: its load
counts). *late* is what is left over the limit.
The busy runs share the machine with processes that do nothing but count.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HEADS = ("graph", "limit, s", "idle: answer", "after, s", "late, s", "busy: answer", "after, s", "late, s")


@contextlib.contextmanager
def counting(processes: int) -> Iterator[None]:
    """Processes that keep cores busy."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def start() -> float:
    """Seconds that Python takes to start and to import the command line."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "onnx_remat", "--version"], check=True, capture_output=True)
    return time.monotonic() - began


def answer(path: str, limit: float, budget: str) -> tuple[str, str, str]:
    """What the command said, when, and how late that was."""
    free = start()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "onnx_remat", path, f"{folder}/out.onnx", "--budget", budget]
        command += ["--time-limit", f"{limit}s", "--json", "-"]
        began = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = time.monotonic() - began
    if not done.returncode:
        report = json.loads(done.stdout)
        free += report["seconds"].get("load", 0.0)
    said = "plan" if not done.returncode else "refusal" if done.returncode == 3 else f"exit {done.returncode}"
    return said, f"{seconds:.1f}", f"{max(0.0, seconds - free - limit):.1f}"


def rows(path: str, *, limit: float = 10.0, budget: str = "60%", busy: int = 2) -> Iterator[tuple[str, ...]]:
    """The row of one file; `busy` processes keep cores busy."""
    idle = answer(path, limit, budget)
    with counting(busy):
        yield (Path(path).stem, f"{limit:g}", *idle, *answer(path, limit, budget))
