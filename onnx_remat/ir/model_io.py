"""Models in and out: load without weights, save atomically, carry external data along."""

from __future__ import annotations

import filecmp
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError, EncodeError

from onnx_remat.errors import ModelError, ShapeError, UsageError
from onnx_remat.ir import large_files
from onnx_remat.ir.dtypes import tensor_bytes, typed_entries

INLINE_LIMIT = 1024
"""Initializers of up to this many bytes may steer shapes, so analyses see their contents; larger ones are typed."""


@dataclass(frozen=True, slots=True)
class Source:
    """A loaded model and the folder its external data is relative to (None for a model without a file)."""

    model: onnx.ModelProto
    folder: Path | None


def load(source: str | os.PathLike[str] | bytes | onnx.ModelProto) -> Source:
    """Read a model; contents of external data files are never read, nor large weights in a large file (see `wire`).

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
        loaded = Source(_read(path), path.resolve().parent)
    _check_tensors(loaded)
    return loaded


def _read(path: Path) -> onnx.ModelProto:
    if "\0" in str(path):
        raise ModelError(f"cannot read {str(path)!r}: its name has a zero byte")
    try:
        if not path.is_dir() and path.exists() and not path.is_file():  # a pipe or a device may never end
            raise ModelError(f"cannot read {path}: it is not a regular file")
        if path.is_file() and path.stat().st_size > large_files.LARGE_FILE:
            return _parse(path.resolve(), str(path))
        return _parse(path.read_bytes(), str(path))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error


def _parse(data: bytes | Path, what: str) -> onnx.ModelProto:
    if not data:
        raise ModelError(f"{what} is empty")
    try:
        model = onnx.ModelProto.FromString(data) if isinstance(data, bytes) else large_files.parse(data)
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
    external = onnx.TensorProto.EXTERNAL
    return (t for t in tensors(model.graph) if t.data_location == external and not large_files.is_stored(t))


def _entry(tensor: onnx.TensorProto, key: str) -> str:
    return next((e.value for e in tensor.external_data if e.key == key), "")


def _check_tensors(source: Source) -> None:
    """Every stored tensor has a known type, a shape, and all its data."""
    for tensor in tensors(source.model.graph):
        if any(dim < 0 for dim in tensor.dims):
            raise ModelError(f"initializer {tensor.name!r} has a negative dimension: {list(tensor.dims)}")
        try:
            needed = tensor_bytes(tensor.data_type, tensor.dims)
        except ShapeError as error:
            raise ModelError(f"initializer {tensor.name!r}: {error}") from error
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            _check_external_data(source, tensor, needed)
        elif tensor.HasField("raw_data"):
            if len(tensor.raw_data) != needed:
                raise ModelError(f"initializer {tensor.name!r} needs {needed} bytes, it has {len(tensor.raw_data)}")
        else:
            entries = typed_entries(tensor.data_type, tensor.dims)
            has = len(getattr(tensor, onnx.helper.tensor_dtype_to_field(tensor.data_type)))
            if has != entries:
                raise ModelError(f"initializer {tensor.name!r} needs {entries} entries, it has {has}")


def _check_external_data(source: Source, tensor: onnx.TensorProto, needed: int) -> None:
    location, whose = _entry(tensor, "location"), f"initializer {tensor.name!r}"
    if source.folder is None:
        raise ModelError(
            f"{whose} keeps its data in a file ({location!r}), but the model was not given as a path: pass the path"
        )
    try:
        if "\0" in location:
            raise ModelError(f"{whose}: external data {location!r} has a zero byte in its name")
        path = (source.folder / location).resolve()
        if not location or Path(location).is_absolute() or not path.is_relative_to(source.folder):
            raise ModelError(f"{whose}: external data {location!r} is outside the model's folder")
        size = path.stat().st_size
    except OSError as error:
        raise ModelError(f"{whose}: external data file {location!r}: {error.strerror}") from error
    except RuntimeError as error:
        raise ModelError(f"{whose}: external data file {location!r} is a loop of links") from error
    if not path.is_file():
        raise ModelError(f"{whose}: external data {location!r} is not a regular file")
    try:
        offset, length = int(_entry(tensor, "offset") or 0), int(_entry(tensor, "length") or 0)
    except ValueError as error:
        raise ModelError(f"{whose}: external data offset or length is not a number") from error
    if length not in (0, needed):
        raise ModelError(f"{whose} needs {needed} bytes, its external data has {length}")
    if offset < 0 or offset + needed > size:
        raise ModelError(
            f"{whose}: external data file {location!r} is too short: {size} bytes, {offset + needed} needed"
        )


def weight_bytes(model: onnx.ModelProto) -> int:
    """Bytes of all initializers, wherever they are stored."""
    return sum(tensor_bytes(tensor.data_type, tensor.dims) for tensor in model.graph.initializer)


def without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which large initializers are typed graph inputs: what analyses need, at the size of the graph alone."""
    light = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    light.functions.extend(model.functions)
    light.metadata_props.extend(model.metadata_props)
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
    for sparse in model.graph.sparse_initializer:  # the runtime stores them dense, under this name
        graph.input.append(onnx.helper.make_tensor_value_info(sparse.values.name, sparse.values.data_type, sparse.dims))
    return light


