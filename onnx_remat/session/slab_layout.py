"""A step as a session runs it, ordered and laid out in one slab; opening and predicting call the same functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from onnx_remat.errors import ModelError, UsageError
from onnx_remat.session import biases
from onnx_remat.session.bookkeeping import bookkeeping_bytes, values_of

if TYPE_CHECKING:
    import onnx

    from onnx_remat.fuse.kernel import Kernel
    from onnx_remat.ir.graph import Op
    from onnx_remat.ort.executed import Executed
    from onnx_remat.ort.prepare import Compiled
    from onnx_remat.session.copies import Copy, StateOnHost
    from onnx_remat.session.lean_graph import LeanNode
    from onnx_remat.session.offsets import Offsets, Program

Donate = bool | Mapping[str, str]
"""Outputs to write in place of the inputs they renew: none, all by their names, or those of a mapping to inputs."""


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


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """A step as it will run, and the layout of its values.

    `constants` are in addition to its weights; `kernels` are those of its fused nodes, by handle, and `members` the
    nodes that each fused node replaces, by its first output. `copies` run alongside the kernels, see `overlap`; their
    handles follow those of kernels, and they take `pinned` bytes of the host. `state` lies there, too, by the step's
    inputs: these, and the outputs that renew them, are none of the program's.
    """

    compiled: Compiled
    program: Program
    offsets: Offsets
    weights: int
    constants: tuple[onnx.TensorProto, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    members: Mapping[str, tuple[LeanNode, ...]] = field(default_factory=dict)
    fused: Fused = field(default_factory=lambda: Fused(0))
    copies: tuple[Copy, ...] = ()
    pinned: int = 0
    state: Mapping[str, StateOnHost] = field(default_factory=dict)


def lay_out(
    executed: Executed,
    outputs: Sequence[str],
    donate: Donate,
    least: int,
    seconds: float | None = None,
    search: bool = True,
) -> SlabLayout:
    """Lay out the values of a step that ONNX Runtime has already optimised.

    Parameters
    ----------
    executed : Executed
    outputs : sequence of str
        Graph outputs, in the original's order.
    donate : bool or mapping of str to str
        Outputs to write in place of the inputs they renew.
    least : int
        Size in bytes from which on a value is bound.
    seconds : float, optional
        Limit on the search for a small slab.
    search : bool
        Whether to search for one, beyond a first layout, see `searched`.

    Raises
    ------
    ModelError
        ONNX Runtime has not optimised the step: it cannot run it, or was not used.
    """
    from onnx_remat.ir.body import bytes_in_bodies
    from onnx_remat.ir.graph import INITIALIZER
    from onnx_remat.ir.opsets import opset_of
    from onnx_remat.session import lean_graph, offsets

    if executed.emulated:
        raise ModelError(f"a session cannot open this model: {executed.emulated}")
    compiled = executed.compiled
    stored = {name for name, value in compiled.graph.values.items() if value.kind == INITIALIZER}
    declared = [value.name for value in compiled.graph.model.graph.input]
    inputs = [name for name in declared if name not in stored]
    pairs = _pairs(donate, inputs, declared, list(outputs))
    ops, opset = [compiled.graph.ops[i] for i in executed.order.order], opset_of(compiled.graph.model)
    free = lean_graph.without_control_edges(ops, compiled.graph.model, compiled.tensors)
    lean, constants = lean_graph.without_sizes(free, compiled.graph.model, compiled.tensors)
    steps = lean_graph.as_run(lean_graph.moved_when_due(lean, compiled.kernels))
    program = offsets.waiting(offsets.program(steps, compiled.tensors, inputs, outputs, compiled.kernels, opset), pairs)
    weights = sum(compiled.tensors[name].nbytes for name in stored)
    weights += bytes_in_bodies(compiled.graph.model.graph.node)
    bound = offsets.assign(program, pairs, least, seconds, search)
    fused = Fused(len(program.steps), values_of(program.steps), unfused_slab=bound.height)
    return SlabLayout(compiled, program, bound, weights, constants, fused=fused)


def _pairs(donate: Donate, inputs: list[str], declared: list[str], outputs: list[str]) -> dict[str, str]:
    """Return the input of each output to write in its place; of the inputs `declared`, others have defaults."""
    from onnx_remat.ir.naming import renewals

    if isinstance(donate, bool):
        return renewals(inputs, outputs) if donate else {}
    for output, name in donate.items():
        if output not in outputs:
            raise UsageError(f"donate: the model has no output {output!r}")
        if name not in declared:
            raise UsageError(f"donate: the model has no input {name!r}")
        if name not in inputs:
            raise UsageError(f"donate: input {name!r} has a default value: remove its initializer")
    return dict(donate)


def searched(made: SlabLayout, least: int) -> SlabLayout:
    """Return a layout with the smallest slab that a search finds, if there was no search yet."""
    from onnx_remat.session import offsets

    if made.offsets.searched:
        return made
    found = offsets.assign(made.program, made.offsets.donated, least)
    fused = replace(made.fused, unfused_slab=found.height)
    return replace(made, offsets=replace(found, not_donated=made.offsets.not_donated), fused=fused)


def makers(compiled: Compiled) -> dict[str, Op]:
    """Return the op that makes each value."""
    return {name: op for op in compiled.graph.ops for name in op.writes}


def kept(maker: Mapping[str, Op], steps: Iterable[LeanNode]) -> list[Op]:
    """Return the ops that ONNX Runtime runs itself among a step's nodes, in their order."""
    return [op for step in steps if step.plain is None and (op := op_of(maker, step)) is not None]


def op_of(maker: Mapping[str, Op], step: LeanNode) -> Op | None:
    """Return the op of the compiled graph that a node is; None for the Add of a bias, see `biases`."""
    made = next(iter(step.writes), "")
    if (whole := biases.result_of(made)) in maker and made not in maker:
        return maker[whole]
    op = maker.get(made)
    return None if op is None or (step.node.op_type, op.node.op_type) == ("Add", "Gemm") else op


def workspace(compiled: Compiled, ops: Sequence[Op]) -> tuple[int, int]:
    """Return the peak of ONNX Runtime's scratch memory for some of a step's ops in bytes, and the size of its pool.

    Kernels that call ``malloc`` take scratch memory outside the pool. A step whose nodes have bodies has no pool:
    values of the bodies would fragment it. On a device the session's own arena contains all scratch memory.
    """
    from onnx_remat.session import device_scratch, scratch

    if compiled.kernels.device != "cpu":
        return device_scratch.workspace(compiled, ops), 0
    requested = malloced = 0
    for op in ops:
        blocks = compiled.table.workspace[op.index]
        if op.kind in compiled.kernels.by_malloc:
            malloced = max(malloced, sum(blocks))
        else:
            requested = max(requested, sum(-(-block // scratch.UNIT) * scratch.UNIT for block in blocks))
    bodies = any(attribute.HasField("g") for op in ops for attribute in op.node.attribute)
    pool = 0 if bodies else scratch.pool_size(requested)
    return (pool + malloced if pool else max(requested, malloced)), pool


def bookkeeping(made: SlabLayout) -> int:
    """Return the bytes of ONNX Runtime's bookkeeping for a step on a CPU, as predicted."""
    from onnx_remat.fuse.convolutions import code_bytes

    if made.compiled.kernels.device != "cpu":
        return 0
    return bookkeeping_bytes(values_of(made.program.steps), made.fused.kernels, code_bytes(made.kernels))
