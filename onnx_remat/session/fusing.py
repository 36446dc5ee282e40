"""Fuse nodes of a step that is ordered and laid out, and lay it out again.

Fusion is a pure function of the unfused layout. It is used only where it costs no memory: every output written in place
stays so, and the slab is larger by no more than half of the bookkeeping that it saves and the scratch memory that it
frees. On a device, where kernels of equal code are joined (`fuse.joins`), it is also larger by up to a thousandth, for
small values that wait for others; and by up to a hundredth than without joins, where a layout of what lives as long is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from onnx_remat.errors import ModelError
from onnx_remat.messages import Message, Setting
from onnx_remat.session.bookkeeping import bookkeeping_bytes, values_of

if TYPE_CHECKING:
    import onnx

    from onnx_remat.fuse.kernel import Kernel
    from onnx_remat.ort.prepare import Compiled
    from onnx_remat.session.copies import Copy
    from onnx_remat.session.lean_graph import LeanNode
    from onnx_remat.session.offsets import Offsets, Program


@dataclass(frozen=True, slots=True)
class Fused:
    """Result of fusion.

    Attributes
    ----------
    unfused_nodes, unfused_values, unfused_slab : int
        Of the unfused step: its nodes, the values that they write, and the bytes of its slab.
    kernels : int
        Number of kernels.
    why_not : str
        Why the step runs unfused; empty if it does not.
    unserved : int
        Number of convolutions that oneDNN would compute faster, were it installed.
    """

    unfused_nodes: int
    unfused_values: int = 0
    kernels: int = 0
    why_not: str = ""
    unfused_slab: int = 0
    unserved: int = 0


SMALL_SHARE = 1024
"""Inverse of the part of a slab that small values, such as gradients of biases, may take more where kernels are joined:
they lie above all others, so that they cost memory wherever they are live."""

JOINED_SHARE = 100
"""Inverse of the part of a slab that it may take more where kernels are joined, if it is smaller than unfused all the
same: fewer launches save far more time than recomputes for so few bytes take."""

MOST_NODES = 20_000
"""Maximum number of nodes of a step to fuse: the time to find groups grows quadratically, to some 10 s here."""

UNFUSED = Message("{}", Setting("fuse", False))
"""Reason of a step that runs unfused by request."""


def why_not(provider: str) -> str:
    """Return why sessions with a provider run unfused in this environment; empty where they can fuse."""
    from onnx_remat.fuse import cuda, machine_code, shim
    from onnx_remat.ort import runtime

    here = machine_code if provider == "cpu" else cuda
    return shim.too_old(runtime.installed()) or shim.why_not() or here.why_not()


@dataclass(frozen=True, slots=True)
class Refused:
    """Reason why a layout is not fused."""

    why_not: str


@dataclass(frozen=True, slots=True)
class Laid:
    """A step with fused nodes: its program, the layout of its values, and its kernels by handle.

    `members` are the nodes that each kernel replaces, by its first output; `unserved` is as in `Fused`.
    """

    program: Program
    offsets: Offsets
    kernels: tuple[Kernel, ...]
    members: Mapping[str, tuple[LeanNode, ...]]
    unserved: int


def fuse_step(
    program: Program,
    bound: Offsets,
    opset: int,
    constants: Mapping[str, float],
    integers: Mapping[str, tuple[int, ...]],
    least: int,
    secret: int,
    workspace: Callable[[Sequence[LeanNode]], int],
    seconds: float | None = None,
) -> Laid | Refused:
    """Fuse nodes of a step and lay it out again; return `Refused` where it should run unfused.

    Parameters
    ----------
    program : Program
    bound : Offsets
        Layout of `program`; it is searched for a smaller slab only if that decides whether to fuse.
    opset : int
    constants : mapping of str to float
        Constants of a single number, see `numbers`.
    integers : mapping of str to tuple of int
        Constant vectors of integers, see `vectors`.
    least : int
        Size in bytes from which on a value is bound.
    secret : int
        Part of the names of kernels.
    workspace : callable
        Bytes of scratch memory of ONNX Runtime for some nodes.
    seconds : float, optional
        Limit on the search for a small slab.
    """
    from onnx_remat.fuse import blas, convolutions, cuda, joins, onednn, pools
    from onnx_remat.fuse.kernel import FusedNode
    from onnx_remat.fuse.nodes import Fusion, fuse
    from onnx_remat.fuse.ordered import OrderedStep
    from onnx_remat.fuse.replacements import convolved
    from onnx_remat.ort import runtime
    from onnx_remat.session import biases, lean_graph, offsets

    if len(program.steps) > MOST_NODES:
        return Refused(f"it has over {MOST_NODES} nodes")
    device = program.kernels.device != "cpu"
    whole = program
    if device:
        program = biases.divided(program, opset, bound.donated)
    tensors = program.tensors
    counted = {n: tensors[n].nbytes for n in offsets.bindable(program, least) if n not in bound.donated}
    extra = 0
    if device:
        counted = {name: offsets.rounded(nbytes) for name, nbytes in counted.items()}
        extra = bound.live // SMALL_SHARE
    ordered = OrderedStep(
        steps=program.steps,
        tensors=tensors,
        outputs=frozenset(program.outputs),
        root=program.root,
        counted=counted,
        renewed=bound.donated,
        constants=constants,
        overwrites=lambda at, new, old: offsets.overwrites_safely(program, at, new, old),
        integers=integers,
        device=device,
        on_host=program.on_host | (_of_bodies(program) if device else frozenset()),
        products=not device and not blas.why_not(),
        convolutions=not device and not onednn.why_not(),
        maxima=tuple(runtime.installed()[:2]) >= pools.OLDEST_RUNTIME,
        workspace=lambda places: workspace([program.steps[place] for place in places]),
        apart=offsets.LEAST if device else 0,
        slack=extra // 2,
    )
    found = fuse(ordered, secret)
    alone = Refused("no two of its nodes can be fused")
    if not found.kernels and not found.single:
        return alone

    def program_of(each: Fusion) -> Program:
        nodes = (
            lean_graph.LeanNode(at.node, plain=at.plain, segments=at.segments)
            if isinstance(at, FusedNode) else program.steps[at]
            for at in each.order
        )  # fmt: skip
        steps = lean_graph.as_run(list(nodes))
        scratch = {**tensors, **each.scratch}
        return offsets.program(steps, scratch, program.inputs, program.outputs, program.kernels, opset)

    @cache
    def unfused_height() -> int:
        return (bound if bound.searched else offsets.assign(whole, bound.donated, least, seconds)).height

    def laid_out(each: Fusion) -> Laid | Refused:
        again = program_of(each)
        laid = offsets.assign(again, bound.donated, least, seconds)
        if laid.donated != bound.donated:
            return Refused("less of its state could be renewed in place")
        if device and any(cuda.arguments(kernel) > cuda.MOST_ARGUMENTS for kernel in each.kernels):
            return Refused("a kernel would take too many arguments")
        # A layout may miss its bound by a little, fused or not; fewer nodes save far more bookkeeping than that.
        books = bookkeeping_bytes(values_of(again.steps), len(each.kernels), convolutions.code_bytes(each.kernels))
        saved = 0 if device else bookkeeping_bytes(values_of(whole.steps)) - books
        freed = workspace(whole.steps) - workspace(again.steps)
        more = max(0, saved // 2) + freed + extra
        # No slab is smaller than what is live.
        if laid.height > bound.live + more and laid.height > unfused_height() + more:
            return Refused(f"its slab would take {laid.height} bytes, not {unfused_height()}")
        members = {
            at.node.output[0]: tuple(program.steps[i] for i in at.members)
            for at in each.order
            if isinstance(at, FusedNode)
        }
        unserved = 0 if device or ordered.convolutions else len(convolved(ordered)[1])
        return Laid(again, replace(laid, not_donated=bound.not_donated), each.kernels, members, unserved)

    if not device:
        return laid_out(found)
    unjoined = program_of(found)
    live = offsets.assign(unjoined, bound.donated, least, search=False).live

    @cache
    def unjoined_height() -> int:
        return offsets.assign(unjoined, bound.donated, least, seconds).height

    left = max(0, extra - max(0, live - bound.live))  # groups may have taken some of it
    for more, waits in dict.fromkeys(((left, True), (left, False), (left // 2, True), (left // 2, False), (0, False))):
        together = joins.joined(ordered, found, more, waits)  # whose layout may miss its bound
        made = laid_out(together) if together.kernels else alone
        if isinstance(made, Laid) and (
            made.offsets.height <= live + extra
            or made.offsets.height <= unjoined_height() * (1 + 1 / JOINED_SHARE) + extra
        ):
            return made
    return laid_out(found) if found.kernels else alone


def _of_bodies(program: Program) -> frozenset[str]:
    """Return the outputs of nodes with bodies, such as If: where a body runs on the host, so do its readers."""
    bodies = (step for step in program.steps if any(a.HasField("g") for a in step.node.attribute))
    return frozenset(name for step in bodies for name in step.writes)


def replaceable(compiled: Compiled) -> tuple[frozenset[int], frozenset[int]]:
    """Return two sets of ops: those that a kernel replaces several at a time, and those that one replaces alone."""
    from onnx_remat.fuse import onednn
    from onnx_remat.fuse.ordered import OrderedStep
    from onnx_remat.fuse.replacements import candidates
    from onnx_remat.session.lean_graph import LeanNode

    graph = compiled.graph
    known = numbers(graph.model.graph), vectors(graph.model.graph)
    ordered = OrderedStep(
        steps=[LeanNode(op.node, op.captured) for op in graph.ops], tensors=compiled.tensors,
        outputs=frozenset(value.name for value in graph.model.graph.output), root={}, counted={}, renewed={},
        constants=known[0], integers=known[1], overwrites=lambda at, new, old: False, convolutions=not onednn.why_not(),
    )  # fmt: skip
    several: set[int] = set()
    single: set[int] = set()
    for each in candidates(ordered):
        (several if len(each.members) > 1 else single).update(graph.ops[at].index for at in each.members)
    return frozenset(several), frozenset(single)


_NUMBERS = (1, 6, 7, 11, 12)  # float32, int32, int64, float64, uint32


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


def vectors(graph: onnx.GraphProto, more: Iterable[onnx.TensorProto] = ()) -> Mapping[str, tuple[int, ...]]:
    """Return the weights that are short vectors of int64, and no inputs."""
    from onnx import TensorProto, numpy_helper

    fed = {value.name for value in graph.input}
    return {
        each.name: tuple(int(number) for number in numpy_helper.to_array(each))
        for each in (*graph.initializer, *more)
        if each.name not in fed and len(each.dims) == 1 and each.dims[0] <= _MOST_INTEGERS
        and each.data_type == TensorProto.INT64 and each.data_location != TensorProto.EXTERNAL
    }  # fmt: skip


_MOST_INTEGERS = 16
_LEAST_CODE = 64  # bytes, so that a table without code of its own has memory


def compile_to_file(
    kernels: tuple[Kernel, ...], secret: int, path: Path, copies: tuple[Copy, ...] = (), pinned: int = 0
) -> None:
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
    calling = {i: len(kernel.sizes) for i, kernel in enumerate(kernels) if kernel.scratch}
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


def kernel_file(copy: Path) -> Path:
    """Return the path of the kernels of a lean graph."""
    return copy.with_suffix(".kernels")
