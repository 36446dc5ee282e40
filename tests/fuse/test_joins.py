"""Kernels of equal code that one launch computes: which are joined, and where, with the results of each alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from onnx import TensorProto, helper

from onnx_remat.fuse import cuda, joins, shim
from onnx_remat.fuse.kernel import FusedNode
from onnx_remat.fuse.nodes import fuse
from onnx_remat.fuse.rows import LEAST_BLOCKS, LEAST_WARPS, LONG
from onnx_remat.ir.shapes import Tensor
from onnx_remat.session import offsets
from onnx_remat.session.lean_graph import LeanNode
from tests.fuse import test_groups, test_moved, test_rows
from tests.fuse.test_cuda import assert_same
from tests.fuse.test_groups import build, node
from tests.support import fusing, warps
from tests.support.slow import few

pytestmark = pytest.mark.skipif(bool(warps.why_not()), reason=warps.why_not() or "none")


def updates(shapes, scalar="rate", dtype=TensorProto.FLOAT):
    """Momentum's update of a parameter of each shape, by the gradient that a node which is no kernel's makes of it."""
    nodes, inputs, outputs = [], {}, []
    for i, shape in enumerate(shapes):
        rate = f"{scalar}{i % 2}" if scalar == "own" else scalar
        nodes += [
            node("CumSum", [f"w{i}", "axis"], f"g{i}"), node("Mul", [f"m{i}", "keep"], f"k{i}"),
            node("Add", [f"k{i}", f"g{i}"], f"new.m{i}"), node("Mul", [f"new.m{i}", rate], f"s{i}"),
            node("Sub", [f"w{i}", f"s{i}"], f"new.w{i}"),
        ]  # fmt: skip
        inputs |= {f"w{i}": (dtype, shape), f"m{i}": (dtype, shape), rate: (dtype, ())}
        outputs += [f"new.m{i}", f"new.w{i}"]
    return build(nodes, inputs | {"keep": (dtype, ())}, outputs, {"axis": np.array(0)})


def segments(made):
    return sorted(kernel.segments for kernel in made.kernels)


@pytest.mark.parametrize("over", [False, True])
def test_updates_of_any_sizes_are_one_launch(over):
    shapes = [(2,), (7, 3), (cuda.THREADS,), (cuda.THREADS + 1,), (2, 2), *[(5,)] * 12, (300, 70)]
    model = updates(shapes)
    made = assert_same(model, test_rows.feeds_of(model), exact=True, kernels=1, over=over)
    assert segments(made) == [len(shapes)]
    assert made.kernels[0].size == sum(-(-int(np.prod(shape)) // cuda.THREADS) for shape in shapes)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 9])
def test_a_block_finds_its_segment(count):
    model = updates([(cuda.THREADS * (i % 3 + 1) + i,) for i in range(count)])
    made = assert_same(model, test_rows.feeds_of(model), exact=True, kernels=1)
    assert segments(made) == [count]


def test_segments_have_scalars_of_their_own():
    model = updates([(40,), (50,), (60,)], "own")
    assert segments(assert_same(model, test_rows.feeds_of(model), exact=True)) == [3]


def test_more_updates_than_a_launch_has_arguments_for_are_several():
    model = updates([(3,)] * 150)
    made = assert_same(model, test_rows.feeds_of(model), exact=True)
    assert sum(kernel.segments for kernel in made.kernels) == 150 and 1 < len(made.kernels) < 5
    assert all(cuda.arguments(kernel) <= cuda.MOST_ARGUMENTS for kernel in made.kernels)


def test_other_types_have_other_code():
    halves = [("m", TensorProto.FLOAT16), ("n", TensorProto.FLOAT), ("o", TensorProto.DOUBLE), ("p", TensorProto.FLOAT)]
    nodes = [node(op, reads, made) for each, _ in halves
             for op, reads, made in (("CumSum", [each, "axis"], f"g{each}"), ("Abs", [f"g{each}"], f"a{each}"),
                                     ("Neg", [f"a{each}"], f"new.{each}"))]  # fmt: skip
    inputs = {name: (dtype, (9,)) for name, dtype in halves}
    model = build([each for each in nodes if each.output[0] != "gm"], inputs | {"gm": (TensorProto.FLOAT16, (9,))},
                  [f"new.{name}" for name, _ in halves], {"axis": np.array(0)})  # fmt: skip
    del model.graph.input[0]
    assert segments(warps.fused(model)) == [1, 1, 2]


def test_a_kernel_that_needs_anothers_result_is_not_joined_with_it():
    """Whether it reads it itself, or a node between them does."""
    nodes = [
        node("Abs", ["x"], "a"), node("Neg", ["a"], "b"), node("CumSum", ["b", "axis"], "c"),
        node("Abs", ["c"], "d"), node("Neg", ["d"], "y"),
    ]  # fmt: skip
    model = build(nodes, {"x": (64,)}, ["y"], {"axis": np.array(0)})
    assert segments(assert_same(model, test_rows.feeds_of(model), exact=True)) == [1, 1]
    ordered = replace(fusing.ordered_step(model), device=True)
    found = fuse(ordered, shim.new_secret())
    first, second = (each for each in found.order if isinstance(each, FusedNode))
    near = replace(second, node=helper.make_node("FusedOnDevice", ["b"], ["y"], secret=1, handle=1))
    assert segments(joins.joined(ordered, replace(found, order=(first, near)))) == [1, 1]


def test_a_kernel_runs_before_the_readers_of_its_result_and_after_all_makers_of_its_inputs():
    """The first and the third of three have no common place; the second is joined with one of them."""
    nodes = [
        node("Abs", ["x"], "a"), node("Neg", ["a"], "b"), node("CumSum", ["b", "axis"], "c"),
        node("Abs", ["z"], "d"), node("Neg", ["d"], "e"), node("CumSum", ["c", "axis"], "f"),
        node("Abs", ["f"], "g"), node("Neg", ["g"], "h"),
    ]  # fmt: skip
    model = build(nodes, {"x": (64,), "z": (32,)}, ["e", "h"], {"axis": np.array(0)})
    assert segments(assert_same(model, test_rows.feeds_of(model), exact=True)) == [1, 2]


def slices(ends):
    nodes = [node("Slice", ["x", f"from{i}", f"to{i}", "axes"], f"part{i}") for i in range(len(ends))]
    nodes += [node("CumSum", [f"part{i}", "axis"], f"y{i}") for i in range(len(ends))]
    weights = {"axes": np.array([1]), "axis": np.array(0)}
    weights |= {f"from{i}": np.array([start]) for i, (start, _) in enumerate(ends)}
    weights |= {f"to{i}": np.array([end]) for i, (_, end) in enumerate(ends)}
    return build(nodes, {"x": (3, 64, 4)}, [f"y{i}" for i in range(len(ends))], weights)


def test_single_slices_are_joined_whatever_their_sizes():
    model = slices([(8, 24), (24, 26), (3, 64)])
    assert segments(assert_same(model, test_rows.feeds_of(model), exact=True, kernels=1)) == [3]


def test_a_single_node_without_another_stays_with_its_views():
    nodes = [
        node("Reshape", ["x", "shape"], "r"), node("Abs", ["r"], "a"), node("CumSum", ["a", "axis"], "y"),
        node("Reshape", ["x", "shape"], "s"), node("Neg", ["s"], "b"), node("CumSum", ["b", "axis"], "z"),
        node("Neg", ["z"], "c"), node("CumSum", ["c", "axis"], "w"),
    ]  # fmt: skip
    model = build(nodes, {"x": (8, 8)}, ["y", "w"], {"axis": np.array(0), "shape": np.array([64])})
    ordered = replace(fusing.ordered_step(model), device=True)
    found = fuse(ordered, 1)
    assert not found.kernels and len(found.single) == 3
    made = joins.joined(ordered, found)
    ops = [ordered.steps[each].node.op_type for each in made.order]
    assert not made.kernels and sorted(ops) == sorted(ordered.steps[i].node.op_type for i in range(len(nodes)))
    nodes[6] = node("Abs", ["z"], "c")
    model = build(nodes, {"x": (8, 8)}, ["y", "w"], {"axis": np.array(0), "shape": np.array([64])})
    ordered = replace(fusing.ordered_step(model), device=True)
    assert not joins.joined(ordered, fuse(ordered, 1)).kernels, "one needs the result of the other"


def test_gradients_do_not_wait_for_one_another_where_that_takes_memory():
    """Four are large, and one that its update keeps waiting raises the peak; a fifth is small."""
    nodes, inputs, outputs, last = [], {}, [], "x"
    for i, size in enumerate((8, 4096, 4096, 4096, 4096)):
        nodes += [node("CumSum", [last, "axis"], f"h{i}"), node("Slice", [f"h{i}", "from", f"to{i}"], f"g{i}"),
                  node("Mul", [f"g{i}", "rate"], f"s{i}"), node("Sub", [f"w{i}", f"s{i}"], f"new.w{i}")]  # fmt: skip
        inputs[f"w{i}"], last = (size,), f"h{i}"
        outputs.append(f"new.w{i}")
    weights = {"axis": np.array(0), "from": np.array([0])} | {
        f"to{i}": np.array([8 if not i else 4096]) for i in range(5)
    }
    model = build(nodes, {"x": (4096,), "rate": ()} | inputs, outputs, weights)
    ordered = replace(fusing.ordered_step(model), device=True)
    counted = {name: size for name, size in ordered.counted.items() if name not in outputs}
    renewed = {name: name.removeprefix("new.") for name in outputs}
    tight = replace(ordered, counted=counted, renewed=renewed)
    found = fuse(tight, shim.new_secret())
    assert len(found.kernels) == 5

    def peak(made):
        return joins._Joining(tight, made, 0, True).peak.tolist()

    strict, free = joins.joined(tight, found), joins.joined(replace(tight, counted={}), found)
    assert segments(free) == [5] and 1 < len(strict.kernels) < 5
    assert peak(strict) == peak(found) < peak(free)
    assert len(joins.joined(tight, found, waits=False).kernels) == 5, "all gradients but one are large"
    apart = joins.joined(replace(tight, apart=64), found)
    assert 5 > len(apart.kernels) >= len(strict.kernels)
    assert len(joins.joined(replace(tight, apart=64), found, more=64).kernels) <= len(apart.kernels)


def test_state_is_not_renewed_while_another_segment_reads_it():
    """One kernel writes the new w over the old one, which the other of the same code reads."""
    nodes = [
        node("CumSum", ["w", "axis"], "g"), node("CumSum", ["v", "axis"], "h"),
        node("Mul", ["w", "g"], "a"), node("Abs", ["a"], "b"),
        node("Mul", ["w", "h"], "c"), node("Abs", ["c"], "new.w"),
    ]  # fmt: skip
    model = build(nodes, {"w": (64,), "v": (64,)}, ["b", "new.w"], {"axis": np.array(0)})
    ordered = replace(fusing.ordered_step(model), device=True)
    renewing = replace(ordered, renewed={"new.w": "w"}, counted={})
    found = fuse(renewing, shim.new_secret())
    assert segments(joins.joined(renewing, found)) == [1, 1]
    assert segments(joins.joined(replace(ordered, counted={}), fuse(ordered, 1))) == [2]


def test_an_output_lies_over_an_input_of_its_own_segment_only():
    """Blocks of another segment may run before or after."""
    shapes = {name: Tensor(1, (64,), 256, (64,)) for name in "abcyz"}
    joined = LeanNode(helper.make_node("FusedOnDevice", [*"acbc"], [*"yz"]), plain=frozenset(range(4)), segments=2)
    program = offsets.Program((joined,), shapes, tuple("abc"), tuple("yz"), {}, None)

    def safe(made, read):
        return offsets.overwrites_safely(program, 0, made, read)

    assert safe("y", "a") and safe("z", "b")
    assert not safe("y", "b") and not safe("z", "a") and not safe("y", "c") and not safe("z", "c")
    donated, refused = offsets.donations(program, {"y": "a", "z": "c"})
    assert donated == {"y": "a"} and "reads 'c' while it writes" in refused["z"]


COLUMNS = [(64, 64), (100, 120, 128), (LONG, LONG + 7)]


@pytest.mark.parametrize("columns", few(COLUMNS, COLUMNS[:2]))
def test_rows_are_joined_where_as_many_threads_have_one(columns):
    nodes, inputs, count = [], {}, LEAST_BLOCKS if columns[0] >= LONG else LEAST_WARPS
    for i, each in enumerate(columns):
        nodes += [node("Mul", [f"x{i}", f"x{i}"], f"a{i}"), node("Softmax", [f"a{i}"], f"y{i}", axis=-1)]
        inputs[f"x{i}"] = (count + 4 * i, each)
    model = build(nodes, inputs, [f"y{i}" for i in range(len(columns))])
    made = assert_same(model, test_rows.feeds_of(model), exact=False, kernels=1, over=True)
    assert segments(made) == [len(columns)]


def test_pads_are_joined():
    nodes = [node("Pad", [f"x{i}", "pads"], f"y{i}") for i in range(3)]
    model = build(
        nodes, {f"x{i}": (i + 2, 9 - i) for i in range(3)}, ["y0", "y1", "y2"], {"pads": np.array([1, 2, 0, 3])}
    )
    assert segments(assert_same(model, test_rows.feeds_of(model), exact=True)) == [3]


def twice(model):
    """A model next to itself, of which the second copy reads inputs of its own, and shares scalars' names with none."""
    graph = model.graph
    weights = {each.name for each in graph.initializer}
    nodes = []
    for mark in ("", "again/"):
        for each in graph.node:
            made = type(each)()
            made.CopyFrom(each)
            for names in (made.input, made.output):
                names[:] = [name if name in weights or not name else mark + name for name in names]
            nodes.append(made)
    first = len(graph.node)
    copy = type(model)()
    copy.CopyFrom(model)
    del copy.graph.node[:]
    for pair in zip(nodes[:first], nodes[first:], strict=True):  # the copies take turns
        copy.graph.node.extend(pair)
    for values in (copy.graph.input, copy.graph.output):
        for value in list(values):
            values.add().CopyFrom(value)
            values[-1].name = f"again/{value.name}"
    return copy


