"""Large model files: read and write protobuf's wire format without loading the weights.

Parsed as a whole, a file near protobuf's 2 GiB would be in memory several times. Instead, each large initializer
becomes a reference to its bytes in the same file, as ONNX's external data, and is copied from there when the model is
written again. The written file is byte for byte the same as after parsing the whole file.

Source: protobuf's encoding, https://protobuf.dev/programming-guides/encoding/, and the field numbers of onnx.proto.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple
from urllib.parse import quote, unquote_to_bytes

import onnx
from google.protobuf.message import DecodeError, EncodeError
from onnx import TensorProto

from onnx_remat.errors import ModelError

LARGE_FILE = 256 * 2**20
"""Bytes of a model file above which its weights are not loaded."""

_LARGE = 2**16  # bytes from which on an initializer stays in its file
_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9  # ModelProto.graph, GraphProto.initializer, TensorProto.raw_data
_BYTES, _FIXED = 2, {1: 8, 5: 4}  # wire types: length-delimited, and fixed sizes; the remaining type, 0, is a varint
_MOST_BYTES = 2**31 - 1  # protobuf's limit of a message
_WRITTEN = "onnx_remat.written"  # key in the external data: modification time of the file
MARK = _WRITTEN.encode()
"""Mark of a reference to bytes of a file: only `parse` makes it, and no file may contain it."""

_CHUNK = 1 << 22

Data = bytes | mmap.mmap


class _Field(NamedTuple):
    """A field of a message: its tag starts at `start`, its content at `content`; both end at `end`."""

    number: int
    kind: int
    start: int
    content: int
    end: int


class _Stored(NamedTuple):
    """Reference to bytes in a file."""

    path: Path
    written: int
    offset: int
    length: int

    def __len__(self) -> int:
        return self.length


def parse(path: Path) -> onnx.ModelProto:
    """Read a model file without its large initializers.

    Raises
    ------
    DecodeError
        Not a protobuf message, or truncated.
    """
    written = path.stat().st_mtime_ns
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        model: list[bytes] = []
        for field in _fields(data, 0, len(data)):
            if (field.number, field.kind) != (_GRAPH, _BYTES):
                model.append(_plain(data[field.start : field.end]))
                continue
            graph = [
                _field(_INITIALIZER, _referring(data, inner, path, written))
                if (inner.number, inner.kind) == (_INITIALIZER, _BYTES)
                else _plain(data[inner.start : inner.end])
                for inner in _fields(data, field.content, field.end)
            ]
            model.append(_field(_GRAPH, b"".join(graph)))
    parsed: onnx.ModelProto = onnx.ModelProto.FromString(b"".join(model))
    return parsed


def _plain(piece: bytes) -> bytes:
    """Return a part of a file unchanged; raise DecodeError if it contains the mark of a reference."""
    if MARK in piece:
        raise DecodeError("refers to bytes of a file, as no file does")
    return piece


def is_stored(tensor: TensorProto) -> bool:
    """Whether a tensor's data is still in the model file it was read from."""
    return tensor.data_location == TensorProto.EXTERNAL and any(e.key == _WRITTEN for e in tensor.external_data)


def stored_bytes(tensor: TensorProto) -> int:
    """Return the bytes of a tensor's data in the file it was read from."""
    return int(_place(tensor)["length"])


