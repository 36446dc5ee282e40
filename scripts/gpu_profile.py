"""Kernels that a training step runs on a real GPU, by PyTorch's profiler, which sees those of every library.

    python -m scripts.gpu_profile FOLDER [--only STEP] [--torch] [--keep TRACES]

FOLDER is that of `scripts.gpu_truth plan`; steps run as exported, unfused and fused. *Busy* is the time in which a
kernel or a copy runs, *idle* the rest of a step, which waits for launches or for the host. TRACES gets
the kernels of each step in their order, as JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from scripts.gpu_truth import FUSED, ORIGINAL, WARM, by_step, kept, our_step, torch_step

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


def child(job: Mapping[str, Any]) -> None:
    """Trace what a job says, and print it."""
    from onnx_remat.session import session as session_module

    if job["how"] == "eager":
        step = torch_step(job["step"], job["batch"], compiled=False)
    else:
        session_module.plan_in_child = kept  # type: ignore[attr-defined]
        _, step = our_step(job, graph=False)
    print(json.dumps(traced(step)))


def row(step: str, name: str, ms: float, kernels: Sequence[Kernel]) -> tuple[str, ...]:
    """Return the table's row."""
    busy, end = 0.0, float("-inf")
    spent = dict.fromkeys(HEADS[6:], 0.0)
    for kernel, start, duration in kernels:
        busy += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
        spent[next((kind for kind, pattern in KINDS if re.search(pattern, kernel)), "other")] += duration
    of_step = busy / 1e3 / STEPS
    parts = [f"{each / 1e3 / STEPS:.2f}" for each in spent.values()]
    return step, name, f"{ms:.2f}", f"{of_step:.2f}", f"{ms - of_step:.2f}", str(len(kernels) // STEPS), *parts


def rows(folder: Path, only: Sequence[str], with_torch: bool, keep: Path | None) -> Iterator[tuple[str, ...]]:
    """Return the rows of the steps of a folder."""
    for step, plans in by_step(folder).items():
        if only and step not in only:
            continue
        jobs: list[tuple[str, dict[str, Any]]] = []
        if with_torch:
            jobs.append(("PyTorch", {"how": "eager", "step": step, "batch": plans[0].dims.get("batch", 1)}))
        for each in plans:
            if each.budget not in (ORIGINAL, ORIGINAL + FUSED):
                continue
            path = str(folder / each.path)
            jobs.append((each.budget, {"how": "Session", "path": path, "dims": each.dims, "fuse": each.fuse}))
        for name, job in jobs:
            command = [sys.executable, "-m", "scripts.gpu_profile", "child", json.dumps(job)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                yield step, name, (done.stderr.strip().splitlines() or ["it died"])[-1][-300:]
                continue
            ms, kernels = json.loads(done.stdout.splitlines()[-1])
            if keep:
                keep.mkdir(parents=True, exist_ok=True)
                (keep / f"{step}-{re.sub(r'[^a-z0-9]+', '-', name.lower())}.json").write_text(json.dumps(kernels))
            yield row(step, name, ms, kernels)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("job", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--only", action="append", default=[], help="these steps")
    parser.add_argument("--torch", action="store_true", help="PyTorch's step, too")
    parser.add_argument("--keep", type=Path, metavar="TRACES", help="a folder for the kernels")
    given = parser.parse_args()
    if given.folder == "child":
        child(json.loads(given.job))
        return
    from scripts import results

    results.printed([HEADS, *rows(Path(given.folder), given.only, given.torch, given.keep)])


if __name__ == "__main__":
    main()
