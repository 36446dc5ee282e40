"""Stacks of equal layers: a plan's seconds and compute, by few of the layers and as if no two layers were alike.

Items are numbers of layers of a GPT (width 64, batch 4, SGD); its training step is converted for the table (the
largest takes a minute). Budgets are of the peak of its tensors, seconds those of the planner alone, its kernels
compiled. Each effort, a deterministic amount of work, is a row.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import onnx

from onnx_remat.memory.buffers import simulate
from onnx_remat.plan.selectors import Request, get
from onnx_remat.plan.selectors import layers as by_layers
from onnx_remat.units import parse_budget
from scripts.tables.anytime import Graph, load

ITEMS = ("4", "12", "48", "96")
HEADS = ("layers", "ops", "effort", "as strangers, s", "compute", "by few layers, s", "compute")
EFFORTS = (4.0, 30.0)


def make(count: int) -> onnx.ModelProto:
    """The training step of a GPT of so many layers."""
    import torch
    from onnx_remat.converters.pytorch import export_training_step
    from torch.nn.functional import cross_entropy

    from sample_models.networks.cuda_models import Blocks

    torch.manual_seed(0)
    model, tokens = Blocks(count, 64, 4, 256, 64), torch.randint(0, 256, (4, 65))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    made: onnx.ModelProto = export_training_step(model, batch, cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    return made


def planned(graph: Graph, budget: str, effort: float) -> tuple[str, str]:
    """Seconds, and the extra compute of the plan."""
    problem = graph.problem
    limit = parse_budget(budget).resolve(simulate(problem, graph.baseline).peak)
    began = time.monotonic()
    schedule = get("auto")(Request(problem, limit, graph.baseline, effort=effort))
    seconds = time.monotonic() - began
    kept = simulate(problem, schedule).peak <= limit
    return f"{seconds:.1f}", f"+{schedule.overhead(problem):.2%}" if kept else "not found"


def rows(count: str, *, budget: str = "60%") -> Iterator[tuple[str, ...]]:
    """A row per effort."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gpt.onnx"
        onnx.save(make(int(count)), path)
        graph = load(path)
    planned(graph, budget, 0.1)  # compiles what is compiled
    for effort in EFFORTS:
        with mock.patch.object(by_layers, "find", lambda _: None):
            strangers = planned(graph, budget, effort)
        yield (count, f"{graph.problem.n_ops:,}", f"{effort:g}", *strangers, *planned(graph, budget, effort))
