"""The IR: what a file's nodes, values and edges become, and which files are refused, by node name."""

from __future__ import annotations

import networkx as nx
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_remat.errors import ModelError
from onnx_remat.ir import graph, shapes
from onnx_remat.ir.body import constant_bytes
from tests.support.graphs import mlp, model_of

make = helper.make_node


def body(nodes, outputs, inputs=(), name="body"):
    """A body of If or Loop; inputs and outputs are name -> (dtype, shape)."""

    def typed(values):
        return [helper.make_tensor_value_info(n, dtype, shape) for n, (dtype, shape) in dict(values).items()]

    return helper.make_graph(nodes, name, typed(inputs), typed(outputs))


def if_node(captured, other, output="y", name="choose"):
    """``y = cond ? Exp(captured) : Neg(other)`` on vectors of 4."""
    out = {f"{output}_in": (TensorProto.FLOAT, [4])}
    then = body([make("Exp", [captured], [f"{output}_in"], name="inner_exp")], out)
    other = body([make("Neg", [other], [f"{output}_in"], name="inner_neg")], out)
    return make("If", ["cond"], [output], name=name, then_branch=then, else_branch=other)


def test_it_is_a_bipartite_graph_in_file_order():
    model = mlp(layers=3)
    ir = graph.build(model)
    assert [op.node.name for op in ir.ops] == [n.name for n in model.graph.node]
    assert [op.index for op in ir.ops] == list(range(len(ir.ops)))
    assert nx.is_directed_acyclic_graph(ir.nx)
    assert all(isinstance(a, int) != isinstance(b, int) for a, b in ir.nx.edges)
    assert set(ir.nx) == {op.index for op in ir.ops} | set(ir.values)
    assert all(ir.nx.nodes[op.index]["op"] is op for op in ir.ops)
    assert all(ir.nx.nodes[name]["value"] is value for name, value in ir.values.items())


def test_values_know_their_origin_in_order_of_definition():
    ir = graph.build(mlp(layers=1))
    kinds = {name: value.kind for name, value in ir.values.items()}
    assert [kinds[n] for n in ("x", "lr", "z0")] == [graph.INPUT, graph.INITIALIZER, graph.NODE]
    assert list(kinds)[:5] == ["x", "t", "w0", "lr", "two"]
    assert {name for name, value in ir.values.items() if value.is_output} == {"loss", "new.w0"}


def test_edges_carry_slots():
    ir = graph.build(mlp(layers=2))
    producer = ir.makers
    square, product = producer["ee"], producer["z1"]
    assert ir.nx.edges["e", square]["slots"] == (0, 1)  # e * e
    assert ir.nx.edges["a0", product]["slots"] == (0,)
    assert ir.nx.edges["w1", product]["slots"] == (1,)
    assert ir.nx.edges[product, "z1"]["slots"] == (0,)
    assert ir.ops[square].reads == ("e", "e")


def test_consumers_are_ascending_without_repeats():
    ir = graph.build(mlp(layers=2))
    readers = ir.readers
    assert [ir.ops[i].label for i in readers["e"]] == ["sq", "dloss"]
    assert all(found == sorted(set(found)) for found in readers.values())
    assert readers["loss"] == []
    assert all(set(readers[name]) == set(ir.nx.successors(name)) for name in ir.values)


def test_absent_optional_inputs_and_outputs_are_no_values():
    nodes = [
        make("Clip", ["x", "", "high"], ["c"], name="clip"),
        make("LayerNormalization", ["c", "s"], ["y", "", "inv"], name="norm"),
        make("Add", ["y", "inv"], ["z"], name="add"),
    ]
    model = model_of(nodes, {"x": [2, 4], "s": [4]}, {"z": [2, 4]}, {"high": np.float32(1)})
    ir = graph.build(model)
    clip, norm, _ = ir.ops
    assert clip.inputs == ("x", "", "high") and clip.reads == ("x", "high")
    assert ir.nx.edges["high", 0]["slots"] == (2,)
    assert norm.outputs == ("y", "", "inv") and norm.writes == ("y", "inv")
    assert ir.nx.edges[1, "inv"]["slots"] == (2,)
    assert "" not in ir.values and "" not in ir.nx


