"""What training takes of the machine's memory: foreseen, and as the operating system counts it.

    python -m scripts.resident sample_models/*.onnx --budget 60%
    python -m scripts.resident FOLDER/*.onnx --budget 60% --save resident-60

With ``--save`` the table goes to docs/results/data, too; see `scripts.results`.

Each graph is rewritten for a loop (``--for loop``) and trained by `session.training.Loop` in a fresh process, with
glibc as it is and no variable set. *resident* is the process's high-water mark, from before the session and the state
exist to after the last step, less what the interpreter, the libraries and a session of one node take. *foreseen* is
inputs, weights, slab, the largest scratch memory, and what onnxruntime is assumed to keep for the graph (*books*).
*step time* compares a step with one of the same loop on onnxruntime's own session, *of the original* with the original
on such a session, default options; steps are taken in turns. Linux only.

    python -m scripts.resident t5.onnx=43.4MB lstm.onnx=90% --checkpoint --save resident-checkpoint

trains each by `Loop` from a checkpoint instead, which the process loads, gives to the loop and drops: an .npz as a dict
of arrays (*npz*) and as ``numpy.load`` returns it (*npz, lazily*), and a ``state_dict`` (*torch*). The state is saved
after every tenth step. *opening* is the high-water mark until the loop is there, *training* from the end of the first
step to the end of the last, *left* is what stays once the loop is dropped; PyTorch is imported before all that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def race(path: str, original: str, loss: str, steps: int) -> tuple[float, float]:
    """Time of a step by `Session` over that by onnxruntime's own session, of the same file and of another, in turns."""
    import onnxruntime

    from onnx_remat.measure.residence import state_for
    from onnx_remat.ort.runtime import session_options
    from onnx_remat.session.session import Session
    from onnx_remat.session.training import Loop

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


def in_child(name: str, *arguments: str | int) -> tuple[Any, ...]:
    """What a function of this module returns in a fresh process."""
    command = [sys.executable, "-m", "scripts.resident", "--child", json.dumps([name, *arguments])]
    root = Path(__file__).parents[1]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root).stdout.splitlines()[-1]
    return tuple(json.loads(said))


WAYS = "npz", "npz, lazily", "torch"


def from_checkpoint(path: str, checkpoint: str, way: str, loss: str, steps: int) -> tuple[int, int, int]:
    """Bytes that this process takes while it opens a loop, while it trains, and once it has dropped the loop."""
    import numpy as np

    from onnx_remat.measure.probe import reset_peak, resident
    from onnx_remat.measure.residence import one_node, state_for
    from onnx_remat.session.heap import trim
    from onnx_remat.session.session import Session
    from onnx_remat.session.training import Loop

    if way == "torch":
        import torch

    def loaded() -> Mapping[str, Any]:
        if way == "torch":
            return {name: value.numpy() for name, value in torch.load(checkpoint).items()}
        file = np.load(checkpoint)
        return file if "lazily" in way else dict(file)

    folder = Path(checkpoint).parent
    with Session(one_node(folder)) as session:
        session.run(state_for(session.inputs))
    trim()
    base = reset_peak()
    loop = Loop(path, loaded(), loss)
    opening = resident("VmHWM") - base
    loop.step()
    reset_peak()  # the step before began with what the checkpoint left
    for i in range(1, steps):
        if i % 10 == 0:
            loop.save(folder / "saved.safetensors")
        loop.step()
    training = resident("VmHWM") - base
    del loop
    return opening, training, resident("VmRSS") - base


def save_checkpoint(path: str, checkpoint: str, way: str) -> tuple[int, int]:
    """Write random state of a step to a file; how many arrays, and their bytes."""
    import numpy as np

    from onnx_remat.measure.residence import state_for
    from onnx_remat.session.session import Session

    with Session(path) as session:
        state = state_for(session.inputs)
    if way == "torch":
        import torch

        torch.save({name: torch.from_numpy(array) for name, array in state.items()}, checkpoint)
    else:
        np.savez(checkpoint, **state)
    return len(state), sum(array.nbytes for array in state.values())


