"""Shared parts of the commands: flags, their conversion to options, error output."""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from numbers import Real
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from onnx_remat import files
from onnx_remat.app import completion, streams
from onnx_remat.errors import OnnxRematError, UsageError, did_you_mean
from onnx_remat.messages import Setting, number, spelled
from onnx_remat.process.child import QUIET

if TYPE_CHECKING:
    from onnx_remat.ir.model_io import Source
    from onnx_remat.options import PlanningOptions


_SELDOM = (50_000, 20, 50)
"""Thresholds of the garbage collector: it scans every object of a large graph and finds no garbage."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError and answers completion queries of shells."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse arguments; flags may stand between positional ones, also where the last of these is optional."""
        completion.answer(self, of_command=" " in self.prog)
        self._words = list(sys.argv[1:] if args is None else args)
        parse = super().parse_args if "--" in self._words else super().parse_intermixed_args  # which drops a "--"
        return parse(args, namespace)

    def error(self, message: str) -> None:  # type: ignore[override]  # argparse's own exits before we can report
        raise UsageError(message + self._meant())

    def _meant(self) -> str:
        """Return a hint for a mistyped flag or a size split in two words; empty for any other error."""
        flags = list(self._option_string_actions)
        for before, word in itertools.pairwise(["", *self._words]):
            flag = word.partition("=")[0]
            if flag.startswith("--") and not any(known.startswith(flag) for known in flags):
                return did_you_mean(flag, flags)
            if _NUMBER.fullmatch(before) and _UNIT.fullmatch(word):
                return f"; write {before}{word}, without the space"
        return ""


_NUMBER, _UNIT = re.compile(r"\d+(\.\d+)?"), re.compile(r"(?i)[kmgt]?i?b|%|s|min|h")


USUAL_COSTS = "cpu, or a100 for --provider cuda"
"""Default of `Options.costs`, as help states it."""

Flags: TypeAlias = argparse._ActionsContainer
"""Receiver of flags: a parser, or a group of one."""


def add_flag(flags: Flags, name: str, help: str | None = None, default: object = None, **filled: str) -> None:
    """Add the flag of an option in `Options`; `help` replaces its help, `filled` fills the braces in it.

    Without the flag the option has the value `default`; None means that it is not set.
    """
    from onnx_remat.options import OPTIONS, Options

    option, usual = OPTIONS[name], Options.__dataclass_fields__[name].default
    more: dict[str, Any] = {"metavar": option.metavar, "choices": option.choices}
    if isinstance(usual, bool):
        more = {"action": "store_false" if usual else "store_true"}
    elif option.repeat:
        more |= {"action": "append"}
    flags.add_argument(option.flag, dest=name, default=default, help=(help or option.help).format(**filled), **more)


def add_flags(
    parser: argparse.ArgumentParser,
    group: str = "planning",
    effort: str = "30s",
    without: Sequence[str] = (),
    costs: str = USUAL_COSTS,
) -> Flags:
    """Add the flags of all options in a group, except for some; `planning_options` reads them.

    `effort` is the command's default where neither an effort nor a time limit is given; `costs` says its default costs.
    """
    from onnx_remat.options import OPTIONS

    where = "described below" if parser.prog == "onnx-remat" else "onnx-remat -h describes them"
    described = f"{', '.join(selector_names())}; {where}"
    filled = {"provider": "cpu", "selectors": described, "effort": effort, "costs": costs}
    flags = parser.add_argument_group(group)
    for name, option in OPTIONS.items():
        if option.flag and option.group == group and name not in without:
            add_flag(flags, name, **filled)
    parser.set_defaults(default_effort=effort)
    return flags


def selector_names() -> list[str]:
    """Return the names of selectors, the default and `search` first."""
    from onnx_remat.plan import selectors

    return sorted(selectors.names(), key=lambda name: (name != "auto", name != "search"))


