"""Options of planning, each with its check and its command-line flag."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any, TypeAlias, TypedDict

from onnx_remat.errors import UsageError, did_you_mean
from onnx_remat.measure import verify
from onnx_remat.messages import Setting
from onnx_remat.ort import runtime
from onnx_remat.ort.kernels.base import Kernels
from onnx_remat.ort.kernels.costs import PRESETS
from onnx_remat.ort.kernels.registry import PROVIDERS, kernels_of
from onnx_remat.ort.moves import Link
from onnx_remat.ort.prepare import Preparation
from onnx_remat.plan import selectors
from onnx_remat.units import check_dims, parse_dims, parse_duration, parse_pairs, parse_size

CHECKING, MOVING = "checking and reporting", "moving values to the host"
"""Headings of flag groups that some commands lack."""

RUN_BY = ("session", "loop")
"""Values of `Options.run_by`."""

LEVELS = ("every", "all")
"""Values of `Options.level`."""


Check: TypeAlias = Callable[[str, object], object]
"""Takes a field's name and the given value; returns the value as `Options` stores it, or raises UsageError."""


@dataclass(frozen=True, slots=True)
class Option:
    """Check, flag and help of a field of `Options`.

    Attributes
    ----------
    check : Check
    flag : str
        Command-line flag, "" for none. For a field that is a bool, the flag takes no value and negates the default.
    help : str
        Help of the flag; text in braces is filled in by each command.
    metavar : str or None
        Placeholder of the value in the help.
    choices : tuple of str or None
        Values that the flag accepts; None for any.
    repeat : bool
        May the flag be given several times?
    parse : callable or None
        Converts the words of the command line to the argument of `check`; None passes them unchanged.
    unit : str
        Unit after a number, where a message writes the flag.
    group : str
        Heading under which the help lists the flag.
    """

    check: Check
    flag: str = ""
    help: str = ""
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    repeat: bool = False
    parse: Callable[[list[str]], object] | None = None
    unit: str = ""
    group: str = "planning"


def _option(default: Any, check: Check, flag: str = "", help: str = "", **more: Any) -> Any:
    """Return a dataclass field with its `Option` as metadata."""
    stated = {"option": Option(check, flag, help, **more)}
    return field(default_factory=dict, metadata=stated) if default == {} else field(default=default, metadata=stated)


def _any(name: str, value: object) -> object:
    return value


