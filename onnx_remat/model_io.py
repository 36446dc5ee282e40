"""Models in and out: load without weights, save atomically, carry external data along."""

from __future__ import annotations

import filecmp
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError, EncodeError

from onnx_remat.dtypes import tensor_bytes
from onnx_remat.errors import ModelError, UsageError

INLINE_LIMIT = 1024
"""Initializers of up to this many bytes may steer shapes, so analyses see their contents; larger ones are typed."""


@dataclass(frozen=True, slots=True)
class Source:
    """A loaded model and the folder its external data is relative to (None for a model without a file)."""

    model: onnx.ModelProto
    folder: Path | None


def load(source: str | os.PathLike[str] | bytes | onnx.ModelProto) -> Source:
    """Read a model; contents of external data files are never read.

    Parameters
    ----------
    source : path, bytes or onnx.ModelProto
        A ModelProto is used as it is, not copied: callers must not change it.

    Raises
    ------
    ModelError
        Missing, unreadable, empty, truncated or not ONNX; external data missing, short or outside the model's folder.
    """
    if isinstance(source, onnx.ModelProto):
        loaded = Source(source, None)
    elif isinstance(source, bytes):
        loaded = Source(_parse(source, "the given bytes"), None)
    else:
        path = Path(source)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from error
        loaded = Source(_parse(data, str(path)), path.resolve().parent)
    _check_external_data(loaded)
    return loaded


def _parse(data: bytes, what: str) -> onnx.ModelProto:
    if not data:
        raise ModelError(f"{what} is empty")
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise ModelError(f"{what} is not an ONNX model, or is truncated") from error
    if not model.graph.node and not model.graph.output:
        raise ModelError(f"{what} is not an ONNX model: it has no graph")
    return model


def tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Every tensor stored in a graph: initializers, attributes, and those of bodies of If, Loop and Scan."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield sparse.values
        yield sparse.indices
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                yield attribute.t
            yield from attribute.tensors
            sparse_ones = [*attribute.sparse_tensors]
            if attribute.type == onnx.AttributeProto.SPARSE_TENSOR:
                sparse_ones.append(attribute.sparse_tensor)
            for sparse in sparse_ones:
                yield sparse.values
                yield sparse.indices
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from tensors(attribute.g)
            for body in attribute.graphs:
                yield from tensors(body)


def external_files(model: onnx.ModelProto) -> list[str]:
    """Locations of the external data files a model refers to, in order of first mention."""
    return list(dict.fromkeys(_entry(t, "location") for t in _external_tensors(model)))


def _external_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    return (t for t in tensors(model.graph) if t.data_location == onnx.TensorProto.EXTERNAL)


def _entry(tensor: onnx.TensorProto, key: str) -> str:
    return next((e.value for e in tensor.external_data if e.key == key), "")


def _check_external_data(source: Source) -> None:
    for tensor in _external_tensors(source.model):
        location = _entry(tensor, "location")
        if source.folder is None:
            raise ModelError(
                f"initializer {tensor.name!r} keeps its data in a file ({location!r}), but the model was not given "
                "as a path: pass the path of the model"
            )
        path = (source.folder / location).resolve()
        if not location or Path(location).is_absolute() or not path.is_relative_to(source.folder):
            raise ModelError(f"initializer {tensor.name!r}: external data {location!r} is outside the model's folder")
        try:
            size = path.stat().st_size
            offset, length = int(_entry(tensor, "offset") or 0), int(_entry(tensor, "length") or 0)
        except OSError as error:
            raise ModelError(
                f"initializer {tensor.name!r}: external data file {location!r}: {error.strerror}"
            ) from error
        except ValueError as error:
            raise ModelError(f"initializer {tensor.name!r}: external data offset or length is not a number") from error
        needed = tensor_bytes(tensor.data_type, tensor.dims)
        if length not in (0, needed):
            raise ModelError(f"initializer {tensor.name!r} needs {needed} bytes, its external data has {length}")
        if offset < 0 or offset + needed > size:
            raise ModelError(
                f"initializer {tensor.name!r}: external data file {location!r} is too short: {size} bytes, "
                f"{offset + needed} needed"
            )


def without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which large initializers are typed graph inputs: what analyses need, at the size of the graph alone."""
    light = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    light.functions.extend(model.functions)
    graph = light.graph
    graph.name = model.graph.name or "graph"
    for field in ("node", "input", "output", "value_info"):
        getattr(graph, field).extend(getattr(model.graph, field))
    known = {value.name for value in graph.input}
    for tensor in model.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL and tensor.ByteSize() <= INLINE_LIMIT:
            graph.initializer.append(tensor)
        elif tensor.name not in known:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    graph.sparse_initializer.extend(model.graph.sparse_initializer)
    return light


def check_target(target: str | os.PathLike[str], source: str | os.PathLike[str] | None, force: bool) -> Path:
    """The path to write to; UsageError where that would destroy something or cannot work."""
    path = Path(target)
    if path.is_dir():
        raise UsageError(f"{path} is a directory: name a file to write")
    if not path.parent.is_dir():
        raise UsageError(f"folder {path.parent} does not exist")
    if source is not None and path.exists() and Path(source).exists() and path.samefile(source):
        raise UsageError(f"{path} is the input: name another output")
    if path.exists() and not force:
        raise UsageError(f"{path} exists: pass --force to replace it")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"folder {path.parent} is not writable")
    return path


def save(model: onnx.ModelProto, target: str | os.PathLike[str], source_folder: Path | None) -> None:
    """Write `model` to `target` all at once: readers see the old file or the whole new one, never a part.

    External data files are copied next to `target` when it is in another folder than `source_folder`.

    Raises
    ------
    ModelError
        When the disk or the format cannot hold it, or another file is where a data file belongs.
    """
    path = Path(target)
    folder = path.resolve().parent
    try:
        data = model.SerializeToString(deterministic=True)
    except (EncodeError, ValueError) as error:
        raise ModelError(
            "the rewritten model exceeds protobuf's 2 GiB: store its weights as external data first"
        ) from error
    try:
        if source_folder is not None and source_folder != folder:
            for location in external_files(model):
                _carry(source_folder / location, folder / location)
        with _replacing(path) as partial:
            partial.write_bytes(data)
    except OSError as error:
        raise ModelError(f"cannot write {path}: {error.strerror}") from error


def write_text(text: str, target: str | os.PathLike[str]) -> None:
    """Write a text file all at once; ModelError when the disk cannot hold it."""
    write_bytes(text.encode(), target)


def write_bytes(data: bytes, target: str | os.PathLike[str]) -> None:
    """Write a file all at once; ModelError when the disk cannot hold it."""
    path = Path(target)
    try:
        with _replacing(path) as partial:
            partial.write_bytes(data)
    except OSError as error:
        raise ModelError(f"cannot write {path}: {error.strerror}") from error


def _carry(origin: Path, copy: Path) -> None:
    if copy.exists():
        if filecmp.cmp(origin, copy, shallow=False):
            return
        raise ModelError(f"{copy} exists and is not the model's data: write to another folder, or move that file")
    copy.parent.mkdir(parents=True, exist_ok=True)
    with _replacing(copy) as partial:
        shutil.copyfile(origin, partial)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place when the block ends well, and vanishes when it does not."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        umask = os.umask(0)
        os.umask(umask)
        partial.chmod(0o666 & ~umask)  # mkstemp's 0600 would make the result unreadable to others
        with partial.open("rb") as stream:
            os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
