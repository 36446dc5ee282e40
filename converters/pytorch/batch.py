"""The user's batch: its tensors by name, and their structure as arguments of the model."""

from __future__ import annotations

import inspect
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch

from onnx_remat.errors import ConversionError, UsageError
from onnx_remat.messages import Setting

from .. import names
from .conditions import Condition, failed
from .private_state import pytree


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as a flat list of named tensors, with the structure of the model's arguments.

    Attributes
    ----------
    names : tuple of str
        Names of the tensors, in order.
    tensors : tuple of torch.Tensor
    spec : pytree.TreeSpec
        Structure of the (positional, keyword) arguments.
    leaves : tuple
        All leaves of the structure: None in place of a tensor, else a constant.
    keys : tuple of str
        Keys of a mapping, in order; empty for positional arguments.
    """

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    keys: tuple[str, ...] = ()

    @staticmethod
    def of(example_inputs: Any, checked: Iterable[Any] = ()) -> Batch:
        """Return the batch of a tensor, a sequence of positional arguments, or a mapping of keyword arguments.

        Constants that are one of the objects in `checked` are not looked into again.

        Raises
        ------
        ConversionError
            An entry requires a gradient, is an array of numpy, or holds tensors in an object of another kind.
        UsageError
            It is none of these, or two tensors have one name.
        """
        if isinstance(example_inputs, Mapping):
            structure: tuple[tuple[Any, ...], dict[str, Any]] = ((), dict(example_inputs))
        elif isinstance(example_inputs, torch.Tensor):
            structure = ((example_inputs,), {})
        elif not isinstance(example_inputs, Iterable):
            kind = type(example_inputs).__name__
            raise UsageError(f"the batch is a {kind}: give a tensor, a sequence or a mapping of them")
        else:
            structure = (tuple(example_inputs), {})
        found, spec = pytree.tree_flatten_with_path(_plain(structure))
        known = {id(leaf) for leaf in checked}
        for path, leaf in found:
            if id(leaf) not in known:
                _check_leaf(path, leaf)
        tensors = [(_path(path), leaf) for path, leaf in found if isinstance(leaf, torch.Tensor)]
        counts = Counter(name for name, _ in tensors)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise UsageError(f"the batch has {twice[0]!r} twice, by keys with dots: rename one of them")
        leaves = tuple(_TENSOR if isinstance(leaf, torch.Tensor) else leaf for _, leaf in found)
        keys = tuple(example_inputs) if isinstance(example_inputs, Mapping) else ()
        return Batch(tuple(n for n, _ in tensors), tuple(t.detach() for _, t in tensors), spec, leaves, keys)

    def like(self, given: Any) -> Batch:
        """Return a batch with its keys in the order of this one's, which has the same structure and constants.

        Raises
        ------
        UsageError
            It has another structure, or another constant.
        """
        if isinstance(given, Mapping) and self.keys:
            if missing := [key for key in self.keys if key not in given]:
                raise UsageError(f"the batch has no {missing[0]!r}, which the example has")
            if more := [key for key in given if key not in self.keys]:
                raise UsageError(f"the batch has {more[0]!r}, which the example has not: leave it out")
            given = {key: given[key] for key in self.keys}
        made = Batch.of(given, self.leaves)
        if len(made.leaves) != len(self.leaves) or made.spec != self.spec or made.names != self.names:
            raise UsageError(
                f"the batch has another structure than the example: it has {', '.join(made.names) or 'no tensor'}"
            )
        for ours, theirs in zip(self.leaves, made.leaves, strict=True):
            if not _equal(ours, theirs):
                now, before = (_short(repr(each)) for each in (theirs, ours))
                raise UsageError(f"the batch has {now} in place of the constant {before}: make a new step")
        return made

    def check_dimensions(self, dynamic: Mapping[str, Mapping[int, str]]) -> None:
        """Raise UsageError unless every dynamic dimension exists and has an example size above one."""
        sizes = {name: tuple(tensor.shape) for name, tensor in zip(self.names, self.tensors, strict=True)}
        for name, axes in dynamic.items():
            if name not in sizes:
                raise UsageError(f"dynamic_dims: the batch has no input {name!r}, only {', '.join(sizes)}")
            for axis in axes:
                if not 0 <= axis < len(sizes[name]) or sizes[name][axis] < 2:
                    raise UsageError(
                        f"dynamic_dims: axis {axis} of {name}, of shape {sizes[name]}: give an existing axis, "
                        "and an example with two or more along it (a size of 1 is taken as fixed)"
                    )

    def sizes(self, dynamic: Mapping[str, Mapping[int, str]]) -> dict[str, int]:
        """Return the size of each dynamic dimension."""
        tensors = dict(zip(self.names, self.tensors, strict=True))
        return {dim: tensors[name].shape[axis] for name, axes in dynamic.items() for axis, dim in axes.items()}

    def resized(self, dynamic: Mapping[str, Mapping[int, str]], conditions: Sequence[Condition]) -> list[Batch]:
        """Return the batch with other sizes along all dynamic dimensions: with smaller ones, then with larger ones.

        A size is the next smaller from 2 on under which no condition fails, or if none is left, one more; a larger one
        is one more. A batch is left out if a condition fails for all of its sizes of some dimension.
        """

        def first(sizes: Callable[[int], Iterable[int]]) -> dict[str, int]:
            """Return the first size of each dimension that agrees with those before it; 0 if there is none."""
            found: dict[str, int] = {}
            for dim, size in self.sizes(dynamic).items():
                agree = (s for s in sizes(size) if failed(conditions, found | {dim: s}) is None)
                found[dim] = next(agree, 0)
            return found

        smaller, larger = first(lambda size: [*range(size - 1, 1, -1), size + 1]), first(lambda size: [size + 1])
        different = [smaller] if smaller == larger else [smaller, larger]
        return [self._sized(dynamic, sizes) for sizes in different if all(sizes.values())]

    def _sized(self, dynamic: Mapping[str, Mapping[int, str]], sizes: Mapping[str, int]) -> Batch:
        """Return the batch with these sizes of dynamic dimensions; an entry more is a copy of the first."""
        made = []
        for name, tensor in zip(self.names, self.tensors, strict=True):
            for axis, dim in dynamic.get(name, {}).items():
                if sizes[dim] < tensor.shape[axis]:
                    tensor = tensor.narrow(axis, 0, sizes[dim])
                else:
                    tensor = torch.cat([tensor, tensor.narrow(axis, 0, 1)], axis)
            made.append(tensor.contiguous())
        return replace(self, tensors=tuple(made))

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments with these tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if leaf is _TENSOR else leaf for leaf in self.leaves]
        positional, keyword = pytree.tree_unflatten(leaves, self.spec)
        return positional, keyword


def loss_of(
    model: Callable[..., Any],
    loss: Callable[[Any, Any], Any] | None,
    positional: tuple[Any, ...],
    keyword: dict[str, Any],
) -> tuple[Any, Any]:
    """Return the loss of a batch, and what the model returns.

    The loss is that of the model's output and the last argument, or what the model returns: the loss alone, as
    attribute ``loss`` or under the key ``"loss"``.
    """
    if loss is None:
        made = model(*positional, **keyword)
        found = made["loss"] if isinstance(made, Mapping) and "loss" in made else getattr(made, "loss", made)
        return found, made
    if keyword:
        *_, last = keyword
        target = keyword.pop(last)
    else:
        *first, target = positional
        positional = tuple(first)
    output = model(*positional, **keyword)
    _check_arguments(loss, output, target)
    return loss(output, target), output


def _check_arguments(loss: Callable[..., Any], *given: Any) -> None:
    """Raise ConversionError if a loss does not take the model's output and the batch's last argument."""
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):  # some functions written in C state none
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        raise ConversionError(
            "the loss is called with the model's output and the last entry of the batch, and does not take them ({}): "
            "change it, or pass {} if the model returns its loss",
            error,
            Setting("loss", None),
        ) from None


def parts_of(output: Any, wanted: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return tensors of a model's output by name.

    A name is a key, an attribute, or the position in a tuple; ``"output"`` is an output that is a single tensor.

    Raises
    ------
    UsageError
        The output has no such tensor; the message names those that it has.
    """
    if not wanted:
        return {}
    if isinstance(output, torch.Tensor):
        known: dict[str, Any] = {"output": output}
    elif isinstance(output, Mapping):
        known = {str(key): value for key, value in output.items()}
    elif isinstance(output, Sequence):
        known = dict(zip(getattr(output, "_fields", map(str, range(len(output)))), output, strict=True))
    else:
        known = _attributes(output)
    tensors = {name: value for name, value in known.items() if isinstance(value, torch.Tensor)}
    for name in wanted:
        if name not in tensors:
            raise UsageError(f"outputs: the model's output has no tensor {name!r}; it has {', '.join(tensors)}")
    return {name: tensors[name] for name in wanted}


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes that an object itself has, by name, also those in slots."""
    members = (pair for kind in type(value).__mro__ for pair in vars(kind).items())
    slots = [name for name, member in members if inspect.ismemberdescriptor(member) and hasattr(value, name)]
    return {name: getattr(value, name) for name in slots} | getattr(value, "__dict__", {})


_TENSOR = object()


def _plain(value: Any) -> Any:
    """Return a structure with dicts in place of mappings that pytree does not know.

    Such a mapping, a BatchEncoding for example, would be one constant of the step.
    """
    if isinstance(value, Mapping) and (type(value) is dict or type(value) not in pytree.SUPPORTED_NODES):
        return {key: _plain(each) for key, each in value.items()}
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


def _check_leaf(path: Sequence[Any], leaf: Any) -> None:
    """Raise ConversionError for a tensor that requires a gradient, an array, or an object that holds tensors."""
    if isinstance(leaf, torch.Tensor):
        if leaf.requires_grad and torch.is_grad_enabled():
            raise ConversionError(
                f"{_path(path)} of the batch requires a gradient, which a step does not hand back: pass it detached, "
                "or make what computed it a part of the model"
            )
        return
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in _NUMBERS:
        raise ConversionError(
            f"{_path(path)} of the batch is a numpy array, which would be a constant of the step: give a tensor, "
            "torch.from_numpy(array), or, of a setting that stays the same, a list, array.tolist()"
        )
    if _holds_tensor(leaf):
        called = ", or if the model only calls it, its method __call__" if callable(leaf) else ""
        raise ConversionError(
            f"{_path(path)} of the batch is a {type(leaf).__name__}, whose tensors would be constants of the step: "
            f"give a tuple, a list or a dict of them{called}"
        )


def _short(text: str) -> str:
    """Return a text on one line, of which the middle is left out if it is long."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]}...{line[-_LONGEST // 2 :]}"


