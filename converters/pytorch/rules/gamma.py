"""The logarithm of the gamma function and its derivatives."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ... import series
from .registry import rule

aten = torch.ops.aten


@rule(aten.lgamma.default)
def lgamma(x: torch.Tensor) -> torch.Tensor:
    """By `series.lgamma`."""
    return _in_double(series.lgamma, x)


@rule(aten.digamma.default)
def digamma(x: torch.Tensor) -> torch.Tensor:
    """By `series.digamma`."""
    return _in_double(series.digamma, x)


@rule(aten.polygamma.default)
def polygamma(n: int, x: torch.Tensor) -> torch.Tensor:
    """The first derivative of `digamma` alone."""
    return digamma(x) if n == 0 else _in_double(series.trigamma, x) if n == 1 else NotImplemented


def _in_double(function: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return function(x.double(), torch).to(x.dtype if x.is_floating_point() else torch.float32)
