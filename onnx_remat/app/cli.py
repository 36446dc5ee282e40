"""Command line: arguments -> pipeline -> report, without logic of its own."""

from __future__ import annotations

import argparse
import gc
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from onnx_remat import files
from onnx_remat.app import commands, completion, streams
from onnx_remat.app.flags import (
    Parser,
    add_flags,
    check_files,
    guarded,
    in_flags,
    planning_options,
    selector_names,
)
from onnx_remat.app.progress import Progress
from onnx_remat.errors import UsageError, did_you_mean
from onnx_remat.version import __version__

_DESCRIPTION = """\
Rewrite an ONNX graph so that it fits a memory budget on ONNX Runtime, with as little
recomputation as possible. A rewritten training step computes the same loss, gradients and
new weights, a rewritten inference graph the same outputs.

three examples, from a checkout:
  onnx-remat estimate sample_models/attention_stack.onnx
  onnx-remat sample_models/attention_stack.onnx small.onnx --budget 60%
  onnx-remat explain small.onnx

commands (each has its own -h):
  onnx-remat [rewrite] IN OUT --budget SIZE   rewrite IN to a budget: this page
  onnx-remat estimate IN                      show the memory of IN, and which budgets are possible
  onnx-remat explain OUT                      show what a rewritten file recomputes, and why
  onnx-remat sweep IN                         show memory against extra compute over many budgets
  onnx-remat profile IN OUT                   measure seconds per op, for --costs
  onnx-remat check OUT                        check whether another tool has undone a rewritten file
  onnx-remat split IN                         split a step into two files: gradients, and the update
  onnx-remat-bench IN --budget SIZE           train original and rewritten model and compare them
  python -m onnx_remat.converters.autodiff FORWARD IN --loss LOSS
                                              make a training step of a forward model

budgets:
  --budget 4GB                                kB, MB, GB are powers of ten, KiB, MiB, GiB of two
  --budget 60% --verify run                   also run both models and compare their outputs
  --budget auto                               the least memory for which a step takes at most 10% more time
  --budget 2GiB --dim batch=32                a model with symbolic dimensions
  --budget 50% --dry-run                      report the cost, write nothing: no OUT
  --budget 4GB --for session                  cover the tensors of onnxruntime's own session, not all of training"""

_EPILOG = """\
selectors:
{selectors}

exit codes: 0 ok, 1 internal error (a bug), 2 usage, 3 budget infeasible, 4 invalid or unsupported
model or missing package, 5 verification failed, 6 conversion failed (converters), 7 a rank of a
distributed job was lost, 130 interrupted, 143 terminated. On 2 to 6, 130 and 143 no model is
written."""

