"""State that lies on the host between steps: which that is, and the order in which it comes and leaves."""

from __future__ import annotations

import time

import pytest
from onnx import TensorProto, helper

from onnx_remat.ir import model_io
from onnx_remat.ort.host_state import counted, movable_state, own_state, when_due, with_state_on_host
from onnx_remat.ort.kernels.registry import kernels_of
from onnx_remat.ort.moves import DOWN, UP
from onnx_remat.ort.prepare import Compiled, Preparation, prepare
from tests.support.graphs import model_of
from tests.support.updated import MAKE, labelled, momentum, updated

ON_CUDA = Preparation(kernels_of("cuda"))


def moved_of(model) -> Compiled:
    """Compile a step with its state on the host."""
    return prepare(with_state_on_host(model_io.load(model), movable_state(prepare(model, ON_CUDA))).model, ON_CUDA)


def joined_moments(i):
    return labelled([
        MAKE("Mul", [f"dw{i}", f"dw{i}"], [f"dd{i}"]), MAKE("Concat", [f"m{i}", f"v{i}"], [f"mv{i}"], axis=0),
        MAKE("Concat", [f"dw{i}", f"dd{i}"], [f"both{i}"], axis=0), MAKE("Mul", [f"mv{i}", "keep"], [f"k{i}"]),
        MAKE("Add", [f"k{i}", f"both{i}"], [f"sum{i}"]),
        MAKE("Split", [f"sum{i}"], [f"new.m{i}", f"new.v{i}"], axis=0, num_outputs=2),
        MAKE("Mul", [f"new.m{i}", f"new.v{i}"], [f"d{i}"]), MAKE("Sub", [f"w{i}", f"d{i}"], [f"new.w{i}"]),
    ])  # fmt: skip


def test_all_state_that_one_node_makes_leaves_when_it_is_made():
    compiled = moved_of(updated(joined_moments, "mv", layers=1))
    order = when_due(compiled, compiled.default_order().order)
    assert sorted(order) == list(range(compiled.problem.n_ops))
    kinds = [compiled.graph.ops[op].node.op_type for op in order]
    at = kinds.index("Split")
    assert kinds[at : at + 3] == ["Split", "MemcpyToHost", "MemcpyToHost"]


def test_values_leave_when_they_are_made_and_come_back_when_they_are_read():
    """What is copied from an input, or comes from the host, leaves where it does; a copy without a reader stays."""
    nodes = [
        MAKE("Exp", ["w"], ["e"]), MAKE(UP, ["home"], ["back"]), MAKE("Tanh", ["e"], ["h"]), MAKE("Sin", ["h"], ["s"]),
        MAKE(DOWN, ["e"], ["home"]), MAKE(DOWN, ["w"], ["new.p"]), MAKE(UP, ["p"], ["there"]),
        MAKE(DOWN, ["there"], ["new.q"]), MAKE(UP, ["home"], ["unread"]), MAKE("Mul", ["back", "s"], ["new.w"]),
    ]  # fmt: skip
    nodes.insert(1, nodes.pop(4))
    compiled = counted(prepare(model_of(nodes, {"w": [8], "p": [8]}, {f"new.{n}": [8] for n in "wpq"}), ON_CUDA))
    order = when_due(compiled, range(compiled.problem.n_ops))
    assert sorted(order) == list(range(compiled.problem.n_ops))
    made = [compiled.graph.ops[op].outputs[0] for op in order]
    assert made == ["e", "home", "h", "s", "new.p", "there", "new.q", "unread", "back", "new.w"]


def test_what_lies_on_the_host_takes_no_bytes_there_and_its_copies_no_time():
    nodes = [
        MAKE("Exp", ["w"], ["e"]), MAKE(DOWN, ["e"], ["home"]), MAKE(UP, ["home"], ["back"]), MAKE(UP, ["m"], ["old"]),
        MAKE("Mul", ["back", "old"], ["made"]), MAKE(DOWN, ["made"], ["new.m"]), MAKE("Sub", ["w", "made"], ["new.w"]),
    ]  # fmt: skip
    compiled = prepare(model_of(nodes, {"w": [8], "m": [8]}, {"new.w": [8], "new.m": [8]}), ON_CUDA)
    alongside, in_turn = counted(compiled), counted(compiled, state=False)
    empty = [{name for name, t in each.tensors.items() if t.nbytes == 0} for each in (compiled, alongside, in_turn)]
    assert empty == [set(), {"home", "m", "new.m"}, {"home"}]
    costs = [each.problem.cost.tolist() for each in (alongside, in_turn)]
    assert costs[0][1] == costs[0][2] == costs[0][3] == costs[0][5] == 0 == costs[1][1] < costs[1][3]


