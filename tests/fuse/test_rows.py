"""Nodes that work along rows: their results, which nodes join one kernel, and the same bits in every group."""

from __future__ import annotations

from math import prod

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from onnx_remat.fuse import groups
from onnx_remat.fuse.rows import CHUNK, LEAST_COLUMNS, LEAST_ROWS
from tests.fuse.test_groups import build, node
from tests.support.fusing import bits, options, ordered_step, run, run_on_small_stack, session, why_not
from tests.support.slow import few

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "none")


def feeds_of(model: onnx.ModelProto, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in model.graph.input}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def compared(
    model: onnx.ModelProto, feeds: dict[str, np.ndarray] | None = None, kernels: int | None = 1, threads: int = 1
):
    """Results of the fused model, close to ONNX Runtime's; None: of any number of kernels."""
    feeds = feeds_of(model) if feeds is None else feeds
    plain = onnxruntime.InferenceSession(model.SerializeToString(), options(threads), ["CPUExecutionProvider"])
    opened, made = session(model, threads)
    assert kernels in (None, len(made.kernels))
    wanted, got = run(plain, feeds), run(opened, feeds)
    for name, array in wanted.items():
        assert got[name].shape == array.shape
        np.testing.assert_allclose(got[name], array, rtol=2e-5, atol=2e-5, err_msg=name)
    return made


SHAPES = [(64, 33), (8, 8), (9, 4, 16), (2, 3, 5, 65), (1000, 100), (11, 517)]
ALONG = [
    ("Softmax", {"axis": -1}, ()), ("LogSoftmax", {"axis": -1}, ()), ("ReduceSum", {"keepdims": 1}, (-1,)),
    ("ReduceSum", {"keepdims": 0}, (-1,)), ("ReduceMean", {"axes": [-1]}, ()), ("ReduceMax", {"axes": [-1]}, ()),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("op", "attributes", "axes"), ALONG, ids=str)
def test_one_node(op, attributes, axes, shape):
    reads, weights = (["x", "axes"], {"axes": np.array(axes)}) if axes else (["x"], {})
    compared(build([node(op, reads, "y", **attributes)], {"x": shape}, ["y"], weights))


def test_a_row_of_several_axes():
    compared(build([node("ReduceMean", ["x"], "y", axes=[1, 2])], {"x": (16, 4, 10)}, ["y"]))


LEFT_ALONE = [
    ("Softmax", {"axis": 1}, (9, 10, 11)),  # not the last axis
    ("ReduceMean", {"axes": [0, 1]}, (9, 10, 11)),
    ("ReduceMean", {"axes": [0, 2]}, (9, 10, 11)),
    ("ReduceMean", {}, (9, 10, 11)),  # of everything
    ("Softmax", {"axis": -1}, (LEAST_ROWS - 1, 64)),
    ("Softmax", {"axis": -1}, (64, LEAST_COLUMNS - 1)),
]


@pytest.mark.parametrize(("op", "attributes", "shape"), LEFT_ALONE, ids=str)
def test_what_is_left_to_onnx_runtime(op, attributes, shape):
    compared(build([node(op, ["x"], "y", **attributes)], {"x": shape}, ["y"]), kernels=0)


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("opset", [12, 17])
def test_the_axis_that_is_not_stated_is_that_of_the_opset(op, opset):
    """Up to opset 12 it is 1, and a row is all that follows."""
    for shape, kernels in [((9, 12), 1), ((9, 10, 12), 0)]:
        model = build([node(op, ["x"], "y")], {"x": shape}, ["y"])
        model.opset_import[0].version = opset
        compared(model, kernels=kernels)


def test_rows_of_masked_scores():
    """Minus infinity has no share; a row of nothing else is NaN, as in ONNX Runtime."""
    nodes = [node("Softmax", ["x"], "y", axis=-1), node("LogSoftmax", ["x"], "z", axis=-1)]
    model = build(nodes, {"x": (40, 40)}, ["y", "z"])
    x = np.random.default_rng(0).standard_normal((40, 40)).astype(np.float32)
    x[np.triu(np.ones((40, 40), bool), 1)] = -np.inf
    x[7] = -np.inf
    x[9, 3] = np.nan
    compared(model, {"x": x}, kernels=2)


