"""Which variants of a test run by default, and which with ``--slow`` alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def few(variants: Iterable[Any], kept: Iterable[Any], several: bool = False) -> list[Any]:
    """Parameters of a test: those `kept` always, the others with ``--slow``, as continuous integration runs it.

    With `several`, each of them is a tuple of arguments.
    """
    always = list(kept)
    made = [
        each if each in always else pytest.param(*(each if several else (each,)), marks=pytest.mark.slow)
        for each in variants
    ]
    assert sum(each in always for each in made if not hasattr(each, "marks")) == len(always)
    return made
