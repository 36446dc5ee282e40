"""What training takes of the machine's memory: foreseen, and as the operating system counts it.

    python -m scripts.resident sample_models/*.onnx --budget 60%

Each graph is rewritten for a loop (``--for loop``) and trained by `run.training.Loop` in a fresh process, with
glibc as it is and no variable set. *resident* is the process's high-water mark, from before the session and the state
exist to after the last step, less what the interpreter, the libraries and a session of one node take. *foreseen* is
inputs, weights, slab, the largest scratch memory, and what onnxruntime is assumed to keep for the graph (*books*).
*time* compares a step with one of the same loop on onnxruntime's own session, steps taken in turns. Linux only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np


def state_for(arrays: Any) -> dict[str, Any]:
    """Random values: small floats, and integers that every vocabulary has."""
    generator = np.random.default_rng(0)
    state = {}
    for array in arrays:
        if np.issubdtype(np.dtype(array.dtype_name), np.floating):
            state[array.name] = np.empty(array.shape, array.dtype_name)
            state[array.name][...] = 0.1 * generator.random(array.shape, np.float32) + 0.01
        else:
            state[array.name] = generator.integers(0, 2, array.shape).astype(array.dtype_name)
    return state


def train(path: str, loss: str, steps: int) -> dict[str, int]:
    """Train in this process; bytes by what they are."""
    import onnxruntime  # noqa: F401

    from onnx_remat.run.heap import trim
    from onnx_remat.run.probe import reset_peak, resident
    from onnx_remat.run.session import Session
    from onnx_remat.run.training import Loop

    warm = sys.argv[sys.argv.index("--child") + 2]
    with Session(warm) as session:
        session.run(state_for(session.inputs))
    trim()
    base = reset_peak()
    session = Session(path, donate=True)
    opened = resident("VmRSS") - base
    state = state_for(session.inputs)
    inputs = sum(array.nbytes for array in state.values())
    loop = Loop(session, state, loss, copy=False)
    for _ in range(steps):
        loop.step()
    return {
        "resident": resident("VmHWM") - base, "now": resident("VmRSS") - base, "opened": opened, "inputs": inputs,
        "slab": session.slab_bytes, "live": session.live_bytes, "weights": session.weight_bytes,
        "workspace": session.workspace_bytes, "nodes": session.node_count, "donated": len(session.donated),
        "not_donated": len(session.not_donated),
    }  # fmt: skip


def race(path: str, loss: str, steps: int) -> float:
    """Time of a step by `Session` over that by onnxruntime's own session, steps in turns."""
    import onnxruntime

    from onnx_remat.ort.runtime import session_options
    from onnx_remat.run.session import Session
    from onnx_remat.run.training import Loop

    options = session_options()
    options.log_severity_level = 4
    options.add_session_config_entry("session.force_spinning_stop", "1")
    plain = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    session = Session(path, donate=True)
    state = state_for(session.inputs)
    loops = [Loop(session, state, loss), Loop(plain, state, loss)]
    times: list[list[float]] = [[], []]
    for _ in range(steps):
        for loop, taken in zip(loops, times, strict=True):
            start = time.perf_counter()
            loop.step()
            taken.append(time.perf_counter() - start)
    return statistics.median(a / b for a, b in zip(times[0][1:], times[1][1:], strict=True))


def in_child(task: str, path: Path, warm: Path, loss: str, steps: int) -> Any:
    """`train` or `race` in a fresh process."""
    job = json.dumps([task, str(path.resolve()), loss, steps])
    command = [sys.executable, "-m", "scripts.resident", "--child", job, str(warm.resolve())]
    root = Path(__file__).parents[1]
    return json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True, cwd=root).stdout.splitlines()[-1]
    )


def row(graph: Path, budget: str, effort: float, steps: int, loss: str, turns: int) -> str:
    """One line of the table; without a budget the step runs as it is."""
    import onnx
    from onnx import helper

    from onnx_remat.run.foreseen import books

    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as scratch:
        path, limit, compute = graph, 0, 0.0
        if budget:
            from onnx_remat.pipeline import rewrite_model

            result = rewrite_model(graph, budget, effort=effort, run_by="loop")
            result.save(path := Path(scratch) / "small.onnx")
            limit, compute = result.report.budget, result.report.extra_compute
        value = [helper.make_tensor_value_info(name, 1, [4]) for name in "xy"]
        small = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", value[:1], value[1:])
        warm = Path(scratch) / "warm.onnx"
        onnx.save(helper.make_model(small, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), warm)
        found = in_child("train", path, warm, loss, steps)
        ratio = in_child("race", path, warm, loss, turns) if turns else float("nan")
    kept = books(found["nodes"])
    foreseen = sum(found[part] for part in ("inputs", "weights", "slab", "workspace")) + kept
    parts = (limit, found["resident"], foreseen, found["inputs"], found["slab"], found["live"], kept)
    cells = " | ".join(f"{part / 1e6:.1f}" for part in parts)
    donated = f"{found['donated']} of {found['donated'] + found['not_donated']}"
    return f"| {graph.stem} | {cells} | {found['nodes']} | {donated} | {compute:+.1%} | {ratio:.3f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", nargs="*", type=Path)
    parser.add_argument("--budget", default="", help="rewrite to this budget first")
    parser.add_argument("--effort", type=float, default=5.0, help="of each plan, see onnx-remat --effort")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--turns", type=int, default=9, help="steps timed on either side; 0 for none")
    parser.add_argument("--loss", default="loss")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        task, *job = json.loads(arguments.child[0])
        print(json.dumps({"train": train, "race": race}[task](*job)))
        return
    print("| graph | budget | resident | foreseen | inputs | slab | live | books | nodes | donated | compute | time |")
    print("| --- " * 12 + "|", flush=True)
    for graph in arguments.graphs:
        how = arguments.budget, arguments.effort, arguments.steps, arguments.loss, arguments.turns
        print(row(graph, *how), flush=True)


if __name__ == "__main__":
    main()
