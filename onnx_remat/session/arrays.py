"""Inputs and outputs of a session: names, element types and shapes, also of types that numpy lacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_remat.session.interface import Formal

NUMPY = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 9: "bool",
    10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128",
}  # fmt: skip
"""numpy's type names by the numbers of ``onnx.TensorProto``."""

_BFLOAT = 16  # ``onnx.TensorProto.BFLOAT16``
BY_BITS = {16: "uint16", 17: "uint8", 18: "uint8", 19: "uint8", 20: "uint8", 24: "uint8"}
"""Integer types with the bits of types that numpy lacks (bfloat16, the float8s)."""


@dataclass(frozen=True, slots=True)
class Array:
    """An input or output: its name, element type (``onnx.TensorProto``; 0 if it is not a tensor), and shape."""

    name: str
    dtype: int
    shape: tuple[int, ...]

    @property
    def dtype_name(self) -> str:
        """numpy's name of the element type, empty where it has none."""
        return NUMPY.get(self.dtype) or BY_BITS.get(self.dtype, "")

    @property
    def element_type(self) -> Any:
        """Element type for ONNX Runtime's I/O binding: numpy's, or onnx's number where numpy has none."""
        return np.dtype(NUMPY[self.dtype]).type if self.dtype in NUMPY else self.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(np.dtype(self.dtype_name).itemsize * np.prod(self.shape, dtype=np.int64))

    def copy_of(self, value: Any, read: Callable[[int, npt.NDArray[Any]], Any]) -> npt.NDArray[Any]:
        """Return a copy of a value of onnxruntime's: bits, where numpy lacks its type, which `read` fetches."""
        if self.dtype not in BY_BITS:
            return np.array(value.numpy())
        made = np.empty(self.shape, self.dtype_name)
        read(value.data_ptr(), made)
        return made

    @property
    def formal(self) -> Formal:
        """What arrays for it are checked against."""
        return Formal(self.dtype_name, self.shape, self.dtype in BY_BITS)

    @property
    def is_bfloat(self) -> bool:
        """Whether arrays have the bits of bfloat16."""
        return self.dtype == _BFLOAT

    def number(self, value: Any) -> float:
        """Return the single number of an array of this type, which may be its bits."""
        return float(self.numbers(value).item())

    def numbers(self, value: Any) -> Any:
        """Return an array of this type as one of numbers, where it has the bits of bfloat16."""
        return (value.view(np.uint16).astype(np.uint32) << 16).view(np.float32) if self.is_bfloat else value


@dataclass(frozen=True, slots=True)
class Place(Array):
    """A value at an offset in the slab."""

    offset: int
