"""The least budget for which a step takes little more time: that of ``--budget auto``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from onnx_remat.errors import BudgetInfeasibleError
from onnx_remat.messages import Message, Setting
from onnx_remat.plan.request import Deadline
from onnx_remat.rewrite.original import Job, Original
from onnx_remat.rewrite.plan_files import Fitted
from onnx_remat.rewrite.plans import TooLittleTime, untried
from onnx_remat.units import Budget

TRIALS = 6
"""Most budgets that are tried before the one that is planned with the whole effort."""

CLOSE_ENOUGH = 0.02
"""Share of the original's memory within which the least budget is known well enough."""

_TRIAL_EFFORT = 0.125  # of the effort for the budget that is found: a worse plan would make it seem too slow
_FILES_PER_TRIAL = 2.0  # times what a file takes: a plan, and a file, at least
_LATER = 0.5  # of the time left: kept for later trials and for the plan itself


@dataclass(frozen=True, slots=True)
class Trial:
    """A file for a budget that was tried: the bytes it takes, its additional time as a fraction, and the file."""

    nbytes: int
    slower: float
    made: Fitted | None = None


def least_budget(original: Original, slower: float, deadline: Deadline, attempt: Callable[[Job], Trial]) -> Trial:
    """Bisect for the least budget whose file takes at most so much more time, as predicted.

    Parameters
    ----------
    original : Original
    slower : float
        Most additional time of a step as a loop runs it, as a fraction; most extra compute, for a plain session.
    deadline : Deadline
        Trials end early enough to leave time for the plan itself.
    attempt : callable
        Plans and writes a file for one budget, which may take more than that.

    Returns
    -------
    Trial
        The one whose file takes least; without a file, and the original's memory, if no smaller budget will do.

    Raises
    ------
    TooLittleTime
        A time limit that was asked for is too short for a single trial.
    """
    options, most = original.options, original.taken
    effort = None if options.effort is None else _TRIAL_EFFORT * options.effort
    trial = replace(original, options=replace(options, effort=effort))
    enough = _FILES_PER_TRIAL * original.seconds_per_file
    low, best = original.impossible_below(original.memory.least), Trial(most, 0.0)
    for turn in range(TRIALS):
        if best.nbytes - low <= CLOSE_ENOUGH * most:
            break
        if (turn or not options.limit_is_default()) and deadline.ends_within(2 * enough):
            if not turn:
                raise _too_short(original, enough, deadline)
            break
        budget = (low + best.nbytes) // 2
        try:
            made = attempt(trial.job(Budget(bytes=budget), deadline.sooner(enough, _LATER)))
        except TooLittleTime:
            if not turn:
                raise
            break
        except BudgetInfeasibleError:
            low = budget
            continue
        if made.slower <= slower and made.nbytes < best.nbytes:
            best = made
        else:
            low = budget
    return best


def _too_short(original: Original, enough: float, deadline: Deadline) -> TooLittleTime:
    options, memory = original.options, original.memory
    advised = 5 * math.ceil((options.time_limit - deadline.left() + 2 * (TRIALS + 1) * enough) / 5)
    return TooLittleTime(
        Message(
            "{} is too short to search for a budget: each of up to {} trials takes about {:.0f} s here; try {}, or "
            "give a size; {}",
            Setting("time_limit", options.time_limit), TRIALS, math.ceil(enough), Setting("time_limit", advised),
            untried(memory),
        ),
        memory.covered, memory.least + memory.bookkeeping,
    )  # fmt: skip
