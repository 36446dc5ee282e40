"""Random operators, as arithmetic on draws that ONNX has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from onnx_remat.errors import ConversionError

from .registry import rule

aten = torch.ops.aten


@rule(aten.native_dropout.default)
def native_dropout(x: torch.Tensor, p: float, train: bool | None = True) -> tuple[torch.Tensor, torch.Tensor]:
    """By a product with a mask where ONNX Runtime's own cannot: it scales in float32, and never drops all."""
    if not train or (x.dtype != torch.float64 and p < 1):
        return NotImplemented
    mask = torch.rand(x.shape) >= p
    return x * mask * (1 / (1 - p) if p < 1 else 0.0), mask


@rule(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor)
def normal(mean: torch.Tensor | float, std: torch.Tensor | float = 1.0, *, generator: None = None) -> torch.Tensor:
    """Scaled and shifted standard draws."""
    like = torch.as_tensor(mean) + torch.as_tensor(std)
    return mean + std * torch.randn_like(like)


@rule(aten.normal.float_float)
def normal_of_size(mean: float, std: float, size: Sequence[int], **of: Any) -> torch.Tensor:
    """As `normal`."""
    return mean + std * torch.randn(size, **of)


@rule(aten.uniform.default)
def uniform(x: torch.Tensor, low: float = 0.0, high: float = 1.0, *, generator: None = None) -> torch.Tensor:
    """Scaled and shifted standard draws: torch's own decomposition ends in an operator that ONNX lacks."""
    return low + (high - low) * torch.rand_like(x)


@rule(aten.randperm.default)
def permutation(n: int, **of: Any) -> torch.Tensor:
    """Return the order of draws, none of which is preferred."""
    return torch.argsort(torch.rand(n)).to(of.get("dtype") or torch.int64)


@rule(aten.multinomial.default)
def multinomial(
    weights: torch.Tensor, count: int, replacement: bool = False, *, generator: None = None
) -> torch.Tensor:
    """Return the largest of the logarithms of weights, each with a Gumbel draw added: one for each sample.

    Gumbel, Statistical theory of extreme values, 1954; Maddison et al., A* sampling, 2014, section 2.
    """
    if count > 1 and not replacement:
        raise ConversionError(
            "torch.multinomial without replacement draws as no graph can: take one sample, or pass replacement=True"
        )
    shape = (*weights.shape[:-1], count, weights.shape[-1])
    gumbel = -torch.log(-torch.log(torch.rand(shape, dtype=weights.dtype)))
    return torch.argmax(torch.log(weights).unsqueeze(-2) + gumbel, -1)
