"""Memory of PyTorch's own step, measured: what training takes without onnx-remat."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from onnx_remat.measure.probe import reset_peak, resident
from onnx_remat.process import forked
from onnx_remat.session import heap

from .batch import Batch, loss_of
from .devices import HOST, batch_on, own_tensors
from .preparation import Own, Request

STEPS = 2
"""The first makes the state of the optimizers, the second has it from the start."""


def rounded(found: int) -> int:
    """Round up to two digits, so that noise hardly ever changes a plan.

    >>> rounded(21_300_000)
    22000000
    """
    unit = 10 ** max(0, len(str(found)) - 2)
    return math.ceil(found / unit) * unit


def agree(found: int, before: int) -> bool:
    """Return whether two measurements differ by no more than noise: a quarter, and 500 kB of small steps.

    The step is the same: what else it takes depends on what the heap had free. Once, a second start found more than a
    tenth of difference, and planned for half a minute.
    """
    return abs(found - before) <= max(before // 4, 500_000)


@dataclass(frozen=True, slots=True)
class Known:
    """PyTorch's own step, measured before."""

    own: Own

    def result(self) -> Own:
        """Return it."""
        return self.own


class Measurement:
    """The measurement of PyTorch's own step in a forked copy of this process, whose heap must have few free blocks."""

    def __init__(self, request: Request) -> None:
        self._running = forked.Running(partial(memory, request), "PyTorch's own step")
        self._known: Own | None = None

    def __enter__(self) -> Measurement:
        return self

    def __exit__(self, *_: object) -> None:
        self._running.__exit__()

    def result(self) -> Own:
        """Wait for the measurement and return its result, rounded, see `rounded`."""
        if self._known is None:
            try:
                found = self._running.answer()
            except Exception as error:
                self._known = Own(0, f"{type(error).__name__}: {error}")
            else:
                self._known = Own(rounded(found))
        return self._known


def memory(request: Request) -> int:
    """Return the bytes that training in PyTorch takes: parameters, state, batch, gradients, and all that a step makes.

    Train `STEPS` steps. Runs in a forked copy of the process, since it changes the module.

    Raises
    ------
    Exception
        Any error of the user's code.
    """
    torch.set_num_threads(1)  # libgomp's threads did not survive the fork
    batch, optimizers = Batch.of(request.batch), request.users
    for optimizer in optimizers:
        optimizer.zero_grad()
    held = held_before(request, batch)
    heap.give_back_large_blocks()  # how much the heap keeps of freed blocks differs from run to run
    heap.trim()
    base = reset_peak() - resident("RssFile")
    _train(request, batch)
    # a forked copy maps the pages of libraries as it comes to them
    return max(0, resident("VmHWM") - resident("RssFile") - base) + held


def measured_on_device(request: Request, batch: Any, device: torch.device) -> Known:
    """Return what PyTorch's own step takes of a CUDA device, by its allocator's count, see `memory`.

    The modules, the optimizers, gradients and the random state are the same afterwards.

    Parameters
    ----------
    request : Request
    batch : object
        The example as the user gave it.
    device : torch.device
    """
    from .step import as_it_was  # takes memory, which a step on the host does not need

    given = Batch.of(batch_on(batch, device))
    modules = [each for each in (request.model, request.loss) if isinstance(each, torch.nn.Module)]
    parameters = list(dict.fromkeys(p for module in modules for p in module.parameters()))
    kept = [
        (each, each.detach().to(HOST, copy=True))
        for each in own_tensors(request.model, request.loss, request.users).values()
    ]
    states = [(user, {p: dict(pieces) for p, pieces in user.state.items()}) for user in request.users]
    gradients = [(p, p.grad) for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    own = ExitStack()
    for module in modules:
        own.enter_context(as_it_was(module))
    held = held_before(request, given)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        with torch.random.fork_rng([device]), torch.enable_grad():
            _train(request, given)
        torch.cuda.synchronize(device)
        found = Own(rounded(max(0, torch.cuda.max_memory_allocated(device) - base) + held))
    except Exception as error:
        found = Own(0, f"{type(error).__name__}: {error}")
    finally:
        own.close()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for user, state in states:
            user.state.clear()
            user.state.update(state)
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)
        torch.cuda.empty_cache()
    return Known(found)


def _train(request: Request, batch: Batch) -> None:
    """Train `STEPS` steps."""
    for _ in range(STEPS):
        positional, keyword = batch.arguments(batch.tensors)
        loss_of(request.model, request.loss, positional, keyword)[0].backward()
        for optimizer in request.users:
            optimizer.step()
            optimizer.zero_grad()


def held_before(request: Request, batch: Batch) -> int:
    """Return the bytes of the tensors of module, optimizers and batch, which exist before a step, each memory once.

    They may be slices of larger tensors, or of one buffer, as weights of recurrent layers are on a GPU.
    """
    states = [piece for user in request.users for pieces in user.state.values() for piece in pieces.values()]
    kept = [*request.model.parameters(), *request.model.buffers(), *states, *batch.tensors]
    runs: list[tuple[int, int, int]] = []  # first address, end, and bytes of the tensors, which may leave gaps
    for start, end, nbytes in sorted({_span(tensor) for tensor in kept if isinstance(tensor, torch.Tensor)}):
        if runs and start < runs[-1][1]:
            first, last, before = runs.pop()
            runs.append((first, max(last, end), before + nbytes))
        else:
            runs.append((start, end, nbytes))
    return sum(min(end - start, nbytes) for start, end, nbytes in runs)


def _span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return the first address of a tensor, the end of its last element, and its bytes: more, if it is expanded."""
    apart = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = tensor.data_ptr() + (apart + 1) * tensor.itemsize if tensor.numel() else tensor.data_ptr()
    return tensor.data_ptr(), end, tensor.nbytes
