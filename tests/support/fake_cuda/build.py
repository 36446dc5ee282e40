"""Builds the fake device for one installed onnxruntime-gpu; needs gcc and binutils, takes seconds.

Every CUDA symbol that the provider's library asks for exists in `libfake.so`: written in device.c, or generated here
to report success. Under each library name that the provider asks for lies an empty library that leads to it: glibc
refuses symbols without versions in a library that it looks for versions in.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = tuple(Path(__file__).with_name(name) for name in ("device.c", "warp.c"))
TOOLS = ("gcc", "readelf", "nm", "strings")
_SYMBOL = re.compile(r"(__cuda|cuda|cublas|cublasLt|cudnn|cufft|curand|nvrtc|cupti|cu)[A-Z]\w+")
_NO_FUNCTION = ("cudaError", "cudaDevAttr")


def missing_tools() -> list[str]:
    """What has to be installed first."""
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def build(provider: Path, folder: Path) -> Path:
    """The folder under `folder` with the fake libraries for `provider`, made where it is not there yet."""
    read = b"".join(path.read_bytes() for path in (*SOURCES, Path(__file__)))
    key = hashlib.sha256(read + str(provider.stat().st_mtime_ns).encode())
    made = folder / key.hexdigest()[:16]
    if made.exists():
        return made
    folder.mkdir(exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=folder))  # workers of one run may build at once
    libraries = re.findall(r"\[(lib(?:cu|nv).*?)\]", _run("readelf", "-d", provider))
    release = re.search(r"libcudart\.so\.(\d+)", " ".join(libraries))
    assert release, f"{provider} needs no libcudart"
    by_name = {"libcuda.so.1", "libcudnn.so.9", "libcufft.so.12" if int(release[1]) > 12 else "libcufft.so.11"}
    _compile(provider, int(release[1]), unfinished)
    for library in sorted({*libraries, *by_name}):  # some versions open the latter themselves
        _run(
            "gcc", "-shared", "-x", "c", "/dev/null", "-x", "none",
            f"-Wl,-soname,{library},--no-as-needed,-rpath,$ORIGIN",
            unfinished / "libfake.so", "-o", unfinished / library,
        )  # fmt: skip
    try:
        unfinished.rename(made)
    except OSError:  # another was first
        shutil.rmtree(unfinished)
    return made


def _compile(provider: Path, release: int, folder: Path) -> None:
    stubs = folder / "stubs.c"
    objects = [folder / f"{source.stem}.o" for source in SOURCES]
    for source, made in zip(SOURCES, objects, strict=True):
        _run("gcc", "-O1", "-w", "-fPIC", f"-DFAKE_CUDA={release}", "-c", source, "-o", made)
    written = set(_run("nm", "--defined-only", *objects).split())
    asked = {line.split()[-1].split("@")[0] for line in _run("nm", "-D", "--undefined-only", provider).splitlines()}
    asked |= set(_run("strings", "-n", "5", provider).splitlines())  # some are looked up by name
    lines = ["#include <stdlib.h>"]
    for name in sorted(asked - written):
        if _SYMBOL.fullmatch(name) and not name.startswith(_NO_FUNCTION):
            makes = "*out = calloc(1, 4096); " if re.search(r"Create|Instantiate", name) else ""
            lines.append(f"int {name}(void **out) {{ {makes}return 0; }}")
    stubs.write_text("\n".join(lines) + "\n")
    _run(
        "gcc", "-w", "-fPIC", "-shared", "-Wl,-soname,libfake.so", "-o", folder / "libfake.so", *objects, stubs,
        "-lpthread",
    )  # fmt: skip


def _run(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True)
    return done.stdout
