"""What a simulated peak is made of, and what ONNX Runtime's arena adds to it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnx_remat.ir.graph import INPUT
from onnx_remat.ir.naming import renewals
from onnx_remat.memory import arena, buffers
from onnx_remat.ort.executed import Executed
from onnx_remat.ort.kernels.base import key


@dataclass(frozen=True, slots=True)
class Holding:
    """One value alive at the peak."""

    value: str
    op_type: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Peak:
    """A peak split into what makes it; all in bytes. The parts add up to `total`."""

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
    """What ONNX Runtime takes with its arena on and memory patterns off, by the arena's own arithmetic; in bytes.

    Attributes
    ----------
    held : int
        What a process on the CPU, or a device, holds of inputs, weights and the default arena, if a step's outputs are
        dropped or copied before the next. Of memory on the CPU only what was ever written counts.
    held_fed_back : int
        The same where the next step reads outputs (``new.*``) as the session returned them: those stay in the arena.
    limit, limit_fed_back : int
        Smallest memory limit of an arena that extends by what is asked (``kSameAsRequested``) and holds the weights.
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
    producer = compiled.graph.producer()
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
    """A step as ONNX Runtime's arena sees it."""
    compiled = executed.compiled
    kinds = [key(op.node) for op in compiled.graph.ops]
    asked = [
        () if kind in compiled.kernels.by_malloc else blocks
        for kind, blocks in zip(kinds, compiled.table.workspace, strict=True)
    ]
    return arena.requests(executed.order, timeline, asked, [kind in compiled.kernels.asks_first for kind in kinds])


def held(executed: Executed, timeline: buffers.Timeline) -> int:
    """What a process, or its device, holds with ONNX Runtime's default arena, if outputs are dropped or copied."""
    return _outside(executed) + _taken(executed, arena.run(requests(executed, timeline), doubling=True))


def _taken(executed: Executed, made: arena.Arena) -> int:
    """What an arena takes: a process holds pages that were written to, a device gives all that was asked for."""
    return made.resident if executed.compiled.kernels.device == "cpu" else made.reserved


def reserves(executed: Executed, timeline: buffers.Timeline) -> Reserves:
    """What ONNX Runtime's arena adds to a peak, in one-off steps and where outputs renew inputs without a copy."""
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
    """Bytes that the arena has no part in: inputs, weights, and the most that a kernel takes with malloc."""
    compiled = executed.compiled
    ops, scratch, kernels = compiled.graph.ops, compiled.table.workspace, compiled.kernels
    taken = (sum(blocks) for op, blocks in zip(ops, scratch, strict=True) if key(op.node) in kernels.by_malloc)
    return compiled.problem.base_bytes + max(taken, default=0)
