"""The contract of checkpoint selectors: a selector is a registered function from a `Request` to a `Schedule`.

One shared checker (`tests/plan/test_selectors.py`) tests every registered selector: the schedule is valid
(`check_schedule`), the same request gives the same schedule, and the selector states no peak or overhead: the caller
simulates both. A selector that cannot reach the budget returns the lowest-peak schedule it found.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from onnx_remat.errors import UsageError, did_you_mean
from onnx_remat.memory.problem import Longs, Problem, Schedule, check_schedule

Progress = Callable[[str, float], None]
"""Called with the name of the current stage and the fraction of the work done so far (0 to 1)."""


def silent(_stage: str, _fraction: float) -> None:
    """A `Progress` that shows nothing."""


class Deadline:
    """A point in wall-clock time after which work stops early, and a record of whether any did (`cut_short`).

    Parameters
    ----------
    seconds : float
        From now; infinite for no deadline.
    whole : Deadline, optional
        The enclosing deadline: when this one cuts work short, so does the enclosing one.
    """

    def __init__(self, seconds: float = math.inf, whole: Deadline | None = None) -> None:
        self._at = time.monotonic() + seconds
        self._whole = whole
        self.cut_short = False

    def later(self, seconds: float) -> None:
        """Postpone the deadline, and the enclosing ones."""
        self._at += seconds
        if self._whole is not None:
            self._whole.later(seconds)

    def left(self) -> float:
        """Return the seconds left."""
        return self._at - time.monotonic()

    def passed(self) -> bool:
        """Whether time is up; if so, the caller is expected to leave work undone, and `cut_short` is set."""
        return self.ends_within(0.0)

    def ends_within(self, seconds: float) -> bool:
        """Whether at most `seconds` are left; if so, the caller leaves work undone, and `cut_short` is set."""
        if self.left() > seconds:
            return False
        self._note()
        return True

    def sooner(self, seconds: float, share: float = 1.0) -> Deadline:
        """Return a nested deadline: `share` of the time left minus `seconds` reserved for later work.

        The reserve takes at most four fifths of the time left.
        """
        left = self.left()
        return Deadline(max(left - seconds, left / 5) * share, self)

    @contextmanager
    def flag(self) -> Iterator[Longs]:
        """Yield an array of one 0 that a timer thread sets to 1 when time is up, for compiled code without the GIL.

        If it is up already, the array has the 1 from the beginning.
        """
        up = np.full(1, self.passed(), np.int64)
        if self._at == math.inf:
            yield up
            return

        def raise_() -> None:
            up[0] = 1
            self._note()

        timer = threading.Timer(max(0.0, self.left()), raise_)
        timer.daemon = True
        timer.start()
        try:
            yield up
        finally:
            timer.cancel()

    def _note(self) -> None:
        self.cut_short = True
        if self._whole is not None:
            self._whole._note()


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
        First occurrences must follow the ops' numbering (the rule of the published benchmark graphs), which must then
        be a valid order.
    effort : float
        Amount of search, in seconds of a slow reference core, see `work`.
    work : int or None
        Deterministic limit, in candidates tried. None derives it from `effort` and a fixed rate, so equal requests give
        equal schedules on any machine, unless the deadline cuts the search short.
    deadline : Deadline
        When the selector must return its best plan so far.
    use_time : bool
        Continue until the deadline for as long as that finds better plans: equal requests may then give different ones.
    seed : int
        Seed of the pseudo-random search.
    checkpoints : tuple of int
        Values to keep, for the selector `collection`.
    anchors : tuple of int
        Ops whose results are expensive (convolutions and matrix products), for the selector `speed`.
    known : tuple of Schedule
        Known plans, made for smaller budgets say. `search` and `auto` never return a plan that costs more than one of
        these that meets the budget.
    progress : Progress
        Called repeatedly during the search.
    """

    problem: Problem
    budget: int
    baseline: Schedule
    fixed_order: bool = False
    effort: float = 30.0
    work: int | None = None
    deadline: Deadline = field(default_factory=Deadline)
    use_time: bool = False
    seed: int = 0
    checkpoints: tuple[int, ...] = ()
    anchors: tuple[int, ...] = ()
    known: tuple[Schedule, ...] = ()
    progress: Progress = field(default=silent)


Selector = Callable[[Request], Schedule]

_REGISTRY: dict[str, Selector] = {}


def register(name: str) -> Callable[[Selector], Selector]:
    """Decorator: register a selector as `name`; ``--help`` shows the first line of its docstring.

    If the request fixes the order, the registered function raises ValueError for a plan in another order.
    """

    def add(selector: Selector) -> Selector:
        @functools.wraps(selector)
        def checked(request: Request) -> Schedule:
            schedule = selector(request)
            if request.fixed_order:
                check_schedule(request.problem, schedule, fixed_order=True)
            return schedule

        _REGISTRY[name] = checked
        return checked

    return add


def names() -> list[str]:
    """Return the registered selectors, in registration order."""
    return list(_REGISTRY)


def summary(name: str) -> str:
    """Return the first line of a selector's docstring; nothing where Python leaves these out (``-OO``)."""
    return (get(name).__doc__ or "").strip().partition("\n")[0].rstrip(".")


def get(name: str) -> Selector:
    """Return the selector called `name`; raise UsageError with the nearest match if there is none."""
    if name in _REGISTRY:
        return _REGISTRY[name]
    hint = did_you_mean(name, _REGISTRY) or f": choose one of {', '.join(_REGISTRY)}"
    raise UsageError(f"unknown selector {name!r}{hint}")
