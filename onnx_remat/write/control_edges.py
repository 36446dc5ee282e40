"""Control edges that make ONNX Runtime follow a schedule, however its optimisations renumber nodes.

The runtime may run nodes in any topological order; the order it takes depends on node numbers, which its own
optimisations change. Only dependencies are binding. Control edges therefore chain the *heavy* steps, all those that
touch a significant amount of memory: a heavy step that does not already depend on the previous heavy step gets a
control edge from it. Light steps float between them; all light values together are a small fraction of the peak::

    schedule    A ---> B      C' ---> D        C' is a recompute: it reads an old value, and could run at any time
    chained     A ---> B ===> C' ---> D        ===> is a control edge, ---> an existing dependency
    light                  s ........          s may run anywhere between its producers and its readers

A recompute must also differ from its original in some input, or common subexpression elimination merges the two.
Constant folding would turn a large value that depends on no graph input (the zeros that a scatter adds into) into a
constant that stays allocated for the whole session: with a control edge it is computed in each run when it is needed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from onnx_remat.ir.dtypes import bits
from onnx_remat.ir.graph import INITIALIZER, NODE, Graph, Op
from onnx_remat.ir.shapes import Tensor
from onnx_remat.memory.problem import Flags, Problem, Schedule
from onnx_remat.write.private_buffers import read_occurrences

LIGHT_FRACTION = 0.005
"""All values of floating steps together stay below this fraction of the peak: the most that floating can add to it."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A control edge: step `step` must not start before step `after` is done."""

    after: int
    step: int


def light_limit(problem: Problem, schedule: Schedule, peak: int) -> int:
    """Return the bytes up to which a value is light: all light values together take `LIGHT_FRACTION` of `peak`."""
    made = [problem.nbytes[problem.outputs(op)] for op in schedule.order]
    sizes = np.sort(np.concatenate([*made, np.zeros(0, np.int64)]))
    count = int(np.searchsorted(np.cumsum(sizes), peak * LIGHT_FRACTION, side="right"))
    return int(sizes[count - 1]) if count else 0


def heavy_steps(problem: Problem, schedule: Schedule, limit: int) -> Flags:
    """Flag the steps whose place matters: a value they make or read, or their workspace, exceeds `limit` bytes.

    Views (Reshape and similar ops) allocate and free nothing, and the runtime fuses them with one another: they are not
    heavy, except graph outputs, which are copies, and unread views, which no reader pins. Shape (n_steps,).
    """
    nbytes = np.where(problem.resident, 0, problem.nbytes)
    touched = problem.workspace.copy()
    np.maximum.at(touched, np.repeat(np.arange(problem.n_ops), np.diff(problem.in_ptr)), nbytes[problem.in_values])
    np.maximum.at(touched, np.repeat(np.arange(problem.n_ops), np.diff(problem.out_ptr)), nbytes[problem.out_values])
    maker = np.repeat(np.arange(problem.n_ops), np.diff(problem.out_ptr))
    is_view = np.zeros(problem.n_ops, np.bool_)
    is_view[maker] = (problem.alias_slot >= 0) & ~problem.is_output[problem.out_values]
    order = schedule.array()
    floats = is_view[order]
    made_at = np.repeat(np.arange(len(order)), np.diff(problem.out_ptr)[order])
    floats[made_at[~np.array(read_occurrences(problem, schedule), np.bool_)]] = False
    return ~floats & (touched > limit)[order]


def choose_pins(
    problem: Problem,
    schedule: Schedule,
    heavy: Sequence[bool] | Flags,
    pinnable: Sequence[bool] | Flags,
    foldable: Sequence[bool],
    can_trigger: Sequence[bool] | Flags,
) -> list[Pin]:
    """Choose control edges that chain heavy steps, and protect recomputes and large constants from optimisations.

    Parameters
    ----------
    problem, schedule
        The graph and the desired order.
    heavy : bool (n_steps,)
        From `heavy_steps`.
    pinnable : bool (n_steps,)
        Steps with an input that a control edge can pass through.
    foldable : bool (n_ops,)
        Ops that depend on no graph input: the runtime folds them, if it can, when it loads the file.
    can_trigger : bool (n_ops,)
        Ops with an output that may get an additional reader; the runtime fuses the others into their readers.

    Returns
    -------
    list of Pin
        In order of `step`, at most one per step.
    """
    order = schedule.order
    latest: dict[int, int] = {}  # value -> step that made its latest occurrence
    reached = np.full(len(order), -1, np.int64)  # latest heavy step that each step is or depends on
    folds = np.zeros(len(order), np.bool_)
    identity_of: list[int] = []  # per step, the first step that common subexpression elimination considers equal
    seen: dict[tuple[object, ...], int] = {}
    pins: list[Pin] = []
    last_heavy, last_run = -1, -1
    for step, op in enumerate(order):
        makers = [latest.get(v, -1 - v) for v in problem.inputs(op)]  # negative for a resident
        reached[step] = max((int(reached[m]) for m in makers if m >= 0), default=-1)
        folds[step] = foldable[op] and all(folds[m] for m in makers if m >= 0)
        identity: tuple[object, ...] = (op, *(identity_of[m] if m >= 0 else m for m in makers))
        out_of_order = reached[step] < last_heavy
        if heavy[step] and (out_of_order or folds[step] or identity in seen) and pinnable[step] and last_run >= 0:
            pins.append(Pin(last_heavy if out_of_order else last_run, step))
            reached[step] = max(reached[step], reached[pins[-1].after])
            folds[step] = False
            identity = ("pinned", step)
        identity_of.append(seen.setdefault(identity, step))
        latest.update(dict.fromkeys(problem.outputs(op), step))
        if not folds[step] and can_trigger[op]:
            last_run = step
            if heavy[step]:
                last_heavy = reached[step] = step
    return pins