def add_runtime_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag that chooses the interpreter that runs models."""
    parser.add_argument(
        "--runtime", default=sys.executable, metavar="PYTHON",
        help="Python interpreter of another environment whose ONNX Runtime runs the models, e.g. onnxruntime-training",
    )  # fmt: skip


def planning_options(arguments: argparse.Namespace) -> PlanningOptions:
    """Return the fields of `Options` for the given flags of `add_flags`."""
    from onnx_remat.options import LIMIT_OF_EFFORT, OPTIONS, PlanningOptions
    from onnx_remat.units import parse_duration

    options = PlanningOptions()
    for name, option in OPTIONS.items():
        if (given := getattr(arguments, name, None)) is not None:
            value = option.check(name, option.parse(given) if option.parse else given)
            options[name] = value  # type: ignore[literal-required]
    if "effort" not in options and "time_limit" not in options:
        effort = parse_duration(arguments.default_effort)
        options["effort"], options["time_limit"] = effort, LIMIT_OF_EFFORT * effort
    return options


@cache
def flag_names() -> Mapping[str, str]:
    """Return flags by the names of their arguments in Python."""
    from onnx_remat.options import OPTIONS

    others = {"budget": "--budget", "force": "--force", "jobs": "--jobs", "python": "--runtime"}
    others |= {"max_batch": "--max-batch", "json": "--json", "markdown": "--markdown", "initial": "--initial"}
    others |= {"threads": "--threads", "steps": "--steps"}
    return {name: option.flag for name, option in OPTIONS.items() if option.flag} | others


_PLAIN = re.compile(r"[\w./%:+-]+")  # needs no quotes in a shell


def in_flags(text: str, others: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return a message with its settings written as flags, `others` by those names; any other text unchanged.

    >>> from onnx_remat.messages import Message, Word
    >>> setting = Setting("dims", {"batch": Word("N"), "length": Word("N")})
    >>> in_flags(Message("pass {}, or leave {} out", setting, Setting("patterns", False)))
    'pass --dim batch=N --dim length=N, or leave --no-patterns out'

    >>> settings = Setting("budget", 5_000_000), Setting("time_limit", 60.0), Setting("selector", "auto")
    >>> in_flags(Message("try {}, {}; or {}", *settings))
    'try --budget 5000000B, --time-limit 60s; or --selector auto'
    """
    return spelled(text, lambda setting: _as_flag(setting, others))


def _as_flag(setting: Setting, others: Mapping[str, str]) -> str:
    from onnx_remat.options import OPTIONS

    name, value = setting.name, setting.value
    if (flag := others.get(name) or flag_names().get(name)) is None:
        return str(setting)
    if isinstance(value, bool) or not setting.has_value:
        return flag
    if isinstance(value, Mapping):
        return " ".join(f"{flag} {dim}={size}" for dim, size in value.items())
    if isinstance(value, Real):
        unit = "B" if name == "budget" else OPTIONS[name].unit if name in OPTIONS else ""
        return f"{flag} {number(value)}{unit}"
    return f"{flag} {value}" if _PLAIN.fullmatch(str(value)) else f"{flag} {value!r}"


def one_line(error: OnnxRematError, others: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return an error in one line, its settings written as flags, see `in_flags`."""
    return " ".join(in_flags(error.message, others).split())


def guarded(
    name: str,
    command: Callable[[Sequence[str]], int],
    arguments: Sequence[str],
    others: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Run a command and return its exit code; print an error as one line on standard error.

    `others` are the flags of the command's own settings, by name.
    """
    os.environ.update(QUIET)  # ONNX Runtime's telemetry would write to the home folder
    streams.steady()
    gc.set_threshold(*_SELDOM)
    try:
        with streams.terminable():
            return command(arguments)
    except OnnxRematError as error:
        streams.complain(f"{name}: error: {one_line(error, others)}")
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
    """Raise UsageError where an output would overwrite an input or another output.

    Parameters
    ----------
    sources : mapping
        The input models by path.
    out : str or None
        Path of the output model; its data files are written to the same folder.
    reports : sequence of (str, str or None)
        Flags and the output paths that they name; None and ``-`` are not files.
    costs : str, optional
        Value of ``--costs``.
    more : str
        Other input paths by flag.
    """
    from onnx_remat.ort.kernels.costs import PRESETS

    if costs is not None and costs not in PRESETS:
        more["costs"] = costs
    reads = [files.Use(path, "the input") for path in sources]
    reads += [files.Use(path, f"read by --{flag}") for flag, path in more.items() if path]
    for source in sources.values():
        homes = [source.folder, Path(out).resolve().parent] if out is not None else [source.folder]
        reads += [files.Use(home / path, "data of the model") for home in homes if home for path in source.data]
    writes = [files.Use(out, "OUT")] if out is not None else []
    for flag, report in reports:
        if report is not None and report != "-":
            files.check_target(report, None, force=True)
            writes.append(files.Use(report, flag))
    files.check_uses(reads, writes)
