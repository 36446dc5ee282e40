"""Workspace: temporary buffers of the kernels of ONNX Runtime's CPU provider.

A step's footprint is its live values plus the workspace of the running kernel. The rules below were measured with ONNX
Runtime 1.31.1: ``total_temp_allocations`` of its node memory statistics over grids of shapes, attributes and thread
counts, cross-checked against the resident memory of one-node graphs, which also includes memory that kernels take with
``malloc``, outside the allocator (`BY_MALLOC`). ``tests/ort/test_workspace.py`` repeats the former.

Statistics add up all temporaries of a node; if a kernel frees one before it allocates the next, the rule
here is the peak. Kernels not listed allocate nothing that grows with their tensors: reductions over any axes,
Transpose, MatMul, Gemm (transposed or not), Erf, Gelu, Pad, Concat, pooling, inference BatchNormalization
among them.

Not covered: float16 operators that ONNX Runtime runs in float between inserted Cast nodes (the casts are
nodes of their own, with outputs of their own), operators that expand to functions, and subgraphs of If,
Loop and Scan.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Final

import numpy as np

from onnx_remat.ort.kernels.base import Call, OpKey, Rule, Shape, einsum_workspace, numel, softmax_workspace

_MS: Final = "com.microsoft"

ASKS_FIRST: Final = frozenset(
    {(_MS, "DynamicQuantizeMatMul"), *(("", op) for op in ("Einsum", "Max", "Mean", "Min", "Sum", "Where"))}
)
"""Operators that allocate workspace before their outputs; all others do so afterwards, by the arena's log."""

BY_MALLOC: Final = frozenset(
    {(_MS, "GatherElementsGrad"), *(("", op) for op in ("NonZero", "Scatter", "ScatterElements"))}
)
"""Operators that take their workspace with ``malloc``, outside the arena."""

# MLAS convolutions split their work into tiles of 128 * 128 floats, one per thread.
_CONV_TILE_BYTES: Final = 128 * 128 * 4
# Minimum number of multiply-adds per MLAS thread, and the maximum number of threads for one product.
_MLAS_WORK_PER_THREAD: Final = 64 * 1024
_MLAS_MAX_THREADS: Final = 16
# MLAS assigns columns of a product to threads in multiples of this.
_MLAS_COLUMN_ALIGN: Final = 16

# com.microsoft Attention pads the scores of every head.
_SCORES_PADDING: Final = 64

_FLOAT: Final = 4
_INT64: Final = 8


def _conv(call: Call) -> int:
    """Float convolution: a tile per thread, or the whole column matrix of one group of one image."""
    data, weight, out = call.input(0), call.input(1), call.outputs[0] or ()
    rank = len(data) - 2
    groups = call.number("group", 1)
    kernel, image = list(weight[2:]), list(data[2:])
    strides, dilations = call.ints("strides", [1] * rank), call.ints("dilations", [1] * rank)
    depth, columns, filters = prod(weight[1:]), prod(out[2:]), weight[0] // groups
    if rank > 3:
        return depth * columns * _FLOAT
    if set(strides) == {1} and not _pads(call, rank):
        if depth == weight[1]:
            return 0  # Pointwise: a plain product.
        if rank <= 2 and set(dilations) == {1} and weight[1] == 1:
            kernel, image = [1] * (2 - rank) + kernel, [1] * (2 - rank) + image
            if kernel[1] == image[1] or (kernel[0] == image[0] and kernel[1] == 1):
                return 0  # The kernel spans the image: a plain product again.
    if filters > columns:
        return depth * columns * _FLOAT
    images = data[0] * groups
    if images > 1:
        return min(call.threads, images) * _CONV_TILE_BYTES
    return _column_threads(call.threads, filters * columns * depth, columns) * _CONV_TILE_BYTES


def _pads(call: Call, rank: int) -> bool:
    """Tell whether a convolution pads; under `auto_pad` the shapes decide."""
    if call.text("auto_pad", "NOTSET") in ("SAME_UPPER", "SAME_LOWER"):
        # With unit strides, SAME pads unless the kernel covers a single element.
        reach = zip(call.input(1)[2:], call.ints("dilations", [1] * rank), strict=True)
        return any((size - 1) * step for size, step in reach)
    return any(call.ints("pads", [0] * (2 * rank)))


