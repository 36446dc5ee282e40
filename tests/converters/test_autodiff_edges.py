"""Gradients where random data never comes: rows of zeros, powers of zero, operands that are repeated, old opsets."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_remat.converters.autodiff import add_backward
from onnx_remat.converters.autodiff.registry import STOPPED

from onnx_remat.errors import ConversionError
from tests.support.graphs import run_model

pytest.importorskip("onnxruntime")
torch = pytest.importorskip("torch")

node = helper.make_node


def forward(nodes, inputs, weights, opset=20):
    graph = helper.make_graph(
        nodes, "forward",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def step_of(model, wrt="w", **options):
    return add_backward(model, "y", wrt=[wrt], **options)


def outputs_of(step, feeds, weights):
    names = [value.name for value in step.graph.input]
    made = run_model(step, {name: (feeds | weights)[name] for name in names}, "disable")
    return dict(zip([value.name for value in step.graph.output], made, strict=True))


RNG = np.random.default_rng(0)
W = RNG.standard_normal((3, 4), np.float32)
X = np.concatenate([np.zeros((1, 3), np.float32), RNG.standard_normal((2, 3), np.float32)])


def normalized(op):
    if op == "ReduceL2":
        return [
            node("ReduceL2", ["h", "last"], ["n"], keepdims=1), node("Clip", ["n", "least"], ["c"]),
            node("Div", ["h", "c"], ["r"]),
        ]  # fmt: skip
    return [node("LpNormalization", ["h"], ["r"], axis=-1, p=2)]


@pytest.mark.parametrize("op", ["ReduceL2", "LpNormalization"])
def test_a_row_of_zeros_has_no_gradient(op):
    nodes = [
        node("MatMul", ["x", "w"], ["h"]), *normalized(op), node("Mul", ["r", "r3"], ["m"]),
        node("ReduceSum", ["m"], ["y"], keepdims=0),
    ]  # fmt: skip
    r3 = RNG.standard_normal((3, 4), np.float32)
    constants = {"last": np.array([-1]), "least": np.float32(1e-12)} if op == "ReduceL2" else {}
    step = step_of(forward(nodes, {"x": [3, 3], "r3": [3, 4]}, {"w": W, **constants}))
    w = torch.tensor(W, requires_grad=True)
    (torch.nn.functional.normalize(torch.tensor(X) @ w, dim=-1) * torch.tensor(r3)).sum().backward()
    found = outputs_of(step, {"x": X, "r3": r3}, {"w": W})
    np.testing.assert_allclose(found["grad.w"], w.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_a_product_with_zeros_has_the_gradient_of_the_others(zeros):
    w = np.float32([2, -3, 0.5, 4])
    w[:zeros] = 0
    nodes = [node("ReduceProd", ["w"], ["p"], keepdims=0), node("Mul", ["p", "x"], ["y"])]
    found = outputs_of(
        step_of(forward(nodes, {"x": []}, {"w": w}), check=False), {"x": np.array(3, np.float32)}, {"w": w}
    )
    np.testing.assert_allclose(found["grad.w"], [3 * np.prod(np.delete(w, i)) for i in range(4)])


def gradient_of(nodes, w, x, constants=None, convention="tensorflow"):
    """The gradient of the sum of h(w) * x."""
    ends = [node("Mul", ["h", "x"], ["m"]), node("ReduceSum", ["m"], ["y"], keepdims=0)]
    arrays = {"w": np.asarray(w, np.float32)} | {name: np.float32(value) for name, value in (constants or {}).items()}
    model = forward([*nodes, *ends], {"x": [len(x)]}, arrays, opset=18)
    step = step_of(model, check=False, convention=convention)
    return outputs_of(step, {"x": np.asarray(x, np.float32)}, arrays)["grad.w"]


def test_ties_by_convention():
    nodes = [node("Max", ["w", "low"], ["a"]), node("Min", ["high", "a"], ["h"])]
    # w ties with `high`, which comes first of the two, and with `low`, which comes second
    for convention, expected in (("tensorflow", [3, 0, 2, 0]), ("torch", [3, 1, 1, 0])):
        made = gradient_of(nodes, [0.5, 1, 0, -1], [3, 2, 2, 1], {"low": 0, "high": 1}, convention)
        np.testing.assert_array_equal(made, expected)


def test_the_limits_of_a_clip_by_convention():
    nodes = [node("Clip", ["w", "low", "high"], ["h"])]
    for convention, expected in (("tensorflow", [0, 1, 0]), ("torch", [1, 1, 1])):
        made = gradient_of(nodes, [0, 3, 6], [1, 1, 1], {"low": 0, "high": 6}, convention)
        np.testing.assert_array_equal(made, expected)


def test_no_gradient_at_a_pole_by_convention():
    nodes = [
        node("Sqrt", ["w"], ["s"]), node("Reciprocal", ["s"], ["r"]), node("Div", ["w", "w"], ["q"]),
        node("Where", ["inside", "q", "zero"], ["kept"]), node("Add", ["s", "r"], ["t"]),
        node("Where", ["inside", "t", "zero"], ["u"]), node("Add", ["u", "kept"], ["h"]),
        node("Greater", ["w", "zero"], ["inside"]),
    ]  # fmt: skip
    nodes.insert(0, nodes.pop())
    made = gradient_of(nodes, [0, 4], [1, 1], {"zero": 0})
    np.testing.assert_allclose(made, [0, 1 / 4 - 1 / 16], rtol=1e-6)
    assert np.isnan(gradient_of(nodes, [0, 4], [1, 1], {"zero": 0}, "torch")[0])


def test_a_stopped_gradient():
    nodes = [node("Mean", ["w"], ["s"], f"{STOPPED}.1"), node("Mul", ["w", "s"], ["h"])]
    np.testing.assert_array_equal(gradient_of(nodes, [2, 3], [1, 1]), [2, 3])


def test_powers_of_zero():
    nodes = [
        node("MatMul", ["x", "w"], ["h"]), node("Unsqueeze", ["h", "last"], ["u"]), node("Pow", ["u", "e"], ["p"]),
        node("ReduceSum", ["p"], ["y"], keepdims=0),
    ]  # fmt: skip
    powers = np.arange(4, dtype=np.float32)
    step = step_of(forward(nodes, {"x": [3, 3]}, {"w": W, "last": np.array([-1]), "e": powers}))
    w = torch.tensor(W, requires_grad=True)
    ((torch.tensor(X) @ w)[..., None] ** torch.tensor(powers)).sum().backward()
    np.testing.assert_allclose(outputs_of(step, {"x": X}, {"w": W})["grad.w"], w.grad, rtol=1e-4, atol=1e-5)


def test_an_operand_that_einsum_repeats():
    w = RNG.standard_normal((1, 5, 4), np.float32)
    x = RNG.standard_normal((2, 3, 4), np.float32)
    nodes = [
        node("Einsum", ["x", "w"], ["e"], equation="bnd,bmd->bnm"), node("Mul", ["e", "e"], ["m"]),
        node("ReduceSum", ["m"], ["y"], keepdims=0),
    ]  # fmt: skip
    step = step_of(forward(nodes, {"x": [2, 3, 4]}, {"w": w}))
    theirs = torch.tensor(w, requires_grad=True)
    torch.einsum("bnd,bmd->bnm", torch.tensor(x), theirs).square().sum().backward()
    found = outputs_of(step, {"x": x}, {"w": w})["grad.w"]
    assert found.shape == w.shape
    np.testing.assert_allclose(found, theirs.grad, rtol=1e-4)


def test_a_normalization_that_is_called_twice_updates_its_statistics_twice():
    nodes = [
        node("MatMul", ["x", "w"], ["h"]), node("MatMul", ["z", "w"], ["k"]),
        node("BatchNormalization", ["h", "s", "b", "mean", "var"], ["hn"]),
        node("BatchNormalization", ["k", "s", "b", "mean", "var"], ["kn"]),
        node("Sub", ["hn", "kn"], ["d"]), node("Mul", ["d", "d"], ["q"]), node("ReduceMean", ["q"], ["y"], keepdims=0),
    ]  # fmt: skip
    ones, zeros = np.ones(4, np.float32), np.zeros(4, np.float32)
    weights = {"w": W, "s": ones, "b": zeros, "mean": zeros, "var": ones}
    step = step_of(forward(nodes, {"x": [8, 3], "z": [8, 3]}, weights), training=True)
    feeds = {name: RNG.standard_normal((8, 3), np.float32) for name in "xz"}
    theirs = torch.nn.BatchNorm1d(4, momentum=0.1)
    for name in "xz":
        theirs(torch.tensor(feeds[name] @ W))
    found = outputs_of(step, feeds, weights)
    np.testing.assert_allclose(found["new.mean"], theirs.running_mean, rtol=1e-4, atol=1e-6)


def test_statistics_that_the_loss_reads_are_those_of_their_own_call():
    nodes = [
        node("MatMul", ["x", "w"], ["h"]), node("MatMul", ["z", "w"], ["k"]),
        node("BatchNormalization", ["h", "s", "b", "mean", "var"], ["hn", "m1", "v1"], training_mode=1),
        node("BatchNormalization", ["k", "s", "b", "mean", "var"], ["kn", "m2", "v2"], training_mode=1),
        node("Add", ["m1", "m2"], ["both"]), node("ReduceMean", ["both"], ["y"], keepdims=0),
    ]  # fmt: skip
    ones, before = np.ones(4, np.float32), np.full(4, 5, np.float32)
    weights = {"w": W, "s": ones, "b": ones, "mean": before, "var": ones}
    feeds = {name: RNG.standard_normal((8, 3), np.float32) for name in "xz"}
    found = outputs_of(step_of(forward(nodes, {"x": [8, 3], "z": [8, 3]}, weights)), feeds, weights)
    wanted = sum((0.9 * before + 0.1 * (feeds[name] @ W).mean(0)).mean() for name in "xz")
    np.testing.assert_allclose(found["loss"], wanted, rtol=1e-5)


def test_axes_that_are_named_where_none_would_mean_no_reduction():
    nodes = [
        node("MatMul", ["x", "w"], ["h"]), node("Mul", ["h", "h"], ["q"]),
        node("ReduceMean", ["q", "both"], ["y"], keepdims=0, noop_with_empty_axes=1),
    ]  # fmt: skip
    w, x = RNG.standard_normal((8, 256), np.float32), RNG.standard_normal((256, 8), np.float32)
    step = step_of(forward(nodes, {"x": [256, 8]}, {"w": w, "both": np.array([0, 1])}))
    theirs = torch.tensor(w, requires_grad=True)
    loss = (torch.tensor(x) @ theirs).square().mean()
    loss.backward()
    found = outputs_of(step, {"x": x}, {"w": w})
    np.testing.assert_allclose(found["loss"], loss.item(), rtol=1e-5)
    np.testing.assert_allclose(found["grad.w"], theirs.grad, rtol=1e-3, atol=1e-6)


def test_a_mean_of_a_normalization_that_the_loss_depends_on_is_refused():
    nodes = [
        node("MatMul", ["x", "w"], ["h"]), node("LayerNormalization", ["h", "s"], ["n", "m"]),
        node("Mul", ["n", "m"], ["q"]), node("ReduceSum", ["q"], ["y"], keepdims=0),
    ]  # fmt: skip
    with pytest.raises(ConversionError, match="the loss depends on its mean or its inverse deviation, too"):
        step_of(forward(nodes, {"x": [3, 3]}, {"w": W, "s": np.ones(4, np.float32)}))


@pytest.mark.parametrize("weighted", [False, True])
def test_losses_of_each_target_that_are_weighed_by_their_place(weighted):
    """The loss's gradient has fewer axes than the losses, and as many entries as there are classes."""
    nodes = [
        node("Mul", ["x", "w"], ["scores"]),
        node("SoftmaxCrossEntropyLoss", ["scores", "labels", *["by"] * weighted], ["each"], reduction="none"),
        node("Mul", ["each", "v"], ["q"]), node("ReduceSum", ["q"], ["y"], keepdims=0),
    ]  # fmt: skip
    x, v = RNG.standard_normal((2, 4, 4), np.float32), RNG.standard_normal(4, np.float32)
    w, by = RNG.standard_normal((1, 4, 1), np.float32), RNG.random(4, np.float32)
    labels = RNG.integers(0, 4, (2, 4))
    given = forward(nodes, {"x": [2, 4, 4], "v": [4]}, {"w": w} | ({"by": by} if weighted else {}))
    given.graph.input.append(helper.make_tensor_value_info("labels", TensorProto.INT64, [2, 4]))
    step = step_of(given)
    theirs = torch.tensor(w, requires_grad=True)
    losses = torch.nn.functional.cross_entropy(
        torch.tensor(x) * theirs, torch.tensor(labels), torch.tensor(by) if weighted else None, reduction="none"
    )
    (losses * torch.tensor(v)).sum().backward()
    found = outputs_of(step, {"x": x, "v": v, "labels": labels}, {"w": w})
    np.testing.assert_allclose(found["grad.w"], theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [(2.0, 2.0), (1.5, 1.5), (0.5, 0.5), (0.6, 2.0)])
