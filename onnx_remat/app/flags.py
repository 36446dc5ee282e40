"""What the commands share: flags and what they mean, refusals, progress."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from onnx_remat.errors import OnnxRematError, UsageError

if TYPE_CHECKING:
    from onnx_remat.options import PlanningOptions


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ours."""

    def error(self, message: str) -> None:  # type: ignore[override]  # argparse's own exits before we can report
        raise UsageError(message)


def add_planning_flags(parser: argparse.ArgumentParser, time_limit: str = "30s") -> None:
    """The flags that say how to plan; `planning_options` reads them."""
    from onnx_remat.ort.kernels.costs import PRESETS

    planning = parser.add_argument_group("planning")
    add_provider_flag(planning)
    planning.add_argument(
        "--selector", default="auto", metavar="NAME",
        help=f"how to plan (default auto): {', '.join(selector_names())}; onnx-remat -h describes them",
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


def selector_names() -> list[str]:
    """The default and ours first."""
    from onnx_remat.plan import selectors

    return sorted(selectors.names(), key=lambda name: (name != "auto", name != "search"))


def add_provider_flag(parser: argparse._ActionsContainer) -> None:
    """The flag that says which of ONNX Runtime's execution providers runs the models."""
    from onnx_remat.ort.kernels.registry import PROVIDERS

    parser.add_argument(
        "--provider", default="cpu", choices=PROVIDERS, help="execution provider that runs the model (default cpu)"
    )


def add_runtime_flag(parser: argparse.ArgumentParser) -> None:
    """The flag that says where models run."""
    parser.add_argument(
        "--runtime", default=sys.executable, metavar="PYTHON",
        help="interpreter of another environment, whose ONNX Runtime is to run the models: onnxruntime-training's, say",
    )  # fmt: skip


def planning_options(arguments: argparse.Namespace) -> PlanningOptions:
    """Fields of `Options` from the flags of `add_planning_flags`."""
    from onnx_remat.units import parse_dims, parse_duration

    options: PlanningOptions = {
        "provider": arguments.provider,
        "selector": arguments.selector,
        "dims": parse_dims(arguments.dim),
        "loss": arguments.loss,
        "keep": tuple(arguments.keep),
        "checkpoints": tuple(arguments.checkpoint),
        "allow_recompute": tuple(arguments.allow_recompute),
        "arena": arguments.arena,
        "time_limit": parse_duration(arguments.time_limit),
    }
    if arguments.costs is not None:
        options["costs"] = arguments.costs
    return options


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
