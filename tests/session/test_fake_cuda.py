"""ONNX Runtime's CUDA provider on a fake device: what it decides about files as they are rewritten.

Kernels compute nothing there, so no number is looked at: placement, copies, order, allocations and waits alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

import onnx_remat
from onnx_remat.options import Options
from onnx_remat.ort.executed import as_executed
from tests.support.barriers import held_back, shape_held_back
from tests.support.fake_cuda import here, run
from tests.support.fake_cuda.build import SOURCES, build
from tests.support.graphs import mlp, model_of
from tests.support.slow import few

pytestmark = pytest.mark.skipif(bool(run.why_not()), reason=run.why_not())
LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_ALL")
SIDE = 256


def saved(model: onnx.ModelProto, folder: Path, name: str = "model.onnx") -> Path:
    onnx.save(model, folder / name)
    return folder / name


def two_tensors(tmp_path: Path) -> Path:
    """Exp(x), then Neg: the input, one value and the output, of 256 KiB each."""
    nodes = [helper.make_node("Exp", ["x"], ["h"], name="exp"), helper.make_node("Neg", ["h"], ["y"], name="neg")]
    return saved(model_of(nodes, {"x": [SIDE, SIDE]}, {"y": [SIDE, SIDE]}), tmp_path)


def test_the_books_are_exact(tmp_path):
    step = run.run_step(two_tensors(tmp_path))
    assert step.peak == 3 * 4 * SIDE * SIDE and step.copies == {}
    assert [node[1:] for node in step.order if not node[1].startswith("Memcpy")] == [
        ("Exp", "CUDAExecutionProvider"), ("Neg", "CUDAExecutionProvider")
    ]  # fmt: skip


def test_a_node_on_the_host_is_seen(tmp_path):
    """The negative control: an op that CUDA has no kernel for is copied down and up again."""
    kinds = ("Exp", "Acos", "Neg")
    nodes = [helper.make_node(k, [a], [b], name=k) for k, a, b in zip(kinds, "xhi", "hiy", strict=True)]
    step = run.run_step(saved(model_of(nodes, {"x": [SIDE, SIDE]}, {"y": [SIDE, SIDE]}), tmp_path))
    assert step.copies == {"up": (1, 4 * SIDE * SIDE), "down": (1, 4 * SIDE * SIDE)}
    assert ("Acos", "Acos", "CPUExecutionProvider") in step.order


@pytest.mark.parametrize("workspace", few([0, 1 << 20], [1 << 20]))
def test_convolutions_ask_for_the_workspace_that_is_set(workspace, tmp_path):
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], name="conv")]
    shapes = {"x": [1, 4, 32, 32], "w": [4, 4, 1, 1]}
    path = saved(model_of(nodes, shapes, {"y": [1, 4, 32, 32]}), tmp_path)
    held = run.run_step(path).peak
    assert run.run_step(path, workspace_forward=workspace).peak == held + workspace
    assert run.run_step(path, workspace_data=1 << 20, workspace_filter=1 << 20).peak == held


def test_a_step_that_does_not_fit_fails(tmp_path):
    path = two_tensors(tmp_path)
    with pytest.raises(run.Failed, match=r"(?i)alloc|memory"):
        run.run_step(path, capacity=2 * 4 * SIDE * SIDE)


def test_libraries_are_built_once():
    assert build(Path(next(run.environment().glob("lib/python*/site-packages/onnxruntime/capi/*_cuda.so"))),
                 run.environment() / "fake-cuda") == run.libraries()  # fmt: skip
    assert all(source.exists() for source in SOURCES) and (run.libraries() / "libfake.so").exists()


@pytest.mark.parametrize("opset", [13, 15, 24])
def test_barriers_stay_on_the_device_at_every_opset(opset, tmp_path):
    """What is held back lies where it lay: only vectors of no entries are on the host, and nothing is copied."""
    step = run.run_step(saved(held_back(opset, [4, 5]), tmp_path))
    assert step.copies == {} and step.waits <= 2
    assert {op for _, op, where in step.order if where != "CUDAExecutionProvider"} <= {"Mul", "Slice"}


@pytest.mark.parametrize("opset", [13, 15, 24])
@pytest.mark.parametrize("symbolic", [False, True])
def test_a_shape_waits_on_the_host(opset, symbolic, tmp_path):
    """What a kernel reads on the host is not copied to the device and back."""
    step = run.run_step(saved(shape_held_back(opset, symbolic), tmp_path))
    assert step.copies == {} and step.waits <= 2
    assert {op for _, op, where in step.order if where != "CUDAExecutionProvider"} <= {"Mul", "Slice", "Concat"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, onnx_remat.Report]:
    """A step, and what a rewrite to 40 % makes of it."""
    folder = tmp_path_factory.mktemp("pair")
    model = mlp(layers=12, batch=2048, width=32)
    result = onnx_remat.rewrite_model(model, "40%", effort=0.3, run_by="session")
    result.save(folder / "small.onnx")
    return saved(model, folder, "original.onnx"), folder / "small.onnx", result.report


@pytest.mark.parametrize("level", few(LEVELS, LEVELS[2:]))
def test_a_rewritten_step_never_stops_the_device(pair, level):
    """No copies and no host waits but the one for the size of an input; all on the device, and within the budget."""
    original, small, report = pair
    before, after = run.run_step(original, level), run.run_step(small, level)
    assert report.control_edges > 5
    assert after.waits <= before.waits + 1
    assert after.copies == before.copies
    assert after.peak <= report.budget < before.peak
    on_host = {op for _, op, provider in after.order if provider != "CUDAExecutionProvider"}
    assert on_host <= {"Mul"}  # of the vector of no axes, once


@pytest.mark.parametrize("level", few(LEVELS, LEVELS[2:]))
def test_the_order_is_the_cpus(pair, level, tmp_path):
    """As the CPU provider executes it, but for the host's own nodes and what only one of them fuses."""
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    session = ort.InferenceSession(str(pair[1]), options, providers=["CPUExecutionProvider"])
    session.run(None, {i.name: np.zeros(i.shape, np.float32) for i in session.get_inputs()})
    events = json.loads(Path(session.end_profiling()).read_text())
    nodes = [e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
    nodes.sort(key=lambda event: event["ts"])
    cpu = [e["name"].removesuffix("_kernel_time") for e in nodes]
    ran = run.run_step(pair[1], level).order
    cuda = [name for name, op, where in ran if where == "CUDAExecutionProvider" and not op.startswith("Memcpy")]
    common = set(cpu) & set(cuda)
    assert len(common) > 0.9 * len(cpu)
    assert [name for name in cuda if name in common] == [name for name in cpu if name in common]


def test_batch_normalisation_that_trains_runs_once_it_is_taken_apart(tmp_path):
    """As it is ONNX Runtime cannot load it."""
    shapes = {"x": [8, 4, 64, 64]} | {name: [4] for name in "sbmv"}
    nodes = [
        helper.make_node("BatchNormalization", ["x", *"sbmv"], ["n", "mean", "var"], name="norm", training_mode=1),
        helper.make_node("Relu", ["n"], ["y"], name="relu"),
    ]
    model = model_of(nodes, shapes, {"y": shapes["x"], "mean": [4], "var": [4]})
    with pytest.raises(run.Failed):
        run.run_step(saved(model, tmp_path))
    result = onnx_remat.rewrite_model(model, "100%", provider="cuda", run_by="session")
    step = run.run_step(saved(result.model, tmp_path, "apart.onnx"))
    assert not any(op.startswith("Memcpy") for _, op, _ in step.order)
    assert step.peak <= result.report.budget


@pytest.mark.parametrize("level", few(["disable", "basic", "all"], ["all"]))
def test_half_precision_is_predicted_as_the_device_optimises_it(level, tmp_path):
    """Products in float16 of values that are cast and transposed: the CPU's ONNX Runtime has no kernels for them."""
    make, side = helper.make_node, 512
    nodes = [
        make("Cast", ["x"], ["h0"], name="narrow", to=onnx.TensorProto.FLOAT16),
        make("Cast", ["w"], ["w0"], name="narrow_w", to=onnx.TensorProto.FLOAT16),
        make("Transpose", ["w0"], ["wt"], name="turn", perm=[1, 0]),
        make("MatMul", ["h0", "wt"], ["z"], name="product"),
        make("Sigmoid", ["z"], ["gate"], name="gate"),
        make("Mul", ["z", "gate"], ["swish"], name="swish"),
        make("Transpose", ["swish"], ["st"], name="turn_again", perm=[1, 0]),
        make("MatMul", ["st", "h0"], ["g"], name="gradient"),
        make("Cast", ["g"], ["y"], name="widen", to=onnx.TensorProto.FLOAT),
    ]
    model = model_of(nodes, {"x": [side, side], "w": [side, side]}, {"y": [side, side]})
    predicted = as_executed(model, None, level, Options(provider="cuda").preparation())
    assert not predicted.emulated
    ran = run.run_step(saved(model, tmp_path), LEVELS[("disable", "basic", "all").index(level)])
    assert predicted.timeline.peak == pytest.approx(ran.peak, abs=4096)
    kinds = [predicted.compiled.graph.ops[i].node.op_type for i in predicted.order.order]
    assert sorted(kinds) == sorted(op for _, op, _ in ran.order)


@pytest.mark.slow
def test_state_that_a_where_may_keep_is_renewed_in_place(tmp_path):
    """As a step with a GradScaler keeps its weights where a gradient is not finite."""
    make = helper.make_node
    nodes = [
        make("Mul", ["w", "x"], ["z"], name="z"), make("ReduceSum", ["z"], ["loss"], name="sum", keepdims=0),
        make("IsNaN", ["loss"], ["bad"], name="bad"), make("Sub", ["w", "x"], ["moved"], name="moved"),
        make("Where", ["bad", "w", "moved"], ["new.w"], name="keep"),
    ]  # fmt: skip
    model = model_of(nodes, {"w": [SIDE, SIDE], "x": [SIDE, SIDE]}, {"loss": [], "new.w": [SIDE, SIDE]})
    path = saved(model, tmp_path)
    (found,) = here.ask("tests.support.fake_cuda.session", {"path": str(path.resolve()), "limits": [0], "fuse": False})
    assert found["not_donated"] == {} and found["donated"] == 1
