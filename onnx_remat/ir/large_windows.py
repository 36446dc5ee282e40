"""Convolutions with large windows as matrix products, for devices that have no fast kernel for such windows.

The gradient of a convolution's weights is written as a convolution of the images by the output's gradient, whose window
is as large as an image, and which makes a value for each entry of the weights' window: few values, each a sum over a
whole batch of images. So each value's window is copied from the images, strided as it is, several of them lie side by
side as the rows of a matrix, together no larger than the images, and one matrix product multiplies them by the kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod
from typing import Any, TypeVar

import numpy as np
import onnx
from onnx import helper, numpy_helper

OP = ("", "Conv")
LEAST_WINDOW = 12
"""Extent of a window, along some axis, from which on it is large."""

MOST_VALUES = 121
"""Maximum number of values along the spatial axes: so many windows, and no more, are copied."""

_Entry = TypeVar("_Entry")

_LEAST_OPSET = 11  # Pad and Slice take tensors, Gemm no third input


def is_large(node: onnx.NodeProto, types: Any, opset: int) -> bool:
    """Return whether `definition` defines a node: a Conv with a large window, few values and sizes that are known.

    Parameters
    ----------
    node : onnx.NodeProto
    types : mapping of str to onnx.TypeProto
    opset : int
    """
    stated = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if opset < _LEAST_OPSET or stated.get("auto_pad", b"NOTSET") != b"NOTSET":
        return False
    x, w = (_shape(types, name) for name in node.input[:2])
    if x is None or w is None or len(w) < 3 or max(w[2:]) < LEAST_WINDOW or (len(node.input) > 2 and node.input[2]):
        return False
    return 0 < prod(_made(x, w, stated)[2]) <= MOST_VALUES


def may_be_large(node: onnx.NodeProto) -> bool:
    """Return whether a node states no window that is not large."""
    stated = next((tuple(a.ints) for a in node.attribute if a.name == "kernel_shape"), (LEAST_WINDOW,))
    return max(stated, default=0) >= LEAST_WINDOW


def _shape(types: Any, name: str) -> tuple[int, ...] | None:
    """Return a value's shape; None unless all its sizes are known."""
    kind = types[name].tensor_type if name in types else None
    if kind is None or not kind.HasField("shape") or not all(d.HasField("dim_value") for d in kind.shape.dim):
        return None
    return tuple(d.dim_value for d in kind.shape.dim)


def _made(
    x: Sequence[int], w: Sequence[int], stated: dict[str, Any]
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return strides, dilations, extents of the result and pads (begins, then ends)."""
    rank = len(w) - 2
    strides, dilations = (list(stated.get(name, [1] * rank)) for name in ("strides", "dilations"))
    pads = list(stated.get("pads", [0] * 2 * rank))
    out = [
        (x[2 + i] + pads[i] + pads[rank + i] - dilations[i] * (w[2 + i] - 1) - 1) // strides[i] + 1
        for i in range(rank)
    ]  # fmt: skip
    return strides, dilations, out, pads


def windows_at_a_time(x: Sequence[int], w: Sequence[int]) -> int:
    """Return how many windows are multiplied at a time, from the shapes of images and kernel."""
    return max(1, prod(x[2:]) // prod(w[2:]))


def _in_rows(entries: Sequence[_Entry], length: int, most: int) -> list[Sequence[_Entry]]:
    """Divide entries in rows of a length into parts of at most so many: of whole rows, or of one row alone.

    Windows of such a part begin at regular distances, so that a device's kernel copies all of them (`fuse.columns`).
    """
    each = most // length * length or -(-length // -(-length // most))
    rows = [entries] if each >= length else [entries[i : i + length] for i in range(0, len(entries), length)]
    return [row[i : i + each] for row in rows for i in range(0, len(row), each)]


def definition(node: onnx.NodeProto, types: Any) -> list[onnx.NodeProto]:
    """Return nodes that compute a Conv for which `is_large`, from the types of its inputs."""
    x, w = _shape(types, node.input[0]), _shape(types, node.input[1])
    assert x is not None and w is not None
    stated = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    strides, dilations, out, pads = _made(x, w, stated)
    groups = int(stated.get("group", 1))
    spatial, images, channels, length = list(range(2, len(w))), x[0], w[0] // groups, prod(w[1:])
    nodes: list[onnx.NodeProto] = []
    taken = {*node.input, *node.output}

    def op(kind: str, reads: list[str], made: str, **attributes: Any) -> str:
        while made in taken:
            made += "_"
        nodes.append(helper.make_node(kind, reads, [made], **attributes))
        return made

    def ints(numbers: Sequence[int], made: str) -> str:
        return op("Constant", [], made, value=numpy_helper.from_array(np.array(numbers, np.int64)))

    read = node.input[0]
    if any(pads):
        rank = len(spatial)
        around = [0, 0, *pads[:rank], 0, 0, *pads[rank:]]
        read = op("Pad", [read, ints(around, "around")], "padded")
    several = groups > 1  # Gemm reads the kernel's rows as they lie; MatMul, for several groups, reads columns
    if not several:
        kernel = [channels, length]
    elif channels == 1:
        kernel = [groups, length, 1]
    else:
        kernel = [groups, channels, length]
    rows = op("Reshape", [node.input[1], ints(kernel, "rows_shape")], "rows")
    if several and channels > 1:
        rows = op("Transpose", [rows], "columns", perm=[0, 2, 1])
    axes, steps = ints(spatial, "axes"), ints(dilations, "steps")
    outer = [images, groups] if several else [images]
    entry = ints([*outer, 1, length], "entry_shape")
    at_a_time = windows_at_a_time(x, w)
    entries = list(enumerate(itertools.product(*map(range, out))))
    parts = []
    for number, together in enumerate(_in_rows(entries, out[-1], at_a_time)):
        windows = []
        for i, place in together:
            starts = [at * stride for at, stride in zip(place, strides, strict=True)]
            ends = [s + d * (size - 1) + 1 for s, d, size in zip(starts, dilations, w[2:], strict=True)]
            given = [read, ints(starts, f"starts_{i}"), ints(ends, f"ends_{i}"), axes, steps]
            windows.append(op("Reshape", [op("Slice", given, f"window_{i}"), entry], f"window_row_{i}"))
        many = len(windows)
        matrix = op("Concat", windows, f"windows_{number}", axis=len(outer)) if many > 1 else windows[0]
        if several:
            parts.append(op("MatMul", [matrix, rows], f"values_{number}"))
            continue
        matrix = op("Reshape", [matrix, ints([images * many, length], f"matrix_{number}")], f"flat_{number}")
        product = op("Gemm", [matrix, rows], f"product_{number}", transB=1)
        parts.append(op("Reshape", [product, ints([images, many, channels], f"part_{number}")], f"values_{number}"))
    values = op("Concat", parts, "values", axis=len(outer)) if len(parts) > 1 else parts[0]
    turned = values
    if channels > 1:
        rank = len(outer)
        turned = op("Transpose", [values], "turned", perm=[*range(rank), rank + 1, rank])
    shape = ints([images, groups * channels, *out], "result_shape")
    return [*nodes, helper.make_node("Reshape", [turned, shape], [node.output[0]])]
