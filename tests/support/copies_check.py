"""Run a laid out step over the slab's bytes, with copies that are done at once or as late as their waits allow."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onnx_remat.fuse.shim import IN, OUT, WAIT
from onnx_remat.session.copies import handle_of, kind_of
from onnx_remat.session.slab_layout import SlabLayout

_OLD = -7  # number of a step's old state
_CELL = 256  # bytes; values on a device lie at multiples of it


def check_copies(made: SlabLayout, late: bool) -> tuple[int, int]:
    """Assert that each node reads what was made for it, and return how many copies went to the host and back.

    Every cell of the slab, and of the host's memory for copies, has the number of the value that lies there.
    """
    program, tensors = made.program, made.program.tensors
    place = {each.name: (each.offset, each.nbytes) for each in made.offsets.placements}
    slab = np.zeros(made.offsets.height // _CELL + 1, np.int64)
    held = max((c.offset + c.nbytes for c in made.copies if c.state), default=0)
    hosts = np.zeros(made.pinned // _CELL + 1, np.int64), np.full(held // _CELL + 1, _OLD)
    lies: dict[str, int] = {}  # number of each value of the slab
    pending: dict[int, list[tuple[int, Callable[[], None]]]] = {OUT: [], IN: []}
    counts = {OUT: 0, IN: 0}

    def cells(name: str) -> slice:
        offset, nbytes = place[name]
        assert offset % _CELL == 0
        return slice(offset // _CELL, -(-(offset + nbytes) // _CELL))

    def finish(event: int) -> None:
        for queue in pending.values():
            if any(number == event for number, _ in queue):
                while queue:
                    number, copy = queue.pop(0)
                    copy()
                    if number == event:
                        return

    for number, step in enumerate(program.steps, 1):
        kind = kind_of(step.node)
        copy = made.copies[handle_of(step.node) - len(made.kernels)] if kind is not None else None
        roots = {program.root.get(name, name) for name in step.reads}
        if copy is not None and kind == WAIT:
            finish(copy.event)
        elif copy is not None:
            name = step.node.input[0] if kind == OUT else step.node.output[0]
            there = slice(copy.offset // _CELL, -(-(copy.offset + tensors[name].nbytes) // _CELL))
            here = cells(program.root.get(name, name))

            host = hosts[copy.state]

            def down(here: slice = here, there: slice = there, host: np.ndarray = host) -> None:
                host[there] = slab[here]

            def up(here: slice = here, there: slice = there, host: np.ndarray = host) -> None:
                slab[here] = host[there]

            if kind == IN and copy.state:
                lies[name] = _OLD
                slab[here] = -number
            elif kind == IN:
                source = next(
                    o.node.input[0] for o in program.steps if kind_of(o.node) == OUT and o.writes[0] == step.reads[0]
                )
                lies[name] = lies[program.root.get(source, source)]
                slab[here] = -number  # until it is there
            pending[kind].append((copy.event, down if kind == OUT else up))
            counts[kind] += 1
            if not late:
                finish(copy.event)
        for name in () if kind in (OUT, IN) else roots & place.keys():
            assert (slab[cells(name)] == lies[name]).all(), f"{step.label} reads {name}, which is not there"
        for name in () if kind == IN else step.writes:
            if name in place:
                lies[name] = number * 1000 + step.writes.index(name)
                slab[cells(name)] = lies[name]
    assert not any(pending.values()), "a copy for which nothing waits"
    for copy in made.copies:
        if copy.state and copy.kind == OUT:
            assert (hosts[1][copy.offset // _CELL : -(-(copy.offset + copy.nbytes) // _CELL)] > 0).all()
    return counts[OUT], counts[IN]
