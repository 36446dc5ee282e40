"""Tensors outside the step: those of a teacher network, an average of the weights, class weights of a loss.

The step reads them, but they are in neither the module nor the optimizer nor the batch. The user's code may change them
between steps. Therefore every step reads them again, or a warning states that it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.utils.weak import TensorWeakRef

from onnx_remat.errors import ConversionError, UsageError
from onnx_remat.session.apart import sharing


@dataclass(frozen=True, slots=True)
class Outside:
    """A tensor outside the step.

    Attributes
    ----------
    label : str
        Description of the tensor for messages.
    alias : torch.Tensor
        Its memory at the conversion.
    now : callable
        Function that returns the tensor itself, or None if it no longer exists because another replaced it.
    """

    label: str
    alias: torch.Tensor
    now: Callable[[], torch.Tensor | None]

    def renewed(self) -> Outside:
        """Return it with the memory that the tensor has now, after it moved to another device."""
        tensor = self.now()
        return self if tensor is None else replace(self, alias=tensor.detach())

    def current(self) -> torch.Tensor:
        """Return the current tensor.

        Raises
        ------
        UsageError
            The tensor no longer exists, or has another shape, dtype or device.
        """
        tensor, form = self.now(), (self.alias.shape, self.alias.dtype, self.alias.device, self.alias.layout)
        if tensor is None:
            raise UsageError(
                f"{self.label}, was replaced or is gone since the step was made: change it in place, "
                "tensor.copy_(new), or make a new step"
            )
        if (tensor.shape, tensor.dtype, tensor.device, tensor.layout) != form:
            raise UsageError(
                f"{self.label}, is now {tensor.dtype} of shape {list(tensor.shape)} on {tensor.device}: make a new step"
            )
        return tensor


def check_lasting(outside: Mapping[str, Outside], moved: Mapping[str, torch.Tensor]) -> None:
    """Raise ConversionError for a tensor that each run of the step makes again, in the memory of one that moves."""
    places = {memory(tensor): name for name, tensor in moved.items()}
    for one in outside.values():
        if not isinstance(one.now, TensorWeakRef) and (name := places.get(memory(one.alias))):
            raise ConversionError(
                f"{one.label}, is a part of {name}, which moves to the device: read {name} itself, or make the loss a "
                "part of the model"
            )


def shares_memory(label: str, whose: str) -> ConversionError:
    """Return the error for a tensor outside the step that shares memory with a tensor that the step updates."""
    return ConversionError(
        f"{label}, shares memory with {whose}, which the step updates: read it through the module, or clone it"
    )


def memory(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 for a tensor without memory."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def lasting(label: str, tensor: torch.Tensor, alias: torch.Tensor) -> Outside:
    """Return a tensor of the user's, known as long as it exists, and its memory."""
    return Outside(label, alias, TensorWeakRef(tensor))


def in_memory(label: str, alias: torch.Tensor) -> Outside:
    """Return memory of the user's, of which each run of the step makes a new tensor."""
    return Outside(label, alias, partial(_same, alias))


def _same(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor."""
    return tensor


def check_tensors_apart(tensors: Mapping[str, torch.Tensor], renewed: Iterable[str]) -> None:
    """Raise UsageError if a tensor that is updated in place shares memory with another: the plan decides the order of
    reads."""
    if pair := sharing(((t.data_ptr(), _reach(t), name) for name, t in tensors.items()), set(renewed)):
        raise UsageError(
            f"{pair[0]} and {pair[1]} share memory: make them one parameter (a.weight = b.weight), or give one memory "
            "of its own (a.data = a.data.clone())"
        )


def _reach(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
