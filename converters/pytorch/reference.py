"""Reference outputs: torch's eager steps on copies of all tensors that they change."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from onnx_remat.errors import ConversionError
from onnx_remat.session import heap

from .. import names
from ..checks import agreement as check
from ..checks import tolerances
from . import updates
from .arrays import array, tensor
from .decisions import Recorder, Replay
from .private_torch import TorchDispatchMode, pytree
from .recipe import AVERAGE, COUNT, GROWTH, SCALE, SUM, Recipe
from .rules.composites import Composites
from .step import StepParts
from .step_numbers import without_bfloat16
from .trace import eager_kernels


def outputs(step: StepParts, watched: Sequence[np.ndarray], tolerance: Mapping[str, float]) -> dict[str, np.ndarray]:
    """Return every output of the step by name, computed by torch.

    `watched` are the values of the exported step that `decisions.Replay` substitutes, and compares within `tolerance`.
    """
    own = step.own  # a run copies them
    values = {name: value if name in own else value.clone() for name, value in step.inputs.items()}
    return _run(step, values, watched, tolerance)


def runs(step: StepParts) -> bool:
    """Return whether torch can run the step's forward and backward pass on its batch."""
    try:
        with eager_kernels(), torch.random.fork_rng([]):
            step.run(step.inputs, Recorder())
    except Exception:
        return False
    return True


def exact(
    step: StepParts, watched: Sequence[np.ndarray], tolerance: Mapping[str, float]
) -> dict[str, np.ndarray] | None:
    """Return the outputs computed in float64 throughout; None if the model's code requires another type.

    Return None also if rounding moves the step further than `tolerance` from float64.
    """
    values = {name: _wide(value.clone()) for name, value in step.inputs.items()}
    try:
        return _run(step, values, watched, tolerance, Wide())
    except (RuntimeError, ConversionError):
        return None


def rounded(answer: Mapping[str, np.ndarray], exact: Mapping[str, np.ndarray] | None, eps: float) -> dict[str, float]:
    """Return the noise of each output in `answer`: its distance from `exact`, or a share of it (`_share`)."""
    known = exact or {}
    return {n: _share(eps) * _distance(a, known[n]) for n, a in answer.items() if n in known and check.is_float(a)}


def _share(eps: float) -> float:
    """Return the share of a difference that is noise: few differences in half precision are (`HALF_ROUNDINGS`)."""
    return tolerances.HALF_ROUNDINGS / tolerances.NOISE_FACTOR if eps else 1.0


def moved(
    step: StepParts,
    watched: Sequence[np.ndarray],
    tolerance: Mapping[str, float],
    answer: Mapping[str, np.ndarray],
    noise: Mapping[str, float],
    eps: float,
) -> dict[str, float]:
    """Return the change of each output in `answer` when parameters change by a rounding error; at least its `noise`.

    The change is a unit in the last place of their type, up or down at random; where the step computes in a coarser
    one, half of its `eps`, as large as rounding gets. Few such changes are noise then (`tolerances.HALF_ROUNDINGS`). An
    output that changes by more than a tolerance is indistinguishable from noise (such as a gradient that is zero in
    exact arithmetic).
    """
    generator = torch.Generator().manual_seed(0)
    values = {
        name: _jitter(value, generator, eps) if name in step.trainable else value.clone()
        for name, value in step.inputs.items()
    }
    if eps:  # in half precision, such changes may move what an operator with a kink reads beyond any tolerance
        tolerance = dict.fromkeys(tolerance, math.inf)
    again = _run(step, values, watched, tolerance)
    floats = {name: value for name, value in answer.items() if check.is_float(value)}
    share = _share(eps)
    return {name: max(share * _distance(value, again[name]), noise.get(name, 0.0)) for name, value in floats.items()}


def _run(
    step: StepParts,
    values: dict[str, torch.Tensor],
    watched: Sequence[np.ndarray],
    tolerance: Mapping[str, float],
    within: AbstractContextManager[Any] = nullcontext(),  # noqa: B008  # it holds nothing
) -> dict[str, np.ndarray]:
    replay = Replay(watched, tolerance)
    with eager_kernels(), within, Composites(replay, own=True):
        made = step.run(values, replay)
    found = {name: array(value) for name, value in made.items()}
    heap.trim()  # frees autograd's tensors
    return found


