"""Composition of a simulated peak, and the memory that ONNX Runtime's arena adds to it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnx_remat.ir.graph import INPUT
from onnx_remat.ir.naming import renewals
from onnx_remat.memory import arena, buffers
from onnx_remat.ort.executed import Executed


@dataclass(frozen=True, slots=True)
class Holding:
    """One value allocated at the peak."""

    value: str
    op_type: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Peak:
    """A peak and its parts, all in bytes. The parts add up to `total`."""

    total: int
    inputs: int
    weights: int
    activations: int
    outputs: int
    workspace: int
    at: str
    top: tuple[Holding, ...]


@dataclass(frozen=True, slots=True)
class Reserves:
    """Memory of ONNX Runtime with its arena on and memory patterns off, by the arena's own arithmetic; in bytes.

    Attributes
    ----------
    held : int
        Inputs, weights and the default arena of a process on the CPU, or on a device, if a step's outputs are dropped
        or copied before the next. On the CPU, only memory that was ever written counts.
    held_fed_back : int
        The same if the next step reads outputs (``new.*``) as the session returned them: those stay in the arena.
    limit, limit_fed_back : int
        Smallest memory limit of an arena that grows by each request (``kSameAsRequested``) and contains the weights.
    """

    held: int
    held_fed_back: int
    limit: int
    limit_fed_back: int


def describe(executed: Executed, timeline: buffers.Timeline) -> Peak:
    """Split a peak into inputs, weights, activations, outputs and workspace."""
    compiled, problem = executed.compiled, executed.compiled.problem
    names = list(compiled.graph.values)
    inputs = sum(compiled.tensors[n].nbytes for n, v in compiled.graph.values.items() if v.kind == INPUT)
    alive = np.flatnonzero((timeline.start <= timeline.peak_step) & (timeline.end >= timeline.peak_step))
    outputs = int(sum(timeline.size[b] for b in alive if problem.is_output[timeline.owner[b]]))
    op = executed.order.order[timeline.peak_step] if executed.order.order else -1
    workspace = int(problem.workspace[op]) if op >= 0 else 0
    producer = compiled.graph.makers
    largest = sorted(alive.tolist(), key=lambda b: (-int(timeline.size[b]), b))[:10]
    return Peak(
        total=timeline.peak,
        inputs=inputs,
        weights=problem.base_bytes - inputs,
        activations=timeline.peak - problem.base_bytes - outputs - workspace,
        outputs=outputs,
        workspace=workspace,
        at=f"{compiled.graph.ops[op].node.op_type} {compiled.graph.ops[op].label}" if op >= 0 else "",
        top=tuple(
            Holding(name, compiled.graph.ops[producer[name]].node.op_type, int(timeline.size[b]))
            for b in largest
            for name in (names[timeline.owner[b]],)
        ),
    )


def requests(executed: Executed, timeline: buffers.Timeline) -> arena.Requests:
    """Return the allocator calls of a step to ONNX Runtime's arena."""
    compiled = executed.compiled
    kinds = [op.kind for op in compiled.graph.ops]
    scratch = [
        () if kind in compiled.kernels.by_malloc else blocks
        for kind, blocks in zip(kinds, compiled.table.workspace, strict=True)
    ]
    return arena.requests(executed.order, timeline, scratch, [kind in compiled.kernels.asks_first for kind in kinds])


def held(executed: Executed, timeline: buffers.Timeline) -> int:
    """Return the bytes of a process, or its device, with ONNX Runtime's default arena; see `Reserves.held`."""
    return _outside(executed) + _taken(executed, arena.run(requests(executed, timeline), doubling=True))


def _taken(executed: Executed, made: arena.Arena) -> int:
    """Return the bytes of an arena: a process keeps pages that were written, a device all reserved memory."""
    return made.resident if executed.compiled.kernels.device == "cpu" else made.reserved


def reserves(executed: Executed, timeline: buffers.Timeline) -> Reserves:
    """Return the arena's memory for single steps, and for steps that feed outputs back as inputs without a copy."""
    compiled, outside = executed.compiled, _outside(executed)
    values = compiled.graph.values
    inputs = [name for name, value in values.items() if value.kind == INPUT]
    renewed = renewals(inputs, [name for name, value in values.items() if value.is_output])
    kept = np.array([name in renewed for name in values], np.bool_)
    weights = compiled.problem.base_bytes - sum(compiled.tensors[name].nbytes for name in inputs)
    replaced = sum(compiled.tensors[name].nbytes for name in renewed.values())
    step = requests(executed, timeline)
    return Reserves(
        held=outside + _taken(executed, arena.run(step, doubling=True)),
        held_fed_back=outside - replaced + _taken(executed, arena.run(step, doubling=True, kept=kept)),
        limit=weights + arena.run(step, doubling=False).reserved,
        limit_fed_back=weights + arena.run(step, doubling=False, kept=kept).reserved,
    )


def _outside(executed: Executed) -> int:
    """Return the bytes outside the arena: inputs, weights, and the largest workspace taken with malloc."""
    compiled = executed.compiled
    ops, scratch, kernels = compiled.graph.ops, compiled.table.workspace, compiled.kernels
    taken = (sum(blocks) for op, blocks in zip(ops, scratch, strict=True) if op.kind in kernels.by_malloc)
    return compiled.problem.base_bytes + max(taken, default=0)
