"""The command line: arguments -> pipeline -> report. No logic of its own."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from onnx_remat.errors import OnnxRematError, UsageError
from onnx_remat.version import __version__

_DESCRIPTION = """\
Rewrite an ONNX training graph so that a whole step peaks at or under a memory budget on
ONNX Runtime: the same loss, gradients and new weights, for as little recomputation as possible."""

_EPILOG = """\
examples:
  onnx-remat train.onnx small.onnx --budget 4GB
  onnx-remat train.onnx small.onnx --budget 60% --verify run     also run both and compare
  onnx-remat train.onnx small.onnx --budget 2GiB --dim batch=32  a model with symbolic dims
  onnx-remat train.onnx small.onnx --budget 50% --dry-run        only say what it would cost

other commands (each has its own -h):
  onnx-remat sweep IN            what every peak costs: the curve of peak against extra compute
  onnx-remat profile IN OUT      measured seconds per op, for --costs
  onnx-remat check FILE          has another tool undone a rewritten file?
  onnx-remat-bench IN            train original and rewritten model and compare them

selectors:
{selectors}

exit codes: 0 ok, 1 a bug of ours, 2 usage, 3 budget infeasible, 4 invalid or unsupported model or a
package that is missing, 5 verification failed. On 2 to 5 nothing is written."""

COMMANDS = ("sweep", "profile", "check")
"""Functions of `onnx_remat.app.commands`, called by their names."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ours."""

    def error(self, message: str) -> None:  # type: ignore[override]  # argparse's own exits before we can report
        raise UsageError(message)