_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Wide(TorchDispatchMode):
    """A mode in which every operator computes in float64, whatever dtype the step requests."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # a tensor changed in place must keep its identity; it is float64 unless the step did not make it
        first = args[:1] if func._schema.is_mutable else ()
        rest, kwargs = pytree.tree_map(_wide, (args[len(first) :], kwargs or {}))
        return func(*first, *rest, **kwargs)


def _wide(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    return torch.float64 if value in _FLOATS else value


def _jitter(value: torch.Tensor, generator: torch.Generator, eps: float) -> torch.Tensor:
    sign = torch.randint(0, 2, value.shape, generator=generator).to(value) * 2 - 1
    return value * (1 + sign * max(eps / 2, torch.finfo(value.dtype).eps))


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):  # infinities
        difference = np.abs(a.astype(np.float64) - b)
    return float(np.nan_to_num(difference, nan=0.0, posinf=0.0).max(initial=0.0))


def updated(
    step: StepParts, before: Mapping[str, np.ndarray], gradients: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return torch's new parameters and state, by output name, for these gradients by parameter.

    The gradients are those of the last of `Recipe.accumulate` micro-batches; those before it were zero. `before` has
    the trained parameters as the forward pass left them.
    """
    recipe, parameters = step.recipe, dict(step.model.named_parameters())
    copies = {name: tensor(value).requires_grad_() for name, value in before.items()}
    given = {name: tensor(gradient) for name, gradient in gradients.items()}
    finite = {n: recipe.scaling is None or bool(gradient.isfinite().all()) for n, gradient in given.items()}
    if recipe.clip_norm is not None:
        finite = dict.fromkeys(finite, all(finite.values()))
    for name, gradient in given.items():
        copies[name].grad = gradient
    trained = [copies[name] for name in gradients]
    if recipe.clip_value is not None:
        torch.nn.utils.clip_grad_value_(trained, recipe.clip_value)
    if recipe.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(trained, recipe.clip_norm)
    made: dict[str, np.ndarray] = {}
    for optimizer in step.optimizers:
        own = updates.owned(optimizer, {name: parameters[name] for name in gradients})
        made |= _stepped(step, optimizer, parameters, copies, own, all(finite[name] for name in own))
    made |= {names.new(name): array(copy.detach()) for name, copy in copies.items()}
    for name in gradients:
        if recipe.average is not None:
            first, after = parameters[name].detach(), copies[name].detach()
            made[names.new(names.state(name, AVERAGE))] = array(first.lerp(after, 1 - recipe.average))
        if recipe.accumulate > 1:
            made[names.new(names.state(name, SUM))] = np.zeros_like(gradients[name])
    return made | _counters(recipe, all(finite.values()))


def _stepped(
    step: StepParts,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    copies: Mapping[str, torch.Tensor],
    own: Iterable[str],
    finite: bool,
) -> dict[str, np.ndarray]:
    """Return the state of its `own` parameters after the step of one optimizer, which changes the copies; unchanged if
    the step is skipped."""
    known = {name: copy.deepcopy(optimizer.state.get(parameter, {})) for name, parameter in parameters.items()}
    twin = updates.twin(
        optimizer, parameters, copies, {name: pieces for name, pieces in known.items() if pieces}, updates.APART
    )
    rates = {id(step.settings[name]): rate for name, rate in step.rates.items()}
    for group in twin.param_groups:
        group.update({key: rates[id(value)] for key, value in group.items() if id(value) in rates})
    if finite:
        with without_bfloat16(step.state.get(name, {}) for name in own):
            updates.step(twin)
    made: dict[str, np.ndarray] = {}
    for name in own:
        after: Mapping[str, Any] = twin.state.get(copies[name], {}) if finite else step.state.get(name, {})
        for slot, value in after.items():
            if isinstance(value, torch.Tensor | int | float):
                made[names.new(names.state(name, slot))] = array(torch.as_tensor(value, dtype=_counted(value)))
    return made


def _counters(recipe: Recipe, finite: bool) -> dict[str, np.ndarray]:
    """Return counters and scale after a step with an update, as numbers."""
    made = {COUNT: 0.0} if recipe.accumulate > 1 else {}
    if (scaling := recipe.scaling) is not None:
        grows = finite and scaling.growth + 1 >= scaling.interval
        factor = scaling.growth_factor if grows else 1.0 if finite else scaling.backoff_factor
        made |= {SCALE: scaling.scale * factor, GROWTH: 0.0 if grows or not finite else scaling.growth + 1.0}
    return {names.new(name): np.array(value, np.float32) for name, value in made.items()}


def _counted(value: torch.Tensor | float) -> torch.dtype:
    """Return the dtype of a piece of state: Python's numbers count steps, and are float32 in a graph."""
    return value.dtype if isinstance(value, torch.Tensor) else torch.float32
