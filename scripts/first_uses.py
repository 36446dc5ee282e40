"""Seconds of a first and of a second rewrite with nothing compiled, three times.

    python -m scripts.first_uses [--tree FOLDER] [--python FILE] [--file FILE] [--runs 3] [--save NAME]

The package is copied to a new folder without compiled code, with an empty cache folder, and started as a user starts
it. ``--tree`` measures another checkout, an older one say; ``--python`` is that of an environment with nothing but what
``pip install onnx-remat onnxruntime`` brings: numba starts slower where SciPy is there. Also the seconds that ``import
onnx_remat`` takes, over those of Python alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.results import Table, printed, save

ROOT = Path(__file__).parents[1]
_HEADS = ("run", "first rewrite, s", "second, --time-limit 2s, s", "import, s")
_LEFT = shutil.ignore_patterns("__pycache__", ".*", "docs", "tests")


def timed(home: Path, python: str, *command: str) -> float:
    """Seconds of a Python process that finds the copy in `home`."""
    env = os.environ | {"PYTHONPATH": str(home / "tree"), "XDG_CACHE_HOME": str(home / "cache")}
    env.pop("NUMBA_CACHE_DIR", None)
    began = time.monotonic()
    subprocess.run([python, *command], cwd=home, env=env, check=True, capture_output=True)
    return time.monotonic() - began


def run(tree: Path, file: Path, python: str) -> tuple[float, float, float]:
    """First rewrite, second rewrite, import."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        shutil.copytree(tree, home / "tree", ignore=_LEFT)
        rewrite = ["-m", "onnx_remat", str(file), "out.onnx", "--budget", "60%", "--force"]
        first = timed(home, python, *rewrite)
        second = timed(home, python, *rewrite, "--time-limit", "2")
        alone = min(timed(home, python, "-c", "pass") for _ in range(3))
        imported = min(timed(home, python, "-c", "import onnx_remat") for _ in range(3)) - alone
    return first, second, imported


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--file", type=Path, default=ROOT / "sample_models" / "attention_stack.onnx")
    parser.add_argument("--python", default=sys.executable, metavar="FILE")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--save", default="", metavar="NAME", help="also write docs/results/data/NAME.json")
    given = parser.parse_args()
    runs = ((i + 1, run(given.tree.resolve(), given.file.resolve(), given.python)) for i in range(given.runs))
    seen = printed((str(number), *(f"{s:.1f}" for s in seconds)) for number, seconds in runs)
    if given.save:
        save(given.save, Table(f"python -m scripts.first_uses --save {given.save}", _HEADS, seen))


if __name__ == "__main__":
    main()