@pytest.mark.parametrize("mode", ["linear", "nearest"])
def test_images_of_an_old_opset_are_resized_as_onnxruntime_resizes_them(mode, scale):
    scales = np.array([1, 1, *scale], np.float32)
    nodes = [
        node("Mul", ["x", "w"], ["h"]), node("Resize", ["h", "scales"], ["r"], mode=mode),
        node("Mul", ["r", "r"], ["q"]), node("ReduceMean", ["q"], ["y"], keepdims=0),
    ]  # fmt: skip
    w, x = RNG.standard_normal((1, 2, 1, 1), np.float32), RNG.standard_normal((1, 2, 4, 4), np.float32)
    given = forward(nodes, {"x": [1, 2, 4, 4]}, {"w": w, "scales": scales}, opset=10)
    (wanted,) = run_model(given, {"x": x}, "disable")
    np.testing.assert_allclose(outputs_of(step_of(given), {"x": x}, {"w": w})["loss"], wanted, rtol=1e-5)


def test_computed_scales_of_an_old_opset_are_folded_or_refused():
    nodes = [
        node("Mul", ["x", "w"], ["h"]), node("Mul", ["scales", "half"], ["computed"]),
        node("Resize", ["h", "computed"], ["r"]), node("Mul", ["r", "r"], ["q"]),
        node("ReduceMean", ["q"], ["y"], keepdims=0),
    ]  # fmt: skip
    w, x = RNG.standard_normal((1, 2, 1, 1), np.float32), RNG.standard_normal((1, 2, 5, 5), np.float32)
    scales, half = np.array([2, 2, 1.2, 1.2], np.float32), np.float32(0.5)
    given = forward(nodes, {"x": [1, 2, 5, 5]}, {"w": w, "scales": scales, "half": half}, opset=10)
    (wanted,) = run_model(given, {"x": x}, "disable")
    np.testing.assert_allclose(outputs_of(step_of(given), {"x": x}, {"w": w})["loss"], wanted, rtol=1e-5)
    fed = forward(nodes, {"x": [1, 2, 5, 5], "scales": [4]}, {"w": w, "half": half}, opset=10)
    with pytest.raises(ConversionError, match=r"\(Resize\): its scales are unknown before the run"):
        step_of(fed)