def swapped_moments(i):
    return [
        MAKE("Identity", [f"m{i}"], [f"new.v{i}"]), MAKE("Sqrt", [f"v{i}"], [f"new.m{i}"]),
        MAKE("Mul", [f"m{i}", f"dw{i}"], [f"s{i}"]), MAKE("Sub", [f"w{i}", f"s{i}"], [f"new.w{i}"]),
    ]  # fmt: skip


def largest_slope(i):
    return [MAKE("Max", [f"m{i}", f"dw{i}"], [f"new.m{i}"]), MAKE("Sub", [f"w{i}", f"new.m{i}"], [f"new.w{i}"])]


@pytest.mark.parametrize(("update", "state"), [(swapped_moments, "mv"), (largest_slope, "m")])
def test_state_is_an_update_s_own_whatever_op_reads_it_first(update, state):
    expected = {f"{name}0": f"new.{name}0" for name in state}
    assert movable_state(prepare(updated(update, state, layers=1), ON_CUDA)) == expected
    labels = updated(lambda i: labelled(update(i)), state, layers=1)
    assert movable_state(prepare(labels, ON_CUDA)) == expected
    for node in labels.graph.node:
        for label in node.metadata_props:
            label.value = "backward"  # as of sums of gradients
    assert movable_state(prepare(labels, ON_CUDA)) == {}


def test_state_on_the_host_is_not_moved_there_again():
    assert movable_state(moved_of(updated(momentum, "m", layers=1))) == {}


def test_state_that_is_an_output_itself_stays_on_the_device():
    model = updated(momentum, "m")
    model.graph.output.append(next(value for value in model.graph.input if value.name == "m0"))
    compiled = prepare(model, ON_CUDA)
    assert own_state(compiled) == {"m0": "new.m0", "m1": "new.m1"}
    assert movable_state(compiled) == {"m1": "new.m1"}


def test_many_states_in_a_long_step_take_little_time():
    """0.1 s; for every pair of a state and a node it was 3 s."""
    count, length = 600, 6000
    nodes = [MAKE("Neg", [f"a{i}"], [f"a{i + 1}"]) for i in range(length)]
    nodes += [MAKE("Add", [f"m{i}", f"a{length}"], [f"new.m{i}"]) for i in range(count)]
    state = {f"m{i}": f"new.m{i}" for i in range(count)}
    inputs, outputs = {name: [4] for name in ("a0", *state)}, {name: [4] for name in state.values()}
    source = model_io.load(model_of(nodes, inputs, outputs))
    taken = []
    for _ in range(3):  # other threads of a worker, and its garbage collection, only add
        began = time.thread_time()
        assert len(with_state_on_host(source, state).model.graph.node) == len(nodes) + 2 * count
        taken.append(time.thread_time() - began)
    assert min(taken) < 1.0


def test_what_lies_on_the_host_keeps_its_shape_and_takes_no_buffer_of_the_device():
    nodes = [MAKE("Exp", ["w"], ["e"]), MAKE(DOWN, ["e"], ["home"]), MAKE(UP, ["home"], ["back"])]
    stated = [helper.make_tensor_value_info("home", TensorProto.FLOAT, [8])]
    nodes.append(MAKE("Mul", ["back", "w"], ["new.w"]))
    compiled = prepare(model_of(nodes, {"w": [8]}, {"new.w": [8]}, value_info=stated), ON_CUDA)
    found = counted(compiled)
    home = list(compiled.graph.values).index("home")
    assert found.tensors["home"].shape == (8,) == found.tensors["home"].symbolic
    assert compiled.problem.poolable[home] and not found.problem.poolable[home]


def test_what_nodes_on_the_host_read_or_make_is_no_move():
    """These copies are ONNX Runtime's own: for nodes without a kernel on the device."""
    nodes = [MAKE(DOWN, ["x"], ["down"]), MAKE("Det", ["down"], ["up"]), MAKE(UP, ["up"], ["y"])]
    compiled = prepare(model_of(nodes, {"x": [8, 2, 2]}, {"y": [8]}), ON_CUDA)
    assert counted(compiled) is compiled
