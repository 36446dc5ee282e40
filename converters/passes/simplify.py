"""Remove redundant nodes that exporters of frameworks write."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from itertools import zip_longest

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from onnx_remat.ir.op_semantics import semantics

from ..dims import broadcast, sizes
from ..values import constant, replace, static
from .base import Fact, rewrite
from .chains import fuse_chain, perm_of, to_reshape
from .concat_padded_sums import concat_padded_sums
from .products import absorb_batch, absorb_transpose, keep_axes, scale_first, turn_batch, turn_product
from .scatter_into import scatter_into

_BROADCASTING = {
    "Add", "Sub", "Mul", "Div", "Pow", "Mod", "Max", "Min", "Sum", "Where", "And", "Or", "Xor", "Equal", "Less",
    "LessOrEqual", "Greater", "GreaterOrEqual", "PRelu", "BitwiseAnd", "BitwiseOr",
}  # fmt: skip
_APART = "onnx_remat.apart"


@rewrite(requires=[Fact.SHAPES, Fact.STATED], ensures=[Fact.LEAN])
def simplify(model: ir.Model) -> None:
    """Rewrite a model, in place, to compute the same outputs with fewer nodes.

    The pass removes Identity, and each Cast, Transpose, Reshape, Expand, Slice, Concat, Sum and arithmetic node that
    changes nothing; reductions over axes of size 1; an Expand whose reader broadcasts by itself (also a matrix expanded
    to a batch of matrices), or that can follow its reader; a Transpose that a matrix product can include; reshapes of
    batches of matrices around their product; and duplicate or unused nodes. It merges chains of Transpose and of
    reshapes into one node each. A Size becomes a product of sizes from Shape, a sum of padded parts that do not overlap
    becomes a Concat, and a value that is scattered into zeros and then added is scattered directly. Nodes keep their
    phases.
    """
    for change in (
        _count,
        _unreduce,
        _skip,
        keep_axes,
        fuse_chain,
        scale_first,
        turn_batch,
        _expand_later,
        _absorb_expand,
        absorb_batch,
        absorb_transpose,
        turn_product,
        concat_padded_sums,
        scatter_into,
    ):
        for node in model.graph:
            change(node)
        common.RemoveUnusedNodesPass()(model)  # an unused node must not count as a reader
    common.DeduplicateInitializersPass()(model)
    apart = [node for node in model.graph if _counts_each_time(node)]
    for index, node in enumerate(apart):  # the pass below would merge two equal ones
        node.attributes[_APART] = ir.AttrInt64(_APART, index)
    common.CommonSubexpressionEliminationPass()(model)
    for node in apart:
        del node.attributes[_APART]
    for node in model.graph:  # of two equal outputs, the second becomes a copy, which has no phase
        source = node.inputs[0].producer() if node.op_type == "Identity" and node.inputs[0] is not None else None
        if source is not None and "phase" not in node.metadata_props:
            node.metadata_props.update(source.metadata_props)
    common.RemoveUnusedNodesPass()(model)
    common.NameFixPass()(model)  # the model may have a name that was given to a new value


def _counts_each_time(node: ir.Node) -> bool:
    """Return whether a second run of a node on the same input differs: a draw, or an update of running statistics."""
    trains = "training_mode" in node.attributes and bool(node.attributes["training_mode"].as_int())
    return trains or semantics(node.domain, node.op_type).random


def _count(node: ir.Node) -> None:
    """Replace a Size by a product of sizes: ONNX Runtime folds a Shape of known sizes, but not a Size."""
    if node.domain or node.op_type != "Size" or node.inputs[0] is None:
        return
    made = node.outputs[0]
    shape = ir.node("Shape", [node.inputs[0]], metadata_props=dict(node.metadata_props))
    shape.name, shape.outputs[0].name = f"node.{made.name}.shape", f"{made.name}.shape"
    rank = node.inputs[0].shape.rank() if node.inputs[0].shape is not None else None
    shape.outputs[0].shape, shape.outputs[0].type = ir.Shape([rank]), ir.TensorType(ir.DataType.INT64)
    assert node.graph is not None
    node.graph.insert_before(node, shape)
    node.op_type = "ReduceProd"
    node.attributes["keepdims"] = ir.AttrInt64("keepdims", 0)
    node.replace_input_with(0, shape.outputs[0])


def _unreduce(node: ir.Node) -> None:
    """Replace a reduction over axes of size 1 by a reshape."""
    if node.domain or node.op_type not in _OF_ONE:
        return
    source, result = node.inputs[0], node.outputs[0]
    shapes = static(source), static(result)
    if source is None or shapes[0] is None or shapes[1] is None or 0 in shapes[0]:
        return
    if math.prod(shapes[0]) == math.prod(shapes[1]):
        to_reshape(node, source, shapes[1])


_OF_ONE = {"ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"}


def _skip(node: ir.Node) -> None:
    """Let readers of a node that changes nothing read its input."""
    if node.domain == "" and node.op_type in _NEUTRAL and len(node.outputs) == 1:
        source = _NEUTRAL[node.op_type](node)
        if source is not None and source.dtype == node.outputs[0].dtype:
            replace(node.outputs[0], source)


def _same_shape(node: ir.Node) -> ir.Value | None:
    source = node.inputs[0]
    assert source is not None
    return source if static(source) is not None and static(source) == static(node.outputs[0]) else None


def _identity(node: ir.Node) -> ir.Value | None:
    return node.inputs[0]


def _transpose(node: ir.Node) -> ir.Value | None:
    perm = perm_of(node)
    return node.inputs[0] if perm is not None and perm == sorted(perm) else None


def _whole(node: ir.Node) -> ir.Value | None:
    """Return the input of a Slice that covers every axis whole."""
    if len(node.inputs) < 3:
        return None
    starts, ends = constant(node.inputs[1]), constant(node.inputs[2])
    steps = constant(node.inputs[4]) if len(node.inputs) > 4 and node.inputs[4] is not None else np.ones(1)
    if starts is None or ends is None or steps is None or starts.any() or (steps != 1).any():
        return None
    return node.inputs[0] if (ends >= _WITHOUT_END).all() else None


_WITHOUT_END = 2**31 - 1


def _alone(node: ir.Node) -> ir.Value | None:
    return node.inputs[0] if len(node.inputs) == 1 else None


def _neutral_element(element: float, commutes: bool) -> Callable[[ir.Node], ir.Value | None]:
    def source(node: ir.Node) -> ir.Value | None:
        first, second = node.inputs
        assert first is not None and second is not None
        for value, other in [(first, second), (second, first)] if commutes else [(first, second)]:
            known = constant(other)
            if known is not None and known.size == 1 and float(known.item()) == element:
                shape = static(value)
                return value if shape is not None and shape == static(node.outputs[0]) else None
        return None

    return source


def _chosen(node: ir.Node) -> ir.Value | None:
    """Return the operand that a Where with a constant scalar condition selects."""
    condition, first, second = node.inputs
    assert condition is not None
    known = constant(condition)
    if known is None or known.size != 1:
        return None
    value = first if known.item() else second
    shape = static(value)
    return value if shape is not None and shape == static(node.outputs[0]) else None


_NEUTRAL: dict[str, Callable[[ir.Node], ir.Value | None]] = {
    "Identity": _identity,
    "Cast": _identity,  # the dtype is compared above
    "CastLike": _identity,
    "Transpose": _transpose,
    "Reshape": _same_shape,
    "Expand": _same_shape,
    "Squeeze": _same_shape,
    "Unsqueeze": _same_shape,
    "Concat": _alone,
    "Sum": _alone,
    "Slice": _whole,
    "Max": _alone,
    "Min": _alone,
    "Mul": _neutral_element(1, True),
    "Div": _neutral_element(1, False),
    "Add": _neutral_element(0, True),
    "Sub": _neutral_element(0, False),
    "Where": _chosen,
    "Pow": _neutral_element(1, False),
}


def _expand_later(node: ir.Node) -> None:
    """Move an Expand behind arithmetic with scalars or with values as narrow as the one that is expanded."""
    if node.domain or node.op_type not in _BROADCASTING - {"PRelu"} or not node.inputs:  # no slope may be wider
        return
    result, made = static(node.outputs[0]), node.outputs[0]
    sources = [_unexpanded(value) for value in node.inputs]
    if result is None or made.is_graph_output() or all(a is b for a, b in zip(sources, node.inputs, strict=True)):
        return
    narrow = _broadcast([static(value) for value in sources])
    if narrow is None or math.prod(narrow) >= math.prod(result) or 0 in result:
        return
    assert node.graph is not None
    readers = list(made.uses())
    for index, value in enumerate(sources):
        node.replace_input_with(index, value)
    made.shape = ir.Shape(narrow)
    name = f"{made.name}.{math.prod(result)}"  # a later rule may make it narrower still
    shape = ir.Value(name=f"{name}.shape", const_value=ir.tensor(np.array(result, np.int64)))
    shape.shape, shape.type = ir.Shape([len(result)]), ir.TensorType(ir.DataType.INT64)
    node.graph.register_initializer(shape)
    wide = ir.node("Expand", [made, shape], metadata_props=dict(node.metadata_props))
    wide.name, wide.outputs[0].name = f"node.{name}", name
    wide.outputs[0].shape, wide.outputs[0].type = ir.Shape(result), made.type
    node.graph.insert_after(node, wide)
    for user, index in readers:
        user.replace_input_with(index, wide.outputs[0])


def _unexpanded(value: ir.Value | None) -> ir.Value | None:
    """Return the input of the Expand that makes a value; the value itself if no Expand makes it."""
    before = value.producer() if value is not None else None
    if before is None or before.domain or before.op_type != "Expand" or static(value) is None:
        return value
    return before.inputs[0] if static(before.inputs[0]) is not None else value


def _absorb_expand(node: ir.Node) -> None:
    """Remove an Expand before an elementwise node, which broadcasts by itself."""
    if node.domain or node.op_type not in _BROADCASTING:
        return
    result = sizes(node.outputs[0])
    for index, value in enumerate(node.inputs):
        before = value.producer() if value is not None else None
        if node.op_type == "PRelu" and index == 0:  # no slope may be wider
            continue
        if before is None or before.domain or before.op_type not in ("Expand", "ConstantOfShape") or result is None:
            continue
        small = before.inputs[0] if before.op_type == "Expand" else None
        shapes = [() if i == index and small is None else sizes(small if i == index else v)
                  for i, v in enumerate(node.inputs)]  # fmt: skip
        known = [shape for shape in shapes if shape is not None]
        if len(known) == len(shapes) and reduce(broadcast, known) == result:
            node.replace_input_with(index, small or _fill(before))


def _fill(node: ir.Node) -> ir.Value:
    """Return a constant with the number that a ConstantOfShape repeats."""
    assert node.graph is not None
    value = node.attributes["value"].as_tensor().numpy() if "value" in node.attributes else np.zeros(1, np.float32)
    number, stored, name = value.reshape(()), node.graph.initializers, f"{node.outputs[0].name}.fill"
    while (known := constant(stored.get(name))) is not None and not _same(known, number):
        name += "'"  # a constant of the model
    if known is None:
        made = ir.Value(name=name, const_value=ir.tensor(number), shape=ir.Shape([]), type=node.outputs[0].type)
        node.graph.register_initializer(made)
    return stored[name]


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _broadcast(shapes: list[tuple[int, ...] | None]) -> tuple[int, ...] | None:
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes):
        return None
    axes = zip_longest(*(reversed(shape) for shape in known), fillvalue=1)
    return tuple(max(axis) if 0 not in axis else 0 for axis in axes)[::-1]
