"""Results that later processes use again, on the disk: compiled kernels, plans of steps.

Everything lies in a folder that belongs to the user alone, because code and pickles in it are trusted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

_PACKAGES = ("numpy", "numba", "llvmlite", "onnx", "onnxruntime", "onnxruntime-gpu", "ortools", "onednn-cpu-gomp")


@cache
def cache_folder() -> Path | None:
    """Return the cache folder: in the package, or in the user's cache folder; None if neither is writable.

    Other users' code must not run: the folder must belong to the user and be writable by no one else.
    """
    for folder in _folders():
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
            mine = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if mine and os.access(folder, os.W_OK):
                return folder
    return None


def _folders() -> Iterator[Path]:
    yield Path(__file__).parents[1] / "__pycache__"
    with contextlib.suppress(RuntimeError):  # where this user has no home
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onnx-remat"


@cache
def surroundings(more: tuple[str, ...] = (), folder: Path | None = None) -> str:
    """Return a hash of what a plan depends on besides its step: packages, this package's code, the processor.

    Environment variables of oneDNN are part of it: they limit the instructions of convolutions, and so their memory.

    Parameters
    ----------
    more : tuple of str
        Names of further packages.
    folder : Path, optional
        Further code.
    """
    versions = []
    for name in (*_PACKAGES, *more):
        with contextlib.suppress(PackageNotFoundError):
            versions.append((name, version(name)))
    home = Path(__file__).parents[1]
    code = sorted(
        (str(each), each.stat().st_size, each.stat().st_mtime_ns)
        for root in (home, folder or home)
        for each in sources(root)
    )
    limits = sorted(each for each in os.environ.items() if each[0].startswith(("ONEDNN_", "DNNL_")))
    known = versions, _runtime(), code, _processor(), os.cpu_count(), limits
    return hashlib.sha256(repr(known).encode()).hexdigest()


def sources(root: Path) -> Iterator[Path]:
    """Yield the files of a package's code; not of its caches, where other processes remove folders meanwhile."""
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name != "__pycache__"]
        yield from (Path(folder, name) for name in files if name.endswith((".py", ".c")))


def _runtime() -> list[tuple[str, int, int]]:
    """Return what identifies the installed ONNX Runtime, of whatever distribution or build: its native code.

    It is not imported, which would take time and memory.
    """
    try:
        spec = find_spec("onnxruntime")
    except ValueError:  # a module without a specification is loaded in its place
        spec = None
    folders = (spec.submodule_search_locations if spec else None) or ()
    files = [each for folder in folders for each in sorted(Path(folder, "capi").glob("*")) if each.is_file()]
    return [(str(each), each.stat().st_size, each.stat().st_mtime_ns) for each in files]


def _processor() -> tuple[str, ...]:
    """Return the processor's model and its features, as far as the system states them."""
    described = [platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):
        first, _, _ = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")
        described += [line for line in first.splitlines() if line.startswith(("model name", "flags", "Features"))]
    return tuple(described)


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a new file to write, next to `target`; it takes the place of that if the block ends without an error.

    Its name is its own even where processes of several containers, with the same ids, share the folder.
    """
    handle, name = tempfile.mkstemp(".tmp", f"{target.stem}.", target.parent)
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        partial.replace(target)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def count_as_used(path: Path) -> None:
    """Let `tidy` know that a file was read now: once a day, so that reading takes no write."""
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > _DAY:
            os.utime(path)


@cache
def tidy(folder: Path) -> None:
    """Remove files that were used longest ago, and those of killed processes, from a cache folder; once per process.

    The folder may be Python's, too: only files with names of this package are removed. Whoever still needs one makes
    it again, and code that is loaded stays so.
    """
    with contextlib.suppress(OSError):
        files = list(folder.iterdir())
        for name, most in _KEPT.items():
            alike = [each for each in files if re.fullmatch(name, each.name)]
            if len(alike) > most:
                for old in sorted(alike, key=_last_use)[:-most]:
                    old.unlink(missing_ok=True)
        for each in files:
            if re.fullmatch(_PARTIAL, each.name) and time.time() - _last_use(each) > _DAY:
                each.unlink(missing_ok=True)


_DAY = 24 * 3600
_KEPT = {
    r"[0-9a-f]{32}\.kernel": 8000,
    r"libonnx_remat_blas-[0-9a-f]{16}\.so": 4,
    r"libonnx_remat_fused-[0-9a-f]{16}\.so": 4,
}
"""How many files with names of these forms to keep: some 30 MB of kernels, copies of OpenBLAS of 25 MB each."""
_PARTIAL = r"([0-9a-f]{32}|libonnx_remat_[a-z]+-[0-9a-f]{16})\..*tmp"


def _last_use(path: Path) -> float:
    """Return when a file was last written or read, as far as the file system records that; 0 if it is gone."""
    try:
        status = path.lstat()
    except OSError:
        return 0
    return max(status.st_mtime, status.st_atime)


class Entries:
    """Folders of files by key; those that were used longest ago are removed.

    Parameters
    ----------
    name : str
        Name of their folder in `cache_folder`.
    most : int
        Number of entries to keep.
    """

    def __init__(self, name: str, most: int = 32) -> None:
        self.name = name
        self.most = most

    def folder(self) -> Path | None:
        """Return the folder of the entries, or None: no folder is writable."""
        folder = cache_folder()
        return None if folder is None else folder / self.name

    def take(self, key: str, copies: Mapping[str, Path], read: str) -> bytes | None:
        """Copy files of an entry, and return the content of another; count the entry as used now.

        Return None, and leave no copy, if there is no such entry, or if it is not as it was stored: another process may
        replace or remove it meanwhile, and a crash of the system may damage it.

        Parameters
        ----------
        key : str
        copies : mapping of str to Path
            For names of files, where to copy them.
        read : str
            Name of the file to read.
        """
        folder = self.folder()
        if folder is None:
            return None
        entry = folder / key
        try:
            os.utime(entry)
            digests = json.loads((entry / _DIGESTS).read_bytes())
            for name, target in copies.items():
                shutil.copyfile(entry / name, target)
                with target.open("rb") as file:
                    _check(hashlib.file_digest(file, "sha256").hexdigest(), digests[name])
            content = (entry / read).read_bytes()
            _check(hashlib.sha256(content).hexdigest(), digests[read])
        except (OSError, ValueError, KeyError, TypeError):
            for target in copies.values():
                target.unlink(missing_ok=True)
            return None
        return content

    def add(self, key: str, files: Mapping[str, Path | bytes]) -> None:
        """Store an entry, complete or not at all: copies of files, or contents, by name."""
        folder = self.folder()
        if folder is None:
            return
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            partial = Path(tempfile.mkdtemp(dir=folder))
            try:
                digests = {}
                for name, content in files.items():
                    if isinstance(content, bytes):
                        (partial / name).write_bytes(content)
                    else:
                        shutil.copyfile(content, partial / name)
                    with (partial / name).open("rb") as file:
                        digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
                (partial / _DIGESTS).write_text(json.dumps(digests), encoding="utf-8")
                _remove(folder / key)  # damaged, or of another process that came first
                partial.rename(folder / key)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            known = sorted(folder.iterdir(), key=lambda each: each.lstat().st_mtime)
            for old in known[: -self.most]:
                _remove(old)


_DIGESTS = "digests.json"


def _check(found: str, stored: object) -> None:
    if found != stored:
        raise ValueError("a file of the cache is damaged")


def _remove(path: Path) -> None:
    """Remove a folder, or a file or link in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
