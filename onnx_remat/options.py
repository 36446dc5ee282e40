"""How to plan: the command line's flags, checked."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TypedDict

from onnx_remat.errors import UsageError, did_you_mean
from onnx_remat.measure import verify
from onnx_remat.messages import Setting
from onnx_remat.ort import runtime
from onnx_remat.ort.kernels.base import Kernels
from onnx_remat.ort.kernels.costs import PRESETS
from onnx_remat.ort.kernels.registry import kernels_of
from onnx_remat.ort.moves import Link
from onnx_remat.ort.prepare import Preparation
from onnx_remat.plan import selectors
from onnx_remat.units import check_dims, parse_duration, parse_size


@dataclass(frozen=True, slots=True)
class Options:
    """How to plan; the command line's flags by the same names.

    Attributes
    ----------
    provider : str
        Execution provider that the file is written for, one of `registry.PROVIDERS`.
    selector : str
        Name of a registered selector, see `selectors`.
    dims : mapping of str to int
        Sizes of symbolic dimensions.
    loss : str or None
        Value that is the loss, where nodes are unlabelled and it is not clear.
    keep : sequence of str
        Values never to recompute.
    checkpoints : sequence of str
        Values that the selector `collection` keeps.
    allow_recompute : sequence of str
        Custom ops, ``domain::op``, that are pure, so that they may be recomputed.
    run_by : str or None
        What trains with the file, and so what the budget covers: ``"loop"``, `session.training.Loop` or
        `session.session.Session` (all that training takes of the machine's memory), or ``"session"``, onnxruntime's own
        (the sum of tensors). None: a loop on the CPU, unless `arena` is asked for; a session on other providers.
    arena : bool
        The budget also covers what ONNX Runtime's arena takes besides the plan, with `session_options()`.
    patterns : bool
        May sessions make memory patterns, as they do by default? If not, the step is written into a body in which none
        are made (see `ir.body`): for sessions whose options are not yours to set.
    fuse : bool
        For ``run_by="loop"``: count what training takes with elementwise nodes fused, as `session.session.Session` and
        `session.training.Loop` run them. If not, open them with ``fuse=False`` too, or they take less than counted.
    time_limit : float
        Seconds of the wall clock for all but loading the file, compiling at a first use and `verify` "run". Where it
        cuts planning short, the report says so, and another run may find another plan.
    effort : float or None
        How much planning tries, in seconds of a slow core: the plan is the same on any machine. None, and where
        `time_limit` alone is given: as much as `time_limit` seconds of one. Given alone, there is no limit.
    costs : str
        A preset of `costs.PRESETS`, or the path of a profile written by ONNX Runtime; "" for the provider's own preset.
    cudnn_workspace : str, int or None
        Bytes allowed for what cuDNN takes in a convolution (``"64MiB"``); None for the provider's own margin.
    offload : bool
        May a plan for a device move values to the host's memory and back, where that takes less time than to compute
        them again? For ``run_by="loop"``.
    host_bandwidth : str, int or None
        Bytes per second that cross to the host, or back (``"25GB"``); None for the device's preset, see `costs`.
    verify : str
        One of `verify.MODES`: "none", "check" (the file alone), "run" (also both models, compared).
    progress : callable
        Called with the stage and the fraction of it that is done.
    """

    provider: str = "cpu"
    selector: str = "auto"
    dims: Mapping[str, int] = field(default_factory=dict)
    loss: str | None = None
    keep: Sequence[str] = ()
    checkpoints: Sequence[str] = ()
    allow_recompute: Sequence[str] = ()
    run_by: str | None = None
    arena: bool = False
    patterns: bool = True
    fuse: bool = True
    time_limit: float = 120.0
    effort: float | None = 30.0
    costs: str = ""
    cudnn_workspace: str | int | None = None
    offload: bool = False
    host_bandwidth: str | int | None = None
    verify: str = "check"
    progress: selectors.Progress = selectors.silent

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


_NAMES = ("keep", "checkpoints", "allow_recompute")
_TEXTS = ("provider", "selector", "costs", "verify", "run_by")

RUN_BY = ("session", "loop")
"""Values of `Options.run_by`."""


def _checked(name: str, value: object) -> object:
    """The value of a field as `Options` has it; UsageError where it cannot be meant."""
    if name == "dims":
        return check_dims(value)
    if name in ("effort", "run_by") and value is None:
        return None
    if name in ("time_limit", "effort"):
        return parse_duration(float(value) if isinstance(value, Real) and not isinstance(value, bool) else str(value))
    if name in _NAMES:
        one = () if value is None else (value,) if isinstance(value, str) else None
        names = tuple(value) if one is None and isinstance(value, Iterable) else one
        if names is None or not all(isinstance(each, str) for each in names):
            raise UsageError(f"{name} must be a sequence of names, not {value!r:.100}")
        return names
    if name in _TEXTS or (name == "loss" and value is not None):
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not isinstance(text, str):
            raise UsageError(f"{name} must be text, not {value!r:.100}")
        return text
    if name == "progress":
        if value is not None and not callable(value):
            raise UsageError(f"progress must be a function of a stage and a fraction, not {value!r:.100}")
        return value or selectors.silent
    if name in ("arena", "patterns", "fuse", "offload") and not isinstance(value, bool):
        raise UsageError(f"{name} must be True or False, not {value!r:.100}")
    return value


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
    fields = Options.__dataclass_fields__
    if unknown := [name for name in given if name not in fields]:
        hint = did_you_mean(unknown[0], fields) or f": choose from {', '.join(fields)}"
        raise UsageError(f"unknown option {unknown[0]!r}{hint}")
    checked = {name: _checked(name, value) for name, value in given.items()}
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
