"""Forward files as others write them: sizes with names, old opsets, 16 bits, equal node names, settings as weights."""

from __future__ import annotations

import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_remat.converters.autodiff import CrossEntropy, add_backward
from onnx_remat.converters.optimizers import SGD, Adam, AdamW

from onnx_remat.errors import ConversionError, ModelError, UsageError
from onnx_remat.ort import runtime

pytest.importorskip("onnxruntime")

node = helper.make_node
RNG = np.random.default_rng(0)


def file(
    nodes: list[onnx.NodeProto], inputs: dict[str, Any], weights: dict[str, np.ndarray], opset: int = 20,
    kind: int = TensorProto.FLOAT, outputs: tuple[str, ...] = ("loss",),
) -> onnx.ModelProto:  # fmt: skip
    """The nodes and a mean of `y` as loss."""
    mean = node("ReduceMean", ["y"], ["loss"], keepdims=0)
    graph = helper.make_graph(
        [*nodes, mean], "forward",
        [helper.make_tensor_value_info(name, kind, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, kind, None) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=min(opset, 10) - 2)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


def test_a_size_two_below_another_is_not_called_after_it() -> None:
    nodes = [node("Conv", ["x", "w"], ["c"]), node("Mul", ["c", "c"], ["y"])]
    x, w = normal(6, 1, 8, 8), normal(1, 1, 3, 3)
    model = file(nodes, {"x": ["batch", 1, "height", "width"]}, {"w": w})
    step = add_backward(model, example_inputs={"x": x})
    windows = np.lib.stride_tricks.sliding_window_view(x[:, 0], (3, 3), (1, 2))
    c = np.einsum("nijkl,kl->nij", windows, w[0, 0])
    wanted = 2 * np.einsum("nijkl,nij->kl", windows, c) / c.size
    np.testing.assert_allclose(runtime.outputs(step, {"x": x, "w": w})["grad.w"][0, 0], wanted, rtol=1e-4)


def test_nodes_of_the_standard_domain_under_its_other_name() -> None:
    model = file([node("Mul", ["x", "w"], ["y"], domain="ai.onnx")], {"x": [2, 3]}, {"w": normal(2, 3)})
    x = normal(2, 3)
    made = runtime.outputs(add_backward(model), {"x": x, "w": normal(2, 3)})
    np.testing.assert_allclose(made["grad.w"], x / 6, rtol=1e-6)


def test_nodes_with_equal_names_and_no_ratio_in_training() -> None:
    nodes = [
        node("Mul", ["x", "w"], ["a"], "same"), node("Dropout", ["a"], ["b"], "same", seed=1),
        node("Dropout", ["b"], ["y"], "same", seed=2),
    ]  # fmt: skip
    step = add_backward(file(nodes, {"x": [40, 50]}, {"w": normal(40, 50)}), training=True)
    x = normal(40, 50)
    grad = runtime.outputs(step, {"x": x, "w": normal(40, 50)})["grad.w"]
    kept = grad != 0  # each half of the entries is scaled by two, twice
    np.testing.assert_allclose(grad[kept], (4 * x / x.size)[kept], rtol=1e-5)
    assert 0.2 < kept.mean() < 0.3


def test_a_frozen_recurrence_needs_no_known_length() -> None:
    nodes = [
        node("LSTM", ["x", "w", "r"], ["h", "last", ""], hidden_size=4), node("MatMul", ["last", "head"], ["y"]),
    ]  # fmt: skip
    weights = {"w": normal(1, 16, 3), "r": normal(1, 16, 4), "head": normal(4, 2)}
    model = file(nodes, {"x": ["length", 2, 3]}, weights)
    step = add_backward(model, frozen=["w", "r"])
    assert [value.name for value in step.graph.output] == ["loss", "grad.head"]
    x = normal(5, 2, 3)
    last = runtime.outputs(file(nodes, {"x": ["length", 2, 3]}, weights, outputs=("last",)), {"x": x})["last"]
    made = runtime.outputs(step, {"x": x, "head": weights["head"]})
    np.testing.assert_allclose(made["grad.head"], last[0].T @ np.full((2, 2), 0.25), rtol=1e-4, atol=1e-6)
    with pytest.raises(ConversionError, match="length must be known"):
        add_backward(model)


@pytest.mark.parametrize("axis", [None, 0, 2, -1])
def test_hardmax_before_opset_13_is_of_flat_rows(axis: int | None) -> None:
    stated = {} if axis is None else {"axis": axis}
    nodes = [node("Mul", ["x", "w"], ["a"]), node("Hardmax", ["a"], ["h"], **stated), node("Mul", ["a", "h"], ["y"])]
    weights = {"w": normal(2, 3, 4)}
    model = file(nodes, {"x": [2, 3, 4]}, weights, opset=11)
    x = normal(2, 3, 4)
    wanted = runtime.outputs(model, {"x": x})["loss"]
    np.testing.assert_allclose(runtime.outputs(add_backward(model), {"x": x, **weights})["loss"], wanted, rtol=1e-6)


HALF = TensorProto.FLOAT16


@pytest.mark.parametrize(
    "nodes",
    [
        [node("Mul", ["x", "w"], ["y"])],
        [node("Mul", ["x", "w"], ["a"]), node("Clip", ["a"], ["y"], min=-0.5, max=0.3)],
        [node("Mul", ["x", "w"], ["a"]), node("Pad", ["a"], ["y"], pads=[0, 1, 0, 1], value=1.0)],
    ],
    ids=["mean", "Clip", "Pad"],
)
def test_constants_of_16_bits_are_rounded_and_not_wrong(nodes: list[onnx.NodeProto]) -> None:
    model = file(nodes, {"x": [2, 3]}, {"w": normal(2, 3).astype(np.float16)}, opset=10, kind=HALF)
    assert add_backward(model)


@pytest.mark.parametrize("op", ["RMSNormalization", "GroupNormalization", "InstanceNormalization"])
def test_squares_in_half_precision_do_not_overflow(op: str) -> None:
    """Entries of about 1,000 have squares above the largest number of float16.

    ONNX's reference rounds each result; ONNX Runtime's CPU computes runs of ops in float32.
    """
    groups = {"num_groups": 8} if op == "GroupNormalization" else {}
    bias = [] if op == "RMSNormalization" else ["b"]
    shape = [4, 64, 4] if op in ("GroupNormalization", "InstanceNormalization") else [4, 64]
    nodes = [
        node("Mul", ["x", "w"], ["a"]),
        node(op, ["a", "s", *bias], ["n"], **groups),
        node("Mul", ["n", "t"], ["y"]),
    ]
    weights = {"w": normal(*shape), "s": normal(64), **({"b": normal(64)} if bias else {})}
    feeds = {"x": 1000 * normal(*shape), "t": 64 * normal(*shape)}
    both = []
    for dtype, kind in ((np.float16, HALF), (np.float32, TensorProto.FLOAT)):
        cast = {name: value.astype(np.float16).astype(dtype) for name, value in (weights | feeds).items()}
        model = file(nodes, {"x": shape, "t": shape}, {n: cast[n] for n in weights}, opset=23, kind=kind)
        step = add_backward(model, check=False)
        both.append(ReferenceEvaluator(step).run(["grad.w", "grad.s"], cast))
    for half, full in zip(*both, strict=True):
        np.testing.assert_allclose(half.astype(np.float32), full, rtol=2e-2, atol=2e-2 * abs(full).max())


@pytest.mark.parametrize("training", [False, True])
def test_batch_normalization_of_mixed_types(training: bool) -> None:
    nodes = [node("Mul", ["x", "w"], ["a"]), node("BatchNormalization", ["a", "s", "b", "m", "v"], ["n"])]
    nodes.append(node("Mul", ["n", "n"], ["y"]))
    weights = {"w": normal(4, 3, 5).astype(np.float16), "s": np.ones(3, np.float32), "b": np.ones(3, np.float32)}
    statistics = {"m": np.zeros(3, np.float32), "v": np.ones(3, np.float32)}
    step = add_backward(file(nodes, {"x": [4, 3, 5]}, weights | statistics, kind=HALF), training=training)
    onnx.checker.check_model(step, full_check=True)
    kinds = {value.name: value.type.tensor_type.elem_type for value in step.graph.output}
    assert kinds["grad.w"] == HALF
    assert kinds["grad.s"] == TensorProto.FLOAT


def test_outputs_to_keep() -> None:
    model = file([node("Mul", ["x", "w"], ["y"])], {"x": [2, 3]}, {"w": normal(2, 3)}, outputs=("loss", "y"))
    kept = add_backward(model, keep=["loss", "y"])
    assert [value.name for value in kept.graph.output] == ["loss", "grad.w", "y"]
    with pytest.raises(UsageError, match="keep: the model has no output 'z'"):
        add_backward(model, keep=["z"])
    assert [value.name for value in add_backward(model, wrt="w", keep="y").graph.output] == ["loss", "grad.w", "y"]
    with pytest.raises(UsageError, match="all parameters are frozen"):
        add_backward(model, frozen="w")
    with pytest.raises(UsageError, match="wrt: no input or initializer is called 'wy'"):
        add_backward(model, wrt="wy")
    other = file(
        [node("Mul", ["x", "w"], ["y"]), node("Neg", ["y"], ["grad.w"])], {"x": [2, 3]}, {"w": normal(2, 3)},
        outputs=("loss", "grad.w"),
    )  # fmt: skip
    with pytest.raises(ConversionError, match=r"keep: an output of the step is called 'grad.w'"):
        add_backward(other, keep=["grad.w"])


def test_a_file_that_is_no_model_is_no_fault_of_the_conversion(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('this is no model')\n" * 9)
    with pytest.raises(ModelError, match=r"script.py is not an ONNX model, or is truncated"):
        add_backward(tmp_path / "script.py")


@pytest.mark.parametrize("rate", [math.nan, math.inf, -0.1])
def test_learning_rates_are_finite_numbers_of_at_least_zero(rate: float) -> None:
    for optimizer in (SGD, Adam, AdamW):
        with pytest.raises(UsageError, match="a learning rate is a finite number of at least 0"):
            optimizer(lr=rate)


@pytest.mark.parametrize("end", [32_768, 300_000])
def test_a_slice_with_a_late_end_is_not_as_long_as_every_batch(end: int) -> None:
    slice_ = node("Slice", ["x", "begin", "end"], ["a"])
    ends = {"begin": np.array([0]), "end": np.array([end])}
    model = file([slice_, node("Mul", ["a", "w"], ["y"])], {"x": ["n"]}, {"w": normal(1), **ends})
    made = runtime.outputs(add_backward(model, wrt=["w"]), {"x": np.ones(end + 5000, np.float32), "w": normal(1)})
    np.testing.assert_allclose(made["grad.w"], [1], rtol=1e-3)


@pytest.mark.parametrize("ignored", [0, -100])
def test_an_ignored_target_where_the_first_class_is_impossible(ignored: int) -> None:
    """As in models that mask the logit of padding."""
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Add", ["h", "mask"], ["y"])]
    weights = {"w": normal(3, 5), "mask": np.array([-np.inf, 0, 0, 0, 0], np.float32)}
    model = file(nodes, {"x": [4, 3]}, weights, outputs=("y",))
    del model.graph.node[-1]
    target = np.array([1, ignored, 2, 4])
    feeds = {"x": normal(4, 3), "w": weights["w"]}
    step = add_backward(model, CrossEntropy(ignore_index=ignored), ["w"], example_inputs={"target": target})
    made = runtime.outputs(step, {**feeds, "target": target})
    counts = target != ignored
    logits = (feeds["x"] @ feeds["w"])[counts, 1:]
    chosen = logits[np.arange(3), target[counts] - 1]
    np.testing.assert_allclose(made["loss"], (np.log(np.exp(logits).sum(1)) - chosen).mean(), rtol=1e-5)
    assert np.isfinite(made["grad.w"]).all()


@pytest.mark.parametrize(
    "read",
    [
        node("Gather", ["w", "at"], ["y"]),
        node("GatherND", ["w", "at"], ["y"]),
        node("GatherElements", ["w", "at"], ["y"]),
        node("Tile", ["w", "at"], ["y"]),
    ],
    ids=["Gather", "GatherND", "GatherElements", "Tile"],
)
def test_sums_at_indices_run_in_half_precision(read: onnx.NodeProto) -> None:
    """ONNX Runtime's CPU scatters numbers of 16 bits, but does not add them."""
    at = np.array([3, 1]) if read.op_type == "Tile" else np.zeros((5, 1), np.int64)
    nodes = [read, node("Mul", ["y", "x"], ["z"])]
    model = file(nodes, {"x": [1]}, {"w": normal(4, 3).astype(np.float16), "at": at}, kind=HALF)
    model.graph.node[-1].input[0] = "z"
    made = runtime.outputs(
        add_backward(model, wrt=["w"]), {"x": np.ones(1, np.float16), "w": np.zeros((4, 3), np.float16)}
    )
    assert float(made["grad.w"].astype(np.float32).sum()) == pytest.approx(1, rel=1e-2)


def test_cross_entropy_runs_in_half_precision() -> None:
    w = normal(3, 5).astype(np.float16)
    model = file([node("MatMul", ["x", "w"], ["y"])], {"x": [4, 3]}, {"w": w}, kind=HALF, outputs=("y",))
    del model.graph.node[-1]
    feeds = {"x": normal(4, 3).astype(np.float16), "w": w, "target": np.array([0, 1, 2, 4])}
    made = runtime.outputs(add_backward(model, "cross_entropy"), feeds)
    x, logits = (value.astype(np.float32) for value in (feeds["x"], feeds["x"] @ w))
    share = np.exp(logits) / np.exp(logits).sum(1, keepdims=True) - np.eye(5)[feeds["target"]]
    np.testing.assert_allclose(made["grad.w"].astype(np.float32), x.T @ share / 4, rtol=1e-2, atol=5e-3)


def test_a_frozen_name_with_brackets_is_that_name() -> None:
    """As a pattern, w[0] is w0."""
    nodes = [node("Mul", ["x", "w[0]"], ["a"]), node("Mul", ["a", "w0"], ["y"])]
    model = file(nodes, {"x": [2, 3]}, {"w[0]": normal(2, 3), "w0": normal(2, 3)})
    step = add_backward(model, frozen=["w[0]"])
    assert [value.name for value in step.graph.output] == ["loss", "grad.w0"]


def test_a_sparse_initializer_is_refused_by_name() -> None:
    model = file([node("Mul", ["x", "w"], ["a"]), node("Mul", ["a", "k"], ["y"])], {"x": [3]}, {"w": normal(3)})
    entries, where = (helper.make_tensor(name, kind, [1], [1]) for name, kind in (("k", 1), ("", TensorProto.INT64)))
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(entries, where, [3]))
    with pytest.raises(ConversionError, match="initializer 'k' is sparse: store it as a dense tensor"):
        add_backward(model)


def test_training_mode_refuses_a_dropout_in_a_body() -> None:
    dropout = helper.make_graph(
        [node("Dropout", ["a"], ["dropped"])], "then", [], [helper.make_tensor_value_info("dropped", 1, None)]
    )
    same = helper.make_graph(
        [node("Identity", ["a"], ["same"])], "else", [], [helper.make_tensor_value_info("same", 1, None)]
    )
    choice = node("If", ["train"], ["b"], then_branch=dropout, else_branch=same)
    nodes = [node("Mul", ["x", "x"], ["a"]), choice, node("Mul", ["b", "w"], ["y"])]
    model = file(nodes, {"x": [3]}, {"w": normal(3), "train": np.array(True), "ratio": np.float32(0.5)})
    with pytest.raises(ConversionError, match=r"node 'dropped' \(Dropout\) is in a body"):
        add_backward(model, training=True, check=False)
    model.graph.node[1].attribute[1].g.node[0].input.extend(["ratio", "train"])
    assert add_backward(model, training=True, check=False)  # it trains already


NORMALIZED = {"s": np.ones(3, np.float32), "b": np.ones(3, np.float32), "m": np.zeros(3, np.float32),
              "v": np.ones(3, np.float32)}  # fmt: skip


def normalize(*outputs: str) -> onnx.NodeProto:
    return node("BatchNormalization", ["a", "s", "b", "m", "v"], list(outputs), training_mode=1)


def test_equal_normalizations_each_update_the_statistics() -> None:
    nodes = [
        node("Mul", ["x", "w"], ["a"]),
        normalize("p", "", ""),
        normalize("q", "", ""),
        node("Add", ["p", "q"], ["c"]),
        node("Mul", ["c", "t"], ["y"]),
    ]
    step = add_backward(file(nodes, {"x": [4, 3, 5], "t": [4, 3, 5]}, NORMALIZED | {"w": normal(4, 3, 5)}), wrt=["w"])
    ones = np.ones((4, 3, 5), np.float32)
    made = runtime.outputs(step, {"x": ones, "w": ones, "t": ones, "m": NORMALIZED["m"], "v": NORMALIZED["v"]})
    np.testing.assert_allclose(made["new.m"], 0.9 * 0.1 + 0.1, rtol=1e-5)


def test_new_statistics_are_outputs_to_keep() -> None:
    nodes = [node("Mul", ["x", "w"], ["a"]), normalize("y", "mean", "")]
    model = file(nodes, {"x": [4, 3, 5]}, NORMALIZED | {"w": normal(4, 3, 5)}, outputs=("loss", "mean"))
    step = add_backward(model, wrt=["w"], keep=["mean"], check=False)
    feeds = {"x": normal(4, 3, 5), "w": normal(4, 3, 5), "m": NORMALIZED["m"], "v": NORMALIZED["v"]}
    made = runtime.outputs(step, feeds)
    assert list(made) == ["loss", "grad.w", "new.m", "new.v", "mean"]
    np.testing.assert_array_equal(made["mean"], made["new.m"])


def test_the_slope_of_a_gelu_of_large_numbers_in_half_precision() -> None:
    """ONNX's reference rounds each result, see above."""
    nodes = [
        node("Mul", ["x", "w"], ["a"]),
        node("Gelu", ["a"], ["g"], approximate="tanh"),
        node("Mul", ["g", "t"], ["y"]),
    ]
    model = file(nodes, {"x": [4], "t": [4]}, {"w": np.ones(4, np.float16)}, kind=HALF)
    feeds = {"x": np.array([1, 107, -300, 1000], np.float16), "t": 4 * np.ones(4, np.float16)}
    (made,) = ReferenceEvaluator(add_backward(model, check=False)).run(
        ["grad.w"], feeds | {"w": np.ones(4, np.float16)}
    )
    np.testing.assert_allclose(made, [1.083, 107, 0, 1000], rtol=2e-3)


def test_a_constant_with_the_name_that_a_simpler_one_would_get() -> None:
    fill = node("ConstantOfShape", ["size"], ["c"], value=helper.make_tensor("value", 1, [1], [2.0]))
    products = [node("Mul", ["x", "w"], ["a"]), node("Mul", ["a", "c"], ["b"]), node("Mul", ["b", "c.fill"], ["y"])]
    nodes = [node("Shape", ["x"], ["size"]), fill, *products]
    model = file(nodes, {"x": ["n", 3]}, {"w": normal(3), "c.fill": np.asarray(5, np.float32)})
    ones = {"x": np.ones((2, 3), np.float32), "w": np.ones(3, np.float32)}
    assert runtime.outputs(add_backward(model, wrt=["w"]), ones)["loss"] == pytest.approx(10)


def test_the_check_computes_constants_of_a_body_in_float64_too() -> None:
    def branch(nodes: list[onnx.NodeProto]) -> onnx.GraphProto:
        return helper.make_graph(nodes, "branch", [], [helper.make_tensor_value_info(nodes[-1].output[0], 1, [3])])

    then = branch([node("Constant", [], ["half"], value_float=0.5), node("Mul", ["a", "half"], ["h"])])
    choice = node("If", ["some"], ["c"], then_branch=then, else_branch=branch([node("Exp", ["a"], ["e"])]))
    nodes = [node("Abs", ["x"], ["a"]), choice, node("Mul", ["c", "w"], ["y"])]
    model = file(nodes, {"x": [3]}, {"w": normal(3)})
    model.graph.input.append(helper.make_tensor_value_info("some", TensorProto.BOOL, []))
    assert add_backward(model, example_inputs={"some": np.array(True)})


def test_an_optimizer_with_state_of_an_open_size_is_refused_by_name() -> None:
    w = normal(3)
    model = file([node("Mul", ["x", "w"], ["y"])], {"x": ["n", 3]}, {"w": w})
    with pytest.raises(UsageError, match="parameter 'x' has an open size"):
        add_backward(model, wrt=["x"], optimizer=SGD(0.1, momentum=0.9), check=False)
    x = normal(2, 3)
    made = runtime.outputs(add_backward(model, wrt=["x"], optimizer=SGD(0.1)), {"x": x})
    np.testing.assert_allclose(made["new.x"], x - 0.1 * w / 6, rtol=1e-5)


def test_the_check_refuses_a_sequence_by_name() -> None:
    model = file([node("SequenceAt", ["s", "first"], ["x"]), node("Mul", ["x", "w"], ["y"])], {}, {"w": normal(3)})
    model.graph.initializer.append(numpy_helper.from_array(np.array(0), "first"))
    model.graph.input.append(helper.make_tensor_sequence_value_info("s", 1, [3]))
    with pytest.raises(ConversionError, match="the check makes tensors, and input 's' is none"):
        add_backward(model, wrt=["w"])


@pytest.mark.parametrize(
    ("length", "ends", "why"),
    [
        (0, None, "its sequences are empty"),
        (3, [3, 2], "sequences of different lengths are not supported"),
        (3, [3, 3], ""),
    ],
)
def test_lengths_of_a_recurrence(length: int, ends: list[int] | None, why: str) -> None:
    weights = {"w": normal(1, 16, 3), "r": normal(1, 16, 4)}
    given = ["x", "w", "r"]
    if ends is not None:
        weights["ends"] = np.array(ends, np.int32)
        given += ["", "ends"]
    recurrence = node("LSTM", given, ["", "", "y"], hidden_size=4)
    model = file([recurrence], {"x": [length, 2, 3]}, weights)
    if why:
        with pytest.raises(ConversionError, match=why):
            add_backward(model, wrt=["w"])
    else:
        assert add_backward(model, wrt=["w", "r"])


def test_a_function_of_another_opset_is_refused_for_that() -> None:
    nodes = [node("Mul", ["a", "b"], ["h"]), node("ReduceMax", ["h"], ["z"], axes=[0])]
    function = helper.make_function("local", "Largest", ["a", "b"], ["z"], nodes, [helper.make_opsetid("", 17)])
    model = file([node("Largest", ["x", "w"], ["y"], domain="local")], {"x": [2, 3]}, {"w": normal(3)})
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("local", 1))
    with pytest.raises(ConversionError, match=r"function local.Largest \(node 'y'\) is of another opset"):
        add_backward(model)