_LONGEST = 80
_NUMBERS = "biufc"
"""Kinds of numpy's types of which there are tensors; arrays of texts and objects are constants."""

_DEPTH = 5
"""Levels of objects and containers in which to look for tensors: a graph of torch_geometric has them on the fourth."""


def _holds_tensor(value: Any) -> bool:
    """Return whether a value is a tensor, or an object or a container in which there is one, a level after the other.

    No object is looked into twice: many may refer to each other.
    """
    level, seen = {id(value): value}, set[int]()
    for _ in range(_DEPTH + 1):
        if any(isinstance(each, torch.Tensor) for each in level.values()):
            return True
        seen |= level.keys()
        level = {id(each): each for one in level.values() for each in _inside(one) if id(each) not in seen}
    return False


def _inside(value: Any) -> Iterable[Any]:
    """Return what an object or a container holds; code holds nothing."""
    if isinstance(value, _WITHOUT_TENSORS) or inspect.isroutine(value):
        return ()
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple | set | frozenset | deque) else _attributes(value).values()


_WITHOUT_TENSORS = (
    str, bytes, int, float, complex, type(None), np.ndarray, np.generic, torch.dtype, torch.device,
    type, ModuleType, partial, torch.nn.Module,
)  # fmt: skip


def _equal(ours: Any, theirs: Any) -> bool:
    """Return whether two constants are equal, NaN and NaN too; those that cannot be compared are not."""
    if ours is theirs:
        return True
    has_nan = all(isinstance(each, float | np.generic) and _is_float(each) for each in (ours, theirs))
    try:
        return np.array_equal(ours, theirs, equal_nan=has_nan)
    except Exception:
        return False


def _is_float(value: float | np.generic) -> bool:
    return np.asarray(value).dtype.kind in "fc"


def _path(path: Sequence[Any]) -> str:
    """Return `input.0` for a positional argument, or the name of a keyword argument, then the keys inside it."""
    top, first, *inner = (getattr(key, "idx", getattr(key, "key", None)) for key in path)
    head = names.batch(int(str(first))) if top == 0 else str(first)
    return ".".join([head, *map(str, inner)])
