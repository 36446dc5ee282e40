"""Joins of a step that is laid out: those that its slab has room for are made, whatever the sizes of its values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from onnx_remat.session import fusing, lean_graph, offsets, slab_layout
from onnx_remat.session.lean_graph import LeanNode
from onnx_remat.session.slab_layout import SlabLayout
from tests.fuse.test_groups import build, node
from tests.support import fusing as support
from tests.support import warps

pytestmark = pytest.mark.skipif(bool(warps.why_not()), reason=warps.why_not() or "none")

LAYERS = 30


class Kernels:
    """Of a device, where nothing lies on the host or in the memory of another value."""

    device = name = "cuda"
    host_outputs: ClassVar[dict] = {}

    def aliases(self, node):
        return []

    def on_host(self, *_):
        return False


@pytest.fixture(autouse=True)
def in_place(monkeypatch):
    """Arithmetic may overwrite what it reads, and takes no scratch memory."""
    monkeypatch.setattr(slab_layout, "workspace", lambda *_: (0, 0))
    monkeypatch.setattr(offsets, "may_overwrite", lambda kernels, node, *_: node.op_type in ("Sub", "Mul", "Add"))


def fused(nodes, inputs, outputs):
    """Segments of each kernel of a step whose outputs called new.X are written over X, or why it is unfused."""
    model = build(nodes, inputs, outputs, {"axis": np.array(0)})
    ordered = support.ordered_step(model)
    steps = lean_graph.as_run([LeanNode(step.node) for step in ordered.steps])
    program = offsets.program(steps, ordered.tensors, list(inputs), outputs, Kernels(), 20)
    renewed = {name: name.removeprefix("new.") for name in outputs if name.startswith("new.")}
    bound = offsets.assign(program, renewed, 1, search=False)
    compiled = SimpleNamespace(graph=SimpleNamespace(model=model, ops=()), kernels=Kernels())
    made = fusing.fuse_step(SlabLayout(compiled, program, bound, weights=0), 1, 1, seconds=0.0)
    assert isinstance(made, SlabLayout), made.why_not
    assert made.offsets.height <= bound.height * (1 + 1 / fusing.SMALL_SHARE)
    return [kernel.segments for kernel in made.kernels]


def layers(widths, updates):
    """A forward and a backward pass of large values, with `updates` of a parameter of each width in its course."""
    nodes, inputs, outputs, last = [], {"x": (256, 256), "rate": ()}, [], "x"
    for i in range(LAYERS):
        nodes.append(node("CumSum", [last, "axis"], f"h{i}"))
        last = f"h{i}"
    last = "x"
    for i in reversed(range(LAYERS)):
        nodes.append(node("Mod", [last, f"h{i}"], f"d{i}", fmod=1))
        last = f"d{i}"
        for k in range(i, len(widths), LAYERS):
            nodes += [node("CumSum", [f"w{k}", "axis"], f"g{k}"), *updates(k)]
            nodes.append(node("Sub", [f"w{k}", f"s{k}"], f"new.w{k}"))
            inputs[f"w{k}"] = (widths[k],)
            outputs.append(f"new.w{k}")
    return nodes, inputs, outputs


def scaled(k):
    return [node("Mul", [f"g{k}", "rate"], f"s{k}")]


@pytest.mark.parametrize("other", [256, 1000, 1024])
def test_a_value_that_is_small_only_until_it_is_rounded_does_not_undo_all_joins(other):
    assert len(fused(*layers([256] * 30 + [other] + [256] * 29, scaled))) < 12


@pytest.mark.parametrize(("pairs", "kernels"), [(1, 12), (10, 30)])
def test_groups_and_joins_share_the_memory_for_small_values(pairs, kernels):
    """Fused with the last node, a product keeps its two operands, of a small value each, in place of itself."""
    nodes, inputs, outputs = layers([256] * 60, scaled)
    for i in range(pairs):
        nodes += [node("CumSum", [f"v{i}", "axis"], f"a{i}"), node("CumSum", [f"a{i}", "axis"], f"b{i}")]
        nodes.append(node("Mul", [f"a{i}", f"b{i}"], f"t{i}"))
    nodes.append(node("ReduceL1", ["d0"], "late", axes=[0], keepdims=0))
    nodes += [node("Sub", [f"t{i}", "late"], f"new.v{i}") for i in range(pairs)]
    given = {f"v{i}": (256,) for i in range(pairs)}
    assert len(fused(nodes, inputs | given, [*outputs, *(f"new.v{i}" for i in range(pairs))])) < kernels


@pytest.mark.parametrize("seed", [6, 10])
def test_a_layout_that_misses_its_bound_has_fewer_joins_not_none(seed):
    rng = np.random.default_rng(seed)
    twice = rng.random(60) < 0.5

    def update(k):
        more = [node("CumSum", [f"g{k}", "axis"], f"G{k}"), node("Mul", [f"G{k}", f"g{k}"], f"t{k}")]
        return [*more, node("Mul", [f"t{k}", "rate"], f"s{k}")] if twice[k] else scaled(k)

    assert len(fused(*layers(rng.integers(1, 960, 60).tolist(), update))) < 45


def test_single_nodes_need_no_group_to_be_joined():
    nodes = [node("CumSum", ["x", "axis"], f"a{i}") for i in range(6)]
    nodes += [node("Neg", [f"a{i}"], f"b{i}") for i in range(6)]
    nodes += [node("CumSum", [f"b{i}", "axis"], f"y{i}") for i in range(6)]
    assert fused(nodes, {"x": (64,)}, [f"y{i}" for i in range(6)]) == [6]
