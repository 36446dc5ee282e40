"""What fusing nodes does to a step, and what counting it does to a plan.

Each graph is opened by `Session` with its nodes fused and unfused: *nodes* that run, *kernels* among them, seconds to
*compile* them all with nothing kept on the disk, *slab*, the largest *distance* of an output of three steps, as a
fraction of its largest number, and the *time* of a fused step over that of an unfused one, medians of steps taken in
turns. Then it is rewritten to the budget, a share of what it takes fused, twice: with every node counted by itself
(``fuse=False``) and with kernels counted. *again* is what each plan computes again, *step* the time of its file over
that of the original, all three fused, in turns.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from onnx_remat.errors import BudgetInfeasibleError
from onnx_remat.fuse import machine_code
from onnx_remat.ir import model_io
from onnx_remat.ir.dims import planned_dims
from onnx_remat.measure.training_memory import state_for
from onnx_remat.options import Options
from onnx_remat.ort.executed import as_executed
from onnx_remat.rewrite.pipeline import rewrite_model
from onnx_remat.session.prediction import footprint, laid_out
from onnx_remat.session.session import Session
from onnx_remat.units import parse_budget

HEADS = (
    "graph", "nodes", "fused", "kernels", "compile, s", "slab, MB", "fused", "distance", "time, fused", "budget, MB",
    "again, counted unfused", "step", "again, counted fused", "step",
)  # fmt: skip


def in_turns(sessions: Sequence[Session], turns: int) -> list[float]:
    """Median time of a step of each session over that of the first."""
    states = [state_for(session.inputs) for session in sessions]
    times: list[list[float]] = [[] for _ in sessions]
    for _ in range(turns + 1):
        for session, state, taken in zip(sessions, states, times, strict=True):
            start = time.perf_counter()
            session.execute(state)
            taken.append(time.perf_counter() - start)
    medians = [statistics.median(taken[1:]) for taken in times]
    return [median / medians[0] for median in medians]


def distance(one: Session, other: Session, steps: int = 3) -> str:
    """Largest difference between outputs of two sessions, each step's new state fed to the next; "same" if none."""
    states = [state_for(session.inputs) for session in (one, other)]
    found = 0.0
    for _ in range(steps):
        first, second = (session.run(state) for session, state in zip((one, other), states, strict=True))
        for name, array in first.items():
            if array.tobytes() != second[name].tobytes():
                wide = second[name].astype(np.float64)
                found = max(found, float(np.abs(array - wide).max() / np.abs(wide).max()))
    return f"{found:.0e}" if found else "same"


def rows(file: str, *, budget: str = "60%", effort: float = 3.0, turns: int = 9) -> Iterator[tuple[str, ...]]:
    """The row of one graph; `turns` steps are timed on either side."""
    path = Path(file)
    source = model_io.load(path)
    options = Options(dims=planned_dims(source.model), run_by="loop")
    arranged = laid_out(as_executed(source.model, source.folder, "all", options.preparation()))
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as folder:
        start = time.perf_counter()
        machine_code.compiled([kernel.text for kernel in arranged.kernels], Path(folder))
        seconds = time.perf_counter() - start
        with Session(path, donate=True) as one, Session(path, donate=True, fuse=False) as other:
            random = any("Random" in node.op_type or node.op_type == "Dropout" for node in source.model.graph.node)
            apart = "random" if random else distance(one, other)
            _, faster = in_turns([other, one], turns)
            counts = (other.node_count, one.node_count, one.kernel_count)
            slabs = (other.slab_bytes, one.slab_bytes)
            allowed = parse_budget(budget).resolve(footprint(arranged).total)
            files, again = [path], []
            for fuse in (False, True):
                try:
                    result = rewrite_model(source, allowed, effort=effort, run_by="loop", fuse=fuse)
                    result.save(Path(folder) / f"{fuse}.onnx")
                    files.append(Path(folder) / f"{fuse}.onnx")
                    again.append(f"{result.report.extra_compute:+.1%}")
                except BudgetInfeasibleError:
                    again.append("none found")
        sessions = [Session(file, donate=True) for file in files]
        ratios = [f"{ratio:.3f}" for ratio in in_turns(sessions, turns)[1:]]
        for session in sessions:
            session.close()
    steps = [ratios.pop(0) if each != "none found" else "" for each in again]
    yield (
        path.stem, *map(str, counts), f"{seconds:.2f}", *(f"{slab / 1e6:.1f}" for slab in slabs), apart,
        f"{faster:.3f}", f"{allowed / 1e6:.1f}", again[0], steps[0], again[1], steps[1],
    )  # fmt: skip