@pytest.mark.parametrize(("opset", "sizes"), [(9, [4, 4]), (9, ["H", "W"]), (10, [4, 4])])
def test_an_image_of_an_old_opset_is_resized_to_a_size(opset, sizes):
    ends = ([], {"starts": [2], "ends": [4]}) if opset < 10 else (["two", "four"], {})
    nodes = [
        node("Conv", ["x", "w"], ["h"]), node("Shape", ["h"], ["s"]), node("Slice", ["s", *ends[0]], ["hw"], **ends[1]),
        node("Cast", ["hw"], ["from"], to=TensorProto.FLOAT), node("Div", ["to", "from"], ["factors"]),
        node("Concat", ["ones", "factors"], ["scales"], axis=0),
        node("Upsample" if opset < 10 else "Resize", ["h", "scales"], ["r"], mode="nearest"),
        node("Mul", ["r", "weights"], ["q"]), node("ReduceMean", ["q"], ["y"], keepdims=0),
    ]  # fmt: skip
    w, x = RNG.standard_normal((1, 1, 2, 2), np.float32), RNG.standard_normal((2, 1, 4, 4), np.float32)
    constants = {"to": np.float32([6, 6]), "ones": np.float32([1, 1]), "two": np.array([2]), "four": np.array([4])}
    weights = constants | {"w": w, "weights": RNG.standard_normal((6, 6), np.float32)}
    given = forward(nodes, {"x": ["B", 1, *sizes]}, weights, opset)
    (wanted,) = run_model(given, {"x": x}, "disable")
    step = step_of(given, dims={"B": 2} | dict.fromkeys((name for name in sizes if name != 4), 4))
    np.testing.assert_allclose(outputs_of(step, {"x": x}, {"w": w})["loss"], wanted, rtol=1e-5)
    if opset == 10:
        with pytest.raises(ConversionError, match=r"\(Resize\): its scales are unknown before the run.* with dims="):
            step_of(given)