def check_target(target: str | os.PathLike[str], source: str | os.PathLike[str] | None, force: bool) -> Path:
    """The path to write to; UsageError where that would destroy something or cannot work."""
    path = Path(target)
    if "\0" in str(path):
        raise UsageError(f"cannot write {str(path)!r}: its name has a zero byte")
    try:
        _check_path(path, source, force)
        # Only writing shows whether one may: permissions, quotas and read-only disks all have a say.
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    return path


def _check_path(path: Path, source: str | os.PathLike[str] | None, force: bool) -> None:
    if path.is_dir():
        raise UsageError(f"{path} is a directory: name a file to write")
    if not path.parent.is_dir():
        raise UsageError(f"folder {path.parent} does not exist")
    if source is not None and path.exists() and Path(source).exists() and path.samefile(source):
        raise UsageError(f"{path} is the input: name another output")
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is not a regular file: name another output")
    if path.exists() and not force:
        raise UsageError(f"{path} exists: pass --force (force=True in Python) to replace it")


def save(model: onnx.ModelProto, target: str | os.PathLike[str], source_folder: Path | None) -> None:
    """Write `model` to `target` all at once: readers see the old file or the whole new one, never a part.

    External data files are copied next to `target` when it is in another folder than `source_folder`. A link is
    followed; a file that is replaced keeps its permissions.

    Raises
    ------
    UsageError
        `target` is one of the model's own data files.
    ModelError
        When the disk or the format cannot hold it, or another file is where a data file belongs.
    """
    path = Path(target).resolve()
    folder = path.parent
    check_not_data(model, path, folder)
    carried: list[Path] = []
    try:
        if source_folder is not None and source_folder != folder:
            for location in external_files(model):
                _carry(source_folder / location, folder / location, carried)
        with _replacing(path) as partial:
            write(model, source_folder, partial)
    except BaseException as error:
        for copy in carried:
            copy.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ModelError(f"cannot write {target}: {error.strerror}") from error
        raise


def write(model: onnx.ModelProto, source_folder: Path | None, target: Path) -> None:
    """Write a model, weights that stayed in their file included, to a file that nobody reads yet; see `save`."""
    try:
        large_files.write(model, source_folder, target)
    except (EncodeError, ValueError) as error:
        raise ModelError(
            "the rewritten model exceeds protobuf's 2 GiB: store its weights as external data first"
        ) from error


def check_not_data(model: onnx.ModelProto, target: Path, folder: Path | None) -> None:
    """Raise UsageError where `target` is a data file of the model, whose data lies in `folder` or will."""
    for location in external_files(model):
        if folder is not None and (folder / location).resolve() == target.resolve():
            raise UsageError(f"{target.name} holds the data of the model: name another output")


def write_text(text: str, target: str | os.PathLike[str]) -> None:
    """Write a text file all at once; ModelError when the disk cannot hold it."""
    write_bytes(text.encode(), target)


def write_bytes(data: bytes, target: str | os.PathLike[str]) -> None:
    """Write a file all at once; ModelError when the disk cannot hold it."""
    path = Path(target)
    try:
        with _replacing(path.resolve()) as partial:
            partial.write_bytes(data)
    except OSError as error:
        raise ModelError(f"cannot write {path}: {error.strerror}") from error


def _carry(origin: Path, copy: Path, carried: list[Path]) -> None:
    """Copy a data file and note it, unless it is there already."""
    if copy.exists():
        if filecmp.cmp(origin, copy, shallow=False):
            return
        raise ModelError(f"{copy} exists and is not the model's data: write to another folder, or move that file")
    copy.parent.mkdir(parents=True, exist_ok=True)
    with _replacing(copy) as partial:
        shutil.copyfile(origin, partial)
    carried.append(copy)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place when the block ends well, and vanishes when it does not."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name[:200]}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        umask = os.umask(0)
        os.umask(umask)
        # mkstemp's 0600 would make a new file unreadable to others
        partial.chmod(stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o666 & ~umask)
        with partial.open("rb") as stream:
            os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
