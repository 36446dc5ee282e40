"""Transpose, Slice, Split and Expand as index arithmetic of kernels: what they read, bits, memory, random graphs."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from onnx import helper

from onnx_remat.fuse import groups, moves, recompute, spaces
from onnx_remat.fuse.kernel import FusedNode
from onnx_remat.fuse.nodes import fuse
from tests.fuse import test_rows
from tests.fuse.test_groups import build, node, peak
from tests.support.fusing import assert_same_bits, bits, ordered_step, run, session, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "none")


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def random_move(rng: np.random.Generator, shape: tuple[int, ...], name: str, made: str):
    """A node that moves elements, its constants, and the numpy view that it makes of an array."""
    rank, kind = len(shape), str(rng.choice(["Transpose", "Transpose", "Slice", "Split", "Expand"]))
    if kind == "Transpose":
        perm = [int(axis) for axis in rng.permutation(rank)]
        return [node("Transpose", [name], made, perm=perm)], {}, lambda x: x.transpose(perm)
    axis = int(rng.integers(0, rank))
    if kind == "Slice":
        begin = int(rng.integers(0, shape[axis]))
        end, step = int(rng.integers(begin + 1, shape[axis] + 2)), int(rng.integers(1, 3))
        weights = {
            f"{made}.{key}": ints(each)
            for key, each in (
                ("b", begin - shape[axis] * int(rng.integers(0, 2))),
                ("e", end),
                ("a", axis - rank),
                ("s", step),
            )
        }
        cut = (slice(None),) * axis + (slice(begin, end, step),)
        return [node("Slice", [name, *weights], made)], weights, lambda x: x[cut]
    if kind == "Split" and shape[axis] > 1:
        first = int(rng.integers(1, shape[axis]))
        sizes = {f"{made}.sizes": ints(first, shape[axis] - first)}
        names = [made, f"{made}.rest"] if rng.random() < 0.5 else [f"{made}.rest", made]
        lower, upper = (0, first) if names[0] == made else (first, shape[axis])
        cut = (slice(None),) * axis + (slice(lower, upper),)
        split = helper.make_node("Split", [name, *sizes], names, axis=axis)
        return [split, node("Neg", [f"{made}.rest"], f"{made}.used")], sizes, lambda x: x[cut]
    wide = {f"{made}.shape": ints(2, *shape)}
    return [node("Expand", [name, *wide], made)], wide, lambda x: np.broadcast_to(x, (2, *shape))


@pytest.mark.parametrize("seed", range(120))
def test_a_move_reads_what_numpy_reads(seed):
    rng = np.random.default_rng(seed)
    shape = tuple(int(x) for x in rng.integers(1, 6, rng.integers(1, 5)))
    nodes, weights, view = random_move(rng, shape, "x", "y")
    wanted = view(np.arange(prod(shape)).reshape(shape))
    model = build(nodes, {"x": shape}, [name for each in nodes for name in each.output], weights)
    ordered = ordered_step(model)
    move = moves.move_of(nodes[0], "y", ordered.tensors, ordered.integers)
    assert move is not None
    steps = move.steps or ((1, 0),)
    places = np.indices([extent for extent, _ in steps]).reshape(len(steps), -1)
    strides = np.array([stride for _, stride in steps], int)
    np.testing.assert_array_equal(move.offset + strides @ places, wanted.ravel())
    if nodes[0].op_type == "Transpose":
        back = spaces.inverse(move.steps)
        assert spaces.inverse(back) == move.steps


def test_arguments_that_are_not_known_move_nothing():
    made = helper.make_node("Slice", ["x", "b", "e"], ["y"])
    tensors = ordered_step(build([node("Neg", ["x"], "y")], {"x": (4, 4)}, ["y"])).tensors
    assert moves.move_of(made, "y", tensors, {"b": (0,)}) is None
    back = {"b": (3,), "e": (0,), "a": (0,), "s": (-1,)}
    made = helper.make_node("Slice", ["x", "b", "e", "a", "s"], ["y"])
    assert moves.move_of(made, "y", tensors, back) is None


def test_heads_are_read_where_they_lie():
    nodes = [
        node("Transpose", ["x"], "t", perm=[0, 2, 1, 3]), node("Mul", ["t", "half"], "q"),
        node("Transpose", ["x"], "u", perm=[0, 2, 3, 1]), node("Mul", ["u", "half"], "k"),
        node("MatMul", ["q", "k"], "y"),
    ]  # fmt: skip
    model = build(nodes, {"x": (2, 32, 4, 16)}, ["y"], {"half": np.array(0.5, np.float32)})
    made = assert_same_bits(model, test_rows.feeds_of(model))
    assert [len(each.members) for each in made.order if isinstance(each, FusedNode)] == [2, 2]


def test_a_split_becomes_pieces_where_kernels_read_them():
    nodes = [helper.make_node("Split", ["x", "sizes"], ["a", "b"], axis=1), node("Neg", ["a"], "c"),
             node("MatMul", ["c", "w"], "d"), node("Relu", ["b"], "e"), node("Add", ["d", "e"], "y")]  # fmt: skip
    model = build(nodes, {"x": (16, 24), "w": (8, 16)}, ["y"], {"sizes": ints(8, 16)})
    made = assert_same_bits(model, test_rows.feeds_of(model), least_fused=2)
    left = [each for each in made.order if not isinstance(each, FusedNode)]
    assert [nodes[at].op_type for at in left] == ["MatMul"]


def test_a_split_that_no_kernel_reads_stays():
    nodes = [helper.make_node("Split", ["x", "sizes"], ["a", "b"], axis=1), node("MatMul", ["a", "w"], "d"),
             node("MatMul", ["b", "w"], "e"), node("MatMul", ["d", "e"], "y")]  # fmt: skip
    model = build(nodes, {"x": (16, 32), "w": (16, 16)}, ["y"], {"sizes": ints(16, 16)})
    assert not fuse(ordered_step(model), 0).kernels


def test_what_is_moved_last_is_written_where_it_belongs():
    nodes = [node("Softmax", ["x"], "s", axis=-1), node("Mul", ["s", "x"], "p"),
             node("Transpose", ["p"], "y", perm=[1, 0, 2])]  # fmt: skip
    model = build(nodes, {"x": (12, 9, 32)}, ["y"])
    (kernel,) = (each for each in fuse(ordered_step(model), 0).order if isinstance(each, FusedNode))
    assert len(kernel.members) == 3
    feeds = test_rows.feeds_of(model)
    np.testing.assert_array_equal(run(session(model)[0], feeds)["y"], test_rows.alone(model, feeds)["y"])


def test_a_large_transpose_is_left_to_onnx_runtime():
    """Elements that lie far apart would be read one by one, each from a line of its own."""
    model = build([node("Transpose", ["x"], "t"), node("Neg", ["t"], "y")], {"x": (1024, 1024)}, ["y"])
    assert not fuse(ordered_step(model), 0).kernels
    model = build([node("Transpose", ["x"], "t"), node("Neg", ["t"], "y")], {"x": (60, 4000)}, ["y"])
    assert len(fuse(ordered_step(model), 0).kernels) == 1


def test_lines_that_contend_for_the_cache_are_left_to_onnx_runtime():
    model = build([node("Transpose", ["x"], "t"), node("Neg", ["t"], "y")], {"x": (64, 4096)}, ["y"])
    assert not fuse(ordered_step(model), 0).kernels


@pytest.mark.parametrize("op", ["Exp", "Softmax"])
def test_loops_over_strided_elements_are_vectorised(op):
    """LLVM states them for stride 1 only, unless it knows the stride."""
    model = build([node("Transpose", ["x"], "t"), node(op, ["t"], "y")], {"x": (60, 400)}, ["y"])
    (kernel,) = fuse(ordered_step(model), 0).kernels
    assert "mul nsw i64 %column" in kernel.text and ", 400" in kernel.text


def test_a_sum_that_is_read_in_another_order_is_not_in_the_kernel_of_its_row():
    nodes = [node("ReduceSum", ["x", "last"], "s", keepdims=0), node("Reshape", ["s", "flat"], "r"),
             node("Add", ["w", "r"], "a"), node("Transpose", ["a"], "t"), node("Mul", ["t", "x"], "y")]  # fmt: skip
    weights = {"last": ints(1), "flat": ints(1, 64)}
    model = build(nodes, {"x": (64, 256), "w": (256, 64)}, ["y"], weights)
    feeds = test_rows.feeds_of(model)
    np.testing.assert_array_equal(run(session(model)[0], feeds)["y"], test_rows.alone(model, feeds)["y"])


@pytest.mark.parametrize("shape", [(4096, 2), (2, 4096), (64, 300)])
def test_any_split(shape):
    axis = int(shape[1] < 100)
    nodes = [helper.make_node("Split", ["x", "sizes"], ["a", "b"], axis=axis), node("Neg", ["a"], "c"),
             node("Abs", ["b"], "d")]  # fmt: skip
    first = shape[axis] // 2
    model = build(nodes, {"x": shape}, ["c", "d"], {"sizes": ints(first, shape[axis] - first)})
    assert_same_bits(model, test_rows.feeds_of(model))


def test_a_piece_that_only_a_dead_view_reads_is_not_made():
    nodes = [helper.make_node("Split", ["x", "sizes"], ["a", "b"], axis=0), node("Neg", ["a"], "y"),
             node("Reshape", ["b", "flat"], "unread")]  # fmt: skip
    model = build(nodes, {"x": (32, 16)}, ["y"], {"sizes": ints(16, 16), "flat": ints(256)})
    assert_same_bits(model, test_rows.feeds_of(model))


def test_a_function_is_not_computed_for_every_element_that_it_is_expanded_to():
    nodes = [node("Exp", ["x"], "e"), node("Expand", ["e", "shape"], "w"), node("Mul", ["w", "z"], "y")]
    model = build(nodes, {"x": (16, 1, 64), "z": (16, 64, 64)}, ["y"], {"shape": ints(16, 64, 64)})
    kernels = [each for each in fuse(ordered_step(model), 0).order if isinstance(each, FusedNode)]
    assert [len(each.members) for each in kernels] == [1, 2]


def test_a_value_that_is_read_in_two_orders_is_not_overwritten():
    nodes = [node("Neg", ["x"], "a"), node("MatMul", ["a", "w"], "b"), node("Transpose", ["a"], "t"),
             node("Add", ["a", "t"], "c"), node("Mul", ["c", "b"], "y")]  # fmt: skip
    model = build(nodes, {"x": (32, 32), "w": (32, 32)}, ["y"])
    assert_same_bits(model, test_rows.feeds_of(model))
    ordered = ordered_step(model)
    for group in groups.find(ordered):
        if any(member.moves for member in group.members):
            assert "a" not in group.plain


def test_a_move_is_computed_again_instead_of_kept():
    nodes = [node("Transpose", ["x"], "t", perm=[1, 0]), node("MatMul", ["t", "w"], "h"),
             node("MatMul", ["h", "w"], "g"), node("Mul", ["g", "t"], "y")]  # fmt: skip
    model = build(nodes, {"x": (64, 64), "w": (64, 64)}, ["y"])
    ordered = ordered_step(model)
    grouping = groups.Grouping(ordered)
    grouping.grow()
    before = int(grouping.live_bytes.sum())
    recompute.recompute(grouping)
    assert int(grouping.live_bytes.sum()) < before
    assert_same_bits(model, test_rows.feeds_of(model))


def together(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether two shapes broadcast to one another, and the result is small."""
    if one == other:
        return True
    try:
        return prod(np.broadcast_shapes(one, other)) < 4000
    except ValueError:
        return False


