"""Files on disk: what may be written where, writes that happen as a whole or not at all, scratch folders."""

from __future__ import annotations

import contextlib
import errno
import filecmp
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
from onnx_remat.messages import Setting

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


def resolved(path: PathLike) -> Path:
    """Where a path leads; UsageError where links lead in a loop."""
    try:
        Path(path).stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UsageError(f"{path} is a loop of links: name another file") from error
    return Path(path).resolve()


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
    resolved(path)
    if path.is_dir():
        raise UsageError(f"{path} is a directory: name a file to write")
    if not path.parent.is_dir():
        raise UsageError(f"folder {path.parent} does not exist")
    if source is not None:
        check_uses([Use(source, "the input")], [Use(path, "written")])
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is not a regular file: name another output")
    if path.exists() and not force:
        raise _taken(path)


def _taken(path: Path) -> UsageError:
    return UsageError("{} exists: pass {} to replace it", path, Setting("force", True))


def write_text(text: str, target: PathLike, force: bool = True) -> None:
    """As `write_bytes`."""
    write_bytes(text.encode(), target, force)


def write_bytes(data: bytes, target: PathLike, force: bool = True) -> None:
    """Write a file all at once; ModelError when the disk cannot hold it, UsageError as `replacing`."""
    path = Path(target)
    try:
        with replacing(resolved(path), force) as partial:
            partial.write_bytes(data)
    except OSError as error:
        raise ModelError(f"cannot write {path}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class _Written:
    """A file that waits for its place; without `force` nobody else may have taken that."""

    partial: Path
    path: Path
    force: bool
    shared: bool

    def take_place(self) -> bool:
        """Move to the place; True where nothing was there before.

        Raises
        ------
        UsageError
            Another process was faster. A `shared` file may then be there with the same content.
        """
        if self.force:
            new = not self.path.exists()
            self.partial.replace(self.path)
            return new
        try:
            _claim(self.partial, self.path)
        except FileExistsError as error:
            if self.shared and filecmp.cmp(self.partial, self.path, shallow=False):
                self.partial.unlink()
                return False
            raise _taken(self.path) from error
        return True


def _claim(partial: Path, path: Path) -> None:
    """Move a file to where nothing is, of several processes' files one alone; FileExistsError for all others."""
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: readers may see an empty file for a moment
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        partial.replace(path)
    else:
        partial.unlink()


@dataclass(frozen=True, slots=True)
class _Batch:
    """Files that wait for their places; folders made for them."""

    ready: list[_Written]
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
        # What nobody else may have first: who comes second then leaves nothing.
        for written in sorted(batch.ready, key=lambda written: (written.force, written.shared)):
            if written.take_place():
                undo.callback(written.path.unlink, missing_ok=True)
        undo.pop_all()


@contextmanager
def replacing(path: Path, force: bool = True, shared: bool = False) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place when the block ends well, and vanishes when it does not.

    The place is taken when the surrounding `together` ends, if there is one; without `force` UsageError is raised where
    something is there by then, unless the file is `shared` and that is the same.
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
        batch.ready.append(_Written(partial, path, force, shared))


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
