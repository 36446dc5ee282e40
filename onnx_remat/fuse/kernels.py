"""LLVM text as machine code that can lie anywhere in memory, kept on the disk.

Code is compiled for this machine's processor, linked to one block without addresses in it, and stored under a hash of
its text, the processor's features and the compiler's version; each file begins with a hash of its content, so that what
was cut short or damaged is compiled again. Only the process that opens a step loads LLVM.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import struct
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from onnx_remat.errors import ModelError
from onnx_remat.process.child import Child, Failed

ALIGNMENT = 64

NEEDED = ("avx2", "f16c")
"""What a processor has to have: without, LLVM calls functions of a library for some instructions."""

_FORMAT = "1"
_SIDE_BY_SIDE = 24  # kernels that pay for another process


def why_not() -> str:
    """Why there can be no kernels on this machine, or nothing."""
    import platform

    machine = platform.machine()
    if sys.platform != "linux" or machine != "x86_64":
        return f"kernels are compiled for Linux on x86-64 alone, not for {sys.platform} on {machine}"
    try:
        import llvmlite.binding as llvm
    except ImportError:
        return "llvmlite is not installed: pip install llvmlite"
    features = llvm.get_host_cpu_features()
    missing = [name for name in NEEDED if not features.get(name)]
    return f"this processor has no {missing[0]}" if missing else ""


def compiled(texts: Sequence[str], folder: Path | None = None) -> list[bytes]:
    """Machine code of kernels: found on the disk, or compiled and left there.

    Parameters
    ----------
    texts : sequence of str
        LLVM text, each with a function ``kernel``.
    folder : Path, optional
        Where code is kept; the default is `cache_folder`.
    """
    folder = cache_folder() if folder is None else folder
    wanted = {text: _key(text) for text in texts}
    found = {text: code for text, key in wanted.items() if (code := _kept(folder, key)) is not None}
    missing = [text for text in wanted if text not in found]
    share = missing[: len(missing) // 2] if len(missing) >= _SIDE_BY_SIDE and (os.cpu_count() or 1) > 1 else []
    helper = _other_process(share, folder) if share and folder is not None else None
    for text in missing[len(share) if helper else 0 :]:
        found[text] = _compile(text)
        _keep(folder, wanted[text], found[text])
    if helper is not None:
        with helper, contextlib.suppress(Failed):  # what it leaves undone is compiled here
            helper.answer()
        for text in share:
            code = _kept(folder, wanted[text])
            found[text] = _compile(text) if code is None else code
    return [found[text] for text in texts]


@cache
def cache_folder() -> Path | None:
    """Where compiled code is kept: beside this module, or in the user's cache folder; None if neither can be written.

    Code of others must not run here: the folder has to be the user's own, and writable by nobody else.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for folder in (Path(__file__).parent / "__pycache__", home / "onnx-remat"):
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
            mine = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if mine and os.access(folder, os.W_OK):
                return folder
    return None


def _kept(folder: Path | None, key: str) -> bytes | None:
    if folder is None:
        return None
    try:
        data = (folder / f"{key}.kernel").read_bytes()
    except OSError:
        return None
    digest, code = data[:32], data[32:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def _keep(folder: Path | None, key: str, code: bytes) -> None:
    """Keep code where that can be done: what cannot be kept, on a full disk say, is compiled again next time."""
    if folder is None:
        return
    partial = folder / f"{key}.{os.getpid()}.tmp"
    with contextlib.suppress(OSError):
        partial.write_bytes(hashlib.sha256(code).digest() + code)
        partial.replace(folder / f"{key}.kernel")


def _key(text: str) -> str:
    return hashlib.sha256("\n".join((*_target(), text)).encode()).hexdigest()[:32]


@cache
def _target() -> tuple[str, ...]:
    """What machine code depends on besides its text."""
    import llvmlite
    import llvmlite.binding as llvm

    version = ".".join(str(part) for part in llvm.llvm_version_info)
    features = llvm.get_host_cpu_features().flatten()
    return _FORMAT, llvmlite.__version__, version, llvm.get_default_triple(), llvm.get_host_cpu_name(), features


@cache
def _machine() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    *_, triple, processor, features = _target()
    return llvm.Target.from_triple(triple).create_target_machine(
        cpu=processor, features=features, opt=3, reloc="pic", codemodel="small"
    )


def _compile(text: str) -> bytes:
    """The machine code of a text; its function lies at the beginning."""
    import llvmlite.binding as llvm

    machine = _machine()
    module = llvm.parse_assembly(text)
    module.verify()
    tuning = llvm.create_pipeline_tuning_options(speed_level=3)
    tuning.loop_vectorization = True
    tuning.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, tuning)
    builder.getModulePassManager().run(module, builder)
    return link(machine.emit_object(module))


