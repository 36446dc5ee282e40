"""Data parallel training on this machine: is it one process's, what does a rank take, and where does the time go?

    python -m scripts.distributed [--steps 50] [--save]

Two models (a transformer with tied weights, a convolutional network), AdamW, exported from PyTorch, on two and four
ranks over gloo, with and without shards of the optimizer's state; each rank's part is rewritten to 70 % of what it
takes as it is. *loss* is the largest relative difference of a step's loss from one process with the joined batch;
*state* says whether all ranks end with the same bits; *resident* is what the operating system counts to a rank over the
steps, less interpreter, libraries and the engine; *budget* and *predicted* are the rank's. Then accumulation, a rank
that is killed, the shares of a step's time, and what a step would take on many GPUs, on paper. Linux only.

With ``--save`` tables go to docs/results/data; see `scripts.results`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from scripts.results import Table, save

Arrays = dict[str, Any]
ROWS, WORDS, LENGTH, PIXELS = 32, 200, 32, 32


@dataclass(frozen=True, slots=True)
class Exported:
    """A training step for `rows` rows, a first state, and how to draw a batch."""

    path: Path
    state: Arrays
    kind: str
    rows: int

    def batch(self, generator: np.random.Generator, rows: int) -> Arrays:
        if self.kind == "transformer":
            tokens = generator.integers(0, WORDS, (rows, LENGTH + 1))
            return {"input.0": tokens[:, :-1].copy(), "input.1": tokens[:, 1:].copy()}
        pixels = generator.standard_normal((rows, 3, PIXELS, PIXELS)).astype(np.float32)
        return {"input.0": pixels, "input.1": generator.integers(0, 10, rows)}


def transformer() -> Any:
    """Two blocks of attention, the words' embedding tied to the output."""
    import torch
    from torch import nn

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(WORDS, 96), nn.Parameter(0.02 * torch.randn(LENGTH, 96))
            block = nn.TransformerEncoderLayer(96, 4, 384, 0.0, "gelu", batch_first=True, norm_first=True)
            self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)

        def forward(self, tokens: Any) -> Any:
            return self.blocks(self.words(tokens) + self.places) @ self.words.weight.T

    return Transformer()


def convolutions() -> Any:
    """Six convolutions with group norms, which know no other row of the batch."""
    from torch import nn

    layers: list[nn.Module] = []
    for width, before in ((32, 3), (32, 32), (32, 32), (64, 32), (64, 64), (64, 64)):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.GroupNorm(8, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


@cache
def exported(kind: str, rows: int, folder: str) -> Exported:
    """A step for a number of rows."""
    import onnx
    import torch
    from onnx_remat.converters.pytorch import export_training_step, initial_feeds
    from torch import nn

    torch.manual_seed(0)
    model = transformer() if kind == "transformer" else convolutions()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    path = Path(folder) / f"{kind}{rows}.onnx"
    made = Exported(path, {}, kind, rows)
    batch = tuple(torch.from_numpy(a) for a in made.batch(np.random.default_rng(0), rows).values())

    def loss(output: Any, target: Any) -> Any:
        return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())

    step = export_training_step(model, batch, loss, optimizer)
    onnx.save(step, path)
    made.state.update(initial_feeds(step, model, optimizer))
    return made


def batches(made: Exported, steps: int, ranks: int, micro: int = 1) -> tuple[Arrays, list[Arrays]]:
    """Batches of every rank and step, and joined."""
    generator = np.random.default_rng(1)
    apart: Arrays = {}
    joined = []
    for step in range(steps):
        whole = made.batch(generator, made.rows * ranks * micro)
        joined.append(whole)
        for part in range(ranks * micro):
            for name, array in whole.items():
                rows = array[part * made.rows : (part + 1) * made.rows]
                apart[f"{step}.{part // micro}.{part % micro}.{name}"] = rows
    return apart, joined


def alone(made: Exported, joined: list[Arrays]) -> list[float]:
    """Losses of one process with joined batches."""
    from onnx_remat.training import Loop

    loop = Loop(str(made.path), made.state | joined[0])
    return [loop.step(batch) for batch in joined]


def distance(found: list[float], wanted: list[float]) -> str:
    return f"{max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True)):.1e}"


def same(ranks: list[Any]) -> str:
    """Are all ranks' states equal, bit by bit?"""
    first = ranks[0].state
    equal = all(rank.state[name].tobytes() == first[name].tobytes() for rank in ranks for name in first)
    return "equal" if equal else "NOT equal"


@dataclass(frozen=True, slots=True)
class Runs:
    """Where jobs run, and for how many steps."""

    folder: Path
    steps: int
    warm: str

    def job(self, name: str, made: Exported, ranks: int, micro: int = 1, **more: Any) -> tuple[list[Any], list[Arrays]]:
        """A job's ranks, and the joined batches."""
        from tests.support.ranks import launch

        apart, joined = batches(made, more.get("steps", self.steps), ranks, micro)
        job = {"model": str(made.path), "steps": self.steps, "micro": micro, "warm": self.warm} | more
        found = launch(self.folder / name, ranks, job, made.state, apart, seconds=1800)
        if bad := next((rank for rank in found if rank.code and "kill" not in more), None):
            raise SystemExit(f"{name}: {bad.errors}")
        return found, joined


