"""Stacks of equal layers: how long a plan takes and what it costs, planned by few of the layers and as strangers.

    python -m scripts.layers FOLDER [--layers 4,12,48,96] [--budget 60%] [--effort 4,30] [--save]

FOLDER gets training steps of GPTs of width 64 that it lacks (the largest takes minutes to convert). Efforts are
deterministic amounts of work; seconds are those of the planner alone, compiled, with nothing else running.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import onnx

from onnx_remat.memory.buffers import simulate
from onnx_remat.plan.request import Request, get
from onnx_remat.plan.selectors import layers as by_layers
from onnx_remat.units import parse_budget
from scripts.anytime import Graph, load
from scripts.results import Table, printed, save

_HEADS = ("layers", "ops", "effort", "as strangers, s", "compute", "by few layers, s", "compute")


def make(count: int, path: Path) -> None:
    """Convert a GPT of so many layers."""
    import torch
    import torch.nn.functional as F
    from onnx_remat.converters.pytorch import export_training_step

    from scripts.cuda_models import Blocks

    torch.manual_seed(0)
    model, tokens = Blocks(count, 64, 4, 256, 64), torch.randint(0, 256, (4, 65))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    step = export_training_step(model, batch, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    onnx.save(step, path)


def planned(graph: Graph, budget: str, effort: float) -> tuple[str, str]:
    """Seconds, and the extra compute."""
    problem = graph.problem
    limit = parse_budget(budget).resolve(simulate(problem, graph.baseline).peak)
    began = time.monotonic()
    schedule = get("auto")(Request(problem, limit, graph.baseline, effort=effort))
    seconds = time.monotonic() - began
    kept = simulate(problem, schedule).peak <= limit
    return f"{seconds:.1f}", f"+{schedule.overhead(problem):.2%}" if kept else "not found"


def rows(given: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """A line per number of layers and effort."""
    given.folder.mkdir(parents=True, exist_ok=True)
    for count in map(int, given.layers.split(",")):
        if not (path := given.folder / f"gpt{count}.onnx").exists():
            make(count, path)
        graph = load(path)
        for effort in map(float, given.effort.split(",")):
            with mock.patch.object(by_layers, "find", lambda _: None):
                without = planned(graph, given.budget, effort)
            yield (
                str(count),
                f"{graph.problem.n_ops:,}",
                f"{effort:g}",
                *without,
                *planned(graph, given.budget, effort),
            )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", default="4,12,48,96")
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--effort", default="4,30")
    parser.add_argument("--save", action="store_true", help="also write docs/results/data/layers.json")
    given = parser.parse_args()
    seen = printed(rows(given))
    if given.save:
        save("layers", Table("python -m scripts.layers FOLDER --save", _HEADS, seen))


if __name__ == "__main__":
    main()
