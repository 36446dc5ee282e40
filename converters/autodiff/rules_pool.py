"""Gradient rules of pooling and resizing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from onnx_remat.messages import Message, Setting

from ..constants import static
from ..convolutions import Geometry, input_gradient, unread
from ..dims import dims, is_static
from ..resizing import axis_matrix
from .parts import scatter
from .registry import Grads, RuleInput, rule
from .rules_conv import geometry


@rule("MaxPool")
def max_pool(s: RuleInput) -> Grads:
    """Return the adjoint of MaxPool: a scatter to the positions of the maxima, the op's second output."""
    t, node = s.t, s.node
    if s.attribute("storage_order"):
        s.refuse("column-major indices are not supported")
    how = geometry(s, s.attribute("kernel_shape"))

    def gradient() -> ir.Value:
        if len(node.outputs) == 1:
            node.resize_outputs(2)
        where = node.outputs[1]
        if not where.name:
            where.name = t.fresh(f"{s.y.name}.indices")
        where.shape, where.type = s.y.shape, ir.TensorType(ir.DataType.INT64)
        rows, entries = t.product(dims(s.y)), t.product(s.shape())
        apart = all(st >= e for st, e in zip(how.strides, how.extent, strict=True))
        sent, g = t.reshape(where, (rows,)), t.reshape(s.full, (rows,))
        if not apart:
            return t.reshape(scatter(t, (entries,), sent, g, 0), s.shape())
        zeros = t.zeros((entries,), s.dtype())
        alone = t.op("ScatterElements", zeros, sent, g, shape=(entries,), axis=0, reduction="none")
        return t.reshape(alone, s.shape())

    return {0: gradient}


@rule("MaxUnpool")
def max_unpool(s: RuleInput) -> Grads:
    """Return the adjoint of MaxUnpool: the entries at its indices, which number those of the whole result."""
    t = s.t
    if s.has(2):
        s.refuse("an output_shape is not supported")
    return {0: lambda: t.op("Gather", t.reshape(s.full, (t.product(dims(s.y)),)), s.x(1), shape=s.shape(), axis=0)}


@rule("AveragePool")
def average_pool(s: RuleInput) -> Grads:
    how = geometry(s, s.attribute("kernel_shape"))

    def gradient() -> ir.Value:
        return spread(s, s.t.mul(s.full, s.t.constant(1 / _counts(s, how))), how)

    return {0: gradient}


def _counts(s: RuleInput, how: Geometry) -> np.ndarray:
    """Return the number of entries that windows average over: one number, or one for each window if they differ."""
    padded = bool(s.attribute("count_include_pad"))
    whole = np.asarray(float(np.prod(how.kernel)), s.dtype().numpy())
    if not s.attribute("ceil_mode") and (padded or not any(how.begin + how.end)):
        return whole
    counts = np.ones((), s.dtype().numpy())
    for axis, (length, windows) in enumerate(zip(s.known_shape()[2:], dims(s.y)[2:], strict=True)):
        assert isinstance(windows, int)
        first = np.arange(windows)[:, None] * how.strides[axis] - how.begin[axis]
        read = first + np.arange(how.kernel[axis]) * how.dilations[axis]
        low, high = (-how.begin[axis], length + how.end[axis]) if padded else (0, length)
        inside = ((read >= low) & (read < high)).sum(axis=1).astype(counts.dtype)
        counts = counts[..., None] * inside
    return whole if (counts == whole).all() else counts


def spread(s: RuleInput, g: ir.Value, how: Geometry) -> ir.Value:
    """Return the adjoint of the sums over windows of the first input."""
    t, shape, out = s.t, s.shape(), dims(g)
    tiles = all(
        k == st and d == 1 and not b and not e and isinstance(n, int) and n == m * k
        for k, st, d, b, e, n, m in zip(
            how.kernel, how.strides, how.dilations, how.begin, how.end, shape[2:], out[2:], strict=True
        )
    )
    if tiles:
        between = t.unsqueeze(g, [3 + 2 * i for i in range(how.rank)])
        wide = [part for m, k in zip(out[2:], how.kernel, strict=True) for part in (m, k)]
        return t.reshape(t.expand(between, (*out[:2], *wide)), shape)
    if is_static((*shape[2:], *out[2:])):  # with ceil_mode, the last windows may reach beyond the padding
        ends = [max(e, e - unread(int(shape[2 + i]), int(out[2 + i]), how, i)) for i, e in enumerate(how.end)]
        how = replace(how, end=tuple(ends))
    # Each channel is treated as an image.
    count = t.product(shape[:2])
    ones = t.constant(np.ones((1, 1, *how.kernel), s.dtype().numpy()))
    made = input_gradient(t, t.reshape(g, (count, 1, *out[2:])), ones, (count, 1, *shape[2:]), how)
    return t.reshape(made, shape)


@rule("GlobalAveragePool")
def global_average_pool(s: RuleInput) -> Grads:
    return {0: lambda: s.t.over_count(s.g, s.shape()[2:])}


