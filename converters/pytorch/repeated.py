"""Check that a step does the same in every run: a trace fixes every Python decision in `forward`.

The forward pass runs three times on tensors without data, with draws of Python's and numpy's generators fixed to the
least number, the largest, and a third of it. Each run starts from the numbers that the run before left in the modules
(counters). A decision by ``random() < p`` then falls on both sides. The check misses changes in later steps, and equal
draws of the user's own generators.

Two more runs leave all that they store. The last must not depend on tensors that an earlier one computed from its batch
or its weights: a graph makes them again in every step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, TypeAlias

import numpy as np
import torch

from onnx_remat.errors import ConversionError

from .carried import Origins
from .private_torch import (
    FakeTensor,
    FunctionalTensor,
    TorchDispatchMode,
    compiling,
    computed_now,
    pytree,
    traceback,
)
from .reads import Seen, called
from .refusals import here, kept_outside
from .rules.composites import Composites

_Call: TypeAlias = tuple[str, str, str, str]
"""Operator, its arguments, its module and the line of the user's code."""

_WORDS, _DRAWN = 624, 600
"""Words in the state of a Mersenne twister, and words that are set: the others end loops that wait for another draw."""

_DRAWS = (0, 0x12DD9BB3, 0x6D78EF1D)
"""State words that draw the least number, the largest, and a third of it; the last suits integers below any limit, for
which the largest is rejected."""


class Listing(TorchDispatchMode):
    """List the calls in order, and the tensors with data that they read; tell `origins` what depends on what.

    Attributes
    ----------
    calls : list
    seen : Seen
    squeezed : list of int
        Ranks of the tensors that lost all their dimensions of size one.
    origins : Origins
    """

    def __init__(self, origins: Origins) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.seen = Seen(set(), set())
        self.squeezed: list[int] = []
        self.origins = origins

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do nothing, unlike `decisions.Watch`: compositions are listed, too."""
        yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves = pytree.tree_leaves((args, kwargs or {}))
        for leaf in leaves:
            if isinstance(leaf, FunctionalTensor):
                raise kept_outside(f"{called(leaf)} of shape {list(leaf.shape)}, read{here()}")
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor):
                self.seen.add(leaf)
        module = str((traceback.current_meta.get("custom") or {}).get("module", ""))
        self.calls.append((str(func), " ".join(map(_describe, leaves)), module, here()))
        if func._schema.is_mutable:  # spares the user's own tensors
            args, kwargs = pytree.tree_map_only(torch.Tensor, _apart, (args, kwargs or {}))
        made = func(*args, **(kwargs or {}))
        self.origins.computed(func, args, kwargs or {}, made)
        if func is torch.ops.aten.squeeze.default:
            self.squeezed.append(made.dim())
        return made


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor with data."""
    if isinstance(tensor, FakeTensor):
        return tensor
    with computed_now():
        return tensor.detach().clone()


_FEW = 64


def _describe(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf) if isinstance(leaf, int | float | str | None) else type(leaf).__name__
    values = []
    if not isinstance(leaf, FakeTensor) and leaf.numel() <= _FEW:
        with computed_now():
            values = leaf.tolist()
    return f"{leaf.dtype}{tuple(leaf.shape)}{values}"


def numbers(model: torch.nn.Module) -> list[tuple[torch.nn.Module, dict[str, Any]]]:
    """Return plain numbers and texts in attributes of modules: counters, settings."""
    return [
        (module, {name: value for name, value in vars(module).items() if isinstance(value, bool | int | float | str)})
        for module in model.modules()
    ]


@contextmanager
def _drawing(word: int) -> Iterator[None]:
    """Let Python's and numpy's generators draw numbers of one state word, and restore them afterwards."""
    words = [*[word] * _DRAWN, *range(1, _WORDS - _DRAWN + 1)]
    python, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002  # users' code draws from it
    random.setstate((3, (*words, 0), None))
    np.random.set_state(("MT19937", np.array(words, np.uint32), 0, 0, 0.0))  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpys)  # noqa: NPY002


def check(forward: Callable[[Listing, bool], Iterable[torch.Tensor]], inputs: Sequence[torch.Tensor]) -> Seen:
    """Run a forward pass several times on tensors without data, and compare the runs.

    Return the tensors with data that the last compared run read.

    Parameters
    ----------
    forward : callable
        Function that runs the pass under a mode, and returns its results. Modules keep the numbers that it stores, and
        all else only if its second argument is false.
    inputs : sequence of torch.Tensor
        The batch: results depend on it, and on the module's tensors.

    Raises
    ------
    ConversionError
        The runs differ, and the message names the module; or results depend on tensors of an earlier run.
    """
    runs: list[list[_Call]] = []
    origins = Origins(inputs)
    for number, word in enumerate((*_DRAWS, _DRAWS[-1], _DRAWS[-1])):
        listing = Listing(origins)
        origins.run = number
        restored = number < len(_DRAWS)
        with _drawing(word), compiling(), Composites(listing):
            results = forward(listing, restored)
        if any(min(origins.of(result), default=number) < number for result in results):
            raise ConversionError(
                f"{origins.carried}, is of the step before, and a graph keeps only what is in the model: make it a "
                "buffer of the model (register_buffer), which the forward pass may assign or change in place"
            )
        if restored:
            runs.append(listing.calls)
            seen = listing.seen
    modules = [{call[2] for call in run} for run in runs]

    def shared(call: _Call) -> int:
        """Return the number of runs with the call's module: the error names the module that some runs omit."""
        return sum(call[2] in each for each in modules)

    for calls in zip_longest(*runs):
        first, *others = calls
        if any(call is None or first is None or call[:3] != first[:3] for call in others):
            _, _, module, line = min((call for call in calls if call is not None), key=shared)
            of = f" in module {module!r}" if module else ""
            raise ConversionError(
                f"runs of the step differ{of}{line}: its Python code decides by random numbers, or by a stored "
                "number (a counter), and a graph contains one fixed decision: decide with tensors, "
                "x * (torch.rand(()) < p) for instance, or switch it off in training"
            )
    return seen
