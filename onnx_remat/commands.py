"""The other commands: ``onnx-remat sweep`` and ``onnx-remat profile``."""

from __future__ import annotations

from collections.abc import Sequence

from onnx_remat import model_io
from onnx_remat.cli import Parser, add_planning_flags, planning_options


def sweep(arguments: Sequence[str]) -> int:
    """Print, and on demand draw, what every peak costs."""
    from onnx_remat import show
    from onnx_remat.sweep import sweep as run

    parser = Parser(
        prog="onnx-remat sweep",
        description="What every peak costs: rewrites IN for a range of budgets and prints peak against extra compute.",
    )
    parser.add_argument("input", metavar="IN", help="training graph")
    parser.add_argument("--points", type=int, default=10, metavar="N", help="budgets to try (default 10)")
    add_planning_flags(parser, time_limit="10s")
    parser.add_argument("--json", metavar="PATH|-", help="also write the curve as JSON (- is standard output)")
    parser.add_argument("--plot", metavar="PATH", help=f"also draw it: {', '.join(show.IMAGES)}")
    given = parser.parse_args(arguments)
    if given.plot:
        show.check(given.plot, show.IMAGES)
        model_io.check_target(given.plot, given.input, force=True)
    if given.json not in (None, "-"):
        model_io.check_target(given.json, given.input, force=True)
    curve = run(given.input, given.points, **planning_options(given))
    if given.plot:
        show.draw_curve(curve, given.plot)
    if given.json == "-":
        print(curve.to_json())
        return 0
    if given.json:
        model_io.write_text(curve.to_json() + "\n", given.json)
    print(curve.to_text())
    return 0


def profile(arguments: Sequence[str]) -> int:
    """Measure seconds per op and write them in the form that ``--costs`` reads."""
    from onnx_remat.profiling import profile as run
    from onnx_remat.units import parse_dims

    parser = Parser(
        prog="onnx-remat profile",
        description="Measure seconds (and scratch memory) per op of IN on ONNX Runtime, for --costs OUT.",
    )
    parser.add_argument("input", metavar="IN", help="training graph")
    parser.add_argument("output", metavar="OUT", help="where to write the profile (JSON, ONNX Runtime's own layout)")
    parser.add_argument("--dim", action="append", default=[], metavar="NAME=N", help="size of a symbolic dimension")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="fresh processes (default 5)")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="steps in each (default 5)")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="intra-op threads (default: the runtime's)")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    given = parser.parse_args(arguments)
    target = model_io.check_target(given.output, given.input, given.force)
    result = run(given.input, dims=parse_dims(given.dim), runs=given.runs, steps=given.steps, threads=given.threads)
    model_io.write_text(result.to_json(), target)
    print(f"{result.to_text()}\n\nwrote {given.output}")
    return 0
