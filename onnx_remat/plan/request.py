"""What a checkpoint selector is: a named function from a `Request` to a `Schedule`, kept in a registry.

The contract, tested for every registered selector by one shared checker (`tests/plan/test_selectors.py`): the
schedule is valid (`check_schedule`), the same request gives the same schedule, and nothing is claimed: peak
and overhead are always re-simulated by the caller. A selector that cannot reach the budget returns the
lowest-peak schedule it found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from onnx_remat.errors import UsageError, did_you_mean
from onnx_remat.problem import Problem, Schedule

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction of the work done so far (0 to 1)."""


def silent(_stage: str, _fraction: float) -> None:
    """A `Progress` that shows nothing."""


@dataclass(frozen=True, slots=True)
class Request:
    """One planning job.

    Attributes
    ----------
    problem : Problem
        The graph.
    budget : int
        Bytes that ``simulate(problem, schedule).peak`` should not exceed.
    baseline : Schedule
        The original order as the runtime executes it; no recompute. Valid: see `donation.after_readers`.
    fixed_order : bool
        First occurrences must keep the ops' numbering (the rule of the published benchmark graphs), which then is to be
        a valid order.
    time_limit : float
        Seconds the selector may take. The limit decides how much is tried, see `work`.
    work : int or None
        Deterministic limit, in candidates tried. None derives it from `time_limit` and a fixed rate, so equal
        requests give equal schedules on any machine.
    seed : int
        Of the pseudo-random moves.
    checkpoints : tuple of int
        Values to keep, for the selector `collection`.
    anchors : tuple of int
        Ops whose results are dear, convolutions and matrix products, for the selector `speed`.
    known : tuple of Schedule
        Plans at hand already, made for smaller budgets say. `search` and `auto` never answer with a plan that
        costs more than one of these that keeps the budget.
    progress : Progress
        Called now and then.
    """

    problem: Problem
    budget: int
    baseline: Schedule
    fixed_order: bool = False
    time_limit: float = 30.0
    work: int | None = None
    seed: int = 0
    checkpoints: tuple[int, ...] = ()
    anchors: tuple[int, ...] = ()
    known: tuple[Schedule, ...] = ()
    progress: Progress = field(default=silent)


Selector = Callable[[Request], Schedule]

_REGISTRY: dict[str, Selector] = {}


def register(name: str) -> Callable[[Selector], Selector]:
    """Decorator: make a selector known as `name`; its docstring's first line is shown by ``--help``."""

    def add(selector: Selector) -> Selector:
        _REGISTRY[name] = selector
        return selector

    return add


def names() -> list[str]:
    """Registered selectors, in registration order."""
    return list(_REGISTRY)


def summary(name: str) -> str:
    """First line of a selector's docstring."""
    return (get(name).__doc__ or "").strip().splitlines()[0].rstrip(".")


def get(name: str) -> Selector:
    """The selector called `name`; UsageError with the nearest match when there is none."""
    if name in _REGISTRY:
        return _REGISTRY[name]
    hint = did_you_mean(name, _REGISTRY) or f": choose one of {', '.join(_REGISTRY)}"
    raise UsageError(f"unknown selector {name!r}{hint}")
