"""Bytes of tensors by data type, by ONNX's own tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import onnx
from onnx import TensorProto

from onnx_remat.errors import ShapeError

_SUB_BYTE_BITS = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2}
MOST_BYTES = 2**50
"""Limit of a tensor's bytes: sums over a whole graph then fit 64 bits."""

_STRING_BYTES = 32  # sizeof(std::string): bytes per element of a string tensor, without long texts


@cache
def bits(dtype: int) -> int:
    """Return the bits per element of a TensorProto data type.

    >>> bits(TensorProto.FLOAT), bits(TensorProto.BFLOAT16), bits(TensorProto.BOOL), bits(TensorProto.INT4)
    (32, 16, 8, 4)
    """
    if dtype not in TensorProto.DataType.values() or dtype == TensorProto.UNDEFINED:
        raise ShapeError(f"there is no data type {dtype}")
    name = TensorProto.DataType.Name(dtype)
    if name in _SUB_BYTE_BITS:
        return _SUB_BYTE_BITS[name]
    if dtype == TensorProto.STRING:
        return _STRING_BYTES * 8
    try:
        return int(onnx.helper.tensor_dtype_to_np_dtype(dtype).itemsize) * 8
    except KeyError as error:
        raise ShapeError(f"data type {name} has no known size") from error


def tensor_bytes(dtype: int, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor.

    >>> tensor_bytes(TensorProto.FLOAT, (2, 3)), tensor_bytes(TensorProto.INT4, (3,))
    (24, 2)
    """
    size = (math.prod(shape) * bits(dtype) + 7) // 8
    if size > MOST_BYTES:
        raise ShapeError(f"a tensor of shape {list(shape)} exceeds any machine's memory")
    return size


def typed_entries(dtype: int, shape: Sequence[int]) -> int:
    """Return the number of entries of the typed field that stores a tensor without ``raw_data``.

    >>> typed_entries(TensorProto.FLOAT, (2, 3)), typed_entries(TensorProto.COMPLEX64, (3,))
    (6, 6)
    >>> typed_entries(TensorProto.INT4, (3,))  # packed, a byte to an entry
    2
    """
    if bits(dtype) < 8:
        return tensor_bytes(dtype, shape)
    return math.prod(shape) * (2 if dtype in (TensorProto.COMPLEX64, TensorProto.COMPLEX128) else 1)
