"""Read and write named arrays in a safetensors file, one array at a time.

The format (https://github.com/huggingface/safetensors): eight bytes with the length of the header, little-endian; the
header, a JSON object with each tensor's ``dtype``, ``shape`` and ``data_offsets``; then the tensors' bytes. The
safetensors package would keep every array twice, and training has no memory to spare for that.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from onnx_remat import files
from onnx_remat.errors import ModelError, UsageError

_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_OTHER_ENDINGS = frozenset(
    (".npz", ".npy", ".pt", ".pth", ".ckpt", ".onnx", ".ort", ".pkl", ".pickle", ".h5", ".hdf5", ".keras", ".pb",
     ".msgpack", ".gguf", ".json", ".csv", ".txt", ".zip", ".tar", ".gz")
)  # fmt: skip
"""Endings of other formats, whose readers would take a file for damaged."""
_MOST_HEADER = 100_000_000  # bytes: the limit in the format


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


Kinds = Mapping[str, tuple[str, tuple[int, ...]]]
"""Types, by numpy's name, and shapes of arrays."""


def kinds_of(arrays: Mapping[str, npt.NDArray[Any]]) -> Kinds:
    """Return types and shapes of arrays, by name."""
    return {name: (array.dtype.newbyteorder("=").name, array.shape) for name, array in arrays.items()}


def write_each(path: str | os.PathLike[str], kinds: Kinds, arrays: Iterable[npt.NDArray[Any]]) -> None:
    """Write arrays from an iterator to a file atomically: readers see the old file or the complete new one.

    Raises
    ------
    UsageError
        The format does not have the type of an array, or the path ends as another format's files do.
    ModelError
        The disk cannot store the file.
    """
    if (ending := Path(path).suffix.lower()) in _OTHER_ENDINGS:
        raise UsageError(f"cannot save to {path}: the file is a safetensors file, no {ending}; use .safetensors")
    header: dict[str, Any] = {"__metadata__": {"format": "np"}}
    at = 0
    for name, (dtype, shape) in kinds.items():
        if dtype not in _CODES or name == "__metadata__":
            raise UsageError(f"state {name!r} of type {dtype} cannot be saved")
        end = at + _nbytes(dtype, shape)
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    try:
        with files.replacing(files.resolved(path)) as partial, partial.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for array in arrays:
                stream.write(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data)
                del array  # before the next is made
    except OSError as error:
        raise ModelError(f"cannot write {path}: {error.strerror}") from error


def read_into(path: str | os.PathLike[str], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Fill contiguous, writeable arrays from a file that contains exactly these.

    Raises
    ------
    UsageError
        The file has other names, types or shapes; no array is changed.
    ModelError
        The file is missing, damaged or truncated; some arrays may already be changed.
    """
    for _ in read_each(path, kinds_of(arrays), arrays.items()):
        pass


def read_each(
    path: str | os.PathLike[str], kinds: Kinds, arrays: Iterable[tuple[str, npt.NDArray[Any]]]
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Fill arrays from an iterator from a file that contains exactly those in `kinds`; yield each when it is filled.

    Raises the errors of `read_into`.
    """
    try:
        with Path(path).open("rb") as stream:
            entries, begin = _header(stream, path)
            _compare(entries, kinds, path)
            for name, array in arrays:
                stream.seek(begin + entries[name].start)
                if array.nbytes and stream.readinto(array.reshape(-1).view(np.uint8).data) != array.nbytes:
                    raise ModelError(f"{path} is truncated")
                yield name, array
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error


def read_one(path: str | os.PathLike[str], name: str, array: npt.NDArray[Any]) -> None:
    """Fill one array from a file that passed `check`."""
    try:
        with Path(path).open("rb") as stream:
            entries, begin = _header(stream, path)
            stream.seek(begin + entries[name].start)
            if array.nbytes and stream.readinto(array.reshape(-1).view(np.uint8).data) != array.nbytes:
                raise ModelError(f"{path} is truncated")
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error


def shapes(path: str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the arrays in a file, by name; raise ModelError where it is missing or damaged."""
    try:
        with Path(path).open("rb") as stream:
            return {name: entry.shape for name, entry in _header(stream, path)[0].items()}
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error


def check(path: str | os.PathLike[str], kinds: Kinds) -> None:
    """Raise the errors that `read_into` raises before it changes an array."""
    try:
        with Path(path).open("rb") as stream:
            entries, _ = _header(stream, path)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    _compare(entries, kinds, path)


def _header(stream: BinaryIO, path: str | os.PathLike[str]) -> tuple[dict[str, _Entry], int]:
    size = os.fstat(stream.fileno()).st_size
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or length > min(size - 8, _MOST_HEADER):
        raise ModelError(f"{path} is not a safetensors file, or is truncated")
    try:
        header = json.loads(stream.read(length))
        entries = {
            name: _Entry(str(e["dtype"]), tuple(map(int, e["shape"])), *map(int, e["data_offsets"]))
            for name, e in header.items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise ModelError(f"{path} is not a safetensors file: its header is damaged") from error
    if any(not 0 <= e.start <= e.end <= size - 8 - length for e in entries.values()):
        raise ModelError(f"{path} is truncated")
    return entries, 8 + length


def _compare(entries: Mapping[str, _Entry], kinds: Kinds, path: str | os.PathLike[str]) -> None:
    if lacking := [name for name in kinds if name not in entries]:
        raise UsageError(f"{path} has no {lacking[0]!r}: it is not the state of this model")
    if extra := [name for name in entries if name not in kinds]:
        raise UsageError(f"{path} has {extra[0]!r}, which the model does not: it is not the state of this model")
    for name, (dtype, shape) in kinds.items():
        entry, code = entries[name], _CODES.get(dtype)
        if (entry.dtype, entry.shape) != (code, shape) or entry.end - entry.start != _nbytes(dtype, shape):
            raise UsageError(
                f"{path} has {name!r} as {entry.dtype}{list(entry.shape)}, the model as {code}{list(shape)}"
            )


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return np.dtype(dtype).itemsize * math.prod(shape)