@rule("GlobalMaxPool")
def global_max_pool(s: RuleInput) -> Grads:
    t = s.t

    def gradient() -> ir.Value:
        hits = t.cast(t.compare("Equal", s.x(), s.y), s.dtype())
        ties = t.sum(hits, range(2, len(s.shape())))
        return t.mul(hits, t.div(s.g, ties))

    return {0: gradient}


@rule("LRN")
def lrn(s: RuleInput) -> Grads:
    """Return the adjoint of y = x / d^beta, where d = bias + alpha times the mean of squares over nearby channels."""
    t, x, y = s.t, s.x(), s.y
    alpha, beta, bias, width = (s.attribute(name) for name in ("alpha", "beta", "bias", "size"))
    n, channels, *spatial = s.shape()
    before, after = (width - 1) // 2, width - 1 - (width - 1) // 2

    def nearby(value: ir.Value, begin: int, end: int) -> ir.Value:
        """Return the mean over `width` channels around each; missing channels count as zero."""
        flat = t.reshape(value, (n, 1, channels, t.product(spatial)))
        made = t.op(
            "AveragePool", flat, shape=dims(flat), kernel_shape=[width, 1], pads=[begin, 0, end, 0],
            count_include_pad=1,
        )  # fmt: skip
        return t.reshape(made, (n, channels, *spatial))

    def gradient() -> ir.Value:
        d = t.add(t.mul(nearby(t.mul(x, x), before, after), alpha), t.scalar(bias, x))
        direct = t.mul(s.g, t.op("Pow", d, t.scalar(-beta, x), shape=dims(x)))
        through = nearby(t.div(t.mul(s.full, y), d), after, before)
        return t.sub(direct, t.mul(t.mul(through, x), 2 * alpha * beta))

    return {0: gradient}


@rule("Resize")
def resize(s: RuleInput) -> Grads:
    """Return the adjoint of Resize, which is linear and separable: products with each axis's transposed matrix."""
    t = s.t
    if s.attribute("coordinate_transformation_mode") == "tf_crop_and_resize":
        s.refuse("tf_crop_and_resize is not supported")
    if s.attribute("keep_aspect_ratio_policy", "stretch") != "stretch":
        s.refuse("a keep_aspect_ratio_policy other than stretch is not supported")

    def gradient() -> ir.Value:
        g = s.full
        for axis, (old, new) in enumerate(zip(s.shape(), dims(s.y), strict=True)):
            scale = _scale(s, axis)
            if scale == 1 or (old == new and scale is None):  # with another scale, places change in an equal size
                continue
            if not isinstance(old, int) or not isinstance(new, int):
                s.refuse(Message("the sizes of axis {} must be known: fix {!r} with {}", axis, old, Setting("dims")))
            matrix = _axis_matrix(s, axis, old, new)
            shape = dims(g)
            if _repeats(matrix):
                split = t.reshape(g, (*shape[:axis], old, new // old, *shape[axis + 1 :]))
                g = t.sum(split, [axis + 1], keepdims=False)
                continue
            order = [*(i for i in range(len(shape)) if i != axis), axis]
            last = t.transpose(g, order)
            made = t.op("MatMul", last, t.constant(matrix.astype(s.dtype().numpy())), shape=(*dims(last)[:-1], old))
            g = t.transpose(made, [order.index(i) for i in range(len(shape))])
        return g

    return {0: gradient}


def _scale(s: RuleInput, axis: int) -> float | None:
    """Return the scale of an axis, 1 for one that is left unchanged; None where it is unknown or follows from sizes."""
    axes = s.attribute("axes")
    if axes is not None:
        listed = [a % len(s.shape()) for a in axes]
        if axis not in listed:
            return 1.0
        axis = listed.index(axis)
    scales = static(s.x(2)) if s.has(2) else None
    return float(scales[axis]) if scales is not None and scales.size > axis else None


def _repeats(matrix: np.ndarray) -> bool:
    """Return whether the op repeats every entry of the old axis the same number of times, in order."""
    new, old = matrix.shape
    return new % old == 0 and np.array_equal(matrix, np.repeat(np.eye(old), new // old, axis=0))


def _axis_matrix(s: RuleInput, axis: int, old: int, new: int) -> np.ndarray:
    """Return the matrix [new, old] of Resize along one axis: the same op on the unit vectors."""
    scales = s.known(2, "scales") if s.has(2) else np.zeros(0, np.float32)
    axes = s.attribute("axes")
    if axes is not None and scales.size:
        given = dict(zip([a % len(s.shape()) for a in axes], scales, strict=True))
        scale = float(given.get(axis, 1.0))
    else:
        scale = float(scales[axis]) if scales.size else 0.0
    settings = {k: v.value for k, v in s.node.attributes.items() if k not in ("axes", "keep_aspect_ratio_policy")}
    return axis_matrix(settings, s.opset, old, new, scale if scales.size else None)
