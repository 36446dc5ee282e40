"""Splitting of a training Dropout: a draw of the mask, which runs once, and a product with it, which may run again.

To the planner these are two ops, the second one recomputable. In the file the draw and the first product are the
original Dropout; each further product is written as nodes that compute what the kernel does, to the last bit:
``x * Cast(mask) / (1 - ratio)``, in that order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnx_remat.ir.graph import Graph, Op, constants
from onnx_remat.ir.op_semantics import DRAW, PRODUCT, SPLIT, is_random
from onnx_remat.ir.shapes import Tensor
from onnx_remat.memory.problem import Problem, Schedule

_KEEP = "keep"
"""Attribute of a product: the kernel's divisor, 1 - ratio in single precision."""

_SCALED_ALIKE = (TensorProto.FLOAT, TensorProto.DOUBLE)  # in half precision the kernel rounds once, the nodes thrice


def is_draw(op: Op) -> bool:
    """Whether an op is the draw of a split Dropout."""
    return op.kind == (SPLIT, DRAW)


def is_product(op: Op) -> bool:
    """Whether an op is the product of a split Dropout."""
    return op.kind == (SPLIT, PRODUCT)


def training_mode(node: onnx.NodeProto, stated: Mapping[str, onnx.TensorProto]) -> bool | None:
    """Whether a Dropout is in training mode; None if it is only known at run time, or for any other op."""
    if node.op_type != "Dropout":
        return None
    name = node.input[2] if len(node.input) > 2 else ""
    if name:
        mode = _number(stated.get(name))
        return None if mode is None else bool(mode)
    is_test = next((attribute.i for attribute in node.attribute if attribute.name == "is_test"), None)
    return False if is_test is None else not is_test


def is_random_node(node: onnx.NodeProto, opset: int, stated: Mapping[str, onnx.TensorProto]) -> bool:
    """Whether two executions of a node may return different values.

    `opset` is the version of the node's domain, `stated` the graph's constants (`graph.constants`).
    """
    return is_random(node.domain, node.op_type, opset=opset, training_mode=training_mode(node, stated))


def kept_share(node: onnx.NodeProto, stated: Mapping[str, onnx.TensorProto]) -> np.float32 | None:
    """Return the divisor of a Dropout, as its kernel computes it; None if it is only known at run time."""
    name = node.input[1] if len(node.input) > 1 else ""
    ratio = _number(stated.get(name)) if name else 0.5
    return None if ratio is None or not 0 <= ratio < 1 else np.float32(1) - np.float32(ratio)


def _number(tensor: onnx.TensorProto | None) -> float | None:
    if tensor is None or tensor.data_location == TensorProto.EXTERNAL:
        return None
    values = numpy_helper.to_array(tensor)
    return float(values.reshape(-1)[0]) if values.size == 1 else None


def split(graph: Graph, tensors: Mapping[str, Tensor]) -> Graph:
    """Return the same graph with every Dropout whose mask has a reader split into its draw and its product.

    A Dropout stays whole if it does not train, if its ratio or mode is only known at run time, if its result is a graph
    output, or in half precision.
    """
    stated = constants(graph.model.graph)
    parts = [_parts(graph, tensors, stated, op) for op in graph.ops]
    ops = [replace(op, index=index) for index, op in enumerate(op for some in parts for op in some)]
    if len(ops) == len(graph.ops):
        return graph
    return replace(graph, ops=tuple(ops))


def _parts(
    graph: Graph, tensors: Mapping[str, Tensor], stated: Mapping[str, onnx.TensorProto], op: Op
) -> tuple[Op, ...]:
    node = op.node
    if node.op_type != "Dropout" or node.domain or len(node.output) < 2 or not all(node.output[:2]):
        return (op,)
    result, mask = node.output
    keep = kept_share(node, stated)
    if (
        keep is None
        or training_mode(node, stated) is not True
        or graph.values[result].is_output
        or tensors[result].dtype not in _SCALED_ALIKE
        or not graph.readers[mask]
    ):
        return (op,)
    draw, product = onnx.NodeProto(), onnx.NodeProto()
    draw.CopyFrom(node)
    draw.op_type, draw.domain, draw.output[:] = DRAW, SPLIT, [mask]
    product.CopyFrom(node)
    product.op_type, product.domain, product.output[:] = PRODUCT, SPLIT, [result]
    product.name = op.label  # recomputes are named after the Dropout
    product.input[:] = [node.input[0], mask]
    product.ClearField("attribute")
    product.attribute.append(helper.make_attribute(_KEEP, float(keep)))
    return replace(op, node=draw, outputs=(mask,)), replace(
        op, node=product, inputs=tuple(product.input), outputs=(result,)
    )


def whole(draw: Op, product: Op) -> onnx.NodeProto:
    """Return the Dropout that a draw and its first product came from."""
    node = onnx.NodeProto()
    node.CopyFrom(draw.node)
    node.op_type, node.domain, node.output[:] = "Dropout", "", [product.outputs[0], draw.outputs[0]]
    return node


def kept(product: Op) -> float:
    """Return the divisor of a product."""
    return float(helper.get_node_attr_value(product.node, _KEEP))


def spelled_out(
    product: Op, source: str, mask: str, divisor: str, between: Sequence[str], dtype: int
) -> list[onnx.NodeProto]:
    """Return the nodes of a recomputed product; `between` names the first two results, the last has no name yet."""
    factor, scaled = between
    nodes = [
        helper.make_node("Cast", [mask], [factor], name=factor, to=dtype),
        helper.make_node("Mul", [source, factor], [scaled], name=scaled),
        helper.make_node("Div", [scaled, divisor], [""]),
    ]
    for node in nodes:
        node.metadata_props.extend(product.node.metadata_props)
    return nodes


def pairs(graph: Graph) -> Iterator[tuple[int, int]]:
    """Yield the indices of the draw and the product of every split Dropout."""
    draws = {op.outputs[0]: op.index for op in graph.ops if is_draw(op)}
    yield from ((draws[op.inputs[1]], op.index) for op in graph.ops if is_product(op))


def with_draws_at_products(graph: Graph, problem: Problem, schedule: Schedule) -> Schedule:
    """Return `schedule` with every draw right before the first product, as both are written as one node.

    A draw moves later, to its product, which reads the same input, so that no value lives longer; if other ops read the
    mask in between, the product moves earlier instead.
    """
    products = dict(pairs(graph))
    if not products:
        return schedule
    first: dict[int, int] = {}
    for step, op in enumerate(schedule.order):
        first.setdefault(op, step)
    early: dict[int, int] = {}  # mask -> first step that reads it
    masks = {problem.outputs(draw)[0] for draw in products}
    for step, op in enumerate(schedule.order):
        for value in masks.intersection(problem.inputs(op)):
            early.setdefault(value, step)
    before: dict[int, list[int]] = {}  # step -> ops placed right before it
    moved: set[int] = set()
    for draw, product in products.items():
        here = min(early[problem.outputs(draw)[0]], first[product])
        moved.add(first[draw])
        before[here] = [*before.get(here, ()), draw]
        if here < first[product]:
            moved.add(first[product])
            before[here].append(product)
    order: list[int] = []
    for step, op in enumerate(schedule.order):
        order.extend(before.get(step, ()))
        if step not in moved:
            order.append(op)
    return Schedule(tuple(order))
