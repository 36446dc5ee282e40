"""Estimate the memory of a graph and the lowest possible budget, without a full plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

from onnx_remat.findings.show import modules, trace
from onnx_remat.ir import model_io, phases
from onnx_remat.ir.dims import with_planned
from onnx_remat.messages import Finding, Message, Setting
from onnx_remat.options import PlanningOptions, without_arena
from onnx_remat.ort.peaks import Peak, Reserves, describe, reserves
from onnx_remat.process import worker
from onnx_remat.rewrite.accounting import MARGIN, Goal
from onnx_remat.rewrite.original import begin
from onnx_remat.rewrite.plans import LOOK_EFFORT, REFUSAL_HEADROOM, first_look, lowest_peak
from onnx_remat.rewrite.report import TRAINING, WORDING
from onnx_remat.session.prediction import Footprint, stated
from onnx_remat.units import format_bytes, table


@dataclass(frozen=True, slots=True)
class Estimate(Finding):
    """Memory of a graph, in bytes.

    Attributes
    ----------
    peak : Peak
        Peak and its parts as ONNX Runtime executes the graph by default; where the budget is for a plain session, at
        the optimisation level with the highest peak.
    loop : Footprint or None
        Memory of training with `session.training.Loop`; None where a loop cannot open the step.
    arena : Reserves
        Memory with ONNX Runtime's arena.
    run_by : str
        The runner, which decides what a budget covers, see `Options.run_by`.
    covered : int
        The memory of the unmodified graph that a budget covers: a budget of 100 %.
    impossible_below : int
        Lower bound on every budget that any plan can keep (`bounds.lower_bound`), with `accounting.MARGIN` kept free.
    first_look : int
        A little above the lowest budget that a first look finds a plan for; planning may find a lower one. Like
        `impossible_below` at most `covered`, which the unmodified graph keeps.
    by_module : Frame
        The peak by module.
    nodes : int
    notes : tuple of str
        Further notes for the reader.
    """

    schema: ClassVar[str] = "onnx-remat/estimate/1"

    peak: Peak
    loop: Footprint | None
    arena: Reserves
    run_by: str
    covered: int
    impossible_below: int
    first_look: int
    by_module: modules.Frame
    nodes: int
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """As `Finding.to_dict`, without the bytes in use at every node, of which there are as many as values."""
        data = Finding.to_dict(self)
        return data | {"loop": stated(data["loop"])}

    def lines(self) -> list[str]:
        """Return the peak, its parts, its flame graph by module, and the lowest budgets."""
        wording = WORDING[self.run_by]
        session = [(label, format_bytes(getattr(self.peak, field))) for label, field in wording.head()]
        session.append(("  with ONNX Runtime's arena", format_bytes(self.arena.held)))
        training = [(label, format_bytes(getattr(self.loop, field))) for label, field in TRAINING if self.loop]
        session_of = Message("the sum of tensors ({})", Setting("run_by", "session"))
        covers = "all memory of training by Loop" if self.run_by == "loop" else session_of
        return [
            f"{wording.covered} {format_bytes(self.covered)}, {self.nodes} nodes",
            "",
            *table(wording.ordered(training, session)),
            "",
            f"the peak {wording.of_tensors}at {self.peak.at}:",
            *modules.flame_text(self.by_module),
            "",
            Message("a budget covers {}: {} before rewriting", covers, format_bytes(self.covered)),
            *self._lowest(),
            *(Message("note: {}", note) for note in self.notes),
        ]

    def _lowest(self) -> list[str]:
        total, bound, found = self.covered, self.impossible_below, self.first_look
        if bound >= total:
            return [f"nothing to gain: with {MARGIN:.0%} kept free, no plan needs less, whatever it recomputes"]
        proved = f"impossible: any budget below {format_bytes(bound)}, whatever a plan recomputes"
        if found >= total:
            return [proved, f"a first look finds no plan below {format_bytes(total)}; full planning may find one"]
        share = f"{found / total:.0%} of the original"
        budget = Setting("budget", f"{found}B")
        return [proved, Message("a first look finds a plan for {}, {}: {}", format_bytes(found), share, budget)]


@worker.device_left()
def estimate(model: model_io.Model, **options: Unpack[PlanningOptions]) -> Estimate:
    """Estimate the memory of a graph and the lowest possible budget; write nothing.

    Parameters
    ----------
    model : path, bytes, onnx.ModelProto or model_io.Source
        Any graph: a training step, or one for inference.
    **options
        Fields of `Options`.

    Raises
    ------
    UsageError, ModelError, ShapeError
        An argument or the model is invalid.
    """
    without_arena(options, "an estimate")
    source = model_io.load(model)
    dims = with_planned(source.model, options.get("dims") or {})  # of a file that was planned before
    original = begin(source, {**options, "dims": dims, "effort": LOOK_EFFORT})
    memory, executed = original.memory, max(original.by_level.values(), key=lambda each: each.timeline.peak)
    original.options.progress("first look", 0.0)
    looks = first_look(Goal(0, memory), original.options, original.deadline)
    lowest = int(memory.budget_for(lowest_peak(looks[0], memory)) * REFUSAL_HEADROOM)
    compiled = memory.compiled
    return Estimate(
        describe(executed, executed.timeline), original.footprint, reserves(executed, executed.timeline), memory.run_by,
        memory.original_bytes, original.impossible_below(memory.least), min(lowest, memory.original_bytes),
        trace.peak_by_module(executed, compiled.graph.model), compiled.graph.n_nodes(),
        phases.note(compiled.problem.phase.tolist()),
    )  # fmt: skip
