"""Convolutions and their gradients that oneDNN computes, see `onednn`: those for which it is faster."""

from __future__ import annotations

import os
from collections.abc import Iterable
from math import prod

from onnx_remat.errors import ModelError
from onnx_remat.fuse import onednn
from onnx_remat.fuse.code import FLOAT
from onnx_remat.fuse.convolution_forms import Found
from onnx_remat.fuse.kernel import Kernel
from onnx_remat.fuse.machine_code import has_avx512
from onnx_remat.fuse.onednn import IMAGES, WEIGHTS, Convolution
from onnx_remat.fuse.ordered import OrderedStep

LEAST_WORK = 1 << 23
"""Multiplications from which on a call of oneDNN is worth its overhead."""

LEAST_WORK_IN_GROUPS = 1 << 20
"""The same for a convolution in groups: ONNX Runtime computes each group, of one channel, say, by itself."""

MOST_CHANNELS, MOST_CHANNELS_AVX512 = 64, 256
"""Channels from which on ONNX Runtime's products of columns are as fast as a convolution of oneDNN."""

LEAST_CHANNELS = 8
"""Channels of images from which on oneDNN computes their gradient faster; a first layer has fewer."""


def find(every: Iterable[Found]) -> list[Found]:
    """Return the convolutions that oneDNN computes faster than ONNX Runtime, by place; the first ones of those that
    share nodes."""
    found: list[Found] = []
    taken: set[int] = set()
    for each in every:
        if not taken.intersection(each.members) and worthwhile(each.convolution) and _known(each.convolution):
            taken.update(each.members)
            found.append(each)
    return sorted(found, key=lambda each: each.place)


def worthwhile(of: Convolution) -> bool:
    """Return whether oneDNN is faster than ONNX Runtime, judged by sizes.

    The limits were measured with two threads. Windows of one entry are products, and weights with more elements than
    the images are summed up faster as products. Groups for which oneDNN has no code of its own it computes one by one,
    as ONNX Runtime does: that pays for weights of groups of several channels.
    """
    own_code = of.group == 1 or bool(onednn.why_not()) or onednn.is_made_for(of)
    least = LEAST_WORK_IN_GROUPS if of.group > 1 and own_code else LEAST_WORK
    if of.images[0] < (os.cpu_count() or 1) or of.work < least:
        return False
    if not own_code and (of.kind != WEIGHTS or of.images[1] == of.group):
        return False
    if of.kind == WEIGHTS:
        return prod(of.weights) <= prod(of.images)
    if prod(of.kernel) == 1:
        return False
    if of.kind == IMAGES:
        return of.group > 1 or of.images[1] >= LEAST_CHANNELS
    most = MOST_CHANNELS_AVX512 if has_avx512() else MOST_CHANNELS
    return of.group > 1 or min(of.images[1], of.output[1]) < most


def _known(of: Convolution) -> bool:
    if onednn.why_not():
        return True
    try:
        onednn.scratch_bytes(of)
    except ModelError:
        return False
    return True


def kernel_of(found: Found, ordered: OrderedStep) -> Kernel:
    """Return the kernel of a convolution; its second output is scratch memory."""
    of = found.convolution
    count, scratch = onednn.planned(of)
    outputs = ((FLOAT, tuple(ordered.tensors[found.makes].shape)), (FLOAT, (scratch,)))
    return Kernel("", (), count, 1, outputs, convolution=of)


CODE_BYTES, LARGE_WINDOW, LARGE_WINDOW_CODE_BYTES = 170_000, 64, 2_900_000
"""Bytes of the code that oneDNN makes for a convolution and for its copies; elements of a window above which it makes
more for a gradient of weights, and reads more of its library, and how much: for the patches of a vision transformer."""


def code_bytes(kernels: Iterable[Kernel]) -> int:
    """Return the bytes of oneDNN's code for all different convolutions that some kernels compute."""
    found = {kernel.convolution for kernel in kernels if kernel.convolution is not None}
    large = sum(each.kind == WEIGHTS and prod(each.kernel) > LARGE_WINDOW for each in found)
    return CODE_BYTES * len(found) + LARGE_WINDOW_CODE_BYTES * large