def test_large_and_small_numbers_do_not_overflow():
    x = np.random.default_rng(0).uniform(-1e4, 1e4, (32, 64)).astype(np.float32)
    compared(build([node("Softmax", ["x"], "y", axis=-1)], {"x": x.shape}, ["y"]), {"x": x})
    compared(build([node("LogSoftmax", ["x"], "y", axis=-1)], {"x": x.shape}, ["y"]), {"x": x})


def test_a_maximum_of_a_nan_is_a_nan():
    x = np.random.default_rng(0).standard_normal((32, 50)).astype(np.float32)
    x[3, 0] = x[5, 20] = x[7, 49] = np.nan
    opened, made = session(build([node("ReduceMax", ["x"], "y", axes=[-1])], {"x": x.shape}, ["y"]))
    assert made.kernels
    np.testing.assert_array_equal(run(opened, {"x": x})["y"][:, 0], x.max(1))


LAST = {"last": np.array([-1])}


def test_the_gradient_of_softmax_is_one_kernel():
    nodes = [node("Mul", ["dp", "p"], "a"), node("ReduceSum", ["a", "last"], "s"), node("Sub", ["dp", "s"], "b"),
             node("Mul", ["b", "p"], "c"), node("Mul", ["c", "scale"], "y")]  # fmt: skip
    model = build(nodes, {"p": (3, 70, 50), "dp": (3, 70, 50)}, ["y"], LAST | {"scale": np.float32(0.1)})
    assert len(compared(model, threads=2).order) == 1


def test_a_layer_norm_and_its_gradient_are_one_kernel_each():
    """With what they keep for each row, statistics of a row in between, and weights along rows."""
    norm = [node("ReduceMean", ["x"], "mean", axes=[-1]), node("Sub", ["x", "mean"], "d"),
            node("Mul", ["d", "d"], "dd"), node("ReduceMean", ["dd"], "var", axes=[-1]),
            node("Add", ["var", "eps"], "ve"), node("Sqrt", ["ve"], "dev"), node("Reciprocal", ["dev"], "inv"),
            node("Mul", ["d", "inv"], "n"), node("Mul", ["n", "w"], "nw"), node("Add", ["nw", "b"], "y")]  # fmt: skip
    inputs = {"x": (4, 9, 64), "w": (64,), "b": (64,)}
    made = compared(build(norm, inputs, ["y", "mean", "inv"], {"eps": np.float32(1e-5)}))
    assert len(made.order) == 1 and len(made.kernels[0].outputs) == 3
    back = [node("Sub", ["x", "mean"], "d"), node("Mul", ["d", "inv"], "n"), node("Mul", ["dy", "w"], "g"),
            node("Mul", ["g", "n"], "gn"), node("ReduceSum", ["g", "last"], "s1"),
            node("ReduceSum", ["gn", "last"], "s2"), node("Mul", ["s1", "c"], "m1"), node("Mul", ["s2", "c"], "m2"),
            node("Mul", ["n", "m2"], "nm"), node("Sub", ["g", "m1"], "gm"), node("Sub", ["gm", "nm"], "h"),
            node("Mul", ["h", "inv"], "dx")]  # fmt: skip
    inputs = {"x": (4, 9, 64), "dy": (4, 9, 64), "w": (64,), "mean": (4, 9, 1), "inv": (4, 9, 1)}
    assert len(compared(build(back, inputs, ["dx"], LAST | {"c": np.float32(1 / 64)})).order) == 1


def test_a_sum_that_is_read_across_rows_is_not_in_their_kernel():
    """Of a square, the sum of each row, read as a row: each element needs all rows."""
    nodes = [node("Neg", ["x"], "a"), node("ReduceSum", ["a", "last"], "s", keepdims=0), node("Mul", ["a", "s"], "y")]
    compared(build(nodes, {"x": (24, 24)}, ["y"], LAST), kernels=2)
    nodes = [node("Neg", ["x"], "a"), node("ReduceSum", ["a", "last"], "s", keepdims=0), node("Sqrt", ["s"], "r"),
             node("Mul", ["a", "r"], "y")]  # fmt: skip
    x = -np.abs(np.random.default_rng(0).standard_normal((24, 24))).astype(np.float32)
    compared(build(nodes, {"x": (24, 24)}, ["y"], LAST), {"x": x}, kernels=2)