def _optional(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _sizes(name: str, value: object) -> object:
    return check_dims(value)


def _duration(name: str, value: object) -> object:
    return parse_duration(float(value) if isinstance(value, Real) and not isinstance(value, bool) else str(value))


def _names(name: str, value: object) -> object:
    one = () if value is None else (value,) if isinstance(value, str) else None
    names = tuple(value) if one is None and isinstance(value, Iterable) else one
    if names is None or not all(isinstance(each, str) for each in names):
        raise UsageError(f"{name} must be a sequence of names, not {value!r:.100}")
    return names


def _pairs(name: str, value: object) -> object:
    if not isinstance(value, Mapping) or not all(isinstance(each, str) for each in (*value, *value.values())):
        raise UsageError(f"{name} must map inputs to outputs, such as {{'w': 'w_next'}}, not be {value!r:.100}")
    return dict(value)


def _text(name: str, value: object) -> object:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise UsageError(f"{name} must be text, not {value!r:.100}")
    return text


def _switch(name: str, value: object) -> object:
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be True or False, not {value!r:.100}")
    return value


def _callback(name: str, value: object) -> object:
    if value is not None and not callable(value):
        raise UsageError(f"{name} must be a function of a stage and a fraction, not {value!r:.100}")
    return value or selectors.silent


_TIME_LIMIT = 120.0
LIMIT_OF_EFFORT = 4
"""Default time limit, as a multiple of the effort: headroom for a busy machine."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of planning, each stated once with its check and its flag.

    `PlanningOptions` repeats names and types for type checkers; flags, their names in messages and the table in the
    guide are derived from the fields.
    """

    provider: str = _option(
        "cpu", _text, "--provider", "execution provider that runs the model (default {provider})", choices=PROVIDERS
    )
    """Execution provider that the file is written for, one of `registry.PROVIDERS`."""

    selector: str = _option("auto", _text, "--selector", "how to plan (default auto): {selectors}", metavar="NAME")
    """Name of a registered selector, see `selectors`."""

    dims: Mapping[str, int] = _option(
        {},
        _sizes,
        "--dim",
        "size of a symbolic dimension (repeatable)",
        metavar="NAME=N",
        repeat=True,
        parse=parse_dims,
    )
    """Sizes of symbolic dimensions."""

    loss: str | None = _option(
        None, _optional(_text), "--loss", "name of the loss, if it cannot be inferred", metavar="NAME"
    )
    """Name of the loss, where nodes have no phase labels and the loss cannot be inferred."""

    state_outputs: Mapping[str, str] = _option(
        {}, _pairs, "--state",
        "an input and the output that is its next value, where the model does not call that new.IN (repeatable); the "
        "written file does", metavar="IN=OUT", repeat=True, parse=parse_pairs,
    )  # fmt: skip
    """For each input that is state, the output that is its next value, where the model does not call that
    ``new.<input>``; the written file does."""

    keep: Sequence[str] = _option(
        (), _names, "--keep", "a value never to recompute (repeatable)", metavar="NAME", repeat=True
    )
    """Values never to recompute."""

    checkpoints: Sequence[str] = _option(
        (), _names, "--checkpoint",
        "a value to keep with selector collection, which recomputes the rest of the forward pass (repeatable)",
        metavar="NAME", repeat=True,
    )  # fmt: skip
    """Values that the selector `collection` keeps."""

    allow_recompute: Sequence[str] = _option(
        (), _names, "--allow-recompute",
        "a custom op that is pure and so may be recomputed (repeatable)", metavar="DOMAIN::OP", repeat=True,
    )  # fmt: skip
    """Custom ops, ``domain::op``, that are pure and so may be recomputed."""

    run_by: str | None = _option(
        None, _optional(_text), "--for",
        "what will train with the file, which decides what the budget covers. loop: onnx_remat.training.Loop or "
        "onnx_remat.Session; the budget covers all memory that training takes (default). session: onnxruntime's own "
        "session; the budget covers the sum of tensors", choices=RUN_BY[::-1],
    )  # fmt: skip
    """What will train with the file, which decides what the budget covers. ``"loop"``: `session.training.Loop` or
    `session.session.Session`; the budget covers all memory that training takes. ``"session"``: onnxruntime's own
    session; the budget covers the sum of tensors. None: a loop, unless `arena` is True."""

    arena: bool = _option(
        False, _switch, "--arena",
        "make the budget also cover the predicted overhead of ONNX Runtime's arena with onnx_remat.session_options()",
    )  # fmt: skip
    """Does the budget also cover the predicted overhead of ONNX Runtime's arena with `session_options()`?"""

    level: str = _option(
        LEVELS[0], _text, "--level",
        "for --for session: the graph optimisation level at which the file keeps the budget. every: any of them "
        "(default). all: onnxruntime's default, which may take less recompute where it fuses large values",
        choices=LEVELS,
    )  # fmt: skip
    """For ``run_by="session"``: the graph optimisation level at which the file keeps the budget. ``"every"``: any of
    them. ``"all"``: onnxruntime's default, which may take less recompute where it fuses large values."""

    patterns: bool = _option(
        True, _switch, "--no-patterns",
        "write the step into the body of an If, where ONNX Runtime makes no memory patterns: for sessions whose "
        "options you cannot set, which would otherwise take up to twice the planned memory",
    )  # fmt: skip
    """May sessions make memory patterns, as they do by default? If False, the step is written into the body of an If,
    where ONNX Runtime makes none (see `ir.body`): for sessions whose options you cannot set."""

    fuse: bool = _option(
        True, _switch, "--no-fuse",
        "for --for loop: predict training without fused kernels, as with Session(fuse=False) and Loop(fuse=False)",
    )  # fmt: skip
    """For ``run_by="loop"``: predict training with fused kernels, as `session.session.Session` and
    `session.training.Loop` run. If False, open the file with ``fuse=False`` too: fused, it takes less memory than
    predicted."""

    time_limit: float = _option(
        _TIME_LIMIT, _duration, "--time-limit",
        "wall-clock limit for planning and writing (default: --effort {effort}, and at most 4 times that)",
        metavar="TIME", unit="s",
    )  # fmt: skip
    """Wall-clock limit in seconds, which excludes loading the file, compilation at a first use and `verify` "run". If
    it interrupts planning, the report says so, and another run may find another plan."""

    effort: float | None = _option(
        30.0, _optional(_duration), "--effort",
        "amount of search, in seconds of a reference core: the same plan however fast the machine is", metavar="N",
    )  # fmt: skip
    """Amount of search, in seconds of a reference core: the plan does not depend on how fast the machine is. Where only
    `time_limit` is given: `time_limit` seconds. Where only the effort is given, there is no time limit."""

    costs: str = _option(
        "", _text, "--costs",
        f"source of the seconds per op: {', '.join(PRESETS)} (default {{costs}}), or a profile in ONNX Runtime's JSON",
        metavar="PRESET|FILE",
    )  # fmt: skip
    """A preset of `costs.PRESETS`, or the path of a profile by ONNX Runtime; "" for the provider's default."""

    cudnn_workspace: str | int | None = _option(
        None, _any, "--cudnn-workspace",
        "for --provider cuda: workspace to reserve for a convolution by cuDNN (default 32MiB)", metavar="SIZE",
    )  # fmt: skip
    """Workspace to reserve for a convolution by cuDNN (``"64MiB"``); None for the provider's default."""

    offload: bool = _option(
        False, _switch, "--offload",
        "move values to the host's memory and back where that takes less time than recomputing them, or where the "
        "budget cannot be kept otherwise: for --provider cuda", group=MOVING,
    )  # fmt: skip
    """May a plan for a device move values to the host's memory and back, where that takes less time than recomputing
    them? For ``run_by="loop"``."""

    offload_state: bool = _option(
        False, _switch, "--offload-state",
        "keep state that only the update reads, such as an optimizer's moments, in the host's memory: each is copied "
        "to the device before its update, and back after it: for --provider cuda", group=MOVING,
    )  # fmt: skip
    """Keep state that only the update reads, such as an optimizer's moments, in the host's memory? For
    ``run_by="loop"``."""

    host_bandwidth: str | int | None = _option(
        None, _any, "--host-bandwidth",
        "bandwidth to the host and back, in bytes per second (default: 25GB, or that of the --costs preset)",
        metavar="SIZE", group=MOVING,
    )  # fmt: skip
    """Bandwidth to the host and back in bytes per second (``"25GB"``); None for that of the preset, see `costs`."""

    verify: str = _option(
        "check", _text, "--verify",
        "check (default): validity, interface, order, simulated peak; run: also run both models and compare; none",
        choices=verify.MODES, group=CHECKING,
    )  # fmt: skip
    """One of `verify.MODES`: "none", "check" (of the file), "run" (also run both models and compare them)."""

    progress: selectors.Progress = _option(selectors.silent, _callback)  # noqa: RUF009 - a field
    """Callback; its arguments are the name of a stage and the fraction of it that is done."""

    def work_seconds(self) -> float:
        """Return the amount of search, in seconds of a reference core."""
        return self.time_limit if self.effort is None else self.effort

    def limit_is_default(self) -> bool:
        """Return whether the effort limits planning, and the clock only a slow machine."""
        return self.effort is not None and self.time_limit in (_TIME_LIMIT, LIMIT_OF_EFFORT * self.effort)

    def bounded_by(self, times: float = 1.0) -> Setting:
        """Return the setting that bounds planning, with `times` its value."""
        name, value = ("time_limit", self.time_limit) if self.effort is None else ("effort", self.effort)
        return Setting(name, float(times * value))

    def preparation(self) -> Preparation:
        """Return the options that compiling the model takes."""
        kernels = self.kernels()
        return Preparation(
            kernels, self.dims, self.allow_recompute, self.keep, self.loss, self.costs or kernels.costs,
            must_load=self.verify != "none", fixed=self.run_by == "loop", checkpoints=self.checkpoints,
        )  # fmt: skip

    @property
    def copies(self) -> bool:
        """May a file copy values to the host and back?"""
        return self.offload or self.offload_state

    def link(self) -> Link:
        """Return the link to the host, of the device that `costs` names."""
        if self.host_bandwidth is not None:
            found = _bytes(self.host_bandwidth)
            if not found:
                given = Setting("host_bandwidth", self.host_bandwidth)
                raise UsageError("{} is not a bandwidth; use e.g. 25GB (bytes per second)", given)
            return Link(float(found))
        known = PRESETS.get(self.costs) or PRESETS[self.kernels().costs]
        return Link(known.host)

    def kernels(self) -> Kernels:
        """Return the facts about the provider's kernels; UsageError for an unknown provider."""
        space = None if self.cudnn_workspace is None else _bytes(self.cudnn_workspace)
        if space is None and self.cudnn_workspace is not None:
            given = Setting("cudnn_workspace", self.cudnn_workspace)
            raise UsageError("{} is not a size in bytes; use e.g. 64MiB", given)
        return kernels_of(self.provider, space)


def _bytes(size: str | int) -> int | None:
    """Parse a size with a unit; return None where it is malformed."""
    try:
        return parse_size(size)
    except UsageError:
        return None


class PlanningOptions(TypedDict, total=False):
    """The fields of `Options` as keyword arguments, for editors and type checkers; a test keeps both equal."""

    provider: str
    selector: str
    dims: Mapping[str, int]
    state_outputs: Mapping[str, str]
    loss: str | None
    keep: Sequence[str]
    checkpoints: Sequence[str]
    allow_recompute: Sequence[str]
    run_by: str | None
    arena: bool
    level: str
    patterns: bool
    fuse: bool
    time_limit: float
    effort: float | None
    costs: str
    cudnn_workspace: str | int | None
    offload: bool
    offload_state: bool
    host_bandwidth: str | int | None
    verify: str
    progress: selectors.Progress


OPTIONS: Mapping[str, Option] = {each.name: each.metadata["option"] for each in fields(Options)}
"""`Option` of each field of `Options`, by name."""


def of_sessions(given: PlanningOptions, what: str) -> None:
    """Set `run_by` to "session"; UsageError where it is "loop", which `what` does not measure."""
    if given.get("run_by") not in (None, "session"):
        raise UsageError("{} measures onnxruntime's own sessions: leave {} out", what, Setting("run_by"))
    given["run_by"] = "session"


def without_arena(given: PlanningOptions, what: str) -> None:
    """Raise UsageError for `arena`, which `what` does not count."""
    if given.get("arena"):
        raise UsageError("{} counts tensors, without the arena: leave {} out", what, Setting("arena", True))


def parse_options(given: PlanningOptions) -> Options:
    """Return options from keyword arguments; UsageError for an unknown field, provider, selector or `verify` mode.

    >>> parse_options({"timelimit": 3})
    Traceback (most recent call last):
        ...
    onnx_remat.errors.UsageError: unknown option 'timelimit'; did you mean 'time_limit'?
    """
    if unknown := [name for name in given if name not in OPTIONS]:
        hint = did_you_mean(unknown[0], OPTIONS) or f": choose from {', '.join(OPTIONS)}"
        raise UsageError(f"unknown option {unknown[0]!r}{hint}")
    checked = {name: OPTIONS[name].check(name, value) for name, value in given.items()}
    if "time_limit" in given:
        checked.setdefault("effort", None)
    elif checked.get("effort") is not None:
        checked["time_limit"] = math.inf
    else:
        checked.pop("effort", None)
    options = Options(**checked)  # type: ignore[arg-type]
    if options.run_by is None:
        options = replace(options, run_by="session" if options.arena else "loop")
    options.kernels()
    if options.verify == "run" and options.provider != "cpu":
        run, provider = Setting("verify", "run"), Setting("provider", options.provider)
        raise UsageError("{} measures the CPU's memory: not with {}", run, provider)
    if options.verify not in verify.MODES:
        raise UsageError(f"verify must be one of {', '.join(verify.MODES)}, not {options.verify!r}")
    if options.run_by not in RUN_BY:
        raise UsageError(f"run_by must be one of {', '.join(RUN_BY)}, not {options.run_by!r}")
    if options.level not in LEVELS:
        raise UsageError(f"level must be one of {', '.join(LEVELS)}, not {options.level!r}")
    if options.run_by == "loop":
        if not runtime.available():
            raise UsageError(
                "the memory of training cannot be predicted without onnxruntime: pip install 'onnx-remat[cpu]', or "
                "plan for onnxruntime's own session with {}",
                Setting("run_by", "session"),
            )
        if options.arena:
            raise UsageError(
                "{} is for {}: a Loop keeps no values in ONNX Runtime's arena",
                Setting("arena", True),
                Setting("run_by", "session"),
            )
        if options.level != LEVELS[0]:
            level, session = Setting("level", options.level), Setting("run_by", "session")
            raise UsageError("{} is for {}: a Loop runs files at the default level", level, session)
    _check_offload(options)
    selectors.get(options.selector)
    if options.checkpoints and options.selector != "collection":
        collection = Setting("selector", "collection")
        raise UsageError("{} is for {}: {!r} chooses by itself", Setting("checkpoints"), collection, options.selector)
    if options.verify == "run":
        runtime.import_runtime()
    return options


def _check_offload(options: Options) -> None:
    """Raise UsageError where values cannot be moved: only a `Session` on a device moves them to the host."""
    moving = [name for name in ("offload", "offload_state") if getattr(options, name)]
    if moving and (options.kernels().device == "cpu" or options.run_by != "loop"):
        raise UsageError(
            "{} moves values out of a device's memory, in onnx_remat.Session: use it with {}, {}",
            Setting(moving[0], True),
            Setting("provider", "cuda"),
            Setting("run_by", "loop"),
        )
    if options.offload_state and not options.fuse:
        raise UsageError(
            "{} copies by a kernel of ours: leave out {}", Setting("offload_state", True), Setting("fuse", False)
        )
    if options.host_bandwidth is not None and not moving:
        offload, state = Setting("offload", True), Setting("offload_state", True)
        raise UsageError("{} is for {} and {}", Setting("host_bandwidth"), offload, state)
    if moving and options.link().bandwidth <= 0:
        raise UsageError(
            "{} has no bandwidth to the host: set {}",
            Setting("costs", options.costs),
            Setting("host_bandwidth"),
        )
