"""Which runs of a forward pass a tensor without data depends on; see `repeated`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from .private_torch import FakeTensor, pytree
from .reads import called
from .refusals import here

_OF_SHAPES = {
    f"aten::{name}"
    for name in (
        "empty_like", "full_like", "ones_like", "zeros_like", "new_empty", "new_empty_strided", "new_full", "new_ones",
        "new_zeros",
    )
}  # fmt: skip
"""Operators that read the shape and the type of a tensor alone."""


class Origins:
    """For the memory of each tensor without data, the runs that it depends on.

    A run's tensors are its batch, random draws, trained parameters, and what it changes in place: constants computed
    from a buffer or a frozen weight, such as a table of angles, are the same in every run.

    Attributes
    ----------
    run : int
        Number of the current run.
    carried : str
        The first read of a tensor of an earlier run, in words.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self._inputs = {_memory(tensor) for tensor in inputs}
        self._of: dict[int, frozenset[int]] = {}
        self._module: set[int] = set()
        self._alive: list[torch.Tensor] = []  # so that no other tensor has the same memory
        self.run = 0
        self.carried = ""

    def began(self, module: Mapping[str, torch.Tensor], trained: Mapping[str, object]) -> None:
        """Add the module's tensors of the current run, of which those by the names in `trained` are parameters."""
        for name, tensor in module.items():
            self._module.add(_memory(tensor))
            self._alive.append(tensor)
            if name in trained:
                self._of[_memory(tensor)] = frozenset({self.run})

    def of(self, tensor: torch.Tensor) -> frozenset[int]:
        """Return the runs that a tensor depends on."""
        if not isinstance(tensor, FakeTensor):
            return frozenset()
        place = _memory(tensor)
        return frozenset({self.run}) if place in self._inputs else self._of.get(place, frozenset())

    def computed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> None:
        """Add the results of an operator, and what it changed in place."""
        read = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
        runs: frozenset[int] = frozenset()
        if func._schema.name not in _OF_SHAPES:
            runs = runs.union(*map(self.of, read))
        if torch.Tag.nondeterministic_seeded in func.tags:
            runs |= {self.run}
        if not self.carried and min(runs, default=self.run) < self.run:
            whose = next(tensor for tensor in read if min(self.of(tensor), default=self.run) < self.run)
            self.carried = f"{called(whose)} of shape {list(whose.shape)}, read{here()}"
        changed = list(_changed(func, args, kwargs))
        for tensor in (*pytree.tree_leaves(made), *changed):
            if not isinstance(tensor, FakeTensor) or (place := _memory(tensor)) in self._inputs:
                continue
            own = {self.run} if place in self._module and any(tensor is each for each in changed) else set()
            if runs or own:
                self._of[place] = self._of.get(place, frozenset()) | runs | own
                self._alive.append(tensor)


def _changed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the tensors that an operator changes in place."""
    for place, formal in enumerate(func._schema.arguments):
        if formal.alias_info is not None and formal.alias_info.is_write:
            yield from pytree.tree_leaves(args[place] if place < len(args) else kwargs.get(formal.name))


def _memory(tensor: torch.Tensor) -> int:
    """Return the identity of the memory that a tensor without data stands for; views share it."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)
