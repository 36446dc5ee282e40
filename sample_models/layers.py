"""Differentiable layers, registered with GraphSurgeon: ``graph.linear(x, "head", 10)`` and so on.

Every layer emits its forward nodes, then records a pullback that emits its backward nodes. Layers with
weights declare them as parameters ``<module>.<name>.weight`` and so on.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from sample_models.step import Shape, TrainingGraph

EPSILON = 1e-5

Grads = Sequence[gs.Variable | None]


# Pointwise


@gs.Graph.register()
def relu(self: TrainingGraph, x: gs.Variable) -> gs.Variable:
    """max(x, 0); backward reads the output."""
    y = self.pointwise("Relu", x)

    def pullback(dy: gs.Variable) -> Grads:
        positive = self.pointwise("Greater", y, self.scalar(0.0))
        mask = self.emit("Cast", positive, shape=y.shape, to=np.float32)
        return [self.pointwise("Mul", dy, mask)]

    return self.record(y, [x], pullback)


@gs.Graph.register()
def tanh(self: TrainingGraph, x: gs.Variable) -> gs.Variable:
    """tanh(x); dx = dy - (dy * y) * y reads the output, and no part of it can run before dy is there."""
    y = self.pointwise("Tanh", x)

    def pullback(dy: gs.Variable) -> Grads:
        scaled = self.pointwise("Mul", self.pointwise("Mul", dy, y), y)
        return [self.pointwise("Sub", dy, scaled)]

    return self.record(y, [x], pullback)


@gs.Graph.register()
def gelu(self: TrainingGraph, x: gs.Variable) -> gs.Variable:
    """x * cdf(x) with the exact normal cdf; dx = dy * (cdf(x) + x * pdf(x))."""
    erf = self.pointwise("Erf", self.pointwise("Mul", x, self.scalar(math.sqrt(0.5))))
    cdf = self.pointwise("Mul", self.pointwise("Add", erf, self.scalar(1.0)), self.scalar(0.5))
    y = self.pointwise("Mul", x, cdf)

    def pullback(dy: gs.Variable) -> Grads:
        exponent = self.pointwise("Mul", self.pointwise("Mul", x, x), self.scalar(-0.5))
        pdf = self.pointwise("Mul", self.pointwise("Exp", exponent), self.scalar(1 / math.sqrt(2 * math.pi)))
        slope = self.pointwise("Add", cdf, self.pointwise("Mul", x, pdf))
        return [self.pointwise("Mul", dy, slope)]

    return self.record(y, [x], pullback)


@gs.Graph.register()
def residual(self: TrainingGraph, x: gs.Variable, branch: gs.Variable) -> gs.Variable:
    """x + branch, of equal shapes."""
    return self.record(self.pointwise("Add", x, branch), [x, branch], lambda dy: [dy, dy])


@gs.Graph.register()
def shift(self: TrainingGraph, x: gs.Variable, name: str, shape: Shape) -> gs.Variable:
    """x + bias, where a bias of that shape broadcasts to x."""
    bias = self.parameter(name, shape)
    return self.record(self.pointwise("Add", x, bias), [x, bias], lambda dy: [dy, self.reduce_to(dy, shape)])


@gs.Graph.register()
def scale(self: TrainingGraph, x: gs.Variable, name: str, shape: Shape) -> gs.Variable:
    """x * weight, where a weight of that shape broadcasts to x."""
    weight = self.parameter(name, shape)

    def pullback(dy: gs.Variable) -> Grads:
        return [self.pointwise("Mul", dy, weight), self.reduce_to(self.pointwise("Mul", dy, x), shape)]

    return self.record(self.pointwise("Mul", x, weight), [x, weight], pullback)


# Normalisation


@gs.Graph.register()
def standardize(self: TrainingGraph, x: gs.Variable, axes: Sequence[int]) -> gs.Variable:
    """Zero mean and unit variance over `axes`; backward reads the output and the small inverse deviation."""
    centered = self.pointwise("Sub", x, self.reduce("ReduceMean", x, axes))
    variance = self.reduce("ReduceMean", self.pointwise("Mul", centered, centered), axes)
    deviation = self.pointwise("Sqrt", self.pointwise("Add", variance, self.scalar(EPSILON)))
    inverse = self.pointwise("Reciprocal", deviation)
    y = self.pointwise("Mul", centered, inverse)

    def pullback(dy: gs.Variable) -> Grads:
        along_y = self.reduce("ReduceMean", self.pointwise("Mul", dy, y), axes)
        centered_dy = self.pointwise("Sub", dy, self.reduce("ReduceMean", dy, axes))
        tangent = self.pointwise("Sub", centered_dy, self.pointwise("Mul", y, along_y))
        return [self.pointwise("Mul", tangent, inverse)]

    return self.record(y, [x], pullback)


@gs.Graph.register()
def layer_norm(self: TrainingGraph, x: gs.Variable, name: str) -> gs.Variable:
    """Layer normalisation over the last axis."""
    last = len(x.shape) - 1
    with self.scope(name):
        shape = (x.shape[last],)
        return self.shift(self.scale(self.standardize(x, [last]), "weight", shape), "bias", shape)


@gs.Graph.register()
def batch_norm(self: TrainingGraph, x: gs.Variable, name: str) -> gs.Variable:
    """Batch normalisation of NCHW data by the batch's own statistics."""
    with self.scope(name):
        shape = (1, x.shape[1], 1, 1)
        return self.shift(self.scale(self.standardize(x, [0, 2, 3]), "weight", shape), "bias", shape)


