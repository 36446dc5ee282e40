"""Sequences of LLVM instructions, and typed loads and stores of elements."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from onnx import TensorProto

FLOAT, DOUBLE, HALF, BFLOAT = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16
INT, LONG, UINT, BOOL = TensorProto.INT32, TensorProto.INT64, TensorProto.UINT32, TensorProto.BOOL


@dataclass(frozen=True, slots=True)
class Kind:
    """LLVM's types of an ONNX element type: in a register, and in memory."""

    register: str
    memory: str
    nbytes: int


KINDS: Final[Mapping[int, Kind]] = {
    FLOAT: Kind("float", "float", 4),
    DOUBLE: Kind("double", "double", 8),
    HALF: Kind("float", "half", 2),  # computed in float32, and rounded after every operator
    BFLOAT: Kind("float", "i16", 2),
    INT: Kind("i32", "i32", 4),
    LONG: Kind("i64", "i64", 8),
    UINT: Kind("i32", "i32", 4),
    BOOL: Kind("i1", "i8", 1),
}
"""By ``onnx.TensorProto``'s numbers."""


def literal(value: float, register: str) -> str:
    """Return a number in LLVM's syntax, rounded to the register's type."""
    if register in ("float", "double"):
        exact = float(np.float32(value)) if register == "float" else float(value)
        return f"0x{struct.unpack('<Q', struct.pack('<d', exact))[0]:016x}"
    return str(int(value))


class Code:
    """A sequence of instructions; `new` appends one with a result, and returns the result's register."""

    def __init__(self, numbering: list[int]) -> None:
        self.lines: list[str] = []
        self._numbering = numbering  # shared by all code of a function

    def new(self, instruction: str) -> str:
        self._numbering[0] += 1
        register = f"%v{self._numbering[0]}"
        self.lines.append(f"{register} = {instruction}")
        return register

    def loaded(self, pointer: str, index: str, dtype: int, note: str) -> str:
        """Load an element of an array, and return its register."""
        kind = KINDS[dtype]
        place = self.new(f"getelementptr {kind.memory}, ptr {pointer}, i64 {index}")
        got = self.new(f"load {kind.memory}, ptr {place}, align {kind.nbytes}{note}")
        if dtype == BOOL:
            return self.new(f"icmp ne i8 {got}, 0")
        if dtype == HALF:
            return self.new(f"fpext half {got} to float")
        return self.new(f"call float @of_bfloat(i16 {got})") if dtype == BFLOAT else got

    def rounded(self, value: str, dtype: int) -> str:
        """Round a result to half precision, as a store and a load would, and return its register."""
        if dtype == HALF:
            stored = self.new(f"fptrunc float {value} to half")
            return self.new(f"fpext half {stored} to float")
        if dtype == BFLOAT:
            stored = self.new(f"call i16 @to_bfloat(float {value})")
            return self.new(f"call float @of_bfloat(i16 {stored})")
        return value

    def store(self, value: str, pointer: str, index: str, dtype: int, note: str) -> None:
        kind = KINDS[dtype]
        if dtype == BOOL:
            value = self.new(f"zext i1 {value} to i8")
        elif dtype == HALF:
            value = self.new(f"fptrunc float {value} to half")
        elif dtype == BFLOAT:
            value = self.new(f"call i16 @to_bfloat(float {value})")
        place = self.new(f"getelementptr {kind.memory}, ptr {pointer}, i64 {index}")
        self.lines.append(f"store {kind.memory} {value}, ptr {place}, align {kind.nbytes}{note}")


def lines_of(code: Code) -> str:
    """Return instructions as lines of a block."""
    return "\n  ".join(code.lines)
