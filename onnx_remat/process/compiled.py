"""How functions are compiled: numba's decorators, with a cache that cannot be stale.

Numba keeps compiled code on disk beside the module, or where that cannot be written (an installed package) in the
user's cache folder, and compiles anew where the module has changed. It does not notice that another one has changed
whose functions or constants are compiled in. Here the names of the cache's files end in a hash of all the sources that
may be: code compiled from other sources is never looked at.

With ``NUMBA_BOUNDSCHECK=1`` in the environment an index out of bounds is an IndexError: for tests, at three times the
seconds. That code has names of its own too. An index of -1 is the last element, here as everywhere in Python: a
function that says -1 for "none" is to be asked before what it says is an index.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from numba import config, njit
from numba.core.registry import CPUDispatcher

SOURCES = ("process/compiled.py", "memory", "plan", "write/private_buffers.py")
"""Files and folders of the package that compiled functions, and the constants in them, come from."""

inlined: Any = njit(_nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)  # type: ignore[call-overload]
"""Compiles what only compiled code calls and what makes no array: it counts no references, which take long to compile.

It is not cached by itself, but within its cached callers.
"""


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function at its first call, once for all processes; it lets go of the interpreter's lock."""
    function.__qualname__ += "_" + build(Path(__file__).parents[1])  # numba names its files after it
    dispatcher = njit(cache=True, nogil=True, no_cfunc_wrapper=True)(function)  # type: ignore[call-overload]
    if cache := getattr(dispatcher, "_cache", None):  # none where compiling is switched off
        cache.save_overload = _saved_with_care(cache.save_overload, cache.cache_path)
        dispatcher.__class__ = _Interruptible
    return dispatcher


class _Interruptible(CPUDispatcher):  # type: ignore[misc, unused-ignore]
    """A compiled function that lets an interruption out as it is.

    A signal's handler may run while results are made into Python's objects. What it raises, a KeyboardInterrupt say,
    is then the cause of a SystemError, or the cause of its cause: a result with an exception set.
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
    """Whether code of a function that `compiled` decorates is on the disk, or none is needed."""
    cache = getattr(function, "_cache", None)
    return cache is None or any(Path(cache.cache_path).glob(f"*.{function.py_func.__qualname__}-*.nbi"))


def _saved_with_care(save: Callable[..., None], folder: str) -> Callable[..., None]:
    """Save compiled code where that can be done: what cannot be kept, on a full disk say, is compiled again next time.

    One process saves at a time. Numba reads an index, adds to it, and writes it back: of two processes that do so at
    once, for arguments of different types, each may find the other's code under its own name.
    """

    @functools.wraps(save)
    def careful(*arguments: Any) -> None:
        with contextlib.suppress(OSError), _locked(Path(folder)):
            save(*arguments)

    return careful


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a cache folder; where the system has no such locks, go on without."""
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
    """What the names of compiled code end in: the hash of a package's sources, and whether indices are checked."""
    return source_hash(package) + ("_checked" if config.BOUNDSCHECK else "")  # type: ignore[attr-defined]


@functools.cache
def source_hash(package: Path) -> str:
    """Sixteen hex digits that differ where `SOURCES` below a package's folder differ."""
    digest = hashlib.sha256()
    for source in SOURCES:
        path = package / source
        for file in [path] if path.suffix else sorted(path.rglob("*.py")):
            text = file.read_bytes()
            digest.update(f"{file.relative_to(package).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:16]
