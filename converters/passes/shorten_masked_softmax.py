"""Masked softmax, as torch's attention computes it, in fewer passes over the scores."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from onnx_remat.ir.op_semantics import semantics
from onnx_remat.ort import runtime

from ..dims import Dims, dims, is_static, size
from ..halves import widened
from ..tape import Tape, number
from ..values import replace
from .base import Fact, rewrite
from .scatter_into import filled_with

_MOST = 1 << 24
"""Elements of the largest mask that the pass computes in order to inspect it."""


@rewrite(requires=[Fact.SHAPES, Fact.STATED])
def shorten_masked_softmax(model: ir.Model) -> None:
    """Rewrite, in place, ``where(all(x == -inf), 0, softmax(x))``.

    If `x` is the sum of a product of matrices and of a mask that depends on no input or draw and has a finite entry in
    every row, the result is the softmax alone. Scores that overflow to minus infinity along a whole row then give NaN.
    Otherwise the test compares the maximum of each row with minus infinity: one pass over the scores, and no integers
    twice as large as the scores.
    """
    tape = Tape(model.graph)
    whole: dict[ir.Value, bool] = {}
    for node in list(model.graph):
        if node.domain or node.op_type != "Where":
            continue
        empty, zero, softmax = node.inputs
        made = softmax.producer() if softmax is not None else None
        if made is None or made.domain or made.op_type != "Softmax" or not filled_with(zero, 0.0) or softmax is None:
            continue
        x = made.inputs[0]
        axis = made.attributes["axis"].as_int() if "axis" in made.attributes else -1
        if x is None or x.shape is None or axis % len(dims(x)) != len(dims(x)) - 1 or not _all_lost(empty, x):
            continue
        if dims(softmax) == dims(node.outputs[0]) and _has_finite_entries(x, whole):
            replace(node.outputs[0], softmax)
            continue
        with tape.ahead_of(node, node.metadata_props.get("phase", "forward")):  # type: ignore[arg-type]
            shape = (*dims(x)[:-1], 1)
            if model.graph.opset_imports[""] < _AXES_ARE_INPUTS:
                largest = tape.op("ReduceMax", x, shape=shape, axes=[-1], keepdims=1)
            else:
                largest = tape.op("ReduceMax", x, tape.ints(-1), shape=shape, keepdims=1)
            node.replace_input_with(0, tape.compare("Equal", largest, tape.scalar(-np.inf, x)))
    common.RemoveUnusedNodesPass()(model)


_AXES_ARE_INPUTS = 18
"""First opset in which ReduceMax takes its axes as an input."""


def _all_lost(empty: ir.Value | None, x: ir.Value) -> bool:
    """Return whether a value states for each row of `x` if all its entries are minus infinity."""
    chain = ["Cast", "ReduceMin", "Cast", "Equal"]
    for op_type in chain:
        node = empty.producer() if empty is not None else None
        if node is None or node.domain or node.op_type != op_type:
            return False
        if op_type == "Equal":
            return (node.inputs[0] is x and filled_with(node.inputs[1], -np.inf)) or (
                node.inputs[1] is x and filled_with(node.inputs[0], -np.inf)
            )
        if op_type == "ReduceMin":
            axes = node.inputs[1].const_value if len(node.inputs) > 1 and node.inputs[1] is not None else None
            if axes is None or [int(a) % len(dims(x)) for a in axes.numpy()] != [len(dims(x)) - 1]:
                return False
            if dims(node.outputs[0]) != (*dims(x)[:-1], 1):
                return False
        empty = node.inputs[0]
    return False


def _addends(x: ir.Value) -> list[ir.Value]:
    node = x.producer()
    if node is None or node.domain or node.op_type != "Add":
        return []
    return [value for value in node.inputs if value is not None]


def _has_finite_entries(x: ir.Value, known: dict[ir.Value, bool]) -> bool:
    """Return whether each row of a sum has a finite entry, unless a product of matrices overflows."""
    found = _addends(x)
    return any(
        _leaves_some(mask, known) and all(_is_product(rest) for rest in found if rest is not mask) for mask in found
    )


_KEEPS_FINITE = frozenset({"Cast", "Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


def _is_product(value: ir.Value | None) -> bool:
    """Return whether a value is a product of matrices, perhaps scaled by a number."""
    node = value.producer() if value is not None else None
    if node is None or node.domain:
        return False
    if node.op_type in ("Mul", "Div"):
        rest = [each for each in node.inputs if each is not None and number(each) is None]
        return len(rest) == 1 and _is_product(rest[0])
    return node.op_type in ("MatMul", "Gemm") or (node.op_type in _KEEPS_FINITE and _is_product(node.inputs[0]))


def _leaves_some(mask: ir.Value, known: dict[ir.Value, bool]) -> bool:
    """Return whether a value depends on no input or draw and has a finite entry in each row."""
    if mask not in known:
        made = _computed(mask)
        known[mask] = made is not None and made.ndim > 0 and bool(np.isfinite(made).any(-1).all())
    return known[mask]


def _computed(value: ir.Value) -> np.ndarray | None:
    """Return the array of a value that depends on no input; None if it depends on one or on a draw, or is large.

    An open size counts as `_ANY` if it only determines how often something is repeated, because the entries are then
    the same for every size.
    """
    if value.shape is None or (size(_closed(dims(value))) or 0) > _MOST:
        return None
    nodes: dict[ir.Node, None] = {}
    constants: dict[str, np.ndarray] = {}
    measured: set[ir.Value] = set()
    todo = [value]
    while todo:
        one = todo.pop()
        if one.const_value is not None and not one.is_graph_input():
            constants[str(one.name)] = one.const_value.numpy()
            continue
        node = one.producer()
        if node is None or node.domain or node.attributes.keys() & {"body", "then_branch", "else_branch"}:
            return None
        if semantics(node.domain, node.op_type).random:
            return None
        if node.op_type == "Shape" and node.inputs[0] is not None and node.inputs[0].shape is not None:
            start, end = (node.attributes[a].as_int() if a in node.attributes else None for a in ("start", "end"))
            found = dims(node.inputs[0])[start:end]
            constants[str(one.name)] = np.array(_closed(found), np.int64)
            measured.update([] if is_static(found) else [one])
        elif node not in nodes:
            nodes[node] = None
            todo += [source for source in node.inputs if source is not None]
    if not nodes:
        return None if measured else constants.get(str(value.name))
    graph = next(iter(nodes)).graph
    assert graph is not None
    run = [node for node in graph if node in nodes]
    if _is_of_sizes(value, run, measured):
        return None
    output = onnx.ValueInfoProto(name=str(value.name))
    kept = [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()]
    stated = [
        onnx.helper.make_tensor_value_info(str(made.name), int(made.dtype), None)
        for node in run for made in node.outputs if made.dtype is not None
    ]  # fmt: skip
    nodes_run = [ir.to_proto(node) for node in run]
    proto = onnx.helper.make_graph(nodes_run, "mask", [], [output], kept, value_info=stated)
    opset = onnx.helper.make_opsetid("", graph.opset_imports[""])
    model = widened(ir.from_proto(onnx.helper.make_model(proto, opset_imports=[opset], ir_version=10)))
    made = runtime.outputs(ir.to_proto(model), {})[str(value.name)]
    return made if value.dtype is None else made.astype(value.dtype.numpy())


_ANY = 2
_SHAPES = {"Expand": 1, "Reshape": 1, "ConstantOfShape": 0}
"""The input of each op that determines the size of its result, but not its entries."""


def _closed(shape: Dims) -> tuple[int, ...]:
    return tuple(d if isinstance(d, int) else _ANY for d in shape)


def _is_of_sizes(value: ir.Value, run: list[ir.Node], measured: set[ir.Value]) -> bool:
    """Return whether the entries of a value depend on open sizes; `run` are the nodes that compute it, in order."""
    sizes = set(measured)
    for node in run:
        if any(source in sizes and _SHAPES.get(node.op_type) != slot for slot, source in enumerate(node.inputs)):
            sizes.update(node.outputs)
    return value in sizes
