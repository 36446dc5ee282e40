"""What training takes of the machine's memory: foreseen, and as the operating system counts it.

    python -m scripts.resident sample_models/*.onnx --budget 60%
    python -m scripts.resident FOLDER/*.onnx --budget 60% --save resident-60

With ``--save`` the table goes to docs/results/data, too; see `scripts.results`.

Each graph is rewritten for a loop (``--for loop``) and trained by `run.training.Loop` in a fresh process, with
glibc as it is and no variable set. *resident* is the process's high-water mark, from before the session and the state
exist to after the last step, less what the interpreter, the libraries and a session of one node take. *foreseen* is
inputs, weights, slab, the largest scratch memory, and what onnxruntime is assumed to keep for the graph (*books*).
*step time* compares a step with one of the same loop on onnxruntime's own session, *of the original* with the original
on such a session, default options; steps are taken in turns. Linux only.
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


def race(path: str, original: str, loss: str, steps: int) -> tuple[float, float]:
    """Time of a step by `Session` over that by onnxruntime's own session, of the same file and of another, in turns."""
    import onnxruntime

    from onnx_remat.ort.runtime import session_options
    from onnx_remat.run.residence import state_for
    from onnx_remat.run.session import Session
    from onnx_remat.run.training import Loop

    def plain(file: str, options: onnxruntime.SessionOptions) -> onnxruntime.InferenceSession:
        options.log_severity_level = 4
        options.add_session_config_entry("session.force_spinning_stop", "1")
        return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    session = Session(path, donate=True)
    state = state_for(session.inputs)
    sessions = session, plain(path, session_options()), plain(original, onnxruntime.SessionOptions())
    loops = [Loop(each, state, loss) for each in sessions]
    times: list[list[float]] = [[] for _ in loops]
    for _ in range(steps):
        for loop, taken in zip(loops, times, strict=True):
            start = time.perf_counter()
            loop.step()
            taken.append(time.perf_counter() - start)
    ours, *others = (taken[1:] for taken in times)
    of_the_same, of_the_original = (
        statistics.median(a / b for a, b in zip(ours, each, strict=True)) for each in others
    )
    return of_the_same, of_the_original


def in_child(path: Path, original: Path, loss: str, steps: int) -> tuple[float, float]:
    """`race` in a fresh process."""
    job = json.dumps([str(path.resolve()), str(original.resolve()), loss, steps])
    command = [sys.executable, "-m", "scripts.resident", "--child", job]
    root = Path(__file__).parents[1]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root).stdout.splitlines()[-1]
    same, of_the_original = json.loads(said)
    return same, of_the_original


HEADS = (
    "graph", "budget, MB", "resident", "foreseen", "inputs", "slab", "live", "bookkeeping", "nodes", "donated",
    "compute", "step time", "of the original",
)  # fmt: skip


def row(graph: Path, budget: str, effort: float, steps: int, loss: str, turns: int) -> tuple[str, ...]:
    """One line of the table; without a budget the step runs as it is."""
    from onnx_remat.errors import BudgetInfeasibleError
    from onnx_remat.run.foreseen import books
    from onnx_remat.run.residence import measure

    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as scratch:
        path, limit, compute = graph, 0, 0.0
        if budget:
            from onnx_remat.pipeline import rewrite_model

            try:
                result = rewrite_model(graph, budget, effort=effort, time_limit=600, run_by="loop")
            except BudgetInfeasibleError as error:
                return (graph.stem, *([""] * (len(HEADS) - 2)), str(error).partition(";")[0])
            result.save(path := Path(scratch) / "small.onnx")
            limit, compute = result.report.budget, result.report.extra_compute
        found = measure(path, steps=steps)
        ratios = in_child(path, graph, loss, turns) if turns else ()
    kept = books(found.nodes)
    foreseen = found.inputs + found.weights + found.slab + found.workspace + kept
    parts = (limit, found.total, foreseen, found.inputs, found.slab, found.live, kept)
    donated = f"{found.donated} of {found.donated + found.not_donated}"
    return (
        graph.stem, *(f"{part / 1e6:.1f}" for part in parts), str(found.nodes), donated, f"{compute:+.1%}",
        *([f"{ratio:.3f}" for ratio in ratios] or ["", ""]),
    )  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", nargs="*", type=Path)
    parser.add_argument("--budget", default="", help="rewrite to this budget first")
    parser.add_argument("--effort", type=float, default=5.0, help="of each plan, see onnx-remat --effort")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--turns", type=int, default=9, help="steps timed on either side; 0 for none")
    parser.add_argument("--loss", default="loss")
    parser.add_argument("--save", default="", metavar="NAME", help="of the table in docs/results/data")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(race(*json.loads(arguments.child))))
        return
    from scripts import results

    rows = []
    print("| " + " | ".join(HEADS) + " |\n" + "| --- " * len(HEADS) + "|", flush=True)
    for graph in arguments.graphs:
        how = arguments.budget, arguments.effort, arguments.steps, arguments.loss, arguments.turns
        rows.append(row(graph, *how))
        print("| " + " | ".join(rows[-1]) + " |", flush=True)
    if arguments.save:
        command = f"python -m scripts.resident FOLDER/*.onnx --budget {arguments.budget} --effort {arguments.effort:g}"
        results.save(arguments.save, results.Table(command, HEADS, tuple(rows)))


if __name__ == "__main__":
    main()
