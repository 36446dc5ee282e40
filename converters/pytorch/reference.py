"""The framework's own answer: eager steps on copies of everything they change."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from .. import names
from .decisions import Replay
from .trace import Step, eager_kernels


def array(tensor: torch.Tensor) -> np.ndarray:
    """As numpy, bfloat16 included."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return np.asarray(tensor.numpy())


def tensor(value: np.ndarray) -> torch.Tensor:
    """As torch, bfloat16 included; a copy."""
    if value.dtype.name == "bfloat16":
        return torch.from_numpy(value.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(value))


def outputs(
    step: Step, watched: Sequence[np.ndarray], tolerance: Mapping[str, float]
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Every output of the step by name, and how much each moves when parameters move by a rounding error.

    `watched` are the values of the exported step that `decisions.Replay` needs, and compares within `tolerance`.

    The second step starts from parameters moved by up to half a unit in the last place, at random: outputs that then
    move by more than a tolerance cannot be told apart from noise (a gradient that is zero in exact arithmetic).
    """
    inputs = step.inputs
    answer = _run(step, {name: value.clone() for name, value in inputs.items()}, watched, tolerance)
    generator = torch.Generator().manual_seed(0)
    moved = {
        name: _jitter(value, generator) if name in step.trainable else value.clone() for name, value in inputs.items()
    }
    again = _run(step, moved, watched, tolerance)
    noise = {name: _distance(value, again[name]) for name, value in answer.items() if value.is_floating_point()}
    return {name: array(value) for name, value in answer.items()}, noise


def _run(
    step: Step, values: dict[str, torch.Tensor], watched: Sequence[np.ndarray], tolerance: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    allowed = {dtype: tolerance[str(dtype).removeprefix("torch.")] for dtype in _FLOATS}
    with eager_kernels():
        return step.run(values, Replay(watched, allowed))


_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _jitter(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    sign = torch.rand(value.shape, generator=generator).to(value) * 2 - 1
    return value * (1 + sign * torch.finfo(value.dtype).eps)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.numel() == 0:
        return 0.0
    difference = (a.double() - b.double()).abs()
    return float(difference.nan_to_num(0, 0, 0).max())


def updated(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    gradients: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """New parameters and state, by output name, that the optimizer itself makes of these gradients by parameter."""
    of = {id(parameter): name for name, parameter in parameters.items()}
    copies = {name: parameter.detach().clone().requires_grad_() for name, parameter in parameters.items()}
    groups = [{**group, "params": [copies[of[id(p)]] for p in group["params"]]} for group in optimizer.param_groups]
    twin = type(optimizer)(groups)  # type: ignore[call-arg]  # all that are supported have defaults
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # loading shares the step counter
    for name, gradient in gradients.items():
        copies[name].grad = tensor(gradient)
    twin.step()
    made = {names.new(name): array(copies[name]) for name in gradients}
    for name in gradients:
        for slot, value in twin.state[copies[name]].items():
            if isinstance(value, torch.Tensor):
                made[names.new(names.state(name, slot))] = array(value)
    return made
