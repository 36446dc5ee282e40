"""Random operators, as arithmetic on draws that ONNX has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

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
