"""The user's tensors and arrays that hold memory outside the step of which each run makes a new tensor."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.weak import TensorWeakRef

from onnx_remat.errors import ConversionError

from .outside import Outside


@dataclass(frozen=True, slots=True)
class Held:
    """A function that returns a tensor in memory of the user's as long as one of the holders has that memory.

    Attributes
    ----------
    holders : tuple of callable
        Weak references to tensors and arrays.
    address : int
    dtype, sizes, strides
        The part of the memory that the tensor shows.
    """

    holders: tuple[Callable[[], Any], ...]
    address: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def __call__(self) -> torch.Tensor | None:
        """Return the tensor, or None where all holders are gone or have other memory.

        In the memory of an array it is a copy: a session keeps what it reads, and would keep the array.
        """
        for holder in self.holders:
            found = holder()
            if found is not None and self.is_in(found):
                memory = found if isinstance(found, torch.Tensor) else torch.from_numpy(_whole(found))
                storage = memory.untyped_storage()
                first = (self.address - storage.data_ptr()) // self.dtype.itemsize
                made = torch.empty(0, dtype=self.dtype, device=storage.device)
                made.set_(storage, first, self.sizes, self.strides)
                return made if memory is found else made.clone()
        return None

    def is_in(self, holder: torch.Tensor | np.ndarray) -> bool:
        """Return whether a holder has the memory."""
        last = sum((size - 1) * step for size, step in zip(self.sizes, self.strides, strict=True))
        address, size = _memory(holder)
        return address <= self.address and self.address + (last + 1) * self.dtype.itemsize <= address + size


def held(outside: Mapping[str, Outside]) -> dict[str, Outside]:
    """Return the tensors outside the step, of which none keeps memory that the user no longer has.

    Raises
    ------
    ConversionError
        No tensor or array has the memory.
    """
    made = dict(outside)
    loose = {name: one for name, one in outside.items() if not isinstance(one.now, TensorWeakRef)}
    if not loose:
        return made
    gc.collect()  # frees what the trace left of them
    mine = {id(one.alias) for one in outside.values()}
    there = [each for each in _tensors_and_arrays() if id(each) not in mine]
    for name, one in loose.items():
        alias = one.alias
        part = Held((), alias.data_ptr(), alias.dtype, tuple(alias.shape), alias.stride())
        holders = tuple(_reference(each) for each in there if part.is_in(each))
        if not holders:
            raise ConversionError(
                f"{one.label}, is made in each run from memory that no tensor and no array holds: make it once, before "
                "the step"
            )
        form = alias.new_empty(()).expand(alias.shape)
        made[name] = replace(one, alias=form, now=replace(part, holders=holders))
    return made


def _memory(holder: torch.Tensor | np.ndarray) -> tuple[int, int]:
    """Return the address and the size of all memory of a tensor or an array; sizes of 0 for tensors without it."""
    if isinstance(holder, torch.Tensor):
        try:
            return holder.untyped_storage().data_ptr(), holder.untyped_storage().nbytes()
        except (RuntimeError, NotImplementedError):  # sparse, or of an earlier trace
            return 0, 0
    whole = _whole(holder)
    return whole.ctypes.data, whole.nbytes


def _whole(array: np.ndarray) -> np.ndarray:
    """Return the array of which this is a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _reference(holder: torch.Tensor | np.ndarray) -> Callable[[], Any]:
    return TensorWeakRef(holder) if isinstance(holder, torch.Tensor) else weakref.ref(holder)


def _tensors_and_arrays() -> Iterator[Any]:
    """Yield all that Python's objects refer to; the collector does not track arrays, and tuples or dicts of them."""
    more, seen = gc.get_objects(), set()
    yield from (each for each in more if issubclass(type(each), torch.Tensor))
    while more:
        untracked = {id(each): each for each in gc.get_referents(*more) if not gc.is_tracked(each)}
        more = [each for key, each in untracked.items() if key not in seen and type(each) in (tuple, dict)]
        arrays = [each for key, each in untracked.items() if key not in seen and issubclass(type(each), np.ndarray)]
        yield from arrays
        seen |= {id(each) for each in (*more, *arrays)}
