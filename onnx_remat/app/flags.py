"""What the commands share: flags and what they mean, refusals."""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_remat import files
from onnx_remat.app import completion, streams
from onnx_remat.errors import OnnxRematError, UsageError, did_you_mean
from onnx_remat.messages import NO_VALUE, Setting, number, spelled
from onnx_remat.process.child import QUIET

if TYPE_CHECKING:
    from onnx_remat.ir.model_io import Source
    from onnx_remat.options import PlanningOptions


_SELDOM = (50_000, 20, 50)
"""Thresholds of the garbage collector: it looks through every object of a large graph, and none of them is garbage."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ours, and that shells may ask what comes next."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse's."""
        completion.answer(self, of_command=" " in self.prog)
        self._words = list(sys.argv[1:] if args is None else args)
        return super().parse_args(args, namespace)

    def error(self, message: str) -> None:  # type: ignore[override]  # argparse's own exits before we can report
        raise UsageError(message + self._meant())

    def _meant(self) -> str:
        """What was meant, where a flag is mistyped or a size lies in two words; nothing elsewhere."""
        flags = list(self._option_string_actions)
        for before, word in itertools.pairwise(["", *self._words]):
            flag = word.partition("=")[0]
            if flag.startswith("--") and not any(known.startswith(flag) for known in flags):
                return did_you_mean(flag, flags)
            if _NUMBER.fullmatch(before) and _UNIT.fullmatch(word):
                return f"; write {before}{word}, without the space"
        return ""


_NUMBER, _UNIT = re.compile(r"\d+(\.\d+)?"), re.compile(r"(?i)[kmgt]?i?b|%|s|min|h")


def add_planning_flags(parser: argparse.ArgumentParser, time_limit: str = "30s") -> None:
    """The flags that say how to plan; `planning_options` reads them."""
    from onnx_remat.ort.kernels.costs import PRESETS

    planning = parser.add_argument_group("planning")
    where = "described below" if parser.prog == "onnx-remat" else "onnx-remat -h describes them"
    add_provider_flag(planning)
    planning.add_argument(
        "--selector", default="auto", metavar="NAME",
        help=f"how to plan (default auto): {', '.join(selector_names())}; {where}",
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
        "--for", dest="run_by", choices=("loop", "session"),
        help="what trains with the file, and so what the budget covers: loop, onnx_remat.training.Loop or "
        "onnx_remat.Session, all that training takes of the machine's memory (default on the CPU); session, "
        "onnxruntime's own, the sum of tensors (default on CUDA)",
    )  # fmt: skip
    planning.add_argument(
        "--arena", action="store_true",
        help="let the budget also cover what ONNX Runtime's arena adds with onnx_remat.session_options(), as foreseen",
    )  # fmt: skip
    planning.add_argument(
        "--no-patterns", dest="patterns", action="store_false",
        help="write the step into the body of an If, in which ONNX Runtime makes no memory patterns: for sessions "
        "whose options are not yours to set, which would take up to twice the plan",
    )  # fmt: skip
    planning.add_argument(
        "--no-fuse", dest="fuse", action="store_false",
        help="for --for loop: count what training takes with every node a kernel of its own, as Session(fuse=False) "
        "and Loop(fuse=False) run them, not with elementwise nodes fused",
    )  # fmt: skip
    planning.add_argument(
        "--time-limit", metavar="TIME",
        help=f"seconds of the clock, once loaded, to plan and write in (default: --effort {time_limit}, cut at 4 x)",
    )  # fmt: skip
    planning.add_argument(
        "--effort", metavar="N",
        help="how much to try instead, in seconds of a slow core: the same plan on any machine, however busy",
    )  # fmt: skip
    parser.set_defaults(default_time_limit=time_limit, offload=False, host_bandwidth=None)
    planning.add_argument(
        "--costs", metavar="PRESET|FILE",
        help=f"seconds per op: {', '.join(PRESETS)} (default cpu, or a100 for --provider cuda), or a profile JSON "
        "written by ONNX Runtime",
    )  # fmt: skip
    planning.add_argument(
        "--cudnn-workspace", metavar="SIZE",
        help="for --provider cuda: bytes to allow for what cuDNN takes in a convolution (default 32MiB)",
    )  # fmt: skip


def add_offload_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that say whether values may be moved to the host; `planning_options` reads them."""
    offload = parser.add_argument_group("moving values to the host")
    offload.add_argument(
        "--offload", action="store_true",
        help="move values to the host's memory and back where that takes less time than to compute them again, and "
        "where no budget could be kept otherwise: for --provider cuda --for loop",
    )  # fmt: skip
    offload.add_argument(
        "--host-bandwidth", metavar="SIZE",
        help="bytes that cross to the host in a second, or back (default: 25GB, or what --costs says of the device)",
    )  # fmt: skip


def selector_names() -> list[str]:
    """The default and ours first."""
    from onnx_remat.plan import selectors

    return sorted(selectors.names(), key=lambda name: (name != "auto", name != "search"))


def add_provider_flag(parser: argparse._ActionsContainer, default: str | None = "cpu", told: str = "cpu") -> None:
    """The flag that says which of ONNX Runtime's execution providers runs the models; `told`: the default in words."""
    from onnx_remat.ort.kernels.registry import PROVIDERS

    said = f"execution provider that runs the model (default {told})"
    parser.add_argument("--provider", default=default, choices=PROVIDERS, help=said)


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
        "run_by": arguments.run_by,
        "arena": arguments.arena,
        "patterns": arguments.patterns,
        "fuse": arguments.fuse,
    }
    if arguments.effort is not None:
        options["effort"] = parse_duration(arguments.effort)
    if arguments.time_limit is not None:
        options["time_limit"] = parse_duration(arguments.time_limit)
    elif arguments.effort is None:  # the clock leaves room for a busy machine
        effort = parse_duration(arguments.default_time_limit)
        options["effort"], options["time_limit"] = effort, 4 * effort
    if arguments.cudnn_workspace is not None:
        options["cudnn_workspace"] = arguments.cudnn_workspace
    if arguments.offload:
        options["offload"] = True
    if arguments.host_bandwidth is not None:
        options["host_bandwidth"] = arguments.host_bandwidth
    if arguments.costs is not None:
        options["costs"] = arguments.costs
    return options


