"""Padding by replication."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .registry import rule

aten = torch.ops.aten


@rule(
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
)
def replication_pad_backward(gradient: torch.Tensor, x: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
    """Along each axis the border elements gather what their copies got; negative padding cropped."""
    for index in range(len(padding) // 2):
        axis, (before, after) = x.dim() - 1 - index, padding[2 * index : 2 * index + 2]
        size, length = x.shape[axis], gradient.shape[axis]
        # where each element of the gradient came from, at the border: size - 1 at most
        if size == 1:
            gradient = gradient.sum(axis, keepdim=True)
            continue
        first, last = max(before, 0) + 1, max(after, 0) + 1
        gradient = torch.cat([
            gradient.narrow(axis, 0, first).sum(axis, keepdim=True),
            gradient.narrow(axis, first, length - first - last),
            gradient.narrow(axis, length - last, last).sum(axis, keepdim=True),
        ], axis)  # fmt: skip
        if before < 0 or after < 0:
            gradient = aten.constant_pad_nd(gradient, [0, 0] * (x.dim() - 1 - axis) + [max(-before, 0), max(-after, 0)])
    return gradient
