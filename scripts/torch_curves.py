"""Train models of `scripts.torch_models` by torch and by their exported steps, side by side, and print both losses.

    python -m scripts.torch_curves --model resnet18 --model gpt2-4-half --steps 20

One batch, repeated, so that the loss falls; the step runs on stock ONNX Runtime with its default options. Printed per
model and optimizer: the first and the last loss of torch, and the largest relative difference of the two curves. The
same run of torch with other summation orders (one thread in place of all) is the yardstick: training carries rounding
forward.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch
from onnx_remat.converters.pytorch import export_training_step, initial_feeds
from onnx_remat.converters.pytorch.reference import array

from onnx_remat import runtime
from scripts import torch_models

OPTIMIZERS: dict[str, Callable[[torch.nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.01, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), 1e-4),
}


def ours(name: str, optimizer: str, steps: int) -> list[float]:
    """Losses of the exported step."""
    case, made = _start(name, optimizer)
    step = export_training_step(case.model, case.batch, case.loss, made, check=False)
    values = list(case.batch.values() if isinstance(case.batch, dict) else case.batch)
    given = [value.name for value in step.graph.input][-len(values) :]
    feeds = initial_feeds(step, case.model, made) | dict(zip(given, map(array, values), strict=True))
    losses = []
    for _ in range(steps):
        found = runtime.outputs(step, feeds, level="all")
        feeds |= {key.removeprefix("new."): value for key, value in found.items() if key.startswith("new.")}
        losses.append(float(found["loss"]))
    return losses


def theirs(name: str, optimizer: str, steps: int, threads: int) -> list[float]:
    """Losses of torch itself."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    case, made = _start(name, optimizer)
    losses = []
    for _ in range(steps):
        made.zero_grad()
        loss = _loss(case)
        loss.backward()
        made.step()
        losses.append(loss.item())
    torch.set_num_threads(before)
    return losses


def _start(name: str, optimizer: str) -> tuple[torch_models.Case, torch.optim.Optimizer]:
    torch.manual_seed(0)
    case = torch_models.MODELS[name]()
    return case, OPTIMIZERS[optimizer](case.model)


def _loss(case: torch_models.Case) -> torch.Tensor:
    assert case.loss is not None
    if isinstance(case.batch, dict):
        *arguments, target = case.batch.items()
        return case.loss(case.model(**dict(arguments)), target[1])
    *inputs, target = case.batch
    return case.loss(case.model(*inputs), target)


def main() -> None:
    """Print one line per model and optimizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, choices=sorted(torch_models.MODELS))
    parser.add_argument("--optimizer", action="append", choices=sorted(OPTIMIZERS))
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    for name in arguments.model:
        for optimizer in arguments.optimizer or OPTIMIZERS:
            torchs = np.array(theirs(name, optimizer, arguments.steps, torch.get_num_threads()))
            again = np.array(theirs(name, optimizer, arguments.steps, 1))
            found = np.array(ours(name, optimizer, arguments.steps))
            apart, own = (np.abs(curve / torchs - 1).max() for curve in (found, again))
            print(
                f"| {name} | {optimizer} | {torchs[0]:.4f} | {torchs[-1]:.4f} | {found[-1]:.4f} | {apart:.1e} | "
                f"{own:.1e} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
