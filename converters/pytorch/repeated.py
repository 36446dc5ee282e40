"""Does a step do the same in every run? Whatever Python decides in `forward` is traced once, and holds for ever.

The forward pass runs three times on tensors without data: where Python's and numpy's generators draw the least they
can, the most, and a third of it, each run with the numbers that the one before left in the modules (counters). A
decision by ``random() < p`` falls on either side. Not seen: what changes in later steps only, and generators of the
user's own that happen to draw alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, TypeAlias

import numpy as np
import torch

from onnx_remat.errors import ConversionError

from .outside import Seen
from .private_torch import FakeTensor, TorchDispatchMode, compiling, computed_now, pytree, traceback
from .refusals import here
from .rules.composites import Composites

_Call: TypeAlias = tuple[str, str, str, str]
"""Operator, its arguments, its module and the line of the user's code."""

_WORDS, _DRAWN = 624, 600
"""State of a Mersenne twister, and how many of its words are set: the others end loops that wait for another draw."""

_DRAWS = (0, 0x12DD9BB3, 0x6D78EF1D)
"""Words of that state that are drawn as the least number, as the largest, and as a third of it: whole numbers below any
limit, for which the largest does not do."""


class _Listing(TorchDispatchMode):
    """Lists what is called, in order, and what it reads of tensors with data."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.seen = Seen(set(), set())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """As of a `decisions.Watch`; compositions are listed, too."""
        yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves = pytree.tree_leaves((args, kwargs or {}))
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor):
                self.seen.add(leaf)
        module = str((traceback.current_meta.get("custom") or {}).get("module", ""))
        self.calls.append((str(func), " ".join(map(_told, leaves)), module, here()))
        if func._schema.is_mutable:  # not the user's own tensors
            args, kwargs = pytree.tree_map_only(torch.Tensor, _apart, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor with data."""
    if isinstance(tensor, FakeTensor):
        return tensor
    with computed_now():
        return tensor.detach().clone()


_FEW = 64


def _told(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf) if isinstance(leaf, int | float | str | None) else type(leaf).__name__
    values = []
    if not isinstance(leaf, FakeTensor) and leaf.numel() <= _FEW:
        with computed_now():
            values = leaf.tolist()
    return f"{leaf.dtype}{tuple(leaf.shape)}{values}"


def numbers(model: torch.nn.Module) -> list[tuple[torch.nn.Module, dict[str, Any]]]:
    """Plain numbers and texts that modules keep as attributes: counters, settings."""
    return [
        (module, {name: value for name, value in vars(module).items() if isinstance(value, bool | int | float | str)})
        for module in model.modules()
    ]


@contextmanager
def _drawing(word: int) -> Iterator[None]:
    """Python's and numpy's own generators draw numbers made of one word, and then go on as they were."""
    words = [*[word] * _DRAWN, *range(1, _WORDS - _DRAWN + 1)]
    python, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002  # users' code draws from it
    random.setstate((3, (*words, 0), None))
    np.random.set_state(("MT19937", np.array(words, np.uint32), 0, 0, 0.0))  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpys)  # noqa: NPY002


def check(forward: Callable[[TorchDispatchMode], object], model: torch.nn.Module) -> Seen:
    """Run a forward pass several times, on tensors without data.

    What the last run read of tensors with data is returned.

    Parameters
    ----------
    forward : callable
        Runs it under the mode that it is given, and leaves the modules as they then are.
    model : torch.nn.Module
        Plain numbers that its modules keep are as before, after.

    Raises
    ------
    ConversionError
        The runs differ: names the module.
    """
    before = numbers(model)
    runs: list[list[_Call]] = []
    try:
        for word in _DRAWS:
            listing = _Listing()
            with _drawing(word), compiling(), Composites(listing):
                forward(listing)
            runs.append(listing.calls)
            seen = listing.seen
    finally:
        for owner, own in before:
            vars(owner).update(own)
    modules = [{call[2] for call in run} for run in runs]

    def shared(call: _Call) -> int:
        """In how many runs its module takes part: the one that some runs leave out is to be named."""
        return sum(call[2] in each for each in modules)

    for calls in zip_longest(*runs):
        first, *others = calls
        if any(call is None or first is None or call[:3] != first[:3] for call in others):
            _, _, module, line = min((call for call in calls if call is not None), key=shared)
            of = f" in module {module!r}" if module else ""
            raise ConversionError(
                f"runs of the step differ{of}{line}: its Python code decides by random numbers, or by a number that "
                "it keeps (a counter), and a graph holds one decision for ever; decide with tensors, "
                "x * (torch.rand(()) < p) for instance, or switch it off in training"
            )
    return seen
