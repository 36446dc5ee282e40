"""Gradient rules of elementwise ops."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from ..dims import dims
from ..tape import Tape, number
from .registry import Grads, RuleInput, rule


@rule("Identity")
def identity(s: RuleInput) -> Grads:
    return {0: lambda: s.g}


@rule("Add", "Sub")
def add(s: RuleInput) -> Grads:
    return {0: lambda: _to(s, s.g, 0), 1: lambda: s.t.mul(_to(s, s.g, 1), -1.0 if s.node.op_type == "Sub" else 1.0)}


@rule("Mul")
def mul(s: RuleInput) -> Grads:
    t, a, b = s.t, s.x(0), s.x(1)
    if a is b:
        return {0: lambda: t.mul(t.mul(s.g, 2.0), a), 1: lambda: None}
    return {0: lambda: _to(s, t.mul(s.g, b), 0), 1: lambda: _to(s, t.mul(s.g, a), 1)}


@rule("Div")
def div(s: RuleInput) -> Grads:
    t, b = s.t, s.x(1)
    # TensorFlow's DivNoNan becomes a Div whose quotients by zero a Where leaves out.
    guard = _none_of_none if any(use.node.op_type == "Where" for use in s.y.uses()) else _unguarded
    return {
        0: lambda: _to(s, guard(s, t.div(s.g, b)), 0),
        1: lambda: _to(s, guard(s, t.neg(t.mul(s.g, t.div(s.y, b)))), 1),
    }


def _unguarded(s: RuleInput, gradient: ir.Value) -> ir.Value:
    return gradient


def _none_of_none(s: RuleInput, gradient: ir.Value) -> ir.Value:
    """Return the gradient, with zeros where none comes in, by TensorFlow's convention: at a pole it would be NaN."""
    if s.convention != "tensorflow" or number(s.g):
        return gradient
    zero = s.t.scalar(0, s.g)
    return s.t.select(s.t.compare("Equal", s.g, zero), zero, gradient)


@rule("Mod")
def mod(s: RuleInput) -> Grads:
    """Return the adjoints of x - q b, where the whole number q = (x - y) / b is constant between jumps."""
    t, x, b = s.t, s.x(0), s.x(1)

    def to_divisor() -> ir.Value:
        return _to(s, t.neg(t.mul(s.g, t.unary("Round", t.div(t.sub(x, s.y), b)))), 1)

    return {0: lambda: _to(s, s.g, 0), 1: to_divisor}


@rule("Pow")
def power(s: RuleInput) -> Grads:
    t, a, b = s.t, s.x(0), s.x(1)

    def base() -> ir.Value:
        n = number(b)
        if n is None:
            exponent, zero = t.cast(b, s.dtype()), t.scalar(0, a)
            made = t.mul(t.op("Pow", a, t.sub(exponent, t.scalar(1, a)), shape=dims(s.y)), exponent)
            return t.select(t.compare("Equal", exponent, zero), zero, made)  # at a base of 0 it would be NaN
        if n == 0.0:
            return t.scalar(0, a)
        if n == 2.0:
            return t.mul(a, 2.0)
        if n == 0.5:
            return t.div(t.scalar(0.5, a), s.y)
        if n == 3.0:
            return t.mul(t.mul(a, a), 3.0)
        return t.mul(t.op("Pow", a, t.scalar(n - 1, a), shape=dims(a)), n)

    def exponent() -> ir.Value:
        zero = t.scalar(0, a)
        slope = t.select(t.compare("Equal", a, zero), zero, t.mul(s.y, t.unary("Log", a)))
        return t.cast(t.mul(s.g, slope), s.dtype(1))

    return {0: lambda: _to(s, t.mul(s.g, base()), 0), 1: lambda: _to(s, exponent(), 1)}


@rule("Sum")
def variadic_sum(s: RuleInput) -> Grads:
    return {slot: partial(_to, s, s.g, slot) for slot in range(len(s.node.inputs))}


@rule("Mean")
def variadic_mean(s: RuleInput) -> Grads:
    count = len(s.node.inputs)
    share = s.t.mul(s.g, 1 / count)
    return {slot: partial(_to, s, share, slot) for slot in range(count)}


