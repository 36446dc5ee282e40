"""One training step through ``torch.compile`` in a process of its own: its peak memory and its time.

    python -m scripts.compiled_step MODEL BUDGET

Prints a JSON object: ``peak_bytes`` over a step (parameters, buffers and batch, and on top the most that PyTorch's
allocator has handed out, by its own profiler) and ``seconds``, the median of a step (forward, loss, backward; gradients
are made anew each time). Resident memory would not tell: PyTorch's CPU allocator keeps what is freed.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any


def measured(model: str, budget: float) -> tuple[int, float]:
    """Peak in bytes and seconds per step of a model of `torch_models.MODELS`, measured in a fresh process.

    Raises
    ------
    subprocess.CalledProcessError
        The process failed; its error went to standard error.
    """
    command = [sys.executable, "-m", "scripts.compiled_step", model, str(budget)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["peak_bytes"], answer["seconds"]


def main() -> None:
    """Measure, in this process."""
    import torch
    import torch._functorch.config as functorch_config

    from sample_models.networks import torch_models

    name, budget = sys.argv[1], float(sys.argv[2])
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
    print(json.dumps({"peak_bytes": held + allocated(profiler), "seconds": statistics.median(times)}))


def allocated(profiler: Any) -> int:
    """Most bytes handed out at once, beyond what was at the start of a profile."""
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())), default=0)


def _tensors(batch: Any) -> list[Any]:
    return list(batch.values() if isinstance(batch, Mapping) else batch)


if __name__ == "__main__":
    main()
