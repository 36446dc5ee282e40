"""PyTorch's activation_memory_budget and us, run on the CPU, each relative to its own runtime's default.

The model through ``torch.compile`` (Inductor) at each budget, and its exported step on ONNX Runtime, rewritten to the
same fraction of its own peak that PyTorch kept of its own. PyTorch's peak is that of a step: parameters, buffers and
batch, and on top the most that its allocator has handed out, by its own profiler. Resident memory would not tell: it
keeps what is freed. Its time is the median of steps (forward, loss, backward; gradients are new each time).
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scripts.child import call

ITEMS = ("unet", "resnet18", "gpt2-4-half")
HEADS = (
    "model, as `torch.compile` runs it",
    "asked",
    "PyTorch: peak, time",
    "ONNX Runtime as it is",
    "ours: peak, time",
)
BUDGETS = (0.5, 0.1)


def compiled_step(name: str, budget: float) -> tuple[int, float]:
    """Peak in bytes and seconds of a compiled step, in this process."""
    import torch
    import torch._functorch.config as functorch_config

    from sample_models.networks import torch_models

    torch.manual_seed(0)
    case = torch_models.MODELS[name]()
    functorch_config.activation_memory_budget = budget
    compiled = torch.compile(case.model)

    def step() -> None:
        case.model.zero_grad(set_to_none=True)
        positional, named, target = case.arguments()
        assert case.loss is not None
        case.loss(compiled(*positional, **named), target).backward()

    step()
    step()
    case.model.zero_grad(set_to_none=True)
    with torch.profiler.profile(profile_memory=True) as profiler:
        step()
    tensors = [*case.model.parameters(), *case.model.buffers(), *_tensors(case.batch)]
    held = sum(t.numel() * t.element_size() for t in tensors)
    times = []
    for _ in range(9):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return held + allocated(profiler), statistics.median(times)


def allocated(profiler: Any) -> int:
    """Most bytes handed out at once, beyond what was at the start of a profile."""
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())), default=0)


def _tensors(batch: Any) -> list[Any]:
    return list(batch.values() if isinstance(batch, Mapping) else batch)


def rows(name: str, *, effort: float = 3.0) -> Iterator[tuple[str, ...]]:
    """A row for each budget."""
    import onnx
    import torch
    from onnx_remat.converters.pytorch import export_training_step

    from onnx_remat.errors import BudgetInfeasibleError
    from onnx_remat.measure import processes
    from onnx_remat.rewrite.pipeline import rewrite_model
    from onnx_remat.units import format_bytes
    from sample_models.networks import torch_models

    plain, clock = call(compiled_step, name, 1.0).answer
    torch.manual_seed(0)
    case = torch_models.MODELS[name]()
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as scratch:
        path, small = Path(scratch) / "step.onnx", Path(scratch) / "small.onnx"
        onnx.save(export_training_step(case.model, case.batch, case.loss, check=False, **case.options), path)
        before = processes.measure(path).peak_bytes
        for budget in BUDGETS:
            theirs, their_clock = call(compiled_step, name, budget).answer
            try:
                result = rewrite_model(path, f"{100 * theirs / plain:.1f}%", effort=effort, run_by="session")
                result.save(small, force=True)
                times = processes.race(path, small, runs=9)
                own = f"{processes.measure(small).peak_bytes / before:.1%}, {times[1] / times[0] - 1:+.1%}"
                had = f"{format_bytes(before)}, {1e3 * times[0]:.0f} ms"
            except BudgetInfeasibleError as error:
                had, own = format_bytes(before), f"not below {error.best_peak_bytes / before:.1%}"
            kept = f"{theirs / plain:.1%}, {their_clock / clock - 1:+.1%}"
            yield f"{name} ({format_bytes(plain)}, {1e3 * clock:.0f} ms)", f"{budget:.0%}", kept, had, own