@pytest.mark.parametrize("over", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_random_steps_next_to_themselves(request, over):
    """Elementwise nodes to the bit, and the same bits as unjoined; 2,000: ``--fuzz 2000``."""
    count, joined = request.config.getoption("--fuzz") or 15, Counter[int]()
    for seed in range(count):
        rng = np.random.default_rng([seed, 36])
        model = test_groups.random_model(rng)
        if model is not None:
            made = assert_same(twice(model), test_groups.random_feeds(twice(model), rng), exact=True, over=over)
            joined.update(kernel.segments for kernel in made.kernels)
    assert joined[2] + joined[4] > count


@pytest.mark.slow
def test_random_moves_next_to_themselves(request):
    """Rows and moved elements have the bits of the kernels that are not joined."""
    count, joined = request.config.getoption("--fuzz") or 15, 0
    for seed in range(count):
        model = twice(test_moved.random_model(np.random.default_rng([seed, 63])))
        feeds = {name: array / 4 for name, array in test_rows.feeds_of(model, seed).items()}
        (got, made), (wanted, _) = warps.run(model, feeds), warps.run(model, feeds, join=False)
        joined += sum(kernel.segments > 1 for kernel in made.kernels)
        for name, value in wanted.items():
            np.testing.assert_array_equal(fusing.bits(got[name]), fusing.bits(value), name)
    assert joined > count
