"""Layouts with a fault in them: each must be refused, and the reason named."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnx_remat.errors import ModelError
from onnx_remat.ir import graph, shapes
from onnx_remat.memory.layout import ALIGNMENT
from onnx_remat.ort.kernels.cpu import CPU
from onnx_remat.session import lean_graph, plan_session
from onnx_remat.session.offsets import LEAST, Placement, assign, donations, lifetimes, program, waiting
from onnx_remat.session.replay import check
from tests.support.graphs import mlp, model_of

pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def arranged(tmp_path_factory):
    path = tmp_path_factory.mktemp("replay") / "mlp.onnx"
    onnx.save(mlp(layers=3, batch=128, width=64), path)
    return plan_session.arrange(
        path, path.with_name("copy.onnx"), plan_session.SessionRequest(donate=True, level="disable")
    )


def small_program(nodes, inputs, outputs, initializers=()):
    """A program of nodes in file order, as a session would see it."""
    built = graph.build(model_of(nodes, inputs, outputs, initializers))
    steps = [lean_graph.LeanNode(op.node, op.captured) for op in built.ops]
    return program(steps, shapes.infer(built), list(inputs), list(outputs), CPU)


def make(op, inputs, outputs, **attributes):
    return helper.make_node(op, inputs, outputs, name=outputs[0], **attributes)


N = [64, 64]


def moved(binding, name, offset):
    places = tuple(replace(p, offset=offset) if p.name == name else p for p in binding.placements)
    return replace(binding, placements=places)


def offset_of(binding, name):
    return next(p.offset for p in binding.placements if p.name == name)


def swapped(steps, first, second):
    order = list(steps)
    order[first], order[second] = order[second], order[first]
    return tuple(order)


def at(program, name):
    return next(i for i, step in enumerate(program.steps) if name in step.writes)


def test_the_layout_as_made_is_accepted(arranged):
    check(arranged.program, arranged.offsets, range(len(arranged.program.steps)), LEAST)
    assert dict(arranged.offsets.donated) == {f"new.w{i}": f"w{i}" for i in range(3)}
    assert arranged.offsets.live <= arranged.offsets.height


def meeting(program, binding):
    """Pairs of bound values whose lifetimes meet, and that do not lie at one address already."""
    names = [p.name for p in binding.placements]
    start, end = lifetimes(program, names)
    return [
        (a, b)
        for i, a in enumerate(names)
        for b in names[:i]
        if start[a] < end[b] and start[b] < end[a] and offset_of(binding, a) != offset_of(binding, b)
    ]


def test_two_lifetimes_that_meet_are_refused_for_every_pair(arranged):
    pairs = meeting(arranged.program, arranged.offsets)
    assert len(pairs) >= 30
    order = range(len(arranged.program.steps))
    for a, b in pairs:
        with pytest.raises(ModelError, match=r"over|lost|same memory"):
            check(arranged.program, moved(arranged.offsets, a, offset_of(arranged.offsets, b)), order, LEAST)
        overlapping = offset_of(arranged.offsets, b) + ALIGNMENT
        if overlapping + arranged.program.tensors[a].nbytes <= arranged.offsets.height:
            with pytest.raises(ModelError, match=r"over|lost|same memory"):
                check(arranged.program, moved(arranged.offsets, a, overlapping), order, LEAST)


def test_a_reader_moved_behind_the_renewal_is_refused_for_every_weight(arranged):
    for i in range(3):
        renewal = at(arranged.program, f"new.w{i}")
        readers = [k for k, step in enumerate(arranged.program.steps) if f"w{i}" in step.reads and k != renewal]
        assert readers
        for reader in readers:
            steps = list(arranged.program.steps)
            steps.insert(reader, steps.pop(renewal))  # the renewal now runs just before that reader
            faulty = replace(arranged.program, steps=tuple(steps))
            with pytest.raises(ModelError, match=f"reads '(w{i}|dw|s{i})"):
                check(faulty, arranged.offsets, range(len(steps)), LEAST)


def overwritten_output():
    small = small_program([make("Exp", ["x"], ["y"]), make("Sqrt", ["x"], ["z"])], {"x": N}, {"y": N, "z": N})
    binding = assign(small, {})
    return small, moved(binding, "z", offset_of(binding, "y")), None


FAULTS = {
    "an order in which two nodes are exchanged": (lambda p, b: (p, b, [1, 0, *range(2, len(p.steps))]), "would run"),
    "an order that lacks a node": (lambda p, b: (p, b, range(len(p.steps) - 1)), "would run nothing more"),
    "an order with a node too many": (lambda p, b: (p, b, [*range(len(p.steps)), 0]), "expects nothing more"),
    "an order with a node twice": (lambda p, b: (p, b, [0, 0, *range(1, len(p.steps) - 1)]), "would run"),
    "an order that is reversed": (lambda p, b: (p, b, range(len(p.steps))[::-1]), "would run"),
    "an offset below the slab": (lambda p, b: (p, moved(b, "z0", -ALIGNMENT), None), "'z0' does not lie in the slab"),
    "an offset above the slab": (lambda p, b: (p, moved(b, "z0", b.height), None), "'z0' does not lie in the slab"),
    "an offset that is not aligned": (lambda p, b: (p, moved(b, "z0", 4), None), "multiple of 64"),
    "a slab that is too small": (lambda p, b: (p, replace(b, height=b.height - ALIGNMENT), None), "in the slab"),
    "a value of another size": (
        lambda p, b: (p, replace(b, placements=(replace(b.placements[0], nbytes=8), *b.placements[1:])), None),
        "does not lie in the slab",
    ),
    "a value placed twice": (
        lambda p, b: (p, replace(b, placements=(*b.placements, b.placements[0])), None), "has two places",
    ),
    "a value without a place": (lambda p, b: (p, replace(b, placements=b.placements[1:]), None), "has no place"),
    "a renewal of another shape": (
        lambda p, b: (p, replace(b, donated={**b.donated, "new.w0": "x"}), None), "not of the type and shape",
    ),
    "a renewal of what is no input": (
        lambda p, b: (p, replace(b, donated={**b.donated, "new.w0": "lr"}), None), "cannot lie in the memory of 'lr'",
    ),
    "two renewals of one input": (
        lambda p, b: (p, replace(b, donated={**b.donated, "new.w0": "w1"}), None), "cannot lie in the memory of 'w1'",
    ),
    "a renewed value that has a place, too": (
        lambda p, b: (p, replace(b, placements=(*b.placements, Placement("new.w0", 0, 64 * 64 * 4))), None),
        "cannot lie in the memory",
    ),
    "a node before the one it reads": (
        lambda p, b: (replace(p, steps=swapped(p.steps, at(p, "z0"), at(p, "a0"))), b, None), "before it is made",
    ),
    "the loss over what is read for it": (
        lambda p, b: (p, moved(b, "loss", offset_of(b, "ee")), None), "'loss' over 'ee', which it reads",
    ),
    "an output that is overwritten": (lambda p, b: overwritten_output(), "output 'y' is lost: 'z' has taken over"),
    "a matrix product over its operand": (
        lambda p, b: (p, moved(b, "z1", offset_of(b, "a0")), None), "'z1' over 'a0', which it reads",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_refused(arranged, fault):
    make, reason = FAULTS[fault]
    faulty, binding, order = make(arranged.program, arranged.offsets)
    with pytest.raises(ModelError, match=reason):
        check(faulty, binding, range(len(faulty.steps)) if order is None else order, LEAST)


def test_there_are_twenty_faults():
    assert len(FAULTS) >= 20


def test_a_view_of_old_state_counts_as_the_state():
    """The view is read after the renewal, the state itself is not."""
    nodes = [
        make("Reshape", ["w", "flat"], ["v"]),
        make("Sub", ["w", "g"], ["new.w"]),
        make("Exp", ["v"], ["y"]),
    ]
    shapes = {"w": N, "g": N}
    late = small_program(nodes, shapes, {"new.w": N, "y": [4096]}, {"flat": [4096]})
    donated, refused = donations(late, {"new.w": "w"})
    assert (donated, refused) == ({}, {"new.w": "node 'y' reads 'w' after it is renewed"})
    mended = waiting(late, {"new.w": "w"})
    assert [step.label for step in mended.steps] == ["v", "y", "new.w"]
    binding = assign(mended, {"new.w": "w"})
    check(mended, binding, range(3), LEAST)
    assert dict(binding.donated) == {"new.w": "w"}


def test_the_time_of_a_layout_is_not_that_of_pairs_of_nodes_and_outputs():
    state = [f"w{i}" for i in range(400)]
    nodes = [make("Sub", [name, "g"], [f"new.{name}"]) for name in state]
    pairs = {f"new.{name}": name for name in state}
    few = small_program(nodes, dict.fromkeys([*state, "g"], N), dict.fromkeys(pairs, N))
    others = tuple(f"other{i}" for i in range(200_000))
    many = replace(few, inputs=others + few.inputs, outputs=others + few.outputs)
    began = time.monotonic()
    found = assign(many, pairs, search=False)
    seconds = time.monotonic() - began
    assert dict(found.donated) == pairs and not found.not_donated
    assert seconds < 2.0


@pytest.mark.parametrize(
    ("nodes", "outputs", "reason"),
    [
        ([make("MatMul", ["w", "g"], ["new.w"])], {"new.w": N}, "node 'new.w' (MatMul) reads 'w' while it writes"),
        ([make("Sub", ["w", "row"], ["new.w"])], {"new.w": N, "w": N}, "'w' is itself an output"),
        ([make("Cast", ["w"], ["new.w"], to=10)], {"new.w": (10, N)}, "it is not of the type and shape of 'w'"),
        (
            [make("Sub", ["w", "g"], ["new.w"]), make("Add", ["new.w", "w"], ["y"])], {"new.w": N, "y": N},
            "node 'y' reads 'w' after it is renewed",
        ),
        ([make("Sub", ["g", "row"], ["new.row"])], {"new.row": N}, "it is not of the type and shape of 'row'"),
    ],
)  # fmt: skip
def test_unsafe_renewals_are_named(nodes, outputs, reason):
    unsafe = small_program(nodes, {"w": N, "g": N, "row": [64]}, outputs)
    renewed = nodes[0].output[0]
    pairs = {renewed: renewed.removeprefix("new.")}
    binding = assign(waiting(unsafe, pairs), pairs)
    assert dict(binding.not_donated) == {renewed: reason}
    assert renewed in {p.name for p in binding.placements}
    forced = replace(binding, donated=pairs, placements=tuple(p for p in binding.placements if p.name != renewed))
    with pytest.raises(ModelError):
        check(unsafe, forced, range(len(nodes)), LEAST)


def test_a_value_may_take_over_its_operand_where_the_kernel_is_safe():
    nodes = [make("Exp", ["x"], ["a"]), make("Add", ["a", "x"], ["b"]), make("MatMul", ["b", "x"], ["c"])]
    binding = assign(small := small_program(nodes, {"x": N}, {"c": N}), {})
    check(small, binding, range(3), LEAST)
    offsets = {p.name: p.offset for p in binding.placements}
    assert offsets["a"] == offsets["b"] != offsets["c"]
    assert binding.height == 2 * 4 * 64 * 64


def test_control_edges_are_left_out():
    nodes = [
        make("Exp", ["x"], ["a"]),
        make("Size", ["x"], ["size"]),
        make("Mul", ["size", "empty"], ["none"]),
        make("Unsqueeze", ["a", "none"], ["hidden"]),
        make("Shape", ["hidden"], ["token"], start=0, end=0),
        make("Unsqueeze", ["x", "token"], ["x2"]),
        make("Sqrt", ["x2"], ["b"]),
        make("Unsqueeze", ["a", "one"], ["c"]),
    ]
    model = model_of(
        nodes, {"x": N}, {"b": N, "c": [64, 1, 64]}, {"empty": np.zeros(0, np.int64), "one": np.array([1])}
    )
    built = graph.build(model)
    steps = lean_graph.without_control_edges(built.ops, model, shapes.infer(built))
    found = [(step.node.op_type, step.reads) for step in steps]
    assert found == [("Exp", ("x",)), ("Sqrt", ("x",)), ("Unsqueeze", ("a", "one"))]


def test_a_choice_between_a_value_and_itself_is_left_out_with_what_only_its_condition_needs():
    nodes = [
        make("Exp", ["x"], ["a"]),
        make("ReduceMax", ["a"], ["entry"], keepdims=0),
        make("Cast", ["entry"], ["nonzero"], to=TensorProto.BOOL),
        make("Xor", ["nonzero", "nonzero"], ["never"]),
        make("Where", ["never", "x", "x"], ["late"]),
        make("Where", ["never", "late", "x"], ["later"]),
        make("Sqrt", ["later"], ["b"]),
        make("Greater", ["x", "a"], ["wide"]),
        make("Xor", ["wide", "wide"], ["nowhere"]),
        make("Where", ["nowhere", "small", "small"], ["c"]),  # as wide as its condition
        make("Where", ["wide", "x", "x"], ["e"]),  # of a user's: it turns -0.0 into 0.0
        make("Where", ["never", "a", "a"], ["d"]),  # an output
        make("Abs", ["a"], ["unread"]),
    ]
    given = {"small": np.ones(1, np.float32)}
    model = model_of(nodes, {"x": N}, {"b": N, "c": N, "e": N, "d": N}, given)
    built = graph.build(model)
    steps = lean_graph.without_control_edges(built.ops, model, shapes.infer(built))
    found = [step.node.output[0] for step in steps]
    assert found == ["a", "entry", "nonzero", "never", "b", "wide", "nowhere", "c", "e", "d", "unread"]
    assert next(step for step in steps if "b" in step.writes).reads == ("x",)
    del model.graph.node[-2], model.graph.output[-1]
    built = graph.build(model)
    steps = lean_graph.without_control_edges(built.ops, model, shapes.infer(built))
    assert [step.node.output[0] for step in steps] == ["a", "b", "wide", "nowhere", "c", "e", "unread"]