def test_a_resize_to_the_same_size_moves_entries():
    scales = np.array([1, 1, 1.2, 1.2], np.float32)
    nodes = [
        node("Mul", ["x", "w"], ["h"]), node("Resize", ["h", "", "scales"], ["r"], mode="linear"),
        node("Mul", ["r", "r"], ["q"]), node("ReduceMean", ["q"], ["y"], keepdims=0),
    ]  # fmt: skip
    w = RNG.standard_normal((1, 2, 4, 4), np.float32)
    step_of(forward(nodes, {"x": [1, 2, 4, 4]}, {"w": w, "scales": scales}))  # compared with differences


def test_constants_are_not_folded_by_kernels_that_compute_something_else():
    fixed = np.array([[1, -0.5], [2, -3]], np.float32)
    nodes = [
        node("LpNormalization", ["f"], ["n"], axis=1, p=1), node("MatMul", ["n", "w"], ["h"]),
        node("MatMul", ["x", "h"], ["q"]), node("ReduceSum", ["q"], ["y"], keepdims=0),
    ]  # fmt: skip
    w, x = RNG.standard_normal((2, 2), np.float32), RNG.standard_normal((3, 2), np.float32)
    step = step_of(forward(nodes, {"x": [3, 2]}, {"w": w, "f": fixed}))
    wanted = (x @ (fixed / np.abs(fixed).sum(1, keepdims=True)) @ w).sum()
    np.testing.assert_allclose(outputs_of(step, {"x": x}, {"w": w})["loss"], wanted, rtol=1e-5)


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div"])
@pytest.mark.parametrize("axis", [None, 0, 1, 2])
def test_operands_of_old_opsets_meet_at_their_axis(op, axis):
    stated = {"broadcast": 1} | ({} if axis is None else {"axis": axis})
    nodes = [
        node(op, ["x", "w"], ["h"], **stated), node("Mul", ["h", "t"], ["m"]),
        node("ReduceSum", ["m"], ["y"], keepdims=0),
    ]  # fmt: skip
    weight = np.abs(W[0, : 2 if axis == 0 else 4]) + 1
    step = step_of(forward(nodes, {"x": (2, 4, 4), "t": (2, 4, 4)}, {"w": weight}, opset=6))
    x, t = RNG.standard_normal((2, 2, 4, 4), np.float32)
    inner, other = torch.tensor(weight, requires_grad=True), torch.tensor(x)
    aligned = inner if axis is None else inner.reshape([-1, *[1] * (2 - axis)])
    name = {"Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div"}[op]
    loss = (getattr(torch, name)(other, aligned) * torch.tensor(t)).sum()
    loss.backward()
    made = outputs_of(step, {"x": x, "t": t}, {"w": weight})
    np.testing.assert_allclose(made["loss"], loss.item(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(made["grad.w"], inner.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("length", "kernel"), [(6, 3), (7, 2)])
@pytest.mark.parametrize("padded", [0, 1])
def test_averages_of_windows_that_reach_beyond_the_image(length, kernel, padded):
    nodes = [
        node("Mul", ["x", "w"], ["h"]),
        node("AveragePool", ["h"], ["p"], kernel_shape=[kernel] * 2, strides=[2, 2], ceil_mode=1,
             count_include_pad=padded),
        node("Mul", ["p", "p"], ["q"]), node("ReduceSum", ["q"], ["y"], keepdims=0),
    ]  # fmt: skip
    shape = (1, 2, length, length)
    x, w = RNG.standard_normal(shape, np.float32), RNG.standard_normal(shape, np.float32)
    found = outputs_of(step_of(forward(nodes, {"x": shape}, {"w": w})), {"x": x}, {"w": w})
    theirs = torch.tensor(w, requires_grad=True)
    pooled = torch.nn.functional.avg_pool2d(
        torch.tensor(x) * theirs, kernel, 2, ceil_mode=True, count_include_pad=bool(padded)
    )
    pooled.square().sum().backward()
    np.testing.assert_allclose(found["grad.w"], theirs.grad, rtol=1e-4, atol=1e-5)


def test_a_softmax_over_other_classes_is_not_taken_for_that_of_the_loss():
    nodes = [
        node("MatMul", ["x", "w"], ["h"]), node("Reshape", ["h", "wide"], ["r"]),
        node("Softmax", ["r"], ["s"], axis=-1), node("Reshape", ["s", "rows"], ["y"]),
    ]  # fmt: skip
    weights = {"w": W, "wide": np.array([2, 12]), "rows": np.array([6, 4])}
    with pytest.raises(ConversionError, match="is made of a Softmax over axis -1"):
        add_backward(forward(nodes, {"x": [6, 3]}, weights), "cross_entropy", wrt=["w"])


def test_factors_by_class_of_an_image_with_as_many_classes_as_rows():
    nodes = [
        node("Mul", ["x", "w"], ["z"]), node("LogSoftmax", ["z"], ["p"], axis=1), node("Mul", ["p", "v"], ["m"]),
        node("Squeeze", ["m", "last"], ["s"]), node("NegativeLogLikelihoodLoss", ["s", "labels"], ["y"]),
    ]  # fmt: skip
    x, w = RNG.standard_normal((3, 3, 1), np.float32), RNG.standard_normal((3, 3, 1), np.float32)
    v, labels = np.array([[1], [20], [300]], np.float32), np.array([2, 0, 1])
    given = forward(nodes, {"x": [3, 3, 1]}, {"w": w, "v": v, "last": np.array([2])})
    given.graph.input.append(helper.make_tensor_value_info("labels", TensorProto.INT64, [3]))
    found = outputs_of(step_of(given), {"x": x, "labels": labels}, {"w": w})
    theirs = torch.tensor(w, requires_grad=True)
    scores = torch.log_softmax(torch.tensor(x) * theirs, 1) * torch.tensor(v)
    torch.nn.functional.nll_loss(scores[..., 0], torch.tensor(labels)).backward()
    np.testing.assert_allclose(found["grad.w"], theirs.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("narrow", [(1, 2), (2,)])
def test_padded_terms_that_broadcast_are_no_parts(narrow):
    rank = len(narrow)
    nodes = [
        node("Mul", ["x", "w"], ["h"]), node("Pad", ["h", "right"], ["a"]), node("Pad", ["v", "left"], ["b"]),
        node("Add", ["a", "b"], ["c"]), node("Mul", ["c", "c"], ["q"]), node("ReduceSum", ["q"], ["y"], keepdims=0),
    ]  # fmt: skip
    right, left = np.array([0, 0, 0, 2]), np.array([0] * (rank - 1) + [2] + [0] * rank)
    w, x = RNG.standard_normal((2, 2), np.float32), RNG.standard_normal((2, 2), np.float32)
    v = RNG.standard_normal(narrow, np.float32)
    step = add_backward(
        forward(nodes, {"x": [2, 2]}, {"w": w, "v": v, "right": right, "left": left}), "y", wrt=["w", "v"]
    )
    found = outputs_of(step, {"x": x}, {"w": w, "v": v})
    wanted = np.pad(x * w, [(0, 0), (0, 2)]) + np.pad(v, [(0, 0)] * (rank - 1) + [(2, 0)])
    np.testing.assert_allclose(found["loss"], np.square(wanted).sum(), rtol=1e-5)


@pytest.mark.parametrize("mode", ["reflect", "edge"])
def test_a_padding_that_repeats_entries_ignores_its_constant(mode):
    nodes = [
        node("Mul", ["x", "w"], ["h"]), node("Pad", ["h", "pads", "fill"], ["p"], mode=mode),
        node("Mul", ["p", "p"], ["q"]), node("ReduceSum", ["q"], ["y"], keepdims=0),
    ]  # fmt: skip
    w = RNG.standard_normal((2, 4), np.float32)
    weights = {"w": w, "pads": np.array([0, 2, 0, 1]), "fill": np.float32(0)}
    found = outputs_of(step_of(forward(nodes, {"x": [2, 4]}, weights)), {"x": w}, {"w": w})
    theirs = torch.tensor(w, requires_grad=True)
    padded = np.pad(np.arange(8).reshape(2, 4), [(0, 0), (2, 1)], mode=mode)
    (torch.tensor(w) * theirs).flatten()[torch.tensor(padded)].square().sum().backward()
    np.testing.assert_allclose(found["grad.w"], theirs.grad, rtol=1e-4, atol=1e-5)


def test_products_of_integers_stay_as_they_are():
    nodes = [
        node("MatMul", ["ids", "c"], ["p"]), node("Add", ["p", "o"], ["i"]), node("Squeeze", ["i", "last"], ["j"]),
        node("Gather", ["w", "j"], ["e"]), node("Mul", ["e", "e"], ["q"]), node("ReduceSum", ["q"], ["y"], keepdims=0),
    ]  # fmt: skip
    weights = {"w": RNG.standard_normal((5, 2), np.float32), "c": np.array([[1], [2]]), "o": np.array([1])}
    given = forward(nodes, {}, weights | {"last": np.array([1])})
    given.graph.input.append(helper.make_tensor_value_info("ids", TensorProto.INT64, ["N", 2]))
    found = outputs_of(step_of(given), {"ids": np.array([[0, 1], [1, 0], [0, 0]])}, {"w": weights["w"]})
    np.testing.assert_allclose(found["grad.w"], 2 * weights["w"] * [[0], [1], [1], [1], [0]], rtol=1e-6)


def test_the_standard_domain_by_its_long_name():
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("ReduceSum", ["h"], ["y"], keepdims=0)]
    given = forward(nodes, {"x": [3, 3]}, {"w": W})
    given.opset_import[0].domain = "ai.onnx"
    np.testing.assert_allclose(outputs_of(step_of(given), {"x": X}, {"w": W})["loss"], (X @ W).sum(), rtol=1e-4)


@pytest.mark.parametrize("how", ["crop", "ratio"])
def test_resizes_that_have_no_rule_are_refused_although_sizes_stay(how):
    options = {"coordinate_transformation_mode": "tf_crop_and_resize"}
    if how == "ratio":
        options = {"keep_aspect_ratio_policy": "not_larger"}
    nodes = [
        node("Mul", ["x", "w"], ["h"]), node("Resize", ["h", "roi", "", "sizes"], ["r"], mode="linear", **options),
        node("ReduceSum", ["r"], ["y"], keepdims=0),
    ]  # fmt: skip
    roi = np.array([0, 0, 0.25, 0.25, 1, 1, 0.75, 0.75], np.float32)
    weights = {"w": RNG.standard_normal((1, 1, 4, 4), np.float32), "roi": roi, "sizes": np.array([1, 1, 4, 4])}
    with pytest.raises(ConversionError, match="not supported"):
        step_of(forward(nodes, {"x": [1, 1, 4, 4]}, weights), check=False)


def test_a_slope_is_not_wider_than_its_operand():
    nodes = [
        node("MatMul", ["x", "w"], ["h"]), node("Expand", ["h", "wide"], ["e"]), node("PRelu", ["e", "slope"], ["p"]),
        node("Mul", ["p", "p"], ["q"]), node("ReduceSum", ["q"], ["y"], keepdims=0),
    ]  # fmt: skip
    slope, x = RNG.standard_normal((2, 4), np.float32), RNG.standard_normal((1, 3), np.float32)
    step = step_of(forward(nodes, {"x": [1, 3]}, {"w": W, "wide": np.array([2, 4]), "slope": slope}))
    h = x @ W
    wanted = np.square(np.where(h < 0, slope * h, h)).sum()
    np.testing.assert_allclose(outputs_of(step, {"x": x}, {"w": W})["loss"], wanted, rtol=1e-5)


@pytest.mark.parametrize("rows", [70000, "N"])
def test_means_in_half_precision_over_more_entries_than_it_counts(rows):
    nodes = [
        node("MatMul", ["x", "w"], ["h"]), node("Mul", ["h", "h"], ["q"]), node("ReduceMean", ["q", "first"], ["m"]),
        node("ReduceSum", ["m"], ["y"], keepdims=0),
    ]  # fmt: skip
    w = RNG.standard_normal((3, 2), np.float32).astype(np.float16)
    x = RNG.standard_normal((70000, 3), np.float32).astype(np.float16)
    given = forward(nodes, {"x": [rows, 3]}, {"w": w, "first": np.array([0])})
    for value in (*given.graph.input, *given.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    found = outputs_of(step_of(given, check=False), {"x": x}, {"w": w})["grad.w"]
    wide = x.astype(np.float64)
    wanted = 2 * wide.T @ (wide @ w.astype(np.float64)) / len(wide)
    np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=2e-2, atol=2e-2)
