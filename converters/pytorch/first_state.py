"""The state of an optimizer before the first step of a graph: its own, or that of its first step."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from onnx_remat.errors import ConversionError
from onnx_remat.messages import first_line

from .private_state import pytree
from .updates import APART, State, owned, step, twin, unwrapped


def initial_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> State:
    """Return the state of every parameter of the optimizer: its current state, or the start of its first step.

    A piece that the first step takes from the gradient (the momentum of SGD) starts at zero if the result is the same.

    Raises
    ------
    ConversionError
        The result is not the same: the first step differs from all others; or a piece of state is neither a tensor nor
        a number.
    """
    kind = type(optimizer).__qualname__
    closure = inspect.signature(unwrapped(optimizer)).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConversionError(
            f"the step of optimizer {kind} runs the model again by itself, as often as it decides (a closure): a graph "
            "cannot; take another optimizer, or export without one and update the parameters yourself"
        )
    own = {name: parameter.detach() for name, parameter in owned(optimizer, parameters).items()}
    known = {name: optimizer.state.get(parameters[name]) or {} for name in own}
    new = {name: value for name, value in own.items() if not known[name]}
    try:
        _check_own(optimizer, parameters)
        from_zeros, from_ones = (_first(optimizer, parameters, new, fill) for fill in (0.0, 1.0))
    except ConversionError:
        raise
    except Exception as error:  # SparseAdam wants sparse gradients, SAM a closure
        raise ConversionError(
            f"the step of optimizer {kind} cannot be traced ({first_line(error)}): export without an optimizer and "
            "update the parameters yourself"
        ) from error
    made: State = {}
    zeroed: dict[str, list[str]] = {}
    for name in own:
        made[name] = {}
        for slot, value in (known[name] or from_zeros[name]).items():
            if not isinstance(value, torch.Tensor | int | float):
                _check_constant(optimizer, name, slot, value, known=name not in new)
            else:
                made[name][slot] = _tensor(value)
                if name in new and not torch.equal(made[name][slot], _tensor(from_ones[name][slot])):
                    made[name][slot] = torch.zeros_like(made[name][slot])
                    zeroed.setdefault(name, []).append(slot)
    if zeroed:
        _check_zeros(optimizer, parameters, new, made, zeroed)
    return made


def _check_own(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise ConversionError where a step works on parameters that a copy of the optimizer does not have.

    An optimizer in it has them; a list of them may be for other purposes, so that a step on copies shows it.
    """
    inside = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, value in vars(optimizer).items():
        leaves = pytree.tree_leaves(value) if name not in ("param_groups", "state") else []
        has_own = any(id(leaf) in inside for leaf in leaves) and not _moves(optimizer, parameters)
        if has_own or any(isinstance(leaf, torch.optim.Optimizer) for leaf in leaves):
            raise ConversionError(
                f"the step of optimizer {type(optimizer).__qualname__} works by self.{name}, not by its param_groups, "
                "and would change no copy of the parameters: give the optimizer in it, or export without one"
            )


def _moves(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a step of a copy of the optimizer changes copies of its parameters, or keeps state of them."""
    mine = owned(optimizer, parameters)
    copies = {name: parameter.detach().clone().requires_grad_() for name, parameter in mine.items()}
    kept = {name: parameter.grad for name, parameter in mine.items()}
    for name, copy in copies.items():
        copy.grad, mine[name].grad = torch.ones_like(copy), None  # a step must not move the user's own
    other = twin(optimizer, parameters, copies, {}, APART)
    try:
        step(other)
    finally:
        for name, gradient in kept.items():
            mine[name].grad = gradient
    return bool(other.state) or any(not torch.equal(copies[name], mine[name]) for name in copies)


def _check_constant(optimizer: torch.optim.Optimizer, name: str, slot: str, value: Any, known: bool) -> None:
    """Raise ConversionError for a piece of state that later steps may set: a container, or None before any step."""
    which = f"state {slot!r} of {name} in optimizer {type(optimizer).__qualname__}"
    if value is None and not known:
        raise ConversionError(f"{which} is None before the first step: take one step in torch, then export")
    if value is not None and not isinstance(value, str):
        raise ConversionError(
            f"{which} is a {type(value).__name__}, and a graph's state is tensors: keep each in a piece of its own, or "
            "export without an optimizer and update the parameters yourself"
        )


def _first(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    values: Mapping[str, torch.Tensor],
    gradient: float,
) -> dict[str, dict[str, Any]]:
    """Return the first value of each piece of state in a step on gradients of one number."""
    copies = {name: value.clone().requires_grad_() for name, value in values.items()}
    for copy in copies.values():
        copy.grad = torch.full_like(copy, gradient)
    other = twin(optimizer, parameters, copies, {}, APART)
    first: dict[torch.Tensor, _Remembering] = {copy: _Remembering() for copy in copies.values()}
    other.state = defaultdict(dict, first)
    step(other)
    return {name: first[copy].first for name, copy in copies.items()}


def _check_zeros(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    values: Mapping[str, torch.Tensor],
    state: State,
    zeroed: Mapping[str, Sequence[str]],
) -> None:
    """Raise ConversionError unless a step from `state` equals the optimizer's first step.

    It is to give the same parameters, which a first step that sets state may leave alone, and the same in the pieces of
    state that start at zero here (`zeroed`); others, such as a rate, are as they were.
    """
    made = []
    has_rates = all(isinstance(group.get("lr"), float | int | torch.Tensor) for group in optimizer.param_groups)
    settings = {**APART, "lr": 0.01} if has_rates else APART  # a warm-up begins at a rate that moves nothing
    for pieces in ({}, {name: {k: v.clone() for k, v in state[name].items()} for name in values}):
        copies = {name: value.clone().requires_grad_() for name, value in values.items()}
        for name, copy in copies.items():
            copy.grad = values[name].cos()
        other = twin(optimizer, parameters, copies, pieces, settings)
        step(other)
        made.append({name: (copy.detach(), other.state[copy]) for name, copy in copies.items()})
    for name, value in values.items():
        (first, kept), (zeros, others) = (of[name] for of in made)
        pairs = [(first.double() - value.double(), zeros.double() - value.double())]
        slots = [slot for slot in zeroed.get(name, ()) if isinstance(kept.get(slot), torch.Tensor | int | float)]
        pairs += [(_tensor(kept[slot]), _tensor(others[slot])) for slot in slots]
        if any(_differ(*pair) for pair in pairs):
            raise ConversionError(
                f"the first step of optimizer {type(optimizer).__qualname__} differs from all others (it starts its "
                "state from the gradient, as SGD with dampening does): take one step in torch, then export"
            )


def _differ(first: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two results differ by more than rounding."""
    first, other = first.double(), other.double()
    return bool(first.numel() and (first - other).abs().max() > 1e-3 * first.abs().max())


class _Remembering(dict[str, Any]):
    """A dict that keeps the first value of each key: the first that is set, or the default of the first read."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        self._remember(key, value)
        super().__setitem__(key, value)

    def get(self, key: str, default: Any = None) -> Any:
        if key not in self and default is not None:
            self._remember(key, default)
        return super().get(key, default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        self._remember(key, default)
        return super().setdefault(key, default)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def _remember(self, key: str, value: Any) -> None:
        self.first.setdefault(key, value.clone() if isinstance(value, torch.Tensor) else value)


def _tensor(value: torch.Tensor | float) -> torch.Tensor:
    """Return a number, which counts steps, as a float32 tensor, as in torch."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else torch.tensor(float(value))
