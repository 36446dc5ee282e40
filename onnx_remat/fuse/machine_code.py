"""Compilation of LLVM text to position-independent machine code, cached on the disk.

Code is compiled for this machine's processor, linked to one block without absolute addresses, and stored under a hash
of its text, the processor's features and the compiler's version; each file begins with a hash of its content, so that a
truncated or damaged file is compiled again. The process that plans a step loads LLVM; the one that trains does not.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from onnx_remat.errors import ModelError
from onnx_remat.process.cache import cache_folder, count_as_used, replacing, tidy
from onnx_remat.process.child import Child, Failed

ALIGNMENT = 64

NEEDED = ("avx2", "f16c", "fma")
"""Required processor features: without them, LLVM calls library functions for some instructions."""

_FORMAT = "1"
_LEAST_KERNELS_FOR_HELPER = 24  # kernels to compile from which on a second process is worthwhile


def why_not() -> str:
    """Return why this machine cannot have kernels, or an empty text."""
    import platform

    machine = platform.machine()
    if sys.platform != "linux" or machine != "x86_64":
        return f"kernels are compiled only for Linux on x86-64, not for {sys.platform} on {machine}"
    try:
        import llvmlite.binding as llvm
    except ImportError:
        return "llvmlite is not installed: pip install llvmlite"
    features = llvm.get_host_cpu_features()
    missing = [name for name in NEEDED if not features.get(name)]
    return f"this processor has no {missing[0]}" if missing else ""


@cache
def has_avx512() -> bool:
    """Whether this processor computes 16 numbers at a time."""
    import llvmlite.binding as llvm

    return bool(llvm.get_host_cpu_features().get("avx512f"))


def compiled(texts: Sequence[str], folder: Path | None = None) -> list[bytes]:
    """Return the machine code of kernels: found in the cache on the disk, or compiled and stored there.

    Parameters
    ----------
    texts : sequence of str
        LLVM texts, each with a function ``kernel``.
    folder : Path, optional
        Cache folder; the default is `cache_folder`.
    """
    folder = cache_folder() if folder is None else folder
    wanted = {text: _key(text) for text in texts}
    found = {text: code for text, key in wanted.items() if (code := _load(folder, key)) is not None}
    missing = [text for text in wanted if text not in found]
    share = (
        missing[: len(missing) // 2] if len(missing) >= _LEAST_KERNELS_FOR_HELPER and (os.cpu_count() or 1) > 1 else []
    )
    helper = _other_process(share, folder) if share and folder is not None else None
    for text in missing[len(share) if helper else 0 :]:
        found[text] = _compile(text)
        _store(folder, wanted[text], found[text])
    if helper is not None:
        with helper, contextlib.suppress(Failed):  # kernels that it does not finish are compiled below
            helper.answer()
        for text in share:
            code = _load(folder, wanted[text])
            found[text] = _compile(text) if code is None else code
    if missing and folder is not None:
        tidy(folder)
    return [found[text] for text in texts]


def _load(folder: Path | None, key: str) -> bytes | None:
    if folder is None:
        return None
    path = folder / f"{key}.kernel"
    try:
        data = path.read_bytes()
    except OSError:
        return None
    count_as_used(path)
    digest, code = data[:32], data[32:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def _store(folder: Path | None, key: str, code: bytes) -> None:
    """Store code in the cache; if that fails, on a full disk say, the code is compiled again next time."""
    if folder is None:
        return
    with contextlib.suppress(OSError), replacing(folder / f"{key}.kernel") as partial:
        partial.write_bytes(hashlib.sha256(code).digest() + code)


def _key(text: str) -> str:
    return hashlib.sha256("\n".join((*_target(), text)).encode()).hexdigest()[:32]


@cache
def _target() -> tuple[str, ...]:
    """Return everything that machine code depends on besides its text."""
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
    """Compile a text to machine code, which begins with the function."""
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
    """Start a process that compiles texts and stores their code in a folder; None if that fails."""
    try:
        child = Child()
    except OSError:
        return None
    child.begin("onnx_remat.fuse.machine_code:compile_into", {"texts": texts, "folder": folder}, last=True)
    return child


def compile_into(texts: Sequence[str], folder: str) -> None:
    """Compile texts for another process, and store their code in a folder."""
    for text in texts:
        _store(Path(folder), _key(text), _compile(text))


# ---- an object file as one block of code ----

_ALLOCATED, _WRITABLE, _TABLE, _EMPTY = 2, 1, 4, 8  # ELF: flags of a section; types SHT_RELA and SHT_NOBITS
_RELATIVE = {2: "<i", 4: "<i", 24: "<q"}  # ELF for x86-64: R_X86_64_PC32, R_X86_64_PLT32, R_X86_64_PC64


def link(data: bytes) -> bytes:
    """Link an ELF object file for x86-64 to one block of code and constants that runs at any multiple of 64 bytes.

    Raises
    ------
    ModelError
        The code refers to a symbol outside itself, or to an absolute address.
    """
    sections, names = _sections(data)
    kept = [i for i, s in enumerate(sections) if s[2] & _ALLOCATED and s[5] and not names[i].startswith(".eh_frame")]
    kept.sort(key=lambda i: names[i] != ".text")  # the function first
    image = bytearray()
    base: dict[int, int] = {}
    for i in kept:
        if sections[i][2] & _WRITABLE or sections[i][1] == _EMPTY:
            raise ModelError(f"a kernel cannot be linked: section {names[i]} has variables")
        image += bytes(-len(image) % max(sections[i][8], 16))
        base[i] = len(image)
        image += data[sections[i][4] : sections[i][4] + sections[i][5]]
    for section in sections:
        if section[1] == _TABLE and section[7] in base:
            _relocate(data, image, sections, section, base)
    return bytes(image + bytes(-len(image) % ALIGNMENT))


_Section = tuple[int, int, int, int, int, int, int, int, int, int]


def _sections(data: bytes) -> tuple[list[_Section], list[str]]:
    """Return headers (name, type, flags, address, offset, size, link, info, alignment, entry) and names of sections."""
    start, size, count, strings = (*struct.unpack_from("<Q", data, 40), *struct.unpack_from("<HHH", data, 58))
    found: list[_Section] = [struct.unpack_from("<IIQQQQIIQQ", data, start + i * size) for i in range(count)]
    offset = found[strings][4]
    return found, [_string(data, offset + section[0]) for section in found]


def _string(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def _relocate(
    data: bytes, image: bytearray, sections: Sequence[_Section], table: _Section, base: dict[int, int]
) -> None:
    """Fill in the relative addresses of constants in a section's code."""
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
