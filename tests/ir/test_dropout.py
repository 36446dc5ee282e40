"""Dropouts in two: which are split, where their draws go, and that a recomputed product is the kernel's own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, parser

from onnx_remat.ir import dropout, graph, shapes
from onnx_remat.memory.buffers import simulate
from onnx_remat.memory.problem import Schedule, check_schedule
from onnx_remat.ort import runtime
from onnx_remat.ort.kernels import costs
from onnx_remat.ort.kernels.cpu import CPU
from onnx_remat.ort.prepare import Compiled, Preparation, prepare
from onnx_remat.write.realize import realize

MODEL = """
<ir_version: 10, opset_import: ["" : 20]>
step (KIND[512, 64] x, KIND[512, 64] g, RATIO) => (KIND[512, 64] dx, KIND[512, 64] late, loss)
<bool train = {1}> {
    a = Tanh (x)
    y, mask = Dropout <seed = 3> (a, ratio, train)
    yy = Mul (y, y)
    loss = ReduceSum <keepdims = 0> (yy)
    kept = Cast <to = TYPE> (mask)
    dx = Mul (g, kept)
    late = Mul (y, dx)
}
"""


def model(ratio: float = 0.3, dtype: int = TensorProto.FLOAT, **changes: str) -> onnx.ModelProto:
    """A step that reads a Dropout's result twice and its mask once; `changes` are made to its text."""
    kind = {TensorProto.FLOAT: "float", TensorProto.DOUBLE: "double", TensorProto.FLOAT16: "float16"}[dtype]
    text = MODEL.replace("KIND", kind).replace("TYPE", str(dtype)).replace(", RATIO", changes.pop("ratio_input", ""))
    for old, new in changes.values():
        assert old in text
        text = text.replace(old, new)
    step = parser.parse_model(text)
    if "ratio" not in {value.name for value in step.graph.input}:
        step.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(ratio), "ratio"))
    return step


def compiled_of(step: onnx.ModelProto) -> Compiled:
    return prepare(step, Preparation(CPU))


def op_types(compiled: Compiled) -> list[str]:
    return [op.node.op_type for op in compiled.graph.ops]


def test_a_dropout_whose_mask_is_read_is_a_draw_and_a_product() -> None:
    compiled = compiled_of(model())
    assert op_types(compiled)[:4] == ["Tanh", "DropoutDraw", "DropoutProduct", "Mul"]
    ((draw, product),) = dropout.pairs(compiled.graph)
    assert compiled.table.recomputable[product] and not compiled.table.recomputable[draw]
    assert compiled.graph.n_nodes() == len(compiled.graph.ops) - 1
    assert compiled.graph.ops[product].reads == ("a", "mask")
    assert dropout.whole(compiled.graph.ops[draw], compiled.graph.ops[product]) == compiled.graph.model.graph.node[1]


def test_a_ratio_may_be_stated_in_any_form_of_a_constant() -> None:
    step = model(ratio_input=", float ratio")
    del step.graph.input[-1]
    step.graph.node.insert(0, parser.parse_node("ratio = Constant <value_float = 0.25> ()"))
    compiled = compiled_of(step)
    assert op_types(compiled)[1:3] == ["DropoutDraw", "DropoutProduct"]
    assert dropout.kept(compiled.graph.ops[2]) == 0.75


@pytest.mark.parametrize(
    "whole",
    [
        model(dtype=TensorProto.FLOAT16),
        model(ratio_input=", float ratio"),
        model(still=("train = {1}", "train = {0}")),
        model(asked=("loss)", "loss, y)")),
        model(unread=("Cast <to = 1> (mask)", "Identity (g)")),
    ],
    ids=["half precision", "ratio known at run time", "does not train", "is an output", "nobody reads the mask"],
)
def test_others_stay_whole(whole: onnx.ModelProto) -> None:
    assert "Dropout" in op_types(compiled_of(whole))


