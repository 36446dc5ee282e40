"""Gradient rules of convolutions with any number of spatial axes."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ..convolutions import Geometry, input_gradient, weight_gradient
from ..convolutions import conv as forward
from ..dims import dims
from .registry import Grads, RuleInput, rule


def geometry(s: RuleInput, kernel: Sequence[int], group: int = 1) -> Geometry:
    """Return the geometry in a window op's attributes, with automatic padding resolved."""
    rank = len(kernel)
    ones = (1,) * rank
    strides, dilations = tuple(s.attribute("strides") or ones), tuple(s.attribute("dilations") or ones)
    mode = s.attribute("auto_pad", "NOTSET")
    if mode == "VALID":
        pads = [0] * (2 * rank)
    elif mode == "NOTSET":
        pads = list(s.attribute("pads") or [0] * (2 * rank))
    else:
        pads = _same_pads(s, tuple(kernel), strides, dilations, mode)
    return Geometry(tuple(kernel), strides, dilations, tuple(pads[:rank]), tuple(pads[rank:]), group)


def _same_pads(
    s: RuleInput, kernel: tuple[int, ...], strides: tuple[int, ...], dilations: tuple[int, ...], mode: str
) -> list[int]:
    begin, end = [], []
    for length, k, stride, d in zip(s.known_shape()[2:], kernel, strides, dilations, strict=True):
        total = max(0, (-(-length // stride) - 1) * stride + d * (k - 1) + 1 - length)
        small, large = total // 2, total - total // 2
        begin.append(small if mode == "SAME_UPPER" else large)
        end.append(large if mode == "SAME_UPPER" else small)
    return begin + end


@rule("Conv")
def conv(s: RuleInput) -> Grads:
    t, x, w = s.t, s.x(0), s.x(1)
    how = geometry(s, s.known_shape(1)[2:], s.attribute("group"))
    return {
        0: lambda: input_gradient(t, s.full, w, dims(x), how),
        1: lambda: weight_gradient(t, x, s.full, s.known_shape(1), how),
        2: lambda: _bias_gradient(s),
    }


@rule("ConvTranspose")
def conv_transpose(s: RuleInput) -> Grads:
    """Return the adjoints of a transposed convolution; that of the input is the convolution with the same weights."""
    t, x, w = s.t, s.x(0), s.x(1)
    how = _transposed_geometry(s)
    return {
        0: lambda: forward(t, s.full, w, dims(x), how),
        1: lambda: weight_gradient(t, s.full, x, s.known_shape(1), how),
        2: lambda: _bias_gradient(s),
    }


def _transposed_geometry(s: RuleInput) -> Geometry:
    kernel, mode = s.known_shape(1)[2:], s.attribute("auto_pad", "NOTSET")
    rank, group = len(kernel), s.attribute("group")
    stated = s.attribute("output_shape")
    ones = (1,) * rank
    strides, dilations = tuple(s.attribute("strides") or ones), tuple(s.attribute("dilations") or ones)
    if stated is None and mode in ("NOTSET", "VALID"):
        pads = s.attribute("pads") if mode == "NOTSET" else None
        pads = pads or [0] * (2 * rank)
        return Geometry(kernel, strides, dilations, tuple(pads[:rank]), tuple(pads[rank:]), group)
    lengths = s.known_shape()[2:]
    extra = s.attribute("output_padding") or [0] * rank
    wanted = list(stated)[-rank:] if stated else [n * st for n, st in zip(lengths, strides, strict=True)]
    begin, end = [], []
    for n, k, st, d, more, out in zip(lengths, kernel, strides, dilations, extra, wanted, strict=True):
        total = max(0, st * (n - 1) + more + d * (k - 1) + 1 - out)
        small, large = total // 2, total - total // 2
        begin.append(small if mode == "SAME_UPPER" else large)
        end.append(large if mode == "SAME_UPPER" else small)
    return Geometry(kernel, strides, dilations, tuple(begin), tuple(end), group)


def _bias_gradient(s: RuleInput) -> ir.Value:
    axes = [i for i in range(len(dims(s.y))) if i != 1]
    return s.t.sum(s.full, axes, keepdims=False)
