"""How functions are compiled: numba's decorators, with a cache that cannot be stale.

Numba keeps compiled code on disk beside the module, or where that cannot be written (an installed package) in the
user's cache folder, and compiles anew where the module has changed. It does not notice that another one has changed
whose functions or constants are compiled in. Here the names of the cache's files end in a hash of all the sources that
may be: code compiled from other sources is never looked at.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

SOURCES = ("compiled.py", "problem.py", "ort/simulate", "plan", "write/private_buffers.py")
"""Files and folders of the package that compiled functions, and the constants in them, come from."""

inlined: Any = njit(_nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)  # type: ignore[call-overload]
"""Compiles what only compiled code calls and what makes no array: it counts no references, which take long to compile.

It is not cached by itself, but within its cached callers.
"""


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function at its first call, once for all processes; it lets go of the interpreter's lock."""
    function.__qualname__ += "_" + source_hash(Path(__file__).parent)  # numba names its files after it
    return njit(cache=True, nogil=True, no_cfunc_wrapper=True)(function)  # type: ignore[call-overload]


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
