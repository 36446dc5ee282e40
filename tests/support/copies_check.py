"""Run a laid out step over the slab's bytes, with copies that are done at once or as late as their waits allow."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from onnx_remat.fuse.shim import IN, OUT, WAIT
from onnx_remat.session.copies import Copy, handle_of, kind_of
from onnx_remat.session.slab_layout import SlabLayout

_CELL = 256  # bytes; values on a device lie at multiples of it


def check_copies(made: SlabLayout) -> tuple[int, int]:
    """Assert that each node reads what was made for it, and return how many copies went to the host and back.

    With copies of either direction, of both or of none as late as anything waits for them: streams run apart.
    """
    (counts,) = {_run(made, late) for late in ((), (OUT,), (IN,), (OUT, IN))}
    return counts


def _run(made: SlabLayout, late: Collection[int]) -> tuple[int, int]:
    """As `check_copies`, with some directions `late`.

    Every cell of the slab, of inputs, and of the host's memory for copies, has the number of the value that lies there.
    """
    program, tensors = made.program, made.program.tensors
    place = {each.name: (each.offset, each.nbytes) for each in made.offsets.placements}
    lies: dict[str, int] = {}  # number of each value on the device
    end = -(-made.offsets.height // _CELL) * _CELL
    for number, name in enumerate(program.inputs, 1):
        place[name], lies[name] = (end, tensors[name].nbytes), -number * 1000
        end += -(-tensors[name].nbytes // _CELL) * _CELL
    place |= {output: place[name] for output, name in made.offsets.donated.items()}
    slab = np.zeros(end // _CELL + 1, np.int64)
    held = max((c.offset + c.nbytes for c in made.copies if c.state), default=0)
    hosts = np.zeros(made.pinned // _CELL + 1, np.int64), np.zeros(held // _CELL + 1, np.int64)
    news: dict[int, int] = {}  # number of each new state, by its offset
    pending: dict[int, list[tuple[int, Callable[[], None]]]] = {OUT: [], IN: []}
    counts = {OUT: 0, IN: 0}

    def cells(name: str) -> slice:
        offset, nbytes = place[name]
        assert offset % _CELL == 0
        return slice(offset // _CELL, -(-(offset + nbytes) // _CELL))

    def there(copy: Copy) -> slice:
        return slice(copy.offset // _CELL, -(-(copy.offset + copy.nbytes) // _CELL))

    def finish(event: int) -> None:
        for queue in pending.values():
            if any(number == event for number, _ in queue):
                while queue:
                    number, copy = queue.pop(0)
                    copy()
                    if number == event:
                        return

    for name in program.inputs:
        slab[cells(name)] = lies[name]
    for copy in made.copies:
        if copy.state:
            hosts[1][there(copy)] = _old(copy)
    for number, step in enumerate(program.steps, 1):
        kind = kind_of(step.node)
        roots = {program.root.get(name, name) for name in step.reads}
        if kind == WAIT:
            finish(made.copies[handle_of(step.node) - len(made.kernels)].event)
        elif kind is not None:
            copy = made.copies[handle_of(step.node) - len(made.kernels)]
            name = step.node.input[0] if kind == OUT else step.node.output[0]
            root, host = program.root.get(name, name), hosts[copy.state]
            here, away = cells(root), there(copy)

            def down(here: slice = here, away: slice = away, host: np.ndarray = host) -> None:
                host[away] = slab[here]

            def up(here: slice = here, away: slice = away, host: np.ndarray = host) -> None:
                slab[here] = host[away]

            if kind == OUT and copy.state:
                news[copy.offset] = lies[root]
            elif kind == IN:
                lies[name] = _old(copy) if copy.state else lies[_left(made, step.reads[0])]
                slab[here] = -number  # until it is there
            pending[kind].append((copy.event, down if kind == OUT else up))
            counts[kind] += 1
            if kind not in late:
                finish(copy.event)
        for name in () if kind in (OUT, IN) else roots & place.keys():
            assert (slab[cells(name)] == lies[name]).all(), f"{step.label} reads {name}, which is not there"
        for name in () if kind == IN else step.writes:
            if name in place:
                lies[name] = number * 1000 + step.writes.index(name)
                slab[cells(name)] = lies[name]
    assert not any(pending.values()), "a copy for which nothing waits"
    for copy in made.copies:
        if copy.state:
            assert (hosts[1][there(copy)] == news[copy.offset]).all(), "state that is not renewed"
    return counts[OUT], counts[IN]


def _old(copy: Copy) -> int:
    """Number of the old state at a place of the host."""
    return -7 - 1000 * copy.offset


def _left(made: SlabLayout, token: str) -> str:
    """The value whose copy to the host makes a token, or the owner of its memory."""
    steps = made.program.steps
    name = next(step.node.input[0] for step in steps if kind_of(step.node) == OUT and step.writes[0] == token)
    return made.program.root.get(name, name)
