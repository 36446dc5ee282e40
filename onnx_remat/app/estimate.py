"""What a graph takes as it is, and how low a budget can go, without planning one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Unpack

from onnx_remat.app.show import modules, trace
from onnx_remat.errors import BudgetInfeasibleError, ModelError
from onnx_remat.fit import Goal, make_plan, smallest_budget
from onnx_remat.ir import model_io, phases, shapes
from onnx_remat.options import PlanningOptions, of_sessions, parse_options
from onnx_remat.ort import placement
from onnx_remat.ort.executed import as_executed
from onnx_remat.ort.peaks import Peak, Reserves, describe, reserves
from onnx_remat.ort.prepare import prepare
from onnx_remat.plan.request import Deadline
from onnx_remat.run.foreseen import Footprint, foresee
from onnx_remat.units import format_bytes, table

SCHEMA = "onnx-remat/estimate/1"
"""Version of the JSON layout: the number rises when a field changes its meaning or goes away."""

_FIRST_LOOK = 1.0  # seconds of a slow core


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a graph takes, in bytes.

    Attributes
    ----------
    peak : Peak
        Of the graph as ONNX Runtime executes it by default, and its parts.
    loop : Footprint or None
        What training with `run.training.Loop` takes of the machine; None where it cannot open such a step.
    arena : Reserves
        With ONNX Runtime's arena.
    impossible_below : int
        No budget below this can be kept, by any plan (`bounds.lower_bound`); at most the peak, which the graph keeps.
    first_look : int
        The lowest budget that a first look finds a plan for, at most the peak; planning may find a lower one.
    by_module : Frame
        The peak by module.
    nodes : int
    notes : tuple of str
        What the reader should know besides.
    """

    peak: Peak
    loop: Footprint | None
    arena: Reserves
    impossible_below: int
    first_look: int
    by_module: modules.Frame
    nodes: int
    notes: tuple[str, ...]

    def to_json(self) -> str:
        """The estimate as a JSON object."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=2)

    def to_text(self) -> str:
        """The peak, its parts, its flame graph by module, and the lowest budgets."""
        rows = [(f"  {part}", format_bytes(getattr(self.peak, part))) for part in _PARTS]
        rows.append(("with ONNX Runtime's arena", format_bytes(self.arena.held)))
        if self.loop is not None:
            rows.append(("training by Loop takes", format_bytes(self.loop.total)))
        return "\n".join([
            f"peak {format_bytes(self.peak.total)} at {self.peak.at}, {self.nodes} nodes",
            "",
            *table([("peak", format_bytes(self.peak.total)), *rows]),
            "",
            *modules.flame_text(self.by_module),
            "",
            *self._lowest(),
            *(f"note: {note}" for note in self.notes),
        ])  # fmt: skip

    def _lowest(self) -> list[str]:
        total, bound, found = self.peak.total, self.impossible_below, self.first_look
        if bound >= total:
            return ["this is as low as it goes: no plan, whatever it recomputes, needs less"]
        proved = f"impossible: any budget below {format_bytes(bound)}, whatever is recomputed"
        if found >= total:
            return [proved, "a first look finds no plan for less than the peak; planning may"]
        share = f"{found / total:.0%} of the peak"
        return [proved, f"a first look finds a plan for {format_bytes(found)}, {share}: --budget {found}B"]


_PARTS = ("inputs", "weights", "activations", "outputs", "workspace")


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
    of_sessions(options, "estimate")
    parsed = replace(parse_options(options), effort=_FIRST_LOOK)
    source = model_io.load(model)
    parsed.progress("load", 0.0)
    compiled = prepare(source.model, parsed.preparation())
    placement.check_nodes(compiled)
    parsed = replace(parsed, dims=shapes.all_dims(compiled.tensors, parsed.dims))
    parsed.progress("simulate", 0.0)
    executed = as_executed(compiled.graph.model, source.folder, "all", parsed.preparation())
    timeline = executed.timeline()
    parsed.progress("first look", 0.0)
    try:
        make_plan(compiled, Goal(0), 0, parsed, Deadline(parsed.time_limit))
    except BudgetInfeasibleError as refusal:
        lowest, bound = refusal.best_peak_bytes, refusal.lower_bound_bytes
    step = trace.trace(executed, {})
    by_module = modules.held_by_module(
        [(buffer.value, buffer.bytes) for buffer in step.held_at(step.peak_step)],
        [(name, size) for name, _, size in step.residents],
        modules.modules(source.model),
        step.steps[step.peak_step].workspace if step.steps else 0,
    )
    try:
        loop = foresee(executed)
    except ModelError:
        loop = None
    return Estimate(
        describe(executed, timeline), loop, reserves(executed, timeline), min(smallest_budget(bound), timeline.peak),
        min(smallest_budget(lowest), timeline.peak), by_module, compiled.graph.n_nodes(),
        phases.note(compiled.problem.phase.tolist()),
    )  # fmt: skip
