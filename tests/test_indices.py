"""Compiled functions stay within their arrays: their tests again, with an IndexError where they do not.

Without that, what is out of bounds is read and written all the same, and is seldom seen.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

EVERY_KERNEL = [
    "tests/plan", "tests/memory/test_arena.py", "tests/memory/test_buffers.py", "tests/memory/test_layout.py",
    "tests/memory/test_order_and_buffers.py", "tests/write", "tests/fuzz", "tests/rewrite/test_samples.py",
]  # fmt: skip


def checked(*paths: str) -> None:
    """Run tests with indices checked."""
    call = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider", *paths]
    environment = os.environ | {"NUMBA_BOUNDSCHECK": "1"}
    done = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_no_move_of_the_search_leaves_its_arrays() -> None:
    checked("tests/plan/test_moves.py")


@pytest.mark.slow
@pytest.mark.parametrize("path", EVERY_KERNEL)
def test_no_compiled_function_leaves_its_arrays(path: str) -> None:
    checked(path)
