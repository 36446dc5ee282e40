"""What a rewritten file takes in a session whose options are all at their defaults, with and without memory patterns.

Each graph is rewritten for onnxruntime's session, once as it is and once with ``--no-patterns``, and run for some steps
in fresh processes. *default* is what the first file takes under default options, *session_options* the same under
`onnx_remat.session_options()`, *no patterns* the second file under default options. *time* is a step of the second file
over one of the first, both under default options, taken in turns; *equal* is whether all outputs have the same bits.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.child import call

HEADS = ("graph", "budget", "default", "session_options", "no patterns", "time", "equal")


def opened(path: str, default: bool) -> Any:
    """A session of onnxruntime's."""
    import onnxruntime

    from onnx_remat.ort.runtime import session_options

    options = onnxruntime.SessionOptions() if default else session_options()
    options.log_severity_level = 4
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def feeds_of(session: Any) -> dict[str, Any]:
    """Random inputs."""
    import numpy as np
    from onnx.helper import np_dtype_to_tensor_dtype

    from onnx_remat.measure.training_memory import state_for
    from onnx_remat.session.arrays import Array
    from onnx_remat.session.interface import formal

    formals = ((value.name, formal(value)) for value in session.get_inputs())
    arrays = (
        Array(
            name, np_dtype_to_tensor_dtype(np.dtype(found.dtype)), tuple(int(size or 1) for size in found.shape or ())
        )
        for name, found in formals
    )
    return state_for(tuple(arrays))


def warmed() -> int:
    """Bytes that this process has resident once it has run a session of one node; peaks count from here."""
    from onnx_remat.measure import training_memory
    from onnx_remat.measure.probe import reset_peak
    from onnx_remat.session.heap import trim
    from onnx_remat.session.session import Session

    with (
        tempfile.TemporaryDirectory(prefix="onnx-remat-") as home,
        Session(training_memory.one_node(Path(home))) as warm,
    ):
        warm.run(training_memory.state_for(warm.inputs))
    trim()
    return int(reset_peak())


def taken(path: str, default: bool, steps: int) -> int:
    """Bytes that this process comes to take for some steps, inputs included."""
    from onnx_remat.measure.probe import resident

    base = warmed()
    session = opened(path, default)
    feeds = feeds_of(session)
    for _ in range(steps):
        session.run(None, feeds)  # what it returns is dropped before the next step
    return int(resident("VmHWM") - base)


def compared(first: str, second: str, steps: int) -> tuple[float, bool]:
    """Time of a step of the second over one of the first, and whether their outputs have the same bits."""
    sessions = opened(first, True), opened(second, True)
    feeds = feeds_of(sessions[0])
    made = [session.run(None, feeds) for session in sessions]
    equal = all(a.tobytes() == b.tobytes() for a, b in zip(*made, strict=True))
    del made
    ratios = []
    for _ in range(steps):
        times = []
        for session in sessions:
            start = time.perf_counter()
            session.run(None, feeds)
            times.append(time.perf_counter() - start)
        ratios.append(times[1] / times[0])
    return statistics.median(ratios), equal


def rows(file: str, *, budget: str = "60%", effort: float = 3.0, steps: int = 10) -> Iterator[tuple[str, ...]]:
    """The row of one graph."""
    from onnx_remat.ir.body import into_body
    from onnx_remat.ir.model_io import save
    from onnx_remat.rewrite.pipeline import rewrite_model

    graph = Path(file)
    result = rewrite_model(graph, budget, effort=effort, time_limit=600, run_by="session")
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as home:
        plain, body = f"{home}/plain.onnx", f"{home}/body.onnx"
        result.save(plain)
        save(into_body(result.model), body, result.folder)
        bytes_ = [call(taken, plain, default, steps).answer for default in (True, False)]
        alone, (ratio, equal) = call(taken, body, True, steps).answer, call(compared, plain, body, steps).answer
    figures = (result.report.budget, *bytes_, alone)
    yield (graph.stem, *(f"{figure / 1e6:.1f}" for figure in figures), f"{ratio:.3f}", "yes" if equal else "no")
