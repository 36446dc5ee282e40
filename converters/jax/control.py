"""Lowerings of calls, cond, scan and while."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from jax.extend import core

from onnx_remat.errors import ConversionError

from . import kernels
from .lower import Array, Lowering, Stack, Tensor, lowering, shape_of
from .structure import taken


@lowering(
    "jit", "pjit", "closed_call", "call", "core_call", "checkpoint", "remat", "remat2", "custom_jvp_call",
    "custom_vjp_call", "custom_vmap_call", "custom_lin", stacks=True,
)  # fmt: skip
def call(low: Lowering, eqn: core.JaxprEqn, *operands: Array) -> list[Array]:
    """Inline a call."""
    inner = next(eqn.params[key] for key in ("jaxpr", "call_jaxpr", "call") if key in eqn.params)
    if isinstance(inner, core.ClosedJaxpr):
        return low.run_closed(inner, operands)
    return low.run(inner, [], operands)


@lowering("platform_index")
def platform_index(low: Lowering, eqn: core.JaxprEqn) -> Tensor:
    """Choose the branch that `jax.lax.platform_dependent` has for the CPU, by default the one for all platforms."""
    platforms = list(eqn.params["platforms"])
    found = [i for i, names in enumerate(platforms) if names is not None and "cpu" in names]
    found += [i for i, names in enumerate(platforms) if names is None]
    if not found:
        raise ConversionError("platform_dependent has no branch for the CPU: add one, or a default")
    return low.array(np.int32(found[0]))


@lowering("cond")
def cond(low: Lowering, eqn: core.JaxprEqn, index: Tensor, *operands: Tensor) -> Sequence[Array]:
    return _choose(low, eqn, index, 0, operands)


def _choose(
    low: Lowering, eqn: core.JaxprEqn, index: Tensor, first: int, operands: Sequence[Tensor]
) -> Sequence[Array]:
    """Append an If that chooses between branch `first` and all later branches."""
    branches = eqn.params["branches"]
    last = len(branches) - 1
    if index.constant is not None:
        return low.run_closed(branches[int(np.clip(index.constant, 0, last))], operands)
    if first == last:
        return low.run_closed(branches[last], operands)
    if last == 1:
        beyond = low.cast(index.value, np.bool_)
    else:
        beyond = low.op("Greater", index.value, low.emit.constant(np.asarray(first, index.dtype)), shape=(),
                        dtype=np.bool_)  # fmt: skip
    with low.body("then_branch") as then:
        _finish(then, _choose(then, eqn, index, first + 1, operands))
    with low.body("else_branch") as otherwise:
        _finish(otherwise, otherwise.run_closed(branches[first], operands))
    results = [(var.aval.shape, kernels.dtype_of_aval(var.aval)) for var in eqn.outvars]  # type: ignore[attr-defined]
    made = low.nodes("If", beyond, results=results, then_branch=then.emit.graph, else_branch=otherwise.emit.graph)
    return [_tensor(value) for value in made]


@lowering("scan", stacks=True)
def scan(low: Lowering, eqn: core.JaxprEqn, *operands: Array) -> list[Array]:
    length = int(eqn.params["length"])
    consts, carry = int(eqn.params["num_consts"]), int(eqn.params["num_carry"])
    parts = operands[:consts], operands[consts : consts + carry], operands[consts + carry :]
    if length <= low.unroll:
        return _unrolled(low, eqn, length, *parts)
    return _scanned(low, eqn, *parts)


def _unrolled(
    low: Lowering, eqn: core.JaxprEqn, length: int, consts: Sequence[Array], carry: Sequence[Array],
    sequences: Sequence[Array],
) -> list[Array]:  # fmt: skip
    """Lower the body once for each step; its outputs are stacked only if an equation reads them whole."""
    state, made = list(carry), [[] for _ in eqn.outvars[len(carry) :]]  # type: list[Array], list[list[Tensor]]
    steps = range(length)
    for step in reversed(steps) if eqn.params["reverse"] else steps:
        slices = [_element(low, sequence, step) for sequence in sequences]
        results = low.run_closed(eqn.params["jaxpr"], [*consts, *state, *slices])
        state = results[: len(carry)]
        for column, result in zip(made, results[len(carry) :], strict=True):
            column.append(low.tensor(result))
    stacks: list[Array] = []
    for column, var in zip(made, eqn.outvars[len(carry) :], strict=True):
        if not column:
            stacks.append(low.array(np.zeros(var.aval.shape, kernels.dtype_of_aval(var.aval))))  # type: ignore[attr-defined]
        else:
            stacks.append(_stacked(column[::-1] if eqn.params["reverse"] else column))
    return [*state, *stacks]


def _stacked(items: Sequence[Tensor]) -> Array:
    first = items[0]
    if all(item.value is first.value and item.axes == first.axes for item in items):
        return first.relabelled([axis + 1 for axis in first.axes], (len(items), *first.shape))
    return Stack(tuple(items))


def _element(low: Lowering, sequence: Array, step: int) -> Tensor:
    return sequence.items[step] if isinstance(sequence, Stack) else taken(low, sequence, 0, step)


def _scanned(
    low: Lowering, eqn: core.JaxprEqn, consts: Sequence[Array], carry: Sequence[Array], sequences: Sequence[Array]
) -> list[Array]:
    """Append a Scan, whose body reads constants from the enclosing graph."""
    consts = [low.tensor(x) for x in consts]
    counted = sequences or [low.array(np.zeros(int(eqn.params["length"]), np.int32))]  # ONNX's Scan reads at least one
    states, slices = ([low.full(low.tensor(x)) for x in group] for group in (carry, counted))
    with low.body("scan_body") as body:
        inputs = [_input(body, value, shape_of(value)) for value in states]
        inputs += [_input(body, value, shape_of(value)[1:]) for value in slices]
        body.emit.graph.inputs.extend(inputs)
        read = inputs[: len(carry) + len(sequences)]
        _finish(body, body.run_closed(eqn.params["jaxpr"], [*consts, *(_tensor(value) for value in read)]))
    results = [(var.aval.shape, kernels.dtype_of_aval(var.aval)) for var in eqn.outvars]  # type: ignore[attr-defined]
    direction = int(eqn.params["reverse"])
    made = low.nodes(
        "Scan", *states, *slices, results=results, body=body.emit.graph, num_scan_inputs=len(slices),
        **_directions("scan_input_directions", direction, len(slices)),
        **_directions("scan_output_directions", direction, len(results) - len(states)),
    )  # fmt: skip
    return [_tensor(value) for value in made]


def _directions(name: str, direction: int, count: int) -> dict[str, list[int]]:
    return {name: [direction] * count} if direction and count else {}


@lowering("while")
def while_loop(low: Lowering, eqn: core.JaxprEqn, *operands: Tensor) -> list[Tensor]:
    """Append a Loop, with the condition before it and at the end of its body.

    Under `vmap` the condition has a batch: the loop goes on while any entry does, and the others keep their state.
    """
    params = eqn.params
    n_cond, n_body = int(params["cond_nconsts"]), int(params["body_nconsts"])
    cond_consts, body_consts = operands[:n_cond], operands[n_cond : n_cond + n_body]
    states = [low.full(x) for x in operands[n_cond + n_body :]]

    def condition(where: Lowering, state: Sequence[Array]) -> Tensor:
        (answer,) = where.run_closed(params["cond_jaxpr"], [*cond_consts, *state])
        return where.tensor(answer)

    def goes_on(where: Lowering, state: Sequence[Array]) -> ir.Value:
        answer = condition(where, state)
        if not answer.axes:
            return where.full(answer.relabelled((), ()))
        return where.op("ReduceMax", answer.value, where.ints(range(len(answer.axes))), shape=(), keepdims=0)

    with low.body("loop_body") as body:
        counter = ir.Value(name=body.emit.fresh("step"), shape=ir.Shape([]), type=ir.TensorType(ir.DataType.INT64))
        running = ir.Value(name=body.emit.fresh("running"), shape=ir.Shape([]), type=ir.TensorType(ir.DataType.BOOL))
        inputs = [_input(body, value, shape_of(value)) for value in states]
        body.emit.graph.inputs.extend([counter, running, *inputs])
        before = [_tensor(value) for value in inputs]
        results = body.run_closed(params["body_jaxpr"], [*body_consts, *before])
        if params["cond_jaxpr"].out_avals[0].shape:
            runs = condition(body, before)
            results = [_where(body, runs, body.tensor(x), old) for x, old in zip(results, before, strict=True)]
        answer = _tensor(goes_on(body, results))
        _finish(body, [answer, *results])
    shapes = [(var.aval.shape, kernels.dtype_of_aval(var.aval)) for var in eqn.outvars]  # type: ignore[attr-defined]
    start = goes_on(low, [_tensor(value) for value in states])
    made = low.nodes("Loop", None, start, *states, results=shapes, body=body.emit.graph)
    return [_tensor(value) for value in made]


def _where(low: Lowering, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Choose by a condition along the first axes of two arrays."""
    aligned = condition.relabelled(condition.axes, x.shape)
    return low.elementwise("Where", aligned, x, y, dtype=x.dtype)


def _input(body: Lowering, like: ir.Value, shape: Sequence[int]) -> ir.Value:
    return ir.Value(name=body.emit.fresh("carried"), shape=ir.Shape(shape), type=like.type)


def _tensor(value: ir.Value) -> Tensor:
    shape = shape_of(value)
    assert value.dtype is not None
    return Tensor(value, tuple(range(len(shape))), shape, value.dtype.numpy())


def _finish(body: Lowering, results: Sequence[Array]) -> None:
    """Make results the outputs of a body, each a separate value computed in the body."""
    graph = body.emit.graph
    for result in results:
        value = body.full(body.tensor(result))
        producer = value.producer()
        if producer is None or producer.graph is not graph or value in graph.outputs:
            copy = body.emit("Identity", value, like=value)
            value = copy
        graph.outputs.append(value)
