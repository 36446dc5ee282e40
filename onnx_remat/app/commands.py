"""Subcommands ``onnx-remat estimate``, ``explain``, ``sweep``, ``profile``, ``check`` and ``split``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from onnx_remat import files
from onnx_remat.app.flags import (
    USUAL_COSTS,
    Parser,
    add_flag,
    add_flags,
    add_runtime_flag,
    check_files,
    in_flags,
    planning_options,
)
from onnx_remat.app.progress import Progress
from onnx_remat.app.streams import say
from onnx_remat.errors import UsageError
from onnx_remat.ir import model_io
from onnx_remat.messages import Finding

_CUSTOM = "none: also for models with ops that onnxruntime lacks, which it cannot load (default: check)"
_PLANNED_SIZE = "size of a symbolic dimension (default: the size that the file was planned for)"


def estimate(arguments: Sequence[str]) -> int:
    """Print the memory that a graph takes, a bound on budgets, and one for which there is a plan."""
    from onnx_remat.findings.estimate import estimate as run

    parser = Parser(
        prog="onnx-remat estimate",
        description="Show the memory of IN by part and by module, a bound that no budget can go below, and a budget "
        "for which a search of about a second finds a plan. onnx-remat sweep --lowest finds lower ones.",
    )
    parser.add_argument("input", metavar="IN", help="any graph: a training step, or one for inference")
    parser.add_argument("--json", metavar="PATH|-", help="also write the estimate as JSON (- is standard output)")
    planning = add_flags(parser, without=("arena", "effort", "time_limit"))
    add_flag(planning, "time_limit", "wall-clock limit (default: 120s)")
    add_flag(parser, "verify", _CUSTOM)
    given = parser.parse_args(arguments)
    options, progress = planning_options(given), Progress()
    options["progress"] = progress
    try:
        source = model_io.load(given.input)
        check_files({given.input: source}, None, [("--json", given.json)], given.costs)
        found = run(source, **options)
        found = replace(found, notes=tuple(map(in_flags, found.notes)))
    finally:
        progress.clear()
    return _report(found, given.json)


def explain(arguments: Sequence[str]) -> int:
    """Print what a rewritten file recomputes, and why."""
    from onnx_remat.findings.explain import explain as run
    from onnx_remat.units import parse_dims

    parser = Parser(
        prog="onnx-remat explain",
        description="Show what a rewritten file recomputes and why, and the values live at its peak, by module.",
    )
    parser.add_argument("file", metavar="FILE", help="a model that onnx-remat wrote")
    add_flag(parser, "dims", _PLANNED_SIZE)
    add_flag(parser, "costs", costs=USUAL_COSTS)
    parser.add_argument("--json", metavar="PATH|-", help="also write the explanation as JSON (- is standard output)")
    given = parser.parse_args(arguments)
    check_files({given.file: model_io.load(given.file)}, None, [("--json", given.json)], given.costs)
    found = run(given.file, parse_dims(given.dims or []), given.costs or "")
    return _report(found, given.json)


def _report(
    found: Finding, path: str | None, plot: str | None = None, draw: Callable[[str], None] | None = None
) -> int:
    """Print a finding (as JSON for `path` ``-``), write its JSON to any other `path`, and draw it to `plot`."""
    with files.together():
        if plot and draw:
            draw(plot)
        if path not in (None, "-"):
            files.write_text(found.to_json() + "\n", path)
        say(found.to_json() if path == "-" else in_flags(found.to_text()))
    if (written := [each for each in (path, plot) if each]) and path != "-":
        say(f"\nwrote {', '.join(written)}")
    return 0


def sweep(arguments: Sequence[str]) -> int:
    """Print, and draw with ``--plot``, the extra compute at many peaks."""
    from onnx_remat.findings import show
    from onnx_remat.findings.lowest import lowest_budget
    from onnx_remat.findings.sweep import sweep as run

    parser = Parser(
        prog="onnx-remat sweep",
        description="Rewrite IN for a range of budgets and show peak memory against extra compute.",
    )
    parser.add_argument("input", metavar="IN", help="training graph")
    parser.add_argument("--points", type=int, metavar="N", help="budgets to try below the original (default 10)")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes that plan in parallel (default 1)")
    parser.add_argument(
        "--lowest", action="store_true",
        help="only search for the lowest budget that a file keeps, and show the highest that is proved impossible",
    )  # fmt: skip
    add_flags(parser, effort="10s", without=("arena",))
    add_flag(parser, "verify", _CUSTOM)
    parser.add_argument("--json", metavar="PATH|-", help="also write the curve as JSON (- is standard output)")
    parser.add_argument("--plot", metavar="PATH", help=f"also plot the curve: {', '.join(show.IMAGES)}")
    given = parser.parse_args(arguments)
    flags = {"--plot": given.plot, "--points": given.points, "--jobs": given.jobs}
    if given.lowest and (flag := next((flag for flag, value in flags.items() if value is not None), None)):
        raise UsageError(f"--lowest finds one budget, not a curve: leave {flag} out")
    if given.plot:
        show.check(given.plot, show.IMAGES)
    options, progress = planning_options(given), Progress()
    options["progress"] = progress
    found: Finding
    draw = None
    try:
        source = model_io.load(given.input)
        check_files({given.input: source}, None, [("--json", given.json), ("--plot", given.plot)], given.costs)
        if given.lowest:
            found = lowest_budget(source, **options)
        else:
            points, jobs = (10 if given.points is None else given.points), (1 if given.jobs is None else given.jobs)
            read = files.reopened(given.input) if jobs > 1 else source  # others read the file, and its data, themselves
            found = curve = run(read, points, jobs, **options)
            draw = partial(show.draw_curve, curve)
    finally:
        progress.clear()
    return _report(found, given.json, given.plot, draw)


def profile(arguments: Sequence[str]) -> int:
    """Measure seconds per op and write them in the format of ``--costs``."""
    from onnx_remat.ir.training_ops import check_ops
    from onnx_remat.measure.profiling import profile as run
    from onnx_remat.ort import runtime
    from onnx_remat.units import parse_dims

    parser = Parser(
        prog="onnx-remat profile",
        description="Measure seconds per op of IN on ONNX Runtime, for --costs OUT.",
    )
    parser.add_argument("input", metavar="IN", help="training graph")
    parser.add_argument("output", metavar="OUT", help="where to write the profile (JSON, ONNX Runtime's own layout)")
    add_flag(parser, "dims", "size of a symbolic dimension")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="fresh processes (default 5)")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="steps in each (default 5)")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="intra-op threads (default: the runtime's)")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    add_flag(parser, "provider", default="cpu", provider="cpu")
    add_runtime_flag(parser)
    given = parser.parse_args(arguments)
    target = files.check_target(given.output, given.input, given.force)
    source = model_io.load(given.input)
    check_files({given.input: source}, None, [("OUT", given.output)], runtime=given.runtime)
    if given.runtime == sys.executable:
        runtime.import_runtime()
        check_ops(source.model)
    progress = Progress()
    try:
        result = run(
            given.input, dims=parse_dims(given.dims or []), runs=given.runs, steps=given.steps, threads=given.threads,
            provider=given.provider, python=given.runtime, progress=progress,
        )  # fmt: skip
    finally:
        progress.clear()
    with files.together():
        files.write_text(result.to_json(), target, given.force)
        say(result.to_text())
    say(f"\nwrote {given.output}")
    return 0


def check(arguments: Sequence[str]) -> int:
    """Check whether another tool has undone a rewritten file; return 5 where it no longer keeps its budget, else 0."""
    from onnx_remat.errors import VerificationError
    from onnx_remat.findings.check import check as run
    from onnx_remat.units import parse_dims

    parser = Parser(
        prog="onnx-remat check",
        description="Check whether another tool has undone a rewritten file: compare the file with its plan, simulate "
        "it and run one step. Exits with 5 where it no longer runs or no longer keeps its budget.",
    )
    parser.add_argument("file", metavar="FILE", help="a rewritten model, possibly modified by another tool")
    add_flag(parser, "dims", _PLANNED_SIZE)
    parser.add_argument("--no-run", action="store_true", help="do not run a step of it")
    add_flag(parser, "provider", provider="that of the plan")
    add_runtime_flag(parser)
    parser.add_argument("--json", metavar="PATH|-", help="also write the result as JSON (- is standard output)")
    given = parser.parse_args(arguments)
    if given.json:
        check_files({given.file: model_io.load(given.file)}, None, [("--json", given.json)])
    found = run(
        given.file, parse_dims(given.dims or []), run=not given.no_run, provider=given.provider, python=given.runtime
    )
    _report(found, given.json)
    return VerificationError.exit_code if found.lost else 0


def split(arguments: Sequence[str]) -> int:
    """Write a training step as two files: one that outputs the gradients, and the update."""
    from onnx_remat.ir.naming import NEW
    from onnx_remat.ir.state import with_state
    from onnx_remat.split import accumulating, split_step
    from onnx_remat.units import parse_dims, parse_pairs

    parser = Parser(
        prog="onnx-remat split",
        description="Split a training step in two: a step that outputs the loss and grad.<name>, and the optimizer's "
        "update. Run one after the other, both are bit-identical to IN.",
    )
    parser.add_argument("input", metavar="IN", help="a whole training step: forward, loss, backward, update")
    parser.add_argument("gradients", metavar="GRADIENTS", nargs="?", help="default: as IN, .gradients.onnx for .onnx")
    parser.add_argument("update", metavar="UPDATE", nargs="?", help="default: as IN, .update.onnx for .onnx")
    parser.add_argument(
        "--accumulate", action="store_true",
        help="let GRADIENTS add to sums, new.grad.<name> from grad.<name>, as onnx_remat.distributed needs it",
    )  # fmt: skip
    add_flag(parser, "loss", "name of the loss, if it cannot be inferred")
    add_flag(parser, "state_outputs")
    add_flag(parser, "dims", "size of a symbolic dimension")
    parser.add_argument("--force", action="store_true", help="replace files that exist")
    given = parser.parse_args(arguments)
    stem = given.input.removesuffix(".onnx")
    paths = given.gradients or f"{stem}.gradients.onnx", given.update or f"{stem}.update.onnx"
    source = model_io.load(given.input)
    check_files({given.input: source}, None, [("GRADIENTS", paths[0]), ("UPDATE", paths[1])])
    if given.state_outputs:
        source = with_state(source, parse_pairs(given.state_outputs))
    found = split_step(source, loss=given.loss, dims=parse_dims(given.dims or []) or None)
    if given.accumulate:
        found = replace(found, gradients=accumulating(found.gradients))
    found.save(*paths, force=given.force)
    renewed = sum(value.name.startswith(NEW) for value in found.update.graph.output)
    nodes = [len(model.graph.node) for model in (found.gradients, found.update)]
    say(f"wrote {paths[0]}: {nodes[0]} nodes, gradients of {_counted(len(found.parameters), 'parameter')}")
    say(f"wrote {paths[1]}: {nodes[1]} nodes, renews {_counted(renewed, 'input')}")
    return 0


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)
