"""A page to click in: both timelines, what is held at any op, what was recomputed. One file, no network."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_remat import files
from onnx_remat.app.show import modules, trace
from onnx_remat.app.show.figure import COLOURS
from onnx_remat.version import __version__

if TYPE_CHECKING:
    from onnx_remat.pipeline import Result

_PLACE = "/*DATA*/null"


def write(result: Result, path: Path) -> None:
    """Write the page of a result."""
    template = resources.files("onnx_remat.app.show").joinpath("page.html").read_text(encoding="utf-8")
    # "</script>" in a name would end the script; "<" is the only character that can.
    data = json.dumps(_data(result), separators=(",", ":")).replace("<", "\\u003c")
    files.write_text(template.replace(_PLACE, data), path)


def _data(result: Result) -> dict[str, Any]:
    """What the page draws: the report's figures, both traces, the recomputed ops."""
    report = result.report
    return {
        "version": __version__,
        "verdict": report.verdict(),
        "budget": report.budget,
        "lowerBound": report.lower_bound,
        "notes": report.notes,
        "sections": trace.SECTIONS,
        "colours": COLOURS,
        "facts": {
            "selector": report.selector,
            "extra compute": f"{report.extra_compute:.2%}",
            "nodes recomputed": report.recomputed,
            "control edges": report.control_edges,
            "values with own buffers": report.private_values,
            "nodes": f"{report.nodes_before} → {report.nodes_after}",
        },
        "before": _trace(trace.before(result), modules.modules(result.compiled.graph.model)),
        "after": _trace(trace.after(result), modules.modules(result.model)),
        "recomputed": _recomputed(result),
    }


def _trace(step: trace.Trace, of: Mapping[str, str]) -> dict[str, Any]:
    """A trace as columns, which are shorter in JSON than rows with keys; `of` gives the module of each value."""
    paths = [of.get(buffer.value, modules.NOWHERE) for buffer in step.buffers]
    number = {path: i for i, path in enumerate(dict.fromkeys(paths))}
    return {
        "modules": list(number),
        "module": [number[path] for path in paths],
        "peak": step.peak,
        "peakStep": step.peak_step,
        "label": [op.label for op in step.steps],
        "type": [op.op_type for op in step.steps],
        "section": [trace.SECTIONS.index(op.section) for op in step.steps],
        "bytes": [op.bytes for op in step.steps],
        "workspace": [op.workspace for op in step.steps],
        "value": [b.value for b in step.buffers],
        "size": [b.bytes for b in step.buffers],
        "start": [b.start for b in step.buffers],
        "end": [b.end for b in step.buffers],
        "residents": step.residents,
    }


def _recomputed(result: Result) -> list[dict[str, Any]]:
    """Ops that run more than once: how often again, seconds each as planned with, bytes they make."""
    again = Counter(result.recomputed)
    ops = {op.label: op for op in result.compiled.graph.ops}
    rows = [
        {
            "label": label,
            "type": ops[label].node.op_type,
            "times": times,
            "seconds": float(result.compiled.problem.cost[ops[label].index]),
            "bytes": sum(result.compiled.tensors[name].nbytes for name in ops[label].writes),
        }
        for label, times in again.items()
    ]
    return sorted(rows, key=lambda row: (-row["times"] * row["seconds"], row["label"]))
