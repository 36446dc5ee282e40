"""Memory trace of one execution of a step, op by op and buffer by buffer, for plots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onnx_remat.findings.show import modules
from onnx_remat.ir import phases
from onnx_remat.ir.body import bytes_in_bodies
from onnx_remat.ir.graph import INITIALIZER, INPUT
from onnx_remat.ir.metadata import RECOMPUTE_KEY, entries

if TYPE_CHECKING:
    import onnx

    from onnx_remat.ort.executed import Executed
    from onnx_remat.rewrite.pipeline import Result

RECOMPUTE = "recompute"
SECTIONS = (*phases.NAMES, RECOMPUTE)
"""Sections of a step: its phases, and recomputed ops."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One op as it runs, and the bytes allocated meanwhile, of which `workspace` are its own scratch memory."""

    label: str
    op_type: str
    section: str
    bytes: int
    workspace: int


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory allocated for `value` at position `start` and freed after position `end`."""

    value: str
    bytes: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole step as ONNX Runtime executes it.

    Attributes
    ----------
    steps : tuple of TraceRow
        In execution order.
    buffers : tuple of Buffer
        In order of allocation; `start` and `end` index `steps`.
    residents : tuple of (name, kind, bytes)
        Graph inputs and initializers, allocated throughout.
    peak, peak_step : int
        Peak in bytes, and the first position that reaches it.
    """

    steps: tuple[TraceRow, ...]
    buffers: tuple[Buffer, ...]
    residents: tuple[tuple[str, str, int], ...]
    peak: int
    peak_step: int

    def live_at(self, step: int) -> list[Buffer]:
        """Return the buffers allocated while `step` runs, largest first."""
        alive = [b for b in self.buffers if b.start <= step <= b.end]
        return sorted(alive, key=lambda b: (-b.bytes, b.start, b.value))


def before(result: Result) -> Trace:
    """Return the trace of the original as executed by default."""
    return trace(result.original, sections(result))


def after(result: Result) -> Trace:
    """Return the trace of the rewritten model as executed by default."""
    return trace(result.executed, sections(result))


def trace(executed: Executed, section_of: Mapping[str, str]) -> Trace:
    """Return the trace of an execution; `section_of` maps names of values to the section of the op that produces them.

    Control edges, and ops added by ONNX Runtime's optimiser, belong to the phase they run in.
    """
    compiled, timeline = executed.compiled, executed.timeline
    names = list(compiled.graph.values)
    steps, phase = [], phases.NAMES[0]
    for number, index in enumerate(executed.order.order):
        op = compiled.graph.ops[index]
        section = next((section_of[name] for name in op.writes if name in section_of), phase)
        phase = phase if section == RECOMPUTE else section
        workspace = int(compiled.problem.workspace[index])
        steps.append(TraceRow(op.label, op.node.op_type, section, int(timeline.step_bytes[number]), workspace))
    buffers = tuple(
        Buffer(names[timeline.owner[b]], int(timeline.size[b]), int(timeline.start[b]), int(timeline.end[b]))
        for b in range(len(timeline.size))
    )
    residents = tuple(
        (name, value.kind, compiled.tensors[name].nbytes)
        for name, value in compiled.graph.values.items()
        if value.kind in (INPUT, INITIALIZER)
    )
    if inside := bytes_in_bodies(compiled.graph.model.graph.node):
        residents += (("constants of bodies", INITIALIZER, inside),)
    return Trace(tuple(steps), buffers, residents, timeline.peak, timeline.peak_step)


def peak_by_module(executed: Executed, model: onnx.ModelProto) -> modules.Frame:
    """Return the flame graph of an execution's peak, by the modules that nodes of `model` name."""
    step = trace(executed, {})
    return modules.memory_by_module(
        [(buffer.value, buffer.bytes) for buffer in step.live_at(step.peak_step)],
        [(name, size) for name, _, size in step.residents],
        modules.modules(model),
        step.steps[step.peak_step].workspace if step.steps else 0,
    )


def sections(result: Result) -> dict[str, str]:
    """Return the section of each value by name: the phase of its op in the original, or recomputed."""
    found = {
        name: phases.NAMES[phase]
        for op, phase in zip(result.compiled.graph.ops, result.compiled.problem.phase.tolist(), strict=True)
        for name in op.writes
    }
    for node in result.model.graph.node:
        if RECOMPUTE_KEY in entries(node):
            found.update(dict.fromkeys(filter(None, node.output), RECOMPUTE))
    return found
