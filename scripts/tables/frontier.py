"""Time against memory: PyTorch, its checkpointing, ``torch.compile`` under memory budgets, and us, in turns in one run.

Runners, memory and time are those of `scripts.tables.race`. PyTorch eager also checkpoints each block; torch.compile
has its ``activation_memory_budget`` at several values; our step is rewritten to shares of what PyTorch eager takes.
``--plot FILE`` draws all models of the run. Linux only.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.child import call, in_turns
from scripts.tables.race import check_losses, export, memory_in_torch, our_step, torch_step

ITEMS = ("vision transformer", "masked language", "gpt2-4-half", "u-net", "digits", "resnet18")
COMPILED = (1.0, 0.8, 0.5, 0.2)
HEADS = ("model", "runner", "memory, MB", "of eager", "ms a step", "of eager", "compute")

_EAGER, _CHECKPOINTED, _COMPILED, _OURS = "PyTorch eager", "PyTorch, checkpointed", "torch.compile", "ours"
_Point = tuple[float, float]
_points: dict[str, dict[str, list[_Point]]] = {}
"""Megabytes and milliseconds by model and kind of runner, for the picture."""


def rows(
    model: str, *, budgets: str = "80%,60%,50%,40%,30%", effort: float = 5.0, turns: int = 8, plot: str = ""
) -> Iterator[tuple[str, ...]]:
    """The rows of one model."""
    from onnx_remat.errors import BudgetInfeasibleError
    from onnx_remat.rewrite.pipeline import rewrite_model

    compute, refused = dict[str, str](), []
    theirs = call(memory_in_torch, model).answer
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as home:
        step = Path(home) / "ours.onnx"
        call(export, model, str(step))
        first = str(step.with_suffix(".npz"))
        jobs: list[tuple[Any, ...]] = [
            (_EAGER, torch_step, model, False), (_CHECKPOINTED, torch_step, model, False, 1.0, True),
            *((f"{_COMPILED}, {share:g}", torch_step, model, True, share) for share in COMPILED),
            (_OURS, our_step, str(step), first),
        ]  # fmt: skip
        for budget in budgets.split(","):
            limit = int(theirs * float(budget.strip("%")) / 100)
            try:
                result = rewrite_model(step, limit, effort=effort, time_limit=600, run_by="loop")
            except BudgetInfeasibleError as error:
                refused.append((model, f"{_OURS}, {budget}", *[""] * 4, str(error).partition(";")[0]))
                continue
            result.save(written := Path(home) / f"{budget.strip('%')}.onnx")
            jobs.append((f"{_OURS}, {budget}", our_step, str(written), first))
            compute[f"{_OURS}, {budget}"] = f"{result.report.extra_compute:+.1%}"
        runners = in_turns(jobs, turns)
    check_losses(model, runners)
    eager, points = runners[0], _points.setdefault(model, {})
    for runner in runners:
        point = runner.first / 1e6, 1000 * min(runner.times)
        kind = runner.name if runner.name == _CHECKPOINTED else runner.name.partition(",")[0]
        points.setdefault(kind, []).append(point)
        yield (
            model, runner.name, f"{point[0]:.1f}", f"{runner.first / eager.first:.2f}", f"{point[1]:.0f}",
            f"{min(runner.times) / min(eager.times):.2f}", compute.get(runner.name, ""),
        )  # fmt: skip
    yield from refused
    if plot:
        draw(_points, Path(plot))


def draw(found: dict[str, dict[str, list[_Point]]], path: Path) -> None:
    """A panel for each model: milliseconds of a step over megabytes, a line for each kind of runner."""
    from matplotlib.figure import Figure  # the `plot` extra: the table needs none

    columns = min(3, len(found))
    lines = -(-len(found) // columns)
    figure = Figure(figsize=(4 * columns, 3.2 * lines), layout="constrained")
    for number, (model, runners) in enumerate(found.items(), 1):
        axes = figure.add_subplot(lines, columns, number, title=model, xlabel="MB", ylabel="ms a step")
        for kind, points in runners.items():
            axes.plot(*zip(*sorted(points), strict=True), marker="o", label=kind)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    figure.axes[0].legend(fontsize="small", loc="lower left")
    figure.savefig(path, metadata={"Date": None})
