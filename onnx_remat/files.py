"""Files on disk: checks of output paths, atomic writes of one or several files, scratch folders."""

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
    """A path that a command reads or writes; messages read "`path` is `role`"."""

    path: PathLike
    role: str


def check_uses(reads: Sequence[Use], writes: Sequence[Use]) -> None:
    """Raise UsageError where a command would overwrite a file it reads, or write two outputs to one path.

    Paths are the same if they resolve to the same path (``..`` and links followed) or are hard links of one file.
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
    """Return the identities of a path: the resolved path and, if it exists, the file."""
    try:
        leads = Path(path).resolve()
        if not leads.exists():
            return [leads]
        status = leads.stat()
    except (OSError, RuntimeError, ValueError):  # a loop of links, a zero byte: opening it will report that
        return [os.fspath(path)]
    return [leads, (status.st_dev, status.st_ino)]


def resolved(path: PathLike) -> Path:
    """Return the resolved path; UsageError where links form a loop."""
    try:
        Path(path).stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UsageError(f"{path} is a loop of links: name another file") from error
    return Path(path).resolve()


def reopened(path: PathLike) -> Path:
    """Return a path that names the same file in another process: ``/dev/stdin`` and ``/proc/self`` name others there.

    >>> str(reopened("models/step.onnx"))
    'models/step.onnx'
    """
    return Path(path).resolve() if str(Path(path).absolute()).startswith(("/dev/", "/proc/")) else Path(path)


def check_target(target: PathLike, source: PathLike | None, force: bool) -> Path:
    """Return `target` as a path; UsageError where it cannot be written or would overwrite a file without `force`."""
    path = Path(target)
    if "\0" in str(path):
        raise UsageError(f"cannot write {str(path)!r}: its name has a zero byte")
    try:
        _check_path(path, source, force)
        # Only a write shows whether writing works: permissions, quotas and read-only disks all matter.
        handle, name = tempfile.mkstemp(prefix=_prefix(path), suffix=".tmp", dir=resolved(path).parent)
        os.close(handle)
        Path(name).unlink()
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    return path


def _check_path(path: Path, source: PathLike | None, force: bool) -> None:
    folder = resolved(path).parent
    if str(path) == "-":
        raise UsageError("a model is written to a file, not to standard output: name one, or ./- for one of this name")
    if path.is_dir():
        raise UsageError(f"{path} is a directory: name a file to write")
    if not folder.is_dir():
        raise UsageError(f"folder {folder} does not exist: create it, or name another file")
    if source is not None:
        check_uses([Use(source, "the input")], [Use(path, "written")])
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is not a regular file: name another output")
    if path.exists() and not force:
        raise _taken(path)


def _taken(path: Path) -> UsageError:
    return UsageError("{} exists: pass {} to replace it", path, Setting("force", True))


def write_text(text: str, target: PathLike, force: bool = True) -> None:
    """Write a text file, see `write_bytes`."""
    write_bytes(text.encode(), target, force)


def write_bytes(data: bytes, target: PathLike, force: bool = True) -> None:
    """Write a file atomically; ModelError when the disk cannot store it, UsageError as in `replacing`."""
    path = Path(target)
    try:
        with replacing(resolved(path), force) as partial:
            partial.write_bytes(data)
    except OSError as error:
        raise ModelError(f"cannot write {path}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class _Written:
    """A temporary file to be moved to `path`; without `force`, `path` must not exist by then."""

    partial: Path
    path: Path
    force: bool
    shared: bool

    def take_place(self) -> bool:
        """Move the file to `path`; return True where `path` is new.

        Raises
        ------
        UsageError
            Another process has created `path` meanwhile, unless the file is `shared` and the content is the same.
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
    """Move a file to a path that does not exist: of several processes one succeeds, the others get FileExistsError."""
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
    """Files to be moved to their paths together, and how to undo that."""

    ready: list[_Written]
    undo: ExitStack


_batch: ContextVar[_Batch | None] = ContextVar("_batch", default=None)


@contextmanager
def together() -> Iterator[None]:
    """Move the files written in this block to their paths when it ends without an error; else move none."""
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
        # Exclusive files first: a process that loses the race then leaves nothing behind.
        for written in sorted(batch.ready, key=lambda written: (written.force, written.shared)):
            if written.take_place():
                undo.callback(written.path.unlink, missing_ok=True)
        undo.pop_all()


@contextmanager
def replacing(path: Path, force: bool = True, shared: bool = False) -> Iterator[Path]:
    """Yield a temporary file next to `path`; move it to `path` when the block ends without an error, else delete it.

    The move happens when the surrounding `together` ends, if there is one. Without `force`, UsageError is raised where
    `path` exists by then, unless the file is `shared` and the content is the same.
    """
    with together():
        batch = _batch.get()
        assert batch is not None
        handle, name = tempfile.mkstemp(prefix=_prefix(path), suffix=".tmp", dir=path.parent)
        os.close(handle)
        partial = Path(name)
        batch.undo.callback(partial.unlink, missing_ok=True)
        yield partial
        # mkstemp's 0600 would make a new file unreadable to others
        partial.chmod(stat.S_IMODE(path.stat().st_mode) if path.exists() else mode_of_new_files())
        with partial.open("rb") as stream:
            os.fsync(stream.fileno())
        batch.ready.append(_Written(partial, path, force, shared))


def mode_of_new_files() -> int:
    """Return the permissions of a new file under this process's umask; all threads share it, so it is seldom set."""
    with contextlib.suppress(OSError, StopIteration, ValueError, IndexError):
        lines = Path("/proc/self/status").read_text(errors="replace").splitlines()
        return 0o666 & ~int(next(line.split()[1] for line in lines if line.startswith("Umask:")), 8)
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


def make_folder(folder: Path) -> None:
    """Create a folder and its parents within `together`, which removes them when it ends with an error."""
    batch = _batch.get()
    assert batch is not None
    missing = [f for f in (folder, *folder.parents) if not f.exists()]
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        batch.undo.callback(_remove_empty, each)


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # no longer empty
        folder.rmdir()


def _prefix(path: Path) -> str:
    """Return the start of temporary file names next to `path`: names have up to 255 bytes, characters up to 4."""
    return f".{path.name[:40]}."


_SCRATCH = "onnx-remat-run-"
_STALE = 60.0  # seconds after a folder's last change from which on no process is still about to lock it


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a folder for temporary files.

    A killed process leaves its folder behind; the next process that needs one removes it. A process locks its folder,
    and the system releases the lock however the process ends.
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
    """Remove folders that killed processes of this user left in `folder`, once per process."""
    for stale in Path(folder).glob(_SCRATCH + "*"):
        try:
            status = stale.lstat()
            if status.st_uid != os.geteuid() or time.time() - status.st_mtime < _STALE:
                continue
            lock = os.open(stale, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # removed meanwhile, or not a scratch folder
            continue
        try:
            if _locked(lock):
                shutil.rmtree(stale, ignore_errors=True)
        finally:
            os.close(lock)


def _locked(descriptor: int) -> bool:
    """Lock an open file or folder; return False where another process has locked it."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
