"""PyTorch and us: the same training steps, taken in turns in one run, and the memory that each takes.

Runners, each in a process of its own, of which one works at a time: PyTorch eager; ``torch.compile`` (Inductor); the
exported step by `session.training.Loop`, as it is, also unfused, and rewritten to each budget, which is a share of what
PyTorch eager's step takes; with ``--before FOLDER`` also the step that another version of the converter exported there,
as MODEL.pytorch.onnx. SGD, or the case's own optimizer; as many threads as cores. All begin with the same parameters
and batch: with numbers drawn at random, gradients vanish, and arithmetic with denormal numbers takes many times longer.

*Memory* is resident: for PyTorch parameters, optimizer state and batch, and the process's high-water mark over a step
less what is resident between steps, when gradients are gone and the heap is trimmed (what Inductor leaves behind does
not count); for ours all of `measure.training_memory`, its bookkeeping and state included. *Time* is that of the fastest
step of each, and its ratio to PyTorch eager's fastest: on a machine that others use too, a slower step says more of
them. *cpu* is the least time of all threads that a step took. The *loss* is that of the second step: a runner with
another first or second loss than PyTorch ends the race. Linux only.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.child import Stepper, call, in_turns

ITEMS = ("mlp", "unet", "resnet18", "resnet50", "vit_b-half", "bert-half", "gpt2-4-half", "gpt2-12-half", "llama",
          "lstm", "mobilenetv3", "unet2d", "vision transformer", "digits")  # fmt: skip
_WARM = 2  # steps before any is looked at
_COMPARED = 2  # losses: after more updates, rounding may have grown
_ROUNDING = 2e-3  # of a loss
_UPDATE = 0.05  # of what an update changed: noise of 1e-6 in its images alters gradients of the ResNet-50 as much
HEADS = ("model", "runner", "memory, MB", "of eager", "ms a step", "of eager", "cpu ms", "loss", "compute")


def case_of(name: str) -> tuple[Any, Any]:
    """A model with its batch and loss, and its optimizer; always with the same numbers."""
    import torch

    from sample_models.networks import torch_models, whole

    torch.manual_seed(0)
    case = (torch_models.MODELS | whole.MODELS | whole.OTHERS)[name]()
    return case, case.optimizer(case.model.parameters())


def torch_step(
    name: str, compiled: bool, budget: float = 1.0, checkpointed: bool = False
) -> tuple[int, Callable[[], list[float]]]:
    """The bytes that a step of a case takes of the machine, and the step.

    `budget` is ``torch.compile``'s ``activation_memory_budget``; `checkpointed` steps checkpoint each block.
    """
    import torch
    import torch._functorch.config as functorch_config

    from sample_models.networks.whole import checkpoint_blocks

    case, optimizer = case_of(name)
    functorch_config.activation_memory_budget = budget
    if checkpointed:
        checkpoint_blocks(case.model)
    called = torch.compile(case.model) if compiled else case.model
    positional, named, target = case.arguments()

    def backward() -> Any:
        given = called(*positional, **named) if case.loss else called(*positional, target, **named)
        loss = case.loss(given, target) if case.loss else given
        loss.backward()
        return loss

    return steps_of(backward, case.model, optimizer, case.batch)


def export(name: str, file: str) -> None:
    """Write a case's step to a file, and what it reads at first next to it, as FILE.npz."""
    import onnx
    from onnx_remat.converters.pytorch import export_training_step

    case, optimizer = case_of(name)
    step = export_training_step(case.model, case.batch, case.loss, optimizer, **case.options)
    onnx.save(step, file)
    save_first(Path(file), step, case.model, optimizer, case.batch)


def save_first(file: Path, step: Any, model: Any, optimizer: Any, batch: Any) -> None:
    """Write what a step reads at first next to it, as FILE.npz."""
    import numpy as np
    from onnx_remat.converters.pytorch import initial_feeds

    named = batch if isinstance(batch, dict) else {f"input.{i}": value for i, value in enumerate(batch)}
    read = {value.name for value in step.graph.input}
    feeds = {name: value.numpy() for name, value in named.items() if name in read}
    np.savez(file.with_suffix(".npz"), **initial_feeds(step, model, optimizer) | feeds)


def steps_of(
    backward: Callable[[], Any], model: Any, optimizer: Any, batch: Any
) -> tuple[int, Callable[[], list[float]]]:
    """The bytes that a step of PyTorch's takes of the machine, and the step; `backward` returns the loss."""
    import gc

    import torch
    from torch.utils import _pytree as pytree

    from onnx_remat.measure.probe import reset_peak, resident
    from onnx_remat.session.heap import trim

    losses: list[float] = []

    def step() -> list[float]:
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(backward()))
        optimizer.step()
        return losses[:_COMPARED]

    for _ in range(_WARM):
        step()
    optimizer.zero_grad(set_to_none=True)
    gc.collect()
    trim()
    between = reset_peak()
    step()
    state = pytree.tree_leaves([optimizer.state_dict()["state"], batch])
    tensors = [*model.parameters(), *model.buffers(), *(x for x in state if isinstance(x, torch.Tensor))]
    held = sum(x.numel() * x.element_size() for x in tensors)
    return resident("VmHWM") - between + held, step