def equal_rows(runs: Runs, kinds: tuple[str, ...]) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Both tables of jobs: numbers and memory, and times."""
    rows, times = [], []
    for kind in kinds:
        small = exported(kind, ROWS, str(runs.folder))
        for ranks in (2, 4):
            joined = batches(small, runs.steps, ranks)[1]
            wanted = alone(exported(kind, ROWS * ranks, str(runs.folder)), joined)
            for zero in (False, True):
                options = {"zero": zero, "budget": "70%", "effort": 3}
                found, _ = runs.job(f"{kind}{ranks}{zero}", small, ranks, options=options)
                note = found[0].notes
                rows.append((
                    kind, str(ranks), "shards" if zero else "whole", distance(note["losses"], wanted), same(found),
                    *(f"{each / 1e6:.1f}" for each in (max(r.notes["resident"] for r in found), note["predicted"])),
                    f"{max(r.notes['taken']['optimizer'] for r in found) / 1e6:.2f}", f"{note['recompute']:+.1%}",
                ))  # fmt: skip
                print(rows[-1], flush=True)
                if ranks == 2:
                    times.append((kind, "shards" if zero else "whole", *shares(found)))
    return rows, times


def shares(ranks: list[Any]) -> tuple[str, ...]:
    """Median step, and of what it is made; a run is one call of ONNX Runtime, so nothing overlaps with it."""
    steps = np.median(np.array([rank.notes["times"][2:] for rank in ranks]), axis=(0, 1))
    return (f"{1e3 * steps.sum():.1f} ms", *(f"{part:.1%}" for part in steps / steps.sum()), "0 %")


def other_rows(runs: Runs) -> list[tuple[str, str]]:
    """Accumulation, and a rank that dies."""
    small = exported("transformer", ROWS, str(runs.folder))
    four, joined = runs.job("four", small, 1, micro=4)
    once, _ = runs.job("once", small, 1)
    wanted = alone(exported("transformer", 4 * ROWS, str(runs.folder)), joined)
    taken = [sum(ranks[0].notes["taken"].values()) / 1e6 for ranks in (four, once)]
    target = str(runs.folder / "state.safetensors")
    whole, _ = runs.job("whole", small, 2, steps=20)
    dying, _ = runs.job("dying", small, 2, steps=20, save=target, save_at=8, kill=[1, 10], timeout=30)
    again, _ = runs.job("again", small, 2, steps=20, load=target)
    equal = again[0].notes["losses"] == whole[0].notes["losses"][8:] and same([*whole, *again]) == "equal"
    return [
        ("4 batches of 32 rows against 1 of 128: loss", distance(four[0].notes["losses"], wanted)),
        ("memory for 4 batches, and for 1 of the same size", f"{taken[0]:.1f} MB, {taken[1]:.1f} MB"),
        ("rank 1 killed before step 11: exit code of rank 0", str(dying[0].code)),
        ("its message", f"`{dying[0].errors.strip()}`"),
        ("from step 8's checkpoint to step 20", "bitwise equal to the run without a failure" if equal else "NOT equal"),
    ]


NETWORKS = {
    "GPT-2, 8 x 1,024 tokens": (124.4e6, 6 * 124.4e6 * 8192, 0.4),
    "ResNet-50, 64 images": (25.6e6, 64 * 24.6e9, 0.2),
}
"""Parameters, FLOPs of a rank's step, and the share of the peak that such a network is assumed to reach."""

LINKS = {8: ("8, one machine", 450e9), 64: ("64, eight machines", 50e9)}
"""Bytes per second that a GPU sends: NVLink of 900 GB/s both ways; a network card of 400 Gbit/s for each GPU."""

PEAK = 989e12
"""FLOP/s of an H100 in bfloat16."""


def paper_rows() -> list[tuple[str, ...]]:
    """What a step would take: rings that send 2 (n - 1) / n of the bytes, nothing overlapped."""
    rows: list[tuple[str, ...]] = []
    for network, (parameters, work, share) in NETWORKS.items():
        for ranks, (where, link) in LINKS.items():
            compute = work / (share * PEAK)
            for wire, size in (("float32", 4), ("bfloat16", 2)):
                sent = 2 * (ranks - 1) / ranks * parameters * size
                talk = sent / link
                rows.append((
                    network, where, wire, f"{sent / 1e6:.0f} MB", f"{1e3 * compute:.1f} ms", f"{1e3 * talk:.1f} ms",
                    f"{talk / (talk + compute):.0%}",
                    *(f"{8 * parameters / share_of / 1e6:.0f} MB" for share_of in (1, ranks)),
                ))  # fmt: skip
    return rows


HEADS = {
    "distributed": (
        "graph", "ranks", "optimizer state", "loss", "state", "resident, MB", "budget = predicted, MB",
        "optimizer state, MB", "compute",
    ),
    "distributed-times": ("graph", "optimizer state", "step", "compute", "communication", "update", "overlap"),
    "distributed-other": ("what", "found"),
    "distributed-paper": (
        "network, per GPU", "GPUs", "gradients as", "sent", "compute", "communication", "its share",
        "Adam's state", "in shards",
    ),
}  # fmt: skip


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--save", action="store_true", help="write the tables to docs/results/data")
    arguments = parser.parse_args()
    from onnx_remat.measure.training_memory import one_node

    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as scratch:
        runs = Runs(Path(scratch), arguments.steps, str(one_node(Path(scratch))))
        jobs, times = equal_rows(runs, ("transformer", "convolutions"))
        rows: tuple[Sequence[tuple[str, ...]], ...] = (jobs, times, other_rows(runs), paper_rows())
    for (name, heads), found in zip(HEADS.items(), rows, strict=True):
        table = Table(f"python -m scripts.distributed --steps {arguments.steps}", heads, tuple(found))
        print(f"\n{table.to_markdown()}", flush=True)
        if arguments.save:
            save(name, table)


if __name__ == "__main__":
    main()
