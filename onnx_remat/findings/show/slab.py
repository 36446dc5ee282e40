"""Layout of a step's values as `session.session.Session` runs it: address over time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onnx_remat.findings.show import trace
from onnx_remat.ir import phases
from onnx_remat.ir.graph import INPUT
from onnx_remat.session import biases, prediction
from onnx_remat.session.offsets import in_use, lifetimes

if TYPE_CHECKING:
    from onnx_remat.ort.executed import Executed
    from onnx_remat.rewrite.pipeline import Result
    from onnx_remat.session.prediction import Footprint


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes `offset` to `offset` + `bytes`, used from position `start` to `end`."""

    value: str
    section: str
    offset: int
    bytes: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Slab:
    """A step's slab.

    Attributes
    ----------
    blocks : tuple of Block
        Values, in order of execution.
    steps : tuple of trace.TraceRow
        Nodes that run, and the bytes of the slab live meanwhile.
    busiest : int
        First position at which the most bytes are live.
    inputs : tuple of (str, int)
        Names and bytes of state and batch on the device, which are outside the slab.
    """

    blocks: tuple[Block, ...]
    steps: tuple[trace.TraceRow, ...]
    busiest: int
    inputs: tuple[tuple[str, int], ...]

    def live_at(self, step: int) -> list[Block]:
        """Return the values live in the slab while `step` runs, largest first."""
        alive = [b for b in self.blocks if b.start <= step <= b.end]
        return sorted(alive, key=lambda b: (-b.bytes, b.start, b.value))

    def largest_gap(self, step: int) -> int:
        """Return the bytes of the largest free region while `step` runs."""
        ends = [0, *(b.offset + b.bytes for b in self.blocks)]
        largest = at = 0
        for block in sorted(self.live_at(step), key=lambda b: b.offset):
            largest, at = max(largest, block.offset - at), block.offset + block.bytes
        return max(largest, max(ends) - at)


def before(result: Result) -> Slab:
    """Return the original's slab."""
    return slab(result.original, trace.sections(result), _fused(result.report.loop_before))


def after(result: Result) -> Slab:
    """Return the rewritten model's slab."""
    return slab(result.executed, trace.sections(result), _fused(result.report.loop_after))


def _fused(footprint: Footprint | None) -> bool:
    """Does the prediction count fused kernels?"""
    return footprint is not None and footprint.kernels > 0


def slab(executed: Executed, section_of: Mapping[str, str], fuse: bool) -> Slab:
    """Lay out a step; `section_of` maps names of values to the section of the op that produces them."""
    arranged = prediction.laid_out(executed, fuse=fuse)
    placements = arranged.offsets.placements
    start, end = lifetimes(arranged.program, [p.name for p in placements])
    phase, sections, of_step = phases.NAMES[0], {}, []
    for step in arranged.program.steps:
        names = [name for made in step.writes for name in (made, biases.result_of(made))]
        found = next((section_of[name] for name in names if name in section_of), phase)
        phase = phase if found == trace.RECOMPUTE else found
        sections.update(dict.fromkeys(step.writes, found))
        of_step.append(found)
    # An op that writes in place reuses its input's memory, which belongs to the output from this op on.
    taken = {(p.offset, start[p.name]) for p in placements if p.nbytes}
    blocks = tuple(
        Block(p.name, sections[p.name], p.offset, p.nbytes, first, last - (last > first and (p.offset, last) in taken))
        for p in placements
        for first, last in [(start[p.name], end[p.name])]
    )
    used = in_use(arranged.program, arranged.offsets).tolist()
    steps = tuple(
        trace.TraceRow(step.label, step.node.op_type, section, size, 0)
        for step, section, size in zip(arranged.program.steps, of_step, used, strict=True)
    )
    compiled = arranged.compiled
    held = [n for n, v in compiled.graph.values.items() if v.kind == INPUT and n not in arranged.state]
    inputs = tuple((n, compiled.tensors[n].nbytes) for n in held)
    return Slab(blocks, steps, used.index(max(used)) if used else 0, inputs)


def rest(footprint: Footprint) -> tuple[tuple[str, int], ...]:
    """Return the parts of training's memory outside the slab: names and bytes."""
    return (
        ("inputs and state", footprint.inputs), ("weights", footprint.weights), ("workspace", footprint.workspace),
        ("ONNX Runtime's bookkeeping", footprint.books),
    )  # fmt: skip
