"""Models that only onnxruntime-training runs: what is known of its ops, and the rewritten files trained there."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from onnx_remat import rewrite_model
from onnx_remat.app import bench, cli
from onnx_remat.errors import ModelError, ShapeError
from onnx_remat.ir.graph import build
from onnx_remat.ir.metadata import RECOMPUTE_KEY
from onnx_remat.ir.op_semantics import semantics
from onnx_remat.ir.phases import split
from onnx_remat.ir.shapes import infer
from onnx_remat.ir.training_ops import first_training_op, with_stand_ins
from onnx_remat.measure import processes
from onnx_remat.memory.problem import BACKWARD, FORWARD
from onnx_remat.ort import runtime
from onnx_remat.ort.kernels.base import Call, itemsize, key
from onnx_remat.ort.kernels.cpu import CPU
from onnx_remat.ort.prepare import Preparation, prepare
from onnx_remat.ort.shape_askers import SHAPE_ASKERS
from onnx_remat.rewrite.pipeline import Result
from onnx_remat.session.training import Loop, initial_state
from tests.support import training_build_facts as recorded
from tests.support.graphs import model_of

DATA = Path(__file__).parents[1] / "data"
FACTS = json.loads((DATA / "training_build_facts.json").read_text())
DIMS = {"cnn": {"batch": 64}, "transformer": {"batch": 64, "tokens": 1024}}
PYTHON = os.environ.get("ONNX_REMAT_ORT_TRAINING", "")
"""An interpreter with onnxruntime-training, as scripts/ort_training_env.py sets one up."""

there = pytest.mark.skipif(not PYTHON, reason="ONNX_REMAT_ORT_TRAINING names no interpreter with onnxruntime-training")


def load(name: str) -> onnx.ModelProto:
    return onnx.load(DATA / f"{name}.training_model.onnx")


@pytest.mark.parametrize(("case", "known"), zip(recorded.CASES, FACTS, strict=True), ids=lambda x: str(x)[:60])
def test_shapes_buffers_and_scratch_memory_are_what_was_measured(case: Any, known: dict[str, Any]) -> None:
    model = recorded.model_of(case)
    made_by = [node.name for node in model.graph.node].index("tested")
    del model.graph.node[made_by + 1 :], model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in model.graph.node[made_by].output)
    graph = build(model)
    tensors = infer(graph, askers=SHAPE_ASKERS)
    (op,) = [op for op in graph.ops if op.node.name == "tested"]
    made = [tensors[name] for name in op.outputs]
    assert [list(t.shape) for t in made] == known["shapes"]
    dtypes = [onnx.helper.tensor_dtype_to_np_dtype(t.dtype).name for t in made]
    assert dtypes == known["dtypes"]
    assert semantics(op.node.domain, op.node.op_type).known and key(op.node) not in CPU.inplace
    read = [tensors[name] for name in op.inputs]
    call = Call(
        {a.name: onnx.helper.get_attribute_value(a) for a in op.node.attribute},
        [t.shape for t in read], [itemsize(t.dtype) for t in read],
        [t.shape for t in made], [itemsize(t.dtype) for t in made], 2,
    )  # fmt: skip
    blocks = CPU.blocks(key(op.node), call)
    aliased = sum(made[out].nbytes for _, out in CPU.aliases(op.node))
    assert known["besides"] == pytest.approx((sum(blocks) - aliased) / 1e6, abs=0.6)
    assert all(abs(saved) < 1 for saved in known["saved"].values())  # nothing works in place


@pytest.mark.parametrize("name", DIMS)
def test_every_value_is_sized_and_the_loss_divides_forward_from_backward(name: str) -> None:
    model = load(name)
    assert first_training_op(model) is not None
    graph = build(model)
    tensors = infer(graph, DIMS[name])
    stated = {v.name: v.type.tensor_type.shape.dim for v in model.graph.value_info}
    sizes = DIMS[name]
    for value, dims in stated.items():
        known = [d.dim_value or sizes.get(d.dim_param) for d in dims]
        assert all(k in (None, size) for k, size in zip(known, tensors[value].shape, strict=True)), value
    phases = split(graph, tensors)
    grown = {op.node.op_type for op, phase in zip(graph.ops, phases, strict=True) if phase == FORWARD}
    assert not any(op_type.endswith("Grad") for op_type in grown)
    backward = [op.node.doc_string == "Backward pass" or op.node.op_type == "InPlaceAccumulatorV2" for op in graph.ops]
    shapes_only = [op.node.op_type == "Shape" for op in graph.ops]
    assert all(b == (p == BACKWARD) or s for b, p, s in zip(backward, phases, shapes_only, strict=True))


@cache
def rewritten(name: str) -> Result:
    budget = {"cnn": "60%", "transformer": "75%"}[name]
    return rewrite_model(load(name), budget, dims=DIMS[name], verify="none", effort=0.5, run_by="session")


@pytest.mark.parametrize("name", DIMS)
def test_rewritten_from_the_file_alone(name: str) -> None:
    result = rewritten(name)
    assert result.report.after.total <= result.report.budget and result.recomputed
    assert "run the result in onnxruntime-training" in result.report.notes[0]
    clones = [n for n in result.model.graph.node if any(p.key == RECOMPUTE_KEY for p in n.metadata_props)]
    assert not any(n.op_type == "InPlaceAccumulatorV2" for n in clones)  # it would count a gradient twice


def test_stock_runtime_is_not_passed_over_in_silence() -> None:
    with pytest.raises(ModelError, match="verify='none' plans from the file alone"):
        rewrite_model(load("cnn"), "75%", dims=DIMS["cnn"], run_by="session")


def test_recomputed_batch_norm_updates_copies_of_the_running_statistics() -> None:
    model = load("cnn")
    node = next(n for n in model.graph.node if n.op_type == "BatchNormInternal")
    result = rewritten("cnn")
    norms = [n for n in result.model.graph.node if n.op_type == "BatchNormInternal"]
    inputs = {value.name for value in model.graph.input}
    assert len(norms) > 6 == sum(n.input[3] in inputs for n in norms), "one of each updates the statistics"
    copies = {n.output[0]: n for n in result.model.graph.node if n.op_type == "Concat"}
    assert all(copies[n.input[3]].input[0] in inputs for n in norms if n.input[3] not in inputs)
    assert prepare(model, Preparation(CPU, DIMS["cnn"])).table.recomputable[list(model.graph.node).index(node)]


def test_max_pool_gradients_keep_the_shape_they_read_from_the_file() -> None:
    """Their kernel takes it from value_info: made-up dimensions there would be read as zero."""
    result = rewritten("cnn")
    made = [n.output[0] for n in result.model.graph.node if n.op_type == "MaxPoolGrad"]
    stated = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in result.model.graph.value_info}
    assert [stated[name][1:] for name in made] == [[16, 16, 16], [16, 32, 32]]
    assert semantics("", "MaxPoolGrad").stated and semantics("", "AveragePoolGrad").stated


def test_what_a_kernel_overwrites_nobody_else_may_read() -> None:
    model = load("cnn")
    buffer = next(n for n in model.graph.node if n.op_type == "InPlaceAccumulatorV2").input[0]
    model.graph.node.append(onnx.helper.make_node("Neg", [buffer], ["peeked"], name="peek"))
    model.graph.output.append(onnx.ValueInfoProto(name="peeked"))
    with pytest.raises(ModelError, match=r"overwrites .*buffer', which node 'peek' reads too"):
        rewrite_model(model, "75%", dims=DIMS["cnn"], verify="none", run_by="session")


@pytest.mark.parametrize(
    ("reads", "refused"),
    [
        ("z = Mul (h, m)", True),
        ("other = Flatten (m)  z = Add (other, other)", True),
        ("z = Neg (n)", False),  # the new statistics
        ("z = Shape (x)", False),
    ],
)
def test_what_a_kernel_overwrites_through_a_view_nobody_else_may_read(reads: str, refused: bool) -> None:
    model = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["" : 20]>
        g (float[2, 8] x, float[8] s, float[8] b, float[1, 8] m, float[8] v) => (float[2, 8] y, z)
        <int64[1] to = {{8}}> {{
            r = Reshape (m, to)  h = Exp (x)
            y, n, w = BatchNormalization <training_mode = 1> (h, s, b, r, v)
            {reads}
        }}""")
    if refused:
        with pytest.raises(ModelError, match=r"\(BatchNormalization\) overwrites 'm', which node .* reads too"):
            prepare(model, Preparation(CPU))
    else:
        assert prepare(model, Preparation(CPU))


