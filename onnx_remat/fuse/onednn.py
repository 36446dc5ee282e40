"""Convolutions and their gradients by oneDNN, where the package ``onednn-cpu-gomp`` is installed.

oneDNN chooses the formats it computes in. This module asks it for those and compiles its primitives, once for each
distinct convolution of a process; ``convolution.c`` calls them from ONNX Runtime's threads. oneDNN starts no threads
itself.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any

from onnx_remat.errors import ModelError
from onnx_remat.messages import Setting

PACKAGE = "onednn-cpu-gomp"

FORWARD, IMAGES, WEIGHTS = "forward", "images", "weights"
"""What is computed: the output, or the gradient of the images or of the weights."""

CHUNK_BYTES = 1 << 20
"""Approximate bytes of a chunk's images and output: copies in oneDNN's formats stay in a core's cache."""

SHARE = 8
"""Copies of all parts take at most about the bytes of all images and output divided by this, down to `LEAST_CHUNK`."""

LEAST_CHUNK = 1 << 16

SUM_BYTES = 1 << 21
"""Most bytes of all parts' sums of a weight gradient; larger ones are computed by output channels, not by images."""

LEAST_CHANNELS = 16
"""Least output channels of a part."""


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution of float32, or one of its gradients.

    Attributes
    ----------
    kind : str
        `FORWARD`, `IMAGES` or `WEIGHTS`.
    images, output : tuple of int
        Shapes: batch, channels, spatial axes.
    kernel, strides, dilations, begin, end : tuple of int
        By spatial axis, as in ONNX.
    group : int
    bias, added, relu : bool
        Whether a bias is added, then a value as large as the output, and whether negative elements then become 0
        (`FORWARD` only).
    """

    kind: str
    images: tuple[int, ...]
    output: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]
    group: int = 1
    bias: bool = False
    added: bool = False
    relu: bool = False

    @classmethod
    def of(cls, stated: Mapping[str, Any]) -> Convolution:
        """Return a convolution from JSON data."""
        given: dict[str, Any] = {}
        for name, value in stated.items():
            given[name] = tuple(value) if isinstance(value, list) else value
        return cls(**given)

    @property
    def weights(self) -> tuple[int, ...]:
        """Shape of the weights."""
        return self.output[1], self.images[1] // self.group, *self.kernel

    @property
    def work(self) -> int:
        """Number of multiplications."""
        return prod(self.output) * prod(self.weights[1:])


@dataclass(frozen=True, slots=True)
class Parts:
    """How a convolution is divided among threads.

    Attributes
    ----------
    images : int
        Of a chunk; the last chunk may have fewer.
    chunks : int
    batch, channels : int
        Parts of the batch, and of the output channels (weight gradients only).
    """

    images: int
    chunks: int
    batch: int
    channels: int

    @property
    def count(self) -> int:
        return self.batch * self.channels


def parts(of: Convolution, threads: int = 0) -> Parts:
    """Divide a convolution into parts for some threads (the processor's), and a part's images into chunks."""
    batch, channels = min(threads or os.cpu_count() or 1, of.images[0]), 1
    if of.kind == WEIGHTS and of.group == 1:
        while batch > 1 and batch * 4 * prod(of.weights) > SUM_BYTES and _halved(of, channels):
            batch, channels = -(-batch // 2), 2 * channels
    each = -(-of.images[0] // batch)
    bytes_each = 4 * (prod(of.images[1:]) + prod(of.output[1:]) // channels)
    limit = min(CHUNK_BYTES, max(LEAST_CHUNK, bytes_each * of.images[0] // (SHARE * batch)))
    if of.kind == WEIGHTS:  # a second chunk takes another sum
        limit = max(limit, 4 * prod(of.weights) // channels)
    chunks = -(-each // max(1, min(each, limit // bytes_each)))
    images = -(-of.images[0] // (batch * chunks))
    count = -(-of.images[0] // images)
    return Parts(images, count, min(batch, count), channels)


def _halved(of: Convolution, channels: int) -> bool:
    """Return whether twice as many parts of the output channels are possible."""
    return of.output[1] % (2 * channels) == 0 and of.output[1] // (2 * channels) >= LEAST_CHANNELS


@cache
def is_made_for(of: Convolution) -> bool:
    """Whether oneDNN compiles code for such a convolution, rather than to compute columns and their products."""
    dnn, name = _loaded(), ctypes.c_char_p()
    try:
        made = _formats(of, of.images[0], 1).made
    except ModelError:
        return False
    dnn.check(dnn.c.dnnl_primitive_desc_query(made, ctypes.c_int(_IMPLEMENTATION), 0, ctypes.byref(name)))
    return (name.value or b"").startswith(b"jit")


# ---- oneDNN's C interface (https://uxlfoundation.github.io/oneDNN, version 3) ----

_FLOAT, _ANY, _CPU, _DIRECT, _TRAINING, _BY_CALLER = 3, 1, 1, 1, 64, 1
_IMPLEMENTATION = 8
_QUERIES = {  # descriptions of images, weights, output, by kind
    FORWARD: (129, 131, 133), IMAGES: (130, 131, 134), WEIGHTS: (129, 132, 134),
}  # fmt: skip
_ARGUMENTS = {FORWARD: (1, 33, 17), IMAGES: (129, 33, 145), WEIGHTS: (1, 161, 145)}
_BIAS, _SCRATCHPAD = 41, 136
_INPUTS = {FORWARD: (0, 1, -1), IMAGES: (-1, 1, 0), WEIGHTS: (0, -1, 1)}
"""Which input of the node each is; -1 for what is computed."""

_FUNCTIONS = ("dnnl_stream_create", "dnnl_stream_destroy", "dnnl_memory_create", "dnnl_memory_destroy",
              "dnnl_primitive_execute", "omp_get_max_threads", "omp_set_num_threads")  # fmt: skip


@cache
def why_not() -> str:
    """Return why this process has no convolutions of oneDNN, or an empty text."""
    if _installed() is None:
        return f"{PACKAGE} is not installed: pip install {PACKAGE}"
    try:
        library = _loaded()
    except (OSError, AttributeError) as error:
        return f"{PACKAGE} cannot be loaded: {error}"
    return "" if library.version == _MAJOR else f"{PACKAGE} has version {library.version} of oneDNN, not {_MAJOR}"


_MAJOR = 3


def _installed() -> Path | None:
    """Return the library of the package."""
    try:
        listed = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None
    name = f"libdnnl.so.{_MAJOR}"
    found = [Path(str(each.locate())) for each in listed if each.name == name]
    return next((path.resolve() for path in (*found, Path(sys.prefix, "lib", name)) if path.is_file()), None)


class _Library:
    """The functions of oneDNN, its engine, and what was made with them: both live as long as the process."""

    def __init__(self, path: Path) -> None:
        self.c = ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
        self.c.dnnl_primitive_desc_query_md.restype = ctypes.c_void_p
        self.c.dnnl_memory_desc_get_size.restype = ctypes.c_size_t
        self.c.dnnl_version.restype = ctypes.POINTER(ctypes.c_int)
        self.version = self.c.dnnl_version()[0]
        self.engine = self.new("dnnl_engine_create", ctypes.c_int(_CPU), ctypes.c_size_t(0))
        self.attributes = self.new("dnnl_primitive_attr_create")
        self.check(self.c.dnnl_primitive_attr_set_scratchpad_mode(self.attributes, ctypes.c_int(_BY_CALLER)))

    def check(self, status: int) -> None:
        if status:
            raise ModelError(f"oneDNN refuses a convolution (status {status}): pass {{}}", Setting("fuse", False))

    def new(self, function: str, *given: Any) -> ctypes.c_void_p:
        """Return the object that a function makes."""
        made = ctypes.c_void_p()
        self.check(getattr(self.c, function)(ctypes.byref(made), *given))
        return made

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """Within the block, primitives made in this thread are for one thread."""
        before = self.c.omp_get_max_threads()
        self.c.omp_set_num_threads(1)
        try:
            yield
        finally:
            self.c.omp_set_num_threads(before)

    def plain(self, shape: Sequence[int], strides: Sequence[int] = ()) -> ctypes.c_void_p:
        """Return the description of a tensor that lies as ONNX Runtime has it."""
        strides = strides or [prod(shape[axis + 1 :]) for axis in range(len(shape))]
        numbers = ctypes.c_int(len(shape)), _longs(shape), ctypes.c_int(_FLOAT), _longs(strides)
        return self.new("dnnl_memory_desc_create_with_strides", *numbers)

    def any(self, shape: Sequence[int]) -> ctypes.c_void_p:
        """Return the description of a tensor whose format oneDNN chooses."""
        numbers = ctypes.c_int(len(shape)), _longs(shape), ctypes.c_int(_FLOAT), ctypes.c_int(_ANY)
        return self.new("dnnl_memory_desc_create_with_tag", *numbers)

    def size(self, description: ctypes.c_void_p) -> int:
        return int(self.c.dnnl_memory_desc_get_size(description))

    def same(self, one: ctypes.c_void_p, other: ctypes.c_void_p) -> bool:
        return bool(self.c.dnnl_memory_desc_equal(one, other))

    def reorder(self, one: ctypes.c_void_p, other: ctypes.c_void_p) -> int:
        """Compile a copy from one format to another; return its handle."""
        made = self.new("dnnl_reorder_primitive_desc_create", one, self.engine, other, self.engine, self.attributes)
        return _handle(self.new("dnnl_primitive_create", made))


def _longs(numbers: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _handle(pointer: ctypes.c_void_p) -> int:
    assert pointer.value is not None
    return pointer.value


def load() -> None:
    """Load oneDNN, and the parts of it that compile convolutions."""
    for kind in (FORWARD, IMAGES, WEIGHTS):
        for stride in (1, 2):
            images, output = (1, 16, 8, 8), (1, 16, 8 // stride, 8 // stride)
            numbers(Convolution(kind, images, output, (3, 3), (stride, stride), (1, 1), (1, 1), (2 - stride, 1)))


@cache
def _loaded() -> _Library:
    path = _installed()
    assert path is not None
    return _Library(path)


@dataclass(frozen=True, slots=True, eq=False)
class _Formats:
    """What oneDNN chooses for a chunk.

    Attributes
    ----------
    made : c_void_p
        Description of the primitive.
    images : int
    plain, own : tuple of c_void_p
        Formats of images, weights and output: ONNX Runtime's, and oneDNN's.
    scratchpad : c_void_p or None
    """

    made: ctypes.c_void_p
    images: int
    plain: tuple[ctypes.c_void_p, ...]
    own: tuple[ctypes.c_void_p, ...]
    scratchpad: ctypes.c_void_p | None


@cache
def _formats(of: Convolution, images: int, channels: int, like: _Formats | None = None) -> _Formats:
    """Ask oneDNN for its formats of a chunk of `images`, for one of so many parts of the output channels.

    The weights' format is that of `like`, if given: all chunks share one copy, or one sum.
    """
    dnn = _loaded()
    out, spatial = of.output[1] // channels, of.output[2:]
    weights: tuple[int, ...] = (out, *of.weights[1:])
    if of.group > 1:
        weights = (of.group, out // of.group, *of.weights[1:])
    shapes = (images, *of.images[1:]), weights, (images, out, *spatial)
    skipped = [prod(of.output[axis + 1 :]) for axis in range(len(of.output))]
    plain = dnn.plain(shapes[0]), dnn.plain(shapes[1]), dnn.plain(shapes[2], skipped)
    wanted = dnn.any(shapes[0]), dnn.any(shapes[1]) if like is None else like.own[1], dnn.any(shapes[2])
    how = _longs(of.strides), _longs([d - 1 for d in of.dilations]), _longs(of.begin), _longs(of.end)
    x, w, y = wanted
    bias = dnn.plain((of.output[1],)) if of.bias else None
    direct = ctypes.c_int(_DIRECT)
    with dnn.one_thread():
        made = dnn.new(
            "dnnl_convolution_forward_primitive_desc_create", dnn.engine, ctypes.c_int(_TRAINING), direct, x,
            dnn.any(shapes[1]) if of.kind == WEIGHTS else w, bias, y, *how, dnn.attributes,
        )  # fmt: skip
        if of.kind == IMAGES:
            made = dnn.new(
                "dnnl_convolution_backward_data_primitive_desc_create", dnn.engine, direct, x, w, y, *how, made,
                dnn.attributes,
            )  # fmt: skip
        elif of.kind == WEIGHTS:
            made = dnn.new(
                "dnnl_convolution_backward_weights_primitive_desc_create", dnn.engine, direct, x, w, None, y, *how,
                made, dnn.attributes,
            )  # fmt: skip

    def queried(what: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(dnn.c.dnnl_primitive_desc_query_md(made, ctypes.c_int(what), ctypes.c_int(0)))

    own = tuple(queried(what) for what in _QUERIES[of.kind])
    rest = queried(_SCRATCHPAD)
    return _Formats(made, images, plain, own, rest if rest.value and dnn.size(rest) else None)


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Offsets and sizes in scratch memory, in bytes; see ``convolution.c``."""

    at: tuple[int, int, int]
    total: int
    shared: int
    each: int
    sum: int
    addend: int
    rest: int


@cache
def _scratch(of: Convolution, divided: Parts) -> _Scratch:
    dnn = _loaded()
    usual, last = _both(of, divided)
    shared = each = 0
    at = [0, 0, 0]
    for i, (plain, own) in enumerate(zip(usual.plain, usual.own, strict=True)):
        if i == 1:
            if of.kind != WEIGHTS and not dnn.same(plain, own):
                shared = _rounded(dnn.size(own))
        elif not dnn.same(plain, own) or not dnn.same(last.plain[i], last.own[i]):
            at[i] = each
            each += _rounded(max(dnn.size(own), dnn.size(last.own[i])))
    own_weights = _rounded(dnn.size(usual.own[1])) if of.kind == WEIGHTS else 0
    total, addend = each, each + own_weights
    more = own_weights if divided.chunks > divided.batch else 0
    rest = addend + more
    pads = [dnn.size(found.scratchpad) for found in (usual, last) if found.scratchpad is not None]
    return _Scratch((at[0], at[1], at[2]), total, shared, rest + _rounded(max(pads, default=0)), total, addend, rest)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


def _both(of: Convolution, divided: Parts) -> tuple[_Formats, _Formats]:
    """Return the formats of a chunk, and those of the last one."""
    usual = _formats(of, divided.images, divided.channels)
    left = of.images[0] - (divided.chunks - 1) * divided.images
    if left == divided.images:
        return usual, usual
    return usual, _formats(of, left, divided.channels, usual)


def scratch_bytes(of: Convolution) -> int:
    """Return the bytes of scratch memory that a convolution takes while it runs.

    Raises
    ------
    ModelError
        oneDNN has no such convolution.
    """
    divided = parts(of)
    found = _scratch(of, divided)
    return found.shared + divided.count * found.each + 64


def planned(of: Convolution) -> tuple[int, int]:
    """Return the parts of a convolution, and the elements of its scratch memory: both are part of a kernel.

    They depend on the number of processors and on the instructions that oneDNN uses (``ONEDNN_MAX_CPU_ISA``), so they
    may differ in another process.

    Raises
    ------
    ModelError
        oneDNN has no such convolution.
    """
    return parts(of).count, -(-scratch_bytes(of) // 4)


@cache
def numbers(of: Convolution) -> tuple[int, ...]:
    """Compile the primitives of a convolution; return its numbers for ``convolution.c``, for this process alone."""
    dnn, divided = _loaded(), parts(of)
    found = _scratch(of, divided)
    calls = [_call(of, divided, formats, found) for formats in _both(of, divided)]
    floats = dnn.size(_both(of, divided)[0].own[1]) // 4
    addresses = [_address(dnn, name) for name in _FUNCTIONS]
    return (
        _INPUTS[of.kind].index(-1), divided.chunks, divided.batch, divided.channels, found.shared, found.each,
        found.sum, found.addend, found.rest, floats, 2 + of.bias if of.added else -1, int(of.relu), *calls[0],
        *calls[1], _handle(dnn.engine), *addresses,
    )  # fmt: skip


def _address(dnn: _Library, name: str) -> int:
    return _handle(ctypes.cast(getattr(dnn.c, name), ctypes.c_void_p))


def _call(of: Convolution, divided: Parts, formats: _Formats, scratch: _Scratch) -> list[int]:
    dnn = _loaded()
    with dnn.one_thread():
        primitive = _handle(dnn.new("dnnl_primitive_create", formats.made))
    out = of.output[1] // divided.channels
    per_chunk = divided.images * prod(of.images[1:]), 0, divided.images * prod(of.output[1:])
    per_part = 0, out * prod(of.weights[1:]), out * prod(of.output[2:])
    made = formats.images * prod(of.output[1:])
    call = [primitive, 0 if formats.scratchpad is None else _handle(formats.scratchpad), made]
    with dnn.one_thread():
        for i in range(3):
            plain, own = formats.plain[i], formats.own[i]
            copied = (of.kind == WEIGHTS and i == 1) or not dnn.same(plain, own)
            back = _INPUTS[of.kind][i] < 0
            reorder = dnn.reorder(*((own, plain) if back else (plain, own))) if copied else 0
            call += [
                _ARGUMENTS[of.kind][i], _INPUTS[of.kind][i], per_chunk[i], per_part[i] if divided.channels > 1 else 0,
                _handle(plain), _handle(own) if copied else 0, reorder, scratch.at[i],
            ]  # fmt: skip
    bias = [_BIAS, 2, 0, 0, _handle(dnn.plain((of.output[1],))), 0, 0, 0] if of.bias else [0] * 8
    return call + bias
