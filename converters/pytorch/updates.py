"""The update of any optimizer: its own step on copies of the parameters, in a trace or in torch.

The step must not branch on values in Python. torch's optimizers do not, while they believe they are being compiled.
Numbers that a step reads from tensors (Adafactor) stay zero-dimensional tensors in the trace, and so do results of
``min``, ``max`` and functions of ``math`` on them.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy as shallow_copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from onnx_remat.errors import ConversionError
from onnx_remat.messages import first_line

from .private_state import pytree

State = dict[str, dict[str, torch.Tensor]]
"""State by parameter name, then by the optimizer's name of the piece of state."""

_CASTS = ("__bool__", "__int__", "__float__", "__index__")
"""Methods that make Python values of tensors, some of them through ``item``."""

APART: Mapping[str, Any] = {"foreach": False, "fused": False}
"""Settings by which every parameter has an update of its own; others refuse rates that are tensors."""

_CAPTURABLE = "capturable"
"""Setting for step counts in tensors, without which some optimizers branch on their values."""

REPLACED = {*APART, _CAPTURABLE}
"""Settings that choose a way to compute an update, not its result: a step has its own way."""

_DIVIDE_BY_RATE = (torch.optim.Adam, torch.optim.Adamax)
"""Optimizers that divide by the learning rate if they are capturable: at a rate of zero, with which a warm-up begins,
elements that never had a gradient would be 0 / 0. They do not branch in any form."""


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
    closure = inspect.signature(_own(optimizer)).parameters.get("closure")
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
    from_gradient = False
    for name in own:
        made[name] = {}
        for slot, value in (known[name] or from_zeros[name]).items():
            if not isinstance(value, torch.Tensor | int | float):
                _check_constant(optimizer, name, slot, value, known=name not in new)
            else:
                made[name][slot] = _tensor(value)
                if name in new and not torch.equal(made[name][slot], _tensor(from_ones[name][slot])):
                    made[name][slot] = torch.zeros_like(made[name][slot])
                    from_gradient = True
    if from_gradient:
        _check_zeros(optimizer, parameters, new, made)
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
) -> None:
    """Raise ConversionError unless a step from `state` equals the optimizer's first step, on random gradients."""
    made = []
    has_rates = all(isinstance(group.get("lr"), float | int | torch.Tensor) for group in optimizer.param_groups)
    settings = {**APART, "lr": 0.01} if has_rates else APART  # a warm-up begins at a rate that moves nothing
    for pieces in ({}, {name: {k: v.clone() for k, v in state[name].items()} for name in values}):
        copies = {name: value.clone().requires_grad_() for name, value in values.items()}
        for name, copy in copies.items():
            copy.grad = values[name].cos()
        step(twin(optimizer, parameters, copies, pieces, settings))
        made.append(copies)
    for name, value in values.items():
        if not value.numel():
            continue
        before, first, zeros = (other[name].detach().double() - value.double() for other in (made[0], *made))
        if (first - zeros).abs().max() > 1e-3 * before.abs().max():
            raise ConversionError(
                f"the first step of optimizer {type(optimizer).__qualname__} differs from all others (it starts its "
                "state from the gradient, as SGD with dampening does): take one step in torch, then export"
            )


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
    known: dict[int, Any] = {}
    other.__dict__.update(_copied(attributes, known))
    other.param_groups = [
        {
            **_copied({key: value for key, value in group.items() if key != "params"}, known),
            **({"capturable": False} if "capturable" in group else {}),  # its steps are on the host
            **{key: value for key, value in (settings or {}).items() if key in group},
            "params": [by_id[id(p)] for p in group["params"] if id(p) in by_id],
        }
        for group in optimizer.param_groups
    ]
    other.state = defaultdict(dict, {copies[name]: dict(pieces) for name, pieces in state.items() if name in copies})
    return other


def _copied(value: Any, known: dict[int, Any] | None = None) -> Any:
    """Return a copy of a container or array, and of those in it; whatever else is in them stays the same object.

    `known` has the copies made so far, by the identity of what they copy. A container that cannot be copied stays the
    same object, too: one that is frozen needs no copy.
    """
    known = {} if known is None else known
    if type(value) is tuple:
        return tuple(_copied(each, known) for each in value)
    if not isinstance(value, _CONTAINERS):
        return value
    if id(value) not in known:
        try:
            made: Any = shallow_copy(value)
            known[id(value)] = made
            places = (
                made.items() if isinstance(made, dict) else enumerate(made if isinstance(made, list | deque) else ())
            )
            for place, old in list(places):
                if (new := _copied(old, known)) is not old:
                    made[place] = new
        except Exception:
            known[id(value)] = value
    return known[id(value)]


_CONTAINERS = (dict, list, deque, set, np.ndarray)


def step(optimizer: torch.optim.Optimizer) -> None:
    """Run an optimizer's step without hooks and profiling."""
    with torch.no_grad(), _unprofiled(type(optimizer)):
        _own(optimizer)(optimizer)


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


