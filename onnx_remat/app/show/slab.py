"""Where the values of a step lie while `run.session.Session` runs it: address over time, and what lies idle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onnx_remat.app.show import trace
from onnx_remat.ir import phases
from onnx_remat.run.binding import least, lifetimes
from onnx_remat.run.opening import lay_out

if TYPE_CHECKING:
    from onnx_remat.ort.executed import Executed
    from onnx_remat.pipeline import Result
    from onnx_remat.run.foreseen import Footprint


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes from `offset` to `offset` + `bytes`, taken (or free, then without a `value`) from step `start` to `end`."""

    value: str
    section: str
    offset: int
    bytes: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Slab:
    """A step's slab.

    Attributes
    ----------
    blocks : tuple of Block
        Values, in order of execution.
    gaps : tuple of Block
        Stretches that stay free for the most bytes and steps, the largest first.
    steps : int
        Nodes that run.
    busiest : int
        First step at which the most bytes are in use.
    """

    blocks: tuple[Block, ...]
    gaps: tuple[Block, ...]
    steps: int
    busiest: int

    def held_at(self, step: int) -> list[Block]:
        """Values that lie in the slab while `step` runs, largest first."""
        alive = [b for b in self.blocks if b.start <= step <= b.end]
        return sorted(alive, key=lambda b: (-b.bytes, b.start, b.value))


def before(result: Result) -> Slab:
    """The original's slab."""
    return slab(result.original, trace.sections(result))


def after(result: Result) -> Slab:
    """The rewritten model's slab."""
    return slab(result.executed, trace.sections(result))


def slab(executed: Executed, section_of: Mapping[str, str], gaps: int = 3) -> Slab:
    """Lay a step out; `section_of` maps names of values to the section of the op that makes them."""
    outputs = [value.name for value in executed.compiled.graph.model.graph.output]
    arranged = lay_out(executed, outputs, donate=True, least=least(executed.compiled.kernels))
    placements = arranged.binding.placements
    start, end = lifetimes(arranged.program, [p.name for p in placements])
    phase, sections = phases.NAMES[0], {}
    for step in arranged.program.steps:
        found = next((section_of[name] for name in step.writes if name in section_of), phase)
        phase = phase if found == trace.RECOMPUTE else found
        sections.update(dict.fromkeys(step.writes, found))
    blocks = tuple(Block(p.name, sections[p.name], p.offset, p.nbytes, start[p.name], end[p.name]) for p in placements)
    steps = len(arranged.program.steps)
    return Slab(blocks, _gaps(blocks, steps, arranged.binding.height)[:gaps], steps, _busiest(blocks, steps))


def _busiest(blocks: tuple[Block, ...], steps: int) -> int:
    change = [0] * (steps + 1)
    for block in blocks:
        change[block.start] += block.bytes
        change[block.end + 1] -= block.bytes
    held, most, at = 0, -1, 0
    for step in range(steps):
        held += change[step]
        if held > most:
            most, at = held, step
    return at


def _gaps(blocks: tuple[Block, ...], steps: int, height: int) -> tuple[Block, ...]:
    """Free rectangles that no neighbour in time continues, the largest product of bytes and steps first."""
    begins: dict[int, list[Block]] = {}
    ends: dict[int, list[Block]] = {}
    for block in blocks:
        begins.setdefault(block.start, []).append(block)
        ends.setdefault(block.end + 1, []).append(block)
    alive: dict[str, Block] = {}
    since: dict[tuple[int, int], int] = {}
    found = []
    for step in range(steps + 1):
        if step < steps and step and step not in begins and step not in ends:
            continue
        for block in ends.get(step, ()):
            alive.pop(block.value, None)
        alive.update((block.value, block) for block in begins.get(step, ()))
        free = _free(list(alive.values()), height) if step < steps else []
        for low, high in [gap for gap in since if gap not in free]:
            found.append(Block("", "", low, high - low, since.pop((low, high)), step - 1))
        for gap in free:
            since.setdefault(gap, step)
    return tuple(sorted(found, key=lambda b: (-b.bytes * (b.end - b.start + 1), b.start, b.offset)))


def _free(alive: list[Block], height: int) -> list[tuple[int, int]]:
    free, at = [], 0
    for block in sorted(alive, key=lambda b: b.offset):
        if block.offset > at:
            free.append((at, block.offset))
        at = max(at, block.offset + block.bytes)
    return [*free, (at, height)] if at < height else free


def rest(footprint: Footprint) -> tuple[tuple[str, int], ...]:
    """What training takes besides the slab, by name, in bytes."""
    return (
        ("inputs and state", footprint.inputs), ("weights", footprint.weights), ("workspace", footprint.workspace),
        ("ONNX Runtime's bookkeeping", footprint.books),
    )  # fmt: skip
