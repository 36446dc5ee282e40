"""Naming convention of a training step's inputs and outputs: which output is the next value of which input.

A step model's inputs are parameters, buffers and optimizer state by name, and the batch. Its outputs are the loss and
``new.<name>`` for every state ``<name>`` (``newbuf.<name>`` for a buffer in older files), or ``grad.<name>`` where the
update is left to the caller. Training models of onnxruntime-training sum gradients in inputs instead. This module
imports the standard library only: the measured process needs it too.
"""

from __future__ import annotations

from collections.abc import Iterable

NEW = "new."
"""Prefix of the output that is the next value of an input."""

RENEWALS = (NEW, "newbuf.")
"""Every such prefix that is recognised."""

GRADIENT = "grad."
"""Prefix of the output that is the gradient of the loss with respect to an input."""

WEIGHT = "gradient_weight"
"""Input of a step that sums its gradients, see `split.accumulating`: their factor in the sum."""

_SUM = "_grad.accumulation.buffer"
"""Suffix of the input in which onnxruntime-training sums the gradient of the parameter named before."""


class Unused:
    """Names that are not in use yet: a wish itself, or the wish with the lowest number that makes it one.

    >>> names = Unused(["a"])
    >>> names.fresh("a"), names.fresh("a"), names.fresh("b")
    ('a_2', 'a_3', 'b')
    """

    def __init__(self, taken: Iterable[str], first: int = 2) -> None:
        self._taken, self._first = set(taken), first
        self._next: dict[str, int] = {}  # by wish: unnamed nodes of one op all wish the same name

    def fresh(self, wish: str) -> str:
        """Return an unused name similar to a wish; from then on it is in use."""
        name, number = wish, self._next.get(wish, self._first)
        while name in self._taken:
            name, number = f"{wish}_{number}", number + 1
        self._taken.add(name)
        self._next[wish] = number
        return name


def renewals(inputs: Iterable[str], outputs: Iterable[str]) -> dict[str, str]:
    """Return the input whose next value each output is.

    >>> renewals(["w", "state.w.exp_avg", "input.0"], ["loss", "new.w", "new.state.w.exp_avg"])
    {'new.w': 'w', 'new.state.w.exp_avg': 'state.w.exp_avg'}
    """
    known = set(inputs)
    pairs = ((name, name.removeprefix(prefix)) for name in outputs for prefix in RENEWALS if name.startswith(prefix))
    return {name: target for name, target in pairs if target in known}


def gradients(outputs: Iterable[str]) -> dict[str, str]:
    """Return the input with respect to which each output is the gradient.

    >>> gradients(["loss", "grad.w"])
    {'grad.w': 'w'}
    """
    return {name: name.removeprefix(GRADIENT) for name in outputs if name.startswith(GRADIENT)}


def gradient_sums(inputs: Iterable[str]) -> dict[str, str]:
    """Return the parameter whose gradient onnxruntime-training sums in each input.

    >>> gradient_sums(["w", "w_grad.accumulation.buffer"])
    {'w_grad.accumulation.buffer': 'w'}
    """
    return {name: name.removesuffix(_SUM) for name in inputs if name.endswith(_SUM)}
