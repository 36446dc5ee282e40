"""Coefficients of approximations that several converters write out."""

from __future__ import annotations

ERFCX = (
    0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418, 0.37409196, 1.00002368,
    -1.26551223,
)  # fmt: skip
"""Polynomial in t = 1 / (1 + x / 2), from the highest power: log(erfc(x) exp(x^2) / t) for x >= 0, within 1.2e-7; Press
et al., Numerical Recipes in C, 2nd ed., section 6.2."""

BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)
"""Bernoulli numbers B2, B4, ... of Stirling's series of the gamma function and its derivatives: from x = 7, within the
rounding of float64; Abramowitz & Stegun, 6.1.40, 6.3.18 and 6.4.12."""
