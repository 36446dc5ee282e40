"""Memory of fine-tuning GPT-2 (124 million parameters, AdamW) by batch size: steps of PyTorch and ours.

*eager* and *checkpointed* are PyTorch's, the second with every block under `torch.utils.checkpoint`: parameters,
optimizer state and batch, and the rise of the process over a step. *ours* is the exported step by `Loop`, as it is, and
*in the budget* a file rewritten for it: all that the process takes, ONNX Runtime's bookkeeping included. Steps of 128
tokens, without dropout; ours take the loss in eight parts. Linux only.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import onnx

from onnx_remat.errors import BudgetInfeasibleError
from onnx_remat.measure import training_memory
from onnx_remat.rewrite.pipeline import rewrite_model
from scripts.child import call

ITEMS = ("1", "2", "4", "8", "16")
NAME = "gpt2-12-adamw"
HEADS = ("batch", "eager, MB", "checkpointed, MB", "ours, MB", "in the budget, MB", "compute")


def by_torch(batch: int, checkpointed: bool) -> int:
    """Bytes that a step of PyTorch's takes of this process."""
    from sample_models.networks import torch_models
    from scripts.tables.race import torch_step

    def case() -> torch_models.Case:
        made = torch_models.gpt2(12, batch=batch)
        if checkpointed:
            made.model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
            made.model.train()
        return replace(made, optimizer=torch_models.MODELS[NAME]().optimizer)

    torch_models.MODELS["this"] = case
    return torch_step("this", False)[0]


def export(path: Path) -> None:
    """The step with its batch left open, its loss in parts."""
    from sample_models.networks import torch_models

    case = replace(torch_models.gpt2(12, batch=2), optimizer=torch_models.MODELS[NAME]().optimizer)
    free = {"dynamic_dims": {key: {0: "batch"} for key in case.batch}, "loss_parts": 8}
    onnx.save(torch_models.builder(lambda: replace(case, options=case.options | free))(), path)


def rows(batch: str, *, budget: str = "2GB", effort: float = 30.0) -> Iterator[tuple[str, ...]]:
    """The row of one batch size."""
    dims = {"batch": int(batch)}
    torchs = (f"{call(by_torch, int(batch), checkpointed).answer / 1e6:,.0f}" for checkpointed in (False, True))
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as home:
        export(path := Path(home) / "step.onnx")
        plain = training_memory.measure(path, dims).total
        try:
            result = rewrite_model(path, budget, dims=dims, effort=effort, time_limit=600)
            result.save(small := Path(home) / "small.onnx", force=True)
            taken = f"{training_memory.measure(small, dims).total / 1e6:,.0f}"
            compute = f"{result.report.extra_compute:+.1%}"
        except BudgetInfeasibleError as error:
            taken, compute = "", str(error).partition(";")[0]
    yield (batch, *torchs, f"{plain / 1e6:,.0f}", taken, compute)
