"""Approximations that several converters write out."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from functools import reduce
from typing import Any

ERFCX = (
    0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418, 0.37409196, 1.00002368,
    -1.26551223,
)  # fmt: skip
"""Polynomial in t = 1 / (1 + x / 2), from the highest power: log(erfc(x) exp(x^2) / t) for x >= 0, within 1.2e-7; Press
et al., Numerical Recipes in C, 2nd ed., section 6.2."""

BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)
"""Bernoulli numbers B2, B4, ... of Stirling's series of the gamma function and its derivatives: from x = 7, within the
rounding of float64; Abramowitz & Stegun, 6.1.40, 6.3.18 and 6.4.12."""


_STEPS = 7
"""Smaller numbers go up by so many steps, by the recurrence of the function."""


def lgamma(x: Any, xp: Any) -> Any:
    """Return log |gamma(x)| of an array in float64, since terms cancel; `xp` is torch or jax.numpy.

    It is Stirling's series of numbers that are large enough, and a reflection below 1/2.
    """
    right, large, low = _parts(x, xp)
    product = reduce(operator.mul, _raised(right))
    made = (large - 0.5) * (xp.log(large) - 1) + (math.log(2 * math.pi) - 1) / 2
    made = made + _series(large, 1) - xp.where(low, xp.log(product), 0.0)
    sine = xp.abs(xp.sin(math.pi * (x - xp.round(x))))
    made = xp.where(x < 0.5, math.log(math.pi) - xp.log(sine) - made, made)
    return xp.where(x == -math.inf, math.inf, made)


def digamma(x: Any, xp: Any) -> Any:
    """Return the derivative of `lgamma`."""
    right, large, low = _parts(x, xp)
    made = xp.log(large) - 0.5 / large - _series(large, 2)
    made = made - xp.where(low, sum(1 / each for each in _raised(right)), 0.0)
    angle = math.pi * (x - xp.round(x))
    return xp.where(x < 0.5, made - math.pi * xp.cos(angle) / xp.sin(angle), made)


def trigamma(x: Any, xp: Any) -> Any:
    """Return the derivative of `digamma`."""
    right, large, low = _parts(x, xp)
    made = 1 / large + 0.5 / (large * large) + _series(large, 3)
    made = made + xp.where(low, sum(1 / (each * each) for each in _raised(right)), 0.0)
    share = math.pi / xp.sin(math.pi * (x - xp.round(x)))
    return xp.where(x < 0.5, share * share - made, made)


def _parts(x: Any, xp: Any) -> tuple[Any, Any, Any]:
    """Return x reflected to the right; large enough for the series, and where by steps."""
    right = xp.where(x < 0.5, 1 - x, x)
    low = right < _STEPS
    return right, xp.where(low, right + _STEPS, right), low


def _raised(right: Any) -> Iterator[Any]:
    """Yield the numbers of all steps."""
    return (right + step for step in range(_STEPS))


def _series(large: Any, power: int) -> Any:
    """Return the sum of Bernoulli's terms of `lgamma`, which begin with 1 / x; with powers 2 and 3, of its
    derivatives."""
    inverse = 1 / large
    square = inverse * inverse
    made: Any = 0.0
    for place in range(len(BERNOULLI), 0, -1):
        factor = {1: 1 / (2 * place * (2 * place - 1)), 2: 1 / (2 * place), 3: 1.0}[power]
        made = made * square + BERNOULLI[place - 1] * factor
    return made * (inverse if power == 1 else square if power == 2 else square * inverse)
