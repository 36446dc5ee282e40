"""Compile functions by numba, with a cache that is never stale.

Numba keeps compiled code on disk next to the module, or where that is not writeable (an installed package) in the
user's cache folder, and compiles again when the module has changed. It does not notice a change in another module whose
functions or constants are compiled in. Here the names of cache files end in a hash of all sources that may be compiled
in, so code compiled from other sources is never loaded.

A wheel may carry code that was compiled for all processors of `LEVEL`, see `rewrite.precompile`. It is loaded where the
disk has none.

With ``NUMBA_BOUNDSCHECK=1`` in the environment an index out of bounds raises IndexError: for tests, at three times the
time. Such code has cache names of its own. An index of -1 is the last element, as everywhere in Python: callers of a
function that returns -1 for "none" must check for it before indexing.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pickle
import platform
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llvmlite import binding
from numba import config, njit
from numba.core.caching import IndexDataCacheFile
from numba.core.registry import CPUDispatcher

SOURCES = ("process/compiled.py", "memory", "plan", "write/private_buffers.py")
"""Files and folders of the package with the sources of compiled functions and of the constants in them."""

LEVEL = "x86-64-v3"
"""Level of the x86-64 instruction set that precompiled code needs, as LLVM calls it."""

PRECOMPILED = Path(__file__).with_name("precompiled")
"""Folder of a wheel's precompiled code; a checkout has none."""

_FEATURES = ("avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe")  # of `LEVEL`, beyond earlier levels

inlined: Any = njit(_nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)  # type: ignore[call-overload]
"""Decorator for functions that only compiled code calls and that create no array: without reference counts, which are
slow to compile. Such a function is cached as part of its callers.
"""


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function at its first call, once for all processes; the compiled function releases the GIL."""
    function.__qualname__ += "_" + build(Path(__file__).parents[1])  # numba names its files after it
    dispatcher = njit(cache=True, nogil=True, no_cfunc_wrapper=True)(function)  # type: ignore[call-overload]
    if cache := getattr(dispatcher, "_cache", None):  # none where compiling is switched off
        cache.save_overload = _saved_with_care(cache.save_overload, cache.cache_path)
        cache.load_overload = _from_disk_or_wheel(cache)
        dispatcher.__class__ = _Interruptible
    return dispatcher


class _Interruptible(CPUDispatcher):  # type: ignore[misc, unused-ignore]
    """A compiled function that raises an interruption unchanged.

    A signal handler may run while results are converted to Python objects. An exception in it, such as
    KeyboardInterrupt, then becomes a direct or indirect cause of a SystemError ("a result with an exception set").
    """

    def __call__(self, *arguments: Any) -> Any:
        try:
            return super().__call__(*arguments)
        except SystemError as error:
            cause: BaseException | None = error
            while isinstance(cause, SystemError):
                cause = cause.__cause__
            if cause is None:
                raise
            raise cause from None


def is_compiled(function: Any) -> bool:
    """Is the code of a function that `compiled` decorates on disk, or is none needed?"""
    cache = getattr(function, "_cache", None)
    folders = [] if cache is None else [Path(cache.cache_path), *([PRECOMPILED] if _has_precompiled() else [])]
    return cache is None or any(any(f.glob(f"*.{function.py_func.__qualname__}-*.nbi")) for f in folders)


@functools.cache
def _has_precompiled() -> bool:
    """Is there precompiled code, and does it run on this processor?"""
    if platform.machine() != "x86_64" or not PRECOMPILED.is_dir():
        return False
    here = binding.get_host_cpu_features()
    return all(here.get(feature) for feature in _FEATURES)


def _from_disk_or_wheel(cache: Any) -> Callable[..., Any]:
    """Load code from the disk, or else the wheel's."""
    load, name = cache.load_overload, cache._impl.filename_base
    wheel: Any = IndexDataCacheFile(str(PRECOMPILED), name, LEVEL)  # type: ignore[no-untyped-call, unused-ignore]

    @functools.wraps(load)
    def found(signature: Any, context: Any) -> Any:
        made = load(signature, context)
        if made is None and _has_precompiled():
            data = wheel.load(_of_level(cache._index_key(signature, context.codegen())))
            made = None if data is None else cache._impl.rebuild(context, data)
        return made

    return found


def _of_level(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the key of compiled code, which names a processor and its features, with `LEVEL` instead."""
    signature, _, code = key
    return signature, LEVEL, code


def collect(cache: Path, into: Path) -> None:
    """Copy compiled code from numba's cache folders to a folder for a wheel; it must be compiled for `LEVEL`."""
    into.mkdir(parents=True, exist_ok=True)
    for index in sorted(cache.rglob("*.nbi")):
        with index.open("rb") as file:
            version, (_, overloads) = pickle.load(file), pickle.loads(file.read())
        with (into / index.name).open("xb") as file:
            pickle.dump(version, file, protocol=-1)
            file.write(pickle.dumps((LEVEL, {_of_level(key): name for key, name in overloads.items()})))
        for name in overloads.values():
            (into / name).write_bytes((index.parent / name).read_bytes())


def _saved_with_care(save: Callable[..., None], folder: str) -> Callable[..., None]:
    """Save compiled code where possible; code that cannot be saved, on a full disk for example, is compiled again.

    One process saves at a time. Numba reads an index, adds to it, and writes it back: two processes that do so at the
    same time, for arguments of different types, could load each other's code.
    """

    @functools.wraps(save)
    def careful(*arguments: Any) -> None:
        with contextlib.suppress(OSError), _locked(Path(folder)):
            save(*arguments)
            _remove_stale(Path(folder))

    return careful


@functools.cache
def _remove_stale(folder: Path) -> None:
    """Remove code of other sources that is older than a month from a cache folder, once per process."""
    for each in folder.iterdir():
        found = re.fullmatch(r".+_([0-9a-f]{16})(_checked)?-\d+\.py.+\.nb[ic]", each.name)
        if found and found[1] != source_hash(Path(__file__).parents[1]) and each.stat().st_mtime < time.time() - _MONTH:
            each.unlink()


_MONTH = 30 * 24 * 3600


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a cache folder within the block, on systems that have such locks."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "onnx_remat.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(package: Path) -> str:
    """Return the suffix of names of compiled code: the hash of a package's sources, and whether indices are checked."""
    return source_hash(package) + ("_checked" if config.BOUNDSCHECK else "")  # type: ignore[attr-defined]


@functools.cache
def source_hash(package: Path) -> str:
    """Return sixteen hex digits of a hash of `SOURCES` below a package's folder."""
    digest = hashlib.sha256()
    for source in SOURCES:
        path = package / source
        for file in [path] if path.suffix else sorted(path.rglob("*.py")):
            text = file.read_bytes()
            digest.update(f"{file.relative_to(package).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:16]
