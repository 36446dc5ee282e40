"""Train models of `scripts.torch_models` by torch and by their exported steps, side by side, and compare the losses.

    python -m scripts.torch_curves --model resnet18 --model gpt2-4-half --steps 20

Every step has a batch of its own, the same for all. Labels and tokens are drawn from few of the classes, so that the
loss falls to about the logarithm of their number, and no further: relative differences of a loss that goes to zero, as
on one batch repeated, say nothing. The exported step runs on stock ONNX Runtime with its default options.

Printed per model and optimizer: the first and last loss of torch, the last of the exported step, and the largest
relative difference of two curves along the way: of ours and torch's, of torch's with two threads and with one, whose
sums differ in order alone, and of either and torch's in float64. Training carries rounding forward, and the second is
how far.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from onnx_remat.converters.pytorch import export_training_step, initial_feeds
from onnx_remat.converters.pytorch.reference import array
from torch.utils import _pytree as pytree

from onnx_remat.ort import runtime
from scripts import torch_models

OPTIMIZERS: dict[str, Callable[[torch.nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.01, momentum=0.9),
    "sgd-slow": lambda model: torch.optim.SGD(model.parameters(), 0.001, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), 1e-4),
}
CLASSES = 8
"""How many of the labels or tokens occur."""


def batches(case: torch_models.Case, steps: int) -> Iterator[Any]:
    """A batch per step, shaped as the case's own."""
    generator = torch.Generator().manual_seed(0)

    def drawn(like: torch.Tensor) -> torch.Tensor:
        if like.is_floating_point():
            return torch.randn(like.shape, generator=generator)
        return torch.randint(0, min(CLASSES, int(like.max()) + 1), like.shape, generator=generator)

    for _ in range(steps):
        yield pytree.tree_map(drawn, case.batch)


def ours(name: str, optimizer: str, steps: int) -> np.ndarray:
    """Losses of the exported step."""
    case, made = _start(name, optimizer, torch.float32)
    step = export_training_step(case.model, case.batch, case.loss, made, check=False)
    given = [value.name for value in step.graph.input][-len(case.batch) :]
    feeds = initial_feeds(step, case.model, made)
    losses = []
    for batch in batches(case, steps):
        found = runtime.outputs(step, feeds | dict(zip(given, map(array, _values(batch)), strict=True)), level="all")
        feeds = {key.removeprefix("new."): value for key, value in found.items() if key.startswith("new.")}
        losses.append(float(found["loss"]))
    return np.array(losses)


def theirs(
    name: str, optimizer: str, steps: int, *, threads: int = 2, dtype: torch.dtype = torch.float32
) -> np.ndarray:
    """Losses of torch itself."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    case, made = _start(name, optimizer, dtype)
    losses = []
    for batch in batches(case, steps):
        made.zero_grad()
        loss = _loss(case, pytree.tree_map(lambda x: x.to(dtype) if x.is_floating_point() else x, batch))
        loss.backward()
        made.step()
        losses.append(loss.item())
    torch.set_num_threads(before)
    return np.array(losses)


def _start(name: str, optimizer: str, dtype: torch.dtype) -> tuple[torch_models.Case, torch.optim.Optimizer]:
    torch.manual_seed(0)
    case = torch_models.MODELS[name]()
    case.model.to(dtype)
    return case, OPTIMIZERS[optimizer](case.model)


def _values(batch: Any) -> list[torch.Tensor]:
    return list(batch.values() if isinstance(batch, dict) else batch)


def _loss(case: torch_models.Case, batch: Any) -> torch.Tensor:
    assert case.loss is not None
    if isinstance(batch, dict):
        *arguments, (_, target) = batch.items()
        return case.loss(case.model(**dict(arguments)), target)
    *inputs, target = batch
    return case.loss(case.model(*inputs), target)


def main() -> None:
    """Print one line per model and optimizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, choices=sorted(torch_models.MODELS))
    parser.add_argument("--optimizer", action="append", choices=sorted(OPTIMIZERS))
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    print(
        "| model | optimizer | torch, first | last | ours, last | ours and torch | torch, 2 threads and 1 | ours and "
        "float64 | torch and float64 |"
    )
    for name in arguments.model:
        for optimizer in arguments.optimizer or OPTIMIZERS:
            run = name, optimizer, arguments.steps
            torchs, one, exact = theirs(*run), theirs(*run, threads=1), theirs(*run, dtype=torch.float64)
            found = ours(*run)
            pairs = (found, torchs), (torchs, one), (found, exact), (torchs, exact)
            apart = [f"{float(np.abs(a / b - 1).max()):.1e}" for a, b in pairs]
            losses = [f"{loss:.4f}" for loss in (torchs[0], torchs[-1], found[-1])]
            print(f"| {' | '.join([name, optimizer, *losses, *apart])} |", flush=True)


if __name__ == "__main__":
    main()
