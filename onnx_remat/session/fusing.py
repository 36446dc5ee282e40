"""Fuse nodes of a step that is ordered and laid out, and lay it out again.

Fusion is a pure function of the unfused layout. It is used only where it costs no memory: every output written in place
stays so, and the slab is larger by no more than half of the bookkeeping that it saves and the scratch memory that it
frees. On a device, where kernels of equal code are joined (`fuse.joins`), it is also larger by up to a thousandth, for
small values that wait for others; and by up to a hundredth than without joins, where a layout of what lives as long is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property

import onnx
from onnx import TensorProto, numpy_helper

from onnx_remat.fuse import blas, convolutions, cuda, joins, machine_code, onednn, pools, shim
from onnx_remat.fuse.kernel import FusedNode
from onnx_remat.fuse.nodes import Fusion, fuse
from onnx_remat.fuse.ordered import OrderedStep
from onnx_remat.fuse.replacements import candidates, convolved
from onnx_remat.ir.graph import Op, constants
from onnx_remat.ir.opsets import opset_of
from onnx_remat.messages import Message, Setting
from onnx_remat.ort import runtime
from onnx_remat.ort.prepare import Compiled
from onnx_remat.session import biases, lean_graph, offsets, slab_layout, windows
from onnx_remat.session.bookkeeping import bookkeeping_bytes, values_of
from onnx_remat.session.lean_graph import LeanNode
from onnx_remat.session.offsets import Offsets, Program
from onnx_remat.session.slab_layout import SlabLayout

SMALL_SHARE = 1024
"""Inverse of the part of a slab that small values, such as gradients of biases, may take more where kernels are joined:
they lie above all others, so that they cost memory wherever they are live."""

JOINED_SHARE = 100
"""Inverse of the part of a slab that it may take more where kernels are joined, if it is smaller than unfused all the
same: fewer launches save far more time than recomputes for so few bytes take."""

_CAUTIOUS = 16
"""Inverse of the part of a slab that columns leave free where, with as many as fit, no layout reaches what is live."""

MOST_NODES = 20_000
"""Maximum number of nodes of a step to fuse: the time to find groups grows quadratically, to some 10 s here."""

UNFUSED = Message("{}", Setting("fuse", False))
"""Reason of a step that runs unfused by request."""


def why_not(provider: str) -> str:
    """Return why sessions with a provider run unfused in this environment; empty where they can fuse."""
    here = machine_code if provider == "cpu" else cuda
    return shim.too_old(runtime.installed()) or shim.why_not() or here.why_not()


@dataclass(frozen=True, slots=True)
class Refused:
    """Reason why a layout is not fused."""

    why_not: str


_NONE = Refused("no two of its nodes can be fused")


def as_fused(made: SlabLayout, least: int, secret: int = 0, seconds: float | None = None) -> SlabLayout:
    """Fuse nodes of a layout; where none can be, return it unchanged, with the reason in `fused.why_not`.

    Both opening a session and predicting its memory call this, so that they have the same step.

    Parameters
    ----------
    made : SlabLayout
        It is searched for a smaller slab only if that decides whether to fuse.
    least : int
        Size in bytes from which on a value is bound.
    secret : int
        Part of the names of kernels; 0 for a step that is only predicted.
    seconds : float, optional
        Limit on the search for a small slab.
    """
    reason = why_not(made.compiled.kernels.name)
    if not reason:
        found = fuse_step(made, least, secret, seconds)
        if isinstance(found, SlabLayout):
            return found
        reason = found.why_not
    return replace(made, fused=replace(made.fused, why_not=reason))


def fuse_step(made: SlabLayout, least: int, secret: int, seconds: float | None = None) -> SlabLayout | Refused:
    """Fuse nodes of a step and lay it out again, see `as_fused`; return `Refused` where it should run unfused."""
    if len(made.program.steps) > MOST_NODES:
        return Refused(f"it has over {MOST_NODES} nodes")
    if made.program.kernels.device == "cpu":
        return _Step(made, made.program, least, seconds).fused(secret)
    opset = opset_of(made.compiled.graph.model)
    step = _Step(made, biases.divided(made.program, opset, made.offsets.donated), least, seconds)
    found = step.fused(secret)
    layout = found if isinstance(found, SlabLayout) else made
    gradients = windows.find(step.ordered)
    for less in (0, layout.offsets.live // _CAUTIOUS) if gradients else ():
        program = windows.joined(step.program, opset, gradients, _room(layout, less))
        together = replace(step, program=program).fused(secret) if program is not step.program else found
        if isinstance(together, SlabLayout) and together.offsets.height <= layout.offsets.height:
            return together
    return found


def _room(made: SlabLayout, less: int) -> Callable[[str, str], int]:
    """Return a function of two values: the bytes below the peak where one is made, the other live, but for `less`."""
    program, used = made.program, offsets.in_use(made.program, made.offsets)
    at = {name: i for i, step in enumerate(program.steps) for name in step.writes}
    placed = {each.name: each.nbytes for each in made.offsets.placements}
    _, end = offsets.lifetimes(program, list(placed))

    def room(result: str, value: str) -> int:
        place = at[result]
        return int(used.max() - used[place]) - less - (placed[value] if end.get(value, place) < place else 0)

    return room


@dataclass(frozen=True)
class _Step:
    """A step to fuse, with the arguments of `as_fused`, and the program whose nodes are fused."""

    made: SlabLayout
    program: Program
    least: int
    seconds: float | None

    @cached_property
    def device(self) -> bool:
        """Whether it runs on a device."""
        return self.made.program.kernels.device != "cpu"

    @cached_property
    def opset(self) -> int:
        return opset_of(self.made.compiled.graph.model)

    def fused(self, secret: int) -> SlabLayout | Refused:
        """Fuse its nodes, and lay it out again."""
        found = fuse(self.ordered, secret)
        if not found.kernels and not found.single:
            return _NONE
        return self.joined(found) if self.device else self.laid_out(found)

    @cached_property
    def extra(self) -> int:
        """Bytes by which its slab may grow for small values."""
        return self.made.offsets.live // SMALL_SHARE if self.device else 0

    @cached_property
    def ordered(self) -> OrderedStep:
        made, program, device = self.made, self.program, self.device
        model, donated = made.compiled.graph.model, made.offsets.donated
        counted = {n: program.tensors[n].nbytes for n in offsets.bindable(program, self.least) if n not in donated}
        if device:
            counted = {name: offsets.rounded(nbytes) for name, nbytes in counted.items()}
        return OrderedStep(
            steps=program.steps,
            tensors=program.tensors,
            outputs=frozenset(program.outputs),
            root=program.root,
            counted=counted,
            renewed=donated,
            constants=numbers(model.graph, made.constants),
            overwrites=lambda at, new, old: offsets.overwrites_safely(program, at, new, old),
            integers=vectors(model.graph, made.constants),
            device=device,
            on_host=program.on_host | (_of_bodies(program) if device else frozenset()),
            products=not device and not blas.why_not(),
            convolutions=not device and not onednn.why_not(),
            maxima=tuple(runtime.installed()[:2]) >= pools.OLDEST_RUNTIME,
            workspace=lambda places: self.workspace([program.steps[place] for place in places]),
            apart=offsets.LEAST if device else 0,
            slack=self.extra // 2,
        )

    @cached_property
    def _makers(self) -> Mapping[str, Op]:
        return slab_layout.makers(self.made.compiled)

    def workspace(self, steps: Iterable[LeanNode]) -> int:
        """Return the bytes of scratch memory of ONNX Runtime for some nodes."""
        return slab_layout.workspace(self.made.compiled, slab_layout.kept(self._makers, steps))[0]

    @cached_property
    def unfused_height(self) -> int:
        """Bytes of the slab, searched for a small one, if nothing is fused."""
        bound = self.made.offsets
        return bound.height if bound.searched else self.assigned(self.made.program).height

    def assigned(self, program: Program) -> Offsets:
        """Return a layout of a program's values, searched for a small slab."""
        return offsets.assign(program, self.made.offsets.donated, self.least, self.seconds)

    def program_of(self, found: Fusion) -> Program:
        """Return the program of a fused step."""
        nodes = (
            LeanNode(each.node, plain=each.plain, segments=each.segments)
            if isinstance(each, FusedNode) else self.program.steps[each]
            for each in found.order
        )  # fmt: skip
        steps, whole = lean_graph.as_run(list(nodes)), self.program
        tensors = {**whole.tensors, **found.scratch}
        return offsets.program(steps, tensors, whole.inputs, whole.outputs, whole.kernels, self.opset)

    def laid_out(self, found: Fusion) -> SlabLayout | Refused:
        """Lay out a fused step, unless that costs memory."""
        made, device, program = self.made, self.device, self.program_of(found)
        bound, laid = made.offsets, self.assigned(program)
        if laid.donated != bound.donated:
            return Refused("less of its state could be renewed in place")
        if device and any(cuda.arguments(kernel) > cuda.MOST_ARGUMENTS for kernel in found.kernels):
            return Refused("a kernel would take too many arguments")
        # A layout may miss its bound by a little, fused or not; fewer nodes save far more bookkeeping than that.
        books = bookkeeping_bytes(values_of(program.steps), len(found.kernels), convolutions.code_bytes(found.kernels))
        saved = 0 if device else bookkeeping_bytes(values_of(made.program.steps)) - books
        freed = self.workspace(made.program.steps) - self.workspace(program.steps)
        more = max(0, saved // 2) + freed + self.extra
        # No slab is smaller than what is live.
        if laid.height > bound.live + more and laid.height > self.unfused_height + more:
            return Refused(f"its slab would take {laid.height} bytes, not {self.unfused_height}")
        members = {
            each.node.output[0]: tuple(self.program.steps[at] for at in each.members)
            for each in found.order
            if isinstance(each, FusedNode)
        }
        unserved = 0 if device or self.ordered.convolutions else len(convolved(self.ordered)[1])
        return replace(
            made, program=program, offsets=replace(laid, not_donated=bound.not_donated), kernels=found.kernels,
            members=members, fused=replace(made.fused, kernels=len(found.kernels), unserved=unserved),
        )  # fmt: skip

    def joined(self, found: Fusion) -> SlabLayout | Refused:
        """Lay out a fused step with as many kernels joined as the slab has room for."""
        bound, extra, unjoined = self.made.offsets, self.extra, self.program_of(found)
        live = offsets.assign(unjoined, bound.donated, self.least, search=False).live

        @cache
        def unjoined_height() -> int:
            return self.assigned(unjoined).height

        left = max(0, extra - max(0, live - bound.live))  # groups may have taken some of it
        for more, waits in dict.fromkeys(
            ((left, True), (left, False), (left // 2, True), (left // 2, False), (0, False))
        ):
            together = joins.joined(self.ordered, found, more, waits)  # whose layout may miss its bound
            made = self.laid_out(together) if together.kernels else _NONE
            if isinstance(made, SlabLayout) and (
                made.offsets.height <= live + extra
                or made.offsets.height <= unjoined_height() * (1 + 1 / JOINED_SHARE) + extra
            ):
                return made
        return self.laid_out(found) if found.kernels else _NONE


def _of_bodies(program: Program) -> frozenset[str]:
    """Return the outputs of nodes with bodies, such as If: where a body runs on the host, so do its readers."""
    bodies = (step for step in program.steps if any(a.HasField("g") for a in step.node.attribute))
    return frozenset(name for step in bodies for name in step.writes)


def replaceable(compiled: Compiled) -> tuple[frozenset[int], frozenset[int]]:
    """Return two sets of ops: those that a kernel replaces several at a time, and those that one replaces alone."""
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
    """Return the constants of a single number."""
    return {
        name: float(numpy_helper.to_array(each).item())
        for name, each in _constants(graph, more)
        if math.prod(each.dims) == 1 and each.data_type in _NUMBERS
    }


def vectors(graph: onnx.GraphProto, more: Iterable[onnx.TensorProto] = ()) -> Mapping[str, tuple[int, ...]]:
    """Return the constants that are short vectors of int64."""
    return {
        name: tuple(int(number) for number in numpy_helper.to_array(each))
        for name, each in _constants(graph, more)
        if len(each.dims) == 1 and each.dims[0] <= _MOST_INTEGERS and each.data_type == TensorProto.INT64
    }


def _constants(graph: onnx.GraphProto, more: Iterable[onnx.TensorProto]) -> Iterator[tuple[str, onnx.TensorProto]]:
    """Yield names and tensors of a graph's constants, and of more, without those that lie in other files."""
    for name, each in (*constants(graph).items(), *((each.name, each) for each in more)):
        if each.data_location != TensorProto.EXTERNAL:
            yield name, each


_MOST_INTEGERS = 16