def test_equal_outputs_to_keep_have_phases() -> None:
    nodes = [node("Mul", ["x", "w"], ["y"]), node("Relu", ["y"], ["p"]), node("Relu", ["y"], ["q"])]
    step = add_backward(file(nodes, {"x": [3]}, {"w": normal(3)}, outputs=("loss", "p", "q")), keep=["p", "q"])
    phases = {made: p.value for each in step.graph.node for p in each.metadata_props for made in each.output}
    assert phases["p"] == phases["q"] == "forward"


def test_only_small_integers_are_taken_for_ends_of_slices() -> None:
    table = np.zeros((1 << 12, 1 << 10), np.int8)
    nodes = [
        node("Gather", ["table", "at"], ["rows"]), node("CastLike", ["rows", "w"], ["a"]),
        node("Slice", ["x", "begin", "end"], ["b"]), node("MatMul", ["a", "w"], ["c"]), node("Add", ["b", "c"], ["y"]),
    ]  # fmt: skip
    ends = {"begin": np.array([0]), "end": np.array([9])}
    model = file(nodes, {"x": ["n", 2]}, {"table": table, "at": np.array([3]), "w": normal(1 << 10, 2), **ends})
    tracemalloc.start()
    add_backward(model, wrt=["w"], check=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * table.nbytes


@pytest.mark.parametrize(
    ("shape", "body", "settings"),
    [
        ("2, 3, 5, 4", "y = RotaryEmbedding(h, a, b, p)", {"a": normal(8, 2), "b": normal(8, 2)}),
        ("2, 3, 5, 4", "c = Gather(a, p) s = Gather(b, p) y = RotaryEmbedding(h, c, s)",
         {"a": normal(8, 2), "b": normal(8, 2)}),
        ("2, 3, 5", "y = SoftmaxCrossEntropyLoss(h, p, a)", {"a": np.array([1, 2, 3], np.float32)}),
        ("2, 3, 5", "l = LogSoftmax <axis = 1> (h) y = NegativeLogLikelihoodLoss(l, p, a)",
         {"a": np.array([1, 2, 3], np.float32)}),
        ("5, 4", "q = QuantizeLinear(x, a) d = DequantizeLinear(q, a) y = Mul(d, h)", {"a": normal(1)}),
        ("5, 4", "d = DequantizeLinear <axis = 0> (b, a) y = MatMul(h, d)",
         {"a": normal(4), "b": np.eye(4, dtype=np.int8)}),
        ("5, 4", "y = Mul(h, a)", {"a": np.tril(np.ones((5, 4), np.float32))}),
        ("3, 4, 2, 2", "g = GridSample(x, a) y = Mul(g, w)", {"a": normal(3, 2, 2, 2)}),
        ("5, 2, 4", "y, last = GRU <hidden_size = 4> (h, b, c, , , a)",
         {"a": normal(1, 2, 4), "b": normal(1, 12, 4), "c": normal(1, 12, 4)}),
    ],
    ids=["tables", "gathered tables", "class weights", "class weights of logs", "scale", "quantized weights", "mask",
         "grid", "first state"],
)  # fmt: skip
def test_settings_of_ops_are_no_parameters(shape: str, body: str, settings: dict[str, np.ndarray]) -> None:
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 23]>
        forward (float[{shape}] x, int64[2, 5] p) => (float loss)
        {{ h = Mul(x, w) {body} loss = ReduceMean <keepdims = 0> (y) }}""")
    weights = {"w": normal(*map(int, shape.split(",")))} | settings
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    made = [value.name for value in add_backward(model).graph.output]
    assert "grad.w" in made
    assert "grad.a" not in made


def test_a_setting_among_the_parameters_is_named() -> None:
    nodes = [node("Mul", ["x", "w"], ["h"]), node("SoftmaxCrossEntropyLoss", ["h", "t", "share"], ["y"])]
    model = file(nodes, {"x": [2, 3]}, {"w": normal(2, 3), "share": normal(3), "t": np.array([0, 2])})
    with pytest.raises(
        ConversionError, match=r"input 2 \('share'\) depends on a parameter, .*: freeze it with frozen="
    ):
        add_backward(model, wrt=["w", "share"])
