"""Gradient rules of normalisations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import onnx_ir as ir

from ..dims import dims
from ..tape import Tape
from .registry import Grads, RuleInput, rule

BATCH_STATISTICS = "onnx_remat.batch_statistics"
"""Node metadata (in memory) of a BatchNormalization whose mean and variance inputs are those of its own input."""


@rule("BatchNormalization")
def batch_normalization(s: RuleInput) -> Grads:
    """Return the adjoints of the inference form; with `BATCH_STATISTICS`, slot 0 includes mean and variance.

    Input, scale and statistics may have different types; float32 holds them all.
    """
    t = s.t
    wide = s.dtype() if len({s.dtype(slot) for slot in (0, 1, 3)}) == 1 else ir.DataType.FLOAT
    x, scale, mean, variance = (t.cast(s.x(slot), wide) for slot in (0, 1, 3, 4))
    rank = len(dims(x))
    others = [0, *range(2, rank)]
    epsilon = s.attribute("epsilon")
    training = BATCH_STATISTICS in s.node.meta

    def along(value: ir.Value) -> ir.Value:
        return t.unsqueeze(value, range(1, rank - 1)) if rank > 2 else value

    @cache
    def incoming() -> ir.Value:
        return t.cast(s.full, wide)

    @cache
    def inverse() -> ir.Value:
        return t.unary("Reciprocal", t.unary("Sqrt", t.add(variance, t.scalar(epsilon, variance))))

    @cache
    def normal() -> ir.Value:
        one, zero = (t.expand(t.scalar(k, scale), dims(scale)) for k in (1, 0))
        return t.op("BatchNormalization", x, one, zero, mean, variance, shape=dims(x), epsilon=epsilon)

    @cache
    def to_scale() -> ir.Value:
        return t.sum(t.mul(incoming(), normal()), others, keepdims=False)

    @cache
    def to_bias() -> ir.Value:
        return t.sum(incoming(), others, keepdims=False)

    def to_x() -> ir.Value:
        rate = t.mul(scale, inverse())
        if not training:
            return t.mul(t.cast(s.g, wide), along(rate))
        share = t.neg(t.over_count(rate, [dims(x)[i] for i in others]))
        # rate (g - mean(g) - normal mean(g normal)); one kernel computes the last two terms.
        pull = t.op(
            "BatchNormalization", x, t.mul(share, to_scale()), t.mul(share, to_bias()), mean, variance,
            shape=dims(x), epsilon=epsilon,
        )  # fmt: skip
        return t.add(t.mul(t.cast(s.g, wide), along(rate)), pull)

    grads = _narrowed(s, {0: to_x, 1: to_scale, 2: to_bias})
    return grads | {3: lambda: None, 4: lambda: None} if training else grads


def _wide(s: RuleInput) -> ir.DataType:
    """Return the type to normalize in: float32 for types of 16 bits, in which squares overflow."""
    return ir.DataType.FLOAT if s.dtype().bitwidth == 16 else s.dtype()


def _narrowed(s: RuleInput, adjoints: Grads) -> Grads:
    """Return functions whose results have the types of the inputs."""

    def narrowed(slot: int, adjoint: Callable[[], ir.Value | None]) -> ir.Value | None:
        made = adjoint()
        return None if made is None else s.t.cast(made, s.dtype(slot))

    return {slot: partial(narrowed, slot, adjoint) for slot, adjoint in adjoints.items()}


@rule("LayerNormalization")
def layer_normalization(s: RuleInput) -> Grads:
    """Return the adjoints by the op's further outputs, mean and inverse deviation."""
    t, node, rank = s.t, s.node, len(s.shape())
    axes = range(s.axis(), rank)
    if any(adjoint is not None for adjoint in s.adjoints[1:]):
        s.refuse("the loss depends on its mean or its inverse deviation, too")

    @cache
    def normal_and_inverse() -> tuple[ir.Value, ir.Value]:
        if len(node.outputs) < 3:
            node.resize_outputs(3)
        narrow = tuple(1 if i in axes else d for i, d in enumerate(s.shape()))
        for value, name in zip(node.outputs[1:], ("mean", "inverse"), strict=True):
            value.name = value.name or t.fresh(f"{s.y.name}.{name}")
            value.shape, value.type = ir.Shape(narrow), ir.TensorType(_wide(s))
        mean, inverse = node.outputs[1:]
        return t.mul(t.sub(t.cast(s.x(), _wide(s)), mean), inverse), inverse

    return _affine(s, normal_and_inverse, axes, centred=True)


