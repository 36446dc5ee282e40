"""Operators that a provider has no kernel for: nodes of their definitions, as ONNX Runtime makes them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.reference
import pytest
from onnx import parser

import onnx_remat
from onnx_remat.errors import ModelError
from onnx_remat.ir.expand import do_expand, expand
from onnx_remat.ort.executed import as_executed
from onnx_remat.ort.kernels.cpu import CPU
from onnx_remat.ort.prepare import Preparation

MODEL = """<ir_version: 9, opset_import: ["" : 20]>
    g (float[64, 3, 32] x, int64[64, 32] labels) => (float loss, float[64, 3, 32] other) {
        [first] y = HardSwish(x)
        [apart] a = Tanh(x)
        [second] w = Mish(y)
        [third] v = HardSwish(a)
        [both] u = Mul(w, v)
        [loss] loss = SoftmaxCrossEntropyLoss <reduction = "mean"> (u, labels)
        [last] other = Sub(y, v)
    }"""
MISSING = {("", name) for name in ("HardSwish", "Mish", "SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")}


def model():
    made = parser.parse_model(MODEL)
    for node in made.graph.node:
        node.metadata_props.add(key="phase", value=f"of {node.name}")
    return made


def test_nodes_are_replaced_by_what_defines_them():
    before = model()
    after, new = expand(before, MISSING)
    onnx.checker.check_model(after, full_check=True)
    kinds = {node.op_type for node in after.graph.node}
    assert not kinds & {op for _, op in MISSING}
    assert {"y", "w", "v", "loss"} <= new and not {"a", "u", "other"} & new
    names = [node.name for node in after.graph.node]
    assert len(set(names)) == len(names) and all(names)
    for node in after.graph.node:
        assert [p.value for p in node.metadata_props] == [f"of {node.name.partition('/')[0]}"]
    assert before == model()  # what was given stays as it was


def test_a_model_without_them_is_returned_as_it_is():
    given = model()
    assert expand(given, {("", "Swish")}) == (given, frozenset())


def test_bodies_in_definitions_read_the_renamed_values():
    runtime = pytest.importorskip("onnx_remat.ort.runtime")
    given = parser.parse_model("""<ir_version: 9, opset_import: ["" : 20]>
        g (float[2, 2, 3] theta, float[2, 3, 4] other) => (float[2, 5, 6, 2] y, float[2, 2, 3, 4, 3] z)
        <int64[4] flat = {2, 3, 5, 6}, int64[5] solid = {2, 3, 2, 3, 4}> {
            [first] y = AffineGrid <align_corners = 1> (theta, flat)
            [second] z = AffineGrid <align_corners = 0> (other, solid)
        }""")
    after, _ = expand(given, {("", "AffineGrid")})
    onnx.checker.check_model(after, full_check=True)
    rng = np.random.default_rng(0)
    feeds = {v: rng.standard_normal(s).astype("f") for v, s in {"theta": (2, 2, 3), "other": (2, 3, 4)}.items()}
    made = runtime.outputs(after, feeds)
    for name, wanted in runtime.outputs(given, feeds).items():
        np.testing.assert_allclose(made[name], wanted, atol=1e-5)


def test_what_has_no_known_type_is_refused_by_name():
    given = model()
    given.graph.node.insert(0, onnx.helper.make_node("Secret", ["x"], ["s"], domain="com.example"))
    given.opset_import.add(domain="com.example", version=1)
    given.graph.node[1].input[0] = "s"
    given.graph.node[1].name = ""
    label = given.graph.node[1].output[0]
    with pytest.raises(ModelError, match=rf"node '{label}' \(HardSwish\) .* its input 's' .*: add value_info for it"):
        expand(given, MISSING)


@pytest.mark.parametrize(
    "text",
    [
        "h = com.microsoft.Gelu (x)",
        "g = com.microsoft.FusedMatMul <transB = 1> (x, w)  h = com.microsoft.BiasGelu (g, b)",
    ],
)
def test_a_node_behind_an_op_of_onnxruntimes_is_replaced(text):
    given = parser.parse_model(f"""<ir_version: 9, opset_import: ["" : 20, "com.microsoft" : 1]>
        g (float[4, 5] x, float[5, 5] w, float[5] b, int64[4] t) => (float loss) {{
            {text}  loss = SoftmaxCrossEntropyLoss (h, t)
        }}""")
    after, _ = expand(given, {("", "SoftmaxCrossEntropyLoss")})
    assert "LogSoftmax" in [node.op_type for node in after.graph.node]


def test_the_original_runs_in_the_order_that_is_emulated(tmp_path):
    pytest.importorskip("onnxruntime")
    from onnx_remat.measure import processes

    onnx.save(model(), tmp_path / "a.onnx")
    seen = processes.measure(tmp_path / "a.onnx", "disable", trace=True).executed
    emulated = as_executed(model(), None, "disable", Preparation(CPU))
    ops = [emulated.compiled.graph.ops[i] for i in emulated.order.order]
    assert len(seen) == len(ops)
    for name, op in zip(seen, ops, strict=True):
        assert name.startswith(op.node.op_type) if op.expanded else name == op.label


@pytest.mark.slow
def test_a_result_keeps_its_order_and_its_bits(tmp_path):
    pytest.importorskip("onnxruntime")
    from onnx_remat.measure import processes, verify
    from tests.support.graphs import mlp

    step = mlp(layers=6, batch=2048, width=32)
    step.opset_import[0].version = 20
    for node in [n for n in step.graph.node if n.op_type == "Tanh"]:
        node.op_type = "HardSwish"
    onnx.save(step, tmp_path / "a.onnx")
    result = onnx_remat.rewrite_model(step, "75%", run_by="session", effort=0.2)
    assert result.report.recomputed
    onnx.save(result.model, tmp_path / "b.onnx")
    emulated = as_executed(result.model, None, "disable", Preparation(CPU))
    ops = [emulated.compiled.graph.ops[i] for i in emulated.order.order]
    assert not any(op.expanded for op in ops)
    assert list(processes.measure(tmp_path / "b.onnx", "disable", trace=True).executed) == [op.label for op in ops]
    assert verify.bitwise(tmp_path / "a.onnx", tmp_path / "b.onnx") == "bitwise equal"
    assert processes.measure(tmp_path / "b.onnx", "disable").peak_bytes <= result.report.budget + processes.RESOLUTION


def test_what_the_inliner_cannot_do_is_said_in_plain_words(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("/onnx/common/ir.h:12: get: Assertion `it != end` failed.")

    monkeypatch.setattr("onnx.inliner.inline_selected_functions", fails)
    given = model()
    with pytest.raises(
        ModelError, match=r"node 'first' \(HardSwish\) cannot be replaced .*: ONNX's inliner fails on it"
    ):
        do_expand(given.SerializeToString(), [0], [["", "HardSwish"]])


def test_what_an_absent_input_means_is_left_to_the_definition():
    given = parser.parse_model("""<ir_version: 9, opset_import: ["" : 20]>
        g (float[4] x, float high) => (float[4] y) { y = Clip(x, , high) }""")
    after, _ = expand(given, {("", "Clip")})
    onnx.checker.check_model(after, full_check=True)
    assert "Clip" not in {node.op_type for node in after.graph.node}
    (made,) = onnx.reference.ReferenceEvaluator(after).run(None, {"x": np.arange(4, dtype="f"), "high": np.float32(2)})
    assert made.tolist() == [0, 1, 2, 2]


@pytest.mark.skipif(not onnx.defs.has("LinearAttention"), reason="this onnx knows no op whose definition has a Scan")
def test_a_definition_with_a_body_in_which_ops_are_replaced_too():
    given = parser.parse_model("""<ir_version: 13, opset_import: ["" : 27]>
        g (float[2, 4, 32] q, float[2, 4, 32] k, float[2, 4, 32] v) => (float[2, 4, 32] y, float[2, 4, 8, 8] s) {
            y, s = LinearAttention <q_num_heads = 4, kv_num_heads = 4, update_rule = "linear"> (q, k, v)
        }""")
    after, _ = expand(given, {("", "LinearAttention"), ("", "CastLike")})
    assert {"Scan", "Cast"} <= {node.op_type for node in after.graph.node}
    onnx.checker.check_model(after, full_check=True)