@rule("Max", "Min")
def extremum(s: RuleInput) -> Grads:
    """Return the adjoints of Max and Min; ties share the gradient evenly, as in torch.maximum.

    By TensorFlow's convention the first of them has all of it.
    """
    t, count = s.t, len(s.node.inputs)
    if count == 1:
        return {0: lambda: s.g}
    if s.convention == "tensorflow":
        return {slot: partial(_of_first, s, slot) for slot in range(count)}
    masks = [t.cast(t.compare("Equal", s.x(i), s.y), s.dtype()) for i in range(count)]
    ties = masks[0]
    for mask in masks[1:]:
        ties = t.add(ties, mask)
    share = t.div(s.g, ties)

    def gradient(slot: int) -> ir.Value:
        return _to(s, t.mul(share, masks[slot]), slot)

    return {slot: partial(gradient, slot) for slot in range(count)}


def _of_first(s: RuleInput, slot: int) -> ir.Value:
    """Return the adjoint of an operand of Max or Min where no operand before it equals the result."""
    t, zero = s.t, s.t.scalar(0, s.y)
    g = s.g if slot == len(s.node.inputs) - 1 else t.select(t.compare("Equal", s.x(slot), s.y), s.g, zero)
    for before in range(slot):
        g = t.select(t.compare("Equal", s.x(before), s.y), zero, g)
    return _to(s, g, slot)


@rule("Where")
def where(s: RuleInput) -> Grads:
    t, condition = s.t, s.x(0)
    zero = t.scalar(0, s.x(1))
    return {
        1: lambda: _to(s, t.select(condition, s.g, zero), 1),
        2: lambda: _to(s, t.select(condition, zero, s.g), 2),
    }


@rule("Clip")
def clip(s: RuleInput) -> Grads:
    """Return the adjoint of Clip: the gradient where the value was kept, also at the limits, as in torch.clamp.

    By TensorFlow's convention not at the limits: its Relu6 is the one op that becomes a Clip.
    """
    t = s.t
    if s.convention == "tensorflow":
        return {0: lambda: _strictly_inside(s)}
    return {0: lambda: t.select(t.compare("Equal", s.x(), s.y), s.g, t.scalar(0, s.y))}


def _strictly_inside(s: RuleInput) -> ir.Value:
    """Return the gradient where a value lies between the limits of a Clip."""
    g, zero = s.g, s.t.scalar(0, s.y)
    for slot, inside in ((1, "Greater"), (2, "Less")):
        if s.has(slot):
            g = s.t.select(s.t.compare(inside, s.x(), s.x(slot)), g, zero)
    return g


@rule("PRelu")
def prelu(s: RuleInput) -> Grads:
    t, x, slope = s.t, s.x(0), s.x(1)
    zero = t.scalar(0, x)
    positive = t.compare("Greater", x, zero)
    return {
        0: lambda: t.mul(s.g, t.select(positive, t.scalar(1, x), slope)),
        1: lambda: t.unbroadcast(t.select(positive, zero, t.mul(s.g, x)), dims(s.y), dims(slope)),
    }


@rule("Cast", "CastLike")
def cast(s: RuleInput) -> Grads:
    return {0: lambda: s.t.cast(s.g, s.dtype()), 1: lambda: None}


@rule("Dropout")
def dropout(s: RuleInput) -> Grads:
    """Return the adjoint of Dropout by the forward pass's mask; in inference mode the gradient is unchanged."""
    t = s.t
    training = s.known(2, "training mode") if s.has(2) else np.asarray(False)
    if not training:
        return {0: lambda: s.g}
    if len(s.node.outputs) < 2:
        s.node.resize_outputs(2)
    s.node.outputs[1].name = s.node.outputs[1].name or t.fresh(f"{s.y.name}.mask")
    s.node.outputs[1].shape, s.node.outputs[1].type = s.y.shape, ir.TensorType(ir.DataType.BOOL)
    mask = s.node.outputs[1]
    ratio = s.x(1) if s.has(1) else t.scalar(0.5, s.x())
    keep = number(ratio)
    scale = t.scalar(1 / (1 - keep), s.x()) if keep is not None and keep < 1 else None

    def gradient() -> ir.Value:
        kept = t.mul(s.g, t.cast(mask, s.dtype()))
        if scale is not None:
            return t.mul(kept, scale)
        return t.div(kept, t.cast(t.sub(t.scalar(1, ratio), ratio), s.dtype()))

    return {0: gradient}