@rule("RMSNormalization")
def rms_normalization(s: RuleInput) -> Grads:
    t, x = s.t, s.t.cast(s.x(), _wide(s))
    axes = range(s.attribute("axis", -1) % len(dims(x)), len(dims(x)))

    @cache
    def normal_and_inverse() -> tuple[ir.Value, ir.Value]:
        inverse = _inverse(t, t.reduce("ReduceMean", t.mul(x, x), axes), s.attribute("epsilon", 1e-5))
        return t.mul(x, inverse), inverse

    return _affine(s, normal_and_inverse, axes, centred=False)


def _inverse(t: Tape, variance: ir.Value, epsilon: float) -> ir.Value:
    return t.unary("Reciprocal", t.unary("Sqrt", t.add(variance, t.scalar(epsilon, variance))))


def _affine(
    s: RuleInput, normal_and_inverse: Callable[[], tuple[ir.Value, ir.Value]], axes: Sequence[int], centred: bool
) -> Grads:
    """Return the adjoints of y = normal(x) scale + bias, with scale and bias broadcast."""
    t = s.t

    @cache
    def incoming() -> ir.Value:
        return t.cast(s.full, _wide(s))

    def to_x() -> ir.Value:
        normal, inverse = normal_and_inverse()
        return _through(t, t.mul(incoming(), t.cast(s.x(1), _wide(s))), normal, inverse, axes, centred)

    return _narrowed(s, {
        0: to_x,
        1: lambda: t.unbroadcast(t.mul(incoming(), normal_and_inverse()[0]), dims(s.y), s.shape(1)),
        2: lambda: t.unbroadcast(incoming(), dims(s.y), s.shape(2)),
    })  # fmt: skip


def _through(t: Tape, g: ir.Value, normal: ir.Value, inverse: ir.Value, axes: Sequence[int], centred: bool) -> ir.Value:
    """Return inverse (g - mean(g) - normal mean(g normal)): the adjoint of x from that of its normal form."""
    pull = t.mul(normal, t.reduce("ReduceMean", t.mul(g, normal), axes))
    if centred:
        pull = t.add(pull, t.reduce("ReduceMean", g, axes))
    return t.mul(t.sub(g, pull), inverse)


@rule("InstanceNormalization", "GroupNormalization")
def group_normalization(s: RuleInput) -> Grads:
    """Return the adjoints on [N, groups, entries]; in InstanceNormalization each channel is a group."""
    t, x, scale = s.t, s.x(), s.x(1)
    shape = dims(x)
    channels = shape[1]
    if not isinstance(channels, int):
        s.refuse("the number of channels must be known")
    groups = s.attribute("num_groups", channels)
    each = channels // groups
    wide = (shape[0], groups, each, *shape[2:])
    # Scale and bias in a shape that broadcasts to [N, groups, channels of each, ...].
    affine = (groups, each, *(1 for _ in shape[2:]))
    axes = range(2, len(wide))

    @cache
    def normal_and_inverse() -> tuple[ir.Value, ir.Value]:
        grouped = t.reshape(t.cast(x, _wide(s)), wide)
        centred = t.sub(grouped, t.reduce("ReduceMean", grouped, axes))
        inverse = _inverse(t, t.reduce("ReduceMean", t.mul(centred, centred), axes), s.attribute("epsilon"))
        return t.mul(centred, inverse), inverse

    @cache
    def incoming() -> ir.Value:
        return t.reshape(t.cast(s.full, _wide(s)), wide)

    def to_x() -> ir.Value:
        normal, inverse = normal_and_inverse()
        g = t.mul(incoming(), t.reshape(t.cast(scale, _wide(s)), affine))
        return t.reshape(_through(t, g, normal, inverse, axes, centred=True), shape)

    def to_affine(g: ir.Value) -> ir.Value:
        return t.reshape(t.unbroadcast(g, wide, affine), dims(scale))

    return _narrowed(s, {
        0: to_x,
        1: lambda: to_affine(t.mul(incoming(), normal_and_inverse()[0])),
        2: lambda: to_affine(incoming()),
    })  # fmt: skip


@rule("LpNormalization")
def lp_normalization(s: RuleInput) -> Grads:
    t, x, y, axis = s.t, s.x(), s.y, [s.axis()]

    def gradient() -> ir.Value:
        if s.attribute("p") == 1:
            length, slope = t.reduce("ReduceL1", x, axis), t.unary("Sign", x)
        else:
            length, slope = t.reduce("ReduceL2", x, axis), y
        zero = t.scalar(0, x)  # of a row of zeros
        made = t.div(t.sub(s.full, t.mul(slope, t.sum(t.mul(s.full, y), axis))), length)
        return t.select(t.compare("Equal", length, zero), zero, made)

    return {0: gradient}
