"""Input and output of models: load without weights, save atomically, copy external data along."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError, EncodeError

from onnx_remat import files
from onnx_remat.errors import ModelError, UsageError
from onnx_remat.ir import external_data, large_files
from onnx_remat.ir.body import out_of_body
from onnx_remat.ir.dtypes import tensor_bytes
from onnx_remat.ir.light import INLINE_LIMIT
from onnx_remat.ir.old_axes import positive
from onnx_remat.ir.opsets import one_name_for_the_standard


@dataclass(frozen=True, slots=True)
class Source:
    """A loaded model and the folder its external data is relative to (None for a model without a file).

    `in_body`: the step was in a body, and was taken out of it. `data`: relative paths of its data files, also of those
    that were read as a whole.
    """

    model: onnx.ModelProto
    folder: Path | None
    in_body: bool = False
    data: tuple[str, ...] = ()


Model = str | os.PathLike[str] | bytes | onnx.ModelProto | Source
"""Types that a model may be given as."""


def load(source: Model) -> Source:
    """Read a model without large weights in external data files or in a large file.

    Parameters
    ----------
    source : path, bytes, onnx.ModelProto or Source
        A ModelProto is used as it is, not copied: callers must not change it. A Source is an earlier result. A step in
        a body (`body.into_body`) is taken out of it. For weights in large files, see `large_files`.

    Raises
    ------
    ModelError
        Missing, unreadable, empty, truncated or not ONNX; external data missing, short or outside the model's folder.
    """
    if isinstance(source, Source):
        return source
    if isinstance(source, onnx.ModelProto):
        loaded = Source(source, None)
    elif isinstance(source, bytes | bytearray | memoryview):
        loaded = Source(_parse(bytes(source), "the given bytes"), None)
    elif isinstance(source, str | os.PathLike):
        return of_file(Path(source))
    else:
        raise UsageError(f"a model is a path, bytes or an onnx.ModelProto, not a {type(source).__name__}")
    return _checked(loaded)


def of_file(path: Path, data: bytes | None = None) -> Source:
    """Return the model of a file, or of `data` that were read from it; see `load`."""
    model = _read(path) if data is None else _parse(data, str(path))
    return _checked(Source(model, external_data.home(model, path)), path.resolve().parent)


def _checked(loaded: Source, real: Path | None = None) -> Source:
    external_data.check(loaded.model, loaded.folder, real)
    data = tuple(external_data.paths(loaded.model))
    if loaded.folder is not None:
        external_data.read_small(loaded.model, loaded.folder, INLINE_LIMIT)
    step = out_of_body(loaded.model)
    return replace(loaded, model=positive(one_name_for_the_standard(step)), in_body=step is not loaded.model, data=data)


def name_of(given: Model) -> str:
    """Return the name of a model for messages: its path if it has one."""
    return str(given) if isinstance(given, str | os.PathLike) else "the model"


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
        model = large_files.parse(data) if isinstance(data, Path) else onnx.ModelProto.FromString(data)
    except DecodeError as error:
        raise ModelError(f"{what} is not an ONNX model, or is truncated") from error
    if isinstance(data, bytes) and large_files.MARK in data:
        raise ModelError(f"{what} refers to bytes of a file that onnx-remat opened: load the original model instead")
    if not model.graph.node and not model.graph.output:
        raise ModelError(f"{what} is not an ONNX model: it has no graph")
    return model


def weight_bytes(model: onnx.ModelProto) -> int:
    """Return the bytes of all initializers, wherever they are stored."""
    return sum(tensor_bytes(tensor.data_type, tensor.dims) for tensor in model.graph.initializer)


def save(
    model: onnx.ModelProto,
    target: str | os.PathLike[str],
    source_folder: Path | None,
    force: bool = True,
    data: Sequence[str] = (),
) -> None:
    """Write `model` to `target` atomically: readers see the old file or the whole new one, never a part.

    External data files are copied next to `target` unless they lie there. Links are followed; a replaced file
    keeps its permissions. Without `force`, only one of several processes that write to the same target succeeds.
    `data` are the data files of the model's source that it no longer refers to, see `Source`.

    Raises
    ------
    UsageError
        `target` is one of the data files of the model or its source, or exists without `force`.
    ModelError
        The disk is full, the model exceeds the format's limit, or another file, or a link out of the folder, is in the
        place of a data file.
    """
    path = files.resolved(target)
    folder = path.parent
    homes = [folder] if source_folder is None else [source_folder, folder]
    external_data.check_not_data([*external_data.paths(model), *data], path, homes)
    try:
        with files.together():
            if source_folder is not None:
                external_data.carry(model, source_folder, folder)
            with files.replacing(path, force) as partial:
                write(model, source_folder, partial)
    except OSError as error:
        raise ModelError(f"cannot write {target}: {error.strerror}") from error


def write(model: onnx.ModelProto, source_folder: Path | None, target: Path) -> None:
    """Write a model, including weights that stayed in their file, to a file without readers; see `save`."""
    try:
        large_files.write(model, source_folder, target)
    except (EncodeError, ValueError) as error:
        raise ModelError(
            "the rewritten model exceeds protobuf's 2 GiB: store its weights as external data first"
        ) from error
