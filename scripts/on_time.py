"""How late an answer is: the command's wall time against its limit, with the machine idle and with all cores busy.

    python -m scripts.on_time FILE... [--limit 10] [--budget 60%] [--busy 2] [--save]

Each file is rewritten in a process of its own, started as a user starts it. From its wall time goes what the limit does
not cover: the start of Python, and the load of the file as the report states it (a refusal has no report: its load
counts). *late* is what is left over the limit.
The busy runs share the machine with processes that do nothing but count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from scripts.results import Table, printed, save

_HEADS = ("graph", "limit, s", "idle: answer", "after, s", "late, s", "busy: answer", "after, s", "late, s")


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


def answer(path: Path, given: argparse.Namespace) -> tuple[str, str, str]:
    """What the command said, when, and how late that was."""
    free = start()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "onnx_remat", str(path), f"{folder}/out.onnx", "--budget", given.budget]
        command += ["--time-limit", f"{given.limit}s", "--json", "-"]
        began = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = time.monotonic() - began
    if not done.returncode:
        report = json.loads(done.stdout)
        free += report["seconds"].get("load", 0.0)
    said = "plan" if not done.returncode else "refusal" if done.returncode == 3 else f"exit {done.returncode}"
    return said, f"{seconds:.1f}", f"{max(0.0, seconds - free - given.limit):.1f}"


def rows(given: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """A line per file."""
    for path in given.paths:
        idle = answer(path, given)
        with counting(given.busy):
            busy = answer(path, given)
        yield (path.stem, f"{given.limit:g}", *idle, *busy)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--limit", type=float, default=10.0)
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--busy", type=int, default=2, help="processes that keep cores busy")
    parser.add_argument("--save", action="store_true", help="also write docs/results/data/on-time.json")
    given = parser.parse_args()
    seen = printed(rows(given))
    if given.save:
        save("on-time", Table("python -m scripts.on_time FILE... --save", _HEADS, seen))


if __name__ == "__main__":
    main()
