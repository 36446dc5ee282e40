"""A program on a pseudo-terminal."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def on_a_terminal(code: str) -> str:
    """Run Python code whose output and errors are a terminal, and return all that is written to it."""
    import pty

    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=theirs, stderr=theirs, env=environment) as program:
        os.close(theirs)
        text = b""
        with contextlib.suppress(OSError):  # the end, on Linux
            while data := os.read(ours, 10_000):
                text += data
    os.close(ours)
    assert program.returncode == 0, text.decode()
    return text.decode()