COMMANDS = ("estimate", "explain", "sweep", "profile", "check", "split")
"""Functions of `onnx_remat.app.commands`, called by their names."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``onnx-remat``."""
    from onnx_remat.options import CHECKING, MOVING
    from onnx_remat.plan.request import summary

    described = "\n".join(f"  {name:<12} {summary(name)}" for name in selector_names())
    parser = Parser(
        prog="onnx-remat",
        description=_DESCRIPTION,
        epilog=_EPILOG.format(selectors=described),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    given = parser.add_argument(
        "input", metavar="IN",
        help="a training step: forward, loss, backward, often the update; or a graph for inference",
    )  # fmt: skip
    completion.complete_first(given, COMMANDS)
    parser.add_argument("output", metavar="OUT", nargs="?", help="where to write the rewritten graph")
    parser.add_argument(
        "--budget", required=True, metavar="SIZE",
        help="upper limit on the memory of training, see --for: 4GB (10^9), 3.5GiB (2^30), 123456789B, or 80%% of "
        "the memory of the original; auto: the least for which a step takes at most 10%% more time "
        "(with --for session: compute), +5%%: at most 5%%",
    )  # fmt: skip
    checking = add_flags(parser, CHECKING)
    checking.add_argument("--dry-run", action="store_true", help="report, but write nothing")
    checking.add_argument("--json", metavar="PATH|-", help="also write the report as JSON (- is standard output)")
    checking.add_argument(
        "--plot", action="append", default=[], metavar="PATH",
        help="also plot the step before and after: .png, .svg, .pdf; .html: an interactive page; "
        ".pickle: a snapshot for pytorch.org/memory_viz (repeatable)",
    )  # fmt: skip
    checking.add_argument("--force", action="store_true", help="replace OUT if it exists")
    loudness = checking.add_mutually_exclusive_group()
    loudness.add_argument(
        "-v", "--verbose", action="store_true",
        help="also list the largest values at the peak, and log every plan tried",
    )  # fmt: skip
    loudness.add_argument("-q", "--quiet", action="store_true", help="print errors only")
    parser.add_argument("--version", action="version", version=f"onnx-remat {__version__}")
    add_flags(parser)
    add_flags(parser, MOVING)
    return parser


_OBJECTS = 200_000
"""Threshold of net new objects at which Python collects reference cycles."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if (words := completion.words()) is not None:
        given = words
    if given and given[0] in COMMANDS:
        return guarded("onnx-remat " + given[0], getattr(commands, given[0]), given[1:])
    if given and given[0] == "rewrite" and not Path("rewrite").exists():
        return guarded("onnx-remat", _rewrite, given[1:])
    return guarded("onnx-remat", _unnamed, given)


def _unnamed(arguments: Sequence[str]) -> int:
    """Rewrite without the command's name; raise UsageError where the first word may be a name, and is none."""
    word = arguments[0] if arguments else ""
    may_be_name = word and word.replace("-", "").isidentifier() and not word.startswith("-")
    meant = did_you_mean("onnx-remat-bench" if word == "bench" else word, ("rewrite", *COMMANDS, "onnx-remat-bench"))
    is_there = Path(word).exists() or Path(word).is_symlink()
    if (meant or may_be_name) and completion.words() is None and not is_there:
        raise UsageError(f"no command and no file {word!r}{meant or ': onnx-remat -h lists the commands'}")
    return _rewrite(arguments)


def _rewrite(arguments: Sequence[str]) -> int:
    parser = build_parser()
    if not arguments and completion.words() is None:
        parser.print_help()
        return 0
    given = parser.parse_args(arguments)
    if given.output is None and not given.dry_run:
        parser.error("the following arguments are required: OUT (none with --dry-run)")
    return _run(given)


def _run(arguments: argparse.Namespace) -> int:
    # A large graph is millions of objects, hardly any of them in a reference cycle, and the command ends soon:
    # collecting them costs time without a benefit.
    gc.set_threshold(_OBJECTS)
    from onnx_remat.findings import show
    from onnx_remat.ir import model_io
    from onnx_remat.rewrite import pipeline
    from onnx_remat.units import parse_budget

    if arguments.verbose:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s: %(message)s")
    budget, options = parse_budget(arguments.budget), planning_options(arguments)
    if not arguments.dry_run:
        files.check_target(arguments.output, arguments.input, arguments.force)
    for path in arguments.plot:
        show.check(path)
    reports = [("--json", arguments.json), *(("--plot", path) for path in arguments.plot)]
    progress = Progress(quiet=arguments.quiet)
    options["progress"] = progress
    try:
        progress("load", 0.0)
        source = model_io.load(arguments.input)
        check_files({arguments.input: source}, arguments.output, reports, arguments.costs)
        result = pipeline.rewrite_model(source, budget, **options)
        report = replace(result.report, notes=tuple(map(in_flags, result.report.notes)))
    finally:
        progress.clear()
    with files.together():
        if not arguments.dry_run:
            model_io.save(result.model, arguments.output, result.folder, arguments.force, result.data)
        if arguments.json not in (None, "-"):
            files.write_text(report.to_json() + "\n", arguments.json)
        for path in arguments.plot:
            show.draw(result, path)
        # Before the files are moved to their paths: a report that cannot be printed is a failure,
        # and failures write nothing.
        for warning in () if arguments.quiet else report.warnings:
            streams.complain(f"onnx-remat: warning: {warning}")
        if arguments.json == "-":
            streams.say(report.to_json())
        elif not arguments.quiet:
            streams.say(in_flags(report.to_text(arguments.verbose)))
    if not arguments.quiet and arguments.json != "-":
        out = None if arguments.dry_run else arguments.output
        written = [path for path in (out, arguments.json, *arguments.plot) if path]
        streams.say(f"\nwrote {', '.join(written) or 'nothing'}")
    return 0
