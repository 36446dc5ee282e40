"""`budgeted` of a module on the fake device, in a process of `here.environment`: JSON in and out.

PyTorch here is built without CUDA. A tensor of class `Tensor` therefore says that it lies on a device, where `mirror`
has its bytes for a session; `Tensor.to` moves between the two by changing the class.

In: ``how``: "device", "accumulate" in micro-batches, "host" with batches on the host; ``budget``. Out: ``state`` after
some steps, as lists, of the module trained so, and ``torch``, as PyTorch computes it on the CPU; ``devices`` of all
tensors then; the bytes of a parameter, ``value``; how many ``nodes`` run and how many are ``kernels``; ``live`` bytes
of the device that the step took besides tensors, and what its ``report`` foresees for both; whether another process
still ``holds`` the device; or ``error``.
"""

from __future__ import annotations

import json
import sys
from math import prod
from typing import Any

import torch
from onnx_remat.converters.pytorch import budgeted, devices
from torch import nn

from onnx_remat.errors import OnnxRematError
from onnx_remat.ort.libraries import load_cuda
from onnx_remat.process import worker
from onnx_remat.session.cuda_memory import Block
from onnx_remat.session.session import Session
from tests.support.fake_cuda.here import Books

CUDA = torch.device("cuda", 0)
STEPS = 4
SHAPE = 300, 350
"""Of parameters and batches: a thousandth of the step's memory, by which small values may grow, has room for some."""


class Tensor(torch.Tensor):
    """A tensor that lies on the device."""

    device = property(lambda self: CUDA)

    def data_ptr(self) -> int:
        return mirror(self).address

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        shown = plain(self).numpy()
        return {"shape": shown.shape, "typestr": shown.dtype.str, "data": (self.data_ptr(), False), "version": 2}


_MIRRORS: dict[int, tuple[torch.Tensor, Block]] = {}
"""What each tensor has on the device, by its address on the host."""


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the host."""
    return tensor.detach().as_subclass(torch.Tensor)


def mirror(tensor: torch.Tensor) -> Block:
    """What a tensor has on the device."""
    host = plain(tensor)
    if host.data_ptr() not in _MIRRORS:
        _MIRRORS[host.data_ptr()] = host, Block(host.nbytes)
        _MIRRORS[host.data_ptr()][1].write(0, host.numpy())
    return _MIRRORS[host.data_ptr()][1]


_move_to = torch.Tensor.to


def _to(self: torch.Tensor, *where: Any, **how: Any) -> torch.Tensor:
    if not (where and isinstance(where[0], torch.device)):
        return _move_to(self, *where, **how)
    if self.device == where[0] and not how.get("copy"):
        return self
    return plain(self).clone().as_subclass(Tensor if where[0] == CUDA else torch.Tensor)


def _move(tensor: torch.Tensor, device: torch.device) -> None:
    tensor.data = plain(tensor).clone()
    kind = nn.Parameter if tensor.requires_grad else torch.Tensor
    tensor.__class__ = Tensor if device == CUDA else kind


def _execute(self: Session, feeds: Any) -> None:
    for host, block in _MIRRORS.values():
        block.write(0, host.numpy())
    _run(self, feeds)
    for host, block in _MIRRORS.values():
        block.read(0, host.numpy())


_run = Session.execute


class Net(nn.Module):
    """Elementwise nodes and sums, all of which are kernels: those alone are computed here."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.rand(*SHAPE, generator=generator))
        self.bias = nn.Parameter(torch.rand(*SHAPE, generator=generator))
        self.register_buffer("seen", torch.zeros(SHAPE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.mul_(0.9).add_(x)
        return torch.tanh(x * self.weight + self.bias)


class Loss(nn.Module):
    """Squares in one sum, by weights of the loss's own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.linspace(0.5, 1.5, SHAPE[1]))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((output - target) ** 2 * self.weight).sum()


def main() -> None:
    """Do what stdin asks for."""
    job = json.load(sys.stdin)
    books = Books()
    books.compute()
    load_cuda()
    try:
        print(json.dumps(_train(books, job["how"], job.get("budget"))))
    except OnnxRematError as error:
        print(json.dumps({"error": str(error)}))


def _train(books: Books, how: str, budget: str | None) -> dict[str, Any]:
    torch.Tensor.to, devices._move, Session.execute = _to, _move, _execute  # type: ignore[method-assign,assignment]
    torch.cuda.synchronize = lambda _: None
    generator = torch.Generator().manual_seed(1)
    batches = [tuple(torch.rand(2, *SHAPE, generator=generator)) for _ in range(STEPS)]
    model, own = Net(), Net()
    if how == "accumulate":  # the sum of the other parameter's gradients would be a node alone, which is not computed
        for each in (model, own):
            each.weight.requires_grad_(False)
    optimizer, theirs = (torch.optim.AdamW(each.parameters(), 1e-2) for each in (model, own))
    loss = Loss()
    _own(own, Loss(), theirs, batches, 2 if how == "accumulate" else 1)
    for tensor in devices.own_tensors(model, loss, [optimizer]).values():
        _move(tensor, CUDA)
    before = books.read("live")
    given = [tuple(each if how == "host" else each.to(CUDA) for each in batch) for batch in batches]
    step = budgeted(
        model, loss, optimizer, given[0], budget, progress=False, accumulate=2 if how == "accumulate" else 1,
        planning={"effort": 1} if budget else None,
    )  # fmt: skip
    for index, batch in enumerate(given):
        if index == 2:
            loss.weight.mul_(0.5)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        step(batch)
    tensors = devices.own_tensors(model, None, [optimizer])
    taken = books.read("live") - before - sum(host.nbytes for host, _ in _MIRRORS.values())
    return {
        "state": _lists(tensors), "torch": _lists(devices.own_tensors(own, None, [theirs])),
        "devices": sorted({str(each.device) for each in tensors.values()}), "live": taken, "value": 4 * prod(SHAPE),
        "nodes": step._session.node_count, "kernels": step._session.kernel_count,
        "report": step.report.loop_after.total if step.report and step.report.loop_after else 0,
        "holds": worker._running is not None and worker._running[1].lives(),
    }  # fmt: skip


def _lists(tensors: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    return {name: plain(each).ravel().tolist() for name, each in tensors.items()}


def _own(model: nn.Module, loss_of: Loss, optimizer: torch.optim.Optimizer, batches: list[Any], micro: int) -> None:
    """PyTorch's own steps."""
    for index, (x, target) in enumerate(batches):
        if index == 2:
            loss_of.weight.mul_(0.5)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        loss = loss_of(model(x), target)
        (loss / micro).backward()
        if index % micro == micro - 1:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
