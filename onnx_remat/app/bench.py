"""``onnx-remat-bench``: train the original and the rewritten model, and compare predictions with measurements."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import platform
import statistics
import sys
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Unpack

import numpy as np
import onnx

from onnx_remat import files
from onnx_remat.app.flags import (
    USUAL_COSTS,
    Parser,
    add_flag,
    add_flags,
    add_runtime_flag,
    check_files,
    guarded,
    one_line,
    planning_options,
)
from onnx_remat.app.streams import complain, say
from onnx_remat.errors import BudgetInfeasibleError, OnnxRematError, UsageError, did_you_mean
from onnx_remat.ir import model_io, phases
from onnx_remat.ir.state import with_state
from onnx_remat.ir.training_ops import check_ops
from onnx_remat.measure import processes
from onnx_remat.measure.profiling import node_seconds, profile
from onnx_remat.messages import Finding, Setting, Word, first_line, json_text
from onnx_remat.options import PlanningOptions, of_sessions
from onnx_remat.ort import runtime
from onnx_remat.ort.kernels.registry import kernels_of
from onnx_remat.process import worker
from onnx_remat.rewrite.original import begin
from onnx_remat.rewrite.pipeline import Result, rewrite, rewrite_model
from onnx_remat.rewrite.plans import TooLittleTime
from onnx_remat.units import check_threads, format_bytes, parse_budget, table


@dataclass(frozen=True, slots=True)
class Side:
    """One model: its simulated and its measured peak over training (bytes), seconds per step, loss of every step.

    On CUDA, `driver_bytes` is the driver's count for the process (NVML), its context included, as a second measurement.
    """

    predicted_peak: int
    measured_peak: int
    step_seconds: float
    losses: tuple[float, ...]
    driver_bytes: int = 0

    def error(self) -> float:
        """Return the relative error of the predicted peak."""
        return self.predicted_peak / self.measured_peak - 1


@dataclass(frozen=True, slots=True)
class Benchmark(Finding):
    """Results of training both models on the same data.

    Attributes
    ----------
    model : str
    budget : int
        Bytes.
    provider, machine : str
    original, rewritten : Side
        On CUDA, measured peaks are the smallest memory limits under which training runs.
    predicted_overhead : float
        Extra time per step, as a fraction: recomputed ops at the costs of the plan, every other added node at the time
        that ONNX Runtime takes to run an empty node.
    measured_overhead : float
        The same measured: median over alternating steps of both models.
    exact : bool
        With graph optimisations off and one thread, are all losses equal to the last bit?
    loss_distance : float
        With default options, the largest difference of a step's two losses, relative to the larger one; 0 where both
        are NaN, infinite where only one of them is.
    warnings : tuple of str
        See `Report.warnings`.
    """

    schema: ClassVar[str] = "onnx-remat/bench/1"

    model: str
    budget: int
    provider: str
    machine: str
    original: Side
    rewritten: Side
    predicted_overhead: float
    measured_overhead: float
    exact: bool
    loss_distance: float
    warnings: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return a table of both models, the overheads and some of the losses."""
        a, b = self.original, self.rewritten
        rows = [
            ("", "original", "rewritten"),
            ("peak of tensors, measured", format_bytes(a.measured_peak), format_bytes(b.measured_peak)),
            ("peak of tensors, predicted", format_bytes(a.predicted_peak), format_bytes(b.predicted_peak)),
            ("  off by", f"{a.error():+.2%}", f"{b.error():+.2%}"),
            ("step, median", f"{a.step_seconds * 1e3:.1f} ms", f"{b.step_seconds * 1e3:.1f} ms"),
        ]
        if a.driver_bytes:
            rows.append(("device memory (NVML)", format_bytes(a.driver_bytes), format_bytes(b.driver_bytes)))
        last = len(a.losses) - 1
        rows += [
            (f"loss of step {i + 1}", f"{a.losses[i]:.7g}", f"{b.losses[i]:.7g}")
            for i in sorted({0, last // 4, last // 2, 3 * last // 4, last})
        ]
        lines = table(rows)
        lost = [sum(map(math.isnan, side.losses)) for side in (a, b)]
        bits = "equal to the last bit" if self.exact else "NOT equal"
        lines += [
            f"step time {self.measured_overhead:+.1%} measured, {self.predicted_overhead:+.1%} predicted",
            f"{len(a.losses)} losses: {bits} with graph optimisations off, "
            f"within {self.loss_distance:.1e} of each other with default options",
            *([f"{lost[0]} losses of the original and {lost[1]} of the rewritten are NaN"] if any(lost) else []),
            f"{self.provider}, {self.machine}",
        ]
        return lines


def benchmark(
    model: Path,
    budget: str,
    *,
    steps: int = 50,
    state: str = "",
    threads: int = 0,
    python: str = sys.executable,
    **options: Unpack[PlanningOptions],
) -> Benchmark:
    """Rewrite a model, and train it and the original from the same state on the same batch.

    Parameters
    ----------
    model : Path
        A training graph; `onnx_remat.session.training` describes how its state is fed back.
    budget : str
        See `rewrite_model`.
    steps : int
        Training steps, at least 2.
    state : str
        ``.npz`` with initial values of inputs by name; or a checkpoint, where onnxruntime-training runs the models.
    threads : int
        Intra-op threads, 0 for ONNX Runtime's default.
    python : str
        Interpreter whose ONNX Runtime runs the models, see `processes`. A model that ONNX Runtime of this environment
        cannot load is planned from the file alone.
    **options
        Fields of `Options`; without `costs`, `model` is profiled. All runs use `provider`.

    Raises
    ------
    UsageError
        `steps` is below 2, or `threads` is negative.
    OnnxRematError
        As in `rewrite_model`; or ONNX Runtime lacks the provider; or the model does not run.
    """
    if steps < 2:
        raise UsageError("a benchmark needs at least 2 steps")
    threads = check_threads(threads)
    of_sessions(options, "the benchmark")
    _check_initial(model, state, options.get("dims", {}), python)
    provider = options.get("provider", "cpu")
    if python == sys.executable:
        runtime.check_provider(kernels_of(provider).execution_providers[0])
        check_ops(model_io.load(model).model)
    else:
        options = {"verify": "none", **options}
    dims, title = options.get("dims", {}), model.stem
    with files.scratch() as home, runtime.as_step(model) as model:
        if "state_outputs" in options:
            named = with_state(model_io.load(model), options.pop("state_outputs"))
            model = runtime.write_beside(named.model, named.folder, home)
        if "costs" not in options:
            measured = profile(model, dims, threads=threads, provider=provider, python=python)
            (home / "profile.json").write_text(measured.to_json())
            options["costs"] = str(home / "profile.json")
        result = rewrite_model(model, budget, **options)
        rewritten = home / "rewritten" / "model.onnx"
        rewritten.parent.mkdir()
        result.save(rewritten)
        settings = processes.Training(
            steps=steps, loss=_loss(result, options.get("loss")), dims=dims, state=state, threads=threads,
            provider=provider, python=python,
        )  # fmt: skip
        runs = [processes.train(path, settings) for path in (model, rewritten)]
        exact = replace(settings, level="disable", threads=1)
        plain = [processes.train(path, exact).losses for path in (model, rewritten)]
        seconds = processes.race(
            model, rewritten, runs=max(9, min(steps, 25)), dims=dims, threads=threads, provider=provider, python=python
        )
    report = result.report
    idle = (report.nodes_after - report.nodes_before - report.recomputed) * node_seconds(
        threads, provider=provider, python=python
    )
    sides = [
        Side(peak, run.peak_bytes, clock, run.losses, run.driver_bytes)
        for peak, run, clock in zip((report.before.total, report.after.total), runs, seconds, strict=True)
    ]
    return Benchmark(
        title, report.budget, provider, machine(), sides[0], sides[1], report.extra_compute + idle / seconds[0],
        seconds[1] / seconds[0] - 1, _same(*plain), _distance(runs[0].losses, runs[1].losses),
        report.warnings,
    )  # fmt: skip


def _check_initial(model: Path, state: str, dims: Mapping[str, int], python: str) -> None:
    """Raise UsageError where initial values cannot be read, or an ``.npz`` of them does not suit the model."""
    if not state:
        return
    if not Path(state).exists():
        raise UsageError(f"{state} cannot be read as initial values: there is no such file")
    if Path(state).suffix != ".npz":
        if python == sys.executable and not _reads_checkpoints():
            with_training = Setting("python", Word("PYTHON"))
            raise UsageError(
                "{} is not an .npz of initial values: give one, or for a checkpoint {} with onnxruntime-training",
                state, with_training,
            )  # fmt: skip
        return
    inputs = {value.name: value.type.tensor_type for value in model_io.load(model).model.graph.input}
    try:
        with np.load(state) as given:
            if unknown := [name for name in given.files if name not in inputs]:
                raise UsageError(f"{state}: the model has no input {unknown[0]!r}{did_you_mean(unknown[0], inputs)}")
            for name in given.files:
                _check_value(f"{state}: input {name!r}", given[name], inputs[name], dims)
    except UsageError:
        raise
    except (OSError, ValueError, TypeError, EOFError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise UsageError(f"{state} cannot be read as initial values: {first_line(error)}") from error


def _check_value(what: str, value: np.ndarray, formal: onnx.TypeProto.Tensor, dims: Mapping[str, int]) -> None:
    """Raise UsageError where an array does not have the shape of an input, or cannot be cast to its type."""
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(formal.elem_type))
    if dtype.kind in "biuf" and not np.can_cast(value.dtype, dtype, "same_kind"):
        raise UsageError(f"{what} is of type {dtype}, not {value.dtype}")
    if not formal.HasField("shape"):
        return
    sizes = [d.dim_value if d.HasField("dim_value") else dims.get(d.dim_param) for d in formal.shape.dim]
    if len(sizes) != value.ndim or any(b not in (None, a) for a, b in zip(value.shape, sizes, strict=True)):
        shape = [d.dim_param or "?" if size is None else size for d, size in zip(formal.shape.dim, sizes, strict=True)]
        raise UsageError(f"{what} has shape ({', '.join(map(str, shape))}), not {value.shape}")


def _reads_checkpoints() -> bool:
    """Is onnxruntime-training installed here?"""
    return runtime.available() and importlib.util.find_spec("onnxruntime.training") is not None


def _loss(result: Result, named: str | None) -> str:
    """Return the output that is the loss: `named`, or the one that the plan takes for it."""
    graph = result.compiled.graph
    found = named or phases.find_loss(graph, result.compiled.tensors)
    if found is None:
        raise UsageError("no output is known to be the loss, a scalar: name it with {}", Setting("loss"))
    if not graph.values[found].is_output:
        raise UsageError("{}: {!r} is no output: make it an output of the model", Setting("loss"), found)
    return found


def _same(first: Sequence[float], second: Sequence[float]) -> bool:
    return np.array_equal(first, second, equal_nan=True)


def _distance(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the largest relative difference; infinite where only one loss of a step is NaN, or is that infinity."""
    return max(_apart(a, b) for a, b in zip(first, second, strict=True))


def _apart(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / max(abs(a), abs(b), 1e-30) if math.isfinite(a - b) else math.inf


def machine() -> str:
    """Return the processor's name and its number of cores, as text."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} x {len(names)}" if names else platform.processor() or platform.machine()


@worker.device_left()
def max_batch(model: Path, budget: str, dim: str, **options: Unpack[PlanningOptions]) -> tuple[int, int]:
    """Return the largest size of a symbolic dimension at which a step keeps a budget, as it is and rewritten.

    Doubles the size until the budget is missed, then bisects; each size of the rewritten model costs a plan.

    Raises
    ------
    UsageError
        The budget is a percentage, or `dim` is not a symbolic dimension.
    BudgetInfeasibleError
        Size 1 does not fit.
    """
    parsed = parse_budget(budget)
    if (allowed := parsed.bytes) is None:
        raise UsageError("a largest batch needs a budget in bytes, such as 4GB: a percentage grows with the batch")
    given = options.pop("dims", {})

    def sized(size: int) -> PlanningOptions:
        return {**options, "dims": {**given, dim: size}}

    def peak(size: int) -> int:
        return begin(model, sized(size)).taken

    def fits(size: int) -> bool:
        try:
            rewrite(model, parsed, sized(size), advise=False)
        except TooLittleTime:
            raise
        except BudgetInfeasibleError:
            return False
        return True

    plain = largest(lambda size: peak(size) <= allowed)
    small = largest(fits, known=plain)
    if not small:
        rewrite(model, parsed, sized(1))  # raises, and says why
    return plain, small


def largest(holds: Callable[[int], bool], limit: int = 1 << 20, known: int = 0) -> int:
    """Return the largest size up to `limit` for which `holds`, a monotonic predicate that holds for `known`.

    >>> largest(lambda size: size <= 37, 1000), largest(lambda size: False, 1000)
    (37, 0)
    """
    low, high = known, max(1, 2 * known)
    while high <= limit and holds(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``onnx-remat-bench``."""
    parser = Parser(
        prog="onnx-remat-bench",
        description="Rewrite a training graph, train it and the original on stock ONNX Runtime, and compare measured "
        "peak, step time, losses, and the errors of the predictions. It plans for onnxruntime's own session, in which "
        "it measures (onnx-remat --for session), not for a loop, the default of onnx-remat: budget and peaks are the "
        "sum of tensors. With --max-batch nothing is measured, and a budget covers what --for says.",
    )
    parser.add_argument("input", metavar="IN", nargs="+", help="training graphs")
    parser.add_argument(
        "--budget", required=True, metavar="SIZE",
        help="of tensors: 4GB, or 60%% of the original's; auto, +5%%: see onnx-remat -h; in bytes with --max-batch",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, metavar="N", help="training steps (default 50)")
    parser.add_argument(
        "--initial", default="", metavar="FILE",
        help="initial values of inputs: .npz by name, or a checkpoint of onnxruntime-training",
    )  # fmt: skip
    add_runtime_flag(parser)
    parser.add_argument("--threads", type=int, metavar="N", help="intra-op threads")
    parser.add_argument(
        "--max-batch", metavar="DIM",
        help="instead find the largest size of this symbolic dimension that keeps the budget, original and rewritten",
    )  # fmt: skip
    parser.add_argument("--markdown", action="store_true", help="print one row of a Markdown table per graph")
    parser.add_argument("--json", metavar="PATH|-", help="also write the results as JSON (- is standard output)")
    costs = f"a profile of IN, measured first; for a largest batch {USUAL_COSTS}"
    planning = add_flags(parser, effort="10s", without=("run_by",), costs=costs)
    add_flag(
        planning, "run_by",
        help="for a largest batch: what will train with the file, loop (default) or session, see onnx-remat -h; "
        "otherwise it is always a session",
    )  # fmt: skip
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    return guarded("onnx-remat-bench", _run, sys.argv[1:] if arguments is None else arguments)


_HEAD = (
    "| graph | budget | original, measured (predicted) | rewritten, measured (predicted) "
    "| step, measured (predicted) | losses |\n| --- | --- | --- | --- | --- | --- |"
)


def _markdown(b: Benchmark, budget: str) -> str:
    sides = [f"{format_bytes(s.measured_peak)} ({s.error():+.2%})" for s in (b.original, b.rewritten)]
    losses = f"{len(b.original.losses)} {'bitwise equal' if b.exact else 'NOT equal'}, default {b.loss_distance:.0e}"
    return (
        f"| {b.model} | {budget} = {format_bytes(b.budget)} | {sides[0]} | {sides[1]} "
        f"| {b.measured_overhead:+.1%} ({b.predicted_overhead:+.1%}) | {losses} |"
    )


def _check_together(given: argparse.Namespace) -> None:
    """Raise UsageError for flags that exclude each other.

    A search for the largest batch trains nothing, and standard output takes a table or JSON.
    """
    if given.markdown and given.json == "-":
        both = Setting("markdown"), Setting("json", "-")
        raise UsageError("{} and {} both write to standard output: give {}", *both, Setting("json", Word("FILE")))
    of_training = {
        "json": given.json, "markdown": given.markdown or None, "initial": given.initial or None,
        "steps": given.steps, "threads": given.threads,
        "python": None if given.runtime == sys.executable else given.runtime,
    }  # fmt: skip
    unused = [name for name, value in of_training.items() if value is not None]
    if given.max_batch and unused:
        raise UsageError("{} trains nothing: leave {} out", Setting("max_batch"), Setting(unused[0]))


def _readable(paths: Sequence[str]) -> dict[str, model_io.Source]:
    """Return the models that can be read; `benchmark` refuses the others by name."""
    sources = {}
    for path in paths:
        with contextlib.suppress(OnnxRematError, OSError):
            sources[path] = model_io.load(path)
    return sources


def _run(arguments: Sequence[str]) -> int:
    given = build_parser().parse_args(arguments)
    options = planning_options(given)
    _check_together(given)
    if given.json not in (None, "-"):
        check_files(
            _readable(given.input),
            None,
            [("--json", given.json)],
            given.costs,
            initial=given.initial,
            runtime=given.runtime,
        )
    found, refused = [], 0
    if given.markdown:
        say(_HEAD)
    for path in given.input:
        try:
            if given.max_batch:
                plain, small = max_batch(Path(path), given.budget, given.max_batch, **options)
                times = f" ({small / plain:.1f} times)" if plain else ""
                say(f"{Path(path).stem}: {given.max_batch} up to {plain} as it is, up to {small} rewritten{times}")
                continue
            result = benchmark(
                Path(path), given.budget, steps=50 if given.steps is None else given.steps, state=given.initial,
                threads=given.threads or 0, python=given.runtime, **options,
            )  # fmt: skip
        except OnnxRematError as error:
            if len(given.input) == 1:
                raise
            complain(f"onnx-remat-bench: error: {path}: {one_line(error)}")  # continue with the other graphs
            refused = refused or error.exit_code
            continue
        found.append(result)
        for warning in result.warnings:
            complain(f"onnx-remat-bench: warning: {path}: {warning}")
        if given.markdown:
            say(_markdown(result, given.budget))
        elif given.json != "-":
            say(f"{result.model}, budget {format_bytes(result.budget)}\n{result.to_text()}\n")
    if given.markdown and found:
        spread = statistics.median(abs(r.measured_overhead - r.predicted_overhead) for r in found)
        say(f"\n{machine()}; predicted step time off by {100 * spread:.1f} points in the median")
    if given.json:
        text = json_text([r.to_dict() for r in found])
        say(text) if given.json == "-" else files.write_text(text + "\n", given.json)
    return refused