def random_model(rng: np.random.Generator):
    """Elementwise nodes and softmaxes among nodes that move elements, over values of related shapes."""
    shape = tuple(int(x) for x in rng.choice([1, 2, 3, 4, 8, 12], rng.integers(2, 5)))
    shapes = {"x": shape, "z": shape, "c": shape[int(rng.integers(0, len(shape))) :], "one": (1,)}
    inputs, weights, nodes = dict(shapes), {}, []
    for i in range(int(rng.integers(3, 18))):
        made, draw = f"v{i}", rng.random()
        names = list(shapes)
        latest = str(rng.choice(names[-3:] if rng.random() < 0.7 else names))
        if draw < 0.4 and prod(shapes[latest]) < 4000:
            new, more, view = random_move(rng, shapes[latest], latest, made)
            nodes += new
            weights |= more
            shapes[made] = view(np.empty(shapes[latest], np.int8)).shape
        elif draw < 0.5:
            nodes.append(node(str(rng.choice(["Softmax", "LogSoftmax"])), [latest], made, axis=-1))
            shapes[made] = shapes[latest]
        elif draw < 0.6:
            nodes.append(node(str(rng.choice(["Neg", "Relu", "Sqrt", "Exp"])), [latest], made))
            shapes[made] = shapes[latest]
        else:
            other = str(rng.choice([name for name in names if together(shapes[name], shapes[latest])]))
            nodes.append(node(str(rng.choice(["Add", "Mul", "Sub"])), [latest, other], made))
            shapes[made] = np.broadcast_shapes(shapes[latest], shapes[other])
    read = {name for each in nodes for name in each.input}
    outputs = [name for each in nodes for name in each.output if name not in read or rng.random() < 0.15]
    return build(nodes, {n: s for n, s in inputs.items() if n in read}, outputs, weights)


def test_random_moves(request):
    """20,000 of them: ``pytest tests/fuse/test_moved.py -k random --fuzz 20000``."""
    count, moved = request.config.getoption("--fuzz") or 40, 0
    for seed in range(count):
        model = random_model(np.random.default_rng([seed, 63]))
        feeds = {name: array / 4 for name, array in test_rows.feeds_of(model, seed).items()}
        opened, made = session(model, 1 + seed % 2)
        got = run(opened, feeds)
        for name, array in test_rows.alone(model, feeds).items():
            np.testing.assert_array_equal(bits(got[name]), bits(array), f"seed {seed}: {name}")
        ordered = ordered_step(model)
        found = groups.find(ordered)
        assert peak(ordered, found) <= peak(ordered), seed
        moved += sum(member.moves for group in found for member in group.members)
        assert len(made.kernels) == sum(not isinstance(each, int) for each in made.order)
    assert moved > count