def _place(tensor: TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def write(model: onnx.ModelProto, folder: Path | None, target: Path) -> None:
    """Write a model to a new file, including weights that were left in their file.

    Parameters
    ----------
    folder : Path or None
        Folder of the file that the model was read from. None for a model in memory: whoever made it may have forged
        references, which are not followed.

    Raises
    ------
    EncodeError
        It exceeds protobuf's 2 GiB.
    ModelError
        The file with the weights has changed since the model was read.
    """
    data = model.SerializeToString(deterministic=True)
    if folder is None or not any(is_stored(tensor) for tensor in model.graph.initializer):
        target.write_bytes(data)
        return
    pieces = list(_whole(data))
    if sum(map(len, pieces)) > _MOST_BYTES:
        raise EncodeError("the model exceeds protobuf's 2 GiB")
    with target.open("wb") as stream:
        for piece in pieces:
            if isinstance(piece, _Stored):
                _copy(piece, stream)
            else:
                stream.write(piece)


def _referring(data: mmap.mmap, field: _Field, path: Path, written: int) -> bytes:
    """Return a serialised tensor, with a reference in place of its data if that is large."""
    inside = list(_fields(data, field.content, field.end))
    raw = [f for f in inside if (f.number, f.kind) == (_RAW_DATA, _BYTES)]
    if not raw or raw[-1].end - raw[-1].content < _LARGE:
        return _plain(data[field.content : field.end])
    tensor = TensorProto.FromString(b"".join(data[f.start : f.end] for f in inside if f.number != _RAW_DATA))
    if tensor.data_location == TensorProto.EXTERNAL:
        return _plain(data[field.content : field.end])
    tensor.data_location = TensorProto.EXTERNAL
    whole = quote(os.fsencode(path.absolute()))  # the file's name need not be UTF-8, as texts of a model are
    place = {"location": whole, "offset": raw[-1].content, "length": raw[-1].end - raw[-1].content}
    for key, value in (place | {_WRITTEN: written}).items():
        tensor.external_data.add(key=key, value=str(value))
    referring: bytes = tensor.SerializeToString()
    return referring


def _whole(data: bytes) -> Iterator[bytes | _Stored]:
    """A serialised model with the bytes that its tensors refer to in their place."""
    for field in _fields(data, 0, len(data)):
        if (field.number, field.kind) != (_GRAPH, _BYTES):
            yield data[field.start : field.end]
            continue
        graph: list[bytes | _Stored] = []
        for inner in _fields(data, field.content, field.end):
            tensor = TensorProto()
            if (inner.number, inner.kind) == (_INITIALIZER, _BYTES):
                tensor.ParseFromString(data[inner.content : inner.end])
            if is_stored(tensor):
                pieces = list(_filled(tensor))
                graph += [_head(_INITIALIZER, sum(map(len, pieces))), *pieces]
            else:
                graph.append(data[inner.start : inner.end])
        yield _head(_GRAPH, sum(map(len, graph)))
        yield from graph


def _filled(tensor: TensorProto) -> Iterator[bytes | _Stored]:
    """Yield a tensor's fields in ascending order, including its data."""
    place = _place(tensor)
    path = Path(os.fsdecode(unquote_to_bytes(place["location"])))
    stored = _Stored(path, int(place[_WRITTEN]), int(place["offset"]), int(place["length"]))
    tensor.ClearField("external_data")
    tensor.ClearField("data_location")
    rest = tensor.SerializeToString(deterministic=True)
    fields = list(_fields(rest, 0, len(rest)))
    yield b"".join(rest[f.start : f.end] for f in fields if f.number < _RAW_DATA)
    yield _head(_RAW_DATA, stored.length)
    yield stored
    yield b"".join(rest[f.start : f.end] for f in fields if f.number > _RAW_DATA)


def _copy(piece: _Stored, target: BinaryIO) -> None:
    with piece.path.open("rb") as source:
        if piece.path.stat().st_mtime_ns != piece.written:
            raise ModelError(f"{piece.path} was changed during the run: run again")
        source.seek(piece.offset)
        left = piece.length
        while left:
            chunk = source.read(min(left, _CHUNK))
            if not chunk:
                raise ModelError(f"{piece.path} was truncated during the run: run again")
            target.write(chunk)
            left -= len(chunk)


def _fields(data: Data, start: int, end: int) -> Iterator[_Field]:
    """Yield the fields of the message from `start` to `end`."""
    at = start
    while at < end:
        tag, content = _varint(data, at, end)
        kind = tag & 7
        if kind == 0:
            after = _varint(data, content, end)[1]
        elif kind == _BYTES:
            length, content = _varint(data, content, end)
            after = content + length
        elif kind in _FIXED:
            after = content + _FIXED[kind]
        else:
            raise DecodeError(f"wire type {kind}")
        if after > end or tag < 8:
            raise DecodeError("truncated")
        yield _Field(tag >> 3, kind, at, content, after)
        at = after


def _varint(data: Data, at: int, end: int) -> tuple[int, int]:
    """Return the number at `at`, and its end."""
    result = 0
    for shift in range(0, 70, 7):
        if at >= end:
            break
        byte = data[at]
        at += 1
        result |= (byte & 127) << shift
        if byte < 128:
            return result, at
    raise DecodeError("truncated")


def _head(number: int, length: int) -> bytes:
    """Return the tag and length of a length-delimited field."""
    return _number(number << 3 | _BYTES) + _number(length)


def _field(number: int, content: bytes) -> bytes:
    return _head(number, len(content)) + content


def _number(value: int) -> bytes:
    """Return `value` as a varint."""
    result = bytearray()
    while value > 127:
        result.append(value & 127 | 128)
        value >>= 7
    result.append(value)
    return bytes(result)
