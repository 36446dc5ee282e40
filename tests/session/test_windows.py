"""Products for the entries of a window as one product of columns, and what it costs."""

from __future__ import annotations

import itertools

import numpy as np
import onnxruntime
import pytest
from onnx import helper

from onnx_remat.ir.shapes import Tensor
from onnx_remat.options import Options
from onnx_remat.ort.executed import as_executed
from onnx_remat.ort.kernels.registry import kernels_of
from onnx_remat.rewrite import relaxed
from onnx_remat.session import offsets, windows
from onnx_remat.session.lean_graph import LeanNode
from onnx_remat.session.offsets import Program
from onnx_remat.session.prediction import laid_out
from onnx_remat.session.step_time import node_seconds
from tests.support.fusing import ordered_step
from tests.support.graphs import model_of

IMAGES, OUT, CHANNELS = [4, 10, 10, 8], 16, 8
"""Of images with a window of 3 x 3: 64 places in each."""


def nodes_of(name="", images="x", left="g", made="dw"):
    """The gradient of a convolution's weights, as converters write it."""
    nodes, weights, products = [], {f"{name}axes": np.array([1, 2]), f"{name}rows": np.array([-1, CHANNELS])}, []
    for i, start in enumerate(itertools.product(range(3), range(3))):
        weights |= {f"{name}from{i}": np.array(start), f"{name}to{i}": np.array(start) + 8}
        given = [images, f"{name}from{i}", f"{name}to{i}", f"{name}axes"]
        nodes += [
            helper.make_node("Slice", given, [f"{name}s{i}"], f"{name}slice{i}"),
            helper.make_node("Reshape", [f"{name}s{i}", f"{name}rows"], [f"{name}r{i}"], f"{name}view{i}"),
            helper.make_node("MatMul", [left, f"{name}r{i}"], [f"{name}p{i}"], f"{name}product{i}"),
        ]
        products.append(f"{name}p{i}")
    nodes.append(helper.make_node("Concat", products, [f"{name}c"], f"{name}concat", axis=1))
    nodes.append(helper.make_node("Tanh", [f"{name}c"], [made], f"{name}last"))
    return nodes, weights


def step(nodes=None, outputs=None):
    made, weights = nodes_of()
    return model_of(nodes or made, {"x": IMAGES, "g": [OUT, 256]}, outputs or {"dw": [OUT, 9 * CHANNELS]}, weights)


def program_of(model) -> tuple[Program, list[windows.Gradient]]:
    ordered = ordered_step(model)
    steps = [LeanNode(each) for each in model.graph.node]
    given = [value.name for value in (*model.graph.input, *model.graph.initializer)]
    made = offsets.program(steps, ordered.tensors, given, list(ordered.outputs), kernels_of("cuda"))
    return made, windows.find(ordered)


def ran(model, program: Program, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    graph = helper.make_graph([each.node for each in program.steps], "g", model.graph.input, model.graph.output,
                              model.graph.initializer)  # fmt: skip
    whole = helper.make_model(graph, opset_imports=model.opset_import, ir_version=8)
    session = onnxruntime.InferenceSession(whole.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip([value.name for value in model.graph.output], session.run(None, feeds), strict=True))


def counted(program: Program) -> dict[str, int]:
    kinds = [each.node.op_type for each in program.steps]
    return {kind: kinds.count(kind) for kind in ("MatMul", "Concat")}


SLICE = 4 * 4 * 8 * 8 * CHANNELS


@pytest.mark.parametrize(
    ("room", "products", "concats"),
    [(8 * SLICE, 1, 1), (8 * SLICE - 1, 3, 4), (2 * SLICE, 3, 4), (2 * SLICE - 1, 9, 1)],
)
def test_as_many_entries_have_one_product_as_there_is_room_for(room, products, concats):
    model = step()
    program, found = program_of(model)
    made = windows.joined(program, 17, found, lambda product, value: room)
    assert counted(made) == {"MatMul": products, "Concat": concats}
    assert (made is program) == (products == 9)
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal(IMAGES, np.float32), "g": rng.standard_normal((OUT, 256), np.float32)}
    np.testing.assert_allclose(ran(model, made, feeds)["dw"], ran(model, program, feeds)["dw"], rtol=1e-5, atol=1e-5)
    for name, tensor in made.tensors.items():
        assert tensor.nbytes == 4 * np.prod(tensor.shape, dtype=int) or tensor.dtype != 1, name


