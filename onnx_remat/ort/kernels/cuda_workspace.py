"""Workspace: temporary buffers of the kernels of ONNX Runtime's CUDA provider.

Most kernels need none: element-wise kernels (Where too), matrix products, LayerNormalization, Transpose, Gather,
Scatter, Slice, Pad, Expand, Split, TopK, pooling. The rules below were derived from every allocation of ONNX Runtime
1.31.1 on a device whose allocator records them; ``tests/ort/test_cuda_facts.py`` repeats it. Tables of pointers (up to
a few kB, whatever the tensor) are left out.

cuDNN chooses its workspace for a convolution itself, depending on the device: every convolution is allowed 32 MiB
unless another margin is stated. A ResNet-50 (64 images of 128 pixels) took up to 168 MiB more than that on an H100,
also with ``cudnn_conv_use_max_workspace=0``. cuBLAS allocates memory of its own that no ONNX Runtime limit covers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Final

from onnx_remat.ort.kernels.base import Call, OpKey, Rule, Shape, einsum_workspace, numel, softmax_workspace

_WIDE: Final = 8  # bytes of an int64 or a double

MARGIN: Final = 32 * 2**20
"""Bytes allowed for cuDNN's workspace in one convolution."""

CONVOLUTIONS: Final[tuple[OpKey, ...]] = (("", "Conv"), ("", "ConvTranspose"), ("com.microsoft", "FusedConv"))
"""Operators for which cuDNN needs workspace."""


_BLOCK: Final = 1024  # columns that one block of threads sums
_MOST_BLOCKS: Final = 256
_COUNT: Final = 4  # bytes; sums of float16 are float32


def _sums(call: Call) -> int:
    """Sums over the last axes: per row, a partial sum of each block of threads, and a count of finished blocks.

    Sums over the first axes need none; cuDNN computes sums over other axes.

    >>> _sums(Call({}, [(64, 3000), (1,)], [4, 8], [(64, 1)], [4], 1))
    783
    >>> _sums(Call({}, [(8, 64, 100), (1,)], [4, 8], [(8, 1, 100)], [4], 1)) == 4 * 8 * 64 * 100
    True
    """
    rows, where = numel(call.outputs[0]), _summed(call.input(0), call.outputs[0] or (), call.axes)
    if where == _BETWEEN:
        return _by_cudnn(call)
    if rows < _SEVERAL or where != _LAST:
        return 0
    blocks = min(_MOST_BLOCKS, max(1, numel(call.input(0)) // rows // _BLOCK))
    return rows * (blocks * max(_COUNT, call.in_sizes[0]) + _COUNT) + 15  # bytes for alignment


_SEVERAL: Final = 2  # rows: another kernel sums a single row
_FIRST, _LAST, _BETWEEN = "first", "last", "between"


def _summed(shape: Shape, made: Shape, axes: Sequence[int] | None = None) -> str:
    """Return which axes are summed, apart from axes of size 1: the first ones, the last ones, or others.

    If neither axes nor shapes decide, as sizes are equal, the answer is others.

    >>> _summed((8, 1, 64), (8,)), _summed((8, 64), (1, 64)), _summed((4, 4, 4), (4, 4)), _summed((4, 4), (1, 4))
    ('last', 'first', 'between', 'first')
    >>> _summed((4, 4, 4), (4, 4), (-1,))
    'last'
    """
    wide = [axis for axis, n in enumerate(shape) if n != 1]
    kept = [n for n in made if n != 1]
    if axes is not None:
        gone = {axis % len(shape) for axis in axes}
        places = [[i for i, axis in enumerate(wide) if axis not in gone]]
    elif len(made) == len(shape):
        places = [[i for i, axis in enumerate(wide) if made[axis] != 1]]
    else:
        choices = itertools.combinations(range(len(wide)), len(kept))
        places = [[*some] for some in choices if [shape[wide[i]] for i in some] == kept]
    first, last = [*range(len(kept))], [*range(len(wide) - len(kept), len(wide))]
    if any(some not in (first, last) for some in places):
        return _BETWEEN
    return _LAST if first in places else _FIRST


def _by_cudnn(call: Call) -> int:
    """As many bytes as the input, in floats of four bytes at least: seen of ReduceMax on an H100 (cuDNN 9)."""
    return numel(call.input(0)) * max(_COUNT, call.in_sizes[0])


def _squares(call: Call) -> tuple[int, int]:
    """The square of every element, and the workspace of their sums."""
    return numel(call.input(0)) * call.in_sizes[0], _sums(call)


def _exponentials(call: Call) -> tuple[int, int, int]:
    """The exponential of every element, the maxima, and cuDNN's workspace."""
    return numel(call.input(0)) * call.in_sizes[0], call.output_bytes(), _by_cudnn(call)


def _extremes(call: Call) -> tuple[int, ...]:
    """cuDNN's workspace; integers of eight bytes are compared as floats of eight bytes."""
    floats = (numel(call.input(0)) * _WIDE, call.output_bytes()) if call.in_sizes[0] == _WIDE else ()
    return *floats, _by_cudnn(call)


def _attention(call: Call) -> tuple[int, int]:
    """Two tensors of the query's size: the workspace of the fused kernels of recent devices."""
    size = numel(call.input(0)) * call.in_sizes[0]
    return size, size


def _convolution(margin: int) -> Rule:
    return lambda _: margin


_RULES: Final[dict[OpKey, Rule]] = {
    ("", "Attention"): _attention,
    ("", "Einsum"): einsum_workspace,
    ("", "LogSoftmax"): softmax_workspace,
    ("", "ReduceLogSumExp"): _exponentials,
    ("", "ReduceMax"): _extremes,
    ("", "ReduceMin"): _extremes,
    **{("", op): _sums for op in ("ReduceLogSum", "ReduceMean", "ReduceSum")},
    **{("", op): _by_cudnn for op in ("ReduceL1", "ReduceL2", "ReduceProd")},
    ("", "ReduceSumSquare"): _squares,
    ("", "Softmax"): softmax_workspace,
}


def rules(margin: int) -> Mapping[OpKey, Rule]:
    """Return the rules with `margin` bytes for a convolution."""
    return _RULES | dict.fromkeys(CONVOLUTIONS, _convolution(margin))


RULES: Final = rules(MARGIN)
