"""How to plan: the command line's flags, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onnx_remat import runtime, selectors, verify
from onnx_remat.errors import UsageError


@dataclass(frozen=True, slots=True)
class Options:
    """How to plan; the command line's flags by the same names."""

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
