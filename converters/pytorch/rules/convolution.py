"""Gradients of convolutions, in any number of spatial dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ...convolutions import LEAST_PIXELS
from . import onnx
from .registry import rule
from .sums import sum_by_channel

aten = torch.ops.aten


@rule(aten.convolution_backward.default)
def convolution_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The gradient of x is the transposed convolution; that of the weight correlates x with the output's gradient."""
    rank = x.dim() - 2
    stride, padding, dilation, output_padding = (
        list(v) * (rank if len(v) == 1 else 1) for v in (stride, padding, dilation, output_padding)
    )
    of_x = of_weight = of_bias = None
    kernel = weight.shape[2:]
    pointwise = groups == 1 and not any(padding) and all(size == 1 for size in kernel)
    turned = [dilation[i] * (kernel[i] - 1) - padding[i] for i in range(rank)]
    if output_mask[0]:
        if transposed:
            of_x = aten.convolution(gradient, weight, None, stride, padding, dilation, False, [0] * rank, groups)
        elif all(step == 1 for step in stride) and min(turned) >= 0 and (pointwise or _large(x.shape[2:])):
            of_x = aten.convolution(
                gradient, _turned(weight, groups), None, stride, turned, dilation, False, [0] * rank, groups
            )  # faster than a transposed convolution, no columns
        else:
            rest = [
                (x.shape[2 + i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) % stride[i] for i in range(rank)
            ]
            of_x = onnx.op(
                "ConvTranspose", gradient, weight, shape=x.shape, strides=stride, pads=[*padding, *padding],
                dilations=dilation, group=groups, output_padding=rest, kernel_shape=list(kernel),
            )  # fmt: skip
    if output_mask[1]:
        moved, still = (gradient, x) if transposed else (x, gradient)
        if pointwise:
            of_weight = _pointwise_weight_gradient(moved, still, weight, stride)
        else:
            of_weight = _weight_gradient(moved, still, weight, stride, padding, dilation, groups)
    if output_mask[2]:
        of_bias = sum_by_channel(gradient)
    return of_x, of_weight, of_bias


def _large(sizes: Sequence[int | torch.SymInt]) -> bool:
    return all(isinstance(n, int) for n in sizes) and math.prod(sizes) >= LEAST_PIXELS


def _turned(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """A kernel with input and output channels swapped, group by group, and its entries in opposite order."""
    out, each, *kernel = weight.shape
    swapped = weight.reshape([groups, out // groups, each, *kernel]).transpose(1, 2)
    swapped = swapped.reshape([groups * each, out // groups, *kernel])
    axes = [axis for axis, size in enumerate(kernel, 2) if size > 1]
    return swapped.flip(axes) if axes else swapped


def _pointwise_weight_gradient(
    moved: torch.Tensor, still: torch.Tensor, weight: torch.Tensor, stride: list[int]
) -> torch.Tensor:
    """One product of matrices, channels by positions of the whole batch."""
    for axis, step in enumerate(stride, 2):
        if step > 1:
            moved = aten.slice(moved, axis, 0, moved.shape[axis], step)
    lhs, rhs = (v.transpose(0, 1).reshape([v.shape[1], -1]) for v in (still, moved))
    return (lhs @ rhs.t()).reshape(weight.shape)


def _weight_gradient(
    moved: torch.Tensor,
    still: torch.Tensor,
    weight: torch.Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> torch.Tensor:
    """Correlate `moved`, under which the kernel slides, with `still`; shaped as weight (channels of still first)."""
    rank, kernel = weight.dim() - 2, list(weight.shape[2:])
    batch, channels = moved.shape[:2]
    space, positions = list(moved.shape[2:]), list(still.shape[2:])
    inner = channels // groups
    # (batch, groups, inner, ...) -> (inner, groups * batch, ...): the batch is what is summed over
    lhs = moved.reshape([batch, groups, inner, *space]).permute([2, 1, 0, *range(3, 3 + rank)])
    lhs = lhs.reshape([inner, groups * batch, *space])
    rhs = still.transpose(0, 1)
    full = [space[i] + 2 * padding[i] - stride[i] * (positions[i] - 1) for i in range(rank)]
    made = onnx.op(
        "Conv", lhs, rhs, shape=[inner, still.shape[1], *[-(-full[i] // dilation[i]) for i in range(rank)]],
        strides=dilation, pads=[*padding, *padding], dilations=stride, group=groups, kernel_shape=positions,
    )  # fmt: skip
    for i in range(rank):
        if made.shape[2 + i] != kernel[i]:
            made = made.narrow(2 + i, 0, kernel[i])
    return made.transpose(0, 1)