def test_room_is_asked_for_where_the_last_product_of_columns_runs():
    program, found = program_of(step())
    asked = []
    windows.joined(program, 17, found, lambda product, value: asked.append((product, value)) or 0)
    assert list(dict.fromkeys(asked)) == [("p8", "x"), ("p2", "x"), ("p5", "x")]  # of all entries, of each row


def test_rows_for_which_there_is_no_room_keep_their_products():
    model = step()
    program, found = program_of(model)
    made = windows.joined(program, 17, found, lambda product, value: 2 * SLICE * (product != "p5"))
    assert counted(made) == {"MatMul": 1 + 3 + 1, "Concat": 2 + 1}
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal(IMAGES, np.float32), "g": rng.standard_normal((OUT, 256), np.float32)}
    np.testing.assert_allclose(ran(model, made, feeds)["dw"], ran(model, program, feeds)["dw"], rtol=1e-5, atol=1e-5)


def test_readers_keep_the_values_that_their_bodies_read():
    program, found = program_of(step())
    last = program.steps[-1]
    steps = [*program.steps[:-1], LeanNode(last.node, ("g",))]
    with_body = offsets.program(steps, program.tensors, program.inputs, program.outputs, program.kernels)
    made = windows.joined(with_body, 17, found, lambda product, value: 1 << 40)
    assert made.steps[-1].captured == ("g",) and list(made.steps[-1].node.input) == ["p0/product"]


def test_views_of_products_in_another_shape_stay():
    """A Concat of such views is no product: its rows are parts of several."""
    nodes, weights = nodes_of()
    turned = [helper.make_node("Reshape", [f"p{i}", "turn"], [f"t{i}"]) for i in range(9)]
    concat = helper.make_node("Concat", [f"t{i}" for i in range(9)], ["c"], axis=1)
    nodes = [*nodes[:-2], *turned, concat, nodes[-1]]
    weights["turn"] = np.array([CHANNELS, OUT])
    model = model_of(nodes, {"x": IMAGES, "g": [OUT, 256]}, {"dw": [CHANNELS, 9 * OUT]}, weights)
    assert not program_of(model)[1]


def test_gradients_of_several_convolutions():
    """Of which one's products are read elsewhere as well."""
    first, weights = nodes_of("a.", made="da")
    second, more = nodes_of("b.", images="y", made="db")
    nodes = [*first, *second, helper.make_node("Neg", ["b.p4"], ["z"], "reader")]
    outputs = {"da": [OUT, 72], "db": [OUT, 72], "z": [OUT, 8]}
    model = model_of(nodes, {"x": IMAGES, "y": IMAGES, "g": [OUT, 256]}, outputs, weights | more)
    program, found = program_of(model)
    made = windows.joined(program, 17, found, lambda product, value: 1 << 40)
    assert counted(made) == {"MatMul": 1 + 9, "Concat": 1 + 1}


def replaced(nodes, at, **changes):
    nodes = [helper.make_node(each.op_type, each.input, each.output, each.name, **helper_of(each)) for each in nodes]
    for field, value in changes.items():
        if field == "input":
            nodes[at].input[:] = value
        else:
            del nodes[at].attribute[:]
            nodes[at].attribute.append(helper.make_attribute(field, value))
    return nodes


def helper_of(node):
    return {each.name: helper.get_attribute_value(each) for each in node.attribute}


