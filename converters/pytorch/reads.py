"""Reads of tensors outside the step, in a trace; see `outside`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from onnx_remat.errors import ConversionError

from .outside import Outside, in_memory, lasting, memory, shares_memory
from .private_torch import FakeTensor, FunctionalTensor, TorchDispatchMode, computed_now, pytree, traceback, was_changed
from .refusals import here, is_users, kept_parameter, running

_FRESH = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
"""Operators that ``torch.tensor(...)`` calls; its tensor is new in every run."""


@dataclass(frozen=True, slots=True)
class Read:
    """A tensor with data that a step reads.

    Attributes
    ----------
    tensor : torch.Tensor
        The user's tensor.
    alias : torch.Tensor
        The same memory, which requires no gradient.
    stand_in : torch.Tensor
        The tensor in its place in the trace.
    label : str
        Description of the tensor for messages.
    forward, fresh : bool
        Whether the forward pass read it; whether ``torch.tensor(...)`` made it.
    """

    tensor: torch.Tensor
    alias: torch.Tensor
    stand_in: FunctionalTensor
    label: str
    forward: bool
    fresh: bool


class Lift(TorchDispatchMode):
    """Replace tensors that are not inputs by traced ones, so that values computed from them may change in place.

    Attributes
    ----------
    reads : dict of int to Read
        The tensors read, by their identity.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: dict[int, Read] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def lifted(value: torch.Tensor) -> torch.Tensor:
            if isinstance(value, FunctionalTensor):
                return value
            if isinstance(value, FakeTensor):
                return FunctionalTensor.to_functional(value)
            return self._read(value, func in _FRESH).stand_in

        args, kwargs = pytree.tree_map_only(torch.Tensor, lifted, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _read(self, tensor: torch.Tensor, fresh: bool) -> Read:
        found = self.reads.get(id(tensor))
        if tensor.requires_grad and not fresh and torch.is_grad_enabled():
            raise kept_parameter(here())
        if found is None:
            with computed_now():
                alias = tensor.detach()
            phase = (traceback.current_meta.get("custom") or {}).get("phase")
            label = f"{called(tensor)} of shape {list(tensor.shape)}, read{here()}"
            stand_in = FunctionalTensor.to_functional(alias)
            found = self.reads[id(tensor)] = Read(tensor, alias, stand_in, label, phase == "forward", fresh)
        return found


@dataclass(slots=True)
class Seen:
    """Tensors with data that a run reads: identities, and addresses of their memory."""

    objects: set[int]
    memory: set[int]

    def add(self, tensor: torch.Tensor) -> None:
        """Add a tensor."""
        self.objects.add(id(tensor))
        self.memory.add(memory(tensor))


def outside(reads: Iterable[Read], again: Seen, trained: Mapping[str, torch.Tensor]) -> list[tuple[Read, Outside]]:
    """Return the tensors read in a trace that outlast it.

    Parameters
    ----------
    reads
        Reads of the trace, whose tensors still exist.
    again
        Reads of another forward pass. Memory that both passes read existed before them. The backward pass and the
        update do not run again: of their reads, only tensors made by ``torch.tensor(...)`` count as new.
    trained
        Parameters that the step updates, by name.

    Raises
    ------
    ConversionError
        The step changes one of them.
    """
    made: list[tuple[Read, Outside]] = []
    names = {memory(parameter): name for name, parameter in trained.items()}
    for read in reads:
        new = memory(read.tensor) not in again.memory if read.forward else read.fresh
        if new or not read.tensor.numel():
            continue
        if was_changed(read.stand_in):
            raise ConversionError(
                f"{read.label}, is changed by the step, but is not in the model: make it a buffer of the model "
                "(register_buffer) or change it between steps; put a network that is only read into eval mode"
            )
        if (name := names.get(memory(read.tensor))) is not None:
            raise shares_memory(read.label, f"parameter {name}")
        lasts = id(read.tensor) in again.objects
        one = lasting(read.label, read.tensor, read.alias) if lasts else in_memory(read.label, read.alias)
        made.append((read, one))
    return made


def called(tensor: torch.Tensor) -> str:
    """Return the name of a tensor in the code that runs: its path in a network, or its variable."""
    inner: torch.nn.Module | None = None
    path, owner, variable = "", "", ""
    for frame, _ in running():
        local, own = frame.f_locals, frame.f_locals.get("self")
        if isinstance(own, torch.nn.Module):
            if inner is None:
                attributes = (own._parameters, own._buffers, vars(own))
                path = next((n for each in attributes for n, value in each.items() if value is tensor), "")
                inner = own if path else None
                owner = type(own).__name__
            elif own is not inner:
                prefix = next((n for n, module in own.named_modules() if module is inner), "")
                if prefix:
                    inner, path, owner = own, f"{prefix}.{path}", type(own).__name__
        if not variable and is_users(frame):
            variable = next((n for each in (local, frame.f_globals) for n, v in each.items() if v is tensor), "")
    if path:
        return f"{path} of a {owner}"
    return f"tensor {variable}" if variable else "a tensor"
