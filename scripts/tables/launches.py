"""Launches of kernels in a step on a CUDA device, with elementwise nodes and rows fused and without.

ONNX Runtime's CUDA provider runs each step, as exported, by `Session` on the fake device of the tests, which counts
launches (scripts/gpu_env.py makes its environment). *nodes* are those that run, *launches* those of ONNX Runtime's own
kernels and of ours; what cuBLAS and cuDNN launch is not among them. *slab* and *moved*, the bytes that all nodes read
and write, are in megabytes. The milliseconds are what the planner predicts for a device, by launches, bytes and
arithmetic (``--costs``).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from scripts.child import call
from scripts.tables.race import ITEMS as RACE
from scripts.tables.race import export
from tests.support.fake_cuda import here

ITEMS = (*RACE, "language, 48 texts", "masked language")
COSTS = ("h100", "t4")
HEADS = (
    "step", "nodes", "fused", "kernels", "launches", "fused", "ratio", "moved, MB", "fused", "ratio", "slab, MB",
    "fused", "H100, ms", "fused", "T4, ms", "fused",
)  # fmt: skip


def rows(name: str) -> Iterator[tuple[str, ...]]:
    """The row of one step."""
    if why := here.why_not():
        raise SystemExit(why)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.onnx"
        call(export, name, str(path))
        plain, fused = here.ask("tests.support.fake_cuda.launches", {"path": str(path), "costs": COSTS})
    launches, moved, slab = ((plain[key], fused[key]) for key in ("launches", "moved", "slab"))
    yield (
        name, str(plain["nodes"]), str(fused["nodes"]), str(fused["driven"]),
        *map(str, launches), f"{launches[1] / launches[0]:.2f}",
        *(f"{nbytes / 1e6:.0f}" for nbytes in moved), f"{moved[1] / moved[0]:.2f}",
        *(f"{nbytes / 1e6:.1f}" for nbytes in slab),
        *(f"{1e3 * side['seconds'][device]:.1f}" for device in COSTS for side in (plain, fused)),
    )  # fmt: skip
