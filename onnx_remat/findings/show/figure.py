"""Images by matplotlib: memory over the step, and the curve of peak against extra compute."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_remat import files
from onnx_remat.errors import OnnxRematError
from onnx_remat.findings.show import slab, trace
from onnx_remat.units import format_bytes

if TYPE_CHECKING:
    from onnx_remat.findings.sweep import Curve
    from onnx_remat.rewrite.pipeline import Result
    from onnx_remat.session.prediction import Footprint

COLOURS = {
    "resident": "#c3c7cc", "forward": "#4e79a7", "backward": "#f28e2b", "optimizer": "#59a14f", "recompute": "#b5179e",
}  # fmt: skip
"""Colours of resident memory and of the sections of a step."""

_SHOWN = 8  # values named at each peak
_NAME = 38  # characters of a name that fit next to the plot


def import_matplotlib() -> None:
    """Raise an error with the install command where matplotlib is missing."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise OnnxRematError("matplotlib is not installed: pip install 'onnx-remat[plot]', or plot to .html")


def write(result: Result, path: Path) -> None:
    """Draw the step before and after, one above the other on the same scales.

    Where the budget covers training by a loop, draw the address of every value over time; else allocated memory.
    """
    import_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    report = result.report
    loops = report.loops()
    before, after = report.covered() if loops else (report.before.total, report.after.total)  # as drawn
    figure = Figure(figsize=(10, 7.6), dpi=100)
    grid = figure.add_gridspec(2, 1, left=0.075, right=0.635, top=0.875, bottom=0.075, hspace=0.26)
    top = 1.06 * max(report.budget, before, after)
    scale, unit = _scale(top)
    what = "training takes" if loops else "peak"
    saved = 1 - after / max(before, 1)
    titles = (
        f"before: {what} {format_bytes(before)}",
        f"after: {what} {format_bytes(after)} (−{saved:.1%}) for +{report.extra_compute:.1%} compute",
    )
    length = 0
    for row, title in enumerate(titles):
        axes = figure.add_subplot(grid[row])
        axes.set_title(title, loc="left", fontsize=10.5)
        axes.set_ylim(0, top / scale)
        corner = axes.get_position().y1
        if loops:
            laid = (slab.before, slab.after)[row](result)
            _addresses(axes, laid, loops[row], scale)
            _list_slab(figure, laid, loops[row], corner)
            length = max(length, len(laid.steps))
        else:
            step = (trace.before, trace.after)[row](result)
            _timeline(axes, step, scale)
            _list_peak(figure, step, corner)
            length = max(length, len(step.steps))
        axes.axhline(report.budget / scale, color="#d62728", linestyle="--", linewidth=1.2)
        axes.set_ylabel(f"{'address' if loops else 'memory allocated'} ({unit})")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in figure.axes:
        axes.set_xlim(0, length)
    figure.axes[-1].set_xlabel("op, in order of execution")
    resident = "all but the slab" if loops else "inputs, weights"
    handles: list[Any] = [Patch(color=COLOURS[k], label=resident if k == "resident" else k) for k in COLOURS]
    handles.append(Line2D([], [], color="#d62728", linestyle="--", label=f"budget {format_bytes(report.budget)}"))
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.065, 0.985), ncols=6, fontsize=9, frameon=False)
    _save(figure, path)


def _timeline(axes: Any, step: trace.Trace, scale: float) -> None:
    """Draw the bytes allocated while each op runs, a column in the colour of its section, on top of resident memory."""
    allocated = [op.bytes / scale for op in step.steps]
    base = sum(size for _, _, size in step.residents) / scale
    for section, first, last in _runs(step):
        # Columns from op `first` up to `last`, each one wide.
        axes.stairs(
            allocated[first:last], range(first, last + 1), baseline=base, fill=True,
            color=COLOURS[section], linewidth=0.5 if last - first == 1 else 0,
        )  # fmt: skip
    axes.fill_between([0, len(allocated)], base, color=COLOURS["resident"], linewidth=0)
    if step.steps:
        axes.plot(step.peak_step + 0.5, step.peak / scale, marker="v", color="black", markersize=6, clip_on=False)


def _addresses(axes: Any, laid: slab.Slab, footprint: Footprint, scale: float) -> None:
    """Draw a rectangle per value, from its first to its last op, as high as its size, on top of resident memory."""
    from matplotlib.collections import PolyCollection

    base = (footprint.total - footprint.slab) / scale
    axes.fill_between([0, len(laid.steps)], base, color=COLOURS["resident"], linewidth=0)
    for section in dict.fromkeys(block.section for block in laid.blocks):
        corners = []
        for block in laid.blocks:
            if block.section == section:
                left, right = block.start, block.end + 1
                low, high = base + block.offset / scale, base + (block.offset + block.bytes) / scale
                corners.append([(left, low), (right, low), (right, high), (left, high)])
        axes.add_collection(PolyCollection(corners, facecolors=COLOURS[section], edgecolors="white", linewidths=0.25))
    axes.axhline(base + footprint.slab / scale, color="#666666", linewidth=0.8)
    if laid.blocks:
        axes.plot(laid.busiest + 0.5, base + footprint.slab / scale, marker="v", color="black", markersize=6)


