"""The largest batch that trains within so much memory of the machine, as the operating system counts it.

Items are MODEL.onnx=BUDGET, of models whose batch is left open. *session* is the largest batch for which onnxruntime's
own session, its options at their defaults, is seen to take no more than the budget for some steps in a fresh process;
*loop* the largest for which `Loop` is predicted to, with the same file; *rewritten* the largest for which a file is
found. *resident* is what that file is seen to take, *compute*
what it computes again. Linux only.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnx

from onnx_remat.app.bench import largest, max_batch
from onnx_remat.measure import training_memory
from onnx_remat.rewrite.pipeline import rewrite_model
from onnx_remat.units import parse_budget
from scripts.child import call
from scripts.tables.patterns import taken

HEADS = ("graph", "budget, MB", "session", "loop", "rewritten", "times", "resident, MB", "compute")


def fixed(model: Path, dim: str, size: int, folder: str) -> Path:
    """The model with a symbolic dimension of one size, in a folder: a plain session must be given nothing more."""
    made = onnx.load(model, load_external_data=False)
    for value in (*made.graph.input, *made.graph.output, *made.graph.value_info):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param == dim:
                axis.dim_value = size
    onnx.save(made, path := Path(folder) / "fixed.onnx")
    return path


def rows(item: str, *, dim: str = "batch", effort: float = 3.0, steps: int = 10) -> Iterator[tuple[str, ...]]:
    """The row of one model; `dim` is its symbolic dimension."""
    file, _, given = item.rpartition("=")
    model, budget = Path(file), parse_budget(given).bytes
    if budget is None:
        raise SystemExit(f"{given}: a percentage grows with the batch")

    def in_session(size: int) -> bool:
        return bool(call(taken, str(fixed(model, dim, size, home)), True, steps).answer <= budget)

    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as home:
        stock = largest(in_session)
        plain, small = max_batch(model, f"{budget}B", dim, effort=effort)
        result = rewrite_model(model, budget, dims={dim: small}, effort=effort)
        result.save(path := Path(home) / "small.onnx")
        resident = training_memory.measure(path, {dim: small}, steps).total
    times = f"{small / stock:.1f}" if stock else ""
    yield (
        model.stem, f"{budget / 1e6:.0f}", str(stock), str(plain), str(small), times, f"{resident / 1e6:.1f}",
        f"{result.report.extra_compute:+.1%}",
    )  # fmt: skip
