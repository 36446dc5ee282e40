"""Passes and their orders: every contract is kept, and an order that breaks one cannot be made."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx_remat.converters.passes.base import Fact, Order, rewrite
from onnx_remat.converters.passes.order import DIFFERENTIATED, ORDERS, PYTORCH
from onnx_remat.converters.passes.sink_constants import sink_constants

from onnx_remat.converters import passes
from onnx_remat.ort import runtime

ALL = {each.name: each for order in ORDERS.values() for each in order.passes}


@pytest.mark.parametrize("name", ALL)
def test_a_pass_lies_in_a_file_of_its_name_and_says_what_it_does_in_a_sentence(name):
    module = import_module(ALL[name].run.__module__)
    assert Path(str(module.__file__)).stem == name and getattr(module, name) is ALL[name]
    assert ALL[name].summary.endswith(".") and ". " not in ALL[name].summary


def test_every_pass_has_its_place_in_an_order():
    found = set()
    for path in sorted(Path(str(passes.__path__[0])).glob("*.py")):
        module = import_module(f"{passes.__name__}.{path.stem}")
        found |= {path.stem} if hasattr(getattr(module, path.stem, None), "requires") else set()
    assert found == set(ALL) and len(found) == 16


@pytest.mark.parametrize("name", ORDERS)
def test_no_pass_of_an_order_can_be_left_out_unless_nothing_depends_on_it(name):
    """What a source promises hangs on the passes that ensure it."""
    order = ORDERS[name]
    for index, each in enumerate(order.passes):
        rest = (*order.passes[:index], *order.passes[index + 1 :])
        if each.ensures & order.promised - order.given:
            with pytest.raises(ValueError, match=r"requires|promises"):
                replace(order, passes=rest)
        elif not each.ensures:
            replace(order, passes=rest)


def swapped(order: Order, first: str, second: str) -> tuple[object, ...]:
    """The passes of an order, the second moved to right before the first."""
    names = [each.name for each in order.passes]
    names.insert(names.index(first), names.pop(names.index(second)))
    return tuple(ALL[name] for name in names)


@pytest.mark.parametrize(
    ("order", "first", "second", "why"),
    [
        (PYTORCH, "multiply_weight_gradients", "simplify", r"sum_once requires LEAN .*write_safely before it"),
        (PYTORCH, "inherit_phases", "attention_in_parts", r"attention_in_parts requires PHASES .*no pass before it"),
        (DIFFERENTIATED, "add_in_order", "attention_in_parts", r"attention_in_parts requires LEAN .*no pass before it"),
        (DIFFERENTIATED, "add_to_softmax", "sink_constants", r"add_to_softmax requires STATED .*sink_constants before"),
    ],
)
def test_an_order_that_breaks_a_contract_is_refused_and_names_the_passes(order, first, second, why):
    with pytest.raises(ValueError, match=why):
        replace(order, passes=swapped(order, first, second))


def test_an_order_runs_its_passes_one_after_the_other_with_their_options():
    ran = []

    @rewrite(ensures=[Fact.SAFE])
    def first(model: ir.Model, wanted: int = 1) -> None:
        """Note that it ran."""
        ran.append(("first", wanted))

    @rewrite(requires=[Fact.SAFE], breaks=[Fact.SAFE])
    def second(model: ir.Model) -> None:
        """Note that it ran."""
        ran.append(("second", None))

    model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 20}), ir_version=10)
    Order(frozenset(), (first, second), frozenset()).run(model, {"first": {"wanted": 3}})
    assert ran == [("first", 3), ("second", None)]
    with pytest.raises(ValueError, match=r"second requires SAFE .*, and no pass before it ensures that"):
        Order(frozenset(), (second, first), frozenset())
    with pytest.raises(ValueError, match=r"the order promises SAFE .*, and second before it breaks that"):
        Order(frozenset(), (first, second), frozenset({Fact.SAFE}))


@pytest.mark.parametrize("source", ["ConstantOfShape", "Expand"])
@pytest.mark.parametrize(
    ("fill", "sunk"),
    [(np.float32(0.1), True), (np.float64(0.1), True), (np.int32(7), True), (np.int64(2**53 + 1), True),
     (np.int64(2**63 - 1), True), (np.False_, True), (np.uint8(0), True), (np.True_, False), (np.uint8(7), False),
     (np.int8(-7), False), (np.int16(7), False)],
)  # fmt: skip
def test_sunk_constants_keep_their_numbers_and_those_that_no_kernel_adds_stay(fill, sunk, source):
    kind = ir.DataType.from_numpy(fill.dtype)
    info = onnx.helper.make_tensor_value_info
    constants = {"shape": np.array([80, 80]), "fill": fill}
    if source == "Expand":
        large = onnx.helper.make_node("Expand", ["fill", "shape"], ["large"])
    else:
        value = onnx.numpy_helper.from_array(np.array([fill]))
        large = onnx.helper.make_node("ConstantOfShape", ["shape"], ["large"], value=value)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("ReduceSum", ["x"], ["loss"], keepdims=0), large], "g", [info("x", 1, [3])],
        [info("loss", 1, []), info("large", kind, [80, 80])],
        [onnx.numpy_helper.from_array(np.asarray(each), name) for name, each in constants.items()],
    )  # fmt: skip
    model = ir.from_proto(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=9))
    sink_constants(model)
    assert any(node.op_type == "Xor" for node in model.graph) == sunk
    found = runtime.outputs(ir.to_proto(model), {"x": np.ones(3, np.float32)})["large"]
    assert found.dtype == fill.dtype and (found == fill).all()


def test_sunk_constants_keep_axes_that_the_shape_of_an_expand_does_not_state():
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("ReduceSum", ["x"], ["loss"], keepdims=0),
         onnx.helper.make_node("Expand", ["fill", "shape"], ["large"])],
        "g", [info("x", 1, [3])], [info("loss", 1, []), info("large", 1, [1, 5000])],
        [onnx.numpy_helper.from_array(np.ones((1, 1), np.float32), "fill"),
         onnx.numpy_helper.from_array(np.array([5000]), "shape")],
    )  # fmt: skip
    model = ir.from_proto(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=9))
    sink_constants(model)
    assert runtime.outputs(ir.to_proto(model), {"x": np.ones(3, np.float32)})["large"].shape == (1, 5000)
