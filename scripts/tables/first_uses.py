"""Seconds of a first and of a second rewrite with nothing compiled, three times.

The package is copied to a new folder without compiled code, with an empty cache folder, and started as a user starts
it. ``--python`` is that of an environment with nothing but what ``pip install onnx-remat onnxruntime`` brings: numba
starts slower where SciPy is there. Also the seconds that ``import onnx_remat`` takes, over those of Python alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from scripts.child import ROOT

ITEMS = ("1", "2", "3")
HEADS = ("run", "first rewrite, s", "second, --time-limit 2s, s", "import, s")
_LEFT = shutil.ignore_patterns("__pycache__", ".*", "docs", "tests")


def timed(home: Path, python: str, *command: str) -> float:
    """Seconds of a Python process that finds the copy in `home`."""
    env = os.environ | {"PYTHONPATH": str(home / "tree"), "XDG_CACHE_HOME": str(home / "cache")}
    env.pop("NUMBA_CACHE_DIR", None)
    began = time.monotonic()
    subprocess.run([python, *command], cwd=home, env=env, check=True, capture_output=True)
    return time.monotonic() - began


def rows(run: str, *, python: str = "", file: str = "sample_models/attention_stack.onnx") -> Iterator[tuple[str, ...]]:
    """First rewrite, second rewrite, import."""
    python, path = python or sys.executable, ROOT / file
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        shutil.copytree(ROOT, home / "tree", ignore=_LEFT)
        rewrite = ["-m", "onnx_remat", str(path), "out.onnx", "--budget", "60%", "--force"]
        first = timed(home, python, *rewrite)
        second = timed(home, python, *rewrite, "--time-limit", "2")
        alone = min(timed(home, python, "-c", "pass") for _ in range(3))
        imported = min(timed(home, python, "-c", "import onnx_remat") for _ in range(3)) - alone
    yield (run, *(f"{seconds:.1f}" for seconds in (first, second, imported)))
