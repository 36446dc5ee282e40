"""What a checkpoint selector is: a named function from a `Request` to a `Schedule`, kept in a registry.

The contract, tested for every registered selector by one shared checker (`tests/plan/test_selectors.py`): the
schedule is valid (`check_schedule`), the same request gives the same schedule, and nothing is claimed: peak
and overhead are always re-simulated by the caller. A selector that cannot reach the budget returns the
lowest-peak schedule it found.
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
"""Called with what is being done and the fraction of the work done so far (0 to 1)."""


def silent(_stage: str, _fraction: float) -> None:
    """A `Progress` that shows nothing."""


class Deadline:
    """A moment of the wall clock from which on work is cut short, and whether it has cut any.

    Parameters
    ----------
    seconds : float
        From now; infinite for no deadline.
    whole : Deadline, optional
        The one that this is part of: what this cuts, that has cut too.
    """

    def __init__(self, seconds: float = math.inf, whole: Deadline | None = None) -> None:
        self._at = time.monotonic() + seconds
        self._whole = whole
        self.cut_short = False

    def later(self, seconds: float) -> None:
        """Put the moment off."""
        self._at += seconds

    def left(self) -> float:
        """Seconds from now."""
        return self._at - time.monotonic()

    def passed(self) -> bool:
        """Whether time is up; whoever asks then leaves work undone, which is noted."""
        return self.ends_within(0.0)

    def ends_within(self, seconds: float) -> bool:
        """Whether less time than this is left; whoever asks then leaves work undone, which is noted."""
        if self.left() > seconds:
            return False
        self._note()
        return True

    def sooner(self, seconds: float, share: float = 1.0) -> Deadline:
        """A share of the time left before some seconds for what comes after, which leave a fifth of it at least."""
        left = self.left()
        return Deadline(max(left - seconds, left / 5) * share, self)

    @contextmanager
    def flag(self) -> Iterator[Longs]:
        """An array of one 0 that turns to 1 when time is up, for compiled code; such code lets other threads run."""
        up = np.zeros(1, np.int64)
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
        First occurrences must keep the ops' numbering (the rule of the published benchmark graphs), which then is to be
        a valid order.
    effort : float
        Seconds of a slow core that the selector may take. They decide how much is tried, see `work`.
    work : int or None
        Deterministic limit, in candidates tried. None derives it from `effort` and a fixed rate, so equal
        requests give equal schedules on any machine, as long as the deadline cuts none short.
    deadline : Deadline
        When the selector is to answer with what it has.
    use_time : bool
        Go on until the deadline, for as long as that finds better plans: equal requests may then give different ones.
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
    """Decorator: make a selector known as `name`; its docstring's first line is shown by ``--help``.

    Asked for a fixed order, it raises ValueError rather than answer with a plan of another.
    """

    def add(selector: Selector) -> Selector:
        @functools.wraps(selector)
        def held(request: Request) -> Schedule:
            schedule = selector(request)
            if request.fixed_order:
                check_schedule(request.problem, schedule, fixed_order=True)
            return schedule

        _REGISTRY[name] = held
        return held

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
