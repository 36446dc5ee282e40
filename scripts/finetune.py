"""Memory of fine-tuning GPT-2 (124 million parameters, AdamW) by batch size: steps of PyTorch and ours.

    python -m scripts.finetune [--budget 2GB] [--batch 1] [--batch 8] [--save finetune]

A saved table keeps its rows of batch sizes that are not measured again, where the command is the same.

*eager* and *checkpointed* are PyTorch's, the second with every block under `torch.utils.checkpoint`: parameters,
optimizer state and batch, and the rise of the process over a step. *ours* is the exported step by `Loop`, as it is, and
*in the budget* a file rewritten for it: all that the process takes, ONNX Runtime's bookkeeping included. Steps of 128
tokens, without dropout; ours take the loss in eight parts. Linux only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import onnx

from onnx_remat.errors import BudgetInfeasibleError
from onnx_remat.measure import residence
from onnx_remat.rewrite.pipeline import rewrite_model
from onnx_remat.units import parse_budget
from scripts import results

NAME = "gpt2-12-adamw"
HEADS = ("batch", "eager, MB", "checkpointed, MB", "ours, MB", "in the budget, MB", "compute")


def child(batch: int, checkpointed: bool) -> None:
    """Say how much a step of PyTorch's takes."""
    from scripts import torch_models
    from scripts.race import torch_step

    def case() -> torch_models.Case:
        made = torch_models.gpt2(12, batch=batch)
        if checkpointed:
            made.model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
            made.model.train()
        return replace(made, optimizer=torch_models.MODELS[NAME]().optimizer)

    torch_models.MODELS["this"] = case
    print(torch_step("this", False)[1])


def by_torch(batch: int, checkpointed: bool) -> int:
    """Bytes that a step of PyTorch's takes."""
    command = [sys.executable, "-m", "scripts.finetune", "--child", str(batch), str(int(checkpointed))]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def export(path: Path) -> None:
    """The step with its batch left open, its loss in parts."""
    from scripts import torch_models

    case = replace(torch_models.gpt2(12, batch=2), optimizer=torch_models.MODELS[NAME]().optimizer)
    free = {"dynamic_dims": {key: {0: "batch"} for key in case.batch}, "loss_parts": 8}
    onnx.save(torch_models.builder(lambda: replace(case, options=case.options | free))(), path)


def rows(budget: int, batches: list[int], effort: float) -> Iterator[tuple[str, ...]]:
    """A line per batch size."""
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as home:
        export(path := Path(home) / "step.onnx")
        for batch in batches:
            dims = {"batch": batch}
            torchs = (f"{by_torch(batch, checkpointed) / 1e6:,.0f}" for checkpointed in (False, True))
            plain = residence.measure(path, dims).total
            try:
                result = rewrite_model(path, budget, dims=dims, effort=effort, time_limit=600)
                result.save(small := Path(home) / "small.onnx", force=True)
                taken = f"{residence.measure(small, dims).total / 1e6:,.0f}"
                compute = f"{result.report.extra_compute:+.1%}"
            except BudgetInfeasibleError as error:
                taken, compute = "", str(error).partition(";")[0]
            yield (str(batch), *torchs, f"{plain / 1e6:,.0f}", taken, compute)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="2GB")
    parser.add_argument("--batch", type=int, action="append", help="default: 1 to 16")
    parser.add_argument("--effort", type=float, default=30.0)
    parser.add_argument("--save", default="", metavar="NAME", help="of the table in docs/results/data")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(int(given.child[0]), bool(int(given.child[1])))
        return
    size = parse_budget(given.budget).bytes
    if size is None:
        raise SystemExit(f"{given.budget}: a percentage grows with the batch")
    seen = results.printed(rows(size, given.batch or [1, 2, 4, 8, 16], given.effort))
    if given.save:
        command = f"python -m scripts.finetune --budget {given.budget} --effort {given.effort:g}"
        there = (results.DATA / f"{given.save}.json").exists()
        before = results.load(given.save) if there else results.Table(command, HEADS, ())
        kept = {int(row[0]): row for row in before.rows} if before.command == command else {}
        merged = kept | {int(row[0]): row for row in seen}
        results.save(given.save, results.Table(command, HEADS, tuple(merged[batch] for batch in sorted(merged))))


if __name__ == "__main__":
    main()
