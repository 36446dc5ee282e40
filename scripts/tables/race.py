"""PyTorch and us: the same training steps, taken in turns in one run, and the memory that each takes.

Runners, each in a process of its own, of which one works at a time: PyTorch eager; ``torch.compile`` (Inductor); the
exported step by `session.training.Loop`, as it is and rewritten to each budget; with ``--before FOLDER`` also the step
that another version of the converter exported there, as MODEL.pytorch.onnx. SGD, or the case's own optimizer; as many
threads as cores.

*Memory* is resident: for PyTorch parameters, optimizer state and batch, and the process's high-water mark over a step
less what is resident between steps, when gradients are gone and the heap is trimmed (what Inductor leaves behind does
not count); for ours all of `measure.training_memory`, its bookkeeping and state included. *Time* is that of the fastest
step of each, and its ratio to PyTorch eager's fastest: on a machine that others use too, a slower step says more of
them. Linux only.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.child import in_turns

ITEMS = ("mlp", "unet", "resnet18", "resnet50", "vit_b-half", "bert-half", "gpt2-4-half", "gpt2-12-half", "llama",
          "lstm")  # fmt: skip
_WARM = 2  # steps before any is looked at
HEADS = ("model", "runner", "memory, MB", "of eager", "ms a step", "of eager", "compute")


def torch_step(name: str, compiled: bool) -> tuple[int, Callable[[], None]]:
    """The bytes that a step of a case takes of the machine, and the step."""
    import torch

    from sample_models.networks import torch_models

    torch.manual_seed(0)
    case = torch_models.MODELS[name]()
    model, optimizer = case.model, case.optimizer(case.model.parameters())
    called = torch.compile(model) if compiled else model
    positional, named, target = case.arguments()
    assert case.loss is not None
    of_loss = case.loss
    return steps_of(lambda: of_loss(called(*positional, **named), target).backward(), model, optimizer, case.batch)


def steps_of(backward: Callable[[], None], model: Any, optimizer: Any, batch: Any) -> tuple[int, Callable[[], None]]:
    """The bytes that a step of PyTorch's around a forward and backward pass takes of the machine, and the step."""
    import gc

    import torch
    from torch.utils import _pytree as pytree

    from onnx_remat.measure.probe import reset_peak, resident
    from onnx_remat.session.heap import trim

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        backward()
        optimizer.step()

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


def our_step(path: str) -> tuple[int, Callable[[], None]]:
    """The same of a file; the memory is of another process, which does nothing else."""
    from onnx_remat.measure.training_memory import measure, state_for
    from onnx_remat.session.session import Session
    from onnx_remat.session.training import Loop

    taken = measure(Path(path)).total
    session = Session(path, donate=True)
    loop = Loop(session, state_for(session.inputs), "loss")

    def step() -> None:
        loop.step()

    for _ in range(_WARM):
        step()
    return taken, step


def rows(
    model: str, *, before: str = "", budgets: str = "60%,40%", effort: float = 5.0, turns: int = 15
) -> Iterator[tuple[str, ...]]:
    """The rows of one model."""
    import onnx

    from onnx_remat.errors import BudgetInfeasibleError
    from onnx_remat.rewrite.pipeline import rewrite_model
    from sample_models.networks import torch_models

    compute, refused = {"ours": ""}, []
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as home:
        files = {"ours": Path(home) / f"{model}.onnx"}
        onnx.save(torch_models.builder(torch_models.MODELS[model])(), files["ours"])
        if before and (old := Path(before) / f"{model}.pytorch.onnx").exists():
            files["ours before"] = old
        for budget in budgets.split(","):
            name = f"ours, {budget}"
            try:
                result = rewrite_model(files["ours"], budget, effort=effort, time_limit=600)
            except BudgetInfeasibleError as error:
                refused.append((model, name, "", "", "", "", str(error).partition(";")[0]))
                continue
            result.save(written := Path(home) / f"{budget.strip('%')}.onnx")
            files[name], compute[name] = written, f"{result.report.extra_compute:+.1%}"
        jobs = [("PyTorch eager", torch_step, model, False), ("torch.compile", torch_step, model, True)]
        runners = in_turns(jobs + [(name, our_step, str(file)) for name, file in files.items()], turns)
    first = runners[0]
    for runner in runners:
        fastest = min(runner.times)
        yield (
            model, runner.name, f"{runner.first / 1e6:.1f}", f"{runner.first / first.first:.2f}",
            f"{1000 * fastest:.0f}", f"{fastest / min(first.times):.2f}", compute.get(runner.name, ""),
        )  # fmt: skip
    yield from refused
