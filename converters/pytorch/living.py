"""Tensors that exist when this process forks: both processes know them by their addresses."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.utils.weak import TensorWeakRef

from onnx_remat.process import forked

from .outside import Outside, in_memory, lasting, memory


def forks() -> bool:
    """Return whether a forked copy of this process can run PyTorch.

    After a fork, PyTorch refuses to differentiate if this process has threads for an accelerator.
    """
    return forked.available() and not torch.accelerator.is_available()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor outside the step is in the other process.

    Attributes
    ----------
    label : str
        Description of the tensor for messages.
    identity : int
        ``id`` of the tensor; 0 where each run of the step makes a new tensor in the same memory.
    address : int
        Of its memory.
    dtype, offset, sizes, strides
        The part of the memory that it shows.
    """

    label: str
    identity: int
    address: int
    dtype: torch.dtype
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Living:
    """The tensors of this process.

    Attributes
    ----------
    tensors : mapping of int to torch.Tensor
        By identity.
    memory : mapping of int to torch.Tensor
        One tensor for each address of memory.
    """

    tensors: Mapping[int, torch.Tensor]
    memory: Mapping[int, torch.Tensor]

    @staticmethod
    def now() -> Living:
        """Return all tensors of Python; as long as the result exists, none is freed."""
        found = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tensors of an earlier trace have no address
            return Living({id(each): each for each in found}, {_address(each): each for each in found})

    def place(self, one: Outside) -> Place | None:
        """Return the place of a tensor, None if only this process has it or its memory."""
        alias, lasts = one.alias, isinstance(one.now, TensorWeakRef)
        tensor = one.now()
        if tensor is None or (id(tensor) not in self.tensors if lasts else memory(alias) not in self.memory):
            return None
        dense = alias.layout == torch.strided
        return Place(
            one.label, id(tensor) if lasts else 0, memory(alias), alias.dtype,
            int(alias.storage_offset()) if dense else 0, tuple(alias.shape), alias.stride() if dense else (),
        )  # fmt: skip

    def outside(self, place: Place) -> Outside:
        """Return the tensor at a place."""
        if place.identity:
            tensor = self.tensors[place.identity]
            return lasting(place.label, tensor, tensor.detach())
        storage = self.memory[place.address].untyped_storage()
        alias = torch.empty(0, dtype=place.dtype).set_(storage, place.offset, place.sizes, place.strides)
        return in_memory(place.label, alias)


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory; 0 for one without data, such as a tensor of a trace."""
    try:
        return memory(tensor)
    except (RuntimeError, NotImplementedError):
        return 0
