"""Layout of every large value of a step: in one slab, and new state in place of the old.

When all large values are bound, ONNX Runtime does not reuse memory by itself: lifetimes, and therefore which values may
share addresses, follow from the execution order. A value is live from the node that produces it to the last reader of
it or of a view of it; a graph output is live to the end. Two values may share addresses

* if their lifetimes are disjoint;
* or if the last reader of one produces the other, at exactly the same address, by a kernel that was measured to be safe
  in place (`kernels.in_place`).

New state may use the memory of the old state under the same rule: every reader of the old value, or of a view of it,
runs before the producer of the new value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import TensorProto

from onnx_remat.ir.dtypes import bits
from onnx_remat.ir.op_semantics import semantics
from onnx_remat.ir.shapes import Tensor
from onnx_remat.memory import layout
from onnx_remat.memory.problem import Longs
from onnx_remat.ort.kernels.base import Kernels, key
from onnx_remat.ort.kernels.in_place import may_overwrite
from onnx_remat.ort.moves import DOWN, UP
from onnx_remat.session.lean_graph import LeanNode, as_run

LEAST = 4096
"""Size in bytes from which on a value is bound; ONNX Runtime allocates smaller ones, except graph outputs."""


_DEVICE_ALIGNMENT = 256  # that of ONNX Runtime's arena, and of cudaMalloc


def least(kernels: Kernels) -> int:
    """Return the size from which on values are bound: on a device all, since small ones would fragment workspace."""
    return LEAST if kernels.device == "cpu" else 1


def rounded(nbytes: int) -> int:
    """Return the bytes that a value takes in the slab of a device."""
    return -(-nbytes // _DEVICE_ALIGNMENT) * _DEVICE_ALIGNMENT


EFFORT = 4
"""Rounds of search for the layout, a third of a second each; none where the first layout is optimal."""


@dataclass(frozen=True, slots=True)
class Program:
    """A step in execution order, with the facts about its values that a layout needs.

    Attributes
    ----------
    steps : tuple of LeanNode
        In execution order.
    tensors : mapping of str to Tensor
    inputs : tuple of str
        Graph inputs.
    outputs : tuple of str
        Graph outputs.
    root : mapping of str to str
        Value whose memory a view shares, by view.
    kernels : Kernels
    on_host : frozenset of str
        Values in host memory although the step runs on a device, and small values that may be.
    """

    steps: tuple[LeanNode, ...]
    tensors: Mapping[str, Tensor]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    root: Mapping[str, str]
    kernels: Kernels
    on_host: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Placement:
    """Offset of a value in the slab."""

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Offsets:
    """Layout of the bound values.

    Attributes
    ----------
    placements : tuple of Placement
    height : int
        Bytes of the slab.
    live : int
        Peak of live bytes of bound values: a lower bound on every slab.
    donated : mapping of str to str
        Input by the output that is written in its place.
    not_donated : mapping of str to str
        Reason by output, for requested donations that are not made.
    searched : bool
        Whether a smaller slab was searched for.
    """

    placements: tuple[Placement, ...]
    height: int
    live: int
    donated: Mapping[str, str]
    not_donated: Mapping[str, str]
    searched: bool = True


def program(
    steps: Sequence[LeanNode],
    tensors: Mapping[str, Tensor],
    inputs: Sequence[str],
    outputs: Sequence[str],
    kernels: Kernels,
    opset: int = 20,
) -> Program:
    """Build a program: distinguish views from values that own memory; a view that is a graph output is a copy."""
    root: dict[str, str] = {}
    returned = frozenset(outputs)
    for step in steps:
        for slot, out in kernels.aliases(step.node):
            if out < len(step.node.output) and slot < len(step.node.input):
                name, viewed = step.node.output[out], step.node.input[slot]
                if name and viewed and name not in returned:
                    root[name] = root.get(viewed, viewed)
    on_host = _on_host(steps, tensors, kernels, opset, inputs) if kernels.device != "cpu" else frozenset()
    return Program(tuple(steps), tensors, tuple(inputs), tuple(outputs), root, kernels, on_host)


def _on_host(
    steps: Sequence[LeanNode], tensors: Mapping[str, Tensor], kernels: Kernels, opset: int, inputs: Sequence[str]
) -> frozenset[str]:
    """Return outputs of nodes without a kernel on the device, and outputs that device kernels leave in host memory.

    ONNX Runtime also runs nodes on the host that compute shapes from such values, by its own rules. A small value
    computed only from such values is assumed to be on the host, and ONNX Runtime allocates it.
    """
    found: set[str] = set()
    made = set(inputs)
    for step in steps:
        first = tensors[step.node.input[0]].dtype if step.node.input and step.node.input[0] else 0
        computed = [name for name in step.reads if name in made]
        shapes = bool(computed) and found.issuperset(computed)
        slots = kernels.host_outputs.get(key(step.node), ())
        for slot, name in enumerate(step.node.output):
            small = name and tensors[name].nbytes < LEAST
            if name and (slot in slots or (shapes and small) or kernels.on_host(step.node, first, opset)):
                found.add(name)
        made.update(step.writes)
    return frozenset(found)


def readers(program: Program) -> dict[str, list[int]]:
    """Return the positions of nodes that read each value or a view of it, by the value that owns the memory."""
    found: dict[str, list[int]] = {}
    for i, step in enumerate(program.steps):
        for name in dict.fromkeys(program.root.get(name, name) for name in step.reads):
            found.setdefault(name, []).append(i)
    return found


def waiting(program: Program, pairs: Mapping[str, str]) -> Program:
    """Move each renewing node after the last reader of the input that it renews, where possible; return the program.

    Parameters
    ----------
    pairs : mapping of str to str
        Input that each output renews.
    """
    makers = {name: i for i, step in enumerate(program.steps) for name in step.writes}
    read_at = readers(program)
    moved: dict[int, int] = {}
    for output, name in pairs.items():
        maker = makers.get(output, -1)
        last = max((i for i in read_at.get(name, ()) if i != maker), default=-1)
        results = () if maker < 0 else program.steps[maker].writes
        first_use = min((i for made in results for i in read_at.get(made, ())), default=len(program.steps))
        if 0 <= maker < last < first_use:
            moved[maker] = max(last, moved.get(maker, -1))
    behind: dict[int, list[int]] = {}
    for maker, last in moved.items():
        behind.setdefault(last, []).append(maker)
    order: list[int] = []
    for i in range(len(program.steps)):
        pending = [i] if i not in moved else []
        while pending:
            order.append(pending.pop(0))
            pending += sorted(behind.get(order[-1], ()))
    steps = as_run([program.steps[i] for i in order])
    return replace(program, steps=tuple(steps))


def donations(program: Program, pairs: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the outputs that may be written in place of the inputs they renew, and why the others may not.

    Parameters
    ----------
    pairs : mapping of str to str
        Input that each output renews.

    Returns
    -------
    donated, not_donated : dict of str to str
        Input by output, and reason by output.
    """
    makers = {name: i for i, step in enumerate(program.steps) for name in step.writes}
    read_at = readers(program)
    inputs, outputs = frozenset(program.inputs), frozenset(program.outputs)
    donated: dict[str, str] = {}
    refused: dict[str, str] = {}
    renewed: set[str] = set()
    for output, name in pairs.items():
        if name not in inputs:
            reason = f"there is no input {name!r}"
        elif output not in makers:
            reason = "no node makes it"
        elif name in outputs:
            reason = f"{name!r} is itself an output"
        else:
            reason = _unsafe(program, output, name, makers[output], read_at.get(name, []))
        if not reason and name in renewed:
            reason = f"{name!r} is renewed by another output too"
        if reason:
            refused[output] = reason
        else:
            donated[output] = name
            renewed.add(name)
    return donated, refused


