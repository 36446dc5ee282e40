"""Well-known networks through the three converters, checked, rewritten to a budget, and measured.

Node count, seconds of export (tracing, translation and check), the largest relative error of loss, gradients, buffers
and update against the framework (where it is above 1e-5, also how far both are from the same step in float64; for
add_backward always, and how far its gradients are from torch's where both are computed in float64), how many of them
rounding alone decides; the measured peaks of the step and of its rewritten version (in brackets how far the simulated
ones are off), the extra compute, and how equal their outputs are. Items are FAMILY:NETWORK of `sample_models.networks`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import onnx

from onnx_remat.errors import OnnxRematError
from onnx_remat.ir.metadata import entries
from onnx_remat.measure import processes, verify
from onnx_remat.rewrite.pipeline import rewrite_model
from onnx_remat.units import format_bytes
from sample_models.networks import FAMILIES, builder

ITEMS = tuple(f"{family}:{name}" for family in ("pytorch", "jax", "autodiff") for name in FAMILIES[family]())
HEADS = (
    "model", "by", "nodes", "export, s", "error", "undetermined", "peak", "budget", "rewritten", "compute", "outputs",
)  # fmt: skip


def rows(key: str, *, budget: str = "60%", effort: float = 10.0) -> Iterator[tuple[str, ...]]:
    """The row of one network."""
    family, _, name = key.partition(":")
    try:
        export = builder(key)()
        start = time.perf_counter()
        step = export()
    except (OnnxRematError, ImportError) as error:
        yield name, family, *[""] * 8, f"{type(error).__name__}: {error}"
        return
    seconds = time.perf_counter() - start
    known = entries(step)
    facts = str(len(step.graph.node)), f"{seconds:.1f}", _error(known), known["check.undetermined"]
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as folder:
        onnx.save(step, path := Path(folder) / "step.onnx")
        del step
        yield name, family, *facts, *_rewritten(path, budget, effort)


def _error(known: Mapping[str, str]) -> str:
    text = f"{float(known['check.error']):.1e} ({known['check.output']})"
    if "check.exact_error" in known and "check.framework_error" in known:
        ours, theirs = (float(known[f"check.{what}_error"]) for what in ("exact", "framework"))
        text += f"; from float64 {ours:.1e}, the framework {theirs:.1e}"
    if "check.in_float64" in known:
        text += f"; both in float64 {float(known['check.in_float64']):.1e}"
    return text


def _rewritten(path: Path, budget: str, effort: float) -> tuple[str, ...]:
    """Peak, budget, peak after, compute, outputs."""
    before = processes.measure(path).peak_bytes
    try:
        result = rewrite_model(path, budget, effort=effort, run_by="session")
    except OnnxRematError as error:
        return format_bytes(before), budget, "", "", f"{type(error).__name__}: {error}"
    report = result.report
    result.save(target := path.with_name("small.onnx"))
    before -= processes.beyond_tensors(result.original)
    beyond = processes.beyond_tensors(result.executed)
    after = processes.peak_under(report.budget + beyond, partial(processes.measure, target)) - beyond
    written = onnx.load(path, load_external_data=False), result.model
    settled = verify.without_chance(written, path.parent, path.with_name("settled"), result.compiled.tensors)
    equal = verify.bitwise(*(settled or (path, target))) + (" (random draws fixed)" if settled else "")
    if after > report.budget + processes.RESOLUTION:
        equal += ", EXCEEDED"
    shown = [
        f"{format_bytes(found)} ({simulated / found - 1:+.2%})"
        for found, simulated in ((before, report.before.total), (after, report.after.total))
    ]
    return shown[0], format_bytes(report.budget), shown[1], f"+{report.extra_compute:.1%}", equal
