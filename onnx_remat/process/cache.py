"""Results that later processes use again, on the disk: compiled kernels, plans of steps.

Everything lies in a folder that belongs to the user alone, because code and pickles in it are trusted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("numpy", "numba", "llvmlite", "onnx", "onnxruntime", "onnxruntime-gpu", "ortools", "onednn-cpu-gomp")


@cache
def cache_folder() -> Path | None:
    """Return the cache folder: in the package, or in the user's cache folder; None if neither is writable.

    Other users' code must not run: the folder must belong to the user and be writable by no one else.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for folder in (Path(__file__).parents[1] / "__pycache__", home / "onnx-remat"):
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
            mine = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if mine and os.access(folder, os.W_OK):
                return folder
    return None


@cache
def surroundings(more: tuple[str, ...] = (), folder: Path | None = None) -> str:
    """Return a hash of what a plan depends on besides its step: packages, this package's code, the processor.

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
        for pattern in ("*.py", "*.c")
        for each in root.rglob(pattern)
    )
    return hashlib.sha256(repr((versions, code, _processor(), os.cpu_count())).encode()).hexdigest()


def _processor() -> tuple[str, ...]:
    """Return the processor's model and its features, as far as the system states them."""
    described = [platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):
        first, _, _ = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")
        described += [line for line in first.splitlines() if line.startswith(("model name", "flags", "Features"))]
    return tuple(described)


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
