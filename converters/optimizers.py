"""SGD, Adam and AdamW as ONNX nodes, with the arithmetic, state names and defaults of torch.optim.

For `autodiff.add_backward` and the TensorFlow converter. Converters of PyTorch and JAX trace the user's own optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import onnx_ir as ir

from onnx_remat.errors import UsageError
from onnx_remat.messages import Setting

from . import names
from .emit import Emitter

State = dict[str, ir.Value]

Rate: TypeAlias = float | str
"""A learning rate: a number, or the name of a float32 scalar input that supplies it in every step."""


class Optimizer(Protocol):
    """The interface of an optimizer, for one parameter at a time."""

    @property
    def lr(self) -> Rate: ...

    def slots(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the shape of each piece of state of a parameter; all start at zero."""
        ...

    def update(self, emit: Emitter, parameter: ir.Value, gradient: ir.Value, state: State) -> tuple[ir.Value, State]:
        """Append the update, and return the new parameter and the new state."""
        ...


@dataclass(frozen=True, slots=True)
class SGD:
    """`torch.optim.SGD`.

    Attributes
    ----------
    lr : Rate
    momentum, dampening, weight_decay : float
    nesterov, maximize : bool

    The momentum buffer starts at zero, whereas torch's starts at the first gradient. With dampening the two would
    differ, because torch applies it from the second step on; momentum with dampening is therefore refused.
    """

    lr: Rate = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False

    def __post_init__(self) -> None:
        _check_rate(self.lr)
        if self.momentum and self.dampening:
            raise ValueError("SGD with dampening is not supported, as torch omits it in the first step: set it to 0")
        if self.nesterov and not self.momentum:
            raise ValueError("SGD with nesterov needs a momentum")

    def slots(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {"momentum_buffer": shape} if self.momentum else {}

    def update(self, emit: Emitter, parameter: ir.Value, gradient: ir.Value, state: State) -> tuple[ir.Value, State]:
        step, new = _signed(emit, gradient, self.maximize), {}
        if self.weight_decay:
            step = emit("Add", step, _scaled(emit, parameter, self.weight_decay), like=parameter)
        if self.momentum:
            buffer = emit("Add", _scaled(emit, state["momentum_buffer"], self.momentum), step, like=parameter)
            new["momentum_buffer"] = buffer
            step = emit("Add", step, _scaled(emit, buffer, self.momentum), like=parameter) if self.nesterov else buffer
        change = emit("Mul", step, _rate(emit, self.lr, parameter), like=parameter)
        return emit("Sub", parameter, change, like=parameter), new


@dataclass(frozen=True, slots=True)
class Adam:
    """`torch.optim.Adam`, and with ``decoupled`` `torch.optim.AdamW`.

    Attributes
    ----------
    lr : Rate
    betas : pair of float
    eps, weight_decay : float
    amsgrad, maximize : bool
    decoupled : bool
        Decay weights directly, not through the gradient (Loshchilov & Hutter 2019).
    """

    lr: Rate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False
    decoupled: bool = False

    def __post_init__(self) -> None:
        _check_rate(self.lr)

    def slots(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        slots: dict[str, tuple[int, ...]] = {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
        return slots | ({"max_exp_avg_sq": shape} if self.amsgrad else {})

    def update(self, emit: Emitter, parameter: ir.Value, gradient: ir.Value, state: State) -> tuple[ir.Value, State]:
        gradient = _signed(emit, gradient, self.maximize)
        if self.weight_decay and self.decoupled:
            parameter = emit("Mul", parameter, _kept(emit, self.lr, self.weight_decay, parameter), like=parameter)
        elif self.weight_decay:
            gradient = emit("Add", gradient, _scaled(emit, parameter, self.weight_decay), like=parameter)
        first, second = self.betas
        step = emit("Add", state["step"], emit.scalar(1, state["step"]), like=state["step"])
        mean = _blend(emit, state["exp_avg"], gradient, first)
        square = emit("Mul", gradient, gradient, like=parameter)
        variance = _blend(emit, state["exp_avg_sq"], square, second)
        new = {"step": step, "exp_avg": mean, "exp_avg_sq": variance}
        if self.amsgrad:
            variance = new["max_exp_avg_sq"] = emit("Max", state["max_exp_avg_sq"], variance, like=parameter)
        # torch: parameter - lr / (1 - b1^t) * mean / (sqrt(variance) / sqrt(1 - b2^t) + eps)
        count = _wide(emit, step, parameter)
        rate = emit("Div", _rate(emit, self.lr, count), _correction(emit, count, first), like=count)
        root = emit("Sqrt", _correction(emit, count, second), like=count)
        spread = emit("Sqrt", variance, like=parameter)
        spread = emit("Div", spread, _cast(emit, root, parameter), like=parameter)
        spread = emit("Add", spread, emit.scalar(self.eps, parameter), like=parameter)
        change = emit("Div", emit("Mul", mean, _cast(emit, rate, parameter), like=parameter), spread, like=parameter)
        return emit("Sub", parameter, change, like=parameter), new


def AdamW(
    lr: Rate = 1e-3,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
    maximize: bool = False,
) -> Adam:
    """`torch.optim.AdamW`: Adam with decoupled weight decay.

    >>> AdamW(lr=0.01).decoupled
    True
    """
    return Adam(lr, betas, eps, weight_decay, amsgrad, maximize, decoupled=True)


def append(graph: ir.Graph, optimizers: Mapping[str, Optimizer], batch_inputs: int) -> None:
    """Turn a graph that outputs gradients into one that outputs new parameters and state.

    Outputs ``new.<name>`` and ``new.state.<name>.<slot>`` replace each output ``grad.<name>`` of a parameter in
    `optimizers`. Inputs ``state.<name>.<slot>``, and learning rates that are inputs, are added between parameters and
    buffers, and the batch.

    Parameters
    ----------
    graph : onnx_ir.Graph
        The graph, changed in place; its outputs are in the order of `names`.
    optimizers : mapping of str to Optimizer
        The optimizer of each parameter by name, so that groups may differ.
    batch_inputs : int
        Number of the graph's last inputs that are the batch.

    Raises
    ------
    UsageError
        A learning rate has the name of a value of the graph.
    """
    emit = Emitter(graph, "optimizer")
    first_batch = len(graph.inputs) - batch_inputs
    graph.inputs[first_batch:first_batch] = _rate_inputs(emit, optimizers)
    inputs = {value.name: value for value in graph.inputs}
    gradients = {value.name: value for value in graph.outputs}
    states: list[ir.Value] = []
    new_parameters: list[ir.Value] = []
    new_states: list[ir.Value] = []
    for name, optimizer in optimizers.items():
        parameter, gradient = inputs[name], gradients[names.gradient(name)]
        assert parameter.shape is not None and parameter.dtype is not None
        is_open = not parameter.shape.is_static()
        slots = optimizer.slots(() if is_open else parameter.shape.numpy())
        if slots and is_open:
            raise UsageError(
                "parameter {!r} has an open size, and so has its state: fix it with {}", name, Setting("dims")
            )
        state: State = {}
        for slot, shape in slots.items():
            # torch counts steps in float32 whatever the parameter's dtype
            dtype = ir.DataType.FLOAT if slot == "step" else parameter.dtype
            state[slot] = ir.Value(
                name=emit.fresh(names.state(name, slot)), shape=ir.Shape(shape), type=ir.TensorType(dtype)
            )
        updated, after = optimizer.update(emit, parameter, gradient, state)
        updated.name = names.new(name)
        new_parameters.append(updated)
        for slot, value in after.items():
            value.name = names.new(names.state(name, slot))
            new_states.append(value)
        states.extend(state.values())
    replaced = {names.gradient(name) for name in optimizers}
    kept = [value for value in graph.outputs if value.name not in replaced]
    for name in replaced:  # not an output any more: renamed, so that it cannot clash with a later `grad.` output
        gradients[name].name = emit.fresh(f"backward.{name}")
    graph.inputs[first_batch:first_batch] = states
    loss, others = kept[:1], kept[1:]
    graph.outputs[:] = [*loss, *new_parameters, *new_states, *others]


def _rate_inputs(emit: Emitter, optimizers: Mapping[str, Optimizer]) -> list[ir.Value]:
    named = dict.fromkeys(optimizer.lr for optimizer in optimizers.values() if isinstance(optimizer.lr, str))
    if clash := next((name for name in named if emit.fresh(name) != name), None):
        raise UsageError(f"the graph already has a value {clash!r}: choose another name for the learning rate")
    return [ir.Value(name=name, shape=ir.Shape(()), type=ir.TensorType(ir.DataType.FLOAT)) for name in named]


def _check_rate(lr: Rate) -> None:
    """Raise UsageError for a learning rate that is no number of at least 0, as torch does."""
    if not isinstance(lr, str) and not 0 <= lr < math.inf:
        raise UsageError(f"a learning rate is a finite number of at least 0, or the name of an input, not {lr}")


def _rate(emit: Emitter, lr: Rate, like: ir.Value) -> ir.Value:
    """Return the learning rate as a scalar with the dtype of `like`."""
    return _cast(emit, _input(emit, lr), like) if isinstance(lr, str) else emit.scalar(lr, like)


def _kept(emit: Emitter, lr: Rate, decay: float, like: ir.Value) -> ir.Value:
    """Return 1 - lr * decay as a scalar with the dtype of `like`."""
    if not isinstance(lr, str):
        return emit.scalar(1 - lr * decay, like)
    rate = _wide(emit, _input(emit, lr), like)  # the difference from 1 would be lost in a narrower type
    return _cast(emit, emit("Sub", emit.scalar(1, rate), _scaled(emit, rate, decay), like=rate), like)


def _wide(emit: Emitter, value: ir.Value, parameter: ir.Value) -> ir.Value:
    """Return a scalar of float32, in float64 for a parameter of that."""
    return _cast(emit, value, parameter) if parameter.dtype == ir.DataType.DOUBLE else value


def _input(emit: Emitter, name: str) -> ir.Value:
    return next(value for value in emit.graph.inputs if value.name == name)


def _signed(emit: Emitter, gradient: ir.Value, maximize: bool) -> ir.Value:
    return emit("Neg", gradient, like=gradient) if maximize else gradient


def _scaled(emit: Emitter, value: ir.Value, factor: float) -> ir.Value:
    return emit("Mul", value, emit.scalar(factor, value), like=value)


def _blend(emit: Emitter, old: ir.Value, new: ir.Value, keep: float) -> ir.Value:
    return emit("Add", _scaled(emit, old, keep), _scaled(emit, new, 1 - keep), like=old)


def _correction(emit: Emitter, step: ir.Value, beta: float) -> ir.Value:
    """Return 1 - beta ** step."""
    return emit("Sub", emit.scalar(1, step), emit("Pow", emit.scalar(beta, step), step, like=step), like=step)


def _cast(emit: Emitter, value: ir.Value, like: ir.Value) -> ir.Value:
    assert like.dtype is not None
    if value.dtype == like.dtype:
        return value
    made = emit("Cast", value, to=int(like.dtype))
    made.shape, made.type = value.shape, ir.TensorType(like.dtype)
    return made


def initial_state(optimizers: Mapping[str, Optimizer], parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return zeros for every state input of the parameters' optimizers, by input name."""
    return {
        names.state(name, slot): np.zeros(shape, np.float32 if slot == "step" else parameters[name].dtype)
        for name, optimizer in optimizers.items()
        for slot, shape in optimizer.slots(parameters[name].shape).items()
    }
