"""Functions of single elements."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...series import ERFCX
from .registry import rule

aten = torch.ops.aten


@rule(aten.fmax.default)
def fmax(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The larger, or the one that is a number."""
    return torch.where((x >= y) | y.isnan(), x, y)


@rule(aten.signbit.default)
def signbit(x: torch.Tensor) -> torch.Tensor:
    """Of the zeros, that of minus zero: its reciprocal is negative. Of NaN, none."""
    if not x.is_floating_point():
        return x < 0
    return (x < 0) | ((x == 0) & (x.reciprocal() < 0))


@rule(aten.copysign.Tensor, aten.copysign.Scalar)
def copysign(x: torch.Tensor, sign: torch.Tensor | float) -> torch.Tensor:
    """The magnitude of one, the sign of the other."""
    if not isinstance(sign, torch.Tensor):
        return x.abs() * math.copysign(1.0, sign)
    return torch.where(signbit(sign), -x.abs(), x.abs())


@rule(aten.fmin.default)
def fmin(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The smaller, or the one that is a number."""
    return torch.where((x <= y) | y.isnan(), x, y)


@rule(aten.hypot.default)
def hypot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of numbers that the larger one scales, so that no square overflows."""
    largest = torch.maximum(x.abs(), y.abs())
    scale = torch.where((largest > 0) & (largest < math.inf), largest, 1.0)
    x, y = x / scale, y / scale
    return scale * (x * x + y * y).sqrt()


@rule(aten.atan2.default)
def atan2(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """All four quadrants; zeros count as positive."""
    if not (y.is_floating_point() or x.is_floating_point()):
        y, x = y.float(), x.float()
    kind = torch.result_type(y, x)
    zero, half = (torch.full([], angle, dtype=kind) for angle in (0.0, math.pi / 2))
    at_axis = torch.where(y > 0, half, torch.where(y < 0, -half, y))
    left = torch.where(y >= 0, 2 * half, -2 * half)
    slope = torch.where((x.abs() == math.inf) & (y.abs() == math.inf), x.sign() * y.sign(), y / x)
    return torch.where(x == 0, at_axis, slope.atan() + torch.where(x < 0, left, zero))


@rule(aten.log1p.default)
def log1p(x: torch.Tensor) -> torch.Tensor:
    """With what rounding of 1 + x loses; Higham, Accuracy and Stability of Numerical Algorithms, 1.14.1."""
    if not x.is_floating_point():
        x = x.float()
    one = 1 + x
    return one.log() - torch.where(x.abs() < 1, (one - 1 - x) / one, 0.0)


@rule(aten.expm1.default)
def expm1(x: torch.Tensor) -> torch.Tensor:
    """Exact near zero, where the hyperbolic tangent is."""
    if not x.is_floating_point():
        x = x.float()
    return (x / 2).tanh() * (x.exp() + 1)


@rule(aten.logaddexp.default)
def logaddexp(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """About the larger."""
    return torch.maximum(x, y) + log1p((-_apart(x, y)).exp())


@rule(aten.logaddexp2.default)
def logaddexp2(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """About the larger."""
    return torch.maximum(x, y) + log1p((-_apart(x, y) * math.log(2)).exp()) / math.log(2)


def _apart(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The distance, 0 of equal infinities."""
    return torch.where(x == y, 0.0, (x - y).abs())


@rule(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The logarithm, and a buffer that the gradient does not read."""
    return x.clamp(max=0.0) - log1p((-x.abs()).exp()), x.new_empty([0])


@rule(aten.special_erfcx.default)
def erfcx(x: torch.Tensor) -> torch.Tensor:
    """erfc(x) exp(x^2), see `ERFCX`."""
    t = 1 / (1 + x.abs() / 2)
    power = torch.full_like(t, ERFCX[0])
    for factor in ERFCX[1:]:
        power = power * t + factor
    right = t * power.exp()
    return torch.where(x < 0, 2 * (x * x).exp() - right, right)


@rule(aten.erfc.default)
def erfc(x: torch.Tensor) -> torch.Tensor:
    """By `erfcx` where 1 - erf(x) would lose digits."""
    if not x.is_floating_point():
        x = x.float()
    right = x.clamp(min=0.0)
    return torch.where(x < 0.5, 1 - x.erf(), erfcx(right) * (-right * right).exp())


@rule(aten.special_log_ndtr.default)
def log_ndtr(x: torch.Tensor) -> torch.Tensor:
    """The logarithm of the normal distribution's share below x; its lower tail by `erfcx`."""
    scaled = x * math.sqrt(0.5)
    left = (erfcx((-scaled).clamp(min=0.0)) / 2).log() - scaled * scaled
    return torch.where(x < -1, left, log1p(-erfc(scaled) / 2))


@rule(aten.clamp.default)
def clamp(x: torch.Tensor, low: float | None = None, high: float | None = None) -> torch.Tensor:
    """Of floats between integers: torch's exporter makes tensors of them, which it then cannot translate."""
    whole = [end is not None and not isinstance(end, float) for end in (low, high)]
    if not x.is_floating_point() or not any(whole) or not all(isinstance(e, int | float | None) for e in (low, high)):
        return NotImplemented
    made: torch.Tensor = aten.clamp(x, *(None if end is None else float(end) for end in (low, high)))
    return made


@rule(aten.lerp.Scalar)
def lerp(start: torch.Tensor, end: torch.Tensor, weight: float) -> torch.Tensor:
    """As torch computes it, from the nearer end."""
    if abs(weight) < 0.5:
        return start + (end - start) * weight
    return end - (end - start) * (1 - weight)


@rule(aten.remainder.Scalar, aten.remainder.Tensor, aten.remainder.Scalar_Tensor)
def remainder(x: torch.Tensor | float, y: torch.Tensor | float) -> torch.Tensor:
    """Of floats by the exact remainder of the magnitudes: a quotient may round to the next whole number."""
    kind = torch.result_type(x, y)
    if not isinstance(x, torch.Tensor):
        return torch.remainder(_number(x, y), y)
    if not kind.is_floating_point:
        return NotImplemented
    x = x.to(kind)
    rest = torch.fmod(x, y)
    return torch.where(_other_side(rest, y), rest + y, rest)


def _other_side(rest: torch.Tensor, y: torch.Tensor | float) -> torch.Tensor:
    """Return where a remainder with the sign of the dividend is not the one with the sign of the divisor."""
    return (rest < 0) & (y > 0) | (rest > 0) & (y < 0)


@rule(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(x: torch.Tensor | float, y: torch.Tensor | float) -> torch.Tensor:
    """Of floats by their exact remainder."""
    if not isinstance(x, torch.Tensor):
        return torch.floor_divide(_number(x, y), y)
    kind = torch.result_type(x, y)
    if not kind.is_floating_point:
        return NotImplemented
    x, y = x.to(kind), y.to(kind) if isinstance(y, torch.Tensor) else torch.full([], y, dtype=kind)
    rest = torch.fmod(x, y)
    quotient = ((x - rest) / y).round()
    return torch.where(y == 0, x / y, torch.where(_other_side(rest, y), quotient - 1, quotient))


@rule(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div(x: torch.Tensor | float, y: torch.Tensor | float, rounding_mode: str | None) -> torch.Tensor:
    """Of integers without floats between, which are exact to 2^24 only."""
    if not isinstance(x, torch.Tensor):
        return torch.div(_number(x, y), y, rounding_mode=rounding_mode)
    whole = not any(v.is_floating_point() if isinstance(v, torch.Tensor) else isinstance(v, float) for v in (x, y))
    if rounding_mode == "floor":
        return torch.floor_divide(x, y)
    if rounding_mode == "trunc" and whole:
        return torch.floor_divide(x - torch.fmod(x, y), y)
    return NotImplemented


def _number(x: float, y: Any) -> torch.Tensor:
    """Return a number as a tensor of the type of its quotient by a tensor."""
    return torch.full([], x, dtype=torch.result_type(x, y))