def _to(s: RuleInput, g: ir.Value, slot: int) -> ir.Value:
    return s.t.unbroadcast(g, dims(s.y), s.shape(slot))


# Derivatives of unary ops at x, given also y = f(x), and the node for its attributes.

Slope: TypeAlias = Callable[[RuleInput, Tape, ir.Value, ir.Value], ir.Value]


def _one(t: Tape, x: ir.Value) -> ir.Value:
    return t.scalar(1, x)


def _one_minus_square(t: Tape, y: ir.Value) -> ir.Value:
    return t.sub(_one(t, y), t.mul(y, y))


def _one_plus_square(t: Tape, x: ir.Value) -> ir.Value:
    return t.add(_one(t, x), t.mul(x, x))


def _two_sided(s: RuleInput, t: Tape, x: ir.Value, positive: ir.Value, negative: ir.Value) -> ir.Value:
    return t.select(t.compare("Greater", x, t.scalar(0, x)), positive, negative)


def _elu(s: RuleInput, t: Tape, x: ir.Value, y: ir.Value) -> ir.Value:
    """Return the derivative: y + gamma alpha below zero, where y = gamma (alpha e^x - alpha); gamma above zero."""
    gamma, alpha = s.attribute("gamma", 1.0), s.attribute("alpha", 1.0)
    return _two_sided(s, t, x, t.scalar(gamma, x), t.add(y, t.scalar(gamma * alpha, x)))


def _celu(s: RuleInput, t: Tape, x: ir.Value, y: ir.Value) -> ir.Value:
    alpha = s.attribute("alpha", 1.0)
    return _two_sided(s, t, x, _one(t, x), t.unary("Exp", t.mul(x, 1 / alpha)))


def _hard_sigmoid(s: RuleInput, t: Tape, x: ir.Value, y: ir.Value) -> ir.Value:
    return _hard_sigmoid_slope(t, y, s.attribute("alpha"))


def _hard_swish(s: RuleInput, t: Tape, x: ir.Value, y: ir.Value) -> ir.Value:
    gate = t.unary("HardSigmoid", x, alpha=1 / 6, beta=0.5)
    return t.add(gate, t.mul(x, _hard_sigmoid_slope(t, gate, 1 / 6)))


def _hard_sigmoid_slope(t: Tape, gate: ir.Value, alpha: float) -> ir.Value:
    # The parabola gate (1 - gate) vanishes exactly where the gate is 0 or 1.
    return t.mul(t.unary("Sign", t.mul(gate, t.sub(_one(t, gate), gate))), alpha)


def _mish(s: RuleInput, t: Tape, x: ir.Value, y: ir.Value) -> ir.Value:
    """Return the derivative of x tanh(softplus(x)): tanh + x (1 - tanh^2) sigmoid."""
    saturated = t.unary("Tanh", t.unary("Softplus", x))
    return t.add(saturated, t.mul(x, t.mul(_one_minus_square(t, saturated), t.unary("Sigmoid", x))))


def _swish(s: RuleInput, t: Tape, x: ir.Value, y: ir.Value) -> ir.Value:
    alpha = s.attribute("alpha", 1.0)
    gate = t.unary("Sigmoid", t.mul(x, alpha))
    # gate + alpha x gate (1 - gate)
    return t.add(gate, t.mul(t.mul(y, alpha), t.sub(_one(t, x), gate)))


def _gelu(s: RuleInput, t: Tape, x: ir.Value, y: ir.Value) -> ir.Value:
    tanh = s.attribute("approximate") == "tanh"
    if tanh and s.dtype().bitwidth == 16:  # powers of x overflow in it, and inf times 0 is NaN
        x = t.cast(x, ir.DataType.FLOAT)
    half = t.scalar(0.5, x)
    if tanh:
        root, cubic = math.sqrt(2 / math.pi), 0.044715
        square = t.mul(x, x)
        inner = t.mul(x, t.add(t.mul(square, root * cubic), t.scalar(root, x)))
        bend = t.unary("Tanh", inner)
        slope = t.add(t.mul(square, 1.5 * root * cubic), t.scalar(0.5 * root, x))
        tail = t.mul(t.mul(x, slope), _one_minus_square(t, bend))
        return t.cast(t.add(t.add(t.mul(bend, 0.5), half), tail), s.dtype())
    cumulative = t.add(t.mul(t.unary("Erf", t.mul(x, math.sqrt(0.5))), 0.5), half)
    density = t.unary("Exp", t.mul(t.mul(x, x), -0.5))
    return t.add(cumulative, t.mul(t.mul(x, 1 / math.sqrt(2 * math.pi)), density))


