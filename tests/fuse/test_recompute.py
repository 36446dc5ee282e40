"""Values that kernels compute again: which, with the same bits, and never with more bytes alive at once."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest

from onnx_remat.fuse.kernel import FusedNode
from onnx_remat.fuse.nodes import Fusion, fuse
from onnx_remat.fuse.ordered import OrderedStep
from tests.fuse import test_rows
from tests.fuse.test_groups import build, node, peak, random_feeds, random_model
from tests.support.fusing import assert_same_bits, bits, ordered_step, run, session, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "none")

SQUARE = (64, 64)


def taken(ordered: OrderedStep, made: Fusion) -> int:
    """Bytes alive at once in the order with kernels, counted without the code that is tested."""
    steps = [each if isinstance(each, FusedNode) else ordered.steps[each] for each in made.order]
    alive: dict[str, list[int]] = {}
    for i, step in enumerate(steps):
        nodes = step.node
        views = [name for name in nodes.output if name in ordered.root]
        for name in (*nodes.output, *nodes.input):
            owner = ordered.root.get(name, name)
            if owner in ordered.counted and not views:
                alive.setdefault(owner, []).append(i)
    for name in ordered.outputs:
        alive[ordered.root.get(name, name)].append(len(steps) - 1)
    at_once = np.zeros(len(steps), int)
    for name, places in alive.items():
        at_once[min(places) : max(places) + 1] += ordered.counted[name]
    for i, step in enumerate(steps):
        if isinstance(step, FusedNode):
            names = [ordered.root.get(name, name) for name in step.node.input]
            dying = [n for slot, n in enumerate(names) if slot in step.plain and n in alive and max(alive[n]) == i]
            for name in step.node.output:
                kind = ordered.tensors[name].dtype, prod(ordered.tensors[name].shape)
                over = [n for n in dying if (ordered.tensors[n].dtype, prod(ordered.tensors[n].shape)) == kind]
                if over:
                    dying.remove(over[0])
                    at_once[i] -= ordered.counted[name]
    return int(at_once.max(initial=0))


def read(ordered: OrderedStep) -> set[str]:
    """What nodes read after fusing."""
    steps = [each if isinstance(each, FusedNode) else ordered.steps[each] for each in fuse(ordered, 0).order]
    return {name for each in steps for name in each.node.input}


FORWARD = [node("MatMul", ["x", "w"], "h"), node("Mul", ["h", "h"], "s"), node("Sub", ["s", "one"], "t"),
           node("Mul", ["h", "t"], "a"), node("MatMul", ["a", "w"], "o"), node("MatMul", ["o", "w"], "g")]  # fmt: skip
ONE = {"one": np.float32(1)}


def step(*backward, outputs=("y",), **more):
    return build([*FORWARD, *backward], {"x": SQUARE, "w": SQUARE, **more}, list(outputs), ONE)


def test_what_lies_between_forward_and_backward_is_computed_again():
    model = step(node("Mul", ["g", "t"], "p"), node("Add", ["p", "h"], "y"))
    made = fuse(ordered_step(model), 0)
    assert "t" not in read(ordered_step(model)) and "h" in read(ordered_step(model))
    assert sum(len(each.members) for each in made.order if isinstance(each, FusedNode)) == 7  # two of them twice
    assert taken(ordered_step(model), made) < peak(ordered_step(model))
    assert_same_bits(model, random_feeds(model, np.random.default_rng(1)))


def test_a_node_that_only_kernels_need_is_gone():
    """`m` alone would be no kernel, and stays a node while something else reads it."""
    mask = node("Greater", ["h", "one"], "m")
    backward = (
        mask,
        node("MatMul", ["h", "w"], "k"),
        node("Where", ["m", "k", "g"], "q"),
        node("Add", ["q", "h"], "y"),
    )
    made = fuse(ordered_step(step(*backward)), 0)
    assert not any(not isinstance(each, FusedNode) and each == 6 for each in made.order)
    assert_same_bits(step(*backward), random_feeds(step(*backward), np.random.default_rng(1)))
    kept = step(*backward, node("Cast", ["m"], "c", to=1), node("MatMul", ["c", "w"], "z"), outputs=("y", "z"))
    assert_same_bits(kept, random_feeds(kept, np.random.default_rng(1)))


def test_what_would_keep_another_value_alive_is_read():
    """`h` is dead when `g` is made."""
    model = step(node("Mul", ["g", "t"], "y"))
    assert "t" in read(ordered_step(model))


def test_state_that_is_renewed_in_between_is_not_read_again():
    nodes = [node("Mul", ["s", "s"], "t"), node("MatMul", ["t", "x"], "g"), node("Mul", ["g", "x"], "new.s"),
             node("MatMul", ["new.s", "x"], "k"), node("MatMul", ["k", "x"], "l"),
             node("Mul", ["l", "t"], "y")]  # fmt: skip
    model = build(nodes, {"s": SQUARE, "x": SQUARE}, ["y", "new.s"])
    ordered = ordered_step(model)
    (kernel,) = (each for each in fuse(ordered, 0).order if isinstance(each, FusedNode))
    assert set(kernel.node.input) == {"s", "l"}
    assert not fuse(replace(ordered, renewed={"new.s": "s"}), 0).kernels


def test_a_value_that_a_product_reads_last_keeps_its_buffer():
    backward = node("Mul", ["g", "t"], "p"), node("Add", ["p", "h"], "q"), node("MatMul", ["t", "q"], "y")
    ordered = ordered_step(step(*backward))
    assert "t" in read(ordered)
    assert sum(len(each.members) for each in fuse(ordered, 0).order if isinstance(each, FusedNode)) == 5


def test_outputs_and_costly_values_are_read():
    model = step(node("Mul", ["g", "t"], "p"), node("Add", ["p", "h"], "y"), outputs=("y", "t"))
    assert "t" in read(ordered_step(model))
    nodes = [node("MatMul", ["x", "w"], "h"), node("Exp", ["h"], "e1"), node("Tanh", ["e1"], "e2"),
             node("Sigmoid", ["e2"], "t"), node("MatMul", ["t", "w"], "g"), node("Mul", ["g", "t"], "p"),
             node("Add", ["p", "h"], "y")]  # fmt: skip
    model = build(nodes, {"x": SQUARE, "w": SQUARE}, ["y"])
    assert "t" in read(ordered_step(model))  # three functions take longer than memory does


@pytest.mark.parametrize(("shape", "axes", "one"), [
    ((4, 8, 8, 8), [0, 2, 3], (1, 8, 1, 1)), ((4, 8, 64), [2], (4, 8, 1)),
])  # fmt: skip
def test_a_group_keeps_the_row_of_what_other_nodes_read(shape, axes, one):
    """Where the only node along rows is computed elsewhere, what is left has no row, and no value of one per row."""
    nodes = [node("Neg", ["s"], "v"), node("Mul", ["x", "v"], "w"), node("ReduceMean", ["w"], "r", axes=axes),
             node("Softmax", ["w"], "q", axis=1), node("Concat", ["q", "q"], "q2", axis=0),
             node("Sub", ["x", "r"], "d"), node("Add", ["d", "q"], "z")]  # fmt: skip
    model = build(nodes, {"x": shape, "s": one}, ["v", "z", "q2"])
    for kernel in fuse(ordered_step(model), 0).kernels:
        assert all(prod(made) % kernel.size == 0 for _, made in kernel.outputs)
    test_rows.compared(model, kernels=None)


def test_random_graphs(request):
    """As `test_groups` and `test_rows` compare them: the same bits as node by node; here with the peak."""
    count, again = max((request.config.getoption("--fuzz") or 0) // 4, 80), 0
    for seed in range(count):
        rng = np.random.default_rng([seed, 36])
        for model in (random_model(rng), test_rows.random_model(rng, test_rows.ALONG_WHAT[seed % 3])):
            if model is None:
                continue
            ordered = ordered_step(model)
            made = fuse(ordered, 0)
            assert taken(ordered, made) <= peak(ordered), seed
            members = [at for each in made.order if isinstance(each, FusedNode) for at in each.members]
            again += len(members) - len(set(members))
    assert again > count // 2


def chained(rng: np.random.Generator):
    """Blocks of elementwise nodes between products, and a backward pass that reads what they made."""
    nodes, kept, last = [], [], "x"
    for i in range(int(rng.integers(1, 4))):
        nodes.append(node("MatMul", [last, "w"], f"h{i}"))
        names = [f"h{i}"]
        for j in range(int(rng.integers(1, 6))):
            made = f"v{i}.{j}"
            if rng.random() < 0.4:
                nodes.append(node(str(rng.choice(["Neg", "Abs", "Relu", "Tanh", "Softmax"])), [names[-1]], made))
            else:
                other = str(rng.choice([*names, "b", "x", "one"]))
                nodes.append(node(str(rng.choice(["Add", "Mul", "Sub"])), [names[-1], other], made))
            names.append(made)
        kept += names
        last = names[-1]
    for i in range(int(rng.integers(1, 4))):
        nodes.append(node("MatMul", [last, "w"], f"g{i}"))
        last = f"g{i}"
        for j in range(int(rng.integers(1, 5))):
            nodes.append(node(str(rng.choice(["Add", "Mul", "Sub"])), [last, str(rng.choice(kept))], f"u{i}.{j}"))
            last = f"u{i}.{j}"
    outputs = [last, *(name for name in kept if rng.random() < 0.1)]
    used = {name for each in nodes for name in each.input}
    inputs = {"x": SQUARE, "w": SQUARE, "b": (64,)}
    weights = {name: array for name, array in ONE.items() if name in used}
    return build(nodes, {name: shape for name, shape in inputs.items() if name in used}, outputs, weights)


def test_random_steps(request):
    count, again = max((request.config.getoption("--fuzz") or 0) // 20, 10), 0
    for seed in range(count):
        model = chained(np.random.default_rng([seed, 62]))
        ordered = ordered_step(model)
        made = fuse(ordered, 0)
        assert taken(ordered, made) <= peak(ordered), seed
        members = [at for each in made.order if isinstance(each, FusedNode) for at in each.members]
        again += len(members) - len(set(members))
        feeds = {name: array / 8 for name, array in test_rows.feeds_of(model, seed).items()}
        got = run(session(model, 1 + seed % 2)[0], feeds)
        for name, array in test_rows.alone(model, feeds).items():
            np.testing.assert_array_equal(bits(got[name]), bits(array), f"seed {seed}: {name}")
    assert again > count
