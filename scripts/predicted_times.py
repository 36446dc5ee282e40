"""How much longer a rewritten step takes than the plan says: extra compute as it is priced, and as it is measured.

    python -m scripts.predicted_times sample_models/*.onnx [--budget 60%] [--save predicted-times]

Each graph is rewritten twice for a loop: priced by the preset for a CPU, and by its own profile. The original and both
files then take steps by `Loop` in turns, each in a process of its own; *measured* is the ratio of the fastest steps,
less one: what else the machine does makes steps slower, none faster. Nothing else should run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from onnx_remat.errors import BudgetInfeasibleError
from onnx_remat.rewrite.pipeline import rewrite_model
from scripts import results
from scripts.race import Runner

HEADS = ("graph", "nodes", "unprofiled, plan", "measured", "points off", "profiled, plan", "measured", "points off")


def row(path: Path, budget: str, effort: float, turns: int) -> tuple[str, ...]:
    """One line of the table."""
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as home, ExitStack() as stack:
        profile = Path(home) / "profile.json"
        command = [sys.executable, "-m", "onnx_remat", "profile", str(path), str(profile)]
        subprocess.run(command, check=True, capture_output=True)
        runners, planned, nodes = [Runner("original", "file", str(path))], list[float](), 0
        stack.callback(runners[0].close)
        for costs in ("cpu", str(profile)):
            try:
                result = rewrite_model(path, budget, effort=effort, time_limit=600, costs=costs)
            except BudgetInfeasibleError as error:
                return (path.stem, "", str(error).partition(";")[0], "", "", "", "", "")
            nodes = result.report.nodes_before
            result.save(written := Path(home) / f"{len(planned)}.onnx")
            runners.append(Runner(written.stem, "file", str(written)))
            stack.callback(runners[-1].close)
            planned.append(result.report.extra_compute)
        for _ in range(turns):
            for runner in runners:
                runner.step()
    cells: list[str] = []
    for plan, runner in zip(planned, runners[1:], strict=True):
        measured = min(runner.times) / min(runners[0].times) - 1
        cells += [f"{plan:+.1%}", f"{measured:+.1%}", f"{100 * (measured - plan):+.1f}"]
    return (path.stem, f"{nodes:,}", *cells)


def rows(given: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """A line per graph."""
    for path in given.paths:
        yield row(path, given.budget, given.effort, given.turns)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--effort", type=float, default=3.0)
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--save", default="", metavar="NAME", help="of the table in docs/results/data")
    given = parser.parse_args()
    seen = results.printed(rows(given))
    if given.save:
        results.save(
            given.save, results.Table(f"python -m scripts.predicted_times FILE... --save {given.save}", HEADS, seen)
        )


if __name__ == "__main__":
    main()
