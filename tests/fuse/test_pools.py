"""MaxPool with indices and its gradient, compared with ONNX Runtime's."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from onnx_remat.fuse import pools
from onnx_remat.fuse.kernel import FusedNode
from onnx_remat.fuse.nodes import fuse
from onnx_remat.options import Options
from onnx_remat.ort import runtime
from onnx_remat.ort.executed import as_executed
from onnx_remat.session.prediction import laid_out
from tests.fuse.test_groups import F, L, build, node
from tests.support.fusing import assert_same_bits, options, ordered_step, run, session, why_not

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "none"),
    pytest.mark.skipif(runtime.installed() < pools.OLDEST_RUNTIME, reason="MaxPool has other bits in this onnxruntime"),
]

ODD = np.float32([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-42, 3.4e38])


def images(shape, seed=0):
    rng = np.random.default_rng(seed)
    array = rng.integers(-3, 4, shape).astype(np.float32)  # many equal ones: the first of them counts
    odd = rng.random(shape) < 0.05
    array[odd] = rng.choice(ODD, odd.sum())
    return array


def pool(shape, **attributes):
    made = helper.make_node("MaxPool", ["x"], ["y", "i"], **attributes)
    return build([made], {"x": shape}, ["y", "i"])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("shape", "attributes"),
    [
        ((4, 16, 32, 32), {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ((2, 16, 33, 31), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
        ((2, 16, 33, 31), {"kernel_shape": [3, 2], "strides": [1, 3], "pads": [1, 0, 2, 1]}),
        ((2, 16, 32, 32), {"kernel_shape": [3, 3], "dilations": [2, 3], "pads": [2, 2, 0, 1]}),
        ((2, 16, 31, 33), {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}),
        ((1, 1, 256, 256), {"kernel_shape": [5, 5], "strides": [5, 5]}),
        ((64, 64, 2, 2), {"kernel_shape": [2, 2]}),
    ],
)
def test_maxima_and_their_indices(shape, attributes, threads):
    made = assert_same_bits(pool(shape, **attributes), {"x": images(shape)}, threads=threads)
    assert [each.node.name for each in made.order if isinstance(each, FusedNode)] == ["kernel 0: MaxPool"]


def test_a_window_of_nans():
    x = np.full((4, 16, 32, 32), np.nan, np.float32)
    assert_same_bits(pool(x.shape, kernel_shape=[2, 2], strides=[2, 2]), {"x": x})


@pytest.mark.parametrize(
    "attributes",
    [
        {"kernel_shape": [2, 2], "storage_order": 1},
        {"kernel_shape": [2, 2], "auto_pad": "SAME_UPPER"},
    ],
)
def test_other_forms_stay(attributes):
    assert not fuse(ordered_step(pool((4, 16, 32, 32), **attributes)), 0).kernels


@pytest.mark.parametrize(("installed", "kernels"), [((1, 28, 0), 0), ((1, 29, 0), 1)])
def test_a_maximum_is_left_to_runtimes_in_which_no_nan_stays(installed, kernels, monkeypatch):
    executed = as_executed(
        pool((4, 16, 32, 32), kernel_shape=[2, 2]), None, "all", Options(run_by="loop").preparation()
    )
    monkeypatch.setattr(runtime, "installed", lambda: installed)
    assert laid_out(executed).fused.kernels == kernels


def test_small_ones_stay():
    assert not fuse(ordered_step(pool((1, 2, 8, 8), kernel_shape=[2, 2])), 0).kernels


def gradient(shape=(4, 16, 32, 32), readers=(), zero=0.0, zeros_for=1):
    """A MaxPool, and the sum of its output's gradient at the indices, as the converters write it."""
    planes, area, count = shape[0] * shape[1], shape[2] * shape[3], shape[2] * shape[3] // 4
    nodes = [
        helper.make_node("MaxPool", ["x"], ["y", "i"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Mod", ["i", "area"], "local"), node("Reshape", ["local", "few"], "index"),
        node("Reshape", ["dy", "few"], "more"), node("Expand", ["zero", "many"], "zeros"),
        node("ScatterElements", ["zeros", "index", "more"], "sum", axis=1, reduction="add"),
        node("Reshape", ["sum", "back"], "dx"), *readers,
    ]  # fmt: skip
    ints = {"area": area, "few": (planes, count), "many": (planes, area), "back": shape}
    weights = {name: np.array(each, np.int64) for name, each in ints.items()}
    weights["zero"] = np.array(zero, np.float32)
    outputs = ["y", "dx", *(each.output[0] for each in readers)]
    inputs = {"x": shape, "dy": (*shape[:2], shape[2] // 2, shape[3] // 2)}
    model = build(nodes, inputs, outputs, weights)
    model.opset_import[0].version = 18
    return model, {name: images(each, 7) for name, each in inputs.items()}


def test_the_gradient_is_one_kernel_and_needs_no_zeros():
    model, feeds = gradient()
    made = assert_same_bits(model, feeds, least_fused=2)
    left = [model.graph.node[each].op_type for each in made.order if not isinstance(each, FusedNode)]
    assert not {"Mod", "Expand", "ScatterElements"} & set(left)


def test_what_others_read_stays():
    model, feeds = gradient(readers=[node("Neg", ["zeros"], "n"), node("Neg", ["local"], "m")])
    made = assert_same_bits(model, feeds, least_fused=2)
    left = [model.graph.node[each].op_type for each in made.order if not isinstance(each, FusedNode)]
    assert "Mod" in left and "ScatterElements" not in left


@pytest.mark.parametrize("zero", [1.0, -0.0])
def test_what_is_not_zero_is_added_to(zero):
    model, feeds = gradient(zero=zero)
    assert_same_bits(model, feeds)
    assert all(each.kind != "sum" for each in pools.find(ordered_step(model)))


def test_a_zero_that_waits_for_another_value_is_one():
    model, feeds = gradient()
    model.graph.node[4].input[0] = "late"
    late = [node("ReduceMax", ["x"], "most", keepdims=0), node("Cast", ["most"], "known", to=9),
            node("Xor", ["known", "known"], "never"), node("Cast", ["never"], "late", to=F)]  # fmt: skip
    kept = [*late, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    assert [each.kind for each in pools.find(ordered_step(model))].count("sum") == 1
    assert_same_bits(model, feeds, least_fused=2)


def scatter(indices: np.ndarray, columns: int, remainder: int = 0) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    rows, added = indices.shape
    nodes = [
        node("Expand", ["zero", "shape"], "zeros"),
        node("ScatterElements", ["zeros", "rest" if remainder else "i", "u"], "y", axis=-1, reduction="add"),
    ]
    if remainder:
        nodes.insert(0, node("Mod", ["i", "count"], "rest"))
    weights = {"zero": np.array([0], np.float32), "shape": np.array([rows, columns], np.int64)}
    if remainder:
        weights["count"] = np.array(remainder, np.int64)
    model = build(nodes, {"i": (L, (rows, added)), "u": (rows, added)}, ["y"], weights)
    model.opset_import[0].version = 18
    return model, {"i": indices, "u": images((rows, added))}


def test_any_index_in_a_row_also_a_negative_one():
    rng = np.random.default_rng(0)
    model, feeds = scatter(rng.integers(-500, 500, (40, 300)), 500)
    assert_same_bits(model, feeds)


@pytest.mark.parametrize("remainder", [500, 250])
def test_any_remainder(remainder):
    rng = np.random.default_rng(0)
    model, feeds = scatter(rng.integers(-2000, 40_000, (40, 300)), 500, remainder)
    made = assert_same_bits(model, feeds)
    assert len(made.order) == (1 if remainder == 500 else 2)


@pytest.mark.parametrize("bad", [500, -501])
def test_an_index_out_of_bounds_is_an_error(bad):
    indices = np.zeros((40, 300), np.int64)
    indices[33, 7] = bad
    model, feeds = scatter(indices, 500)
    plain = onnxruntime.InferenceSession(model.SerializeToString(), options(), ["CPUExecutionProvider"])
    for opened in (plain, session(model)[0]):
        with pytest.raises(Exception, match=r"out of bounds|must be within"):
            run(opened, feeds)
