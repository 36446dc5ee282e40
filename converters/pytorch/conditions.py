"""Conditions on the sizes of open dimensions, under which a step is the traced one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import CodeType

import torch


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on the sizes of one or more dimensions.

    Attributes
    ----------
    expression : str
        The condition in Python, which may call functions of ``math`` and ``torch``.
    dims : mapping of str to str
        The dimension of each variable in it.
    reason : str
        Why the step is another where it is false, in words.
    """

    expression: str
    dims: Mapping[str, str]
    reason: str

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Return whether it is true for these sizes by dimension."""
        try:
            values = {name: sizes[dim] for name, dim in self.dims.items()}
            return bool(eval(_code(self.expression), {"math": math, "torch": torch}, values))
        except ZeroDivisionError:  # of a part, for which the size is too small
            return False

    @property
    def text(self) -> str:
        """The condition in the names of its dimensions."""
        return re.sub(r"[^\W\d]\w*", lambda name: self.dims.get(name[0], name[0]), self.expression)


def failed(conditions: Iterable[Condition], sizes: Mapping[str, int]) -> Condition | None:
    """Return the first condition that is false, of those whose dimensions all have a size; None if there is none."""
    return next((one for one in conditions if sizes.keys() >= {*one.dims.values()} and not one.holds(sizes)), None)


@cache
def _code(expression: str) -> CodeType:
    return compile(expression, "condition", "eval")