@pytest.mark.parametrize(
    ("change", "outputs"),
    [
        ((-2, {"axis": 0}), {"dw": [OUT * 9, CHANNELS]}),
        ((-2, {"input": [f"p{i}" for i in (1, 0, *range(2, 9))]}), None),
        ((5, {"input": ["other", "r1"]}), None),
        ((-1, {}), {"c": [OUT, 72], "dw": [OUT, 72]}),
    ],
    ids=["side by side along another axis", "in no order", "another left operand", "the result is an output"],
)
def test_others_stay_as_they_are(change, outputs):
    nodes, weights = nodes_of()
    at, changes = change
    inputs = {"x": IMAGES, "g": [OUT, 256], "other": [OUT, 256]}
    model = model_of(replaced(nodes, at, **changes), inputs, outputs or {"dw": [OUT, 72]}, weights)
    program, found = program_of(model)
    assert not found and windows.joined(program, 17, found, lambda product, value: 1 << 40) is program


def test_a_name_that_is_taken_is_left_alone():
    program, found = program_of(step())
    taken = offsets.program(
        program.steps, {**program.tensors, "p0/columns": program.tensors["c"]}, program.inputs, program.outputs,
        program.kernels,
    )  # fmt: skip
    assert windows.joined(taken, 17, found, lambda product, value: 1 << 40) is taken


def plan(images: int):
    """A step whose peak lies elsewhere: at some values as large as so many images."""
    nodes, weights = nodes_of()
    before = [helper.make_node("Expand", ["u", "wide"], ["v"]), helper.make_node("Softmax", ["v"], ["s"], axis=-1),
              helper.make_node("ReduceMax", ["s"], ["t"], keepdims=0)]  # fmt: skip
    weights["wide"] = np.array([images, np.prod(IMAGES)])
    model = model_of(
        [*before, *nodes], {"x": IMAGES, "g": [OUT, 256], "u": [1, 1]}, {"t": [], "dw": [OUT, 72]}, weights
    )
    executed = as_executed(model, None, "all", Options(provider="cuda").preparation())
    return laid_out(executed), laid_out(executed, fuse=False)


@pytest.mark.parametrize("images", [1, 40])
def test_a_plan_has_columns_where_they_do_not_raise_its_peak(images):
    fused, plain = plan(images)
    products = sum(each.node.op_type == "MatMul" for each in fused.program.steps)
    assert products == 1 if images == 40 else products > 3
    assert fused.offsets.height <= plain.offsets.height


def test_one_product_takes_the_time_of_those_in_its_place():
    fused, plain = plan(40)
    seconds = [
        sum(
            s
            for s, each in zip(node_seconds(made, "h100"), made.program.steps, strict=True)
            if each.node.op_type == "MatMul"
        )
        for made in (fused, plain)
    ]
    assert seconds[0] == pytest.approx(seconds[1])
    copied = next(s for s, each in zip(node_seconds(fused, "h100"), fused.program.steps, strict=True)
                  if any(map(windows.are_columns, each.writes)))  # fmt: skip
    sliced = sum(s for s, each in zip(node_seconds(plain, "h100"), plain.program.steps, strict=True)
                 if each.node.op_type == "Slice")  # fmt: skip
    assert 0 < copied < sliced


def test_a_value_that_is_named_like_a_product_takes_its_own_time():
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["h"], keepdims=0),
        helper.make_node("MatMul", ["x", "w"], ["h/product"]),
    ]
    model = model_of(nodes, {"x": [64, 64], "w": [64, 64]}, {"h": [], "h/product": [64, 64]})
    made = laid_out(as_executed(model, None, "all", Options(provider="cuda").preparation()))
    assert max(node_seconds(made, "h100")) < 1e-4


def test_a_bound_does_not_count_a_concat_that_a_product_may_be():
    nodes, weights = nodes_of()
    model = model_of(nodes, {"x": IMAGES, "g": [OUT, 256]}, {"dw": [OUT, 72]}, weights)
    executed = as_executed(model, None, "all", Options(provider="cuda").preparation())
    problem, compiled = executed.compiled.problem, executed.compiled
    at = next(i for i, op in enumerate(compiled.graph.ops) if op.node.op_type == "Concat")
    assert relaxed.outside_kernels(problem, compiled).workspace[at] < 0


def test_the_type_of_columns_is_that_of_matrices_side_by_side():
    tensor = Tensor(1, (6, 4), 96, (6, 4))
    assert windows._wider(tensor, 3) == Tensor(1, (6, 12), 288, (6, 12))
