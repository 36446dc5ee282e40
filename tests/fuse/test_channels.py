"""Rows of several runs: the statistics of a channel over a batch of images, and of groups of channels."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

from onnx_remat.fuse import groups
from onnx_remat.fuse.rows import CHUNK, chunk_of
from tests.fuse.test_groups import build, node
from tests.fuse.test_rows import compared, feeds_of
from tests.support.fusing import bits, ordered_step, run, session, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "none")

SHAPES = [(4, 8, 4, 4), (5, 9, 7, 7), (3, 16, 5, 13), (2, 8, 64, 128), (33, 10, 17, 17), (2, 9, 3, 3, 3), (70, 8, 17)]


def batch_norm(shape):
    """The forward pass as files state it, and its outputs."""
    axes = [0, *range(2, len(shape))]
    nodes = [
        node("ReduceMean", ["x"], "mean", axes=axes), node("Sub", ["x", "mean"], "below"),
        node("Mul", ["below", "below"], "square"), node("ReduceMean", ["square"], "variance", axes=axes),
        node("Add", ["variance", "epsilon"], "above"), node("Sqrt", ["above"], "deviation"),
        node("Div", ["below", "deviation"], "normal"), node("Mul", ["normal", "weight"], "scaled"),
        node("Relu", ["scaled"], "y"),
    ]  # fmt: skip
    one = (1, shape[1], *[1] * (len(shape) - 2))
    return build(nodes, {"x": shape, "weight": one}, ["y", "mean", "deviation"], {"epsilon": np.float32(1e-5)})


def its_gradient(shape):
    axes = [0, *range(2, len(shape))]
    nodes = [
        node("Sub", ["x", "mean"], "below"), node("Mul", ["g", "below"], "product"),
        node("ReduceMean", ["g"], "of_bias", axes=axes), node("ReduceMean", ["product"], "of_weight", axes=axes),
        node("Mul", ["below", "of_weight"], "along"), node("Sub", ["g", "along"], "rest"),
        node("Sub", ["rest", "of_bias"], "of_x"),
    ]  # fmt: skip
    one = (1, shape[1], *[1] * (len(shape) - 2))
    return build(nodes, {"x": shape, "g": shape, "mean": one}, ["of_x", "of_bias", "of_weight"])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_batch_norm_and_its_gradient_are_one_kernel_each(shape, threads):
    made = compared(batch_norm(shape), threads=threads)
    assert made.kernels[0].size == shape[1]
    compared(its_gradient(shape), threads=threads)


@pytest.mark.parametrize("shape", [(6, 8, 5, 30), (2, 16, 70, 70), (3, 4, 2, 8)], ids=str)
def test_a_group_norm_with_weights_of_channels_is_one_kernel(shape):
    n, c, h, w = shape
    parts = (n, 4, c // 4 * h * w)
    nodes = [
        node("Reshape", ["x", "parts"], "z"), node("ReduceMean", ["z"], "mean", axes=[2]),
        node("Sub", ["z", "mean"], "below"), node("Mul", ["below", "below"], "square"),
        node("ReduceMean", ["square"], "variance", axes=[2]), node("Sqrt", ["variance"], "deviation"),
        node("Div", ["below", "deviation"], "normal"), node("Reshape", ["normal", "whole"], "images"),
        node("Mul", ["images", "weight"], "y"),
    ]  # fmt: skip
    model = build(nodes, {"x": shape, "weight": (c, 1, 1)}, ["y"], {"parts": np.array(parts), "whole": np.array(shape)})
    compared(model)


def test_what_is_no_number_stays_in_its_channel():
    shape = (4, 8, 6, 6)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    x[1, 2, 3, 4], x[0, 5, 0, 0], x[3, 7, 5, 5] = np.nan, np.inf, -np.inf
    feeds = {"x": x, "weight": np.ones((1, 8, 1, 1), np.float32)}
    compared(batch_norm(shape), feeds)


def test_outputs_over_inputs():
    """Channels are computed one after another: what one writes, no other one reads."""
    model = batch_norm((5, 8, 9, 9))
    (group,) = groups.find(ordered_step(model))
    assert "x" in group.plain and "weight" not in group.plain
    feeds = feeds_of(model)
    wanted = run(session(model, 2)[0], feeds)["y"]
    opened, _ = session(model, 2)
    binding, array = opened.io_binding(), onnxruntime.OrtValue.ortvalue_from_numpy(feeds["x"].copy())
    binding.bind_ortvalue_input("x", array)
    binding.bind_cpu_input("weight", feeds["weight"])
    binding.bind_ortvalue_output("y", array)
    for name in ("mean", "deviation"):
        binding.bind_output(name)
    opened.run_with_iobinding(binding)
    np.testing.assert_array_equal(bits(array.numpy()), bits(wanted))


def test_sums_of_large_planes_are_exact():
    """Chunks are added one after another: of two million pixels, a sum is within a few units in the last place."""
    x = np.random.default_rng(0).uniform(0, 1, (8, 8, 512, 512)).astype(np.float32)
    exact = x.astype(np.float64).mean((0, 2, 3))
    opened, made = session(build([node("ReduceMean", ["x"], "y", axes=[0, 2, 3], keepdims=0)], {"x": x.shape}, ["y"]))
    assert len(made.kernels) == 1
    assert np.abs(run(opened, {"x": x})["y"] / exact - 1).max() < 1e-6


@pytest.mark.parametrize(("columns", "run", "chunk"), [
    (40, 40, 40), (9000, 9000, 3000), (8198, 8198, CHUNK), (640 * 49, 49, 4067), (2 * 12544, 12544, 3136),
    (2 * 4099, 4099, 0),
])  # fmt: skip
def test_a_chunk_is_of_whole_runs_or_of_equal_parts(columns, run, chunk):
    assert chunk_of(columns, run) == chunk


def test_planes_that_cannot_be_divided_stay():
    """A plane of 4,099 pixels is a prime number of them."""
    nodes = [node("ReduceMean", ["x"], "y", axes=[0, 2])]
    compared(build(nodes, {"x": (2, 8, 4099)}, ["y"]), kernels=0)
