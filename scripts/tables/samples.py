"""Does the main job keep its word? Every graph at every budget, rewritten and run.

Budgets are of the sum of tensors. Simulated and measured peaks of the original and the rewritten model (arena off; the
highest of all graph optimisation levels; in brackets simulated over measured) and the step-time ratio (steps taken in
turns, default session options) next to the extra compute that per-op times profiled on the original predict. A cell
says so where the budget is exceeded or outputs are not bitwise equal.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from onnx_remat.errors import BudgetInfeasibleError
from onnx_remat.measure import processes, verify
from onnx_remat.measure.profiling import profile
from onnx_remat.ort import runtime
from onnx_remat.rewrite.pipeline import rewrite_model
from onnx_remat.units import format_bytes

HEADS = (
    "graph", "budget", "original", "result", "compute", "step", "recomputed", "control edges", "own buffers",
)  # fmt: skip


def rows(
    file: str, *, budgets: str = "80%,60%,50%", selector: str = "auto", effort: float = 5.0
) -> Iterator[tuple[str, ...]]:
    """A row for each budget."""
    path = Path(file)
    for budget in budgets.split(","):
        with tempfile.TemporaryDirectory(prefix="onnx-remat-") as scratch:
            yield path.stem, *_cells(path, budget, selector, effort, Path(scratch))


def _cells(path: Path, budget: str, selector: str, effort: float, folder: Path) -> tuple[str, ...]:
    (times := folder / "profile.json").write_text(profile(path).to_json())
    try:
        result = rewrite_model(path, budget, selector=selector, effort=effort, costs=str(times), run_by="session")
    except BudgetInfeasibleError as error:
        return budget, "", f"infeasible: {error}", *[""] * 5
    result.save(target := folder / path.name)
    report = result.report
    before = processes.measure(path).peak_bytes
    after = {level: processes.measure(target, level).peak_bytes for level in runtime.LEVELS}
    outputs = verify.bitwise(path, target)
    seconds = processes.race(path, target, runs=15)
    shown = [
        f"{format_bytes(found)} ({simulated / found - 1:+.2%})"
        for found, simulated in ((before, report.before.total), (after["all"], report.after.total))
    ]
    if max(after.values()) > report.budget:
        shown[1] += f" EXCEEDED: {format_bytes(max(after.values()))}"
    if "bitwise equal" not in outputs:
        shown[1] += f" {outputs}"
    return (
        f"{budget} = {format_bytes(report.budget)}", *shown, f"{report.extra_compute:+.1%}",
        f"{seconds[1] / seconds[0] - 1:+.1%}", str(report.recomputed), str(report.control_edges),
        str(report.private_values),
    )  # fmt: skip
