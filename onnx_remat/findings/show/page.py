"""An interactive page: both timelines, the memory at any op, the recomputed ops. One file, without network access.

Where the budget covers training by a loop, a timeline is the address of every value over time; else allocated memory.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_remat import files
from onnx_remat.findings.show import modules, slab, trace
from onnx_remat.findings.show.figure import COLOURS
from onnx_remat.version import __version__

if TYPE_CHECKING:
    from onnx_remat.rewrite.pipeline import Result
    from onnx_remat.session.prediction import Footprint

_PLACE = "/*DATA*/null"


def write(result: Result, path: Path) -> None:
    """Write the page of a result."""
    template = resources.files("onnx_remat.findings.show").joinpath("page.html").read_text(encoding="utf-8")
    # "</script>" in a name would end the script; "<" is the only character that can.
    data = json.dumps(_data(result), separators=(",", ":")).replace("<", "\\u003c")
    files.write_text(template.replace(_PLACE, data), path)


def _data(result: Result) -> dict[str, Any]:
    """Return the page's data: the report's figures, both traces, the recomputed ops."""
    report, loops = result.report, result.report.loops()
    of = modules.modules(result.compiled.graph.model), modules.modules(result.model)
    drawn = (
        (_slab(slab.before(result), loops[0], of[0]), _slab(slab.after(result), loops[1], of[1]))
        if loops
        else (_trace(trace.before(result), of[0]), _trace(trace.after(result), of[1]))
    )
    return {
        "version": __version__,
        "verdict": report.verdict(),
        "budget": report.budget,
        "notes": report.notes,
        "sections": trace.SECTIONS,
        "colours": COLOURS,
        "facts": {
            "selector": report.selector,
            "extra compute": f"{report.extra_compute:.2%}",
            "nodes recomputed": report.recomputed,
            "control edges": report.control_edges,
            "values with own buffers": report.private_values,
            "nodes in the file": f"{report.nodes_before} → {report.nodes_after}",
        },
        "byLoop": loops is not None,
        "before": drawn[0],
        "after": drawn[1],
        "recomputed": _recomputed(result),
    }


def _trace(step: trace.Trace, of: Mapping[str, str]) -> dict[str, Any]:
    """Return the data of a plain session's memory; `of` is the module of each value."""
    return _columns(step.steps, step.buffers, of) | {
        "peak": step.peak, "peakStep": step.peak_step, "residents": step.residents
    }  # fmt: skip


def _slab(laid: slab.Slab, footprint: Footprint, of: Mapping[str, str]) -> dict[str, Any]:
    """Return the data of a loop's memory: values at their addresses in the slab, all other memory as residents."""
    outside = [(name, "input", size) for name, size in laid.inputs]
    outside += [(name, "throughout", size) for name, size in slab.rest(footprint)[1:]]
    return _columns(laid.steps, laid.blocks, of) | {
        "peak": footprint.total, "peakStep": laid.busiest, "residents": outside, "slab": footprint.slab,
        "offset": [block.offset for block in laid.blocks],
        "painted": [trace.SECTIONS.index(block.section) for block in laid.blocks],
    }  # fmt: skip


def _columns(
    steps: Sequence[trace.TraceRow], held: Sequence[trace.Buffer | slab.Block], of: Mapping[str, str]
) -> dict[str, Any]:
    """Return ops and buffers as columns, which are shorter in JSON than rows with keys."""
    paths = [of.get(buffer.value, modules.NOWHERE) for buffer in held]
    number = {path: i for i, path in enumerate(dict.fromkeys(paths))}
    return {
        "modules": list(number),
        "module": [number[path] for path in paths],
        "label": [op.label for op in steps],
        "type": [op.op_type for op in steps],
        "section": [trace.SECTIONS.index(op.section) for op in steps],
        "bytes": [op.bytes for op in steps],
        "workspace": [op.workspace for op in steps],
        "value": [b.value for b in held],
        "size": [b.bytes for b in held],
        "start": [b.start for b in held],
        "end": [b.end for b in held],
    }


def _recomputed(result: Result) -> list[dict[str, Any]]:
    """Return the recomputed ops: number of recomputations, seconds of each by the plan's costs, output bytes."""
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
