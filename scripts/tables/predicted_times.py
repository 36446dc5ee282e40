"""How much longer a rewritten step takes than the plan says: extra compute as it is priced, and as it is measured.

Each graph is rewritten twice for a loop: priced by the preset for a CPU, and by its own profile. The original and both
files then take steps by `Loop` in turns, each in a process of its own; *measured* is the ratio of the fastest steps,
less one: what else the machine does makes steps slower, none faster. Nothing else should run.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from onnx_remat.errors import BudgetInfeasibleError
from onnx_remat.rewrite.pipeline import rewrite_model
from scripts.child import in_turns
from scripts.tables.race import our_step

HEADS = ("graph", "nodes", "unprofiled, plan", "measured", "points off", "profiled, plan", "measured", "points off")


def rows(file: str, *, budget: str = "60%", effort: float = 3.0, turns: int = 21) -> Iterator[tuple[str, ...]]:
    """The row of one graph."""
    path = Path(file)
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as home:
        profile = Path(home) / "profile.json"
        command = [sys.executable, "-m", "onnx_remat", "profile", str(path), str(profile)]
        subprocess.run(command, check=True, capture_output=True)
        jobs, planned, nodes = [("original", our_step, str(path))], list[float](), 0
        for costs in ("cpu", str(profile)):
            try:
                result = rewrite_model(path, budget, effort=effort, time_limit=600, costs=costs)
            except BudgetInfeasibleError as error:
                yield (path.stem, "", str(error).partition(";")[0], "", "", "", "", "")
                return
            nodes = result.report.nodes_before
            result.save(written := Path(home) / f"{len(planned)}.onnx")
            jobs.append((written.stem, our_step, str(written)))
            planned.append(result.report.extra_compute)
        runners = in_turns(jobs, turns)
    cells: list[str] = []
    for plan, runner in zip(planned, runners[1:], strict=True):
        measured = min(runner.times) / min(runners[0].times) - 1
        cells += [f"{plan:+.1%}", f"{measured:+.1%}", f"{100 * (measured - plan):+.1f}"]
    yield (path.stem, f"{nodes:,}", *cells)
