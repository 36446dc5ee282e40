"""Planning for the CUDA provider on a machine without one: what is refused and noted, and whose facts count."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnx_remat import rewrite_model
from onnx_remat.errors import UsageError
from onnx_remat.ort import placement, runtime
from onnx_remat.ort.executed import as_executed
from onnx_remat.ort.kernels.registry import kernels_of
from onnx_remat.ort.prepare import Compiled, Preparation, prepare, prepare_for_simulation
from tests.support.graphs import mlp, model_of

make = helper.make_node
SIDE = 32


def compiled(model: onnx.ModelProto, workspace: int | None = None, provider: str = "cuda") -> Compiled:
    return prepare_for_simulation(model, Preparation(kernels_of(provider, workspace)))


def normalised(opset: int) -> onnx.ModelProto:
    """BatchNormalization in training mode."""
    nodes = [
        make("BatchNormalization", ["x", *"abmv"], ["n", "mean", "var"], name="norm", training_mode=1),
        make("Relu", ["n"], ["y"], name="relu"),
    ]
    shapes = {"x": [2, 4, SIDE, SIDE]} | {name: [4] for name in "abmv"}
    return model_of(nodes, shapes, {"y": [2, 4, SIDE, SIDE], "mean": [4], "var": [4]}, opset=opset)


def test_batch_normalisation_that_trains_is_written_as_its_parts_and_that_is_said():
    plan = compiled(normalised(15))
    assert [op.node.op_type for op in plan.graph.ops].count("ReduceMean") == 2
    assert any("'norm/BatchNormalization' is written" in note for note in placement.notes(plan))
    whole = compiled(normalised(15), provider="cpu")
    assert [op.node.op_type for op in whole.graph.ops] == ["BatchNormalization", "Relu"]


def test_nodes_on_the_host_are_named_with_what_they_copy():
    shape = [SIDE, SIDE]
    kinds = ("Acos", "Exp", "Atan", "Exp", "Acos")
    nodes = [make(k, [a], [b], name=f"{k}_{b}") for k, a, b in zip(kinds, "xhijk", "hijky", strict=True)]
    found = placement.warnings(compiled(model_of(nodes, {"x": shape}, {"y": shape})))
    assert len(found) == 2  # the two of a kind first
    assert "'Acos_h' (and 1 more of Acos) has no CUDA kernel" in found[0] and "copies 16.4 kB" in found[0]
    assert "'Atan_j' (Atan)" in found[1] and "copies 8.2 kB" in found[1]
    assert placement.warnings(compiled(model_of(nodes[1:2], {"h": shape}, {"i": shape}))) == ()


def test_what_stays_on_the_host_is_not_copied():
    """Of three nodes in a row, the first reads what the device made, and the device reads what the last one makes."""
    shape = [SIDE, SIDE]
    kinds = ("Exp", "Acos", "Atan", "Acos", "Neg")
    nodes = [make(k, [a], [b], name=f"{k}_{b}") for k, a, b in zip(kinds, "xhijk", "hijky", strict=True)]
    assert placement.nodes_on_host(compiled(model_of(nodes, {"x": shape}, {"y": shape}))) == {
        "Acos_i": 4096,
        "Acos_k": 4096,
    }
    nodes = [make("Acos", ["w"], ["h"], name="Acos_w"), make("Mul", ["h", "x"], ["y"], name="Mul_y")]
    model = model_of(nodes, {"x": shape}, {"y": shape}, {"w": np.zeros(shape, np.float32)})
    assert placement.nodes_on_host(compiled(model)) == {"Acos_w": 4096}  # the weight lies where it is read


@pytest.mark.parametrize(
    "made",
    [
        """w = If (k) <
            then_branch = t () => (float16[64, 64] p) {
                c = Constant <value = float16 {2}> ()  d = Cast <to = 10> (f)  e = Mul (d, c)  p = Add (e, a)
            },
            else_branch = e () => (float16[64, 64] q) { q = Neg (a) }>""",
        "w = DequantizeLinear <output_dtype = 10> (i, s)",
    ],
    ids=["body", "DequantizeLinear"],
)
def test_half_precision_in_bodies_and_of_quantised_values_is_planned_without_a_device(made):
    pytest.importorskip("onnxruntime")
    model = onnx.parser.parse_model(f"""<ir_version: 12, opset_import: ["" : 23]>
        g (float16[64, 64] x, float[64, 64] f, int8[64, 64] i, float16 s, bool k) => (float16 y) {{
            a = Tanh (x)  {made}  v = Mul (a, w)  y = ReduceSum <keepdims = 0> (v)
        }}""")
    executed = as_executed(model, None, "all", Preparation(kernels_of("cuda")))
    halves = [executed.compiled.tensors[name].dtype for name in "awvy"]
    assert halves == [TensorProto.FLOAT16] * 4 and not executed.emulated


def without_device(text: str, level: str = "all") -> Compiled:
    """A graph as the device is thought to run it: the CPU optimises it in float32."""
    pytest.importorskip("onnxruntime")
    model = onnx.parser.parse_model(f"""<ir_version: 12, opset_import: ["" : 20]> g {text}""")
    return as_executed(model, None, level, Preparation(kernels_of("cuda"))).compiled


@pytest.mark.parametrize("between", ["i = Cast <to = 1> (h)", "j = Identity (h)  i = Cast <to = 1> (j)"])
@pytest.mark.parametrize("narrow", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_casts_that_round_are_planned_without_a_device(narrow, between):
    """In float32, a cast to half precision and back changes nothing."""
    for level in ("disable", "basic", "all"):
        plan = without_device(
            f"""(float[64, 64] x) => (float y) {{
                h = Cast <to = {narrow}> (x)  {between}  e = Exp (i)  y = ReduceSum <keepdims = 0> (e)
            }}""",
            level,
        )
        assert [op.node.op_type for op in plan.graph.ops].count("Cast") == 2
        assert plan.tensors["h"].dtype == narrow and plan.tensors["i"].dtype == TensorProto.FLOAT


def test_two_casts_of_a_rounded_value_stay_two_without_a_device():
    plan = without_device("""(float[64, 64] x) => (float y, float16 z) {
        h = Cast <to = 16> (x)  i = Cast <to = 10> (h)  w = Cast <to = 1> (h)  e = Exp (i)  f = Exp (w)
        y = ReduceSum <keepdims = 0> (f)  z = ReduceSum <keepdims = 0> (e)
    }""")
    assert [plan.tensors[name].dtype for name in "ief"] == [TensorProto.FLOAT16, TensorProto.FLOAT16, TensorProto.FLOAT]


def test_sizes_that_were_rounded_are_the_same_without_a_device():
    plan = without_device("""(float[8, 8] x) => (float[n] y) <float[1] m = {-1}> {
        a = Cast <to = 10> (m)  b = Cast <to = 1> (a)  c = Cast <to = 7> (b)  y = Reshape (x, c)
    }""")
    assert plan.tensors["y"].shape == (64,)


@pytest.mark.parametrize(
    ("stated", "made"),
    [
        ("<float zero = {0}, float16 none = {0}>", ""),
        ("", "zero = Constant <value = float {0}> ()  none = Constant <value = float16 {0}> ()"),
    ],
    ids=["initializers", "nodes"],
)
def test_equal_constants_of_two_types_stay_two_without_a_device(stated, made):
    """In float32 they are one; ONNX Runtime also swaps the inputs of a Where that reads a Not."""
    plan = without_device(f"""(float[64, 64] x, bool[64, 64] k) => (float y, float16 z) {stated} {{
        {made}  n = Not (k)  w = Where (n, x, zero)  h = Cast <to = 10> (x)  v = Where (k, h, none)
        y = ReduceSum <keepdims = 0> (w)  z = ReduceSum <keepdims = 0> (v)
    }}""")
    for op in plan.graph.ops:
        if op.node.op_type == "Where":
            assert len({plan.tensors[name].dtype for name in (*op.node.input[1:], *op.node.output)}) == 1


def test_uneven_transposed_convolutions_are_named():
    nodes = [make("ConvTranspose", ["x", "w"], ["y"], name="up", pads=[0, 0, 1, 1])]
    model = model_of(nodes, {"x": [1, 4, 16, 16], "w": [4, 4, 3, 3]}, {"y": [1, 4, 17, 17]})
    (line,) = placement.warnings(compiled(model))
    assert "'up' (ConvTranspose)" in line and "pad evenly" in line


@pytest.mark.parametrize(("kind", "words"), [("Conv", "cuDNN workspace"), ("double", "float64 runs at")])
def test_what_was_not_measured_is_noted(kind, words):
    if kind == "Conv":
        nodes, dtype = [make("Conv", ["x", "w"], ["y"], name="conv")], TensorProto.FLOAT
    else:
        nodes, dtype = [make("Add", ["x", "w"], ["y"], name="add")], TensorProto.DOUBLE
    shape = [4, 4, 16, 16]
    model = model_of(nodes, {"x": (dtype, shape), "w": (dtype, [4, 4, 1, 1])}, {"y": (dtype, shape)})
    assert any(words in note for note in placement.notes(compiled(model)))
    assert placement.notes(compiled(model, provider="cpu")) == ()


@pytest.mark.parametrize("workspace", [None, 0, 12_345])
def test_the_margin_for_cudnn_counts_where_a_convolution_runs(workspace):
    nodes = [make("Conv", ["x", "w"], ["h"], name="conv"), make("Relu", ["h"], ["y"], name="relu")]
    shape = [4, 4, 16, 16]
    problem = compiled(model_of(nodes, {"x": shape, "w": [4, 4, 1, 1]}, {"y": shape}), workspace).problem
    assert problem.workspace.tolist() == [32 * 2**20 if workspace is None else workspace, 0]


def test_the_devices_facts_decide():
    """Gelu works in place on CUDA alone, Softmax on the CPU alone."""
    shape = [SIDE, SIDE]
    for op, on in (("Gelu", {"cuda"}), ("Softmax", {"cpu"}), ("Tanh", {"cpu", "cuda"}), ("Exp", set())):
        nodes = [make("Neg", ["x"], ["h"]), make(op, ["h"], ["i"]), make("Abs", ["i"], ["y"])]
        model = model_of(nodes, {"x": shape}, {"y": shape})
        problems = {p: compiled(model, provider=p).problem for p in ("cpu", "cuda")}
        assert {p for p, problem in problems.items() if len(problem.inplace_slots)} == on, op


@pytest.mark.parametrize(
    ("provider", "opset", "version", "old"),
    [("cuda", 20, (1, 24, 4), True), ("cuda", 20, (1, 25, 1), False), ("cuda", 18, (1, 24, 4), False),
     ("cuda", 20, (), False), ("cpu", 20, (1, 19, 2), False)],
)  # fmt: skip
def test_versions_at_whose_edges_the_host_would_wait_are_named(monkeypatch, provider, opset, version, old):
    found = placement.too_old(kernels_of(provider), opset, version)
    assert bool(found) == old and (not old or "1.24.4 has no CUDA kernel for Size at opset 20" in found)
    monkeypatch.setattr(runtime, "installed", lambda: version)
    shape = [SIDE, SIDE]
    model = model_of([make("Neg", ["x"], ["y"], name="neg")], {"x": shape}, {"y": shape}, opset=opset)
    assert (
        any("install onnxruntime-gpu 1.25.1" in note for note in placement.notes(compiled(model, provider=provider)))
        == old
    )


def test_a_plan_for_a_device_keeps_its_budget_and_says_what_it_rests_on():
    model = mlp(layers=8, batch=512, width=32)
    result = rewrite_model(model, "70%", provider="cuda", effort=0.5)
    assert result.report.loop_after.kernels and result.report.loop_after.total <= result.report.budget
    assert result.report.notes[0].startswith("there is no CUDA device here")
    assert result.compiled.kernels.name == result.executed.compiled.kernels.name == "cuda"
    seconds = np.asarray(prepare(model, Preparation(kernels_of("cuda"), costs="a100")).problem.cost)
    assert result.compiled.problem.cost.tolist() == seconds.tolist()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"provider": "cuda", "verify": "run"}, "verify='run' measures the CPU's memory"),
        ({"provider": "cpu", "cudnn_workspace": "1MiB"}, "is for provider 'cuda'"),
        ({"provider": "cuda", "cudnn_workspace": "10%"}, "not a size in bytes"),
    ],
)
def test_what_makes_no_sense_is_refused(options, words):
    with pytest.raises(UsageError, match=words):
        rewrite_model(mlp(layers=2), "90%", **options)