def _list_slab(figure: Any, laid: slab.Slab, footprint: Footprint, top: float) -> None:
    """List the values in the slab where it is fullest, the memory outside it, and the largest gap there."""
    live = laid.live_at(laid.busiest)
    shown, more = live[:_SHOWN], live[_SHOWN:]
    lines = [(format_bytes(b.bytes), _shorten(b.value)) for b in shown]
    if more:
        lines.append((format_bytes(sum(b.bytes for b in more)), f"{len(more)} more"))
    lines += [(format_bytes(size), name) for name, size in slab.rest(footprint) if size]
    if gap := laid.largest_gap(laid.busiest):
        lines.append((format_bytes(gap), "free, the largest gap"))
    figure.text(0.655, top, "in the slab where it is fullest (▼)", fontsize=9, fontweight="bold", va="top")
    text = "\n".join(f"{size:>9}  {name}" for size, name in lines)
    figure.text(0.655, top - 0.034, text, fontsize=7.6, family="monospace", va="top", linespacing=1.5, parse_math=False)


def _runs(step: trace.Trace) -> Sequence[tuple[str, int, int]]:
    """Return runs of consecutive ops of the same section: (section, first, one past the last)."""
    runs: list[tuple[str, int, int]] = []
    for number, op in enumerate(step.steps):
        if runs and runs[-1][0] == op.section:
            runs[-1] = (op.section, runs[-1][1], number + 1)
        else:
            runs.append((op.section, number, number + 1))
    return runs


def _list_peak(figure: Any, step: trace.Trace, top: float) -> None:
    """List the parts of the peak, largest first, as a column of text that adds up to it."""
    live = step.live_at(step.peak_step)
    shown, rest = live[:_SHOWN], live[_SHOWN:]
    lines = [(format_bytes(b.bytes), _shorten(b.value)) for b in shown]
    if rest:
        lines.append((format_bytes(sum(b.bytes for b in rest)), f"{len(rest)} more"))
    lines.append((format_bytes(sum(size for _, _, size in step.residents)), "inputs and weights"))
    if step.steps and step.steps[step.peak_step].workspace:
        lines.append((format_bytes(step.steps[step.peak_step].workspace), "workspace of the op"))
    figure.text(0.655, top, "allocated at the peak (▼)", fontsize=9, fontweight="bold", va="top")
    text = "\n".join(f"{size:>9}  {name}" for size, name in lines)
    figure.text(0.655, top - 0.034, text, fontsize=7.6, family="monospace", va="top", linespacing=1.5, parse_math=False)


def _shorten(name: str) -> str:
    return name if len(name) <= _NAME else f"{name[: _NAME // 2 - 1]}…{name[-_NAME // 2 :]}"


def pareto(curve: Curve, path: Path) -> None:
    """Draw the curve of a sweep: peak against extra compute, the knee marked."""
    import_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    scale, unit = _scale(curve.original_peak)
    compute = [100 * p.extra_compute for p in curve.points]
    peaks = [p.peak / scale for p in curve.points]
    axes.plot(compute, peaks, drawstyle="steps-post", color=COLOURS["forward"], linewidth=1.4, zorder=1)
    axes.scatter(compute, peaks, color=COLOURS["forward"], s=26, zorder=2, label="written files")
    knee = curve.points[curve.knee]
    axes.scatter(
        [100 * knee.extra_compute], [knee.peak / scale], s=190, facecolors="none", edgecolors=COLOURS["recompute"],
        linewidths=2, zorder=3, label=f"knee: {format_bytes(knee.peak)} for +{knee.extra_compute:.1%}",
    )  # fmt: skip
    original = f"original: {format_bytes(curve.original_peak)}"
    axes.axhline(curve.original_peak / scale, color="#666666", linestyle=":", label=original)
    axes.axhline(
        curve.lower_bound / scale, color="#d62728", linestyle="--",
        label=f"no schedule peaks below {format_bytes(curve.lower_bound)}",
    )  # fmt: skip
    axes.set_xlabel("extra compute (% of one step)")
    axes.set_ylabel(f"peak of the whole step ({unit})")
    axes.set_ylim(0, 1.08 * curve.original_peak / scale)
    axes.set_xlim(left=min(0.0, -0.02 * max(compute)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    _save(figure, path)


def _scale(size: float) -> tuple[float, str]:
    """Return the number of bytes of a unit that suits a size, and the unit."""
    unit = format_bytes(int(size)).split()[1]
    return {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[unit], unit


def _save(figure: Any, path: Path) -> None:
    """Write the image: the same bytes for the same figure."""
    import matplotlib

    picture = io.BytesIO()
    kind = path.suffix[1:].lower()
    with matplotlib.rc_context({"svg.hashsalt": "onnx-remat"}):
        figure.savefig(picture, format=kind, metadata={"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind))
    files.write_bytes(picture.getvalue(), path)
