"""onnxruntime-training's own training models, rewritten and trained there.

    python scripts/ort_training_env.py FOLDER
    python -m scripts.ort_training FOLDER/bin/python --budget 70%

For each model: what onnxruntime-training makes of it, rewritten to the budget; both files trained in its Module with
its AdamW, peaks measured, losses and executed order compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import onnx_remat
from onnx_remat.units import format_bytes

DIMS: Mapping[str, Mapping[str, int]] = {
    "mlp": {"batch": 16384},
    "cnn": {"batch": 64},
    "transformer": {"batch": 256, "tokens": 4096},
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One model before and after; bytes. `losses` are pairs, step by step.

    `state_difference` is the largest relative difference of a parameter or statistic after them; `order_kept`: the
    nodes ran in the order that was emulated.
    """

    budget: int
    simulated: tuple[int, int]
    measured: tuple[int, int]
    extra_compute: float
    losses: tuple[tuple[float, float], ...]
    state_difference: float
    order_kept: bool

    @property
    def loss_difference(self) -> float:
        """Largest relative difference of the losses of a step."""
        return max(abs(a - b) / abs(a) for a, b in self.losses)


def ask(python: str, task: str, *arguments: str) -> Any:
    """What the worker prints; raises CalledProcessError where it fails."""
    # Otherwise glibc keeps freed blocks in its heap, and resident memory does not fall.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    worker = Path(__file__).with_name("ort_training_worker.py")
    done = subprocess.run(
        [python, str(worker), task, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=environment, check=True,
    )  # fmt: skip
    return None if task == "artifacts" else json.loads(done.stdout.splitlines()[-1])


def compare(python: str, name: str, budget: str, folder: Path, steps: int, **options: Any) -> Comparison:
    """Make a model's artifacts in `folder`, rewrite its training model and train both files there."""
    ask(python, "artifacts", name, str(folder))
    before, after = folder / "training_model.onnx", folder / "rewritten.onnx"
    dims = dict(DIMS[name])
    result = onnx_remat.rewrite_model(before, budget, dims=dims, verify="none", **options)
    result.save(after)
    trained = [ask(python, "train", str(folder), str(f), str(steps), json.dumps(dims)) for f in (before, after)]
    executed = ask(python, "order", str(folder), str(after), json.dumps(dims))
    view, order = result.executed.view, result.executed.order.order
    return Comparison(
        result.report.budget,
        (result.report.before.total, result.report.after.total),
        (trained[0]["peak_bytes"], trained[1]["peak_bytes"]),
        result.report.extra_compute,
        tuple(zip(trained[0]["losses"], trained[1]["losses"], strict=True)),
        _difference(*(Path(f"{file}.npz") for file in (before, after))),
        executed == [view.graph.ops[i].node.name for i in order],
    )


def _difference(before: Path, after: Path) -> float:
    with np.load(before) as a, np.load(after) as b:
        return max(float(np.abs(a[n] - b[n]).max() / max(np.abs(a[n]).max(), 1e-30)) for n in a.files)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="the interpreter of an environment with onnxruntime-training")
    parser.add_argument("--budget", default="70%")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds per plan")
    parser.add_argument("--model", action="append", choices=tuple(DIMS))
    given = parser.parse_args()
    titles = ("model", "budget", "simulated", "measured", "compute", "loss", "losses differ", "new state differs")
    print("| " + " | ".join((*titles, "order kept")) + " |\n" + "| --- " * 9 + "|")
    for name in given.model or DIMS:
        with tempfile.TemporaryDirectory(prefix="onnx-remat-") as scratch:
            row = compare(given.python, name, given.budget, Path(scratch), given.steps, time_limit=given.time_limit)
        sizes = [" -> ".join(format_bytes(size) for size in pair) for pair in (row.simulated, row.measured)]
        cells = (
            name, f"{given.budget} = {format_bytes(row.budget)}", *sizes, f"{row.extra_compute:+.1%}",
            f"{row.losses[0][1]:.4f} -> {row.losses[-1][1]:.4f}", f"{row.loss_difference:.0e}",
            f"{row.state_difference:.0e}", "yes" if row.order_kept else "NO",
        )  # fmt: skip
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
