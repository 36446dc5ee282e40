"""The table that rules enter themselves in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..private_torch import Operator

Function = TypeVar("Function", bound=Callable[..., Any])

RULES: dict[Any, Callable[..., Any]] = {}


def rule(*operators: Operator) -> Callable[[Function], Function]:
    """Enter the function below as the rule of these operators."""

    def enter(function: Function) -> Function:
        RULES.update(dict.fromkeys(operators, function))
        return function

    return enter
