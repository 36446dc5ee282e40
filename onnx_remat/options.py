"""How to plan: the command line's flags, checked."""

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
from onnx_remat.units import check_dims, parse_dims, parse_duration, parse_size

CHECKING, MOVING = "checking and reporting", "moving values to the host"
"""Headings of flags that not all commands have."""

RUN_BY = ("session", "loop")
"""Values of `Options.run_by`."""


Check: TypeAlias = Callable[[str, object], object]
"""Of a field's name and what was given: the value as `Options` has it. UsageError where it cannot be meant."""


@dataclass(frozen=True, slots=True)
class Option:
    """What is stated of a field of `Options` besides its type and its default.

    Attributes
    ----------
    check : Check
    flag : str
        Of the command line, "" for none. Where the default is True or False, it says the opposite and takes no value.
    help : str
        Of the flag. What stands in braces differs by command.
    metavar : str or None
        What stands for the value.
    choices : tuple of str or None
    repeat : bool
        May the flag be given several times?
    parse : callable or None
        What `check` takes, from the words of the command line; None: it takes these.
    unit : str
        Stands behind a number on the command line, where a message writes it.
    group : str
        Under which heading the flag is listed.
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
    """A field, and what `Option` states of it."""
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


@dataclass(frozen=True, slots=True)
class Options:
    """How to plan: each option with its check and its flag, stated once.

    `PlanningOptions` repeats names and types for type checkers; all else (flags, what messages call them, the table in
    the guide) is derived from the fields.
    """

    provider: str = _option(
        "cpu", _text, "--provider", "execution provider that runs the model (default {provider})", choices=PROVIDERS
    )
    """Execution provider that the file is written for, one of `registry.PROVIDERS`."""

    selector: str = _option("auto", _text, "--selector", "how to plan (default auto): {selectors}", metavar="NAME")
    """Name of a registered selector, see `selectors`."""

    dims: Mapping[str, int] = _option(
        {}, _sizes, "--dim", "size of a symbolic dimension (repeat)", metavar="NAME=N", repeat=True, parse=parse_dims
    )
    """Sizes of symbolic dimensions."""

    loss: str | None = _option(
        None, _optional(_text), "--loss", "the loss, where nodes are unlabelled and it is not clear", metavar="NAME"
    )
    """Value that is the loss, where nodes are unlabelled and it is not clear."""

    keep: Sequence[str] = _option(
        (), _names, "--keep", "a value never to recompute (repeat)", metavar="NAME", repeat=True
    )
    """Values never to recompute."""

    checkpoints: Sequence[str] = _option(
        (), _names, "--checkpoint",
        "a value that selector collection keeps; it recomputes the rest of the forward pass (repeat)",
        metavar="NAME", repeat=True,
    )  # fmt: skip
    """Values that the selector `collection` keeps."""

    allow_recompute: Sequence[str] = _option(
        (), _names, "--allow-recompute",
        "a custom op that is pure, so that it may be recomputed (repeat)", metavar="DOMAIN::OP", repeat=True,
    )  # fmt: skip
    """Custom ops, ``domain::op``, that are pure, so that they may be recomputed."""

    run_by: str | None = _option(
        None, _optional(_text), "--for",
        "what trains with the file, and so what the budget covers: loop, onnx_remat.training.Loop or "
        "onnx_remat.Session, all that training takes of the machine's memory (default on the CPU); session, "
        "onnxruntime's own, the sum of tensors (default on CUDA)", choices=RUN_BY[::-1],
    )  # fmt: skip
    """What trains with the file, and so what the budget covers: ``"loop"``, `session.training.Loop` or
    `session.session.Session` (all that training takes of the machine's memory), or ``"session"``, onnxruntime's own
    (the sum of tensors). None: a loop on the CPU, unless `arena` is asked for; a session on other providers."""

    arena: bool = _option(
        False, _switch, "--arena",
        "let the budget also cover what ONNX Runtime's arena adds with onnx_remat.session_options(), as foreseen",
    )  # fmt: skip
    """The budget also covers what ONNX Runtime's arena takes besides the plan, with `session_options()`."""

    patterns: bool = _option(
        True, _switch, "--no-patterns",
        "write the step into the body of an If, in which ONNX Runtime makes no memory patterns: for sessions "
        "whose options are not yours to set, which would take up to twice the plan",
    )  # fmt: skip
    """May sessions make memory patterns, as they do by default? If not, the step is written into a body in which none
    are made (see `ir.body`): for sessions whose options are not yours to set."""

    fuse: bool = _option(
        True, _switch, "--no-fuse",
        "for --for loop: count what training takes with every node a kernel of its own, as Session(fuse=False) "
        "and Loop(fuse=False) run them, not with elementwise nodes fused",
    )  # fmt: skip
    """For ``run_by="loop"``: count what training takes with elementwise nodes fused, as `session.session.Session` and
    `session.training.Loop` run them. If not, open them with ``fuse=False`` too, or they take less than counted."""

    time_limit: float = _option(
        120.0, _duration, "--time-limit",
        "seconds of the clock, once loaded, to plan and write in (default: --effort {effort}, cut at 4 x)",
        metavar="TIME", unit="s",
    )  # fmt: skip
    """Seconds of the wall clock for all but loading the file, compiling at a first use and `verify` "run". Where it
    cuts planning short, the report says so, and another run may find another plan."""

    effort: float | None = _option(
        30.0, _optional(_duration), "--effort",
        "how much to try instead, in seconds of a slow core: the same plan on any machine, however busy", metavar="N",
    )  # fmt: skip
    """How much planning tries, in seconds of a slow core: the plan is the same on any machine. None, and where
    `time_limit` alone is given: as much as `time_limit` seconds of one. Given alone, there is no limit."""

    costs: str = _option(
        "", _text, "--costs",
        f"seconds per op: {', '.join(PRESETS)} (default cpu, or a100 for --provider cuda), or a profile JSON "
        "written by ONNX Runtime", metavar="PRESET|FILE",
    )  # fmt: skip
    """A preset of `costs.PRESETS`, or the path of a profile written by ONNX Runtime; "" for the provider's own."""

    cudnn_workspace: str | int | None = _option(
        None, _any, "--cudnn-workspace",
        "for --provider cuda: bytes to allow for what cuDNN takes in a convolution (default 32MiB)", metavar="SIZE",
    )  # fmt: skip
    """Bytes allowed for what cuDNN takes in a convolution (``"64MiB"``); None for the provider's own margin."""

    offload: bool = _option(
        False, _switch, "--offload",
        "move values to the host's memory and back where that takes less time than to compute them again, and "
        "where no budget could be kept otherwise: for --provider cuda --for loop", group=MOVING,
    )  # fmt: skip
    """May a plan for a device move values to the host's memory and back, where that takes less time than to compute
    them again? For ``run_by="loop"``."""

    host_bandwidth: str | int | None = _option(
        None, _any, "--host-bandwidth",
        "bytes that cross to the host in a second, or back (default: 25GB, or what --costs says of the device)",
        metavar="SIZE", group=MOVING,
    )  # fmt: skip
    """Bytes per second that cross to the host, or back (``"25GB"``); None for the device's preset, see `costs`."""

    verify: str = _option(
        "check", _text, "--verify",
        "check (default): validity, interface, order, simulated peak; run: also run both and compare; none",
        choices=verify.MODES, group=CHECKING,
    )  # fmt: skip
    """One of `verify.MODES`: "none", "check" (the file alone), "run" (also both models, compared)."""

    progress: selectors.Progress = _option(selectors.silent, _callback)  # noqa: RUF009 - a field
    """Called with the stage and the fraction of it that is done."""

    def work_seconds(self) -> float:
        """How much planning may try, in seconds of a slow core."""
        return self.time_limit if self.effort is None else self.effort

    def bounded_by(self, times: float = 1.0) -> Setting:
        """The setting that bounds planning, with so many times its value."""
        name, value = ("time_limit", self.time_limit) if self.effort is None else ("effort", self.effort)
        return Setting(name, float(times * value))

    def preparation(self) -> Preparation:
        """What of these the model is compiled with."""
        kernels = self.kernels()
        return Preparation(
            kernels, self.dims, self.allow_recompute, self.keep, self.loss, self.costs or kernels.costs,
            must_load=self.verify != "none", fixed=self.run_by == "loop",
        )  # fmt: skip

    def link(self) -> Link:
        """The way to the host, of the device that seconds are estimated for."""
        if self.host_bandwidth is not None:
            found = _bytes(self.host_bandwidth)
            if not found:
                given = Setting("host_bandwidth", self.host_bandwidth)
                raise UsageError("{} is no number of bytes in a second: write e.g. 25GB", given)
            return Link(float(found))
        known = PRESETS.get(self.costs) or PRESETS[self.kernels().costs]
        return Link(known.host)

    def kernels(self) -> Kernels:
        """The facts about the provider's kernels; UsageError where there are none."""
        space = None if self.cudnn_workspace is None else _bytes(self.cudnn_workspace)
        if space is None and self.cudnn_workspace is not None:
            given = Setting("cudnn_workspace", self.cudnn_workspace)
            raise UsageError("{} is not a size in bytes: write e.g. 64MiB", given)
        return kernels_of(self.provider, space)


def _bytes(size: str | int) -> int | None:
    """What a size with a unit says; None where it is none."""
    try:
        return parse_size(size)
    except UsageError:
        return None


class PlanningOptions(TypedDict, total=False):
    """The fields of `Options` as keyword arguments, for editors and type checkers; a test keeps both equal."""

    provider: str
    selector: str
    dims: Mapping[str, int]
    loss: str | None
    keep: Sequence[str]
    checkpoints: Sequence[str]
    allow_recompute: Sequence[str]
    run_by: str | None
    arena: bool
    patterns: bool
    fuse: bool
    time_limit: float
    effort: float | None
    costs: str
    cudnn_workspace: str | int | None
    offload: bool
    host_bandwidth: str | int | None
    verify: str
    progress: selectors.Progress


OPTIONS: Mapping[str, Option] = {each.name: each.metadata["option"] for each in fields(Options)}
"""What the fields of `Options` state, by their names."""


def of_sessions(given: PlanningOptions, what: str) -> None:
    """Make the budget one of a session; UsageError where it is meant for a loop, which `what` does not measure."""
    if given.get("run_by") not in (None, "session"):
        raise UsageError("{} measures onnxruntime's own sessions: leave {} out", what, Setting("run_by"))
    given["run_by"] = "session"


def parse_options(given: PlanningOptions) -> Options:
    """Options from keyword arguments; UsageError for an unknown field, provider, selector or mode of verification.

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
        options = replace(options, run_by="session" if options.arena or options.provider != "cpu" else "loop")
    options.kernels()
    if options.verify == "run" and options.provider != "cpu":
        run, provider = Setting("verify", "run"), Setting("provider", options.provider)
        raise UsageError("{} measures the CPU's memory: not with {}", run, provider)
    if options.verify not in verify.MODES:
        raise UsageError(f"verify must be one of {', '.join(verify.MODES)}, not {options.verify!r}")
    if options.run_by not in RUN_BY:
        raise UsageError(f"run_by must be one of {', '.join(RUN_BY)}, not {options.run_by!r}")
    if options.run_by == "loop":
        if not runtime.available():
            raise UsageError(
                "what training takes cannot be foreseen without onnxruntime: pip install 'onnx-remat[cpu]', or plan "
                "for a session on another machine with {}",
                Setting("run_by", "session"),
            )
        if options.arena:
            raise UsageError(
                "{} is for {}: a loop of ours keeps no values in ONNX Runtime's arena",
                Setting("arena", True),
                Setting("run_by", "session"),
            )
    _check_offload(options)
    selectors.get(options.selector)
    if options.checkpoints and options.selector != "collection":
        collection = Setting("selector", "collection")
        raise UsageError("{} is for {}: {!r} chooses by itself", Setting("checkpoints"), collection, options.selector)
    if options.verify == "run":
        runtime.import_runtime()
    return options


def _check_offload(options: Options) -> None:
    """Values are moved by a session of ours alone, where there is somewhere to move them."""
    if options.offload and (options.kernels().device == "cpu" or options.run_by != "loop"):
        raise UsageError(
            "{} moves values out of a device's memory, in a session of ours: for {}, {}",
            Setting("offload", True),
            Setting("provider", "cuda"),
            Setting("run_by", "loop"),
        )
    if options.host_bandwidth is not None and not options.offload:
        raise UsageError("{} is for {}", Setting("host_bandwidth"), Setting("offload", True))
    if options.offload and options.link().bandwidth <= 0:
        raise UsageError(
            "{} has no other memory to move values to: state {}",
            Setting("costs", options.costs),
            Setting("host_bandwidth"),
        )