def _column_threads(threads: int, work: int, columns: int) -> int:
    """Return the number of threads that MLAS uses for one image, which is the number of tiles."""
    count = min(work // _MLAS_WORK_PER_THREAD + 1, _MLAS_MAX_THREADS, threads)
    if count == 1:
        return 1
    share = -(-columns // count)
    share = -(-share // _MLAS_COLUMN_ALIGN) * _MLAS_COLUMN_ALIGN
    if share >= columns:
        return 1
    return count - 1 if share * (count - 1) >= columns else count


def _conv_transpose(call: Call) -> int:
    """The column matrix of one group of one image, also for pointwise kernels."""
    return prod(call.input(1)[1:]) * prod(call.input(0)[2:]) * _FLOAT


def _conv_integer(call: Call) -> int:
    """The column matrix of one group of one image, in bytes as the data are."""
    return prod(call.input(1)[1:]) * prod((call.outputs[0] or ())[2:])


def _where(call: Call) -> tuple[int, ...]:
    """Both choices are masked into tensors of their own before they are merged."""
    condition, size = call.input(0), call.out_sizes[0]
    return tuple(numel(np.broadcast_shapes(condition, call.input(slot))) * size for slot in (1, 2))


def _variadic(call: Call) -> int:
    """Partial results of a pairwise fold whose last step writes to the output.

    With four inputs or more, two of them are live at once, never more.
    """
    if len(call.inputs) < 3:
        return 0
    partial: Shape = call.input(0)
    sizes = []
    for slot in range(1, len(call.inputs) - 1):
        partial = np.broadcast_shapes(partial, call.input(slot))
        sizes.append(numel(partial) * call.out_sizes[0])
    return max([sizes[0], *(a + b for a, b in pairwise(sizes))])


def _scatter_elements(call: Call) -> int:
    """All indices, as int64."""
    return numel(call.input(1)) * _INT64


def _lrn(call: Call) -> tuple[int, ...]:
    """The scale of every element, and one image of squares padded by the window."""
    _, channels, *image = call.input(0)
    return call.output_bytes(), (channels + call.number("size", 1) - 1) * prod(image) * _FLOAT


def _batch_norm(call: Call) -> tuple[int, ...]:
    """Mean and variance of the batch when training."""
    return (call.input(0)[1] * call.in_sizes[0],) * 2 if call.number("training_mode", 0) else ()


def _layer_norm(call: Call) -> tuple[int, ...]:
    """Scale and bias widened to float, for float16 only."""
    return tuple(_FLOAT * numel(s) for s in call.inputs[1:3]) if call.in_sizes[0] == 2 else ()


def _fast_gelu(call: Call) -> int:
    """The sum with the bias, if there is one."""
    return call.output_bytes() if call.has(1) else 0


def _recurrent(call: Call, gates: int, states: int, extra: int) -> int:
    """All gates of the whole sequence, and state; backward, also the reversed input and output."""
    steps, batch, features = call.input(0)
    hidden = call.input(2)[2]
    one = steps * batch * gates * hidden + states * batch * hidden + extra * hidden + batch
    direction = call.text("direction", "forward")
    total = one * (2 if direction == "bidirectional" else 1)
    if direction != "forward":
        total += steps * batch * (features + hidden)
    return total * _FLOAT


def _rnn(call: Call) -> int:
    """The input's share of every hidden state, one direction after the other."""
    steps, batch, _ = call.input(0)
    return steps * batch * call.input(2)[2] * _FLOAT


def _attention(call: Call) -> int:
    """Standard Attention: the scores; a causal mask on top."""
    query, key = call.input(0), call.input(1)
    heads = query[1] if len(query) == 4 else call.number("q_num_heads", 1)
    area = query[-2] * (key[-2] + (call.input(4)[-2] if call.has(4) else 0))
    masks = 1 if call.number("is_causal", 0) else 0
    return (query[0] * heads + masks) * area * call.in_sizes[0]


def _fused_attention(call: Call) -> int:
    """com.microsoft Attention without past: query, key, value, scores, and the heads before they join."""
    batch, steps, _ = call.input(0)
    projected = call.input(1)[1]
    size = call.in_sizes[0]
    heads = batch * call.number("num_heads", 1)
    scores = heads * (steps * steps * size + _SCORES_PADDING)
    return batch * steps * projected * size + scores + call.output_bytes()


def _conv_grad(call: Call) -> int:
    """The column matrix of one group of one image, and ones to sum the bias over an image with."""
    area = prod(call.input(0)[2:])
    return (prod(call.input(2)[1:]) + 1) * area * _FLOAT


def _softmax_grad(call: Call) -> int:
    """Over any axis but the last: both inputs and the output, transposed."""
    last = call.number("axis", -1) % len(call.input(0)) == len(call.input(0)) - 1
    return 0 if last else 3 * call.output_bytes()


def _log_softmax_grad(call: Call) -> int:
    """The exponential (malloc), which is smaller than what transposing takes."""
    return max(call.output_bytes(), _softmax_grad(call))


def _cross_entropy(call: Call) -> tuple[int, ...]:
    """The shifted logits; the log-probabilities too if they are not an output."""
    stored = len(call.outputs) > 1 and call.outputs[1] is not None
    return (numel(call.input(0)) * call.in_sizes[0],) * (1 if stored else 2)


def _times_output(blocks: int) -> Rule:
    return lambda call: (call.output_bytes(),) * blocks


RULES: Final[dict[OpKey, Rule]] = {
    ("", "Attention"): _attention,
    ("", "BatchNormalization"): _batch_norm,
    ("", "Conv"): _conv,
    ("", "ConvInteger"): _conv_integer,
    ("", "ConvTranspose"): _conv_transpose,
    ("", "Einsum"): einsum_workspace,
    ("", "GRU"): lambda call: _recurrent(call, gates=3, states=3, extra=0),
    ("", "Hardmax"): softmax_workspace,
    ("", "LRN"): _lrn,
    ("", "LSTM"): lambda call: _recurrent(call, gates=4, states=5, extra=2),
    ("", "LayerNormalization"): _layer_norm,
    ("", "LogSoftmax"): softmax_workspace,
    ("", "Max"): _variadic,
    ("", "Mean"): _variadic,
    ("", "MeanVarianceNormalization"): _times_output(2),
    ("", "Min"): _variadic,
    ("", "NonZero"): _times_output(1),  # The result before its size is known.
    ("", "QLinearMatMul"): lambda call: numel(call.outputs[0]) * 4,  # The product in int32.
    ("", "RNN"): _rnn,
    ("", "Scatter"): _scatter_elements,
    ("", "ScatterElements"): _scatter_elements,
    ("", "Softmax"): softmax_workspace,
    ("", "SoftmaxCrossEntropyLoss"): _cross_entropy,
    ("", "Sum"): _variadic,
    ("", "Where"): _where,
    ("com.microsoft", "Attention"): _fused_attention,
    ("com.microsoft", "BiasFastGeluGrad_dX"): _times_output(1),
    ("com.microsoft", "BiasGelu"): _times_output(1),
    ("com.microsoft", "BiasGeluGrad_dX"): _times_output(1),
    ("com.microsoft", "ConvGrad"): _conv_grad,
    ("com.microsoft", "DynamicQuantizeMatMul"): lambda call: numel(call.input(0)),  # The data in int8.
    ("com.microsoft", "FastGelu"): _fast_gelu,
    ("com.microsoft", "FusedConv"): _conv,
    ("com.microsoft", "GatherElementsGrad"): lambda call: numel(call.input(2)) * _INT64,  # All indices.
    ("com.microsoft", "LayerNormalizationGrad"): _times_output(4),
    ("com.microsoft", "LogSoftmaxGrad"): _times_output(1),
    ("com.microsoft", "LogSoftmaxGrad_13"): _log_softmax_grad,
    ("com.microsoft", "SimplifiedLayerNormalizationGrad"): _times_output(4),
    ("com.microsoft", "SoftmaxCrossEntropyLossInternal"): _cross_entropy,
    ("com.microsoft", "SoftmaxGrad_13"): _softmax_grad,
}
