"""Budgets that are shares of what a framework's own step takes, or of the exported step, and how ``budgeted`` plans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from onnx_remat.errors import BudgetInfeasibleError, UsageError
from onnx_remat.messages import Message, Setting, changed
from onnx_remat.units import Budget, format_bytes, parse_budget

if TYPE_CHECKING:  # it takes memory
    from onnx_remat.options import PlanningOptions
    from onnx_remat.rewrite.report import Report

_OF_STEP = "of the step"


def parse(budget: str | int | None) -> tuple[Budget | None, bool]:
    """Return a budget, and whether a share in it is one of the exported step.

    >>> parse("60% of the step")
    (Budget(bytes=None, fraction=0.6, slower=None), True)
    """
    if isinstance(budget, str) and budget.strip().endswith(_OF_STEP):
        return parse_budget(budget.strip().removesuffix(_OF_STEP)), True
    return None if budget is None else parse_budget(budget), False


def check_planning(framework: str, planning: PlanningOptions, device: str) -> None:
    """Raise UsageError for an option whose value ``budgeted`` decides: its step runs in a `Loop` on a kind of device.

    With another value, the plan would be for another run, and the budget for another account of its memory.
    """
    decided = {"provider": device, "run_by": "loop", "arena": False, "fuse": True, "dims": {}}
    for name, value in decided.items():
        if planning.get(name) not in (None, value):
            given = _in_planning(Setting(name, planning.get(name)))
            raise UsageError("{}: budgeted states it itself: leave {!r} out", given, name)
    if planning.get("offload_state"):
        given = _in_planning(Setting("offload_state", True))
        raise UsageError(
            "{}: {} keeps the optimizer's state where it trains: train the exported step by Loop", given, framework
        )


def summary(framework: str, own: int, report: Report) -> str:
    """Return what a planned step takes in some lines.

    Parameters
    ----------
    framework : str
    own : int
        Bytes that the framework's own step takes; 0 if they are not known.
    report : Report
    """
    _, taken = report.covered()
    lines = [f"the exported step: {report.verdict()}"]
    if own:
        ours = f"this one {format_bytes(taken)} ({taken / own:.0%})"
        lines.insert(0, f"{framework}'s own step takes {format_bytes(own)}, {ours}")
    if report.cut_short:
        lines.append(f"the clock cut planning short: {Setting('planning', {'time_limit': 600})} gives it more time")
    return "\n".join(lines)


@contextmanager
def of(framework: str, own: int) -> Iterator[None]:
    """Let a refusal within the block name arguments of ``budgeted``, and what the framework's own step takes.

    Parameters
    ----------
    framework : str
    own : int
        Bytes; 0 if the budget is no share of them.
    """
    try:
        yield
    except BudgetInfeasibleError as error:
        text = in_budgeted(error.message)
        if own:
            text = Message("{}'s own step takes {}: {}", framework, format_bytes(own), text)
            if int(str(error.settings.get("budget", 0))) > own:
                text = Message("{}; that is more than {}'s own", text, framework)
        raise BudgetInfeasibleError(text, error.best_peak_bytes, error.lower_bound_bytes) from None


def in_budgeted(text: str) -> str:
    """Return a message whose settings are arguments of ``budgeted``.

    >>> print(in_budgeted(Message("raise {}, or try {}", Setting("memory_limit"), Setting("effort", 60))))
    raise budget=, or try planning={'effort': 60}
    """
    return changed(text, _in_planning)


def _in_planning(setting: Setting) -> Setting:
    """Return a planning option, or the limit of a session, as it is given to ``budgeted``."""
    if setting.name in ("budget", "memory_limit"):
        return Setting("budget", setting.value)
    return Setting("planning", {setting.name: setting.value})
