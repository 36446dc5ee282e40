"""Any optimizer's update: its own step, run on the parameters' copies, in a trace or by torch itself.

SGD, Adam and AdamW are written out in `converters.optimizers`; of all others this traces what `step` does. It must be
free of Python decisions on values; torch's own are, told that they are being compiled, but for Adafactor.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from onnx_remat.errors import ConversionError

State = dict[str, dict[str, torch.Tensor]]
"""By parameter name, then by the optimizer's own name of the piece of state."""

_SETTINGS: Mapping[str, Any] = {"foreach": False, "fused": False, "capturable": True}  # one by one, steps as tensors


def initial_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> State:
    """State of every parameter that the optimizer holds: as it is, or as its first step makes it before using it."""
    copies = {
        name: parameter.detach().clone().requires_grad_() for name, parameter in _of(optimizer, parameters).items()
    }
    for copy in copies.values():
        copy.grad = torch.zeros_like(copy)
    other = twin(optimizer, parameters, copies, {})
    first: dict[torch.Tensor, _Remembering] = {copy: _Remembering() for copy in copies.values()}
    other.state = defaultdict(dict, first)
    step(other)
    made: State = {}
    for name, copy in copies.items():
        known = optimizer.state.get(parameters[name]) or first[copy].first
        made[name] = {
            slot: _tensor(value) for slot, value in known.items() if isinstance(value, torch.Tensor | int | float)
        }
    return made


class _Remembering(dict[str, Any]):
    """Keeps the first value of each key."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        self.first.setdefault(key, value.clone() if isinstance(value, torch.Tensor) else value)
        super().__setitem__(key, value)


def _tensor(value: torch.Tensor | float) -> torch.Tensor:
    """Numbers, which count steps, as torch counts them: in float32."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else torch.tensor(float(value))


def _of(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    inside = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {name: parameter for name, parameter in parameters.items() if id(parameter) in inside}


def twin(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    copies: Mapping[str, torch.Tensor],
    state: Mapping[str, dict[str, Any]],
    settings: Mapping[str, Any] | None = None,
) -> torch.optim.Optimizer:
    """An optimizer of the same kind, settings and attributes over copies; parameters without one are left out."""
    by_id = {id(parameters[name]): copy for name, copy in copies.items()}
    other: torch.optim.Optimizer = object.__new__(type(optimizer))
    other.__dict__.update(optimizer.__dict__)
    other.param_groups = [
        {
            **group,
            **{key: value for key, value in (settings or {}).items() if key in group},
            "params": [by_id[id(p)] for p in group["params"] if id(p) in by_id],
        }
        for group in optimizer.param_groups
    ]
    other.state = defaultdict(dict, {copies[name]: dict(pieces) for name, pieces in state.items() if name in copies})
    return other


def step(optimizer: torch.optim.Optimizer) -> None:
    """Its step without hooks and profiling."""
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(optimizer)


def updated(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    values: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor],
    state: Mapping[str, dict[str, torch.Tensor]],
    rates: Mapping[int, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], State]:
    """New parameters and state, in a trace.

    Parameters
    ----------
    optimizer, parameters
        As the user has them.
    values, gradients, state
        Tensors of the trace, by parameter name; a parameter without a gradient stays as it is.
    rates
        Tensors of the trace for learning rates that are inputs, by the identity of the user's.

    Raises
    ------
    ConversionError
        The step reads values.
    """
    copies = {name: values[name].detach().clone() for name in gradients}
    pieces = {name: {slot: value.clone() for slot, value in state.get(name, {}).items()} for name in copies}
    other = twin(optimizer, parameters, copies, pieces, _SETTINGS)
    for group in other.param_groups:
        if id(group.get("lr")) in rates:
            group["lr"] = rates[id(group["lr"])]
    for name, gradient in gradients.items():
        copies[name].grad = gradient.detach()
    with _ScalarTensors(type(optimizer).__qualname__):
        step(other)
    return copies, {name: {slot: other.state[copies[name]][slot] for slot in pieces[name]} for name in copies}


def clipped(gradients: Mapping[str, torch.Tensor], most: float) -> dict[str, torch.Tensor]:
    """Gradients scaled together to a norm of `most` at most, as `torch.nn.utils.clip_grad_norm_` scales them."""
    if not gradients:
        return {}
    total = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients.values()]))
    factor = (most / (total + 1e-6)).clamp(max=1.0)
    return {name: gradient * factor.to(gradient.dtype) for name, gradient in gradients.items()}


class _ScalarTensors(TorchFunctionMode):
    """Lets tensors stand where torch's in-place arithmetic takes Python numbers alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.item, torch.Tensor.__float__, torch.Tensor.__bool__):
            raise ConversionError(
                f"the step of optimizer {self._kind} reads the value of a tensor: a graph cannot depend on it; export "
                "without an optimizer and update the parameters from the gradients yourself"
            )
        factor = next((kwargs.pop(k) for k in ("value", "alpha") if isinstance(kwargs.get(k), torch.Tensor)), None)
        if factor is None:
            return func(*args, **kwargs)
        first, *rest = args
        change = rest[0] / rest[1] if "addcdiv" in func.__name__ else rest[0] * rest[1] if len(rest) > 1 else rest[0]
        by = change * factor
        sign = -1 if "sub" in func.__name__ else 1
        return first.add_(sign * by) if func.__name__.endswith("_") else first + sign * by
