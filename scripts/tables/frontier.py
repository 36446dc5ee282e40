"""Time against memory: PyTorch, its checkpointing, ``torch.compile`` under memory budgets, and us, in turns in one run.

Runners, memory and time are those of `scripts.tables.race`. PyTorch eager also checkpoints each block; torch.compile
has its ``activation_memory_budget`` at several values; our step is rewritten to shares of what PyTorch eager takes.
``python -m scripts.tables.frontier FILE`` draws the saved table. Linux only.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.child import call, in_turns
from scripts.results import load
from scripts.tables.race import check_losses, export, memory_in_torch, our_step, rewritten, torch_step

ITEMS = ("vision transformer", "gpt2-4-half", "u-net", "digits", "masked language", "resnet18")
COMPILED = (1.0, 0.5, 0.2)
HEADS = ("model", "runner", "memory, MB", "of eager", "ms a step", "of eager", "compute")


def rows(
    model: str, *, budgets: str = "80%,60%,40%,30%", effort: float = 5.0, turns: int = 8
) -> Iterator[tuple[str, ...]]:
    """The rows of one model."""
    theirs = call(memory_in_torch, model).answer
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as home:
        step = Path(home) / "ours.onnx"
        call(export, model, str(step))
        first = str(step.with_suffix(".npz"))
        jobs: list[tuple[Any, ...]] = [
            ("PyTorch eager", torch_step, model, False),
            ("PyTorch checkpointed", torch_step, model, False, 1.0, True),
            *((f"torch.compile, {share:g}", torch_step, model, True, share) for share in COMPILED),
            ("ours", our_step, str(step), first),
        ]  # fmt: skip
        made = rewritten(step, budgets, theirs, effort)
        jobs += [(name, our_step, path, first) for name, (path, _) in made.items() if path]
        runners = in_turns(jobs, turns)
    check_losses(model, runners)
    eager = runners[0]
    for runner in runners:
        fastest = min(runner.times)
        yield (
            model, runner.name, f"{runner.first / 1e6:.1f}", f"{runner.first / eager.first:.2f}",
            f"{1000 * fastest:.0f}", f"{fastest / min(eager.times):.2f}", made.get(runner.name, ("", ""))[1],
        )  # fmt: skip
    for name, (path, why) in made.items():
        if not path:
            yield model, name, *[""] * 4, why


def draw(rows: Sequence[Sequence[str]], path: Path) -> None:
    """A panel for each model: milliseconds of a step over megabytes, a line for each kind of runner."""
    from matplotlib.figure import Figure  # the `plot` extra: the table needs none

    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for model, runner, memory, _, fastest, *_ in rows:
        if memory:
            kinds = found.setdefault(model, {})
            kinds.setdefault(runner.partition(",")[0], []).append((float(memory), float(fastest)))
    columns = min(3, len(found))
    lines = -(-len(found) // columns)
    figure = Figure(figsize=(4 * columns, 3.2 * lines), layout="constrained")
    for number, (model, runners) in enumerate(found.items(), 1):
        axes = figure.add_subplot(lines, columns, number, title=model, xlabel="MB", ylabel="ms a step")
        for kind, points in runners.items():
            axes.plot(*zip(*sorted(points), strict=True), marker="o", label=kind)
        axes.set_xlim(left=0)
        axes.set_ylim(0, 1.08 * max(time for points in runners.values() for _, time in points))
    figure.axes[0].legend(fontsize="small", loc="lower left")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(load("frontier").rows, Path(sys.argv[1]))
