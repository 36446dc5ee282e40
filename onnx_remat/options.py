"""How to plan: the command line's flags, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onnx_remat import runtime, selectors, verify
from onnx_remat.errors import UsageError


@dataclass(frozen=True, slots=True)
class Options:
    """How to plan; the command line's flags by the same names.

    Attributes
    ----------
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
    time_limit : float
        Seconds for planning; turned into an amount of work, so that the plan is the same on any machine.
    costs : str
        A preset of `costs.PRESETS`, or the path of a profile written by ONNX Runtime.
    verify : str
        One of `verify.MODES`: "none", "check" (the file alone), "run" (also both models, compared).
    progress : callable
        Called with the stage and the fraction of it that is done.
    """

    selector: str = "auto"
    dims: Mapping[str, int] = field(default_factory=dict)
    loss: str | None = None
    keep: Sequence[str] = ()
    checkpoints: Sequence[str] = ()
    allow_recompute: Sequence[str] = ()
    time_limit: float = 30.0
    costs: str = "cpu"
    verify: str = "check"
    progress: selectors.Progress = selectors.silent


def parse_options(given: Mapping[str, object]) -> Options:
    """Options from keyword arguments; UsageError for an unknown field, selector or mode of verification."""
    try:
        options = Options(**given)  # type: ignore[arg-type]
    except TypeError as error:
        fields = ", ".join(Options.__dataclass_fields__)
        raise UsageError(f"unknown option: choose from {fields}") from error
    if options.verify not in verify.MODES:
        raise UsageError(f"verify must be one of {', '.join(verify.MODES)}, not {options.verify!r}")
    selectors.get(options.selector)
    if options.verify == "run":
        runtime.import_runtime()
    return options
