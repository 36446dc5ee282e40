"""Does the main job keep its word? Rewrites every graph at every budget, runs it, and prints what was measured.

    python scripts/evaluate.py --graphs sample_models --budget 80%,60%,50%

Per graph and budget: simulated and measured peaks of the original and the rewritten model (arena off) and how far
they are apart, the measured peak at every graph optimisation level, bitwise equality of the outputs,
and the step-time ratio (steps taken in turns, default session options) against the extra compute that per-op times
profiled on the original predict.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from onnx_remat.errors import BudgetInfeasibleError
from onnx_remat.measure import processes, verify
from onnx_remat.measure.profiling import profile
from onnx_remat.ort import runtime
from onnx_remat.rewrite.pipeline import Result, rewrite_model
from onnx_remat.units import format_bytes


@dataclass(frozen=True, slots=True)
class Row:
    """One graph at one budget; bytes and fractions."""

    graph: str
    budget: str
    outcome: str
    budget_bytes: int = 0
    before_simulated: int = 0
    before_measured: int = 0
    after_simulated: int = 0
    after_measured: int = 0
    after_by_level: dict[str, int] | None = None
    outputs: str = ""
    extra_compute: float = 0.0
    step_ratio: float = 0.0
    recomputed: int = 0
    control_edges: int = 0
    private_values: int = 0
    plan_seconds: float = 0.0

    def deviation(self, which: str) -> float:
        """Simulated over measured, minus one."""
        return float(getattr(self, f"{which}_simulated") / getattr(self, f"{which}_measured") - 1)


def evaluate(path: Path, budget: str, selector: str, seconds: float, folder: Path) -> Row:
    """Rewrite, run and compare one graph at one budget."""
    times = folder / "profile.json"
    times.write_text(profile(path).to_json())
    try:
        result = rewrite_model(path, budget, selector=selector, effort=seconds, costs=str(times))
    except BudgetInfeasibleError as error:
        return Row(path.stem, budget, f"infeasible: {error}")
    target = folder / f"{path.stem}.onnx"
    result.save(target, force=True)
    return _measured(path, target, budget, result)


def _measured(path: Path, target: Path, budget: str, result: Result) -> Row:
    report = result.report
    before = processes.measure(path)
    levels = {level: processes.measure(target, level).peak_bytes for level in runtime.LEVELS}
    outputs = verify.bitwise(path, target)
    times = processes.race(path, target, runs=15)
    kept = max(levels.values()) <= report.budget
    return Row(
        path.stem, budget, "kept" if kept else "EXCEEDED", report.budget, report.before.total, before.peak_bytes,
        report.after.total, levels["all"], levels, outputs, report.extra_compute, times[1] / times[0],
        report.recomputed, report.control_edges, report.private_values, report.seconds["plan"],
    )  # fmt: skip


def show(row: Row) -> str:
    """One line of the table."""
    if not row.before_measured:
        return f"{row.graph:16} {row.budget:>5}  {row.outcome}"
    return (
        f"{row.graph:16} {row.budget:>5}  {row.outcome:8} "
        f"{format_bytes(row.before_measured):>9} ({row.deviation('before'):+.2%}) -> "
        f"{format_bytes(row.after_measured):>9} ({row.deviation('after'):+.2%}) "
        f"of {format_bytes(row.budget_bytes):>9}  "
        f"compute {row.extra_compute:+6.1%}, step {row.step_ratio - 1:+6.1%}  "
        f"{row.recomputed:4} recomputed {row.control_edges:4} edges {row.private_values:4} private  {row.outputs}"
    )


def main() -> None:
    """Evaluate every graph of a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", required=True, type=Path, help="folder of .onnx training graphs")
    parser.add_argument("--graph", action="append", help="only this one (repeat)")
    parser.add_argument("--budget", default="80%,60%,50%", help="comma-separated budgets")
    parser.add_argument("--selector", default="auto")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds per plan")
    parser.add_argument("--json", help="write the rows here (- is standard output)")
    arguments = parser.parse_args()
    rows = []
    for path in sorted(arguments.graphs.glob("*.onnx")):
        for budget in arguments.budget.split(",") if not arguments.graph or path.stem in arguments.graph else ():
            with tempfile.TemporaryDirectory(prefix="onnx-remat-") as scratch:
                row = evaluate(path, budget, arguments.selector, arguments.time_limit, Path(scratch))
            rows.append(row)
            print(show(row), file=sys.stderr if arguments.json == "-" else sys.stdout, flush=True)
    if arguments.json:
        text = json.dumps([asdict(row) for row in rows], indent=2)
        print(text) if arguments.json == "-" else Path(arguments.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