def _unsafe(program: Program, output: str, name: str, maker: int, read_at: Sequence[int]) -> str:
    """Return why `output` must not be written in place of input `name`; empty where it may."""
    new, old = program.tensors[output], program.tensors[name]
    if (new.dtype, new.shape) != (old.dtype, old.shape):
        return f"it is not of the type and shape of {name!r}"
    if not is_plain(new):
        return "its type is not stored as a plain array"
    if late := [i for i in read_at if i > maker]:
        return f"node {program.steps[late[-1]].label!r} reads {name!r} after it is renewed"
    if maker in read_at and not overwrites_safely(program, maker, output, name):
        step = program.steps[maker]
        return f"node {step.label!r} ({step.node.op_type}) reads {name!r} while it writes"
    return ""


def is_plain(tensor: Tensor) -> bool:
    """Is the tensor an array whose elements have whole bytes?"""
    return tensor.dtype not in (TensorProto.UNDEFINED, TensorProto.STRING) and bits(tensor.dtype) % 8 == 0


def overwrites_safely(program: Program, at: int, made: str, read: str) -> bool:
    """May the node at position `at` write `made` in place of its input `read`?"""
    step, new = program.steps[at], program.tensors[made]
    out = list(step.node.output).index(made)
    if read in (program.root.get(name, name) for name in step.captured):
        return False
    if step.plain is not None:
        old = program.tensors[read]
        alike = (old.dtype, math.prod(old.shape)) == (new.dtype, math.prod(new.shape))
        slots = [slot for slot, name in enumerate(step.node.input) if program.root.get(name, name) == read]
        reads, writes = (len(names) // step.segments for names in (step.node.input, step.node.output))
        own = out // writes  # segments run in any order: none may write what another reads
        return alike and step.plain.issuperset(slots) and all(slot // reads == own for slot in slots)
    return all(
        (program.tensors[name].dtype, program.tensors[name].shape) == (new.dtype, new.shape)
        and may_overwrite(program.kernels, step.node, slot, out, new.dtype)
        for slot, name in enumerate(step.node.input)
        if name and program.root.get(name, name) == read
    )


def bindable(program: Program, least: int = LEAST) -> list[str]:
    """Return the values to bind: graph outputs that a node produces, and owners of `least` or more bytes of memory.

    Also running statistics of any size: ONNX Runtime writes them over their inputs where they are no graph outputs.
    """
    always = {*program.outputs, *(name for step in program.steps for name in _over_inputs(step))}
    return [
        name
        for step in program.steps
        for name in step.writes
        if name not in program.root
        and name not in program.on_host
        and is_plain(program.tensors[name])
        and program.tensors[name].nbytes >= (1 if name in always else least)
    ]


def _over_inputs(step: LeanNode) -> list[str]:
    """Return the outputs that a node's kernel may write over its inputs, the caller's arrays."""
    pairs = semantics(step.node.domain, step.node.op_type).renews
    return [name for _, slot in pairs for name in step.node.output[slot : slot + 1] if name]


def assign(
    program: Program,
    pairs: Mapping[str, str],
    least: int = LEAST,
    seconds: float | None = None,
    search: bool = True,
) -> Offsets:
    """Lay out every bindable value: donated outputs in their inputs' memory, all others in one slab.

    Parameters
    ----------
    program : Program
    pairs : mapping of str to str
        Input that each output to be donated renews.
    least : int
        Size in bytes from which on values are bound.
    seconds : float, optional
        Limit on the search for a small slab.
    search : bool
        Whether to search for one, beyond a first layout.
    """
    donated, refused = donations(program, pairs)
    names = [name for name in bindable(program, least) if name not in donated]
    start, end = lifetimes(program, names)
    group = _in_place_chains(program, names, start, end)
    heads = list(dict.fromkeys(group.values()))
    number = {head: i for i, head in enumerate(heads)}
    lower = np.array([start[head] for head in heads], np.int64)
    upper = lower.copy()
    for name, head in group.items():
        upper[number[head]] = max(upper[number[head]], end[name] + 1)
    size = np.array([program.tensors[head].nbytes for head in heads], np.int64)
    offsets, height, live = _lay_out(lower, upper, size, least < LEAST, seconds, EFFORT if search else 0)
    placements = tuple(Placement(n, int(offsets[number[group[n]]]), program.tensors[n].nbytes) for n in names)
    return Offsets(placements, height, live, donated, refused, search)


def _lay_out(
    lower: Longs, upper: Longs, size: Longs, apart: bool, seconds: float | None, effort: int
) -> tuple[Longs, int, int]:
    """Return offsets, height and the peak of live bytes; with `apart`, small values lie above the others.

    A device has thousands of small values, which together are a small fraction of the slab: they are not searched for.
    """
    if not apart:
        found = layout.solve(lower, upper, size, effort=effort, time_limit=seconds)
        return found.offsets, found.height, found.lower_bound
    small = size < LEAST
    below = layout.solve(
        lower[~small], upper[~small], size[~small], alignment=_DEVICE_ALIGNMENT, effort=effort, time_limit=seconds
    )
    above = layout.solve(lower[small], upper[small], size[small], alignment=_DEVICE_ALIGNMENT, effort=0)
    offsets = np.zeros(len(size), np.int64)
    offsets[~small], offsets[small] = below.offsets, above.offsets + below.height
    return offsets, below.height + above.height, below.lower_bound + above.lower_bound


def lifetimes(program: Program, names: Sequence[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the first and last position at which each value is live; graph outputs are live to the end."""
    read_at = readers(program)
    makers = {name: i for i, step in enumerate(program.steps) for name in step.writes}
    last = len(program.steps) - 1
    start = {name: makers[name] for name in names}
    returned = frozenset(program.outputs)
    end = {n: last if n in returned else max(read_at.get(n, [start[n]])) for n in names}
    return start, end


def in_use(program: Program, found: Offsets) -> Longs:
    """Return the bytes of laid out values that are live while each node runs."""
    names = [placement.name for placement in found.placements]
    start, end = lifetimes(program, names)
    until: dict[str, int] = {}
    for name, head in _in_place_chains(program, names, start, end).items():
        until[head] = max(until.get(head, 0), end[name])
    return _bytes_by_node(program, start, until)


def kept_on_host(program: Program) -> int:
    """Return the peak of bytes that are moved to the host (`ort.moves`)."""
    back = {step.node.input[0] for step in program.steps if step.node.op_type == UP}
    homes = [s.node.output[0] for s in program.steps if s.node.op_type == DOWN and s.node.output[0] in back]
    return int(_bytes_by_node(program, *lifetimes(program, homes)).max(initial=0))


def _bytes_by_node(program: Program, start: Mapping[str, int], end: Mapping[str, int]) -> Longs:
    """Return the bytes of the values in `end` that are live while each node runs."""
    change = np.zeros(len(program.steps) + 1, np.int64)
    for name, last in end.items():
        change[start[name]] += program.tensors[name].nbytes
        change[last + 1] -= program.tensors[name].nbytes
    return np.cumsum(change[:-1])


def _in_place_chains(
    program: Program, names: Sequence[str], start: Mapping[str, int], end: Mapping[str, int]
) -> dict[str, str]:
    """Return for each value the first value of its chain of in-place writes, which share one address."""
    head = {}
    taken = set(program.outputs)  # and values that are overwritten already
    for name in names:  # in execution order, so that overwritten values already have a head
        head[name] = name
        at = start[name]
        for read in dict.fromkeys(program.root.get(n, n) for n in program.steps[at].reads):
            dies = read in head and end[read] == at and read not in taken
            if dies and overwrites_safely(program, at, name, read):
                head[name] = head[read]
                taken.add(read)
                break
    return head
