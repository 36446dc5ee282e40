"""Files on disk: what may be written where, writes that happen as a whole or not at all, scratch folders."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from onnx_remat.errors import ModelError, UsageError

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Use:
    """A path that a command reads or writes; `role` completes the sentence "this path is ..."."""

    path: PathLike
    role: str


def check_uses(reads: Sequence[Use], writes: Sequence[Use]) -> None:
    """Raise UsageError where a command would write over what it reads, or write two things to one place.

    Paths are the same if they lead to the same place (``..`` and links followed) or are names of one file (hard links).
    """
    roles: dict[object, str] = {}
    for use in reads:
        for place in _places(use.path):
            roles.setdefault(place, use.role)
    for use in writes:
        for place in _places(use.path):
            if place in roles:
                raise UsageError(f"{use.path} cannot be {use.role}, it is {roles[place]}: name another file")
        roles |= dict.fromkeys(_places(use.path), use.role)


def _places(path: PathLike) -> list[object]:
    """What identifies a path: where it leads and, if that exists, the file itself."""
    try:
        leads = Path(path).resolve()
        if not leads.exists():
            return [leads]
        status = leads.stat()
    except (OSError, RuntimeError, ValueError):  # a loop of links, a zero byte: whoever opens it will say so
        return [os.fspath(path)]
    return [leads, (status.st_dev, status.st_ino)]


def check_target(target: PathLike, source: PathLike | None, force: bool) -> Path:
    """The path to write to; UsageError where that would destroy something or cannot work."""
    path = Path(target)
    if "\0" in str(path):
        raise UsageError(f"cannot write {str(path)!r}: its name has a zero byte")
    try:
        _check_path(path, source, force)
        # Only writing shows whether one may: permissions, quotas and read-only disks all have a say.
        handle, name = tempfile.mkstemp(prefix=_prefix(path), suffix=".tmp", dir=path.parent)
        os.close(handle)
        Path(name).unlink()
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    return path


def _check_path(path: Path, source: PathLike | None, force: bool) -> None:
    if path.is_dir():
        raise UsageError(f"{path} is a directory: name a file to write")
    if not path.parent.is_dir():
        raise UsageError(f"folder {path.parent} does not exist")
    if source is not None:
        check_uses([Use(source, "the input")], [Use(path, "written")])
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is not a regular file: name another output")
    if path.exists() and not force:
        raise UsageError(f"{path} exists: pass --force (force=True in Python) to replace it")


def write_text(text: str, target: PathLike) -> None:
    """Write a text file all at once; ModelError when the disk cannot hold it."""
    write_bytes(text.encode(), target)


def write_bytes(data: bytes, target: PathLike) -> None:
    """Write a file all at once; ModelError when the disk cannot hold it."""
    path = Path(target)
    try:
        with replacing(path.resolve()) as partial:
            partial.write_bytes(data)
    except OSError as error:
        raise ModelError(f"cannot write {path}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class _Batch:
    """Files that wait for their places, as pairs of what was written and where it belongs; folders made for them."""

    ready: list[tuple[Path, Path]]
    undo: ExitStack


_batch: ContextVar[_Batch | None] = ContextVar("_batch", default=None)


@contextmanager
def together() -> Iterator[None]:
    """Files written in this block take their places when it ends well, one after the other; else none does."""
    if _batch.get() is not None:
        yield
        return
    with ExitStack() as undo:
        batch = _Batch([], undo)
        token = _batch.set(batch)
        try:
            yield
        finally:
            _batch.reset(token)
        for partial, path in batch.ready:
            new = not path.exists()
            partial.replace(path)
            if new:
                undo.callback(path.unlink, missing_ok=True)
        undo.pop_all()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place when the block ends well, and vanishes when it does not.

    The place is taken when the surrounding `together` ends, if there is one.
    """
    with together():
        batch = _batch.get()
        assert batch is not None
        handle, name = tempfile.mkstemp(prefix=_prefix(path), suffix=".tmp", dir=path.parent)
        os.close(handle)
        partial = Path(name)
        batch.undo.callback(partial.unlink, missing_ok=True)
        yield partial
        umask = os.umask(0)
        os.umask(umask)
        # mkstemp's 0600 would make a new file unreadable to others
        partial.chmod(stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o666 & ~umask)
        with partial.open("rb") as stream:
            os.fsync(stream.fileno())
        batch.ready.append((partial, path))


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, within `together`: they vanish when that does not end well."""
    batch = _batch.get()
    assert batch is not None
    missing = [f for f in (folder, *folder.parents) if not f.exists()]
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        batch.undo.callback(_remove_empty, each)


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # something else was put there meanwhile
        folder.rmdir()


def _prefix(path: Path) -> str:
    """How the names of temporary files beside `path` start: names may have 255 bytes, a character takes up to 4."""
    return f".{path.name[:40]}."


_SCRATCH = "onnx-remat-run-"
_STALE = 60.0  # seconds since a folder last changed after which no process is about to lock it


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for files of no lasting worth.

    A process that is killed leaves its folder behind; the next one to need a folder removes it. Who uses a folder holds
    a lock on it, which the system gives back however the process ends.
    """
    _sweep(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, ignore_cleanup_errors=True) as name:
        lock = os.open(name, os.O_RDONLY)
        try:
            _locked(lock)
            yield Path(name)
        finally:
            os.close(lock)


@cache
def _sweep(folder: str) -> None:
    """Remove folders that killed processes of this user left in `folder`; once per process."""
    for stale in Path(folder).glob(_SCRATCH + "*"):
        try:
            status = stale.lstat()
            if status.st_uid != os.geteuid() or time.time() - status.st_mtime < _STALE:
                continue
            lock = os.open(stale, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # gone, or not ours after all
            continue
        try:
            if _locked(lock):
                shutil.rmtree(stale, ignore_errors=True)
        finally:
            os.close(lock)


def _locked(descriptor: int) -> bool:
    """Lock an open file or folder; False where another process has."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