def _thresholded_relu(s: RuleInput, t: Tape, x: ir.Value, y: ir.Value) -> ir.Value:
    return t.cast(t.compare("Greater", x, t.scalar(s.attribute("alpha"), x)), s.dtype())


def _shrink(s: RuleInput, t: Tape, x: ir.Value, y: ir.Value) -> ir.Value:
    return t.cast(t.compare("Greater", t.unary("Abs", x), t.scalar(s.attribute("lambd"), x)), s.dtype())


SLOPES: dict[str, Slope] = {
    "Neg": lambda s, t, x, y: t.scalar(-1, x),
    "Abs": lambda s, t, x, y: t.unary("Sign", x),
    "Relu": lambda s, t, x, y: t.unary("Sign", y),
    "LeakyRelu": lambda s, t, x, y: _two_sided(s, t, x, _one(t, x), t.scalar(s.attribute("alpha"), x)),
    "Elu": _elu,
    "Selu": _elu,
    "Celu": _celu,
    "ThresholdedRelu": _thresholded_relu,
    "Shrink": _shrink,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _hard_swish,
    "Mish": _mish,
    "Swish": _swish,
    "Gelu": _gelu,
    "Sigmoid": lambda s, t, x, y: t.mul(y, t.sub(_one(t, y), y)),
    "Tanh": lambda s, t, x, y: _one_minus_square(t, y),
    "Softplus": lambda s, t, x, y: t.unary("Sigmoid", x),
    "Erf": lambda s, t, x, y: t.mul(t.unary("Exp", t.neg(t.mul(x, x))), 2 / math.sqrt(math.pi)),
    "Exp": lambda s, t, x, y: y,
    "Sin": lambda s, t, x, y: t.unary("Cos", x),
    "Cos": lambda s, t, x, y: t.neg(t.unary("Sin", x)),
    "Tan": lambda s, t, x, y: _one_plus_square(t, y),
    "Sinh": lambda s, t, x, y: t.unary("Cosh", x),
    "Cosh": lambda s, t, x, y: t.unary("Sinh", x),
    "Reciprocal": lambda s, t, x, y: t.neg(t.mul(y, y)),
}

DIVISORS: dict[str, Slope] = {
    # Divisors of ops whose derivative is a quotient.
    "Log": lambda s, t, x, y: x,
    "Sqrt": lambda s, t, x, y: t.mul(y, 2.0),
    "Softsign": lambda s, t, x, y: _squared(t, t.add(t.unary("Abs", x), _one(t, x))),
    "Atan": lambda s, t, x, y: _one_plus_square(t, x),
    "Asin": lambda s, t, x, y: t.unary("Sqrt", _one_minus_square(t, x)),
    "Acos": lambda s, t, x, y: t.neg(t.unary("Sqrt", _one_minus_square(t, x))),
    "Asinh": lambda s, t, x, y: t.unary("Sqrt", _one_plus_square(t, x)),
    "Acosh": lambda s, t, x, y: t.unary("Sqrt", t.sub(t.mul(x, x), _one(t, x))),
    "Atanh": lambda s, t, x, y: _one_minus_square(t, x),
}


def _squared(t: Tape, x: ir.Value) -> ir.Value:
    return t.mul(x, x)


@rule(*SLOPES)
def unary(s: RuleInput) -> Grads:
    guard = _none_of_none if s.node.op_type == "Reciprocal" else _unguarded
    return {0: lambda: guard(s, s.t.mul(s.g, SLOPES[s.node.op_type](s, s.t, s.x(), s.y)))}


@rule(*DIVISORS)
def unary_quotient(s: RuleInput) -> Grads:
    guard = _none_of_none if s.node.op_type == "Sqrt" else _unguarded
    return {0: lambda: guard(s, s.t.div(s.g, DIVISORS[s.node.op_type](s, s.t, s.x(), s.y)))}