# Linear maps


@gs.Graph.register()
def linear(self: TrainingGraph, x: gs.Variable, name: str, width: int) -> gs.Variable:
    """x @ weight + bias, for a matrix x."""
    weight = self.parameter(f"{name}.weight", (x.shape[1], width))
    bias = self.parameter(f"{name}.bias", (width,))

    def pullback(dy: gs.Variable) -> Grads:
        dx = self.gemm(dy, weight, trans="NT")
        return [dx, self.gemm(x, dy, trans="TN"), self.reduce_to(dy, (width,))]

    return self.record(self.gemm(x, weight, bias), [x, weight, bias], pullback)


@gs.Graph.register()
def embedding(self: TrainingGraph, ids: gs.Variable, name: str, rows: int, width: int) -> gs.Variable:
    """One row of a table per id of a vector.

    The table's gradient is a product with one-hot ids: ScatterND with ``reduction="add"`` would be shorter,
    but ONNX Runtime's CPU kernel loses updates of repeated rows when it runs on several threads.
    """
    table = self.parameter(f"{name}.weight", (rows, width))
    y = self.emit("Gather", table, ids, shape=(*ids.shape, width), axis=0)
    return self.record(y, [table], lambda dy: [self.gemm(self.one_hot(ids, rows), dy, trans="TN")])


