"""Batch, layer and group normalization."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .registry import rule

aten = torch.ops.aten


def _channelwise(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(C) -> (1, C, 1, ...)."""
    return values.reshape([1, -1] + [1] * (like.dim() - 2))


@rule(aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
def native_batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalize by the batch's or the running statistics; running statistics are updated in place."""
    axes = [0, *range(2, x.dim())]
    if training:
        mean = x.mean(axes)
        centred = x - _channelwise(mean, x)
        variance = (centred * centred).mean(axes)
        if running_mean is not None and running_var is not None:
            count = x.numel() // x.shape[1]
            running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
            running_var.mul_(1 - momentum).add_(variance, alpha=momentum * count / (count - 1))
    else:
        assert running_mean is not None and running_var is not None
        mean, variance = running_mean, running_var
        centred = x - _channelwise(mean, x)
    inverse = 1 / torch.sqrt(variance + eps)
    scale = inverse if weight is None else inverse * weight
    y = centred * _channelwise(scale, x)
    if bias is not None:
        y = y + _channelwise(bias, x)
    return (y, mean, inverse) if training else (y, mean.new_empty(0), mean.new_empty(0))


@rule(aten._native_batch_norm_legit.no_stats)
def native_batch_norm_without_running_statistics(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The batch's statistics alone."""
    return native_batch_norm(x, weight, bias, None, None, training, momentum, eps)


@rule(aten.native_batch_norm_backward.default)
def native_batch_norm_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    mean: torch.Tensor | None,
    inverse: torch.Tensor | None,
    training: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Ioffe & Szegedy 2015, section 3, gathered into one scale of the gradient, one of x and one shift."""
    axes = [0, *range(2, x.dim())]
    if not training:
        assert running_mean is not None and running_var is not None
        mean, inverse = running_mean, 1 / torch.sqrt(running_var + eps)
    assert mean is not None and inverse is not None
    scale = inverse if weight is None else inverse * weight
    total = gradient.sum(axes) if training or output_mask[2] else None
    centred = projected = of_x = None
    if training or output_mask[1]:
        centred = x - _channelwise(mean, x)
        projected = (gradient * centred).sum(axes) * inverse
    if output_mask[0]:
        of_x = gradient * _channelwise(scale, x)
        if training:
            assert centred is not None and projected is not None and total is not None
            count = x.numel() // x.shape[1]
            slope = scale * inverse * projected / count
            shift = scale * total / count
            of_x = of_x - centred * _channelwise(slope, x) - _channelwise(shift, x)
    return of_x, projected if output_mask[1] else None, total if output_mask[2] else None
