"""Temporary buffers that a kernel of ONNX Runtime's CUDA provider takes while it runs.

Most take none: element-wise kernels (Where too), products of matrices, LayerNormalization, Transpose, Gather, Scatter,
Slice, Pad, Expand, Split, TopK, pooling. The rules below were read off every allocation that ONNX Runtime 1.31.1 makes
on a device whose allocator keeps books; ``tests/ort/test_cuda_facts.py`` repeats it. Tables of pointers (up to some
kB, whatever the tensor) are left out.

What cuDNN asks for in a convolution is its own choice, and depends on the device. With the provider option
``cudnn_conv_use_max_workspace=0`` ONNX Runtime refuses engines that want more than 32 MiB: that is the margin which is
added to every convolution unless another is stated. cuBLAS holds memory of its own that no ONNX Runtime limit covers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from onnx_remat.ort.kernels.base import Call, OpKey, Rule, numel

_WIDE: Final = 8  # bytes of an int64 or a double

MARGIN: Final = 32 * 2**20
"""Bytes for what cuDNN takes in one convolution."""

CONVOLUTIONS: Final[tuple[OpKey, ...]] = (("", "Conv"), ("", "ConvTranspose"), ("com.microsoft", "FusedConv"))
"""Operators that cuDNN computes with workspace."""


def _softmax(call: Call) -> tuple[int, ...]:
    """Over any axis but the last: a transposed input and a transposed output. Before opset 13 none."""
    rank = len(call.input(0))
    axis = call.number("axis", -1 if call.opset >= 13 else 1) % max(rank, 1)
    return () if call.opset < 13 or axis == rank - 1 else (call.output_bytes(),) * 2


_BLOCK: Final = 1024  # columns that one block of threads adds up
_MOST_BLOCKS: Final = 256
_COUNT: Final = 4  # bytes; sums of float16 are float32


def _partial_sums(call: Call) -> int:
    """Sums over the last axes: for every row what each block of threads adds up, and a count of those that are done.

    A sum over axes of one entry alone is one over rows of one column.

    >>> _partial_sums(Call({}, [(64, 3000), (1,)], [4, 8], [(64, 1)], [4], 1))
    783
    """
    rows, kept = numel(call.outputs[0]), [n for n in call.outputs[0] or () if n != 1]
    sizes = [n for n in call.input(0) if n != 1]
    if rows < _SEVERAL or sizes[: len(kept)] != kept:
        return 0
    blocks = min(_MOST_BLOCKS, max(1, numel(call.input(0)) // rows // _BLOCK))
    return rows * (blocks * max(_COUNT, call.in_sizes[0]) + _COUNT) + 15  # to align what is given


_SEVERAL: Final = 2  # rows: one alone is summed in another way


def _squares(call: Call) -> tuple[int, int]:
    """The square of every element, and their partial sums."""
    return numel(call.input(0)) * call.in_sizes[0], _partial_sums(call)


def _exponentials(call: Call) -> tuple[int, int]:
    """The exponential of every element, and the maxima."""
    return numel(call.input(0)) * call.in_sizes[0], call.output_bytes()


def _extremes(call: Call) -> tuple[int, ...]:
    """Integers of eight bytes are compared as floats of eight bytes."""
    return (numel(call.input(0)) * _WIDE, call.output_bytes()) if call.in_sizes[0] == _WIDE else ()


def _attention(call: Call) -> tuple[int, int]:
    """Two tensors like the query: what the fused kernels of recent devices take."""
    size = numel(call.input(0)) * call.in_sizes[0]
    return size, size


def _einsum(call: Call) -> int:
    """An upper bound: transposed operands, the product, the product transposed."""
    if len(call.inputs) == 1:
        return call.output_bytes()
    return call.input_bytes() + 2 * call.output_bytes() * (len(call.inputs) - 1)


def _convolution(margin: int) -> Rule:
    return lambda _: margin


_RULES: Final[dict[OpKey, Rule]] = {
    ("", "Attention"): _attention,
    ("", "Einsum"): _einsum,
    ("", "LogSoftmax"): _softmax,
    ("", "ReduceLogSumExp"): _exponentials,
    ("", "ReduceMax"): _extremes,
    ("", "ReduceMin"): _extremes,
    **{("", op): _partial_sums for op in ("ReduceLogSum", "ReduceMean", "ReduceSum")},
    ("", "ReduceSumSquare"): _squares,
    ("", "Softmax"): _softmax,
}


def rules(margin: int) -> Mapping[OpKey, Rule]:
    """Workspace by operator, where a convolution takes `margin` bytes."""
    return _RULES | dict.fromkeys(CONVOLUTIONS, _convolution(margin))


RULES: Final = rules(MARGIN)