def _own(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
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


@contextmanager
def numbers_stay_tensors(
    optimizer: torch.optim.Optimizer,
    settings: Iterable[torch.Tensor] = (),
    stored: Iterable[tuple[torch.Tensor, torch.dtype]] = (),
) -> Iterator[None]:
    """Let ``min``, ``max`` and ``math`` take tensors in the module of the optimizer's step; see `_Scalars`."""
    space = inspect.unwrap(type(optimizer).step).__globals__
    stand_ins = {"min": _choice(min, torch.minimum), "max": _choice(max, torch.maximum), "math": _Math()}
    before = {name: space[name] for name in stand_ins if name in space}
    usable = {n: v for n, v in stand_ins.items() if before.get(n, math) is math}  # keeps the user's own functions
    space.update(usable)
    try:
        with WithoutBfloat16(), _Scalars(type(optimizer).__qualname__, settings, stored):
            yield
    finally:
        for name in usable:
            if name in before:
                space[name] = before[name]
            else:
                del space[name]


def _choice(builtin: Callable[..., Any], of_tensors: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Return a ``min`` or ``max`` that also takes zero-dimensional tensors."""

    def choose(*values: Any, **options: Any) -> Any:
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if len(values) < 2 or not tensors:
            return builtin(*values, **options)
        chosen, *others = (torch.as_tensor(value, dtype=tensors[0].dtype) for value in values)
        for value in others:
            chosen = of_tensors(chosen, value)
        return chosen

    return choose


class _Math:
    """Stand-in for ``math`` whose functions also take tensors if torch has a function of that name."""

    def __getattr__(self, name: str) -> Any:
        plain = getattr(math, name)
        of_tensors = getattr(torch, name, None)
        if not callable(plain) or of_tensors is None:
            return plain

        def function(*values: Any) -> Any:
            return (of_tensors if isinstance(values[0], torch.Tensor) else plain)(*values)

        return function


class WithoutBfloat16(TorchFunctionMode):
    """Replace bfloat16 that a step uses for speed (Muon) by float32, since few CPU kernels support it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        requested = func.__name__ == "bfloat16" or (
            func.__name__ == "to" and any(value is torch.bfloat16 for value in (*args, *(kwargs or {}).values()))
        )  # traced tensors have a separate method for each
        if requested and args[0].dtype == torch.float32:
            return args[0].clone()
        return func(*args, **(kwargs or {}))


_IN_PLACE = {f"{name}_" for name in ("add", "sub", "mul", "div")} | {
    f"__i{n}__" for n in ("add", "sub", "mul", "truediv")
}
"""Names of torch's methods that change a number in place."""


class _Scalars(TorchFunctionMode):
    """A mode in which tensors replace Python numbers in an optimizer's step.

    Numbers read from tensors stay tensors. Settings that are inputs count as nonzero: torch's optimizers test them for
    zero only to skip work that has no effect at zero. In-place changes of `stored` tensors, which are wider than the
    user's, keep the user's precision: the product of NAdam's momenta is float32 in a float64 step.
    """

    def __init__(
        self, kind: str, settings: Iterable[torch.Tensor], stored: Iterable[tuple[torch.Tensor, torch.dtype]]
    ) -> None:
        super().__init__()
        self._kind = kind
        self._settings = list(settings)
        self._stored = {id(tensor): (tensor, dtype) for tensor, dtype in stored}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func.__name__ in ("ne", "__ne__") and any(args[0] is known for known in self._settings):
            return True
        if func is torch.Tensor.item and sys._getframe(1).f_code.co_name not in _CASTS:
            return args[0].reshape(())
        if func.__name__ in ("item", *_CASTS):
            raise ConversionError(
                f"the step of optimizer {self._kind} decides by the value of a tensor ({_line()}): a graph cannot; "
                "write it with torch.where, or export without an optimizer and update the parameters yourself"
            )
        if func.__name__ in ("pow", "__pow__") and args[1:] == (0.5,):
            return args[0].sqrt()  # kernels compute it, and no other power of a single number
        wide = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64
        kinds = (torch.Tensor, float) if wide else torch.Tensor  # torch's exporter would round a number to float32
        factor = next((kwargs.pop(k) for k in ("value", "alpha") if isinstance(kwargs.get(k), kinds)), None)
        if factor is None:
            if func.__name__ in _IN_PLACE and id(args[0]) in self._stored:
                return self._changed(func, args)
            return func(*args, **kwargs)
        first, *rest = args
        change = rest[0] / rest[1] if "addcdiv" in func.__name__ else rest[0] * rest[1] if len(rest) > 1 else rest[0]
        by = change * factor
        sign = -1 if "sub" in func.__name__ else 1
        return first.add_(sign * by) if func.__name__.endswith("_") else first + sign * by

    def _changed(self, func: Any, args: tuple[Any, ...]) -> torch.Tensor:
        """Return the result of an in-place change of a number, which torch computes in the number's dtype."""
        tensor, dtype = self._stored[id(args[0])]
        rest = (value.to(dtype) if isinstance(value, torch.Tensor) else value for value in args[1:])
        return tensor.copy_(func(tensor.to(dtype), *rest))


def _line() -> str:
    """Return the current line of the optimizer."""
    frames = [frame for frame in inspect.stack()[2:] if not frame.filename.endswith(("overrides.py", "_tensor.py"))]
    frame = next(frame for frame in frames if "torch/" not in frame.filename or "torch/optim" in frame.filename)
    return f"{frame.filename}:{frame.lineno}"
