"""Check a `Offsets` by replaying the step over addresses: independent of lifetimes and of the layout algorithm.

Every byte belongs to the value last written there. A node may read only values that still own all their bytes, and
overwrite an input only where that is known to be safe; at the end every graph output must own all its bytes.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from onnx_remat.errors import ModelError
from onnx_remat.session.heap import ALIGNMENT
from onnx_remat.session.offsets import Offsets, Program, bindable, overwrites_safely

_Range = tuple[int, int]


class _Memory:
    """Owner of every byte: disjoint ranges in order of address."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, str]] = []

    def claim(self, place: _Range, name: str) -> None:
        if not place[1] > place[0]:  # an empty value takes nothing over
            return
        first, last = self._overlapping(place)
        self._ranges[first:last] = [(*place, name)]

    def owner_other_than(self, name: str, place: _Range) -> str | None:
        """Return the value that has overwritten bytes of `name` in `place`, None if no value has."""
        if not place[1] > place[0]:
            return None
        first, last = self._overlapping(place)
        if self._ranges[first:last] == [(*place, name)]:
            return None
        return next((owner for *_, owner in self._ranges[first:last] if owner != name), "nobody")

    def _overlapping(self, place: _Range) -> tuple[int, int]:
        first = bisect.bisect_left(self._ranges, (place[0], -1, ""))
        if first and self._ranges[first - 1][1] > place[0]:
            first -= 1
        last = first
        while last < len(self._ranges) and self._ranges[last][0] < place[1]:
            last += 1
        return first, last


def check(program: Program, offsets: Offsets, executed: Sequence[int], least: int) -> None:
    """Raise ModelError unless the step, run in the order `executed`, reads and returns intact values.

    Parameters
    ----------
    program : Program
    offsets : Offsets
    executed : sequence of int
        Positions in ``program.steps`` in the order ONNX Runtime runs them.
    least : int
        Size in bytes from which on values must be bound.
    """
    _check_order(program, executed)
    where = _addresses(program, offsets)
    if missing := [name for name in bindable(program, least) if name not in where]:
        raise ModelError(f"value {missing[0]!r} has no place")
    memory = _Memory()
    for name in offsets.donated.values():
        memory.claim(where[name], name)
    made = {name for step in program.steps for name in step.writes}
    done: set[str] = set()
    for at, step in enumerate(program.steps):
        reads = dict.fromkeys(program.root.get(name, name) for name in step.reads)
        if early := [name for name in step.reads if name in made and name not in done]:
            raise ModelError(f"node {step.label!r} reads {early[0]!r} before it is made")
        for name in reads:
            if name in where and (thief := memory.owner_other_than(name, where[name])):
                raise ModelError(f"node {step.label!r} reads {name!r}, whose memory {thief!r} has taken over")
        _check_writes(program, at, [name for name in reads if name in where], where)
        for name in step.writes:
            if name in where:
                memory.claim(where[name], name)
        done.update(step.writes)
    for name in program.outputs:
        if name in where and (thief := memory.owner_other_than(name, where[name])):
            raise ModelError(f"output {name!r} is lost: {thief!r} has taken over its memory")


def _check_order(program: Program, executed: Sequence[int]) -> None:
    planned = range(len(program.steps))
    for at, (runs, wanted) in enumerate(itertools.zip_longest(executed, planned)):
        if runs != wanted:
            names = ["nothing more" if i not in planned else repr(program.steps[i].label) for i in (runs, wanted)]
            raise ModelError(f"ONNX Runtime would run {names[0]} at position {at}, but the layout expects {names[1]}")


def _addresses(program: Program, offsets: Offsets) -> dict[str, _Range]:
    """Return the address range of each bound value: the slab first, then the donated inputs one after the other."""
    where: dict[str, _Range] = {}
    for placement in offsets.placements:
        needed = program.tensors[placement.name].nbytes
        if placement.offset < 0 or placement.offset + needed > offsets.height or placement.nbytes != needed:
            raise ModelError(f"value {placement.name!r} does not lie in the slab")
        if placement.offset % ALIGNMENT:
            raise ModelError(f"value {placement.name!r} does not lie at a multiple of {ALIGNMENT} bytes")
        if placement.name in where:
            raise ModelError(f"value {placement.name!r} has two places")
        where[placement.name] = placement.offset, placement.offset + needed
    end = offsets.height
    for output, name in offsets.donated.items():
        new, old = program.tensors[output], program.tensors[name]
        if output in where or name in where or name not in program.inputs or name in program.outputs:
            raise ModelError(f"output {output!r} cannot lie in the memory of {name!r}")
        if (new.dtype, new.shape) != (old.dtype, old.shape):
            raise ModelError(f"output {output!r} is not of the type and shape of {name!r}")
        where[output] = where[name] = end, end + new.nbytes
        end += new.nbytes
    return where


def _check_writes(program: Program, at: int, reads: Sequence[str], where: dict[str, _Range]) -> None:
    """Raise ModelError where a node's output overlaps another output, or an input that its kernel cannot overwrite."""
    step = program.steps[at]
    writes = [name for name in step.writes if name in where]
    for i, name in enumerate(writes):
        for other in writes[:i]:
            if _meet(where[name], where[other]):
                raise ModelError(f"node {step.label!r} writes {name!r} and {other!r} to the same memory")
        for other in reads:
            safe = where[name] == where[other] and overwrites_safely(program, at, name, other)
            if _meet(where[name], where[other]) and not safe:
                raise ModelError(f"node {step.label!r} writes {name!r} over {other!r}, which it reads")


def _meet(first: _Range, second: _Range) -> bool:
    return first[0] < second[1] and second[0] < first[1]