# Ops whose output shape is unknown as soon as the shape of any input is; other ops follow their first input.
_ANY_INPUT = {
    "Add", "Sub", "Mul", "Div", "Pow", "Where", "Max", "Min", "Sum", "Mean", "And", "Or", "Xor", "Equal", "Greater",
    "Less", "GreaterOrEqual", "LessOrEqual", "Mod", "MatMul", "Gemm", "Concat", "PRelu",
}  # fmt: skip


def pin_slot(
    graph: Graph,
    tensors: Mapping[str, Tensor],
    op: Op,
    fused: Collection[str] = (),
    direct: Collection[str] = (),
    host: Collection[int] = (),
) -> int | None:
    """Choose the input slot for control edges and shape hiding; None if there is none.

    Never one of `direct`, values around which ONNX Runtime would then round differently, nor one of `fused`, values
    that it merges into their readers; among the others the largest that is not a constant, as kernels may rely on
    constants. A slot of `host`, which a device's kernel reads in host memory, is the last resort: a value that passes
    through the edge on the device would be copied to the host, and the host would wait for it.
    """
    passable = [name and name not in direct and unsqueezable(tensors[name].dtype) for name in op.inputs]
    slots = [slot for slot, able in enumerate(passable) if able]
    free = [slot for slot in slots if op.inputs[slot] not in fused]
    slots = slots if not free and op.node.op_type in ("MatMul", "Gemm") else free  # a product must always be pinnable
    slots = [slot for slot in slots if slot not in host] or slots
    if op.node.op_type not in _ANY_INPUT:
        return slots[0] if slots else None

    def merit(slot: int) -> tuple[bool, int, int]:
        name = op.inputs[slot]
        return graph.values[name].kind != INITIALIZER, tensors[name].nbytes, -slot

    return max(slots, key=merit, default=None)


def waiting_slots(graph: Graph, tensors: Mapping[str, Tensor], op: Op, slot: int) -> tuple[int, ...]:
    """Return the input slots that a control edge through `slot` uses: also the mode of a Dropout that must not go."""
    return (slot, _MODE) if _ahead_of_kept(graph, tensors, op) is not None else (slot,)


def never_waiting(graph: Graph, tensors: Mapping[str, Tensor]) -> frozenset[int]:
    """Return the ops through which no control edge may pass: those between a graph input and a Dropout that must not
    go."""
    return frozenset(index for op in graph.ops for index in _ahead_of_kept(graph, tensors, op) or ())


def _ahead_of_kept(graph: Graph, tensors: Mapping[str, Tensor], op: Op) -> list[int] | None:
    """Return the ops between a graph input and a Dropout that ONNX Runtime keeps for its place; None for other ops.

    It eliminates a Dropout, even in training, if its mask has no reader and of its inputs exactly one, be it the ratio,
    is made by a node. One that reads a graph input stays, and draws; so does one behind nodes that go before it.
    """
    if op.node.op_type != "Dropout" or not _trains(op):
        return None
    name, found = op.inputs[0], list[int]()
    while (maker := graph.makers.get(name)) is not None and _is_eliminated(tensors, graph.ops[maker]):
        found.append(maker)
        name = graph.ops[maker].inputs[0]
    return found if graph.values[name].kind != NODE else None


def _trains(dropout: Op) -> bool:
    return len(dropout.inputs) > _MODE and bool(dropout.inputs[_MODE])


def _is_eliminated(tensors: Mapping[str, Tensor], op: Op) -> bool:
    """Whether ONNX Runtime takes out an op that changes nothing."""
    if op.node.op_type == "Cast":
        return tensors[op.inputs[0]].dtype == tensors[op.outputs[0]].dtype
    return op.node.op_type == "Identity" or (op.node.op_type == "Dropout" and not _trains(op))


_MODE = 2  # input slot of a Dropout: whether it trains


def unsqueezable(dtype: int) -> bool:
    """Whether Unsqueeze takes a type in every opset and execution provider; 8-bit floats, sub-byte types came later."""
    return dtype not in (TensorProto.STRING, TensorProto.UNDEFINED) and (bits(dtype) > 8 or dtype in _BYTES)


_BYTES = (TensorProto.BOOL, TensorProto.INT8, TensorProto.UINT8)