@gs.Graph.register()
def positioned(self: TrainingGraph, x: gs.Variable, name: str, length: int) -> gs.Variable:
    """Add to each token, one per row, the embedding of its position in a sequence of `length` tokens."""
    tokens, width = x.shape
    table = self.parameter(f"{name}.weight", (length, width))
    by_sequence = (tokens // length, length, width)
    y = self.reshaped(self.pointwise("Add", self.reshaped(x, by_sequence), table), (tokens, width))

    def pullback(dy: gs.Variable) -> Grads:
        return [dy, self.reduce_to(self.reshaped(dy, by_sequence), (length, width))]

    return self.record(y, [x, table], pullback)


@gs.Graph.register()
def conv2d(
    self: TrainingGraph, x: gs.Variable, name: str, channels: int, kernel: int = 3, stride: int = 1
) -> gs.Variable:
    """A square convolution without bias, padded so that stride 1 keeps the size.

    The gradient of x is the transposed convolution of dy. That of the weight is the convolution of x with dy,
    batch and channels swapped, stride and dilation swapped, narrowed to the kernel.
    """
    batch, in_channels, height, width = x.shape
    weight = self.parameter(f"{name}.weight", (channels, in_channels, kernel, kernel))
    pad = kernel // 2
    pads, strides = [pad] * 4, [stride, stride]
    rows, columns = ((size + 2 * pad - kernel) // stride + 1 for size in (height, width))
    y = self.emit("Conv", x, weight, shape=(batch, channels, rows, columns), pads=pads, strides=strides)
    unread = [(size + 2 * pad - kernel) % stride for size in (height, width)]

    def pullback(dy: gs.Variable) -> Grads:
        shape = tuple(x.shape)
        dx = self.emit("ConvTranspose", dy, weight, shape=shape, pads=pads, strides=strides, output_padding=unread)
        by_channel = [self.transposed(value, [1, 0, 2, 3]) for value in (x, dy)]
        shape = (in_channels, channels, kernel + unread[0], kernel + unread[1])
        dw = self.emit("Conv", *by_channel, shape=shape, pads=pads, dilations=strides)
        if any(unread):
            bounds = [self.indices(values) for values in ([0, 0], [kernel, kernel], [2, 3])]
            dw = self.emit("Slice", dw, *bounds, shape=(in_channels, channels, kernel, kernel))
        return [dx, self.transposed(dw, [1, 0, 2, 3])]

    return self.record(y, [x, weight], pullback)


@gs.Graph.register()
def global_average_pool(self: TrainingGraph, x: gs.Variable) -> gs.Variable:
    """NCHW -> NC, the mean over space."""
    batch, channels, height, width = x.shape

    def pullback(dy: gs.Variable) -> Grads:
        share = self.pointwise("Mul", dy, self.scalar(1 / (height * width)))
        share = self.reshaped(share, (batch, channels, 1, 1))
        return [self.emit("Expand", share, self.indices(x.shape), shape=tuple(x.shape))]

    return self.record(self.reduce("ReduceMean", x, [2, 3], keepdims=False), [x], pullback)


# Attention


@gs.Graph.register()
def split_heads(self: TrainingGraph, x: gs.Variable, length: int, heads: int) -> gs.Variable:
    """(batch * length, width) -> (batch, heads, length, width / heads)."""
    tokens, width = x.shape
    y = self.transposed(self.reshaped(x, (tokens // length, length, heads, width // heads)), [0, 2, 1, 3])
    return self.record(y, [x], lambda dy: [self.reshaped(self.transposed(dy, [0, 2, 1, 3]), (tokens, width))])


@gs.Graph.register()
def merge_heads(self: TrainingGraph, x: gs.Variable) -> gs.Variable:
    """(batch, heads, length, size) -> (batch * length, heads * size)."""
    batch, heads, length, size = x.shape
    y = self.reshaped(self.transposed(x, [0, 2, 1, 3]), (batch * length, heads * size))

    def pullback(dy: gs.Variable) -> Grads:
        return [self.transposed(self.reshaped(dy, (batch, length, heads, size)), [0, 2, 1, 3])]

    return self.record(y, [x], pullback)


@gs.Graph.register()
def causal_scores(self: TrainingGraph, query: gs.Variable, key: gs.Variable) -> gs.Variable:
    """softmax(query @ key^T / sqrt(size)) over the positions up to each query's own."""
    length, size = query.shape[-2:]
    swap = [0, 1, 3, 2]
    factor = self.scalar(1 / math.sqrt(size))
    mask = self.constant(np.triu(np.full((length, length), -1e9, np.float32), 1), f"causal_mask.{length}")
    scores = self.pointwise("Mul", self.product(query, self.transposed(key, swap)), factor)
    masked = self.pointwise("Add", scores, mask)
    y = self.emit("Softmax", masked, shape=masked.shape, axis=-1)

    def pullback(dy: gs.Variable) -> Grads:
        weighted = self.pointwise("Mul", dy, y)
        total = self.reduce("ReduceSum", weighted, [3])
        dmasked = self.pointwise("Sub", weighted, self.pointwise("Mul", y, total))
        dscores = self.pointwise("Mul", dmasked, factor)
        return [self.product(dscores, key), self.product(self.transposed(dscores, swap), query)]

    return self.record(y, [query, key], pullback)


@gs.Graph.register()
def mix(self: TrainingGraph, scores: gs.Variable, value: gs.Variable) -> gs.Variable:
    """scores @ value."""
    swap = [0, 1, 3, 2]

    def pullback(dy: gs.Variable) -> Grads:
        dscores = self.product(dy, self.transposed(value, swap))
        return [dscores, self.product(self.transposed(scores, swap), dy)]

    return self.record(self.product(scores, value), [scores, value], pullback)


@gs.Graph.register()
def self_attention(self: TrainingGraph, x: gs.Variable, name: str, length: int, heads: int) -> gs.Variable:
    """Causal multi-head self-attention over sequences of `length` tokens, laid out one token per row."""
    width = x.shape[1]
    with self.scope(name):
        query, key, value = (self.split_heads(self.linear(x, part, width), length, heads) for part in "qkv")
        mixed = self.mix(self.causal_scores(query, key), value)
        return self.linear(self.merge_heads(mixed), "out", width)


# Losses: the end of the tape, whose own gradient is one


@gs.Graph.register()
def cross_entropy(self: TrainingGraph, logits: gs.Variable, labels: gs.Variable) -> gs.Variable:
    """Mean cross-entropy of one row of logits per label."""
    rows, classes = logits.shape
    log_probs = self.emit("LogSoftmax", logits, shape=logits.shape, axis=-1)
    columns = self.reshaped(labels, (rows, 1))
    picked = self.emit("GatherElements", log_probs, columns, shape=(rows, 1), axis=1)
    mean = self.reduce("ReduceMean", picked, [0, 1], keepdims=False)
    loss = self.emit("Neg", mean, shape=(), result="loss")

    def pullback(_: gs.Variable) -> Grads:
        excess = self.pointwise("Sub", self.pointwise("Exp", log_probs), self.one_hot(labels, classes))
        return [self.pointwise("Mul", excess, self.scalar(1 / rows))]

    return self.record(loss, [logits], pullback)


@gs.Graph.register()
def norm(self: TrainingGraph, x: gs.Variable) -> gs.Variable:
    """The Euclidean norm of all elements; its gradient x / norm reads the loss, so the loss comes first."""
    loss = self.emit("ReduceL2", x, shape=(), keepdims=0, result="loss")
    return self.record(loss, [x], lambda _: [self.pointwise("Div", x, loss)])
