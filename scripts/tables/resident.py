"""What training takes of the machine's memory: predicted, and as the operating system counts it.

Each graph, FILE or FILE=BUDGET, is rewritten for a loop (``--for loop``) and trained by `session.training.Loop` in a
fresh process, with glibc as it is and no variable set. *resident* is the process's high-water mark, from before the
session and the state exist to after the last step, less what the interpreter, the libraries and a session of one node
take. *predicted* is inputs, weights, slab, the largest scratch memory, and what onnxruntime is assumed to keep for the
graph (*books*). *step time* compares a step with one of the same loop on onnxruntime's own session, *of the original*
with the original on such a session, default options; steps are taken in turns, none with ``--turns 0``. Without a
budget the step runs as it is. Linux only.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from scripts.child import call

HEADS = (
    "graph", "budget, MB", "resident", "predicted", "inputs", "slab", "live", "bookkeeping", "nodes", "donated",
    "compute", "step time", "of the original",
)  # fmt: skip


def race(path: str, original: str, loss: str, steps: int) -> tuple[float, float]:
    """Time of a step by `Session` over that by onnxruntime's own session, of the same file and of another, in turns."""
    import onnxruntime

    from onnx_remat.measure.training_memory import state_for
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


def rows(
    item: str, *, budget: str = "", effort: float = 5.0, steps: int = 50, turns: int = 9, loss: str = "loss"
) -> Iterator[tuple[str, ...]]:
    """The row of one graph."""
    from onnx_remat.errors import BudgetInfeasibleError
    from onnx_remat.measure.training_memory import measure

    file, _, own = item.partition("=")
    graph, budget = Path(file), own or budget
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as scratch:
        path, limit, compute = graph, 0, 0.0
        if budget:
            from onnx_remat.rewrite.pipeline import rewrite_model

            try:
                result = rewrite_model(graph, budget, effort=effort, time_limit=600, run_by="loop")
            except BudgetInfeasibleError as error:
                yield (graph.stem, *([""] * (len(HEADS) - 2)), str(error).partition(";")[0])
                return
            result.save(path := Path(scratch) / "small.onnx")
            limit, compute = result.report.budget, result.report.extra_compute
        found = measure(path, steps=steps)
        ratios = call(race, str(path.resolve()), str(graph.resolve()), loss, turns).answer if turns else ()
    predicted = found.inputs + found.weights + found.slab + found.workspace + found.books
    parts = (limit, found.total, predicted, found.inputs, found.slab, found.live, found.books)
    donated = f"{found.donated} of {found.donated + found.not_donated}"
    yield (
        graph.stem, *(f"{part / 1e6:.1f}" for part in parts), str(found.nodes), donated, f"{compute:+.1%}",
        *([f"{ratio:.3f}" for ratio in ratios] or ["", ""]),
    )  # fmt: skip
