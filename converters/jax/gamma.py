"""Lowerings of the logarithm of the gamma function and its derivatives."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend import core

from .. import series
from .bits import written
from .lower import Lowering, Tensor, lowering


@lowering("lgamma")
def lgamma(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> Tensor:
    return _in_double(low, series.lgamma, x)


@lowering("digamma")
def digamma(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> Tensor:
    """NaN at all poles, where the series is infinite."""
    return _in_double(low, lambda x, xp: xp.where((x <= 0) & (x == xp.floor(x)), xp.nan, series.digamma(x, xp)), x)


def _in_double(low: Lowering, function: Callable[..., jax.Array], x: Tensor) -> Tensor:
    return written(low, lambda x: function(x.astype(jnp.float64), jnp).astype(x.dtype), x)
