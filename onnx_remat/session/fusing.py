"""A step with its elementwise nodes fused: between the order of its nodes and the layout of their values.

Fusing is a pure function of what was laid out unfused. It is kept only where it costs nothing: the slab is no larger,
and every output that renews an input in place still does.
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
    """What became of a step: nodes before, kernels, and why it runs unfused, if it does; `slab` bytes it takes then."""

    nodes: int
    kernels: int = 0
    why_not: str = ""
    slab: int = 0


MOST_NODES = 20_000
"""Of a step that is fused: groups are found in time that grows with the square of its nodes, some 10 s here."""

UNFUSED = Message("{}", Setting("fuse", False))
"""Why a step runs unfused that was asked to."""


def why_not(provider: str) -> str:
    """Why sessions that this environment opens with a provider run unfused, or nothing."""
    from onnx_remat.fuse import kernels, library
    from onnx_remat.ort import runtime

    if provider != "cpu":
        return f"provider {provider!r}: kernels are compiled for the CPU"
    return library.too_old(runtime.installed()) or library.why_not() or kernels.why_not()


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a step that was laid out is not fused."""

    why_not: str


@dataclass(frozen=True, slots=True)
class Laid:
    """A step with fused nodes: as it runs, what is bound where, and its kernels by handle.

    `members`: the steps that each kernel computes, by the first value that it makes.
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
    """A laid out step with fused nodes, laid out anew; or why it is to run as it is.

    Parameters
    ----------
    program : Program
    bound : Binding
        Of that program.
    opset : int
    constants : mapping of str to float
        Values that are known to be one number, see `numbers`.
    least : int
        Bytes from which on a value is bound.
    secret : int
        Under which nodes name their kernels.
    seconds : float, optional
        That the search for a low slab may take at most.
    """
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
    # A layout may miss its bound by a little, fused or not; what fewer nodes save of bookkeeping is more, by far.
    saved = bookkeeping_bytes(len(program.steps)) - bookkeeping_bytes(len(steps), len(found.kernels))
    if laid.height > bound.height + saved // 2:
        return Refused(f"its slab would take {laid.height} bytes, not {bound.height}")
    members = {
        each.node.output[0]: tuple(program.steps[at] for at in each.members)
        for each in found.order
        if isinstance(each, FusedNode)
    }
    return Laid(again, replace(laid, not_donated=bound.not_donated), found.kernels, members)


_NUMBERS = (1, 6, 7, 11)  # float32, int32, int64, float64


def numbers(graph: onnx.GraphProto, more: Iterable[onnx.TensorProto] = ()) -> Mapping[str, float]:
    """Weights of one number that nobody can feed."""
    from onnx import TensorProto, numpy_helper

    fed = {value.name for value in graph.input}
    return {
        each.name: float(numpy_helper.to_array(each).item())
        for each in (*graph.initializer, *more)
        if each.name not in fed and math.prod(each.dims) == 1 and each.data_type in _NUMBERS
        and each.data_location != TensorProto.EXTERNAL
    }  # fmt: skip


def write(kernels: tuple[Kernel, ...], secret: int, path: Path) -> None:
    """Compile kernels and write them, with their descriptions, for `offered`."""
    from onnx_remat.fuse.kernels import compiled

    codes = compiled([kernel.text for kernel in kernels])
    place: dict[bytes, int] = {}
    code = bytearray()
    for each in codes:
        if each not in place:
            place[each] = len(code)
            code += each
    told = [kernel.numbers(place[each]) for kernel, each in zip(kernels, codes, strict=True)]
    head = json.dumps({"secret": secret, "kernels": told}).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + code)


@contextmanager
def offered(path: Path) -> Iterator[None]:
    """While this lasts, the model for which kernels were written to a file can be loaded."""
    from onnx_remat.fuse import library

    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:end])
    with library.offered(head["secret"], data[end:], head["kernels"]):
        yield


def kernels_of(copy: Path) -> Path:
    """Where the kernels of a private copy lie."""
    return copy.with_suffix(".kernels")