FLAGS: Mapping[str, str] = {
    name: "--" + name.replace("_", "-")
    for name in (
        "allow_recompute", "arena", "budget", "costs", "cudnn_workspace", "effort", "force", "host_bandwidth", "jobs",
        "keep", "loss", "offload", "provider", "selector", "time_limit", "verify",
    )
} | {
    "checkpoints": "--checkpoint", "dims": "--dim", "fuse": "--no-fuse", "patterns": "--no-patterns",
    "python": "--runtime", "run_by": "--for",
}  # fmt: skip
"""Flags by the arguments in Python that they are."""

_PLAIN = re.compile(r"[\w./%:+-]+")  # needs no quotes in a shell
_UNITS = {"budget": "B", "time_limit": "s"}


def in_flags(text: str, flags: Mapping[str, str] = FLAGS) -> str:
    """A message with its settings as the command line's flags; any other text as it is.

    >>> from onnx_remat.messages import Message, Word
    >>> setting = Setting("dims", {"batch": Word("N"), "length": Word("N")})
    >>> in_flags(Message("pass {}, or leave {} out", setting, Setting("patterns", False)))
    'pass --dim batch=N --dim length=N, or leave --no-patterns out'

    >>> settings = Setting("budget", 5_000_000), Setting("time_limit", 60.0), Setting("selector", "auto")
    >>> in_flags(Message("try {}, {}; or {}", *settings))
    'try --budget 5000000B, --time-limit 60s; or --selector auto'
    """
    return spelled(text, lambda setting: _as_flag(setting, flags))


def _as_flag(setting: Setting, flags: Mapping[str, str]) -> str:
    name, value = setting.name, setting.value
    if (flag := flags.get(name)) is None:
        return str(setting)
    if isinstance(value, bool) or value is NO_VALUE:
        return flag
    if isinstance(value, Mapping):
        return " ".join(f"{flag} {dim}={size}" for dim, size in value.items())
    if isinstance(value, Real):
        return f"{flag} {number(value)}{_UNITS.get(name, '')}"
    return f"{flag} {value}" if _PLAIN.fullmatch(str(value)) else f"{flag} {value!r}"


def said(error: OnnxRematError) -> str:
    """An error in one line, its advice as flags."""
    return " ".join(in_flags(error.message).split())


def guarded(name: str, command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Run a command; a refusal is one line on standard error and its exit code."""
    os.environ.update(QUIET)  # nothing is left in the home folder that nobody asked for
    streams.steady()
    gc.set_threshold(*_SELDOM)
    try:
        with streams.terminable():
            return command(arguments)
    except OnnxRematError as error:
        streams.complain(f"{name}: error: {said(error)}")
        return error.exit_code
    except OSError as error:
        streams.complain(f"{name}: error: {error}")
        return OnnxRematError.exit_code
    except (MemoryError, RecursionError) as error:
        what = "memory ran out" if isinstance(error, MemoryError) else "something in a file is nested too deeply"
        streams.complain(f"{name}: error: {what}")
        return OnnxRematError.exit_code
    except KeyboardInterrupt:
        return streams.interrupted(name)
    except streams.Terminated as terminated:
        streams.complain(f"{name}: terminated; nothing was written")
        return terminated.die()
    except Exception as error:
        if not streams.is_interruption(error):
            raise
        return streams.interrupted(name)


def check_files(
    sources: Mapping[str, Source],
    out: str | None,
    reports: Sequence[tuple[str, str | None]],
    costs: str | None = None,
    **more: str,
) -> None:
    """Raise UsageError unless every file that is written is one of its own.

    Parameters
    ----------
    sources : mapping
        The models that are read, by their paths.
    out : str or None
        Where the model goes, and its data files with it.
    reports : sequence of (str, str or None)
        Flags, and the paths to write to that they name; None and ``-`` are none.
    costs : str, optional
        The flag's value.
    more : str
        Other paths that are read, by their flags.
    """
    from onnx_remat.ir import external_data
    from onnx_remat.ort.kernels.costs import PRESETS

    if costs is not None and costs not in PRESETS:
        more["costs"] = costs
    reads = [files.Use(path, "the input") for path in sources]
    reads += [files.Use(path, f"read by --{flag}") for flag, path in more.items() if path]
    for source in sources.values():
        homes = [source.folder, Path(out).resolve().parent] if out is not None else [source.folder]
        data = external_data.paths(source.model)
        reads += [files.Use(home / path, "data of the model") for home in homes if home for path in data]
    writes = [files.Use(out, "OUT")] if out is not None else []
    for flag, report in reports:
        if report is not None and report != "-":
            files.check_target(report, None, force=True)
            writes.append(files.Use(report, flag))
    files.check_uses(reads, writes)
