"""Train a module within a memory budget: `budgeted` returns a step that updates the module in place."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from onnx_remat.app.progress import Progress
from onnx_remat.errors import UsageError
from onnx_remat.messages import Setting
from onnx_remat.process import worker
from onnx_remat.units import check_threads

from .. import shares
from . import optimizer_facts
from .apart import carried_out
from .batch import Batch
from .budgeted_step import Budgeted
from .devices import HOST, batch_on, check_cuda, device_of, in_one_chunk, on_host, own_tensors, release_memory
from .living import forks
from .outside import check_lasting
from .own_step import measured_on_device
from .preparation import Request
from .recipe import Recipe, Scaling
from .sizes import Written

if TYPE_CHECKING:  # a module that takes memory, which only the preparation of a step needs
    from onnx_remat.options import PlanningOptions

    from .step import Loss


def budgeted(
    model: torch.nn.Module,
    loss: Loss | None,
    optimizer: optimizer_facts.Optimizers,
    batch: Any,
    budget: str | int | None = None,
    *,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    accumulate: int = 1,
    average: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    dynamic_dims: Mapping[str, Mapping[int, str]] | None = None,
    loss_parts: int | None = None,
    attention_parts: int | None = None,
    outputs: Sequence[str] = (),
    check: bool = True,
    planning: PlanningOptions | None = None,
    threads: int = 0,
    progress: bool = True,
) -> Budgeted:
    """Return a training step of a module that stays within a memory budget and updates the module in place.

    By default, training a module allocates every activation that the backward pass reads, and keeps it until then. With
    a budget, the step recomputes some activations during the backward pass instead, so that the memory of training
    stays below the budget; the results are the same. An alternative is `export_training_step` with the command line,
    which writes a file and leaves the training loop to you. For example::

        step = budgeted(model, F.cross_entropy, optimizer, (x, target), budget="60%")
        for x, target in loader:
            loss = step((x, target))
        torch.save(model.state_dict(), "model.pt")

    Each call trains on one batch on ONNX Runtime, and updates the tensors of `model` and of the optimizer's state.
    Evaluation and checkpoints of the module work as usual between calls. The step runs where the module is: on the CPU,
    or, after ``model.cuda()``, on the first CUDA device. While it is made, a module on a device is on the host, where
    it is traced and compared.

    Parameters
    ----------
    model, loss, optimizer, batch
        As in `export_training_step`. The batch is an example: all batches have its sizes, except for `dynamic_dims`.
    budget : str or int, optional
        Memory that training may take: ``"4GB"``, a number of bytes, ``"60%"`` of what PyTorch's own step takes, which
        is measured, or ``"60% of the step"`` as it is exported; ``"auto"``, the least for which the exported step takes
        at most 10 % more time, or ``"+5%"``, at most 5 %. It includes the module and the optimizer's state, but
        not Python and its libraries, nor what CUDA and its libraries take. By default (None) the step is not rewritten.
    clip_norm, clip_value, accumulate, average, scaler
        As of `export_training_step`.
    dynamic_dims : mapping of str to mapping of int to str, optional
        As in `export_training_step`: dimensions of batches that may be smaller than the example's. The plan is for the
        example. The first batch of another size opens a session for it, which takes seconds; the last few sizes stay
        open, in the memory of the largest. On the CPU only.
    loss_parts, attention_parts : int, optional
        As of `export_training_step`.
    outputs : sequence of str
        Tensors of the model's output that `Budgeted.outputs` has after each step, for metrics: ``["logits"]`` of a
        model that returns an object or a dict with them, ``["output"]`` of one that returns a tensor; further as in
        `export_training_step`. They take memory until the end of the step.
    check : bool
        Compare the step with torch first. The comparison takes, once, about twice the memory of a step in torch.
    planning : mapping, optional
        Fields of `onnx_remat.options.Options`, for example ``{"effort": 5}``; not those that say what runs the step.
    threads : int
        Threads of a step; by default (0) as many as PyTorch has, `torch.get_num_threads`.
    progress : bool
        Show the stage on standard error while the step is made: with the time on a terminal, else in a line each.

    Returns
    -------
    Budgeted
        ``step(batch)`` trains and returns the loss.

    Raises
    ------
    UsageError
        An argument is wrong.
    ConversionError, OnnxRematError
        The step cannot be exported, see `export_training_step`, or no plan fits the budget.
    """
    users = optimizer_facts.each(optimizer)
    threads = check_threads(threads)
    if not users:
        raise UsageError("budgeted needs an optimizer, whose step is part of the graph: pass one")
    device = device_of(model)
    optimizer_facts.parameters_of(users, dict(model.named_parameters()))
    given, of_step = shares.parse(budget)
    if given is None and planning:
        raise UsageError("{} needs a budget: pass {}", Setting("planning"), Setting("budget"))
    shares.check_planning("PyTorch", planning or {}, device.type)
    if device != HOST:
        if dynamic_dims:
            raise UsageError("{}: on a device all batches have one size: pad them", Setting("dynamic_dims"))
        planning = {"provider": device.type, **(planning or {})}
        release_memory(device)
    recipe = Recipe(clip_norm, clip_value, accumulate, average, None if scaler is None else Scaling.of(scaler))
    written = Written(tempfile.TemporaryDirectory(prefix="onnx-remat-"), dynamic_dims or {})
    example = Batch.of(batch)
    example.check_dimensions(written.dynamic)
    request = Request(
        model, loss, recipe, users, batch_on(batch, HOST), given, of_step, written.dynamic, written.sizes(example),
        loss_parts, attention_parts, tuple(outputs), check, planning or {}, written.path,
        Progress(quiet=not progress, log=True), device.type,
    )  # fmt: skip
    own = measured_on_device(request, batch, device) if device != HOST and request.is_share else None
    if request.is_share and device == HOST and not forks():
        warnings.warn(
            "PyTorch's own step cannot be measured on this system: the budget is a share of what the exported step "
            "takes",
            stacklevel=2,
        )
    tensors = own_tensors(model, loss, users)
    with worker.device_left():  # one process looks for the device and plans for it, while PyTorch leaves room there
        if device != HOST:
            check_cuda()
        with on_host(tensors, device):
            release_memory(device)
            made, outside = carried_out(request, own)
            if device != HOST:
                check_lasting(outside, tensors)
    if device != HOST:
        in_one_chunk(model)
        outside = {name: one.renewed() for name, one in outside.items()}
        release_memory(device)
    return Budgeted(model, users, example, made, outside, written, threads or torch.get_num_threads(), loss)