def test_a_ratio_that_callers_may_override_is_not_known() -> None:
    step = model()
    step.graph.input.append(helper.make_tensor_value_info("ratio", TensorProto.FLOAT, []))
    assert "Dropout" in op_types(compiled_of(step))


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT, TensorProto.DOUBLE])
@pytest.mark.parametrize("ratio", [0.1, 0.3, 1 / 3, 0.5, 0.9, 0.0])
@pytest.mark.parametrize("level", ["disable", "all"])
def test_a_recomputed_product_is_the_kernels_to_the_last_bit(ratio: float, dtype: int, level: str) -> None:
    step = model(ratio, dtype)
    compiled = compiled_of(step)
    number = {op.node.op_type: op.index for op in compiled.graph.ops}
    order = list(range(compiled.problem.n_ops))
    order.insert(order.index(number["Mul"]), number["DropoutProduct"])  # right before `late`
    schedule = Schedule(tuple(order))
    check_schedule(compiled.problem, schedule)
    written = realize(compiled, schedule, 10**9, {})
    assert written.recomputed == ("Dropout->y",)
    late = next(n for n in written.model.graph.node if "late" in n.output)
    assert late.input[0] == "y__remat1"
    assert [n.op_type for n in written.model.graph.node].count("Dropout") == 1
    rng = np.random.default_rng(0)
    numpy_type = helper.tensor_dtype_to_np_dtype(dtype)
    feeds = {name: rng.standard_normal((512, 64)).astype(numpy_type) for name in "xg"}
    before, after = (runtime.outputs(m, feeds, level) for m in (step, written.model))
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    assert (before["dx"] != 0).mean() == pytest.approx(1 - ratio, abs=0.02)


@pytest.mark.parametrize("again", [False, True], ids=["once", "recomputed"])
@pytest.mark.parametrize("direct", [(), ("a",), ("mask",), ("a", "mask")], ids="-".join)
def test_a_dropout_does_not_wait_for_its_own_mask(direct: tuple[str, ...], again: bool) -> None:
    """Not where nothing may pass through what it reads, either; its recomputed product waits all the same."""
    step = model()
    compiled = compiled_of(step)
    number = {op.node.op_type: op.index for op in compiled.graph.ops}
    order = [op for op in range(compiled.problem.n_ops) if op != number["Cast"]]
    order.insert(order.index(number["DropoutProduct"]) + 1, number["Cast"])
    if again:
        order.insert(order.index(number["Mul"]), number["DropoutProduct"])  # right before `late`
    schedule = Schedule(tuple(order))
    check_schedule(compiled.problem, schedule)
    for private in range(len(order)):
        written = realize(compiled, schedule, 10**9, {}, private=[private], direct=direct)
        graph.build(written.model)  # nobody reads what is made only later
        feeds = {name: np.full((512, 64), 0.5, np.float32) for name in "xg"}
        before, after = (runtime.outputs(m, feeds, "disable") for m in (step, written.model))
        assert all(before[name].tobytes() == after[name].tobytes() for name in before)
        if again:
            cast = next(node for node in written.model.graph.node if "y__mask1" in node.output)
            assert cast.input[0].startswith("mask__after")


def test_draws_go_where_their_products_are() -> None:
    compiled = compiled_of(model())
    (pair,) = dropout.pairs(compiled.graph)
    tanh, draw, product, *rest = range(compiled.problem.n_ops)
    assert pair == (draw, product)
    far = Schedule((tanh, draw, *rest[2:3], product, *rest[:2], *rest[3:]))  # the mask's Cast in between
    check_schedule(compiled.problem, far)
    order = dropout.with_draws_at_products(compiled.graph, compiled.problem, far).order
    assert order[:4] == (tanh, draw, product, rest[2])
    near = compiled.default_order()
    moved = dropout.with_draws_at_products(compiled.graph, compiled.problem, near)
    at = moved.order.index(draw)
    assert moved.order[at + 1] == product
    assert dropout.with_draws_at_products(compiled.graph, compiled.problem, moved) == moved
    check_schedule(compiled.problem, moved)


def test_only_a_recomputed_product_needs_room_for_what_comes_in_between() -> None:
    problem = compiled_of(model()).problem
    order = [*range(problem.n_ops - 1), 2, problem.n_ops - 1]
    found = simulate(problem, order).step_bytes
    without = simulate(replace(problem, rerun_workspace=np.zeros_like(problem.workspace)), order).step_bytes
    size = 512 * 64 * 4
    assert found[2] == problem.base_bytes + 2 * size + 512 * 64  # a, y and the mask
    assert (found - without).tolist() == [size if step == problem.n_ops - 1 else 0 for step in range(len(order))]


def test_a_draw_and_its_product_cost_what_the_dropout_does() -> None:
    step = model()
    tensors = shapes.infer(graph.build(step))
    whole = costs.price(graph.build(step), tensors, CPU)
    split = costs.price(dropout.split(graph.build(step), tensors), tensors, CPU)
    assert split[1] + split[2] == pytest.approx(max(whole[1], split[2]))
