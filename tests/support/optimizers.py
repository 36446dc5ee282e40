"""Optimizers whose steps the PyTorch converter traces, and twenty steps of a small network alongside torch itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import torch
from onnx_remat.converters.pytorch import export_training_step, initial_feeds
from torch import nn

from onnx_remat.session.session import Session
from onnx_remat.session.training import Loop

STEPS = 20


class Lion(torch.optim.Optimizer):
    """A user's own (Chen et al. 2023): the sign of a blend of gradient and momentum; it counts steps for nothing."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})
        self.keep = 0.9

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """As most people write one."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["exp_avg"] = 0, torch.zeros_like(p)
                state["step"] += 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((state["exp_avg"] * self.keep + p.grad * (1 - self.keep)).sign(), alpha=-group["lr"])
                state["exp_avg"].lerp_(p.grad, 0.01)


def matrices_and_rest(parameters: list[torch.Tensor]) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the rest, as Muon is meant to be used."""
    return [
        torch.optim.Muon([p for p in parameters if p.dim() == 2], 0.01),
        torch.optim.AdamW([p for p in parameters if p.dim() != 2], 0.01),
    ]


@dataclass(frozen=True, slots=True)
class Case:
    """An optimizer, what is said to the converter besides, and the difference from torch that is expected at most."""

    make: Callable[[list[torch.Tensor]], Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    most: float = 5e-6


O = torch.optim  # noqa: E741
CASES: Mapping[str, Case] = {
    "SGD": Case(lambda p: O.SGD(p, 0.1, weight_decay=0.01)),
    "SGD, momentum": Case(lambda p: O.SGD(p, 0.1, 0.9, weight_decay=0.01)),
    "SGD, Nesterov": Case(lambda p: O.SGD(p, 0.1, 0.9, nesterov=True, maximize=False)),
    "Adam": Case(lambda p: O.Adam(p, 0.01, weight_decay=0.01)),
    "Adam, amsgrad": Case(lambda p: O.Adam(p, 0.01, amsgrad=True)),
    "AdamW": Case(lambda p: O.AdamW(p, 0.01)),
    "AdamW, maximize": Case(lambda p: O.AdamW(p, 0.001, maximize=True)),
    "AdamW, rate and decay as inputs": Case(
        lambda p: O.AdamW(p, torch.tensor(0.01), weight_decay=torch.tensor(0.02))  # type: ignore[arg-type]
    ),
    "NAdam": Case(lambda p: O.NAdam(p, 0.01, weight_decay=0.1)),
    "RAdam": Case(lambda p: O.RAdam(p, 0.01), most=2e-6),  # its rectification cancels all digits but three in float32
    "Adamax": Case(lambda p: O.Adamax(p, 0.01)),
    "Adadelta": Case(lambda p: O.Adadelta(p, 0.5)),
    "Adagrad": Case(lambda p: O.Adagrad(p, 0.05, lr_decay=0.1, initial_accumulator_value=0.1)),
    "RMSprop": Case(lambda p: O.RMSprop(p, 0.01, momentum=0.9, centered=True), most=2e-4),
    "Rprop": Case(lambda p: O.Rprop(p, 0.01), most=2e-4),
    "ASGD": Case(lambda p: O.ASGD(p, 0.05)),
    "Adafactor": Case(lambda p: O.Adafactor(p, 0.05)),
    "Muon and AdamW": Case(matrices_and_rest, most=5e-2),  # torch's own computes in bfloat16
    "a user's Lion": Case(lambda p: Lion(p, 0.01, 0.1)),
    "AdamW, clip_norm": Case(lambda p: O.AdamW(p, 0.01), {"clip_norm": 0.5}),
    "SGD, clip_value": Case(lambda p: O.SGD(p, 0.5, 0.9), {"clip_value": 0.01}),
    "AdamW, accumulate": Case(lambda p: O.AdamW(p, 0.01), {"accumulate": 4, "clip_norm": 0.5}),
    "AdamW, average": Case(lambda p: O.AdamW(p, 0.01), {"average": 0.9}),
}


def net() -> nn.Module:
    """Small, with matrices and vectors."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.LayerNorm(24), nn.Linear(24, 6))


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Different ones, of a size that makes gradients vary."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(16, 12, generator=generator), torch.randn(16, 6, generator=generator)) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What twenty steps came to: the largest relative difference, of parameters and of their averages; the step."""

    error: float
    average_error: float
    step: onnx.ModelProto
    loop: Loop
    last: dict[str, np.ndarray]


def follow(case: Case, model: nn.Module | None = None) -> Outcome:
    """Train with torch and with the exported step, side by side."""
    model = model or net()
    parameters: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
    made = case.make(parameters)
    optimizers = made if isinstance(made, list) else [made]
    step = export_training_step(model, batches(1)[0], nn.functional.mse_loss, made, **case.options)
    loop = Loop(Session(step, donate=True), initial_feeds(step, model, made) | feeds(*batches(1)[0]))
    micro = int(case.options.get("accumulate", 1))
    averaged = _average(model, case.options.get("average"))
    for index, (x, y) in enumerate(batches(STEPS * micro)):
        (nn.functional.mse_loss(model(x), y) / micro).backward()
        if (index + 1) % micro == 0:
            if "clip_value" in case.options:
                nn.utils.clip_grad_value_(parameters, case.options["clip_value"])
            if "clip_norm" in case.options:
                nn.utils.clip_grad_norm_(parameters, case.options["clip_norm"])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if averaged is not None:
                averaged.update_parameters(model)
        loop.step(feeds(x, y))
    after = loop.state()
    error = max(_relative(after[name], p) for name, p in model.named_parameters())
    of_average = 0.0
    if averaged is not None:
        pairs = averaged.module.named_parameters()
        of_average = max(_relative(after[f"state.{name}.average"], p) for name, p in pairs)
    return Outcome(error, of_average, step, loop, feeds(x, y))


def _average(model: nn.Module, decay: float | None) -> torch.optim.swa_utils.AveragedModel | None:
    if decay is None:
        return None
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(decay)
    made = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average)
    made.update_parameters(model)  # the first call copies
    return made


def feeds(x: torch.Tensor, y: torch.Tensor) -> dict[str, np.ndarray]:
    """The batch by input name."""
    return {"input.0": x.numpy(), "input.1": y.numpy()}


def _relative(found: np.ndarray, expected: torch.Tensor) -> float:
    return float(np.abs(found - expected.detach().numpy()).max() / expected.detach().abs().max())
