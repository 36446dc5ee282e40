"""Sections of the step and prices of its ops: labels, structure, the roofline, and measured profiles."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_remat.errors import ModelError, UsageError
from onnx_remat.ir import graph, phases, shapes
from onnx_remat.memory.problem import BACKWARD, FORWARD, OPTIMIZER
from onnx_remat.ort.kernels import costs
from onnx_remat.ort.kernels.costs import PRESETS, flops, price, roofline
from onnx_remat.ort.kernels.cpu import CPU
from tests.support.graphs import SAMPLES, feeds_for, mlp, model_of

make = helper.make_node


def viewed(model, **dims):
    ir = graph.build(model)
    return ir, shapes.infer(ir, dims)


def phase_by_label(model, loss=None):
    ir, tensors = viewed(model)
    return dict(zip((op.label for op in ir.ops), phases.split(ir, tensors, loss), strict=True))


def relabelled(model, labels):
    for node in model.graph.node:
        if node.name in labels:
            node.metadata_props.add(key="phase", value=labels[node.name])
    return model


@pytest.mark.parametrize("loss", [None, "loss"])
def test_structure_splits_an_mlp(loss):
    found = phase_by_label(mlp(layers=3), loss)
    for label, phase in found.items():
        if label.startswith(("mm", "act")) or label in ("err", "sq", "mean"):
            assert phase == FORWARD, label
        elif label.startswith(("step", "update")):
            assert phase in ((OPTIMIZER,) if label.startswith("update") else (BACKWARD, OPTIMIZER)), label
        else:
            assert phase == BACKWARD, label


def test_an_op_of_another_domain_may_leave_its_first_output_out():
    nodes = [
        make("MatMul", ["x", "w"], ["h"], name="fwd"), make("ReduceSum", ["h"], ["loss"], name="sum", keepdims=0),
        make("Add", ["w", "loss"], ["", "kept"], name="add", domain="own"), make("Neg", ["kept"], ["y"], name="neg"),
    ]  # fmt: skip
    info = [helper.make_tensor_value_info("kept", TensorProto.FLOAT, [4, 4])]
    model = model_of(nodes, {"x": [8, 4], "w": [4, 4]}, {"loss": [], "y": [4, 4]}, (), info)
    model.opset_import.append(helper.make_opsetid("own", 1))
    assert phase_by_label(model)["add"] == BACKWARD


def test_structure_follows_updates_with_state_in_half_precision():
    nodes = [
        make("MatMul", ["x", "w"], ["h"], name="fwd"), make("ReduceSum", ["h"], ["loss"], name="sum", keepdims=0),
        make("Gemm", ["x", "h"], ["g"], name="grad", transA=1), make("Cast", ["m"], ["m32"], name="wide", to=1),
        make("Add", ["m32", "g"], ["m1"], name="state"), make("Cast", ["m1"], ["new.m"], name="narrow", to=10),
        make("Sub", ["w", "m1"], ["new.w"], name="update"),
    ]  # fmt: skip
    half = (TensorProto.FLOAT16, [4, 4])
    inputs, outputs = {"x": [8, 4], "w": [4, 4], "m": half}, {"loss": [], "new.m": half, "new.w": [4, 4]}
    found = phase_by_label(model_of(nodes, inputs, outputs))
    assert {found[name] for name in ("wide", "state", "narrow", "update")} == {OPTIMIZER}
    assert found["grad"] == BACKWARD


def test_structure_follows_updates_with_state():
    """Momentum: the state's update is optimizer, and so is what reads it."""
    nodes = [
        make("MatMul", ["x", "w"], ["h"], name="fwd"),
        make("ReduceSum", ["h"], ["loss"], name="sum", keepdims=0),
        make("Gemm", ["x", "h"], ["g"], name="grad", transA=1),
        make("Mul", ["m", "decay"], ["m1"], name="decay"),
        make("Add", ["m1", "g"], ["new.m"], name="state"),
        make("Mul", ["new.m", "decay"], ["step"], name="step"),
        make("Sub", ["w", "step"], ["new.w"], name="update"),
    ]
    shape = [4, 4]
    model = model_of(
        nodes, {"x": [8, 4], "w": shape, "m": shape}, {"loss": [], "new.m": shape, "new.w": shape},
        {"decay": np.float32(0.9)},
    )  # fmt: skip
    found = phase_by_label(model)
    assert [found[n] for n in ("fwd", "sum", "grad")] == [FORWARD, FORWARD, BACKWARD]
    assert [found[n] for n in ("decay", "state", "step", "update")] == [OPTIMIZER] * 4


