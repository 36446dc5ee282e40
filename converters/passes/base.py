"""`Pass`: a rewrite of a step with its contract; `Order`: passes one after the other, each contract kept.

A contract names facts about a step: which a pass requires, which hold once it has run, and which it breaks. An order
that runs a pass where a fact it requires does not hold, or ends without a fact it promises, cannot be made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import onnx_ir as ir


class Fact(StrEnum):
    """What may hold of a step."""

    SHAPES = "every value has a shape"
    PHASES = "every node is labelled with its phase"
    STATED = "constants are stated in the file, none is made in the run"
    SAFE = "no form that ONNX Runtime computes wrongly"
    LEAN = "nothing is computed twice, for nobody, or without effect"
    ORDERED = "sums into rows keep every term"
    SOFTMAX = "no gradient of a softmax holds a matrix of zeros"
    LATE = "large constants of the backward pass wait for the loss"
    MASKS = "every Dropout in training has a reader of its mask"


@dataclass(frozen=True, slots=True)
class Pass:
    """A rewrite of a step, in place.

    Attributes
    ----------
    run : callable
        Takes the model, then options by keyword.
    requires, ensures, breaks : frozenset of Fact
        What must hold before; what holds afterwards; what may no longer hold.
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
        """One sentence."""
        return " ".join((self.run.__doc__ or "").strip().partition("\n\n")[0].split())


def rewrite(
    requires: Collection[Fact] = (), ensures: Collection[Fact] = (), breaks: Collection[Fact] = ()
) -> Callable[[Callable[..., None]], Pass]:
    """Make a function the pass with this contract."""
    return lambda run: Pass(run, frozenset(requires), frozenset(ensures), frozenset(breaks))


@dataclass(frozen=True, slots=True)
class Order:
    """Passes in the order in which they run.

    Attributes
    ----------
    given : frozenset of Fact
        What holds before the first.
    passes : tuple of Pass
    promised : frozenset of Fact
        What holds after the last.

    Raises
    ------
    ValueError
        A contract is not kept: the message names the passes and the fact.
    """

    given: frozenset[Fact]
    passes: tuple[Pass, ...]
    promised: frozenset[Fact]

    def __post_init__(self) -> None:
        held = set(self.given)
        broken: dict[Fact, str] = {}
        for each in self.passes:
            _check(f"{each.name} requires", each.requires, held, broken)
            broken |= dict.fromkeys(each.breaks, each.name)
            held = held - each.breaks | each.ensures
        _check("the order promises", self.promised, held, broken)

    def run(self, model: ir.Model, options: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Run all passes on a model, in place, with options by the names of passes."""
        for each in self.passes:
            each(model, **(options or {}).get(each.name, {}))


def _check(who: str, wanted: Iterable[Fact], held: Collection[Fact], broken: Mapping[Fact, str]) -> None:
    for fact in sorted(wanted):
        if fact not in held:
            why = f"{broken[fact]} before it breaks that" if fact in broken else "no pass before it ensures that"
            raise ValueError(f"{who} {fact.name} ({fact}), and {why}")