def build_parser() -> argparse.ArgumentParser:
    """The arguments, documented."""
    from onnx_remat.plan.request import summary
    from onnx_remat.run.verify import MODES

    described = "\n".join(f"  {name:<12} {summary(name)}" for name in _selector_names())
    parser = Parser(
        prog="onnx-remat",
        description=_DESCRIPTION,
        epilog=_EPILOG.format(selectors=described),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("input", metavar="IN", help="training graph: forward, loss, backward, often the update")
    parser.add_argument("output", metavar="OUT", help="where to write the rewritten graph")
    parser.add_argument(
        "--budget", required=True, metavar="SIZE",
        help="peak to stay under: 4GB (10^9), 3.5GiB (2^30), 123456789B, or 80%% of the original's own peak",
    )  # fmt: skip
    checking = parser.add_argument_group("checking and reporting")
    checking.add_argument(
        "--verify", default="check", choices=MODES,
        help="check (default): validity, interface, order, simulated peak; run: also run both and compare; none",
    )  # fmt: skip
    checking.add_argument("--dry-run", action="store_true", help="report, but write nothing")
    checking.add_argument("--json", metavar="PATH|-", help="also write the report as JSON (- is standard output)")
    checking.add_argument(
        "--plot", action="append", default=[], metavar="PATH",
        help="also draw memory over the step, before and after: .png, .svg, .pdf; .html: a page to click in; "
        ".pickle: a snapshot to open at pytorch.org/memory_viz (repeat)",
    )  # fmt: skip
    checking.add_argument("--force", action="store_true", help="replace OUT if it exists")
    loudness = checking.add_mutually_exclusive_group()
    loudness.add_argument("-v", "--verbose", action="store_true", help="also list the largest values at the peak")
    loudness.add_argument("-q", "--quiet", action="store_true", help="print errors only")
    parser.add_argument("--version", action="version", version=f"onnx-remat {__version__}")
    add_planning_flags(parser)
    return parser


def add_planning_flags(parser: argparse.ArgumentParser, time_limit: str = "30s") -> None:
    """The flags that say how to plan; `planning_options` reads them."""
    from onnx_remat.ort.kernels.costs import PRESETS

    planning = parser.add_argument_group("planning")
    planning.add_argument(
        "--selector", default="auto", metavar="NAME",
        help=f"how to plan (default auto): {', '.join(_selector_names())}; onnx-remat -h describes them",
    )  # fmt: skip
    planning.add_argument(
        "--dim", action="append", default=[], metavar="NAME=N", help="size of a symbolic dimension (repeat)"
    )
    planning.add_argument("--loss", metavar="NAME", help="the loss, where nodes are unlabelled and it is not clear")
    planning.add_argument(
        "--keep", action="append", default=[], metavar="NAME", help="a value never to recompute (repeat)"
    )
    planning.add_argument(
        "--checkpoint", action="append", default=[], metavar="NAME",
        help="a value that selector collection keeps; it recomputes the rest of the forward pass (repeat)",
    )  # fmt: skip
    planning.add_argument(
        "--allow-recompute", action="append", default=[], metavar="DOMAIN::OP",
        help="a custom op that is pure, so that it may be recomputed (repeat)",
    )  # fmt: skip
    planning.add_argument(
        "--arena", action="store_true",
        help="let the budget also cover what ONNX Runtime's arena adds with onnx_remat.session_options(), as foreseen",
    )  # fmt: skip
    planning.add_argument(
        "--time-limit", default=time_limit, metavar="TIME", help=f"for planning (default {time_limit})"
    )
    planning.add_argument(
        "--costs", default="cpu", metavar="PRESET|FILE",
        help=f"seconds per op: {', '.join(PRESETS)} (default cpu), or a profile JSON written by ONNX Runtime",
    )  # fmt: skip


def _selector_names() -> list[str]:
    """The default and ours first."""
    from onnx_remat.plan import selectors

    return sorted(selectors.names(), key=lambda name: (name != "auto", name != "search"))


def add_runtime_flag(parser: argparse.ArgumentParser) -> None:
    """The flag that says where models run."""
    parser.add_argument(
        "--runtime", default=sys.executable, metavar="PYTHON",
        help="interpreter of another environment, whose ONNX Runtime is to run the models: onnxruntime-training's, say",
    )  # fmt: skip


def planning_options(arguments: argparse.Namespace) -> dict[str, object]:
    """Fields of `Options` from the flags of `add_planning_flags`."""
    from onnx_remat.units import parse_dims, parse_duration

    return {
        "selector": arguments.selector,
        "dims": parse_dims(arguments.dim),
        "loss": arguments.loss,
        "keep": tuple(arguments.keep),
        "checkpoints": tuple(arguments.checkpoint),
        "allow_recompute": tuple(arguments.allow_recompute),
        "arena": arguments.arena,
        "time_limit": parse_duration(arguments.time_limit),
        "costs": arguments.costs,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in COMMANDS:
        from onnx_remat.app import commands

        return guarded("onnx-remat " + given[0], getattr(commands, given[0]), given[1:])
    return guarded("onnx-remat", _rewrite, given)


def _rewrite(arguments: Sequence[str]) -> int:
    meant = difflib.get_close_matches(arguments[0], COMMANDS, n=1) if arguments else []
    if meant and not Path(arguments[0]).exists():
        raise UsageError(f"no command and no file {arguments[0]!r}: did you mean {meant[0]!r}?")
    return _run(build_parser().parse_args(arguments))


def guarded(name: str, command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Run a command; a refusal is one line on standard error and its exit code."""
    try:
        return command(arguments)
    except OnnxRematError as error:
        print(f"{name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read us is gone: say no more
        return 0
    except OSError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return OnnxRematError.exit_code
    except KeyboardInterrupt:
        print(f"{name}: interrupted; nothing was written", file=sys.stderr)
        return 130


def _run(arguments: argparse.Namespace) -> int:
    from onnx_remat import pipeline
    from onnx_remat.app import show
    from onnx_remat.ir import model_io
    from onnx_remat.units import parse_budget

    budget = parse_budget(arguments.budget)
    if not arguments.dry_run:
        model_io.check_target(arguments.output, arguments.input, arguments.force)
    if arguments.json not in (None, "-"):
        model_io.check_target(arguments.json, arguments.input, force=True)
    for path in arguments.plot:
        show.check(path)
        model_io.check_target(path, arguments.input, force=True)
    if arguments.output in (also := [arguments.json, *arguments.plot]):
        raise UsageError(f"{also[also.index(arguments.output)]} cannot be both OUT and a report: name another file")
    progress = Progress(quiet=arguments.quiet)
    try:
        result = pipeline.rewrite_model(
            arguments.input,
            budget,
            **planning_options(arguments),
            verify=arguments.verify,
            progress=progress,
        )
    finally:
        progress.clear()
    if not arguments.dry_run:
        model_io.save(result.model, arguments.output, result.folder)
    if arguments.json == "-":
        print(result.report.to_json())
    elif arguments.json:
        model_io.write_text(result.report.to_json() + "\n", arguments.json)
    for path in arguments.plot:
        show.draw(result, path)
    for warning in () if arguments.quiet else result.report.warnings:
        print(f"onnx-remat: warning: {warning}", file=sys.stderr)
    if not arguments.quiet and arguments.json != "-":
        print(result.report.to_text(arguments.verbose))
        out = None if arguments.dry_run else arguments.output
        written = [path for path in (out, arguments.json, *arguments.plot) if path]
        print(f"\nwrote {', '.join(written) or 'nothing'}")
    return 0


class Progress:
    """What is being done: one line rewritten in place on a terminal, nothing elsewhere."""

    def __init__(self, quiet: bool = False) -> None:
        self._show = sys.stderr.isatty() and not quiet and os.environ.get("TERM") != "dumb"
        self._last = 0.0
        self._stage = ""

    def __call__(self, stage: str, fraction: float) -> None:
        now = time.monotonic()
        if self._show and (stage != self._stage or now - self._last > 0.1):
            self._stage, self._last = stage, now
            done = f" {fraction:.0%}" if 0 < fraction < 1 else ""
            print(f"\r\x1b[K{stage}{done} ...", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._show:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
