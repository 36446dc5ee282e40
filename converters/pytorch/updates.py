"""The update of any optimizer: its own step on copies of the parameters, in a trace or in torch.

The step must not branch on values in Python. torch's optimizers do not, while they believe they are being compiled.
Numbers that a step reads from tensors (Adafactor) stay zero-dimensional tensors in the trace, and so do results of
``min``, ``max`` and functions of ``math`` on them.
"""

from __future__ import annotations

import inspect
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy as shallow_copy
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onnx_remat.errors import ConversionError

from .step_numbers import numbers_stay_tensors

State = dict[str, dict[str, torch.Tensor]]
"""State by parameter name, then by the optimizer's name of the piece of state."""

APART: Mapping[str, Any] = {"foreach": False, "fused": False}
"""Settings by which every parameter has an update of its own; others refuse rates that are tensors."""

_CAPTURABLE = "capturable"
"""Setting for step counts in tensors, without which some optimizers branch on their values."""

REPLACED = {*APART, _CAPTURABLE}
"""Settings that choose a way to compute an update, not its result: a step has its own way."""

_DIVIDE_BY_RATE = (torch.optim.Adam, torch.optim.Adamax)
"""Optimizers that divide by the learning rate if they are capturable: at a rate of zero, with which a warm-up begins,
elements that never had a gradient would be 0 / 0. They do not branch in any form."""