def test_a_weight_with_a_default_is_updated_like_any_other():
    step = mlp(layers=3)
    step.graph.initializer.append(numpy_helper.from_array(np.zeros((64, 64), np.float32), "w1"))
    assert phase_by_label(step) == phase_by_label(mlp(layers=3))


@pytest.mark.parametrize("path", SAMPLES, ids=lambda p: p.stem)
def test_structure_agrees_with_the_labels_of_the_samples(path):
    """Forward by structure is forward by label."""
    model = onnx.load(path)
    labelled = phase_by_label(model)
    for node in model.graph.node:
        del node.metadata_props[:]
    by_structure = phase_by_label(model)
    differing = [label for label in labelled if (labelled[label] == FORWARD) != (by_structure[label] == FORWARD)]
    assert not differing
    assert set(by_structure.values()) <= {FORWARD, BACKWARD, OPTIMIZER}


def test_labels_are_believed_over_structure():
    labels = {"act0": "backward", "dw0": "forward", "dx1": "optimizer"}
    plain, found = phase_by_label(mlp(layers=2)), phase_by_label(relabelled(mlp(layers=2), labels))
    assert (found["act0"], found["dw0"], found["dx1"]) == (BACKWARD, FORWARD, OPTIMIZER)
    assert {k: v for k, v in found.items() if k not in labels} == {k: v for k, v in plain.items() if k not in labels}


def test_labels_that_mean_nothing_are_passed_over():
    assert phase_by_label(relabelled(mlp(layers=2), {"act0": "sideways"})) == phase_by_label(mlp(layers=2))


def test_a_fully_labelled_model_needs_no_loss():
    model = mlp(layers=2)
    relabelled(model, {node.name: "backward" for node in model.graph.node})
    model.graph.output.pop(0)  # the loss
    assert set(phase_by_label(model).values()) == {BACKWARD}


def test_the_only_scalar_output_is_the_loss():
    model = mlp(layers=2)
    for node in model.graph.node:
        node.output[:] = ["objective" if name == "loss" else name for name in node.output]
    model.graph.output[0].name = "objective"
    assert phase_by_label(model) == phase_by_label(mlp(layers=2))


def test_an_ambiguous_loss_is_refused_with_the_candidates():
    nodes = [
        make("ReduceSum", ["x"], ["first"], name="one", keepdims=0),
        make("ReduceMax", ["x"], ["second"], name="two", keepdims=1),
        make("Size", ["x"], ["count"], name="three"),
    ]
    outputs = {"first": [], "second": [1], "count": (TensorProto.INT64, [])}
    model = model_of(nodes, {"x": [4]}, outputs)
    with pytest.raises(
        ModelError, match=r"several scalar outputs could be the loss \(first, second\): name it with loss="
    ):
        phase_by_label(model)
    assert phase_by_label(model, "second") == {"one": BACKWARD, "two": FORWARD, "three": BACKWARD}


def test_where_no_output_can_be_a_loss_all_is_forward():
    model = model_of([make("Neg", ["x"], ["y"], name="one")], {"x": [4]}, {"y": [4]})
    assert phase_by_label(model) == {"one": FORWARD}


def test_scalar_outputs_that_nothing_follows_are_no_losses():
    nodes = [make("ReduceSum", ["x"], ["a"], name="one"), make("ReduceMax", ["x"], ["b"], name="two")]
    model = model_of(nodes, {"x": [4]}, {"a": [1], "b": [1]})
    assert phase_by_label(model) == {"one": FORWARD, "two": FORWARD}


def test_a_misspelt_loss_is_refused():
    with pytest.raises(UsageError, match="loss=: there is no value 'los'; did you mean 'loss'"):
        phase_by_label(mlp(layers=1), "los")


# --------------------------------------------------------------------------------------------- costs


def op_of(node, inputs, outputs, initializers=()):
    """The only op of a model, and its tensors."""
    ir, tensors = viewed(model_of([node], inputs, outputs, initializers))
    return ir.ops[0], tensors


