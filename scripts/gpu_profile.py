"""Kernels that a training step runs on a real GPU, by PyTorch's profiler, which sees those of every library.

    python -m scripts.gpu_profile FOLDER [--only STEP] [--torch] [--keep TRACES] [--out LINES]

FOLDER is that of `scripts.gpu_truth plan`; steps run as exported, unfused and fused. *Busy* is the time in which a
kernel or a copy runs, *idle* the rest of a step, which waits for launches or for the host. TRACES gets
the kernels of each step in their order, as JSON. Rows are kept in LINES as they are measured, and one that is there is
not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from scripts.child import answered
from scripts.gpu_steps import WARM, keep_plans, our_step, torch_step
from scripts.gpu_truth import FUSED, ORIGINAL, by_step, job_of
from scripts.journal import Journal

STEPS = 3
HEADS = (
    "step", "file", "ms a step", "busy", "idle", "launches", "products", "convolutions", "fused", "other", "copies",
)  # fmt: skip
KINDS = (
    ("copies", r"^copy: "),
    ("fused", r"^kernel_\d+$"),
    ("convolutions", r"cudnn|conv|wgrad|dgrad|fprop|implicit|nchw|nhwc|bn_(fw|bw)|batch_?norm"),
    ("products", r"gemm|cublas|cutlass|xmma|splitK|nvjet"),
)
"""Kinds of kernels, by what their names contain; the first that fits."""

Kernel: TypeAlias = tuple[str, float, float]
"""Its name, when it started, and how long it took, in microseconds; a copy's name starts with ``copy: ``."""


def traced(step: Callable[[], float]) -> tuple[float, list[Kernel]]:
    """Return the milliseconds of a step without a profiler, and the kernels of `STEPS` steps with one."""
    import time

    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.init()
    for _ in range(WARM):
        step()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    seconds = (time.perf_counter() - start) / STEPS
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as home:
        found.export_chrome_trace(str(path := Path(home) / "trace.json"))
        events = json.loads(path.read_text())["traceEvents"]
    names = {"kernel": "", "gpu_memcpy": "copy: ", "gpu_memset": "copy: "}
    kernels = [(names[e["cat"]] + e["name"], float(e["ts"]), float(e["dur"])) for e in events if e.get("cat") in names]
    return 1e3 * seconds, sorted(kernels, key=lambda kernel: kernel[1])


def profiled(job: Mapping[str, Any]) -> dict[str, Any]:
    """Trace what a job says, in a process of its own."""
    if job["how"] == "eager":
        step = torch_step(job["step"], job["batch"], compiled=False)
    else:
        keep_plans()
        _, step = our_step(job, graph=False)
    ms, kernels = traced(step)
    return {"ms": ms, "kernels": kernels}


def row(ms: float, kernels: Sequence[Kernel]) -> tuple[str, ...]:
    """Return the table's row, without the names of step and file."""
    busy, end = 0.0, float("-inf")
    spent = dict.fromkeys(HEADS[6:], 0.0)
    for kernel, start, duration in kernels:
        busy += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
        spent[next((kind for kind, pattern in KINDS if re.search(pattern, kernel)), "other")] += duration
    of_step = busy / 1e3 / STEPS
    parts = [f"{each / 1e3 / STEPS:.2f}" for each in spent.values()]
    return f"{ms:.2f}", f"{of_step:.2f}", f"{ms - of_step:.2f}", str(len(kernels) // STEPS), *parts


def rows(
    folder: Path, only: Sequence[str], with_torch: bool, keep: Path | None, journal: Journal, seconds: float
) -> Iterator[tuple[str, ...]]:
    """Return the rows of the steps of a folder."""
    for step, plans in by_step(folder).items():
        if only and step not in only:
            continue
        jobs: list[tuple[str, dict[str, Any]]] = []
        if with_torch:
            jobs.append(("PyTorch", {"how": "eager", "step": step, "batch": plans[0].dims.get("batch", 1)}))
        shown = [each for each in plans if each.budget in (ORIGINAL, ORIGINAL + FUSED)]
        jobs += [(each.budget, job_of(folder, each) | {"how": "Session"}) for each in shown]
        for name, job in jobs:
            key = {"measure": "profile", "step": step, "file": name, "dims": dict(plans[0].dims)}
            found = journal.measured(key, partial(_cells, step, name, job, keep, seconds))
            yield step, name, *(found["cells"] if "cells" in found else [found["error"]])


def _cells(step: str, name: str, job: Mapping[str, Any], keep: Path | None, seconds: float) -> dict[str, Any]:
    found = answered(profiled, job, seconds=seconds)
    if "error" in found:
        return found
    if keep:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"{step}-{re.sub(r'[^a-z0-9]+', '-', name.lower())}.json").write_text(json.dumps(found["kernels"]))
    return {"cells": row(found["ms"], found["kernels"])}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--only", action="append", default=[], help="these steps")
    parser.add_argument("--torch", action="store_true", help="PyTorch's step, too")
    parser.add_argument("--keep", type=Path, metavar="TRACES", help="a folder for the kernels")
    parser.add_argument("--out", type=Path, metavar="LINES", help="a file of JSON lines to add to")
    parser.add_argument("--again", action="store_true", help="measure rows of LINES again of which a part failed")
    parser.add_argument("--seconds", type=float, default=240, help="most that a row may take (default: %(default)s)")
    given = parser.parse_args()
    from scripts import results

    journal = Journal(given.out, given.again)
    made = rows(Path(given.folder), given.only, given.torch, given.keep, journal, given.seconds)
    results.printed(itertools.chain([HEADS], made))


if __name__ == "__main__":
    main()