def test_rows_of_two_lengths_are_two_kernels():
    nodes = [node("Softmax", ["x"], "a", axis=-1), node("Reshape", ["a", "to"], "b"),
             node("Softmax", ["b"], "c", axis=-1), node("Relu", ["c"], "y")]  # fmt: skip
    compared(build(nodes, {"x": (16, 64)}, ["y"], {"to": np.array([32, 32])}), kernels=2)


@pytest.mark.parametrize("columns", [CHUNK, CHUNK + 1, 2 * CHUNK, 50_257])
def test_long_rows(columns):
    """A chunk at a time."""
    nodes = [node("Neg", ["x"], "a"), node("Softmax", ["a"], "b", axis=-1), node("Sub", ["a", "b"], "y")]
    assert len(compared(build(nodes, {"x": (8, columns)}, ["y"]), threads=2).order) == 1
    nodes = [node("LogSoftmax", ["x"], "a", axis=-1), node("Exp", ["a"], "b"),
             node("ReduceMean", ["b"], "m", axes=[-1]), node("Sub", ["b", "m"], "y"),
             node("ReduceMax", ["y"], "z", axes=[-1])]  # fmt: skip
    model = build(nodes, {"x": (9, columns)}, ["y", "z"])
    made = compared(model)
    assert len(made.order) == 1
    feeds = feeds_of(model)
    got = run(session(model)[0], feeds)
    for name, array in alone(model, feeds).items():
        np.testing.assert_array_equal(bits(got[name]), bits(array), name)


def test_a_thread_of_small_stack_runs_long_rows():
    nodes = [node("Softmax", [f"v{i}"], f"v{i + 1}", axis=-1) for i in range(8)]
    model = build(nodes, {"v0": (9, 40_000)}, ["v8"])
    found = run_on_small_stack(session(model)[0], feeds_of(model))
    assert np.isfinite(found["v8"]).all()


def test_functions_that_wait_for_one_another_are_several_kernels():
    """Three in one kernel take longer than to write and read their results; side by side they do not."""
    nodes = [node("Tanh", [f"x{i}"], f"x{i + 1}") for i in range(6)]
    model = build(nodes, {"x0": (64, 64)}, ["x6"])
    compared(model, kernels=3)
    nodes = [node("Tanh", ["x"], "a"), node("Exp", ["x"], "b"), node("Erf", ["x"], "c"), node("Sigmoid", ["x"], "d"),
             node("Sum", ["a", "b", "c", "d"], "y")]  # fmt: skip
    compared(build(nodes, {"x": (64, 64)}, ["y"]), kernels=1)


# ---- random graphs ----

UNARY = ("Neg", "Abs", "Relu", "Tanh", "Sigmoid", "Erf", "Identity")


ALONG_WHAT = ("last axis", "channels", "groups of channels")


def random_shapes(rng: np.random.Generator, along: str) -> tuple[list[tuple[int, ...]], list[int]]:
    """Shapes of a model's inputs, the whole one first and that of one element a row second, and a row's axes."""
    if along == "last axis":
        full = tuple(int(x) for x in rng.choice([2, 3, 8, 9], int(rng.integers(1, 3))))
        full = (8, *full, int(rng.choice([8, 9, 33, 64, 100])))
        return [full, (*full[:-1], 1), full[-1:], ()], [len(full) - 1]
    n, c = int(rng.choice([2, 3, 8, 60])), int(rng.choice([8, 9]))
    h, w = (int(x) for x in rng.choice([(4, 4), (1, 17), (7, 7), (5, 33), (80, 100)]))
    if along == "channels":
        return [(n, c, h, w), (1, c, 1, 1), (n, c, 1, 1), (n, 1, 1, 1), (c, h, w), (w,), ()], [0, 2, 3]
    return [(c, n, h, w), (c, 1, 1, 1), (n, 1, 1), (c, n, 1, 1), (w,), ()], [1, 2, 3]


