"""What a process holds while it trains a rewritten model, besides the plan: foreseen and measured.

    python -m scripts.held sample_models/*.onnx --budget 60%

Each graph is rewritten and run for some steps in fresh processes, memory patterns off (`onnx_remat.session_options()`):
with ONNX Runtime's arena, outputs dropped after each step; the same, outputs fed back as the session returned them; by
`onnx_remat.session.training.Loop`; and without the arena, on glibc as it is. In brackets what the report foresees, as
the difference. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from onnx_remat.ir.naming import renewals
from onnx_remat.measure import probe
from onnx_remat.measure.processes import GIVES_BACK, session_job
from onnx_remat.ort.peaks import Reserves
from onnx_remat.process.worker import QUIET
from onnx_remat.rewrite.pipeline import rewrite_model
from onnx_remat.session import heap
from onnx_remat.session.training import Loop

WAYS = ("dropped", "fed back", "loop", "no arena")


def held(path: str, way: str, steps: int) -> int:
    """Bytes this process comes to hold over the steps: inputs, weights, and what rises above them."""
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as scratch:
        job: dict[str, Any] = {"level": "all", "threads": 0, "patient": True, "patterns": False, **session_job("cpu")}
        job["optimized"] = f"{scratch}/model.onnx"
        feeds = probe.random_feeds(session := probe.new_session(job, path, default=False), {})
        weights = probe.initializer_bytes(job["optimized"])
        session.run(None, feeds)  # faults in code and thread stacks, which are not the step's memory
        if way != "no arena":
            session = probe.new_session(job | {"optimized": ""}, path, default=True)
        heap.trim()
    names = [value.name for value in session.get_outputs()]
    state = renewals(feeds, names)
    renewed = state if way == "fed back" else {}
    inputs = sum(array.nbytes for array in feeds.values())
    before = probe.reset_peak()
    loop = Loop(session, feeds, next(name for name in names if name not in state)) if way == "loop" else None
    if loop:
        feeds = {}  # as whoever trains would: the loop has its own copies, from the first step on
    for _ in range(steps):
        if loop:
            loop.step()
            continue
        made = dict(zip(names, session.run(names, feeds), strict=True))
        feeds |= {renewed[name]: made[name] for name in renewed}
        del made
    return inputs + weights + probe.resident("VmHWM") - before


def measured(path: Path, way: str, steps: int) -> int:
    """`held` in a fresh process."""
    environment = os.environ | QUIET | (GIVES_BACK if way != "no arena" else {})
    command = [sys.executable, "-m", "scripts.held", "--child", json.dumps([str(path), way, steps])]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)


def row(graph: Path, budget: str, seconds: float, steps: int) -> str:
    """One line of the table."""
    result = rewrite_model(graph, budget, effort=seconds)
    foreseen: Reserves = result.report.arena_after
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as scratch:
        result.save(path := Path(scratch) / "small.onnx")
        found = {way: measured(path, way, steps) for way in WAYS}
    told = {"dropped": foreseen.held, "fed back": foreseen.held_fed_back, "loop": foreseen.held}
    cells = [
        f"{found[way] / 1e6:.1f}" + (f" ({told[way] / found[way] - 1:+.1%})" if way in told else "") for way in WAYS
    ]
    return f"| {graph.stem} | {result.report.after.total / 1e6:.1f} | {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", nargs="*", type=Path)
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--time-limit", type=float, default=5.0, help="seconds per plan")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(held(*json.loads(arguments.child)))
        return
    print("| graph | plan | with the arena | outputs fed back | by Loop | no arena, glibc as it is |")
    print("| --- " * 6 + "|", flush=True)
    for graph in arguments.graphs:
        print(row(graph, arguments.budget, arguments.time_limit, arguments.steps), flush=True)


if __name__ == "__main__":
    main()
