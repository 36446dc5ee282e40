"""`budgeted` on a GPU against PyTorch's own step: losses, memory and time.

    python -m scripts.gpu_budgeted MODEL... [--batch 32] [--budget 60%]

Models are those of `sample_models.networks.torch_models`, moved to the device. Each runner is a fresh process, alone on
the device, that takes the same steps; both may use TF32. *Taken* and *time* are those of `gpu_truth`; *apart* is the
largest difference of a loss from that of PyTorch's own step, as a fraction of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from scripts.gpu_truth import on_device, timed, torch_step, used, warm_up

HEADS = ("model", "runner", "taken, MB", "of eager", "ms a step", "of eager", "apart", "made in, s")


def budgeted_step(name: str, batch: int, budget: str) -> Callable[[], float]:
    """A step by `budgeted` of a module on the device; `budget` may be empty."""
    from onnx_remat.converters.pytorch import budgeted

    case, given = on_device(name, batch)
    model = case.model
    options = {name: value for name, value in case.options.items() if name != "dynamic_dims"}
    step = budgeted(model, case.loss, case.optimizer(model.parameters()), given, budget or None, check=False, **options)
    print(step.summary, file=sys.stderr)
    return lambda: float(step(given))


def child(job: Mapping[str, Any]) -> None:
    """Take steps and print what they took."""
    empty = used()
    warm_up("torch")
    idle, start = used(), time.perf_counter()
    if job["how"] == "eager":
        step = torch_step(job["model"], job["batch"], False)
    else:
        step = budgeted_step(job["model"], job["batch"], job["budget"])
    made = time.perf_counter() - start
    seconds, losses = timed(step)
    print(
        json.dumps({"made": made, "seconds": seconds, "losses": losses, "taken": used() - idle, "idle": idle - empty})
    )


def rows(model: str, batch: int, budget: str) -> Iterator[tuple[str, ...]]:
    """PyTorch's own step, `budgeted` without a budget, and with one."""
    eager: dict[str, Any] = {}
    for how, share in (("eager", ""), ("budgeted", ""), (f"budgeted, {budget}", budget)):
        job = {"model": model, "batch": batch, "how": how, "budget": share}
        command = [sys.executable, "-m", "scripts.gpu_budgeted", "child", json.dumps(job)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            yield model, how, (done.stderr.strip().splitlines() or ["?"])[-1][-300:], *[""] * (len(HEADS) - 3)
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        eager = eager or found
        apart = max(abs(a - b) / abs(b) for a, b in zip(found["losses"], eager["losses"], strict=True))
        yield (
            model, how, f"{found['taken'] / 1e6:,.0f}", f"{found['taken'] / eager['taken']:.2f}",
            f"{1e3 * found['seconds']:.1f}", f"{found['seconds'] / eager['seconds']:.2f}", f"{apart:.1e}",
            f"{found['made']:.0f}",
        )  # fmt: skip


def main() -> None:
    """Print the table of some models."""
    if sys.argv[1:2] == ["child"]:
        child(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--budget", default="60%")
    given = parser.parse_args()
    print(" | ".join(HEADS), flush=True)
    for model in given.models:
        for row in rows(model, given.batch, given.budget):
            print(" | ".join(row), flush=True)


if __name__ == "__main__":
    main()
