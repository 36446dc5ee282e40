"""Seconds of a first and of a second rewrite, from a wheel and from a checkout, three times.

A wheel is built and unpacked, and the package is copied without compiled code; both are started as a user starts them,
with an empty cache folder. ``--python`` is that of an environment with nothing but what ``pip install onnx-remat
onnxruntime`` brings: numba starts slower where SciPy is there. It has this Python's version, for which the wheel's
kernels are compiled. Also the seconds that ``import onnx_remat`` takes, over those of Python alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

from scripts.child import ROOT

ITEMS = ("1", "2", "3")
HEADS = ("run", "first rewrite, s", "second, --time-limit 2s, s", "from a checkout: first", "second", "import, s")
_LEFT = shutil.ignore_patterns("__pycache__", ".*", "build", "docs", "tests")


def timed(home: Path, python: str, *command: str) -> float:
    """Seconds of a Python process that finds the copy in `home`."""
    env = os.environ | {"PYTHONPATH": str(home / "tree"), "XDG_CACHE_HOME": str(home / "cache")}
    env.pop("NUMBA_CACHE_DIR", None)
    began = time.monotonic()
    subprocess.run([python, *command], cwd=home, env=env, check=True, capture_output=True)
    return time.monotonic() - began


def rows(run: str, *, python: str = "", file: str = "sample_models/attention_stack.onnx") -> Iterator[tuple[str, ...]]:
    """First and second rewrite from a wheel, the same from a checkout, import."""
    python, path = python or sys.executable, ROOT / file
    rewrite = ["-m", "onnx_remat", str(path), "out.onnx", "--budget", "60%", "--force"]
    found: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("wheel", "checkout"):
            home = Path(folder) / name
            if name == "wheel":
                subprocess.run(
                    [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", home], cwd=ROOT, check=True,
                    capture_output=True,
                )  # fmt: skip
                zipfile.ZipFile(next(home.glob("*.whl"))).extractall(home / "tree")
            else:
                shutil.copytree(ROOT, home / "tree", ignore=_LEFT)
            found += [timed(home, python, *rewrite), timed(home, python, *rewrite, "--time-limit", "2")]
        alone = min(timed(home, python, "-c", "pass") for _ in range(3))
        found.append(min(timed(home, python, "-c", "import onnx_remat") for _ in range(3)) - alone)
    yield (run, *(f"{seconds:.1f}" for seconds in found))
