"""Let copies to the host and back run alongside the kernels, on two streams of their own, one for each direction.

ONNX Runtime runs `MemcpyToHost` and `MemcpyFromHost` on the stream of the kernels. Here they become copies and waits::

    MemcpyToHost     a copy to the host, at once; later a wait, from which on the value's memory is free
    MemcpyFromHost   a copy to the device, some nodes ahead; a wait before its first reader

A value lies in the slab until the wait for its copy to the host, and from its copy back on. So the more bytes may be
live, the less of the copies' time the kernels wait for. The memory of a value is free where its copy is predicted to be
done, and its copy back begins as late as no kernel has to wait for it. Where too little memory is free, kernels wait.

A copy starts when the kernels' stream reaches its node, and a stream runs its copies in their order. A copy back comes
after the wait for the copy to the host, and after the last reader of what lay in its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from onnx import TensorProto

from onnx_remat.fuse.shim import IN, OUT, WAIT
from onnx_remat.ir.metadata import COPIES_KEY, TAG
from onnx_remat.ir.naming import renewals
from onnx_remat.ir.opsets import opset_of
from onnx_remat.ir.shapes import Tensor
from onnx_remat.memory import layout
from onnx_remat.messages import Message, Setting
from onnx_remat.ort.moves import DOWN, UP
from onnx_remat.session import fusing, lean_graph, offsets
from onnx_remat.session.copies import Copy, Stated, StateOnHost, handle_of, kind_of, node
from onnx_remat.session.lean_graph import LeanNode
from onnx_remat.session.offsets import Program
from onnx_remat.session.slab_layout import SlabLayout
from onnx_remat.session.step_time import node_seconds

_AHEAD = 1.25  # factor on the time of a copy back: kernels may take less time than predicted
_ALIGNMENT = 256  # of values in the host's memory


@dataclass(slots=True)
class _Home:
    """A value on the host: what is copied there, and what is made from it.

    Positions are those of the nodes without overlap. `down` is that of the copy to the host, which is done by `gone`;
    `ups` has of each value that comes back the positions of its copy and of its first reader. Of `state`, the name of
    the step's input, the old value comes before the new one leaves, which takes its place on the host.
    """

    source: str
    down: int
    name: str
    state: str = ""
    gone: int = 0
    ups: dict[str, tuple[int, int]] = field(default_factory=dict)


def overlapped(made: SlabLayout, least: int, secret: int = 0, seconds: float | None = None) -> SlabLayout:
    """Return a layout in which copies run alongside the kernels; the same one where the file does not allow it.

    State that only copies read and make stays on the host: it is no longer among the program's inputs and outputs.

    Parameters
    ----------
    made : SlabLayout
        Fused or not; its kernels' handles come before those of copies.
    least : int
        Size in bytes from which on a value is bound.
    secret : int
        Part of the names of copies; 0 for a step that is only predicted.
    seconds : float, optional
        Limit on the search for a small slab.
    """
    stated = Stated.of(made.compiled.graph.model)
    device = made.compiled.kernels.device != "cpu"
    if stated is None or not stated.live or not device or fusing.why_not(made.compiled.kernels.name):
        return made
    homes, dropped = _homes(made)
    if not homes:
        return made
    _place(made, homes, stated)
    steps, tensors, copies, pinned = _with_copies(made, homes, dropped, secret)
    if [id(step) for step in lean_graph.as_run(steps)] != [id(step) for step in steps]:
        return made  # ONNX Runtime would run them in another order
    state = {home.state: home.name for home in homes if home.state}
    inputs = [name for name in made.program.inputs if name not in state]
    outputs = [name for name in made.program.outputs if name not in state.values()]
    opset = opset_of(made.compiled.graph.model)
    program = offsets.program(steps, tensors, inputs, outputs, made.program.kernels, opset)
    donated = {output: name for output, name in made.offsets.donated.items() if name not in state}
    laid = offsets.assign(program, donated, least, seconds)
    laid = replace(laid, not_donated={**made.offsets.not_donated, **laid.not_donated})
    places, end = {}, 0
    for name, output in state.items():
        places[name] = StateOnHost(output, end)
        end += -(-tensors[output].nbytes // _ALIGNMENT) * _ALIGNMENT
    placed = (replace(copy, offset=places[name].offset, state=True) if name else copy for name, copy in copies)
    return replace(made, program=program, offsets=laid, copies=tuple(placed), pinned=pinned, state=places)


def why_in_turn(made: SlabLayout) -> str:
    """Return why copies that a file plans alongside the kernels run in turn with them; empty where none do."""
    program = made.program
    read = {step.node.input[0] for step in program.steps if step.node.op_type == UP}
    # ONNX Runtime's own copies for nodes without a kernel on the device come back by no copy, and are no output.
    planned = [
        (at, step)
        for at, step in enumerate(program.steps)
        if step.node.op_type == DOWN and (step.writes[0] in read or step.writes[0] in program.outputs)
    ]
    if not planned or made.compiled.kernels.device == "cpu":
        return ""
    stated = Stated.of(made.compiled.graph.model)
    if stated is None:
        return f"the file's metadata {COPIES_KEY!r} is missing or cannot be read: rewrite the original again"
    if not stated.live:
        return ""
    _, possible = _homes(made)
    if left := next((step for at, step in planned if at not in possible), None):
        return _why_left(made, left)
    return made.fused.why_not or "onnxruntime would run them in another order"


def _why_left(made: SlabLayout, step: LeanNode) -> str:
    """Return why a planned copy to the host cannot leave the stream of the kernels."""
    (name,), bound = step.writes, made.offsets
    state = renewals(made.program.inputs, made.program.outputs).get(name)
    if state is None or name in bound.donated:
        return f"what node {step.label!r} copies is also an output, or other nodes read it on the host"
    if name in bound.not_donated:
        return f"{name!r} cannot take the place of {state!r}: {bound.not_donated[name]}"
    return Message("state {!r} is not donated: pass {}", state, Setting("donate", True))


def _homes(made: SlabLayout) -> tuple[list[_Home], set[int]]:
    """Return the values on the host, and the positions of the nodes that move them.

    A value that came back and leaves again is on the host already.
    """
    program, renewed = made.program, made.offsets.donated
    readers: dict[str, list[int]] = {}
    for at, step in enumerate(program.steps):
        for name in step.reads:
            readers.setdefault(name, []).append(at)

    def only_copied(name: str) -> bool:
        return {program.steps[at].node.op_type for at in readers.get(name, ())} == {UP}

    homes: dict[str, _Home] = {}  # by the host's copy
    back: dict[str, _Home] = {}
    dropped: set[int] = set()
    for at, step in enumerate(program.steps):
        if step.node.op_type == DOWN:
            (source, *_), (name, *_) = step.node.input, step.writes
            state = renewed.get(name, "")
            if state and only_copied(state) and name not in readers:
                homes[state] = _Home(source, at, name, state)
                dropped.add(at)
            elif only_copied(name) and name not in program.outputs:
                before = back.get(source)
                homes[name] = before if before and not before.state else _Home(source, at, name)
                dropped.add(at)
        elif step.node.op_type == UP and step.node.input[0] in homes:
            back[step.writes[0]] = homes[step.node.input[0]]
    for at, step in enumerate(program.steps):
        if step.node.op_type == UP and step.node.input[0] in homes:
            (name,), home = step.writes, homes[step.node.input[0]]
            first = min(readers.get(name, [len(program.steps)]))
            home.ups[name] = at, min(first, home.down) if home.state else first
            dropped.add(at)
    return list({id(home): home for home in homes.values()}.values()), dropped


def _place(made: SlabLayout, homes: Sequence[_Home], stated: Stated) -> None:
    """Choose the place of every wait for a copy to the host, and of every copy back."""
    program, tensors = made.program, made.program.tensors
    live, count = offsets.in_use(program, made.offsets), len(program.steps)
    moving = [step.node.op_type in (DOWN, UP) for step in program.steps]
    took = [0.0 if m else s for m, s in zip(moving, node_seconds(made, stated.costs), strict=True)]
    start = np.concatenate([[0.0], np.cumsum(took)])  # of each node
    last = {name: at for at, step in enumerate(program.steps) if not moving[at] for name in _roots(program, step)}
    place = {each.name: each.offset for each in made.offsets.placements}
    maker = {name: at for at, step in enumerate(program.steps) for name in step.writes}
    renewed = {name: maker[output] for output, name in made.offsets.donated.items()}

    free = 0.0
    for home in sorted(homes, key=lambda home: home.down):
        nbytes, root = tensors[home.source].nbytes, program.root.get(home.source, home.source)
        free = max(free, float(start[home.down])) + stated.seconds(nbytes)
        read = last.get(root, home.down)
        over = read > home.down and root in place and place[root] in map(place.get, program.steps[read].writes)
        until = count if home.state else min(up for up, _ in home.ups.values())
        until = min(until, renewed.get(root, count))  # an input is written over there, and has no other memory
        at = min(max(read if over else read + 1, home.down + 1), until)
        while at < until and start[at] < free and live[at] + nbytes <= stated.live:
            live[at] += nbytes
            at += 1
        home.gone = at

    coming = [(first, name, home) for home in homes for name, (_, first) in home.ups.items()]
    coming.sort(key=lambda each: each[:2])
    latest: dict[str, int] = {}
    following = float("inf")
    for first, name, _ in reversed(coming):
        following = min(float(start[first]), following) - _AHEAD * stated.seconds(tensors[name].nbytes)
        latest[name] = int(np.searchsorted(start, following, "right")) - 1
    for first, name, home in coming:
        at, nbytes = home.ups[name][0], tensors[name].nbytes
        least = max(latest[name], 0 if home.state else home.gone)
        while at > least and live[at - 1] + nbytes <= stated.live:
            at -= 1
            live[at] += nbytes
        home.ups[name] = at, first


def _roots(program: Program, step: LeanNode) -> list[str]:
    return [program.root.get(name, name) for name in step.reads]


def _with_copies(
    made: SlabLayout, homes: Sequence[_Home], dropped: set[int], secret: int
) -> tuple[list[LeanNode], Mapping[str, Tensor], list[tuple[str, Copy]], int]:
    """Return the nodes with copies and waits in place of moves, all types, the copies, and the bytes of the host.

    The name before a copy is that of state.
    """
    program, tensors = made.program, dict(made.program.tensors)
    offset, pinned = _host_layout(program, [home for home in homes if not home.state])
    copies: list[tuple[str, Copy]] = []
    before: dict[int, list[tuple[int, int, LeanNode]]] = {}  # by the node that they precede

    def add(at: int, rank: int, kind: int, read: str, result: str, home: _Home, event: int) -> None:
        for name in (read, result):
            if name and (name == home.name or name not in tensors):
                tensors[name] = _EMPTY
        ends = [(tensors[name].dtype, tensors[name].shape) if name else None for name in (read, result)]
        assert ends[1] is not None, "a copy makes a value"
        copied = tensors[home.source].nbytes
        copies.append((home.state, Copy(kind, offset.get(home.name, 0), copied, event, ends[0], ends[1])))
        handle = len(made.kernels) + len(copies) - 1
        before.setdefault(at, []).append((rank, handle, LeanNode(node(kind, read, result, secret, handle))))

    # Ranks before one node: what comes may lie in the memory of what is gone, and old state has come, as its wait
    # ensures, before new state is copied over it on the host.
    event = 0
    for home in sorted(homes, key=lambda home: home.down):
        token = f"{_LEFT}{home.name}" if home.state else home.name
        add(home.down, 3, OUT, home.source, token, home, event)
        add(home.gone, 0, WAIT, home.source, f"{_GONE}{home.name}", home, event)
        event += 1
    coming = [(at, first, name, home) for home in homes for name, (at, first) in home.ups.items()]
    for at, first, name, back in sorted(coming, key=lambda each: each[:3]):
        add(at, 1, IN, "" if back.state else back.name, name, back, event)
        add(first, 2, WAIT, name, f"{_HERE}{name}", back, event)
        event += 1
    steps: list[LeanNode] = []
    for at in range(len(program.steps) + 1):
        steps += [step for *_, step in sorted(before.get(at, ()), key=lambda each: each[:2])]
        if at < len(program.steps) and at not in dropped:
            steps.append(program.steps[at])
    return steps, tensors, copies, pinned


_EMPTY = Tensor(TensorProto.UINT8, (0,), 0, (0,))
_LEFT, _GONE, _HERE = TAG + "left.", TAG + "gone.", TAG + "here."
"""Start of the names of empty values, which copies and waits make; one value may be the new state of two inputs."""


def _host_layout(program: Program, homes: Sequence[_Home]) -> tuple[dict[str, int], int]:
    """Return the offset of each value in the host's memory for copies, and its bytes."""
    if not homes:
        return {}, 0
    lower = np.array([home.down for home in homes], np.int64)
    upper = np.array([max(first for _, first in home.ups.values()) + 1 for home in homes], np.int64)
    size = np.array([program.tensors[home.source].nbytes for home in homes], np.int64)
    found = layout.solve(lower, upper, size, alignment=_ALIGNMENT, effort=0)
    return {home.name: int(at) for home, at in zip(homes, found.offsets, strict=True)}, found.height


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step on three streams: the kernels', and one for copies in each direction.

    Attributes
    ----------
    seconds : float
        From its start to the end of its last node or copy.
    copies : float
        Sum of the time of all copies.
    waited : float
        Time that kernels wait for copies, those included that run on their own stream.
    """

    seconds: float
    copies: float
    waited: float


def timeline(made: SlabLayout, costs: str = "") -> Timeline:
    """Predict when each node and copy of a step runs; `costs` as in `Options`."""
    stated, took = Stated.of(made.compiled.graph.model), node_seconds(made, costs)
    clock = {OUT: 0.0, IN: 0.0}
    done: dict[int, float] = {}
    now = copies = waited = 0.0
    for step, seconds in zip(made.program.steps, took, strict=True):
        kind = kind_of(step.node)
        if kind is None:
            now += seconds
            if step.node.op_type in (DOWN, UP) and stated is not None:
                copies, waited = copies + seconds, waited + seconds
            continue
        copy = made.copies[handle_of(step.node) - len(made.kernels)]
        if kind == WAIT:
            late = max(done[copy.event] - now, 0.0)
            now, waited = now + late, waited + late
        else:
            assert stated is not None, "copies run alongside kernels where the file says so"
            each = stated.seconds(copy.nbytes)
            clock[kind] = max(clock[kind], now) + each
            done[copy.event] = clock[kind]
            copies += each
    return Timeline(now, copies, waited)