def _other_process(texts: Sequence[str], folder: Path) -> Child | None:
    """A process that compiles texts and leaves their code in a folder."""
    try:
        child = Child()
    except OSError:
        return None
    child.begin("onnx_remat.fuse.kernels:compile_into", {"texts": texts, "folder": folder}, last=True)
    return child


def compile_into(texts: Sequence[str], folder: str) -> None:
    """Compile texts for another process, and leave their code in a folder."""
    for text in texts:
        _keep(Path(folder), _key(text), _compile(text))


# ---- an object file as one block of code ----

_ALLOCATED, _WRITABLE, _TABLE, _EMPTY = 2, 1, 4, 8  # ELF: flags of a section; types SHT_RELA and SHT_NOBITS
_RELATIVE = {2: "<i", 4: "<i", 24: "<q"}  # ELF for x86-64: R_X86_64_PC32, R_X86_64_PLT32, R_X86_64_PC64


def link(data: bytes) -> bytes:
    """The code of an ELF object file for x86-64 with its constants, as one block that can lie at any 64 bytes.

    Raises
    ------
    ModelError
        The code refers to something outside itself, or by an absolute address.
    """
    sections, names = _sections(data)
    kept = [i for i, s in enumerate(sections) if s[2] & _ALLOCATED and s[5] and not names[i].startswith(".eh_frame")]
    kept.sort(key=lambda i: names[i] != ".text")  # the function first
    image = bytearray()
    base: dict[int, int] = {}
    for i in kept:
        if sections[i][2] & _WRITABLE or sections[i][1] == _EMPTY:
            raise ModelError(f"a kernel cannot be linked: section {names[i]} is for variables")
        image += bytes(-len(image) % max(sections[i][8], 16))
        base[i] = len(image)
        image += data[sections[i][4] : sections[i][4] + sections[i][5]]
    for section in sections:
        if section[1] == _TABLE and section[7] in base:
            _relocate(data, image, sections, section, base)
    return bytes(image + bytes(-len(image) % ALIGNMENT))


_Section = tuple[int, int, int, int, int, int, int, int, int, int]


def _sections(data: bytes) -> tuple[list[_Section], list[str]]:
    """Names of the sections, and headers: name, type, flags, address, offset, size, link, info, alignment, entry."""
    start, size, count, strings = (*struct.unpack_from("<Q", data, 40), *struct.unpack_from("<HHH", data, 58))
    found: list[_Section] = [struct.unpack_from("<IIQQQQIIQQ", data, start + i * size) for i in range(count)]
    offset = found[strings][4]
    return found, [_string(data, offset + section[0]) for section in found]


def _string(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def _relocate(
    data: bytes, image: bytearray, sections: Sequence[_Section], table: _Section, base: dict[int, int]
) -> None:
    """Fill in the distances that a section's code has to its constants."""
    symbols = sections[table[6]]
    for at in range(table[4], table[4] + table[5], 24):
        where, info, addend = struct.unpack_from("<QQq", data, at)
        kind, symbol = info & 0xFFFFFFFF, info >> 32
        name, _, _, home, value, _ = struct.unpack_from("<IBBHQQ", data, symbols[4] + 24 * symbol)
        if kind not in _RELATIVE or home not in base:
            called = _string(data, sections[symbols[6]][4] + name)
            raise ModelError(f"a kernel cannot be linked: it refers to {called or 'a section'!r} (relocation {kind})")
        place = base[table[7]] + where
        struct.pack_into(_RELATIVE[kind], image, place, base[home] + value + addend - place)