ANALYTIC = {
    "MatMul": (make("MatMul", ["a", "b"], ["y"]), [[7, 5], [5, 3]], [7, 3], 2 * 7 * 5 * 3),
    "MatMul batched": (make("MatMul", ["a", "b"], ["y"]), [[2, 4, 7, 5], [5, 3]], [2, 4, 7, 3], 2 * 8 * 7 * 5 * 3),
    "MatMul vector": (make("MatMul", ["a", "b"], ["y"]), [[5], [5]], [], 2 * 5),
    "Gemm": (make("Gemm", ["a", "b", "c"], ["y"]), [[7, 5], [5, 3], [3]], [7, 3], 2 * 7 * 5 * 3),
    "Gemm flipped": (make("Gemm", ["a", "b"], ["y"], transA=1, transB=1), [[5, 7], [3, 5]], [7, 3], 2 * 7 * 5 * 3),
    "Conv": (
        make("Conv", ["a", "b"], ["y"], pads=[1, 1, 1, 1]), [[2, 6, 8, 8], [10, 6, 3, 3]], [2, 10, 8, 8],
        2 * 2 * 10 * 8 * 8 * 6 * 9,
    ),
    "Conv grouped": (
        make("Conv", ["a", "b"], ["y"], group=2, strides=[2, 2]), [[1, 6, 9, 9], [4, 3, 3, 3]], [1, 4, 4, 4],
        2 * 4 * 4 * 4 * 3 * 9,
    ),
    "ConvTranspose": (
        make("ConvTranspose", ["a", "b"], ["y"]), [[2, 6, 8, 8], [6, 10, 3, 3]], [2, 10, 10, 10],
        2 * (2 * 6 * 8 * 8) * 10 * 9,
    ),
    "Einsum": (
        make("Einsum", ["a", "b"], ["y"], equation="bij, bjk -> bik"), [[2, 7, 5], [2, 5, 3]], [2, 7, 3],
        2 * 2 * 7 * 5 * 3,
    ),
    "Einsum outer": (make("Einsum", ["a", "b"], ["y"], equation="i,j->ij"), [[7], [5]], [7, 5], 2 * 35),
    "Add": (make("Add", ["a", "b"], ["y"]), [[7, 5], [7, 5]], [7, 5], 2 * 35),
}  # fmt: skip


@pytest.mark.parametrize("name", ANALYTIC)
def test_operations_are_counted_analytically(name):
    node, inputs, output, expected = ANALYTIC[name]
    op, tensors = op_of(node, dict(zip("abc", inputs, strict=False)), {"y": output})
    assert flops(op, tensors) == pytest.approx(expected, rel=0.55 if name == "Add" else 0)


def test_names_of_operators_count_in_domains_that_mean_them():
    node, inputs, output, expected = ANALYTIC["Conv"]
    op, tensors = op_of(node, dict(zip("ab", inputs, strict=True)), {"y": output})
    found = {}
    for domain in ("ai.onnx", "com.microsoft.nchwc", "my.own"):
        moved = onnx.NodeProto()
        moved.CopyFrom(op.node)
        moved.domain = domain
        found[domain] = flops(dataclasses.replace(op, node=moved), tensors)
    assert found["ai.onnx"] == found["com.microsoft.nchwc"] == expected > found["my.own"]


@pytest.mark.parametrize("device", PRESETS)
def test_roofline_orders_ops(device):
    """At equal outputs: a product costs more than an Add, that more than what moves nothing."""
    square = {"a": [4096, 4096], "b": [4096, 4096]}
    nodes = {
        "MatMul": make("MatMul", ["a", "b"], ["y"]),
        "Tanh": make("Tanh", ["a"], ["y"]),
        "Add": make("Add", ["a", "b"], ["y"]),
        "Identity": make("Identity", ["a"], ["y"]),
    }
    sizes = {"y": [4096, 4096]}
    seconds = {n: roofline(*op_of(node, square, sizes), CPU, PRESETS[device]) for n, node in nodes.items()}
    assert seconds["MatMul"] > seconds["Add"] > seconds["Identity"] == PRESETS[device].overhead
    assert seconds["Tanh"] > seconds["Identity"]


def test_roofline_is_the_larger_of_two_slopes():
    device = costs.Device(flops=1e12, bandwidth=1e11, overhead=1e-6)
    op, tensors = op_of(make("Add", ["a", "b"], ["y"]), {"a": [1000, 1000], "b": [1000, 1000]}, {"y": [1000, 1000]})
    assert roofline(op, tensors, CPU, device) == pytest.approx(3 * 4e6 / 1e11 + 1e-6)  # two read, one written
    op, tensors = op_of(make("MatMul", ["a", "b"], ["y"]), {"a": [1000, 1000], "b": [1000, 1000]}, {"y": [1000, 1000]})
    assert roofline(op, tensors, CPU, device) == pytest.approx(2e9 / 1e12 + 1e-6)


