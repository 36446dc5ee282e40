"""`budgeted` on a GPU against PyTorch's own step: losses, memory and time.

    python -m scripts.gpu_budgeted MODEL... [--batch 32] [--budget 60%] [--cudnn-workspace 192MiB] [--out LINES]

Models are those of `sample_models.networks.torch_models`, moved to the device. Each runner is a fresh process, alone on
the device, that takes the same steps; both may use TF32. *Taken* and *time* are those of `gpu_truth`; *apart* is the
largest difference of a loss from that of PyTorch's own step, as a fraction of it. Rows are kept in LINES as they are
measured, and one that is there is not measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from scripts.child import answered
from scripts.gpu_steps import taken
from scripts.journal import Journal

HEADS = (
    "model", "runner", "limit, MB", "predicted, MB", "taken, MB", "of eager", "ms a step", "of eager", "apart",
    "made in, s",
)  # fmt: skip


def measured(
    model: str, batch: int, budget: str, workspace: str, journal: Journal, seconds: float
) -> Iterator[dict[str, Any]]:
    """PyTorch's own step, `budgeted` without a budget, and with one."""
    for how, share in (("eager", ""), ("budgeted", ""), ("budgeted", budget)):
        sizes = {"batch": batch, "budget": share, "workspace": workspace}
        key = {"measure": "budgeted", "step": model, "how": how} | sizes
        yield journal.measured(key, partial(answered, taken, key, seconds=seconds))


def cells(row: Mapping[str, Any], eager: Mapping[str, Any] | None) -> tuple[str, ...]:
    """A row of the table, compared with PyTorch's own step if that could be measured."""
    runner = ", ".join(filter(None, (row["how"], row["budget"])))
    if "error" in row:
        return row["step"], runner, row["error"], *[""] * (len(HEADS) - 3)
    if eager is not None and "error" in eager:
        eager = None
    return (
        row["step"], runner, *(f"{row[name] / 1e6:,.0f}" if row.get(name) else "" for name in ("limit", "predicted")),
        f"{row['taken'] / 1e6:,.0f}", f"{row['taken'] / eager['taken']:.2f}" if eager else "",
        f"{1e3 * row['seconds']:.1f}", f"{row['seconds'] / eager['seconds']:.2f}" if eager else "",
        f"{apart(row['losses'], eager['losses']):.1e}" if eager else "", f"{row['made']:.0f}",
    )  # fmt: skip


def apart(losses: Sequence[float], truth: Sequence[float]) -> float:
    """The largest difference, as a fraction; not a number where either is none and the other is not."""
    found, right = np.asarray(losses), np.asarray(truth)
    off = np.abs(found - right) / np.maximum(np.abs(right), np.finfo(float).tiny)
    return float(np.max(np.where(np.isnan(found) & np.isnan(right) | (found == right), 0.0, off)))


def main() -> None:
    """Print the table of some models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--cudnn-workspace", default="192MiB", help="to plan for (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="LINES", help="a file of JSON lines to add to")
    parser.add_argument("--again", action="store_true", help="measure rows of LINES again of which a part failed")
    parser.add_argument("--seconds", type=float, default=240, help="most that a row may take (default: %(default)s)")
    given = parser.parse_args()
    journal = Journal(given.out, given.again)
    print(" | ".join(HEADS), flush=True)
    for model in given.models:
        eager = None
        for row in measured(model, given.batch, given.budget, given.cudnn_workspace, journal, given.seconds):
            eager = eager or row
            print(" | ".join(cells(row, eager)), flush=True)
            print(json.dumps(row), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
