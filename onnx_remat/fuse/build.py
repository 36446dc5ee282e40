"""Build of the custom-op library from C; imports only the standard library, as the wheel's build hook loads it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = tuple(Path(__file__).with_name(name) for name in ("shim.c", "convolution.c"))
FLAGS = ("-O2", "-std=c11", "-fPIC", "-shared")


def library_name() -> str:
    """Return the file name of the library; it depends on the sources, so that a stale library is never used."""
    version = hashlib.sha256(b"".join(source.read_bytes() for source in SOURCES)).hexdigest()[:16]
    return f"libonnx_remat_fused-{version}.so"


def build(folder: Path) -> str:
    """Compile the library into a folder; return why that failed, or an empty text."""
    named = os.environ.get("CC", "")
    compiler = next((found for name in (named, "cc", "gcc", "clang") if name and (found := shutil.which(name))), None)
    if compiler is None:
        return "there is no C compiler (cc, gcc or clang)"
    target = folder / library_name()
    partial = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(".tmp", f"{target.stem}.", folder)
        os.close(handle)
        partial = Path(name)
        command = [compiler, *FLAGS, *map(str, SOURCES), "-o", str(partial)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            return f"{compiler} cannot compile {SOURCES[0].name}: {lines[-1]}"
        partial.chmod(0o755)  # in a wheel it is for all users; some linkers keep mkstemp's 0600
        partial.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{SOURCES[0].name} cannot be compiled: {error}"
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)
    return ""
