"""The batch that a user gave: its tensors by name, and the structure that the model takes them in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from onnx_remat.errors import ConversionError

from .. import names
from .private_torch import pytree


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch as a flat list of tensors with names, and how to hand it to the model.

    Attributes
    ----------
    names : tuple of str
        Of the tensors, in order.
    tensors : tuple of torch.Tensor
    spec : pytree.TreeSpec
        Structure of (positional, keyword) arguments.
    leaves : tuple
        All leaves of the structure: None where a tensor goes, else a fixed value.
    """

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    @staticmethod
    def of(example_inputs: Any) -> Batch:
        """Flatten what the user gave: a tensor, a sequence of positional or a mapping of keyword arguments."""
        if isinstance(example_inputs, Mapping):
            structure: tuple[tuple[Any, ...], dict[str, Any]] = ((), dict(example_inputs))
        elif isinstance(example_inputs, torch.Tensor):
            structure = ((example_inputs,), {})
        elif not isinstance(example_inputs, Iterable):
            kind = type(example_inputs).__name__
            raise ConversionError(f"the batch is a {kind}: give a tensor, a sequence or a mapping of them")
        else:
            structure = (tuple(example_inputs), {})
        found, spec = pytree.tree_flatten_with_path(structure)
        tensors = [(_path(path), leaf) for path, leaf in found if isinstance(leaf, torch.Tensor)]
        leaves = tuple(_TENSOR if isinstance(leaf, torch.Tensor) else leaf for _, leaf in found)
        return Batch(tuple(n for n, _ in tensors), tuple(t.detach() for _, t in tensors), spec, leaves)

    def check_dimensions(self, dynamic: Mapping[str, Mapping[int, str]]) -> None:
        """Raise ConversionError unless every dynamic dimension exists and has an example size above one."""
        sizes = {name: tuple(tensor.shape) for name, tensor in zip(self.names, self.tensors, strict=True)}
        for name, axes in dynamic.items():
            if name not in sizes:
                raise ConversionError(f"dynamic_dims: the batch has no input {name!r}, only {', '.join(sizes)}")
            for axis in axes:
                if not 0 <= axis < len(sizes[name]) or sizes[name][axis] < 2:
                    raise ConversionError(
                        f"dynamic_dims: axis {axis} of {name}, of shape {sizes[name]}: give an existing axis, "
                        "and an example with two or more along it (a size of 1 is taken as fixed)"
                    )

    def larger(self, dynamic: Mapping[str, Mapping[int, str]]) -> Batch:
        """The batch with one more along every dynamic dimension, the first entry repeated."""
        made = []
        for name, tensor in zip(self.names, self.tensors, strict=True):
            for axis in dynamic.get(name, {}):
                tensor = torch.cat([tensor, tensor.narrow(axis, 0, 1)], axis)
            made.append(tensor)
        return replace(self, tensors=tuple(made))

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments with these tensors in their places."""
        rest = iter(tensors)
        leaves = [next(rest) if leaf is _TENSOR else leaf for leaf in self.leaves]
        positional, keyword = pytree.tree_unflatten(leaves, self.spec)
        return positional, keyword


_TENSOR = object()


def _path(path: Sequence[Any]) -> str:
    """`input.0` for a positional argument, its name for a keyword argument, then the keys inside it."""
    top, first, *inner = (getattr(key, "idx", getattr(key, "key", None)) for key in path)
    head = names.batch(int(str(first))) if top == 0 else str(first)
    return ".".join([head, *map(str, inner)])