def test_a_gradient_op_nobody_knows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "available", lambda: False)  # which would not know it either, but takes its time
    model = load("cnn")
    node = next(n for n in model.graph.node if n.op_type == "ConvGrad")
    node.op_type = "ConvGradOfTheFuture"
    for info in [v for v in model.graph.value_info if v.name in node.output]:
        model.graph.value_info.remove(info)
    with pytest.raises(ShapeError, match="ConvGradOfTheFuture"):
        infer(build(model), DIMS["cnn"])


def test_models_for_stock_runtime_are_left_alone() -> None:
    model = onnx.parser.parse_model('<ir_version: 9, opset_import: ["" : 20]> g (float[2] x) => (y) { y = Relu (x) }')
    assert with_stand_ins(model) is model


@there
def test_facts_are_still_what_the_training_build_says() -> None:
    environment = os.environ | processes.GIVES_BACK
    done = subprocess.run([PYTHON, recorded.__file__], stdout=subprocess.PIPE, env=environment, check=True)
    for known, seen in zip(FACTS, json.loads(done.stdout), strict=True):
        assert (seen["shapes"], seen["dtypes"]) == (known["shapes"], known["dtypes"])
        assert seen["besides"] == pytest.approx(known["besides"], abs=0.6)


@pytest.mark.parametrize(
    "arguments",
    [["profile", "in.onnx", "out.json"], ["check", "small.onnx"]],
    ids=lambda arguments: arguments[0],
)
def test_commands_that_run_it_say_where_it_can_run(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(load("cnn"), "in.onnx")
    rewritten("cnn").save("small.onnx")
    assert cli.main(arguments) == 4
    assert "--runtime PYTHON" in capsys.readouterr().err
    assert bench.main(["in.onnx", "--budget", "60%", "--dim", "batch=64"]) == 4
    assert "--runtime PYTHON" in capsys.readouterr().err
    assert cli.main(["check", "small.onnx", "--runtime", "nowhere/python"]) == 2
    assert "'nowhere/python' is not a Python interpreter" in capsys.readouterr().err
    assert cli.main(["check", "small.onnx", "--runtime", "nowhere/python", "--no-run"]) == 0
    assert "without graph optimisations: another environment runs the file" in capsys.readouterr().out


def test_a_loop_descends_the_sums_that_the_model_leaves_in_its_inputs() -> None:
    """A stand-in for a session of onnxruntime-training, whose kernel writes into its input."""
    sums, flags = "w_grad.accumulation.buffer", (onnx.TensorProto.BOOL, [1])
    node = onnx.helper.make_node
    nodes = [node("Mul", ["w", "w"], ["loss"]), node("Neg", [sums], ["n"]), node("Not", ["lazy_reset_grad"], ["flag"])]
    inputs: dict[str, Any] = {"w": [], sums: [], "lazy_reset_grad": flags}
    model = model_of(nodes, inputs, {"loss": [], "n": [], "flag": flags})
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    state = initial_state(session, {})
    assert state["lazy_reset_grad"].all()
    loop = Loop(session, state | {"w": np.array(2.0, np.float32), sums: np.array(4.0, np.float32)}, "loss", rate=0.25)
    assert [loop.step() for _ in range(3)] == [4.0, 1.0, 0.0]


_TRAIN = """
import json, sys
import numpy as np
from onnxruntime import SessionOptions
from onnxruntime.training.api import CheckpointState, Module, Optimizer
folder, file, batch = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
state = CheckpointState.load_checkpoint(folder + "/checkpoint")
module = Module(file, state, session_options=SessionOptions())
optimizer = Optimizer(folder + "/optimizer_model.onnx", module)
random = np.random.default_rng(0)
feeds = [random.standard_normal(s, np.float32) if kind == "float" else random.integers(0, 10, s) for kind, s in batch]
module.train()
losses = []
for _ in range(5):
    losses.append(float(np.asarray(module(*feeds)).ravel()[0]))
    optimizer.step()
    module.lazy_reset_grad()
print(json.dumps(losses))
"""


@there
def test_module_and_optimizer_take_the_rewritten_file(tmp_path: Path) -> None:
    folder = artifacts("cnn", tmp_path)
    rewrite_model(
        folder / "training_model.onnx", "65%", dims=DIMS["cnn"], verify="none", effort=0.3, run_by="session"
    ).save(tmp_path / "small.onnx")
    batch = json.dumps([("float", [64, 3, 32, 32]), ("int", [64])])
    first, second = (
        json.loads(subprocess.check_output([PYTHON, "-c", _TRAIN, folder, file, batch], text=True).splitlines()[-1])
        for file in (folder / "training_model.onnx", tmp_path / "small.onnx")
    )
    assert first == second and first[-1] < first[0]


@there
@pytest.mark.parametrize(("name", "dims"), [("cnn", {"batch": 64}), ("transformer", {"batch": 256, "tokens": 4096})])
def test_the_benchmark_trains_there(name: str, dims: dict[str, int], tmp_path: Path) -> None:
    folder = artifacts(name, tmp_path)
    found = bench.benchmark(
        folder / "training_model.onnx", "65%", steps=5, state=str(folder / "checkpoint"), python=PYTHON,
        dims=dims, effort=0.5, costs="cpu",
    )  # fmt: skip
    assert found.exact and found.loss_distance < 1e-5 and found.rewritten.losses[-1] < found.rewritten.losses[0]
    assert found.rewritten.measured_peak <= found.budget * 1.01 + processes.RESOLUTION
    for side in (found.original, found.rewritten):
        assert side.predicted_peak == pytest.approx(side.measured_peak, rel=0.03)


@there
def test_the_order_is_the_emulated_one_there_and_profile_and_check_run_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result, small = rewritten("transformer"), tmp_path / "small.onnx"
    result.save(small)
    compiled, order = result.executed.compiled, result.executed.order.order
    seen = processes.measure(small, "disable", dims=DIMS["transformer"], trace=True, python=PYTHON).executed
    assert list(seen) == [compiled.graph.ops[i].node.name for i in order]
    assert cli.main(["check", str(small), "--runtime", PYTHON]) == 0
    assert "the file runs: measured peak" in capsys.readouterr().out
    flags = ["--dim", "batch=64", "--dim", "tokens=1024", "--runs", "1", "--steps", "1", "--runtime", PYTHON]
    assert cli.main(["profile", str(small), str(tmp_path / "p.json"), *flags]) == 0


def artifacts(name: str, folder: Path) -> Path:
    """What onnxruntime-training makes of a model."""
    script = Path(__file__).parents[2] / "scripts" / "ort_training_models.py"
    subprocess.run([PYTHON, script, folder, name], check=True, capture_output=True)
    return folder / name


def test_values_behind_bodies_with_fused_products_are_sized() -> None:
    """ONNX Runtime makes such bodies of attention with a linear state, and tells no shapes that follow from them."""
    text = """<ir_version: 9, opset_import: ["" : 20, "com.microsoft" : 1]>
        g (float[4, 5, 3] x, float[3, 3] w) => (y, z) {
            s, y = Scan <num_scan_inputs = 1, body = b (float[5, 3] before, float[5, 3] part) => (after, made) {
                t = com.microsoft.FusedMatMul <transB = 1> (part, w)  after = Add (before, t)
                u = com.microsoft.FusedMatMul <transA = 1> (part, t)  made = Neg (u) }> (zeros, x)
            z = Neg (s)
        }"""
    model = onnx.parser.parse_model(
        text.replace("(y, z)", "(y, z) <float[5, 3] zeros = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}>")
    )
    found = infer(build(model))
    assert (found["y"].shape, found["z"].shape) == ((4, 3, 3), (5, 3))
    assert model.graph.node[0].attribute[1].g.node[0].op_type == "FusedMatMul"
