"""Check whether another tool has undone a rewritten file: compare it with its plan, simulate it, and run it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import onnx

from onnx_remat import files
from onnx_remat.findings.planned_options import options_of
from onnx_remat.ir import model_io
from onnx_remat.ir.body import into_body
from onnx_remat.ir.metadata import RECOMPUTE_KEY, entries
from onnx_remat.ir.training_ops import check_ops
from onnx_remat.measure import processes
from onnx_remat.messages import Finding
from onnx_remat.options import Options
from onnx_remat.ort import runtime
from onnx_remat.ort.executed import at_levels
from onnx_remat.ort.moves import UP
from onnx_remat.ort.peaks import held
from onnx_remat.process import worker
from onnx_remat.session.prediction import predict
from onnx_remat.units import format_bytes
from onnx_remat.write.decided import planned


@dataclass(frozen=True, slots=True)
class CheckResult(Finding):
    """Comparison of a file with the plan recorded in it.

    Attributes
    ----------
    recomputed, control_edges : int
        Number of recomputed nodes and of control edges in the plan.
    recomputed_lost, control_edges_lost : tuple of str
        Outputs of those that no node of the file produces now: merged, folded or fused away. A recomputed node that
        became an Identity is lost too, since it only passes on a kept value; so is an edge whose axes became a
        constant, which orders nothing.
    budget : int
        Budget of the plan in bytes.
    peaks_by_level : dict of str to int
        Simulated peak in bytes per graph optimisation level.
    running_by_level : dict of str to int
        Recomputed nodes that ONNX Runtime runs as separate nodes, per level; it merges the others or fuses them into
        their readers.
    measured : int or None
        Peak of tensors in bytes of a run at the default level; None where the file was not run, or on a device.
    trained : int or None
        Predicted bytes that training by `session.session.Session` takes, where the budget covers that.
    beyond : int
        Predicted resident bytes of the process beyond its tensors at that peak (`processes.beyond_tensors`).
    moved : int
        Number of moves to the host and back in the plan.
    moved_lost : tuple of str
        Outputs of those that no copy from the host produces now.
    level : str
        The level at which a plain session keeps the budget, see `Options.level`.
    ran : bool
        Whether the file was run.
    run_by : str
        Who runs the file, see `Options`: the budget of a loop's covers more than tensors.
    reserved : int or None
        Predicted bytes with ONNX Runtime's arena, the highest of the levels that the budget covers; None where the
        budget does not cover the arena.
    """

    schema: ClassVar[str] = "onnx-remat/check/1"

    recomputed: int
    control_edges: int
    recomputed_lost: tuple[str, ...]
    control_edges_lost: tuple[str, ...]
    budget: int
    peaks_by_level: Mapping[str, int]
    running_by_level: Mapping[str, int]
    measured: int | None
    trained: int | None = None
    beyond: int = 0
    moved: int = 0
    moved_lost: tuple[str, ...] = ()
    level: str = "every"
    ran: bool = False
    run_by: str = "session"
    reserved: int | None = None

    @property
    def kept(self) -> bool:
        """Does the file keep its budget, simulated and, where it was run, measured?"""
        if self.trained is not None or self.run_by == "loop":
            return self.trained is not None and self.trained <= self.budget
        known = [peak for peak in (self._simulated(), self.measured, self.reserved) if peak is not None]
        return bool(known) and max(known) <= self.budget

    @property
    def lost(self) -> bool:
        """Does the file certainly exceed its budget?

        A measured excess below the resolution of measurements is neither `kept` nor `lost`.
        """
        if self.trained is not None or self.run_by == "loop":
            return self.trained is not None and self.trained > self.budget
        measured = (self.measured or 0) > self.budget + processes.RESOLUTION
        simulated = self._simulated()
        if simulated is None and self.recomputed_lost:  # then it is no longer the file that was planned
            simulated = max(self.peaks_by_level.values())
        return max(simulated or 0, self.reserved or 0) > self.budget or measured

    def _simulated(self) -> int | None:
        """Return the highest simulated peak that the budget covers, in bytes; None where its level is not simulated."""
        if self.level == "every":
            return max(self.peaks_by_level.values())
        return self.peaks_by_level.get(self.level)

    def lines(self) -> list[str]:
        """Return the state of the plan, the memory, and the verdict."""
        parts = [
            ("recomputed nodes", self.recomputed, self.recomputed_lost),
            ("control edges", self.control_edges, self.control_edges_lost),
        ]
        if self.moved:
            parts.append(("moves to the host and back", self.moved, self.moved_lost))
        lines = [
            f"{len(lost)} of {count} {what} were merged away, e.g. {lost[0]}"
            if lost
            else f"all {count} {what} are in place"
            for what, count, lost in parts
            if self.recomputed or self.control_edges or self.moved
        ] or ["the plan recomputes no node and has no control edge"]
        if len(self.running_by_level) == len(runtime.LEVELS):
            lines += [
                f"ONNX Runtime at level {level!r} runs {running} of the recomputed, "
                f"simulated peak {format_bytes(self.peaks_by_level[level])}"
                for level, running in self.running_by_level.items()
            ]
        else:
            why = "another environment runs the file" if runtime.available() else "onnxruntime is not installed"
            (simulated,) = self.peaks_by_level.values()
            lines.append(f"simulated peak {format_bytes(simulated)}, without graph optimisations: {why}")
        if not self.ran:
            lines.append("the file was not run")
        elif self.measured is None:
            lines.append("the file runs; the device's memory was not measured")
        else:
            peak, beyond = format_bytes(self.measured), format_bytes(self.beyond)
            lines.append(f"the file runs: measured peak {peak} of tensors (plus {beyond} of pages and bookkeeping)")
        if self.reserved is not None:
            lines.append(f"with ONNX Runtime's arena it takes {format_bytes(self.reserved)} (predicted)")
        if self.trained is not None:
            lines.append(f"training by Session or Loop takes {format_bytes(self.trained)} (predicted)")
        budget = format_bytes(self.budget)
        if self.kept or self.lost:
            lines.append(f"the file {'keeps' if self.kept else 'no longer keeps'} its budget of {budget}")
        elif self.run_by == "loop":
            lines.append(
                f"undecided whether the file keeps its budget of {budget}: it is that of training by Loop, which is "
                "predicted with the onnxruntime of this environment"
            )
        elif self._simulated() is None:
            lines.append(f"undecided whether the file keeps its budget of {budget}: its level was not simulated")
        else:
            over = format_bytes((self.measured or 0) - self.budget)
            lines.append(
                f"undecided whether the file keeps its budget of {budget}: the simulated peak does, the measured one "
                f"is {over} above, within the resolution of measurements ({format_bytes(processes.RESOLUTION)})"
            )
        return lines


@worker.device_left()
def check(
    path: model_io.Model,
    dims: Mapping[str, int] | None = None,
    run: bool = True,
    provider: str | None = None,
    python: str = sys.executable,
) -> CheckResult:
    """Compare a file with the plan recorded in it.

    Parameters
    ----------
    path : path, bytes, onnx.ModelProto or model_io.Source
        A file that `rewrite_model` wrote, possibly modified by another tool; or the model read from it.
    dims : mapping of str to int, optional
        Sizes of symbolic dimensions; by default those of the plan.
    run : bool
        Also run the file, where ONNX Runtime is installed: a tool may leave a file that loads and then fails.
    provider : str, optional
        One of `registry.PROVIDERS`; by default that of the plan.
    python : str
        Interpreter whose ONNX Runtime runs the file, see `processes`. With another environment's interpreter, the file
        is simulated without ONNX Runtime's optimisations.

    Raises
    ------
    ModelError
        The file is not a model, or contains no plan: it was not rewritten, or a tool dropped its metadata.
    VerificationError
        The file fails when it is run.
    UsageError
        The model has no symbolic dimension of a name in `dims`.
    """
    source = model_io.load(path)
    plan = planned(source.model, model_io.name_of(path))
    options = options_of(source.model, plan, dims, provider)
    if not run:  # a file with custom ops cannot be loaded here
        options = replace(options, verify="none")
    if here := python == sys.executable:
        check_ops(source.model)
    levels = runtime.LEVELS if runtime.available() and here else ("disable",)
    made = {name: node for node in source.model.graph.node for name in node.output}
    executed = at_levels(source.model, source.folder, levels, options.preparation())
    runs = {level: what.compiled.graph.makers for level, what in executed.items()}
    lost = tuple(name for name in plan.recomputed if name not in made or _passes_on(made[name], source.model))
    covered = executed.values() if plan.level == "every" else [executed[plan.level]] if plan.level in executed else []
    beyond, measured, ran = 0, None, False
    if run and (not here or _can_run(options)):
        ran = True
        with files.scratch() as home:
            file = _file_of(path, source, home)
            resident = partial(processes.measure, file, dims=options.dims, provider=options.provider, python=python)
            if options.kernels().device == "cpu":
                beyond = processes.beyond_tensors(list(executed.values())[-1])
                measured = processes.peak_under(plan.budget + beyond, resident) - beyond
            else:
                resident()  # what is resident is the host's memory, not the device's
    return CheckResult(
        len(plan.recomputed),
        len(plan.control_edges),
        lost,
        tuple(name for name in plan.control_edges if not _waits(name, made)),
        plan.budget,
        {level: what.timeline.peak for level, what in executed.items()},
        {level: len(set(plan.recomputed) & made_there.keys() - set(lost)) for level, made_there in runs.items()},
        measured,
        predict(executed["all"], fuse=plan.fuse).total if "all" in executed and plan.run_by == "loop" else None,
        beyond,
        len(plan.moved),
        tuple(name for name in plan.moved if name not in made or made[name].op_type != UP),
        plan.level,
        ran,
        plan.run_by,
        max((held(each, each.timeline) for each in covered), default=None) if plan.arena else None,
    )


def _file_of(given: model_io.Model, source: model_io.Source, home: Path) -> Path:
    """Return the path of the model; a model that is not a file is written to `home`."""
    if isinstance(given, str | os.PathLike):
        return files.reopened(given)
    model_io.save(into_body(source.model) if source.in_body else source.model, home / "model.onnx", source.folder)
    return home / "model.onnx"


def _can_run(options: Options) -> bool:
    return runtime.available() and runtime.has_device(options.kernels().execution_providers[0])


def _passes_on(clone: onnx.NodeProto, model: onnx.ModelProto) -> bool:
    """Is a recomputed node an Identity now, although the node that it repeats is none?"""
    if clone.op_type != "Identity":
        return False
    again = entries(clone).get(RECOMPUTE_KEY, "")
    return not any(node.name == again and node.op_type == "Identity" for node in model.graph.node)


def _waits(edge: str, made: Mapping[str, onnx.NodeProto]) -> bool:
    """Does a node produce `edge` and read axes that another node computes?"""
    if edge not in made or len(made[edge].input) < 2:
        return False
    axes = made[edge].input[1]
    return axes in made and made[axes].op_type != "Constant"
