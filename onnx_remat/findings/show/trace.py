"""What one execution of a step holds, op by op and buffer by buffer, in the words a picture needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onnx_remat.findings.show import modules
from onnx_remat.ir import phases
from onnx_remat.ir.graph import INITIALIZER, INPUT
from onnx_remat.write.decided import RECOMPUTE_KEY

if TYPE_CHECKING:
    import onnx

    from onnx_remat.ort.executed import Executed
    from onnx_remat.rewrite.pipeline import Result

RECOMPUTE = "recompute"
SECTIONS = (*phases.NAMES, RECOMPUTE)
"""What an op belongs to: the phases of a step, and ops run again."""


@dataclass(frozen=True, slots=True)
class Step:
    """One op as it runs: bytes held meanwhile, of which `workspace` are its own scratch memory."""

    label: str
    op_type: str
    section: str
    bytes: int
    workspace: int


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory allocated for `value` at step `start` and given back after step `end`."""

    value: str
    bytes: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole step as ONNX Runtime executes it.

    Attributes
    ----------
    steps : tuple of Step
        In execution order.
    buffers : tuple of Buffer
        In order of allocation; `start` and `end` index `steps`.
    residents : tuple of (name, kind, bytes)
        Graph inputs and initializers, held throughout.
    peak, peak_step : int
        Bytes, and the first step that reaches them.
    """

    steps: tuple[Step, ...]
    buffers: tuple[Buffer, ...]
    residents: tuple[tuple[str, str, int], ...]
    peak: int
    peak_step: int

    def held_at(self, step: int) -> list[Buffer]:
        """Buffers allocated while `step` runs, largest first."""
        alive = [b for b in self.buffers if b.start <= step <= b.end]
        return sorted(alive, key=lambda b: (-b.bytes, b.start, b.value))


def before(result: Result) -> Trace:
    """The original as executed by default."""
    return trace(result.original, sections(result))


def after(result: Result) -> Trace:
    """The rewritten model as executed by default."""
    return trace(result.executed, sections(result))


def trace(executed: Executed, section_of: Mapping[str, str]) -> Trace:
    """Spell out an execution; `section_of` maps names of values to the section of the op that makes them.

    Control edges, and ops that ONNX Runtime's optimiser made up, belong to the phase they run in.
    """
    compiled, timeline = executed.compiled, executed.timeline
    names = list(compiled.graph.values)
    steps, phase = [], phases.NAMES[0]
    for number, index in enumerate(executed.order.order):
        op = compiled.graph.ops[index]
        section = next((section_of[name] for name in op.writes if name in section_of), phase)
        phase = phase if section == RECOMPUTE else section
        workspace = int(compiled.problem.workspace[index])
        steps.append(Step(op.label, op.node.op_type, section, int(timeline.step_bytes[number]), workspace))
    buffers = tuple(
        Buffer(names[timeline.owner[b]], int(timeline.size[b]), int(timeline.start[b]), int(timeline.end[b]))
        for b in range(len(timeline.size))
    )
    residents = tuple(
        (name, value.kind, compiled.tensors[name].nbytes)
        for name, value in compiled.graph.values.items()
        if value.kind in (INPUT, INITIALIZER)
    )
    return Trace(tuple(steps), buffers, residents, timeline.peak, timeline.peak_step)


def peak_by_module(executed: Executed, model: onnx.ModelProto) -> modules.Frame:
    """Flame graph of what an execution holds at its peak, by the modules that nodes of `model` name."""
    step = trace(executed, {})
    return modules.held_by_module(
        [(buffer.value, buffer.bytes) for buffer in step.held_at(step.peak_step)],
        [(name, size) for name, _, size in step.residents],
        modules.modules(model),
        step.steps[step.peak_step].workspace if step.steps else 0,
    )


def sections(result: Result) -> dict[str, str]:
    """Section by the name of a value: phases of the original's ops, and what the rewriter noted on its clones."""
    found = {
        name: phases.NAMES[phase]
        for op, phase in zip(result.compiled.graph.ops, result.compiled.problem.phase.tolist(), strict=True)
        for name in op.writes
    }
    for node in result.model.graph.node:
        if any(prop.key == RECOMPUTE_KEY for prop in node.metadata_props):
            found.update(dict.fromkeys(filter(None, node.output), RECOMPUTE))
    return found
