"""Batch, layer and group normalization."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .registry import rule
from .sums import mean_by_channel, sum_by_channel

aten = torch.ops.aten


def _channelwise(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(C) -> (1, C, 1, ...)."""
    return values.reshape([1, -1] + [1] * (like.dim() - 2))


@rule(aten._native_batch_norm_legit_functional.default)
def native_batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor | None, ...]:
    """Normalize by the batch's or the running statistics; the last two results are the new running statistics.

    The batch's mean and inverse deviation are handed on with axes of size one, as the gradient needs them. Half
    precision is computed in float32, as in torch.
    """
    dtype, x = x.dtype, _exact(x)
    if training:
        mean = _channelwise(mean_by_channel(x), x)
        centred = x - mean
        variance = _channelwise(mean_by_channel(centred * centred), x)
        if running_mean is not None and running_var is not None:
            count = x.numel() // x.shape[1]
            moved_mean = running_mean * (1 - momentum) + mean.flatten() * momentum
            moved_var = running_var * (1 - momentum) + variance.flatten() * (momentum * count / (count - 1))
            running_mean, running_var = moved_mean.to(running_mean.dtype), moved_var.to(running_var.dtype)
    else:
        assert running_mean is not None and running_var is not None
        mean, variance = (_channelwise(_exact(v), x) for v in (running_mean, running_var))
        centred = x - mean
    inverse = 1 / torch.sqrt(variance + eps)
    y = centred * (inverse if weight is None else inverse * _channelwise(weight, x))
    if bias is not None:
        y = y + _channelwise(bias, x)
    saved = (mean, inverse) if training else (mean.new_empty(0), mean.new_empty(0))
    return y.to(dtype), *saved, running_mean, running_var


def _exact(x: torch.Tensor) -> torch.Tensor:
    """x, of half precision in float32."""
    return x if x.dtype == torch.float64 else x.float()


@rule(aten._native_batch_norm_legit_no_training.default)
def native_batch_norm_of_running_statistics(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor | None, ...]:
    """The running statistics alone."""
    return native_batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps)[:3]


@rule(aten._native_batch_norm_legit.no_stats)
def native_batch_norm_without_running_statistics(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor | None, ...]:
    """The batch's statistics alone."""
    return native_batch_norm(x, weight, bias, None, None, training, momentum, eps)[:3]


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
    dtype, gradient, x = x.dtype, _exact(gradient), _exact(x)
    if not training:
        assert running_mean is not None and running_var is not None
        mean, variance = (_channelwise(_exact(v), x) for v in (running_mean, running_var))
        inverse = 1 / torch.sqrt(variance + eps)
    assert mean is not None and inverse is not None
    mean, inverse = (v if v.dim() == x.dim() else _channelwise(v, x) for v in (mean, inverse))
    scale = inverse if weight is None else inverse * _channelwise(weight, x)
    total = _channelwise(sum_by_channel(gradient), x) if training or output_mask[2] else None
    centred = projected = of_x = None
    if training or output_mask[1]:
        centred = x - mean
        projected = _channelwise(sum_by_channel(gradient * centred), x) * inverse
    if output_mask[0]:
        of_x = gradient * scale
        if training:
            assert centred is not None and projected is not None and total is not None
            count = x.numel() // x.shape[1]
            of_x = of_x - centred * (scale * inverse * projected / count) - scale * total / count
    of_weight = projected.flatten() if output_mask[1] and projected is not None else None
    of_bias = total.flatten() if output_mask[2] and total is not None else None
    kind = x.dtype if weight is None else weight.dtype
    return (
        None if of_x is None else of_x.to(dtype),
        None if of_weight is None else of_weight.to(kind),
        None if of_bias is None else of_bias.to(kind),
    )


@rule(aten.native_layer_norm.default)
def native_layer_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In parts where ONNX's own operator would give statistics of another type: it keeps them in float32."""
    if x.dtype == torch.float32:
        return NotImplemented  # torch then keeps the operator
    exact = _exact(x)
    axes = list(range(x.dim() - len(shape), x.dim()))
    mean = exact.mean(axes, keepdim=True)
    centred = exact - mean
    inverse = 1 / torch.sqrt((centred * centred).mean(axes, keepdim=True) + eps)
    y = centred * inverse
    if weight is not None:
        y = y * weight.to(exact.dtype)
    if bias is not None:
        y = y + bias.to(exact.dtype)
    return y.to(x.dtype), mean, inverse
