"""How far plans may be from the best possible, at three budgets: points of compute above the bound.

    python -m scripts.bound_distance FILE_OR_FOLDER... [--budgets 80%,60%,40%] [--for loop] [--save NAME]

An entry is the distance and, in brackets, the plan's extra compute; or why there is none. Budgets are of the sum of
tensors, with ``--for loop`` of what training by `Loop` takes. ``--tree`` runs another checkout, an older one say,
which takes the effort as a time limit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.results import Table, printed, save

ROOT = Path(__file__).parents[1]


def entry(path: Path, budget: str, effort: str, tree: Path, run_by: str) -> str:
    """What one run of the command says."""
    ours = ["--effort", effort, "--for", run_by] if tree == ROOT else ["--time-limit", effort]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        done = subprocess.run(
            [sys.executable, "-m", "onnx_remat", path, f"{folder}/out.onnx", "--budget", budget, "--verify", "none",
             "--json", report, *ours],
            cwd=folder, env=os.environ | {"PYTHONPATH": str(tree)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            return "impossible" if "impossible" in done.stderr else "not found"
        found = json.loads(report.read_text())
    points = [100 * found[name] for name in ("extra_compute", "extra_compute_bound")]
    return f"{max(0.0, points[0] - points[1]):.1f} (+{points[0]:.1f} %)"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, metavar="FILE_OR_FOLDER")
    parser.add_argument("--budgets", default="80%,60%,40%")
    parser.add_argument("--effort", default="6")
    parser.add_argument("--for", dest="run_by", choices=("session", "loop"), default="session")
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--save", default="", metavar="NAME", help="also write docs/results/data/NAME.json")
    given = parser.parse_args()
    budgets = given.budgets.split(",")
    files = [file for p in given.paths for file in (sorted(p.glob("*.onnx")) if p.is_dir() else [p])]
    seen = printed(
        (
            path.stem.removesuffix(".pytorch"),
            *(entry(path.resolve(), b, given.effort, given.tree.resolve(), given.run_by) for b in budgets),
        )
        for path in files
    )
    if given.save:
        flags = f"--for {given.run_by} --effort {given.effort} --save {given.save}"
        command = f"python -m scripts.bound_distance FILE_OR_FOLDER... {flags}"
        save(given.save, Table(command, ("graph", *budgets), seen))


if __name__ == "__main__":
    main()
