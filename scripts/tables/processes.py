"""Whole processes that train: PyTorch, PyTorch with checkpointing of each block, and `budgeted`, taken in turns.

*Process* is the highest resident memory of a fresh process from its start to its end, interpreter and libraries
included; *training* is that of its steps alone, after the first two, which *start* includes. *start* is with an empty
cache, *again* is a later one. Times are those of the fastest step; *cpu* is that of all threads, so that threads that
only wait show. Linux only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from scripts.child import call, empty_cache, steppers

ITEMS = (
    "language, 48 texts", "characters, 96 texts", "characters, 320 texts", "masked language", "vision transformer",
    "u-net", "digits", "gpt2", "bert", "whisper", "unet2d",
)  # fmt: skip
HEADS = (
    "model", "runner", "start, s", "again, s", "process, MB", "training, MB", "of eager", "ms", "of eager", "cpu ms",
    "compute",
)  # fmt: skip


def _case(name: str) -> tuple[Any, Any]:
    import torch

    from sample_models.networks.whole import MODELS, OTHERS

    torch.manual_seed(0)
    case = (MODELS | OTHERS)[name]()
    return case, case.optimizer(case.model.parameters())


def _watched(step: Callable[[], None], started: float) -> tuple[float, Callable[[], list[float]]]:
    """The seconds since `started`, and the step; it returns memory of the process and of the steps, and CPU seconds."""
    from onnx_remat.measure.probe import reset_peak, resident

    most = resident("VmHWM")
    for _ in range(2):
        step()
    most = max(most, resident("VmHWM"))
    seen = [most, 0]
    reset_peak()

    def watched() -> list[float]:
        began = time.process_time()
        step()
        cpu = time.process_time() - began
        seen[1] = max(seen[1], resident("VmHWM"))
        return [max(seen), seen[1], cpu]

    return time.monotonic() - started, watched


def in_pytorch(name: str, checkpointed: bool) -> tuple[float, Callable[[], list[float]]]:
    """PyTorch's own step."""
    started = time.monotonic()
    from sample_models.networks.whole import checkpoint_blocks

    case, optimizer = _case(name)
    if checkpointed:
        checkpoint_blocks(case.model)
    positional, named, target = case.arguments()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        if isinstance(case.batch, dict) and case.loss is None:
            loss = case.model(**case.batch).loss
        elif case.loss is None:
            loss = case.model(*positional, target, **named)
        else:
            loss = case.loss(case.model(*positional, **named), target)
        loss.backward()
        optimizer.step()

    return _watched(step, started)


def ours(name: str, budget: str, effort: float) -> tuple[list[Any], Callable[[], list[float]]]:
    """The step of `budgeted`."""
    started = time.monotonic()
    from onnx_remat.converters.pytorch import budgeted

    case, optimizer = _case(name)
    planning: Any = {"effort": effort} if effort and budget else None
    made = budgeted(case.model, case.loss, optimizer, case.batch, budget or None, planning=planning)
    ready, watched = _watched(lambda: made(case.batch) and None, started)
    compute = made.summary.partition("kept, ")[2].partition(" compute")[0]
    return [ready, compute], watched


def started(function: str, *arguments: Any) -> float:
    """Seconds from the start to the end of the second step, of a process of its own."""
    runners: dict[str, Callable[..., Any]] = {"in_pytorch": in_pytorch, "ours": ours}
    ready, _ = runners[function](*arguments)
    return float(ready[0] if isinstance(ready, list) else ready)


def rows(model: str, *, budgets: str = "60%,auto", effort: float = 0.0, turns: int = 5) -> Iterator[tuple[str, ...]]:
    """The rows of one model."""
    jobs: list[tuple[Any, ...]] = [
        ("PyTorch", in_pytorch, model, False),
        ("PyTorch, checkpointed", in_pytorch, model, True),
        ("budgeted, no budget", ours, model, "", effort),
        *((f"budgeted, {budget}", ours, model, budget, effort) for budget in budgets.split(",")),
    ]
    with empty_cache(), steppers(jobs) as made:
        again = [call(started, function.__name__, *arguments).answer for _, function, *arguments in jobs]
        said: list[list[list[float]]] = [[] for _ in made]
        for _ in range(turns):
            for each, figures in zip(made, said, strict=True):
                figures.append(each.step())
    first = said[0][-1], min(made[0].times)
    for each, figures, later in zip(made, said, again, strict=True):
        ready, compute = each.first if isinstance(each.first, list) else (each.first, "")
        whole, training, _ = figures[-1]
        cpu, fastest = min(cpu for _, _, cpu in figures), min(each.times)
        yield (
            model, each.name, f"{ready:.1f}", f"{later:.1f}", f"{whole / 1e6:.0f}", f"{training / 1e6:.0f}",
            f"{training / first[0][1]:.2f}", f"{1000 * fastest:.0f}", f"{fastest / first[1]:.2f}",
            f"{1000 * cpu:.0f}", compute,
        )  # fmt: skip
