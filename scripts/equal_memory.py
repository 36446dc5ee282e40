"""How much recompute the same memory costs: by a loop of ours, and by onnxruntime's own session.

    python -m scripts.equal_memory sample_models/*.onnx --budget 60% --save equal-memory

Each graph is rewritten for a loop and trained for some steps in a fresh process (`scripts.resident`). For onnxruntime's
session (`onnx_remat.session_options()`, state fed back by binding) the budget of the plan is then lowered until
training takes no more than the loop was seen to take. *compute* is what each plan computes again. Linux only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from onnx_remat.errors import BudgetInfeasibleError
from onnx_remat.measure import residence
from onnx_remat.rewrite.pipeline import rewrite_model
from onnx_remat.units import format_bytes

HEADS = ("graph", "resident", "by a loop", "by a session", "the session's plan", "it takes")
_TRIES = 6  # plans for a session: its overhead hardly changes from one to the next, so three are often enough
_NEAR = 0.01  # of the loop's memory: a session that takes so little less is as good as equal


def taken(path: str, loss: str, steps: int) -> int:
    """Bytes that this process comes to take for some steps by onnxruntime's session."""
    from onnx_remat.measure.probe import resident
    from onnx_remat.session.training import Loop
    from scripts.patterns import feeds_of, opened, warmed

    base = warmed()
    session = opened(path, default=False)
    loop = Loop(session, feeds_of(session), loss)
    for _ in range(steps):
        loop.step()
    return int(resident("VmHWM") - base)


def in_child(path: Path, loss: str, steps: int) -> int:
    """`taken` in a fresh process."""
    command = [sys.executable, "-m", "scripts.equal_memory", "--child", json.dumps([str(path), loss, steps])]
    root = Path(__file__).parents[1]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, cwd=root).stdout.splitlines()[-1])


def by_session(graph: Path, most: int, effort: float, loss: str, steps: int) -> tuple[str, str, str]:
    """Recompute, budget and memory of the best plan for a session that takes at most so much; else what is least."""
    found, budget, seen = ("none", "", ""), float(most), 0
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as home:
        path = Path(home) / "small.onnx"
        for _ in range(_TRIES):
            try:
                result = rewrite_model(graph, int(budget), effort=effort, time_limit=600, run_by="session")
            except BudgetInfeasibleError:
                return found if found[0] != "none" else ("none", f"under {format_bytes(int(budget))}", "")
            result.save(path, force=True)
            seen = in_child(path, loss, steps)
            if seen <= most:
                found = (f"{result.report.extra_compute:+.1%}", format_bytes(int(budget)), format_bytes(seen))
                if seen >= (1 - _NEAR) * most:
                    break
            budget += most - seen - _NEAR / 2 * most  # a little lower: else it creeps up on it from above
    return found


def row(graph: Path, budget: str, effort: float, loss: str, steps: int) -> tuple[str, ...]:
    """One line of the table."""
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as home:
        try:
            result = rewrite_model(graph, budget, effort=effort, time_limit=600, run_by="loop")
        except BudgetInfeasibleError as error:
            return (graph.stem, "", str(error).partition(";")[0], "", "", "")
        result.save(path := Path(home) / "small.onnx")
        most = residence.measure(path, steps=steps).total
    compute = f"{result.report.extra_compute:+.1%}"
    return (graph.stem, format_bytes(most), compute, *by_session(graph, most, effort, loss, steps))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", nargs="*", type=Path)
    parser.add_argument("--budget", default="60%", help="of training by a loop")
    parser.add_argument("--effort", type=float, default=5.0, help="of each plan, see onnx-remat --effort")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--loss", default="loss")
    parser.add_argument("--save", default="", metavar="NAME", help="of the table in docs/results/data")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(taken(*json.loads(arguments.child)))
        return
    from scripts import results

    rows = []
    print("| " + " | ".join(HEADS) + " |\n" + "| --- " * len(HEADS) + "|", flush=True)
    for graph in arguments.graphs:
        rows.append(row(graph, arguments.budget, arguments.effort, arguments.loss, arguments.steps))
        print("| " + " | ".join(rows[-1]) + " |", flush=True)
    if arguments.save:
        command = f"python -m scripts.equal_memory FOLDER/*.onnx --budget {arguments.budget}"
        results.save(arguments.save, results.Table(f"{command} --effort {arguments.effort:g}", HEADS, tuple(rows)))


if __name__ == "__main__":
    main()