def owned(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return those of these parameters that an optimizer updates."""
    inside = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {name: parameter for name, parameter in parameters.items() if id(parameter) in inside}


def twin(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    copies: Mapping[str, torch.Tensor],
    state: Mapping[str, dict[str, Any]],
    settings: Mapping[str, Any] | None = None,
) -> torch.optim.Optimizer:
    """Return an optimizer of the same type, settings and attributes over copies; omit parameters without a copy.

    Containers in settings and attributes are copied, so that a step of the twin changes none of the user's.
    """
    by_id = {id(parameters[name]): copy for name, copy in copies.items()}
    other: torch.optim.Optimizer = object.__new__(type(optimizer))
    attributes = {key: value for key, value in vars(optimizer).items() if key not in ("state", "param_groups")}
    known: dict[int, tuple[Any, Any]] = {}
    other.__dict__.update({key: _copied(value, known) for key, value in attributes.items()})
    other.param_groups = [
        {
            **{key: _copied(value, known) for key, value in group.items() if key != "params"},
            **({"capturable": False} if "capturable" in group else {}),  # its steps are on the host
            **{key: value for key, value in (settings or {}).items() if key in group},
            "params": [by_id[id(p)] for p in group["params"] if id(p) in by_id],
        }
        for group in optimizer.param_groups
    ]
    other.state = defaultdict(dict, {copies[name]: dict(pieces) for name, pieces in state.items() if name in copies})
    return other


def _copied(value: Any, known: dict[int, tuple[Any, Any]] | None = None) -> Any:
    """Return a copy of a container or array, and of those in it; whatever else is in them stays the same object.

    `known` has what was copied so far, with its copy, by identity: while it is in there, no other object has its
    identity. A container that cannot be copied stays the same object, too: one that is frozen needs no copy.
    """
    known = {} if known is None else known
    if type(value) is tuple:
        return tuple(_copied(each, known) for each in value)
    if not isinstance(value, _CONTAINERS):
        return value
    if id(value) not in known:
        try:
            made: Any = shallow_copy(value)
            known[id(value)] = value, made
            listed = made if isinstance(made, list | deque) else ()
            for place, old in list(made.items() if isinstance(made, dict) else enumerate(listed)):
                if (new := _copied(old, known)) is not old:
                    made[place] = new
        except Exception:
            known[id(value)] = value, value
    return known[id(value)][1]


_CONTAINERS = (dict, list, deque, set, np.ndarray)


def step(optimizer: torch.optim.Optimizer) -> None:
    """Run an optimizer's step without hooks and profiling."""
    with torch.no_grad(), _unprofiled(type(optimizer)):
        unwrapped(optimizer)(optimizer)


@contextmanager
def _unprofiled(kind: Any) -> Iterator[None]:
    """Take torch's profiling off the steps of a class and its bases, which ``super().step()`` calls."""
    steps = {base: vars(base)["step"] for base in kind.__mro__ if hasattr(vars(base).get("step"), "hooked")}
    profiled = {base: own for base, own in steps.items() if _is_of_torch(own)}
    for base, own in profiled.items():
        base.step = own.__wrapped__
    try:
        yield
    finally:
        for base, own in profiled.items():
            base.step = own


def unwrapped(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return an optimizer's step without torch's wrappers; those of others may be part of the update."""
    return inspect.unwrap(type(optimizer).step, stop=lambda function: not _is_of_torch(function))


def _is_of_torch(function: Callable[..., Any]) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and Path(code.co_filename).is_relative_to(_TORCH)


_TORCH = Path(torch.__file__).parent


def updated(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    values: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor],
    state: Mapping[str, dict[str, torch.Tensor]],
    settings: Mapping[int, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], State]:
    """Return new parameters and state, in a trace.

    Parameters
    ----------
    optimizer, parameters
        The user's optimizer and parameters.
    values, gradients, state
        Tensors of the trace, by parameter name; a parameter without a gradient stays unchanged.
    settings
        Tensors of the trace for settings of groups that are inputs, by the identity of the user's tensors.

    Raises
    ------
    ConversionError
        The step reads values.
    """
    known = owned(optimizer, parameters)
    copies = {name: _exact(values[name].detach()) for name in gradients if name in known}
    pieces = {name: {slot: _exact(value) for slot, value in state.get(name, {}).items()} for name in copies}
    capturable = {_CAPTURABLE: not isinstance(optimizer, _DIVIDE_BY_RATE)}
    constants = {name: _constants(optimizer.state.get(parameters[name], {})) for name in copies}
    whole = {name: constants[name] | pieces[name] for name in copies}
    other = twin(optimizer, parameters, copies, whole, {**APART, **capturable})
    for group in other.param_groups:
        for key, value in group.items():
            if id(value) in settings:
                group[key] = settings[id(value)]
    for name, copy in copies.items():
        copy.grad = _exact(gradients[name].detach())
    before = _copied(_kept(other))
    double = any(values[name].dtype == torch.float64 for name in copies)
    stored = [
        (value, state[name][slot].dtype)
        for name, slots in pieces.items()
        for slot, value in slots.items()
        if double and value.dtype != state[name][slot].dtype
    ]
    with numbers_stay_tensors(other, settings.values(), stored):
        step(other)
    for name, value in _kept(other).items():
        if name not in before or not _same(before[name], value):
            raise ConversionError(
                f"the step of optimizer {type(optimizer).__qualname__} updates {name}, which would be a constant of "
                "the graph: keep it in the state of a parameter (self.state[p][...]), or export without an optimizer; "
                "if it is a cache that the first step fills, take one step in torch, then export"
            )
    for name, copy in copies.items():
        for slot, value in other.state[copy].items():
            if slot not in pieces[name] and (slot not in constants[name] or value != constants[name][slot]):
                raise ConversionError(
                    f"a later step of optimizer {type(optimizer).__qualname__} sets state {slot!r} of {name}, which is "
                    "no tensor before: take one more step in torch, then export"
                )
    renewed = {name: {slot: other.state[copies[name]][slot] for slot in pieces[name]} for name in copies}
    return {name: copy.to(values[name].dtype) for name, copy in copies.items()}, {
        name: {slot: value.to(state[name][slot].dtype) for slot, value in slots.items()}
        for name, slots in renewed.items()
    }


def _constants(pieces: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pieces of state that are neither tensors nor numbers."""
    return {slot: value for slot, value in pieces.items() if not isinstance(value, torch.Tensor | int | float)}


def _exact(value: torch.Tensor) -> torch.Tensor:
    """Return a copy; single numbers, which count steps, are float64, as exact as Python numbers.

    So are parameters that are single numbers, which an update combines with state of their shape.
    """
    return value.double() if not value.dim() and value.is_floating_point() else value.clone()


def _kept(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the settings and attributes of an optimizer outside its parameters' state, by a name for messages."""
    attributes = {f"self.{k}": v for k, v in vars(optimizer).items() if k not in ("state", "param_groups", _WARNED)}
    groups = enumerate(optimizer.param_groups)
    settings = {f"{key} of group {i}": value for i, group in groups for key, value in group.items() if key != "params"}
    parameters = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    extra_state = {f"self.state[{key!r}]": dict(v) for key, v in optimizer.state.items() if key not in parameters}
    return attributes | settings | extra_state


_WARNED = "_warned_capturable_if_run_uncaptured"


def _same(before: Any, after: Any) -> bool:
    """Return whether two values are equal, where tensors and what cannot be compared are only equal to themselves."""
    if before is after:
        return True
    if isinstance(before, torch.Tensor) or type(before) is not type(after):
        return False
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(_same(before[key], after[key]) for key in before)
    if isinstance(before, list | deque | tuple):
        return len(before) == len(after) and all(map(_same, before, after))
    try:
        return np.array_equal(before, after) if isinstance(before, np.ndarray) else bool(before == after)
    except Exception:
        return False
