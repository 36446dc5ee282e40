"""`Pass`: a rewrite of a step, with its contract; `Order`: a sequence of passes whose contracts hold.

A contract names facts about a step: those that the pass requires, those that hold after it, and those that it may
break. The constructor of `Order` raises ValueError if a pass requires a fact that does not hold at its place, or if a
promised fact does not hold at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import onnx_ir as ir


class Fact(StrEnum):
    """A property of a step."""

    SHAPES = "every value has a shape"
    PHASES = "every node is labelled with its phase"
    STATED = "the file states every constant; no node computes one"
    SAFE = "no form that ONNX Runtime computes wrongly"
    LEAN = "no node is redundant, unused or without effect"
    ORDERED = "scatter sums keep every term"
    SOFTMAX = "no gradient of a softmax contains a matrix of zeros"
    LATE = "large constants of the backward pass wait for the loss"
    MASKS = "every Dropout in training has a reader of its mask"
    KERNELS = "a device has a kernel for every node in half precision"


@dataclass(frozen=True, slots=True)
class Pass:
    """A rewrite of a step, in place.

    Attributes
    ----------
    run : callable
        Takes the model, then options by keyword.
    requires, ensures, breaks : frozenset of Fact
        Facts that must hold before; that hold afterwards; that may no longer hold.
    """

    run: Callable[..., None]
    requires: frozenset[Fact]
    ensures: frozenset[Fact]
    breaks: frozenset[Fact]

    def __call__(self, model: ir.Model, **options: Any) -> None:
        self.run(model, **options)

    @property
    def name(self) -> str:
        """The name of the function, and of its module."""
        return self.run.__name__

    @property
    def summary(self) -> str:
        """The first sentence of the function's docstring."""
        return " ".join((self.run.__doc__ or "").strip().partition("\n\n")[0].split())


def rewrite(
    requires: Collection[Fact] = (), ensures: Collection[Fact] = (), breaks: Collection[Fact] = ()
) -> Callable[[Callable[..., None]], Pass]:
    """Return a decorator that makes a function the pass with this contract."""
    return lambda run: Pass(run, frozenset(requires), frozenset(ensures), frozenset(breaks))


@dataclass(frozen=True, slots=True)
class Order:
    """Passes in the order in which they run.

    Attributes
    ----------
    given : frozenset of Fact
        Facts that hold before the first pass.
    passes : tuple of Pass
    promised : frozenset of Fact
        Facts that hold after the last pass.

    Raises
    ------
    ValueError
        A contract does not hold. The message names the passes and the fact.
    """

    given: frozenset[Fact]
    passes: tuple[Pass, ...]
    promised: frozenset[Fact]

    def __post_init__(self) -> None:
        established = set(self.given)
        broken: dict[Fact, str] = {}
        for each in self.passes:
            _check(f"{each.name} requires", each.requires, established, broken)
            broken |= dict.fromkeys(each.breaks, each.name)
            established = established - each.breaks | each.ensures
        _check("the order promises", self.promised, established, broken)

    def run(self, model: ir.Model, options: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Run all passes on a model in place; `options` maps the name of a pass to its keyword arguments."""
        for each in self.passes:
            each(model, **(options or {}).get(each.name, {}))


def _check(who: str, wanted: Iterable[Fact], established: Collection[Fact], broken: Mapping[Fact, str]) -> None:
    for fact in sorted(wanted):
        if fact not in established:
            why = f"{broken[fact]} before it breaks that" if fact in broken else "no pass before it ensures that"
            raise ValueError(f"{who} {fact.name} ({fact}), and {why}")
