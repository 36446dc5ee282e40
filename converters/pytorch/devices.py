"""Modules on a GPU: they are exported on the host, and trained where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from onnx_remat.errors import ConversionError
from onnx_remat.session.device_arrays import ALIGNMENT

from .arrays import view
from .outside import check_apart
from .private_state import pytree

HOST = torch.device("cpu")


def device_of(model: torch.nn.Module) -> torch.device:
    """Return the device of a module: the host, or the first CUDA device.

    Raises
    ------
    ConversionError
        Its tensors are on several devices, or on one that no session runs on.
    """
    found: dict[torch.device, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found.setdefault(tensor.device, name)
    if len(found) > 1:
        (one, first), (other, second), *_ = found.items()
        raise ConversionError(f"{first} is on {one} and {second} on {other}: move the module to one, model.to({one})")
    for device, name in found.items():
        if device.type == "cuda" and device.index:
            raise ConversionError(
                f"{name} is on {device}, and sessions run on the first device that they see: start Python with "
                f"CUDA_VISIBLE_DEVICES={device.index}"
            )
        if device.type not in ("cpu", "cuda"):
            raise ConversionError(f"{name} is on {device}: a step runs on the CPU or on CUDA; call model.cpu() first")
    return next(iter(found), HOST)


def check_provider() -> None:
    """Raise ModelError unless ONNX Runtime has CUDA here, before a step is planned for it."""
    from onnx_remat.ort import runtime  # takes memory, which a step on the CPU does not need

    runtime.check_device("CUDAExecutionProvider")


def readable(tensor: torch.Tensor) -> Any:
    """Return a contiguous tensor as a session reads it: as a numpy array, or on a device as a tensor without history.

    Both have the memory of the tensor; bfloat16 as its bits.
    """
    if tensor.device == HOST:
        return view(tensor)
    tensor = tensor.detach()
    return tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor


def finish_work(device: torch.device) -> None:
    """Wait for what PyTorch has launched on a device: a session runs on a stream of its own."""
    if device != HOST:
        torch.cuda.current_stream(device).synchronize()


def fits(tensor: torch.Tensor) -> bool:
    """Return whether a session reads a tensor where it lies: in one piece, on a device at a multiple of some bytes."""
    return tensor.is_contiguous() and (tensor.device == HOST or tensor.data_ptr() % ALIGNMENT == 0)


def in_one_piece(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that a session can read, a copy if this one does not fit."""
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor if fits(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def own_tensors(model: torch.nn.Module, loss: Any, users: Sequence[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Return the tensors of module, loss and optimizers, each once, by a name for messages."""
    found = [*model.named_parameters(), *model.named_buffers()]
    if isinstance(loss, torch.nn.Module):
        found += [(f"the loss's {name}", each) for name, each in [*loss.named_parameters(), *loss.named_buffers()]]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for user in users:
        for parameter, pieces in user.state.items():
            if whose := names.get(id(parameter)):
                found += [
                    (f"{slot} of {whose}", each) for slot, each in pieces.items() if isinstance(each, torch.Tensor)
                ]
    made: dict[int, tuple[str, torch.Tensor]] = {}
    for name, each in found:
        made.setdefault(id(each), (name, each))
    return dict(made.values())


def moved(batch: Any, device: torch.device) -> Any:
    """Return a batch of the same structure with its tensors on a device."""

    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    if isinstance(batch, torch.Tensor):
        return move(batch)
    return pytree.tree_map(move, dict(batch) if isinstance(batch, Mapping) else tuple(batch))


@contextmanager
def on_host(tensors: Mapping[str, torch.Tensor], device: torch.device) -> Iterator[None]:
    """Move tensors to the host, and back to their devices in the end; they stay the same objects.

    Within the block ``torch.autocast("cuda")`` computes on the host in the type that it would use on the device.

    Raises
    ------
    ConversionError
        Two of them share memory, which they would not do afterwards.
    """
    if device == HOST:
        yield
        return
    check_apart(tensors, tensors)
    before = {name: tensor.device for name, tensor in tensors.items()}
    try:
        for tensor in tensors.values():
            _move(tensor, HOST)
        with _autocast_on_host():
            yield
    finally:
        for name, tensor in tensors.items():
            _move(tensor, before[name])


def _move(tensor: torch.Tensor, device: torch.device) -> None:
    gradient = tensor.grad if tensor.is_leaf else None
    tensor.data = tensor.data.to(device)
    if gradient is not None:
        gradient.data = gradient.data.to(device)


@contextmanager
def _autocast_on_host() -> Iterator[None]:
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__
    moved_: list[bool] = []

    def entered(self: torch.autocast) -> Any:
        moved_.append(self.device == "cuda")
        if moved_[-1]:
            self.device = "cpu"
        return enter(self)

    def left(self: torch.autocast, *error: Any) -> Any:
        try:
            return leave(self, *error)
        finally:
            if moved_.pop():
                self.device = "cuda"

    torch.autocast.__enter__, torch.autocast.__exit__ = entered, left  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__, torch.autocast.__exit__ = enter, leave  # type: ignore[method-assign]
