"""Convolutions and their gradients by input and weights, for all converters.

All functions take any number of spatial axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from .dims import Dims, dims, is_static, size
from .tape import Tape


@dataclass(frozen=True, slots=True)
class Geometry:
    """The geometry of the windows of a convolution (or pooling), by axis.

    Attributes
    ----------
    kernel, strides, dilations, begin, end : tuple of int
        `begin` and `end` are the padding on both sides.
    group : int
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]
    group: int = 1

    @property
    def rank(self) -> int:
        return len(self.kernel)

    @property
    def extent(self) -> tuple[int, ...]:
        """Number of input entries from a window's first to its last, inclusive, by axis."""
        return tuple(d * (k - 1) + 1 for d, k in zip(self.dilations, self.kernel, strict=True))


LEAST_PIXELS = 400
"""Entries of an image from which a convolution with the flipped kernel is the faster adjoint, measured on images of 4
to 96 squared with 16 to 512 channels. It also needs no columns, which take the memory of an image times the entries of
a window."""


def input_gradient(t: Tape, g: ir.Value, w: ir.Value, shape: Dims, how: Geometry) -> ir.Value:
    """Return the adjoint of a convolution's input of this shape: a transposed convolution of the output's adjoint.

    For large images with strides of one, it is a convolution with the flipped kernel.
    """
    pads = [e - 1 - p for e, p in zip(how.extent * 2, how.begin + how.end, strict=True)]
    if all(stride == 1 for stride in how.strides) and min(pads) >= 0 and (size(shape[2:]) or 0) >= LEAST_PIXELS:
        return t.op(
            "Conv", g, _turned(t, w, how), shape=shape, group=how.group, dilations=list(how.dilations), pads=pads
        )
    common: dict[str, Any] = {"group": how.group, "strides": list(how.strides), "dilations": list(how.dilations)}
    spatial, out = shape[2:], dims(g)[2:]
    if is_static(spatial):
        rest = [unread(int(n), int(m), how, i) for i, (n, m) in enumerate(zip(spatial, out, strict=True))]
        if all(r < max(st, d) for r, st, d in zip(rest, how.strides, how.dilations, strict=True)):
            extra: dict[str, Any] = {"output_padding": rest} if any(rest) else {}
            pads = [*how.begin, *how.end]
            return t.op("ConvTranspose", g, w, shape=shape, pads=pads, **common, **extra)
    elif all(stride == 1 for stride in how.strides):
        return t.op("ConvTranspose", g, w, shape=shape, pads=[*how.begin, *how.end], **common)
    # Without padding, the transposed convolution covers the entries that windows read; crop and pad it to the input.
    covered = tuple(f"covered.{t.fresh('window')}" for _ in spatial)
    whole = t.op("ConvTranspose", g, w, shape=(*shape[:2], *covered), **common)
    size_now = t.op("Shape", whole, shape=(how.rank,), dtype=ir.DataType.INT64, start=2)
    after = t.sub(t.add(t.shape_vector(spatial), t.ints(*how.begin)), size_now)
    zeros = t.ints(0, 0)
    pads_now = t.op("Concat", zeros, t.ints(*(-b for b in how.begin)), zeros, after, shape=(4 + 2 * how.rank,), axis=0)
    return t.op("Pad", whole, pads_now, shape=shape)


