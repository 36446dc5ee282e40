"""Order and names of a graph by its structure alone."""

from __future__ import annotations

import random

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from onnx_remat.converters.settled import settle

FLOAT = TensorProto.FLOAT


def model(order: int) -> onnx.ModelProto:
    """A graph with a body that captures, a constant, and a node that nothing needs; nodes and counts by `order`."""
    pick = random.Random(order)
    count = iter(pick.sample(range(10, 99), 20))

    def name(stem: str) -> str:
        return f"{stem}__{next(count)}"

    doubled, branch, half, less = name("net/Mul"), name("net/Abs"), name("half"), name("net/Less")
    branches = {
        f"{kind}_branch": helper.make_graph(
            [helper.make_node(op, [doubled], [inner := name(f"in/{op}")], name("in/op"))],
            kind, [], [helper.make_tensor_value_info(inner, FLOAT, [4])],
        )
        for kind, op in (("then", "Neg"), ("else", "Abs"))
    }  # fmt: skip
    nodes = [
        helper.make_node("Mul", ["x", half], [doubled], name("net/Mul")),
        helper.make_node("ReduceSum", [doubled], [total := name("net/Sum")], name("net/Sum"), keepdims=0),
        helper.make_node("Less", [half, total], [less], name("net/Less")),
        helper.make_node("If", [less], [branch], name("net/cond"), **branches),
        helper.make_node("Add", [branch, doubled], ["loss"], name("net/Add")),
        helper.make_node("Exp", ["x"], [name("unused")], name("net/Exp")),
    ]
    pick.shuffle(nodes)
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", FLOAT, [4])],
        [helper.make_tensor_value_info("loss", FLOAT, [4])], [numpy_helper.from_array(np.float32(0.5), half)],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_graphs_that_differ_by_names_and_order_become_one_that_computes_the_same():
    first, second = model(1), model(2)
    assert first != second
    for each in (first, second):
        settle(each)
        onnx.checker.check_model(each, full_check=True)
    assert first == second
    assert [node.name for node in first.graph.node] == ["net/Mul", "net/Sum", "net/Less", "net/cond", "net/Add"]
    session = ort.InferenceSession(first.SerializeToString(), providers=["CPUExecutionProvider"])
    for sign in (1, -1):
        x = sign * np.float32([1, 2, 3, 4])
        expected = (-0.5 * x if sign > 0 else np.abs(0.5 * x)) + 0.5 * x
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], expected)
