"""External data of a model: allowed locations, checks, and copies.

A location is a relative path below the model's folder to a regular file: no ``..``, no link to the outside. Data is
linked and copied by that path in its normal form, never by the text in the model.

A model may be given as a link to its file. Its folder is then that of the file, or that of the link where the data is
there alone: Hugging Face's cache has folders of links to models and to their data, which lie side by side elsewhere.
"""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

import onnx
from onnx import TensorProto

from onnx_remat import files
from onnx_remat.errors import ModelError, ShapeError
from onnx_remat.ir import large_files
from onnx_remat.ir.dtypes import tensor_bytes, typed_entries


def tensors(model: onnx.ModelProto) -> Iterator[TensorProto]:
    """Yield every tensor stored in a model: initializers and attributes, also of bodies and local functions."""
    yield from _of_graph(model.graph)
    for function in model.functions:
        yield from _of_nodes(function.node)
        yield from _of_attributes(function.attribute_proto)
    for training in model.training_info:
        yield from _of_graph(training.initialization)
        yield from _of_graph(training.algorithm)


def _of_graph(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    yield from _of_sparse(graph.sparse_initializer)
    yield from _of_nodes(graph.node)


def _of_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[TensorProto]:
    for node in nodes:
        yield from _of_attributes(node.attribute)


def _of_attributes(attributes: Iterable[onnx.AttributeProto]) -> Iterator[TensorProto]:
    """Yield tensors by the fields that are set, not by the stated type: readers differ in which one they use."""
    for attribute in attributes:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        yield from _of_sparse(attribute.sparse_tensors)
        if attribute.HasField("sparse_tensor"):
            yield from _of_sparse([attribute.sparse_tensor])
        if attribute.HasField("g"):
            yield from _of_graph(attribute.g)
        for body in attribute.graphs:
            yield from _of_graph(body)


def _of_sparse(sparse_ones: Iterable[onnx.SparseTensorProto]) -> Iterator[TensorProto]:
    for sparse in sparse_ones:
        yield sparse.values
        yield sparse.indices


def paths(model: onnx.ModelProto) -> list[str]:
    """Return the relative paths of a model's data files, in normal form, in order of first mention.

    Raises
    ------
    ModelError
        A location is empty, absolute or climbs up.
    """
    return list(dict.fromkeys(_path(tensor) for tensor in _outside(model)))


def _outside(model: onnx.ModelProto) -> Iterator[TensorProto]:
    """Yield the tensors in data files."""
    for tensor in tensors(model):
        if tensor.data_location == TensorProto.EXTERNAL and not large_files.is_stored(tensor):
            yield tensor


def _entry(tensor: TensorProto, key: str) -> str:
    found = [entry.value for entry in tensor.external_data if entry.key == key]
    if len(found) > 1:
        raise ModelError(f"initializer {tensor.name!r} states the {key} of its external data twice")
    return found[0] if found else ""


def _path(tensor: TensorProto) -> str:
    """Return the path of the data below the model's folder."""
    location, whose = _entry(tensor, "location"), f"initializer {tensor.name!r}"
    if "\0" in location:
        raise ModelError(f"{whose}: external data {location!r} has a zero byte in its name")
    path = PurePosixPath(location)
    # Windows' separator and drives too: a file should mean the same wherever it is read
    if not path.parts or path.is_absolute() or ".." in location.replace("\\", "/").split("/") or location[1:2] == ":":
        raise ModelError(f"{whose}: external data {location!r} is outside the model's folder")
    return str(path)


def home(model: onnx.ModelProto, path: Path) -> Path:
    """Return the folder of a model that was read from `path`: that of the file, or of the link to it; see above."""
    folders, data = (path.resolve().parent, path.parent.resolve()), paths(model)
    return next((folder for folder in folders if any(_is_there(folder / each) for each in data)), folders[0])


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # `check` reports it
        return False


def check(model: onnx.ModelProto, folder: Path | None, real: Path | None = None) -> None:
    """Check that every stored tensor has a known type, a shape, and all its data, without reading data files.

    Parameters
    ----------
    folder : Path or None
        Folder of the model; None for a model in memory.
    real : Path, optional
        Folder of the file that the model was read from, if that is another: links in `folder` may lead there.

    Raises
    ------
    ModelError
    """
    places: dict[str, int] = {}
    for tensor in tensors(model):
        if any(dim < 0 for dim in tensor.dims):
            raise ModelError(f"initializer {tensor.name!r} has a negative dimension: {list(tensor.dims)}")
        try:
            needed = tensor_bytes(tensor.data_type, tensor.dims)
        except ShapeError as error:
            raise ModelError(f"initializer {tensor.name!r}: {error}") from error
        stored = folder is not None and large_files.is_stored(tensor)
        if tensor.data_location == TensorProto.EXTERNAL and not stored:
            _check_stored_outside(tensor, needed, folder, real, places)
        elif tensor.HasField("raw_data") or stored:
            has = large_files.stored_bytes(tensor) if stored else len(tensor.raw_data)
            if has != needed:
                raise ModelError(f"initializer {tensor.name!r} needs {needed} bytes, it has {has}")
        else:
            entries = typed_entries(tensor.data_type, tensor.dims)
            has = len(getattr(tensor, onnx.helper.tensor_dtype_to_field(tensor.data_type)))
            if has != entries:
                raise ModelError(f"initializer {tensor.name!r} needs {entries} entries, it has {has}")


def _check_stored_outside(
    tensor: TensorProto, needed: int, folder: Path | None, real: Path | None, places: dict[str, int]
) -> None:
    """Check a tensor in a data file; `places` caches the bytes of data files, by path."""
    whose = f"initializer {tensor.name!r}"
    if folder is None:
        location = _entry(tensor, "location")
        raise ModelError(
            f"{whose} keeps its data in a file ({location!r}), but the model was not given as a path: pass the path"
        )
    path = _path(tensor)
    if path not in places:
        places[path] = _size(folder, real or folder, path, whose)
    size = places[path]
    try:
        offset, length = int(_entry(tensor, "offset") or 0), int(_entry(tensor, "length") or 0)
    except ValueError as error:
        raise ModelError(f"{whose}: external data offset or length is not a number") from error
    if length not in (0, needed):
        raise ModelError(f"{whose} needs {needed} bytes, its external data has {length}")
    if offset < 0 or offset + needed > size:
        raise ModelError(f"{whose}: external data file {path!r} is too short: {size} bytes, {offset + needed} needed")


def _size(folder: Path, real: Path, path: str, whose: str) -> int:
    """Return the bytes of a data file; check that it is a regular file inside one of the folders."""
    try:
        leads = (folder / path).resolve()
        if not leads.is_relative_to(folder) and not leads.is_relative_to(real):
            raise ModelError(f"{whose}: external data {path!r} is outside the model's folder")
        size = leads.stat().st_size
    except OSError as error:
        raise ModelError(f"{whose}: external data file {path!r}: {error.strerror}") from error
    except RuntimeError as error:
        raise ModelError(f"{whose}: external data file {path!r} is a loop of links") from error
    if not leads.is_file():
        raise ModelError(f"{whose}: external data {path!r} is not a regular file")
    return size


def read_small(model: onnx.ModelProto, folder: Path, limit: int) -> None:
    """Read tensors of less than `limit` bytes into a model that was checked: shapes may depend on their contents.

    Raises
    ------
    ModelError
        A data file cannot be read.
    """
    small: dict[str, list[tuple[TensorProto, int]]] = {}
    for tensor in _outside(model):
        needed = tensor_bytes(tensor.data_type, tensor.dims)
        if needed < limit:
            small.setdefault(_path(tensor), []).append((tensor, needed))
    for path, found in small.items():
        try:
            with (folder / path).open("rb") as data:
                for tensor, needed in found:
                    data.seek(int(_entry(tensor, "offset") or 0))
                    tensor.raw_data = data.read(needed)
                    tensor.ClearField("external_data")
                    tensor.ClearField("data_location")
        except OSError as error:
            raise ModelError(f"cannot read external data file {path!r}: {error.strerror}") from error


def check_not_data(data: Iterable[str], target: Path, folders: Iterable[Path]) -> None:
    """Raise UsageError if `target` is one of a model's data files in one of the folders."""
    read = [files.Use(folder / path, "data of the model") for path in data for folder in folders]
    files.check_uses(read, [files.Use(target, "written")])


def carry(model: onnx.ModelProto, origin: Path, folder: Path) -> None:
    """Copy a model's data files to a folder, within `files.together`, unless they lie there.

    Raises
    ------
    ModelError
        Another file is in the place of one, or a link there leads out of `folder`: ONNX Runtime would refuse it.
    """
    for path in paths(model):
        copy = folder / path
        if not copy.resolve().is_relative_to(folder):
            raise ModelError(f"{copy} leads out of {folder}: write to another folder, or remove that link")
        if copy.exists():
            if copy.samefile(origin / path) or filecmp.cmp(origin / path, copy, shallow=False):
                continue
            raise ModelError(f"{copy} exists and is not the model's data: write to another folder, or move that file")
        files.make_folder(copy.parent)
        with files.replacing(copy, force=False, shared=True) as partial:
            shutil.copyfile(origin / path, partial)


def link(model: onnx.ModelProto, origin: Path, folder: Path) -> None:
    """Link a model's data files into a scratch folder; copy them where that fails, on another disk for example.

    ONNX Runtime refuses symbolic links that lead out of the folder.
    """
    for path in paths(model):
        leads, name = (origin / path).resolve(), folder / path
        name.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(leads, name)
        except FileExistsError:
            continue
        except OSError:
            shutil.copyfile(leads, name)