def _turned(t: Tape, w: ir.Value, how: Geometry) -> ir.Value:
    """Return a kernel with its entries in reverse order, and input and output channels swapped in each group."""
    out, each, *kernel = dims(w)
    assert isinstance(out, int) and isinstance(each, int)
    spatial = range(2, 2 + how.rank)
    if how.group == 1:
        w = t.transpose(w, [1, 0, *spatial])
    else:
        split = t.reshape(w, (how.group, out // how.group, each, *kernel))
        swapped = t.transpose(split, [0, 2, 1, *(axis + 1 for axis in spatial)])
        w = t.reshape(swapped, (how.group * each, out // how.group, *kernel))
    axes = [axis for axis, k in zip(spatial, kernel, strict=True) if k != 1]
    if not axes:
        return w
    back, end = t.ints(*[-1] * len(axes)), t.ints(*[-(2**62)] * len(axes))
    return t.op("Slice", w, back, end, t.ints(*axes), back, shape=dims(w))


def unread(length: int, windows: int, how: Geometry, axis: int) -> int:
    """Return the number of entries at the end of the padded input that no window reads; negative for windows that
    reach beyond its end."""
    covered = (windows - 1) * how.strides[axis] + how.extent[axis]
    return length + how.begin[axis] + how.end[axis] - covered


def conv(t: Tape, x: ir.Value, w: ir.Value, shape: Dims, how: Geometry) -> ir.Value:
    return t.op(
        "Conv", x, w, shape=shape, group=how.group, strides=list(how.strides), dilations=list(how.dilations),
        pads=[*how.begin, *how.end],
    )  # fmt: skip


def weight_gradient(t: Tape, x: ir.Value, g: ir.Value, shape: tuple[int, ...], how: Geometry) -> ir.Value:
    """Return the adjoint of the weights of a convolution of `x`, from the adjoint of its output.

    In general it is a convolution of the input, with batch and channel axes swapped, by the output's adjoint as kernel;
    strides and dilations are swapped. Windows of one entry need only a matrix product. With many channels, one product
    for each entry of the window is two to ten times faster than the convolution, whose kernel is as large as an image.
    """
    entries = size(how.kernel)
    assert entries is not None
    if entries == 1 and how.group == 1 and not any(how.begin + how.end):
        return _pointwise_weight_gradient(t, x, g, shape, how)
    if by_entry(dims(x)[2:] + dims(g)[2:], shape, how):
        return weight_gradient_by_entry(t, x, g, shape, how)
    given = dims(x)
    n, spatial = given[0], given[2:]
    axes = range(2, 2 + how.rank)
    if how.group == 1:
        images = t.transpose(x, [1, 0, *axes])
    else:
        each = shape[1]
        split = t.reshape(x, (n, how.group, each, *spatial))
        stacked = t.transpose(split, [2, 1, 0, *(a + 1 for a in axes)])
        images = t.reshape(stacked, (each, t.product((how.group, n)), *spatial))
    kernels = t.transpose(g, [1, 0, *axes])
    made = t.op(
        "Conv", images, kernels, shape=(shape[1], shape[0], *_swapped_output(spatial, dims(g)[2:], how)),
        group=how.group, strides=list(how.dilations), dilations=list(how.strides), pads=[*how.begin, *how.end],
    )  # fmt: skip
    for axis, k in zip(axes, how.kernel, strict=True):
        made = t.slice(made, axis, 0, k)
    return t.transpose(made, [1, 0, *axes])


def by_entry(sizes: Dims, shape: tuple[int, ...], how: Geometry) -> bool:
    """Return whether `weight_gradient_by_entry` is faster, for weights of this shape and images of these sizes."""
    entries = size(how.kernel) or 0
    return entries <= _MOST_ENTRIES and how.group == 1 and shape[1] >= _LEAST_CHANNELS and is_static(sizes)


_MOST_ENTRIES, _LEAST_CHANNELS = 25, 16  # measured on 3 x 3 and 7 x 7 windows, 3 to 512 channels


def weight_gradient_by_entry(t: Tape, x: ir.Value, g: ir.Value, shape: tuple[int, ...], how: Geometry) -> ir.Value:
    """Return the weights' adjoint as one product for each window entry: the output's adjoint by all inputs read
    there."""
    rank, out = how.rank, [int(n) for n in dims(g)[2:]]
    spatial = range(1, 1 + rank)
    last = t.transpose(x, [0, *range(2, 2 + rank), 1])  # channels last: the layout of the product's operand
    wide = dims(last)
    if any(how.begin + how.end):
        padded = tuple(int(wide[i]) + how.begin[i - 1] + how.end[i - 1] for i in spatial)
        wide = (wide[0], *padded, wide[-1])
        last = t.op("Pad", last, t.ints(0, *how.begin, 0, 0, *how.end, 0), shape=wide)
    rows = t.product((wide[0], *out))
    left = t.reshape(t.transpose(g, [1, 0, *range(2, 2 + rank)]), (shape[0], rows))
    made = []
    for entry in np.ndindex(*how.kernel):
        first = [at * d for at, d in zip(entry, how.dilations, strict=True)]
        end = [f + (n - 1) * st + 1 for f, n, st in zip(first, out, how.strides, strict=True)]
        read = t.op(
            "Slice", last, t.ints(*first), t.ints(*end), t.ints(*spatial), t.ints(*how.strides),
            shape=(wide[0], *out, wide[-1]),
        )  # fmt: skip
        made.append(t.op("MatMul", left, t.reshape(read, (rows, wide[-1])), shape=shape[:2]))
    joined = t.op("Concat", *made, shape=(shape[0], len(made) * shape[1]), axis=1)
    by_entry = t.reshape(joined, (shape[0], len(made), shape[1]))
    return t.reshape(t.transpose(by_entry, [0, 2, 1]), shape)


def _swapped_output(spatial: Dims, out: Dims, how: Geometry) -> Dims:
    """Return the spatial shape of the swapped convolution: the kernel's, or longer if windows leave entries unread."""
    if not is_static(spatial) or not is_static(out):
        return tuple(f"at least {k}" for k in how.kernel)
    return tuple(k + unread(int(spatial[i]), int(out[i]), how, i) // how.dilations[i] for i, k in enumerate(how.kernel))


def _pointwise_weight_gradient(t: Tape, x: ir.Value, g: ir.Value, shape: tuple[int, ...], how: Geometry) -> ir.Value:
    out = dims(g)
    if any(stride > 1 for stride in how.strides):
        axes = range(2, 2 + how.rank)
        x = t.op(
            "Slice", x, t.ints(*[0] * how.rank), t.ints(*[2**62] * how.rank), t.ints(*axes), t.ints(*how.strides),
            shape=(*dims(x)[:2], *out[2:]),
        )  # fmt: skip
    pixels = t.product(out[2:])
    left = t.reshape(g, (out[0], out[1], pixels))
    right = t.reshape(x, (out[0], dims(x)[1], pixels))
    made = t.op("MatMul", left, t.swap_last(right), shape=(out[0], shape[0], shape[1]))
    if out[0] != 1:
        made = t.sum(made, [0], keepdims=False)
    return t.reshape(made, shape)
