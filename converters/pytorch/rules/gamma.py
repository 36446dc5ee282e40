"""The logarithm of the gamma function and its derivatives, by Stirling's series of numbers that are large enough."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce

import torch

from ...series import BERNOULLI
from .registry import rule

aten = torch.ops.aten

_STEPS = 7
"""Smaller numbers go up by so many steps, by the recurrence of the function."""


@rule(aten.lgamma.default)
def lgamma(x: torch.Tensor) -> torch.Tensor:
    """log |gamma(x)|, by reflection below 1/2."""
    wide, right, large, low = _parts(x)
    product = reduce(torch.mul, _raised(right))
    made = (large - 0.5) * (large.log() - 1) + (math.log(2 * math.pi) - 1) / 2
    made = made + _series(large, 1) - torch.where(low, product.log(), 0.0)
    sine = (math.pi * (wide - wide.round())).sin().abs()
    return torch.where(wide < 0.5, math.log(math.pi) - sine.log() - made, made).to(_kind(x))


@rule(aten.digamma.default)
def digamma(x: torch.Tensor) -> torch.Tensor:
    """The derivative of `lgamma`."""
    wide, right, large, low = _parts(x)
    made = large.log() - 0.5 / large - _series(large, 2)
    made = made - torch.where(low, sum(1 / each for each in _raised(right)), 0.0)
    angle = math.pi * (wide - wide.round())
    return torch.where(wide < 0.5, made - math.pi * angle.cos() / angle.sin(), made).to(_kind(x))


@rule(aten.polygamma.default)
def polygamma(n: int, x: torch.Tensor) -> torch.Tensor:
    """The first derivative of `digamma` alone."""
    if n == 0:
        return digamma(x)
    if n > 1:
        return NotImplemented
    wide, right, large, low = _parts(x)
    made = 1 / large + 0.5 / (large * large) + _series(large, 3)
    made = made + torch.where(low, sum(1 / (each * each) for each in _raised(right)), 0.0)
    share = math.pi / (math.pi * (wide - wide.round())).sin()
    return torch.where(wide < 0.5, share * share - made, made).to(_kind(x))


def _kind(x: torch.Tensor) -> torch.dtype:
    """The dtype of the result."""
    return x.dtype if x.is_floating_point() else torch.float32


def _parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x in float64, since terms cancel; reflected to the right; large enough for the series, and where by steps."""
    wide = x.double()
    right = torch.where(wide < 0.5, 1 - wide, wide)
    low = right < _STEPS
    return wide, right, torch.where(low, right + _STEPS, right), low


def _raised(right: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the numbers of all steps."""
    return (right + step for step in range(_STEPS))


def _series(large: torch.Tensor, power: int) -> torch.Tensor:
    """The sum of Bernoulli's terms of `lgamma`, which begin with 1 / x; with powers 2 and 3, of its derivatives."""
    inverse = 1 / large
    square = inverse * inverse
    made = torch.zeros_like(large)
    for place in range(len(BERNOULLI), 0, -1):
        factor = {1: 1 / (2 * place * (2 * place - 1)), 2: 1 / (2 * place), 3: 1.0}[power]
        made = made * square + BERNOULLI[place - 1] * factor
    return made * (inverse if power == 1 else square if power == 2 else square * inverse)