def memory_in_torch(name: str) -> int:
    """The bytes that a step of a case takes of the machine."""
    return torch_step(name, False)[0]


def our_step(path: str, first: str = "", fuse: bool = True) -> tuple[int, Callable[[], list[float]]]:
    """The same of a file; the memory is of another process, which does nothing else.

    `first` is a file with what the first step reads, see `export`; without it, numbers are drawn at random.
    """
    import numpy as np

    from onnx_remat.measure.training_memory import measure, state_for
    from onnx_remat.session.session import Session
    from onnx_remat.session.training import Loop

    taken = measure(Path(path), fuse=fuse).total
    session = Session(path, donate=True, fuse=fuse)
    state = dict(np.load(first)) if first else state_for(session.inputs)
    loop = Loop(session, {array.name: state[array.name] for array in session.inputs}, "loss")

    losses: list[float] = []

    def step() -> list[float]:
        losses.append(float(loop.step()))
        return losses[:_COMPARED]

    for _ in range(_WARM):
        step()
    return taken, step


def rewritten(step: Path, budgets: str, theirs: int, effort: float) -> dict[str, tuple[str, str]]:
    """Rewrite a step to shares of `theirs` bytes; by runner, its file next to the step, and its extra compute.

    Where no file is found, the file is empty, and the text is the refusal.
    """
    from onnx_remat.errors import BudgetInfeasibleError
    from onnx_remat.rewrite.pipeline import rewrite_model

    made = {}
    for budget in budgets.split(","):
        limit = int(theirs * float(budget.strip("%")) / 100)
        try:
            result = rewrite_model(step, limit, effort=effort, time_limit=600, run_by="loop")
        except BudgetInfeasibleError as error:
            made[f"ours, {budget}"] = "", str(error).partition(";")[0]
            continue
        result.save(path := step.with_name(f"{budget.strip('%')}.onnx"))
        made[f"ours, {budget}"] = str(path), f"{result.report.extra_compute:+.1%}"
    return made


def check_losses(model: str, runners: Sequence[Stepper]) -> None:
    """Raise ValueError where the first losses of a runner are not those of the first runner.

    The first may differ by rounding. The second may differ by a share of the change that the update made, since with a
    small batch BatchNormalization makes rounding large in a single update.
    """
    wanted = runners[0].said[0]
    for runner in runners:
        losses = runner.said[0]
        allowed = _ROUNDING * abs(wanted[0]), _ROUNDING * abs(wanted[1]) + _UPDATE * abs(wanted[1] - wanted[0])
        if any(abs(a - b) > most for a, b, most in zip(losses, wanted, allowed, strict=True)):
            raise ValueError(f"{model}: the losses of {runner.name!r} are {losses}, PyTorch's {wanted}")


def rows(
    model: str, *, before: str = "", budgets: str = "60%,40%", effort: float = 5.0, turns: int = 15
) -> Iterator[tuple[str, ...]]:
    """The rows of one model."""
    theirs = call(memory_in_torch, model).answer
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as home:
        ours = Path(home) / "ours.onnx"
        call(export, model, str(ours))
        first = str(ours.with_suffix(".npz"))
        jobs: list[tuple[Any, ...]] = [
            ("PyTorch eager", torch_step, model, False), ("torch.compile", torch_step, model, True),
            ("ours", our_step, str(ours), first), ("ours, unfused", our_step, str(ours), first, False),
        ]  # fmt: skip
        if before and (old := Path(before) / f"{model}.pytorch.onnx").exists():
            jobs.append(("ours before", our_step, str(old)))
        made = rewritten(ours, budgets, theirs, effort)
        jobs += [(name, our_step, path, first) for name, (path, _) in made.items() if path]
        runners = in_turns(jobs, turns)
    yield from compared(model, runners, made)


def compared(model: str, runners: Sequence[Stepper], made: dict[str, tuple[str, str]]) -> Iterator[tuple[str, ...]]:
    """The rows of runners that have taken their steps, relative to the first; `made` is as of `rewritten`."""
    check_losses(model, runners)
    first = runners[0]
    for runner in runners:
        fastest = min(runner.times)
        yield (
            model, runner.name, f"{runner.first / 1e6:.1f}", f"{runner.first / first.first:.2f}",
            f"{1000 * fastest:.0f}", f"{fastest / min(first.times):.2f}", f"{1000 * min(runner.cpus):.0f}",
            f"{runner.said[0][-1]:.4f}", made.get(runner.name, ("", ""))[1],
        )  # fmt: skip
    for name, (path, why) in made.items():
        if not path:
            yield model, name, *[""] * 6, why
