"""What a graph takes as it is, and how low a budget can go, without planning one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Unpack

from onnx_remat.findings.show import modules, trace
from onnx_remat.ir import model_io, phases
from onnx_remat.messages import Finding, Message, Setting
from onnx_remat.options import PlanningOptions
from onnx_remat.ort.peaks import Peak, Reserves, describe, reserves
from onnx_remat.rewrite.accounting import Goal
from onnx_remat.rewrite.fit import first_look, lowest_peak
from onnx_remat.rewrite.pipeline import begin
from onnx_remat.rewrite.report import TRAINING, headed
from onnx_remat.session.prediction import Footprint
from onnx_remat.units import format_bytes, table

_FIRST_LOOK = 1.0  # seconds of a slow core


@dataclass(frozen=True, slots=True)
class Estimate(Finding):
    """What a graph takes, in bytes.

    Attributes
    ----------
    peak : Peak
        Of the graph as ONNX Runtime executes it by default, and its parts; where the budget is for a plain session, at
        the optimisation level at which it takes most.
    loop : Footprint or None
        What training with `session.training.Loop` takes of the machine; None where it cannot open such a step.
    arena : Reserves
        With ONNX Runtime's arena.
    run_by : str
        What a budget covers, see `Options.run_by`.
    covered : int
        As much of that as the graph takes as it is: a budget of 100 %.
    impossible_below : int
        No budget below this can be kept, by any plan (`bounds.lower_bound`).
    first_look : int
        The lowest budget that a first look finds a plan for; planning may find a lower one. Like `impossible_below` at
        most `covered`, which the graph keeps as it is.
    by_module : Frame
        The peak by module.
    nodes : int
    notes : tuple of str
        What the reader should know besides.
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

    def lines(self) -> list[str]:
        """The peak, its parts, its flame graph by module, and the lowest budgets."""
        by_loop = self.run_by == "loop"
        session = [(label, format_bytes(getattr(self.peak, field))) for label, field in headed(self.run_by)]
        session.append(("  with ONNX Runtime's arena", format_bytes(self.arena.held)))
        training = [(label, format_bytes(getattr(self.loop, field))) for label, field in TRAINING if self.loop]
        what = "training takes" if by_loop else "peak"
        whose = "of a plain session's tensors, " if by_loop else ""
        session_of = Message("the sum of tensors ({})", Setting("run_by", "session"))
        covers = "all that training by Loop takes" if by_loop else session_of
        return [
            f"{what} {format_bytes(self.covered)}, {self.nodes} nodes",
            "",
            *table([*training, *session] if by_loop else [*session, *training]),
            "",
            f"the peak {whose}at {self.peak.at}:",
            *modules.flame_text(self.by_module),
            "",
            Message("a budget covers {}: {} as it is", covers, format_bytes(self.covered)),
            *self._lowest(),
            *(Message("note: {}", note) for note in self.notes),
        ]

    def _lowest(self) -> list[str]:
        total, bound, found = self.covered, self.impossible_below, self.first_look
        if bound >= total:
            return ["this is as low as it goes: no plan, whatever it recomputes, needs less"]
        proved = f"impossible: any budget below {format_bytes(bound)}, whatever is recomputed"
        if found >= total:
            return [proved, f"a first look finds no plan for less than {format_bytes(total)}; planning may"]
        share = f"{found / total:.0%} of what it takes as it is"
        asked = Setting("budget", f"{found}B")
        return [proved, Message("a first look finds a plan for {}, {}: {}", format_bytes(found), share, asked)]


def estimate(model: model_io.Model, **options: Unpack[PlanningOptions]) -> Estimate:
    """What a graph takes as it is, and how low a budget can go; nothing is written.

    Parameters
    ----------
    model : path, bytes, onnx.ModelProto or model_io.Source
        Any graph: a training step, or one for inference.
    **options
        Fields of `Options`.

    Raises
    ------
    UsageError, ModelError, ShapeError
        The arguments or the model are not usable.
    """
    planner = begin(model, {**options, "effort": _FIRST_LOOK})
    memory, executed = planner.memory, max(planner.by_level.values(), key=lambda each: each.timeline.peak)
    planner.options.progress("first look", 0.0)
    look = first_look(Goal(0, memory), planner.options, planner.deadline)
    lowest = memory.budget(lowest_peak(look, memory))
    compiled = memory.compiled
    return Estimate(
        describe(executed, executed.timeline), planner.trained, reserves(executed, executed.timeline), memory.run_by,
        memory.original_bytes, planner.impossible_below(memory.floor), min(lowest, memory.original_bytes),
        trace.peak_by_module(executed, compiled.graph.model), compiled.graph.n_nodes(),
        phases.note(compiled.problem.phase.tolist()),
    )  # fmt: skip