def checkpoint_rows(graph: Path, budget: str, effort: float, steps: int, loss: str) -> Iterator[tuple[str, ...]]:
    """Lines of the table of checkpoints: one for each way to load it."""
    from onnx_remat.rewrite.pipeline import rewrite_model

    result = rewrite_model(graph, budget, effort=effort, time_limit=600, run_by="loop")
    assert result.report.loop_after is not None
    for way in WAYS:
        with tempfile.TemporaryDirectory(prefix="onnx-remat-") as folder:
            result.save(path := Path(folder) / "small.onnx")
            checkpoint = f"{folder}/state.pt" if way == "torch" else f"{folder}/state.npz"
            arrays, state = in_child("save_checkpoint", str(path), checkpoint, way)
            found = in_child("from_checkpoint", str(path), checkpoint, way, loss, steps)
        sizes = state, result.report.budget, result.report.loop_after.total, *found
        yield graph.stem, str(arrays), way, *(f"{size / 1e6:.1f}" for size in sizes)


CHECKPOINT_HEADS = ("graph", "arrays", "checkpoint", "state", "budget", "foreseen", "opening", "training", "left")

HEADS = (
    "graph", "budget, MB", "resident", "foreseen", "inputs", "slab", "live", "bookkeeping", "nodes", "donated",
    "compute", "step time", "of the original",
)  # fmt: skip


def row(graph: Path, budget: str, effort: float, steps: int, loss: str, turns: int) -> tuple[str, ...]:
    """One line of the table; without a budget the step runs as it is."""
    from onnx_remat.errors import BudgetInfeasibleError
    from onnx_remat.measure.residence import measure
    from onnx_remat.session.bookkeeping import books

    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as scratch:
        path, limit, compute = graph, 0, 0.0
        if budget:
            from onnx_remat.rewrite.pipeline import rewrite_model

            try:
                result = rewrite_model(graph, budget, effort=effort, time_limit=600, run_by="loop")
            except BudgetInfeasibleError as error:
                return (graph.stem, *([""] * (len(HEADS) - 2)), str(error).partition(";")[0])
            result.save(path := Path(scratch) / "small.onnx")
            limit, compute = result.report.budget, result.report.extra_compute
        found = measure(path, steps=steps)
        ratios = in_child("race", str(path.resolve()), str(graph.resolve()), loss, turns) if turns else ()
    kept = books(found.nodes, found.kernels)
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
    parser.add_argument("graphs", nargs="*", metavar="FILE[=BUDGET]")
    parser.add_argument("--budget", default="", help="rewrite to this budget first, where a file has none of its own")
    parser.add_argument("--checkpoint", action="store_true", help="from a checkpoint that is loaded and dropped")
    parser.add_argument("--effort", type=float, default=5.0, help="of each plan, see onnx-remat --effort")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--turns", type=int, default=9, help="steps timed on either side; 0 for none")
    parser.add_argument("--loss", default="loss")
    parser.add_argument("--save", default="", metavar="NAME", help="of the table in docs/results/data")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        name, *job = json.loads(arguments.child)
        print(json.dumps({each.__name__: each for each in (race, save_checkpoint, from_checkpoint)}[name](*job)))
        return
    from scripts import results

    heads, rows = CHECKPOINT_HEADS if arguments.checkpoint else HEADS, []
    print("| " + " | ".join(heads) + " |\n" + "| --- " * len(heads) + "|", flush=True)
    for given in arguments.graphs:
        file, _, own = given.partition("=")
        how = Path(file), own or arguments.budget, arguments.effort, arguments.steps, arguments.loss
        for found in checkpoint_rows(*how) if arguments.checkpoint else [row(*how, arguments.turns)]:
            rows.append(found)
            print("| " + " | ".join(found) + " |", flush=True)
    if arguments.save:
        named = " ".join(
            f"{Path(file).name}={own}" for file, _, own in (g.partition("=") for g in arguments.graphs) if own
        )
        files = f"{named or 'FOLDER/*.onnx'}" + (f" --budget {arguments.budget}" if arguments.budget else "")
        kind = " --checkpoint" if arguments.checkpoint else ""
        command = f"python -m scripts.resident {files}{kind} --effort {arguments.effort:g}"
        results.save(arguments.save, results.Table(command, heads, tuple(rows)))


if __name__ == "__main__":
    main()
