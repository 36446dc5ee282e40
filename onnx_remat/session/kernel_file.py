"""The kernels of a lean graph in a file next to it: compiled when a step is planned, offered when it is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from onnx_remat.errors import ModelError
from onnx_remat.messages import Setting

if TYPE_CHECKING:
    from onnx_remat.fuse.kernel import Kernel
    from onnx_remat.session.copies import Copy

_LEAST_CODE = 64  # bytes, so that a table without code of its own has memory


def path_of(copy: Path) -> Path:
    """Return the path of the kernels of a lean graph."""
    return copy.with_suffix(".kernels")


def write(kernels: tuple[Kernel, ...], secret: int, path: Path, copies: tuple[Copy, ...] = (), pinned: int = 0) -> None:
    """Compile kernels and write them with their descriptions to a file for `offered`, and copies as in `SlabLayout`."""
    from onnx_remat.fuse import cuda
    from onnx_remat.fuse.machine_code import compiled

    coded = [kernel for kernel in kernels if kernel.convolution is None and not kernel.device]
    codes = dict(zip(coded, compiled([kernel.text for kernel in coded]), strict=True))
    place: dict[bytes, int] = {}
    code = bytearray(_LEAST_CODE)
    for each in codes.values():
        if each not in place:
            place[each] = len(code)
            code += each
    texts = list(dict.fromkeys(kernel.text for kernel in kernels if kernel.device))
    ptx = cuda.module(texts) if texts else b""
    on_device = [(i, cuda.name_of(texts.index(each.text))) for i, each in enumerate(kernels) if each.device]
    described = [kernel.numbers(place[codes[kernel]] if kernel in codes else -1) for kernel in kernels]
    described += [copy.numbers() for copy in copies]
    calling = {i: len(kernel.sizes) for i, kernel in enumerate(kernels) if kernel.calls_blas}
    convolved = [
        (i, asdict(kernel.convolution), (kernel.size, *kernel.outputs[1][1]))
        for i, kernel in enumerate(kernels)
        if kernel.convolution is not None
    ]
    head = json.dumps(
        {
            "secret": secret, "kernels": described, "calling": list(calling.items()), "convolutions": convolved,
            "ptx": len(ptx), "on_device": on_device, "copies": [copy.stated() for copy in copies], "pinned": pinned,
        }
    ).encode()  # fmt: skip
    path.write_bytes(len(head).to_bytes(8, "little") + head + ptx + code)


@contextmanager
def offered(path: Path, runs: bool = True, state: int = 0) -> Iterator[None]:
    """Within the block, make the kernels in a file available to the model that they were written for.

    Copies get memory of the host only if the model `runs`; `state` is the address of the step's state there.

    Raises
    ------
    ModelError
        Convolutions are computed otherwise here than planned, the system refuses the kernels, or the host has too
        little memory for copies.
    """
    from onnx_remat.fuse import blas, onednn, shim

    with path.open("rb") as stream:
        head = _head(stream)
        ptx, code = stream.read(head["ptx"]), stream.read()
    if reason := _unlike(head):
        raise ModelError("fused kernels cannot run as planned: {}: pass {}", reason, Setting("fuse", False))
    for handle, sizes in head["calling"]:
        numbers = head["kernels"][handle]
        numbers[len(numbers) - sizes] = blas.address()
    for handle, stated, _ in head["convolutions"]:
        head["kernels"][handle] += onednn.numbers(onednn.Convolution.of(stated))
    with shim.offered(head["secret"], code, head["kernels"], ptx, dict(head["on_device"])):
        if runs and head["copies"]:
            from onnx_remat.session import device_copies

            first = len(head["kernels"]) - len(head["copies"])
            device_copies.enable(head["secret"], first, head["copies"], head["pinned"], state)
        yield


def fit_here(path: Path) -> bool:
    """Whether the kernels in a file can run in this process as they were planned."""
    with path.open("rb") as stream:
        return not _unlike(_head(stream))


def _head(stream: IO[bytes]) -> dict[str, Any]:
    """Return the description of kernels, with which a file begins."""
    described: dict[str, Any] = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return described


def _unlike(head: Mapping[str, Any]) -> str:
    """Return why convolutions are computed otherwise here than planned, or an empty text.

    In other parts they would leave out some of the batch; with more scratch memory they would write past its end.
    """
    from onnx_remat.fuse import onednn

    if not head["convolutions"]:
        return ""
    if why_not := onednn.why_not():
        return why_not
    if all([*onednn.planned(onednn.Convolution.of(of))] == planned for _, of, planned in head["convolutions"]):
        return ""
    return "oneDNN has another number of processors here, or another ONEDNN_MAX_CPU_ISA"