def test_constant_nodes_are_initializers():
    constant = make("Constant", [], ["k"], name="k", value=numpy_helper.from_array(np.ones(4, np.float32)))
    ir = graph.build(model_of([constant, make("Add", ["x", "k"], ["y"])], {"x": [4]}, {"y": [4]}))
    assert [op.node.op_type for op in ir.ops] == ["Add"]
    assert ir.ops[0].index == 0 and ir.ops[0].label == "Add->y"
    assert ir.values["k"].kind == graph.INITIALIZER
    assert shapes.infer(ir)["k"].shape == (4,)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("value_float = 0.5", np.float32(0.5)),
        ("value_floats = [0.5, 2.0]", np.array([0.5, 2], np.float32)),
        ("value_int = 3", np.int64(3)),
        ("value_ints = [3, 4]", np.array([3, 4])),
        ("value = int32[1] {7}", np.array([7], np.int32)),
    ],
)
def test_constants_of_every_form_are_known(form, expected):
    node = onnx.parser.parse_node(f"c = Constant <{form}> ()")
    outer = graph.constants(onnx.GraphProto(node=[node]))
    found = onnx.numpy_helper.to_array(outer["c"])
    assert (found.dtype, found.shape, found.tolist()) == (expected.dtype, expected.shape, expected.tolist())
    assert constant_bytes(onnx.GraphProto(node=[node])) == expected.nbytes


def test_a_constant_of_sparse_values_is_not_known():
    sparse = helper.make_sparse_tensor(
        helper.make_tensor("v", 1, [1], [2.0]), helper.make_tensor("i", 7, [1], [3]), [300]
    )
    node = helper.make_node("Constant", [], ["c"], sparse_value=sparse)
    assert not graph.constants(onnx.GraphProto(node=[node]))


def test_initializers_may_repeat_an_input():
    """Files of IR version 3 list initializers among the inputs, later ones as defaults of inputs."""
    model = model_of([make("Add", ["x", "w"], ["y"])], {"x": [4], "w": [4]}, {"y": [4]}, {"w": np.ones(4, np.float32)})
    assert graph.build(model).values["w"].kind == graph.INITIALIZER


def test_bodies_of_if_capture_outer_values_once():
    nodes = [make("Tanh", ["x"], ["h"], name="tanh"), if_node("h", "x")]
    ir = graph.build(model_of(nodes, {"x": [4], "cond": (TensorProto.BOOL, [])}, {"y": [4]}))
    choose = ir.ops[1]
    assert choose.inputs == ("cond",)
    assert sorted(choose.captured) == ["h", "x"]
    assert choose.reads == ("cond", *choose.captured)
    assert ir.nx.edges["h", 1]["slots"] == (1 + choose.captured.index("h"),)
    assert ir.readers["h"] == [1]
    assert {"y_in"}.isdisjoint(ir.values)
    assert {b.node[0].op_type for b in graph.bodies(choose.node)} == {"Neg", "Exp"}


def test_nested_bodies_capture_through_every_level():
    """A Loop over an If: what the inner body reads from outside both is captured, what the Loop makes is not."""
    inner = if_node("scaled", "outside", output="picked", name="inner_if")
    inner.input[0] = "flag"
    loop_body = body(
        [make("Mul", ["state", "factor"], ["scaled"]), inner, make("Identity", ["keep_on"], ["go_on"])],
        {"go_on": (TensorProto.BOOL, []), "picked": (TensorProto.FLOAT, [4])},
        {
            "i": (TensorProto.INT64, []),
            "keep_on": (TensorProto.BOOL, []),
            "state": (TensorProto.FLOAT, [4]),
        },
    )
    nodes = [
        make("Neg", ["x"], ["outside"], name="neg"),
        make("Tanh", ["x"], ["factor"], name="tanh"),
        make("Loop", ["count", "", "x"], ["y"], name="loop", body=loop_body),
    ]
    inputs = {"x": [4], "count": (TensorProto.INT64, []), "flag": (TensorProto.BOOL, [])}
    model = model_of(nodes, inputs, {"y": [4]})
    onnx.checker.check_model(model, full_check=True)
    loop = graph.build(model).ops[2]
    assert loop.inputs == ("count", "", "x")
    assert set(loop.captured) == {"factor", "flag", "outside"}
    assert len(loop.captured) == 3


