"""Kernels of ONNX Runtime's CPU provider by dtype, JAX's keys as integers, and folding of constants.

`tests/converters/test_jax.py` compares the table of kernels with the installed ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnx import helper
from onnx.reference import ReferenceEvaluator

from onnx_remat.errors import ConversionError

_HALF, _FLOATS = ("float16",), ("float32", "float64")
_WIDE = ("int32", "int64")
_ALL_INTS = ("int8", "int16", "int32", "int64", "uint8", "uint32", "uint64")
_NUMBERS = (*_HALF, *_FLOATS, *_ALL_INTS)
_MOVES = (*_NUMBERS, "bfloat16", "bool")

KERNELS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Mod"), _NUMBERS),
    **dict.fromkeys(("Less", "LessOrEqual", "Greater", "GreaterOrEqual"), _NUMBERS),
    "Equal": (*_NUMBERS, "bool"),
    **dict.fromkeys(("Max", "Min"), (*_HALF, *_FLOATS, "int8", "int32", "int64", "uint8", "uint32", "uint64")),
    "Pow": (*_HALF, *_FLOATS, *_WIDE),
    **dict.fromkeys(("BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot"), _ALL_INTS),
    "BitShift": ("uint8", "uint32", "uint64"),
    "Neg": (*_HALF, *_FLOATS, "int8", "int16", "int32", "int64"),
    **dict.fromkeys(("Abs", "Sign"), _NUMBERS),
    **dict.fromkeys(
        ("Exp", "Log", "Sqrt", "Tanh", "Sigmoid", "Floor", "Ceil", "Round", "Sin", "Cos", "Reciprocal", "Softmax"),
        (*_HALF, *_FLOATS),
    ),
    **dict.fromkeys(
        ("Erf", "Tan", "Atan", "Asin", "Acos", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh", "Conv", "ConvTranspose"),
        (*_HALF, "float32"),
    ),
    "AveragePool": (*_HALF, "float32"),
    "MaxPool": (*_HALF, *_FLOATS, "int8", "uint8"),
    "Where": (*_HALF, *_FLOATS, "int8", "int32", "int64", "uint8", "uint32"),
    "MatMul": (*_HALF, *_FLOATS, "int32", "int64", "uint32", "uint64"),
    "Gemm": (*_HALF, *_FLOATS),
    **dict.fromkeys(("ReduceSum", "ReduceProd", "CumSum"), (*_HALF, *_FLOATS, *_WIDE)),
    **dict.fromkeys(("ReduceMax", "ReduceMin"), (*_HALF, *_FLOATS, "int8", "int32", "int64", "uint8", "bool")),
    **dict.fromkeys(("ArgMax", "ArgMin"), (*_HALF, *_FLOATS, "int8", "int32", "int64", "uint8")),
    "TopK": (*_HALF, *_FLOATS, "int8", "int16", "int32", "int64", "uint8"),
    "Pad": (*_HALF, *_FLOATS, "int8", "int32", "int64", "uint8", "uint32", "uint64", "bool"),
    "Expand": (*_NUMBERS, "bool"),
    "ScatterElements": _MOVES,
    "ScatterND": _MOVES,
}
"""Dtypes of each operator that lacks some; operators that only move data support all (ONNX Runtime 1.31)."""

SCATTERED: Final = (*_FLOATS, *_ALL_INTS)
"""Dtypes in which the Scatter operators run with a reduction; others load, but fail in the run."""

_WIDER: Final = {
    "bfloat16": ("float32",),
    "float16": ("float32",),
    "bool": ("uint8", "int32"),
    "int8": ("int32", "float64"),
    "int16": ("int32", "float64"),
    "int32": ("int64", "float64"),
    "uint8": ("int32",),
    "uint16": ("int32", "uint32"),
    "uint32": ("int64",),
    "uint64": ("int64",),
}

FOLDED: Final = 4096
"""Elements of the largest constant that the converter computes: larger ones would enlarge the file."""

_FOLDABLE: Final = frozenset((
    "Abs", "Add", "And", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast", "Ceil",
    "Concat", "Cos", "Div", "Equal", "Exp", "Expand", "Floor", "Gather", "Greater", "GreaterOrEqual", "Less",
    "LessOrEqual", "Log", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Pad", "Pow", "Range", "Reciprocal",
    "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Relu", "Reshape", "Round", "Sigmoid", "Sign", "Sin",
    "Slice", "Sqrt", "Sub", "Tan", "Tanh", "Transpose", "Where", "Xor",
))  # fmt: skip


def deciding(op_type: str) -> int:
    """Return the index of the first input whose dtype selects the kernel: 1 for Where, after its condition, else 0."""
    return 1 if op_type == "Where" else 0


def wider(op_type: str, dtype: np.dtype[Any], reduction: object = "none") -> np.dtype[Any] | None:
    """Return the dtype to compute in if there is no kernel for `dtype`, else None; `reduction` is for Scatter
    operators.

    >>> wider("Where", np.dtype("bool")), wider("Where", np.dtype("int32"))
    (dtype('uint8'), None)
    """
    known = KERNELS.get(op_type) if reduction == "none" else SCATTERED
    if known is None or dtype.name in known:
        return None
    return next((np.dtype(name) for name in _WIDER.get(dtype.name, ()) if name in known), None)


def fold(
    op_type: str, inputs: Sequence[ir.Value | None], attributes: Mapping[str, object], shape: Sequence[int]
) -> np.ndarray | None:
    """Return the result of an operator on small constants; None if an input is not a small constant."""
    if op_type not in _FOLDABLE:
        return None
    arrays = []
    for value in inputs:
        if value is None or value.const_value is None:
            return None
        arrays.append(value.const_value.numpy())
    if np.prod(shape, dtype=np.int64) > FOLDED or any(a.size > FOLDED or a.dtype.kind == "V" for a in arrays):
        return None
    names = [f"x{i}" for i in range(len(arrays))]
    node = helper.make_node(op_type, names, ["y"], **attributes)  # type: ignore[arg-type]
    with np.errstate(all="ignore"):
        (made,) = ReferenceEvaluator(node).run(None, dict(zip(names, arrays, strict=True)))
    return np.asarray(made)


def packed(value: object) -> np.ndarray:
    """Return a numpy array; random keys (two uint32 words each) as one uint64 each.

    Raises
    ------
    ConversionError
        The keys belong to another generator than threefry2x32.
    """
    if is_key(value):
        if str(jax.random.key_impl(value)) != "threefry2x32":  # type: ignore[arg-type]
            raise ConversionError(f"random keys of {jax.random.key_impl(value)}: only threefry2x32 has a lowering")  # type: ignore[arg-type]
        words = np.asarray(jax.random.key_data(value)).astype(np.uint64)  # type: ignore[arg-type]
        return (words[..., 0] << np.uint64(32)) | words[..., 1]
    return np.asarray(value)


def is_key(value: object) -> bool:
    """Return whether a value, or its aval, is an array of typed random keys."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def dtype_of_aval(aval: Any) -> np.dtype[Any]:
    """Return the dtype of a JAX array in the graph: its own, or uint64 for random keys."""
    return np.dtype(np.uint64) if is_key(aval) else np.dtype(aval.dtype)


BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)
