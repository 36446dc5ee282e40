"""Build of ``shim.c`` as a shared library; imports only the standard library, as the wheel's build hook loads it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
FLAGS = ("-O2", "-std=c11", "-fPIC", "-shared")


def library_name() -> str:
    """Return the file name of the library; it depends on the source, so that a stale library is never used."""
    return f"libonnx_remat_fused-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"


def build(folder: Path) -> str:
    """Compile the library into a folder; return why that failed, or an empty text."""
    named = os.environ.get("CC", "")
    compiler = next((found for name in (named, "cc", "gcc", "clang") if name and (found := shutil.which(name))), None)
    if compiler is None:
        return "there is no C compiler (cc, gcc or clang)"
    target = folder / library_name()
    partial = target.with_suffix(f".{os.getpid()}.tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [compiler, *FLAGS, str(SOURCE), "-o", str(partial)], capture_output=True, text=True, check=False, timeout=60
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            return f"{compiler} cannot compile {SOURCE.name}: {lines[-1]}"
        partial.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{SOURCE.name} cannot be compiled: {error}"
    finally:
        partial.unlink(missing_ok=True)
    return ""