def test_a_body_that_shadows_nothing_outer_captures_nothing():
    out = {"same": (TensorProto.FLOAT, [4])}
    then = body([make("RandomNormal", [], ["same"], shape=[4])], out)
    other = body([make("Constant", [], ["same"], value=numpy_helper.from_array(np.ones(4, np.float32)))], out)
    node = make("If", ["cond"], ["y"], name="choose", then_branch=then, else_branch=other)
    ir = graph.build(model_of([node], {"cond": (TensorProto.BOOL, [])}, {"y": [4]}))
    assert ir.ops[0].captured == () and ir.ops[0].reads == ("cond",)


def test_functions_are_inlined_and_kept():
    inside = [make("Mul", ["a", "a"], ["t"]), make("Add", ["t", "a"], ["b"])]
    function = helper.make_function("my", "Poly", ["a"], ["b"], inside, [helper.make_opsetid("", 20)])
    nodes = [make("Poly", ["x"], ["p"], domain="my", name="p"), make("Poly", ["p"], ["y"], domain="my", name="q")]
    model = model_of(nodes, {"x": [4]}, {"y": [4]})
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("my", 1))
    ir = graph.build(model)
    assert [op.node.op_type for op in ir.ops] == ["Mul", "Add", "Mul", "Add"]
    assert {"p", "y"} <= set(ir.makers)
    assert [f.name for f in ir.model.functions] == ["Poly"]
    assert [n.op_type for n in model.graph.node] == ["Poly", "Poly"]  # the caller's model is left alone
    assert shapes.infer(ir)["p"].shape == (4,)


def test_building_does_not_change_the_model():
    model = mlp(layers=2)
    before = model.SerializeToString(deterministic=True)
    graph.build(model)
    assert model.SerializeToString(deterministic=True) == before


def refused(nodes, message, inputs=None, outputs=None, **more):
    with pytest.raises(ModelError, match=message):
        graph.build(model_of(nodes, inputs or {"x": [4]}, outputs or {"y": [4]}, **more))


def test_undefined_values_are_refused_by_node_name():
    refused([make("Tanh", ["ghost"], ["y"], name="act7")], "node 'act7' reads 'ghost', which nothing defines")
    refused([make("Tanh", ["ghost"], ["y"])], "node 'Tanh' reads 'ghost'")


def test_undefined_captures_are_refused_by_the_outer_node():
    refused(
        [if_node("ghost", "x", name="choose3")], "node 'choose3' reads 'ghost'",
        {"x": [4], "cond": (TensorProto.BOOL, [])},
    )  # fmt: skip


def test_unsorted_nodes_and_cycles_are_distinguished_from_undefined_values():
    late = [make("Tanh", ["h"], ["y"], name="second"), make("Neg", ["x"], ["h"], name="first")]
    refused(late, "node 'second' reads 'h', which is made only later: sort the nodes")
    cycle = [make("Add", ["x", "b"], ["a"], name="one"), make("Neg", ["a"], ["b"], name="two")]
    refused(cycle, "node 'one' reads 'b'.*cycle")


@pytest.mark.parametrize(
    ("nodes", "initializers"),
    [
        ([make("Neg", ["x"], ["y"], name="one"), make("Tanh", ["x"], ["y"], name="two")], {}),
        ([make("Neg", ["x"], ["x"], name="two"), make("Neg", ["x"], ["y"], name="three")], {}),
        ([make("Neg", ["x"], ["y"], name="two")], {"y": np.ones(4, np.float32)}),
    ],
)
def test_values_defined_twice_are_refused(nodes, initializers):
    refused(nodes, r"'[xy]' is defined twice \(node 'two'\)", initializers=initializers)


def test_outputs_nobody_makes_are_refused():
    refused([make("Neg", ["x"], ["z"])], "graph output 'y' is made by no node")


def test_a_model_without_operator_sets_is_refused():
    model = model_of([make("Neg", ["x"], ["y"])], {"x": [4]}, {"y": [4]})
    model.ClearField("opset_import")
    with pytest.raises(ModelError, match="operator set"):
        graph.build(model)
