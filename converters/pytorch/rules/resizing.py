"""Resizing with antialiasing: one product of matrices per axis, as are its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..private_torch import computed_now
from .registry import rule

aten = torch.ops.aten


def _matrices(
    kind: Any, sizes: Sequence[int], counts: Sequence[int], corners: bool, scales: Sequence[float | None]
) -> list[list[list[float]]]:
    """Per axis, how much each element made takes of each element read."""
    if not all(isinstance(n, int) for n in (*sizes, *counts)):
        raise NotImplementedError("resizing with antialiasing of dimensions that vary")
    made = []
    for old, new, scale in zip(sizes, counts, scales, strict=True):
        with computed_now():  # computed now: what becomes of the unit vectors, side by side
            made.append(kind(torch.eye(old)[None, None], [new, old], corners, scale, None)[0, 0].tolist())
    return made


def _resized(kind: Any) -> Callable[..., torch.Tensor]:
    def forward(
        x: torch.Tensor, size: Sequence[int], corners: bool, scale_h: float | None = None, scale_w: float | None = None
    ) -> torch.Tensor:
        rows, columns = _matrices(kind, x.shape[2:], size, corners, (scale_h, scale_w))
        return torch.tensor(rows, dtype=x.dtype) @ x @ torch.tensor(columns, dtype=x.dtype).t()

    return forward


def _unresized(kind: Any) -> Callable[..., torch.Tensor]:
    def backward(
        gradient: torch.Tensor, size: Sequence[int], input_size: Sequence[int], corners: bool,
        scale_h: float | None = None, scale_w: float | None = None,
    ) -> torch.Tensor:  # fmt: skip
        rows, columns = _matrices(kind, input_size[2:], size, corners, (scale_h, scale_w))
        return torch.tensor(rows, dtype=gradient.dtype).t() @ gradient @ torch.tensor(columns, dtype=gradient.dtype)

    return backward


rule(aten._upsample_bilinear2d_aa.default)(_resized(aten._upsample_bilinear2d_aa))
rule(aten._upsample_bicubic2d_aa.default)(_resized(aten._upsample_bicubic2d_aa))
rule(aten._upsample_bilinear2d_aa_backward.default)(_unresized(aten._upsample_bilinear2d_aa))
rule(aten._upsample_bicubic2d_aa_backward.default)(_unresized(aten._upsample_bicubic2d_aa))
