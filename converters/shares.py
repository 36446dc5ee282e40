"""Budgets that are shares of what a framework's own step takes, or of the exported step."""

from __future__ import annotations

from onnx_remat.units import Budget, parse_budget

_OF_STEP = "of the step"


def parse(budget: str | int | None) -> tuple[Budget | None, bool]:
    """Return a budget, and whether a share in it is one of the exported step.

    >>> parse("60% of the step")
    (Budget(bytes=None, fraction=0.6, slower=None), True)
    """
    if isinstance(budget, str) and budget.strip().endswith(_OF_STEP):
        return parse_budget(budget.strip().removesuffix(_OF_STEP)), True
    return None if budget is None else parse_budget(budget), False