def test_ops_that_read_what_they_write_are_not_charged_for_the_rest():
    """A Gather of 2 rows from a large table moves 2 rows."""
    gather = make("Gather", ["table", "rows"], ["y"])
    op, tensors = op_of(gather, {"table": [1 << 20, 8]}, {"y": [2, 8]}, {"rows": np.array([3, 5])})
    device = costs.Device(flops=1e30, bandwidth=1e9, overhead=0)
    assert roofline(op, tensors, CPU, device) == pytest.approx(2 * 64 / 1e9)


def test_every_op_of_every_sample_has_a_price():
    for path in SAMPLES:
        ir, tensors = viewed(onnx.load(path))
        for device in PRESETS:
            seconds = price(ir, tensors, CPU, device)
            assert len(seconds) == len(ir.ops)
            assert all(math.isfinite(s) and s > 0 for s in seconds)


def profile_of(model, folder, feeds):
    """A profile as users make one."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    for _ in range(3):
        session.run(None, feeds)
    return session.end_profiling()


def test_prices_come_from_a_profile(tmp_path):
    """Ops are looked up by type, input types and shapes; equal ones cost the same, figures are medians in seconds."""
    model = mlp(layers=2, batch=512, width=64)
    path = profile_of(model, tmp_path, feeds_for(model))
    ir, tensors = viewed(model)
    seconds = dict(zip((op.label for op in ir.ops), price(ir, tensors, CPU, path), strict=True))
    assert seconds["mm0"] == seconds["mm1"]
    assert seconds["mm0"] > 0
    durations = [
        event["dur"] * 1e-6
        for event in json.loads(Path(path).read_text())
        if event.get("cat") == "Node" and event["name"] in ("mm0_kernel_time", "mm1_kernel_time", "dx1_kernel_time")
        and {"float": [512, 64]} in event["args"]["input_type_shape"]
    ]  # fmt: skip
    assert seconds["mm0"] == pytest.approx(float(np.median(durations)))


def event(op_type, inputs, microseconds):
    return {
        "cat": "Node", "name": f"{op_type}_kernel_time", "dur": microseconds,
        "args": {"op_name": op_type, "input_type_shape": [{"float": shape} for shape in inputs]},
    }  # fmt: skip


def test_ops_a_profile_lacks_are_scaled_from_the_roofline(tmp_path):
    nodes = [make("MatMul", ["a", "b"], ["h"], name="mm"), make("Add", ["h", "b"], ["y"], name="add")]
    ir, tensors = viewed(model_of(nodes, {"a": [64, 64], "b": [64, 64]}, {"y": [64, 64]}))
    plain = price(ir, tensors, CPU)
    path = tmp_path / "p.json"
    path.write_text(json.dumps([event("MatMul", [[64, 64], [64, 64]], plain[0] * 7e6)] * 3 + [{"cat": "Session"}]))
    assert price(ir, tensors, CPU, str(path)) == pytest.approx([7 * s for s in plain])
    path.write_text(json.dumps([event("MatMul", [[64, 64], [64, 64]], dur) for dur in (100, 900, 300)]))
    assert price(ir, tensors, CPU, str(path))[0] == pytest.approx(300e-6)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "neither a preset .cpu, a100"),
        ("", "not a JSON profile"),
        ("{", "not a JSON profile"),
        ("[1, 2]", "not a JSON profile"),
        ('[{"cat": "Node", "name": "x_kernel_time"}]', "not a JSON profile"),
        ("[]", "no op of this model"),
        (json.dumps([event("MatMul", [[3, 3], [3, 3]], 5)]), "no op of this model"),
    ],
)
def test_profiles_that_are_none_are_refused(content, message, tmp_path):
    path = tmp_path / "p.json"
    if content is not None:
        path.write_text(content)
    ir, tensors = viewed(mlp(layers=1))
    with pytest.raises(UsageError, match=message):
        price(ir, tensors, CPU, str(path))


def test_a_reader_that_leaves_its_first_output_out_ends_a_path():
    """A GRU whose states alone are read: no update goes through it."""
    nodes = [
        make("Add", ["x", "p"], ["h"], name="add"),
        make("GRU", ["h", "w", "r"], ["", "last"], name="gru", hidden_size=4),
        make("ReduceSum", ["x"], ["loss"], name="sum", keepdims=0),
    ]
    shapes_of = {"x": [2, 3, 4], "p": [2, 3, 4], "w": [1, 12, 4], "r": [1, 12, 4]}
    found = phase_by_label(model_of(nodes, shapes_of, {"loss": [], "last": [1, 3, 4]}))
    assert found.keys() == {"add", "gru", "sum"}
