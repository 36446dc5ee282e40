"""Fuse the elementwise nodes of a step, between ordering its nodes and laying out their values.

Fusion is a pure function of the unfused layout. It is used only where it costs nothing: the slab is not larger, and
every output written in place stays so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_remat.messages import Message, Setting

if TYPE_CHECKING:
    import onnx

    from onnx_remat.fuse.ir import Kernel
    from onnx_remat.session.binding import Binding, Program
    from onnx_remat.session.lean_graph import LeanNode


@dataclass(frozen=True, slots=True)
class Fused:
    """Result of fusion: nodes and slab bytes of the unfused step, kernels, and why it runs unfused, if it does."""

    nodes: int
    kernels: int = 0
    why_not: str = ""
    slab: int = 0


MOST_NODES = 20_000
"""Maximum number of nodes of a step to fuse: the time to find groups grows quadratically, to some 10 s here."""

UNFUSED = Message("{}", Setting("fuse", False))
"""Reason of a step that runs unfused by request."""


def why_not(provider: str) -> str:
    """Return why sessions with a provider run unfused in this environment; empty where they fuse."""
    from onnx_remat.fuse import kernels, library
    from onnx_remat.ort import runtime

    if provider != "cpu":
        return f"provider {provider!r}: kernels are compiled for the CPU"
    return library.too_old(runtime.installed()) or library.why_not() or kernels.why_not()


@dataclass(frozen=True, slots=True)
class Refused:
    """Reason why a layout is not fused."""

    why_not: str


@dataclass(frozen=True, slots=True)
class Laid:
    """A step with fused nodes: its program, the layout of its values, and its kernels by handle.

    `members` are the nodes that each kernel replaces, by its first output.
    """

    program: Program
    binding: Binding
    kernels: tuple[Kernel, ...]
    members: Mapping[str, tuple[LeanNode, ...]]


def fused(
    program: Program,
    bound: Binding,
    opset: int,
    constants: Mapping[str, float],
    least: int,
    secret: int,
    seconds: float | None = None,
) -> Laid | Refused:
    """Fuse nodes of a step and lay it out again; return `Refused` where it should run unfused.

    Parameters
    ----------
    program : Program
    bound : Binding
        Layout of `program`.
    opset : int
    constants : mapping of str to float
        Constants of a single number, see `numbers`.
    least : int
        Size in bytes from which on a value is bound.
    secret : int
        Part of the names of kernels.
    seconds : float, optional
        Limit on the search for a small slab.
    """
    from onnx_remat.fuse import blas
    from onnx_remat.fuse.groups import Schedule
    from onnx_remat.fuse.nodes import FusedNode, fuse
    from onnx_remat.session import binding, lean_graph
    from onnx_remat.session.bookkeeping import bookkeeping_bytes

    if len(program.steps) > MOST_NODES:
        return Refused(f"it has over {MOST_NODES} nodes")
    tensors = program.tensors
    counted = {n: tensors[n].nbytes for n in binding.bindable(program, least) if n not in bound.donated}
    schedule = Schedule(
        steps=program.steps,
        tensors=tensors,
        outputs=frozenset(program.outputs),
        root=program.root,
        counted=counted,
        renewed=bound.donated,
        constants=constants,
        overwrites=lambda at, new, old: binding.overwrites_safely(program, at, new, old),
        products=not blas.why_not(),
    )
    found = fuse(schedule, secret)
    if not found.kernels:
        return Refused("no two of its nodes can be fused")
    steps = lean_graph.as_run(
        [
            lean_graph.LeanNode(each.node, plain=each.plain) if isinstance(each, FusedNode) else program.steps[each]
            for each in found.order
        ]
    )
    again = binding.program(steps, tensors, program.inputs, program.outputs, program.kernels, opset)
    laid = binding.bind(again, bound.donated, least, seconds)
    if laid.donated != bound.donated:
        return Refused("less of its state could be renewed in place")
    # A layout may miss its bound by a little, fused or not; fewer nodes save far more bookkeeping than that.
    saved = bookkeeping_bytes(len(program.steps)) - bookkeeping_bytes(len(steps), len(found.kernels))
    if laid.height > bound.height + max(0, saved // 2):
        return Refused(f"its slab would take {laid.height} bytes, not {bound.height}")
    members = {
        each.node.output[0]: tuple(program.steps[at] for at in each.members)
        for each in found.order
        if isinstance(each, FusedNode)
    }
    return Laid(again, replace(laid, not_donated=bound.not_donated), found.kernels, members)


_NUMBERS = (1, 6, 7, 11)  # float32, int32, int64, float64


def numbers(graph: onnx.GraphProto, more: Iterable[onnx.TensorProto] = ()) -> Mapping[str, float]:
    """Return the weights of a single number that are not inputs."""
    from onnx import TensorProto, numpy_helper

    fed = {value.name for value in graph.input}
    return {
        each.name: float(numpy_helper.to_array(each).item())
        for each in (*graph.initializer, *more)
        if each.name not in fed and math.prod(each.dims) == 1 and each.data_type in _NUMBERS
        and each.data_location != TensorProto.EXTERNAL
    }  # fmt: skip


def write(kernels: tuple[Kernel, ...], secret: int, path: Path) -> None:
    """Compile kernels and write them with their descriptions to a file for `offered`."""
    from onnx_remat.fuse.kernels import compiled

    codes = compiled([kernel.text for kernel in kernels])
    place: dict[bytes, int] = {}
    code = bytearray()
    for each in codes:
        if each not in place:
            place[each] = len(code)
            code += each
    described = [kernel.numbers(place[each]) for kernel, each in zip(kernels, codes, strict=True)]
    calling = {i: len(kernel.sizes) for i, kernel in enumerate(kernels) if kernel.scratch}
    head = json.dumps({"secret": secret, "kernels": described, "calling": list(calling.items())}).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + code)


@contextmanager
def offered(path: Path) -> Iterator[None]:
    """Within the block, make the kernels in a file available to the model that they were written for."""
    from onnx_remat.fuse import blas, library

    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:end])
    for handle, sizes in head["calling"]:
        numbers = head["kernels"][handle]
        numbers[len(numbers) - sizes] = blas.address()
    with library.offered(head["secret"], data[end:], head["kernels"]):
        yield


def kernels_of(copy: Path) -> Path:
    """Return the path of the kernels of a lean graph."""
    return copy.with_suffix(".kernels")