def random_model(rng: np.random.Generator, along: str) -> onnx.ModelProto:
    """Elementwise nodes, functions and nodes along rows; values of whole arrays, of one element a row, and others."""
    shapes, axes = random_shapes(rng, along)
    full, of_rows = shapes[:2]
    kinds = {f"x{i}": shape for i, shape in enumerate([full, *shapes])}
    inputs, nodes = dict(kinds), []

    def pick(shape=None):
        names = [name for name, each in kinds.items() if shape in (None, each)]
        return str(rng.choice(names[-5:] if rng.random() < 0.7 else names))

    for i in range(int(rng.integers(2, 18))):
        made, draw = f"v{i}", rng.random()
        if draw < 0.3:
            a = pick()
            nodes.append(node(str(rng.choice(UNARY)), [a], made))
            kinds[made] = kinds[a]
        elif draw < 0.65:
            a, b = pick(), pick()
            nodes.append(node(str(rng.choice(("Add", "Sub", "Mul"))), [a, b], made))
            kinds[made] = np.broadcast_shapes(kinds[a], kinds[b])
        elif draw < 0.8 and along == "last axis":
            nodes.append(node(str(rng.choice(("Softmax", "LogSoftmax"))), [pick(full)], made, axis=-1))
            kinds[made] = full
        else:
            op = str(rng.choice(("ReduceMean", "ReduceMax")))
            nodes.append(node(op, [pick(full)], made, axes=axes))
            kinds[made] = of_rows
    read = {name for each in nodes for name in each.input}
    outputs = [name for name in kinds if name not in inputs and (name not in read or rng.random() < 0.15)]
    return build(nodes, {name: each for name, each in inputs.items() if name in read}, outputs)


def alone(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Results of a model whose nodes run one by one, each in a session of its own."""
    stored = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    known = feeds | stored
    for each in model.graph.node:
        names = list(dict.fromkeys(each.input))
        weights = {name: known[name] for name in names if name in stored}
        single = build(
            [each], {name: known[name].shape for name in names if name not in weights}, list(each.output), weights
        )
        known |= run(session(single)[0], {name: known[name] for name in names if name not in weights})
    return {value.name: known[value.name] for value in model.graph.output}


@pytest.mark.parametrize("along", few(ALONG_WHAT, ["channels"]))
def test_random_rows(along, request):
    """In a kernel with others, a node has the bits that it has alone: so an original and its rewritten step agree."""
    count, fused = max((request.config.getoption("--fuzz") or 0) // 20, 12), 0
    for seed in range(count):
        rng = np.random.default_rng([seed, 61])
        model = random_model(rng, along)
        feeds = feeds_of(model, seed)
        opened, _ = session(model, 1 + seed % 2)
        got = run(opened, feeds)
        for name, array in alone(model, feeds).items():
            np.testing.assert_array_equal(bits(got[name]), bits(array), f"seed {seed}: {name}")
        found = groups.find(ordered_step(model))
        fused += sum(len(group.members) > 1 and group.columns > 0 for group in found)
        plain = onnxruntime.InferenceSession(model.SerializeToString(), options(), ["CPUExecutionProvider"])
        for name, array in run(plain, feeds).items():
            scale = max(1.0, float(np.abs(array).max(initial=0)))
            np.testing.assert_allclose(got[name], array, rtol=1e-3, atol=1e-4 * scale, err_msg=f"seed {seed}: {name}")
    assert fused > count // 2


def test_outputs_over_inputs():
    """What a row's result overwrites is read before."""
    model = build([node("Mul", ["x", "x"], "a"), node("Softmax", ["a"], "y", axis=-1)], {"x": (64, 64)}, ["y"])
    (group,) = groups.find(ordered_step(model))
    assert "x" in group.plain and group.size == prod((64, 64))
    feeds = feeds_of(model)
    wanted = run(session(model)[0], feeds)["y"]
    opened, _ = session(model)
    binding, array = opened.io_binding(), onnxruntime.OrtValue.ortvalue_from_numpy(feeds["x"].copy())
    binding.bind_ortvalue_input("x", array)
    binding.bind_ortvalue_output("y", array)
    opened.run_with_iobinding(binding)
    np.testing.assert_array_equal(array.numpy(), wanted)


@pytest.mark.parametrize("name", ["p sum", "p max", "p share"])
@pytest.mark.parametrize("made", [True, False], ids=["made", "fed"])
def test_values_may_have_any_names(name, made):
    """Also those that values inside a kernel would have."""
    twice = [node("Mul", ["p", "p"], name)] if made else []
    nodes = [node("Softmax", ["x"], "p", axis=-1), *twice, node("Add", ["p", name], "y")]
    compared(build(nodes, {"x": (64, 64), **({} if made else {name: (64, 64)})}, ["y"]))
