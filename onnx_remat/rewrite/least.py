"""The least budget for which a step takes little more time: that of ``--budget auto``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from onnx_remat.errors import BudgetInfeasibleError
from onnx_remat.plan.request import Deadline
from onnx_remat.rewrite.original import Job, Original
from onnx_remat.rewrite.report import Report
from onnx_remat.units import Budget

TRIALS = 5
"""Most budgets that are tried before the one that is planned with the whole effort."""

CLOSE_ENOUGH = 0.03
"""Share of the original's memory within which the least budget is known well enough."""


def least_budget(original: Original, slower: float, attempt: Callable[[Job], Report]) -> Budget:
    """Bisect for the least budget whose file takes at most so much more time, as predicted.

    Parameters
    ----------
    original : Original
    slower : float
        Most additional time of a step as a loop runs it, as a fraction; most extra compute, where a loop cannot.
    attempt : callable
        Rewrites for one budget. At most `TRIALS` attempts share a quarter of the effort and of the time.

    Returns
    -------
    Budget
        In bytes; the original's memory if no smaller budget will do.
    """
    options, most = original.options, original.memory.original_bytes
    share = 1 / (4 * TRIALS)
    effort = None if options.effort is None else options.effort * share
    limit = options.time_limit * share
    brief = replace(options, effort=effort, time_limit=limit, verify="none" if options.verify == "none" else "check")
    trial = replace(original, options=brief)
    low, high = original.impossible_below(original.memory.floor), most
    for _ in range(TRIALS):
        if high - low <= CLOSE_ENOUGH * most:
            break
        budget = (low + high) // 2
        try:
            report = attempt(trial.job(Budget(bytes=budget), Deadline(limit)))
        except BudgetInfeasibleError:
            low = budget
            continue
        time = report.extra_time()
        if (report.extra_compute if time is None else time) <= slower:
            high = budget
        else:
            low = budget
    return Budget(bytes=high)
