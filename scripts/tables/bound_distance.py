"""How far plans may be from the best possible, at three budgets: points of compute above the bound.

An entry is the distance and, in brackets, the plan's extra compute; or why there is none. Budgets are of the sum of
tensors, with ``--run-by loop`` of what training by `Loop` takes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

BUDGETS = ("80%", "60%", "40%")
HEADS = ("graph", *BUDGETS)


def entry(path: Path, budget: str, effort: float, run_by: str) -> str:
    """What one run of the command says."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        done = subprocess.run(
            [sys.executable, "-m", "onnx_remat", path, f"{folder}/out.onnx", "--budget", budget, "--verify", "none",
             "--json", report, "--effort", str(effort), "--for", run_by],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            return "impossible" if "impossible" in done.stderr else "not found"
        found = json.loads(report.read_text())
    names = ("extra_compute", "extra_compute_in_kernels", "extra_compute_bound")
    compute, inside, bound = (100 * found[name] for name in names)
    return f"{max(0.0, compute - inside - bound):.1f} (+{compute:.1f} %)"


def rows(path: str, *, effort: float = 6.0, run_by: str = "session") -> Iterator[tuple[str, ...]]:
    """The row of one file."""
    yield (Path(path).stem.removesuffix(".pytorch"), *(entry(Path(path), b, effort, run_by) for b in BUDGETS))
