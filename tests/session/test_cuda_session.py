"""`Session` and `Loop` on the fake device: one slab, state in place, and no more memory than was predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import onnx_remat
from onnx_remat.app.flags import in_flags
from onnx_remat.errors import UsageError
from onnx_remat.fuse import joins
from onnx_remat.memory import arena
from onnx_remat.options import Options
from onnx_remat.ort.executed import as_executed
from onnx_remat.session import device_scratch
from onnx_remat.session.prediction import Footprint, predict
from onnx_remat.session.training import Loop
from tests.support.adam import adam
from tests.support.fake_cuda import here, run
from tests.support.fake_cuda.session import state_of
from tests.support.graphs import mlp, model_of
from tests.support.slow import few

needs_device = pytest.mark.skipif(bool(here.why_not()), reason=here.why_not())
SPACE = 1 << 20


def trained(path: Path, *limits: int) -> list[dict[str, Any]]:
    job = {"path": str(path), "limits": limits}
    return list(here.ask("tests.support.fake_cuda.session", job, workspace_forward=SPACE, workspace_data=SPACE))


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, onnx_remat.Report]:
    """A step rewritten to 60 % of what training with it takes of a device."""
    path = tmp_path_factory.mktemp("step") / "small.onnx"
    model = mlp(layers=12, batch=8192, width=64)
    result = onnx_remat.rewrite_model(model, "60%", provider="cuda", run_by="loop", effort=0.3)
    result.save(path)
    return path, result.report


@needs_device
def test_training_takes_what_was_predicted_and_no_more(step):
    """It runs within the limit predicted, which is within the budget, and not within 1 % less."""
    path, report = step
    predicted = report.loop_after.total
    assert predicted <= report.budget < report.loop_before.total
    free, enough, little, none = trained(path, 0, predicted, int(predicted * 0.99) - 1, 1000)
    assert free["donated"] > 0 and free["not_donated"] == {}
    for found in (free, enough):
        assert all(made["peak"] <= predicted and made["waits"] <= 3 for made in found["steps"])
        assert len({made["peak"] for made in found["steps"]}) == 1
    full = "the device is full: raise memory_limit=, or plan with a larger cudnn_workspace=SIZE"
    assert full in little["error"] or "is below" in little["error"]
    assert "bytes of the slab and the inputs: raise it" in none["error"]


@needs_device
@pytest.mark.parametrize("asked", [pytest.param("session", marks=pytest.mark.slow), "by default"])
def test_a_step_is_captured_in_a_graph_and_replayed(step, asked):
    """Nothing in it stops the host or allocates, which the fake device refuses while a graph is captured."""
    how = {"graph": True} if asked == "session" else {"loop": True}
    job = {"path": str(step[0]), "limits": [0]} | how
    (found,) = here.ask("tests.support.fake_cuda.session", job)
    assert "error" not in found, found
    assert [(made["captures"], made["replays"], made["waits"]) for made in found["steps"]] == [(0, 1, 1)] * 3


def asked(path: Path, **job: Any) -> dict[str, Any]:
    (found,) = here.ask("tests.support.fake_cuda.session", {"path": str(path), "limits": [0]} | job)
    assert "error" not in found, found
    return dict(found)


@pytest.mark.slow
@needs_device
@pytest.mark.parametrize("graph", [pytest.param(False, marks=pytest.mark.slow), True])
def test_fused_kernels_save_launches_and_nothing_waits_more(step, graph):
    plain, fused = (asked(step[0], fuse=fuse, graph=graph) for fuse in (False, True))
    assert plain["kernels"] == 0 and plain["not_fused"] == ""
    assert fused["kernels"] > 0 and fused["not_fused"] == ""
    for before, after in zip(plain["steps"], fused["steps"], strict=True):
        assert after["peak"] <= before["peak"] and after["waits"] <= before["waits"]
        assert after["captures"] == before["captures"] and after["replays"] == before["replays"]
    if not graph:
        assert 0 < fused["steps"][2]["driven"] == fused["kernels"]
        assert fused["steps"][2]["launches"] < 0.6 * plain["steps"][2]["launches"]


@needs_device
def test_a_step_whose_kernels_the_driver_refuses_runs_unfused_and_says_why(step, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_REFUSES_PTX", "1")
    found = asked(step[0])
    assert found["kernels"] == 0 and "the CUDA driver cannot load fused kernels" in found["not_fused"]
    assert found["warned"] == [f"steps run unfused, which takes longer: {found['not_fused']}"]


@pytest.mark.slow
@needs_device
def test_a_step_that_reads_an_input_in_host_memory_is_not_captured(tmp_path):
    """A replay would read what it was when it was captured."""
    nodes = [
        helper.make_node("CumSum", ["x", "axis"], ["y"], name="sums"),
        helper.make_node("ReduceMean", ["y"], ["loss"], name="mean", keepdims=0),
    ]
    path = tmp_path / "sums.onnx"
    onnx.save(model_of(nodes, {"x": [16, 64], "axis": (onnx.TensorProto.INT64, [])}, {"loss": []}), path)
    (found,) = here.ask("tests.support.fake_cuda.session", {"path": str(path), "limits": [0], "graph": True})
    assert found["error"].startswith("cuda_graph: input 'axis' is read in host memory")
    assert [made["replays"] for made in asked(path, loop=True)["steps"]] == [0] * 3


@needs_device
def test_a_file_is_run_with_fused_kernels_and_takes_what_was_predicted(tmp_path):
    path, model = tmp_path / "small.onnx", mlp(layers=12, batch=8192, width=64)
    plain = onnx_remat.rewrite_model(model, "60%", provider="cuda", fuse=False, effort=0.3).report
    result = onnx_remat.rewrite_model(model, plain.budget, provider="cuda", effort=0.3)
    result.save(path)
    before, predicted = result.report.loop_before, result.report.loop_after.total
    assert before.kernels and before.total <= plain.loop_before.total and before.seconds < plain.loop_before.seconds
    assert result.report.loop_after.kernels and predicted <= plain.budget
    assert not plain.loop_before.kernels and in_flags(plain.loop_before.not_fused) == "--no-fuse"
    enough, little = trained(path, predicted, int(predicted * 0.99) - 1)
    assert enough["kernels"] == result.report.loop_after.kernels and "error" in little
    assert asked(path, fuse=False)["kernels"] == 0


@pytest.mark.slow
@needs_device
def test_what_an_if_makes_is_read_by_onnx_runtimes_kernels(tmp_path):
    """Where a body runs on the host, ONNX Runtime moves its readers there, where no kernel of a device is."""
    branches = {
        way: helper.make_graph(
            [helper.make_node(op, ["x"], [way])], way, [],
            [helper.make_tensor_value_info(way, onnx.TensorProto.FLOAT, [64, 64])],
        )
        for way, op in (("then", "Neg"), ("else", "Abs"))
    }  # fmt: skip
    nodes = [
        helper.make_node("If", ["flag"], ["c"], then_branch=branches["then"], else_branch=branches["else"]),
        helper.make_node("Tanh", ["c"], ["t"]), helper.make_node("Mul", ["t", "x"], ["y"]),
        helper.make_node("Tanh", ["x"], ["u"]), helper.make_node("Mul", ["u", "x"], ["z"]),
    ]  # fmt: skip
    inputs = {"x": [64, 64], "flag": (onnx.TensorProto.BOOL, [])}
    onnx.save(model_of(nodes, inputs, {"y": [64, 64], "z": [64, 64]}), tmp_path / "if.onnx")
    found = here.ask("tests.support.fake_cuda.session", {"path": str(tmp_path / "if.onnx"), "open": True, "fuse": True})
    assert found == {"kernels": 1, "not_fused": ""}


def update() -> onnx.ModelProto:
    """AdamW's update by the gradient of a function of rows, all of it within kernels; the loss is not."""

    def op(kind: str, reads: str, made: str, **attributes: Any) -> onnx.NodeProto:
        return helper.make_node(kind, reads.split(), [made], name=f"make_{made}", **attributes)

    nodes = [
        op("ReduceMean", "w last", "mean"), op("Sub", "w mean", "below"), op("Mul", "below below", "squares"),
        op("ReduceMean", "squares last", "variance"), op("Add", "variance small", "more"),
        op("Sqrt", "more", "deviation"), op("Div", "below deviation", "normal"),
        op("Softmax", "normal", "shares", axis=-1), op("Mul", "shares scale", "g"),
        op("Mul", "m b1", "m1"), op("Mul", "g c1", "g1"), op("Add", "m1 g1", "new.m"),
        op("Mul", "v b2", "v1"), op("Mul", "g g", "gg"), op("Mul", "gg c2", "g2"), op("Add", "v1 g2", "new.v"),
        op("Sqrt", "new.v", "root"), op("Add", "root small", "under"), op("Div", "new.m under", "step"),
        op("Mul", "step rate", "scaled"), op("Sub", "w scaled", "new.w"),
        op("ReduceMean", "shares", "loss", keepdims=0),
    ]  # fmt: skip
    numbers = {"b1": 0.9, "c1": 0.1, "b2": 0.999, "c2": 0.001, "small": 1e-6, "rate": 0.1}
    given = {name: np.array(value, np.float32) for name, value in numbers.items()} | {"last": np.array([1])}
    shapes = {name: [300, 70] for name in "wmv"}
    outputs = {"loss": [], **{f"new.{name}": shape for name, shape in shapes.items()}}
    return model_of(nodes, {**shapes, "scale": [70]}, outputs, given)


@needs_device
def test_fused_kernels_compute_on_the_device_what_they_compute_on_the_cpu(tmp_path):
    """State is overwritten by its new value, and every address lies in an allocation: a stray one fails the launch."""
    path = tmp_path / "update.onnx"
    onnx.save(update(), path)
    found = asked(path, fuse=True, numbers=True)
    assert found["kernels"] >= 1 and found["donated"] == 3
    with onnx_remat.Session(path, donate=True) as session:
        loop = Loop(session, state_of(session, 0))
        for _ in range(3):
            loop.step()
        for name, value in loop.state().items():
            np.testing.assert_allclose(found["outputs"][name], value.ravel(), rtol=1e-5, atol=1e-6, err_msg=name)


def updates(shapes: dict[str, list[int]]) -> onnx.ModelProto:
    """Adam's update of a weight of each shape by the gradient of its Softplus, nodes of kernels alone but the loss."""
    nodes, inputs, outputs = [], {}, {"loss": []}
    for w, shape in shapes.items():
        lines = [
            ("Exp", "w", "e"), ("Add", "e one", "d"), ("Div", "e d", "g"), ("Mul", "m b1", "m1"), ("Mul", "g c1", "g1"),
            ("Add", "m1 g1", "new.m"), ("Mul", "v b2", "v1"), ("Mul", "g g", "gg"), ("Mul", "gg c2", "g2"),
            ("Add", "v1 g2", "new.v"), ("Sqrt", "new.v", "root"), ("Add", "root small", "under"),
            ("Div", "new.m under", "step"), ("Mul", "step rate", "scaled"), ("Sub", "w scaled", "new.w"),
        ]  # fmt: skip
        named = {name: f"new.{name[4:]}.{w}" if name.startswith("new.") else f"{name}.{w}"
                 for _, reads, made in lines for name in (*reads.split(), made)}  # fmt: skip
        named |= {name: name for name in _NUMBERS}
        nodes += [helper.make_node(op, [named[n] for n in reads.split()], [named[made]]) for op, reads, made in lines]
        inputs |= {f"{name}.{w}": shape for name in "wmv"}
        outputs |= {f"new.{name}.{w}": shape for name in "wmv"}
    nodes.append(helper.make_node("ReduceMean", [f"g.{min(shapes)}"], ["loss"], keepdims=0))
    return model_of(nodes, inputs, outputs, {name: np.array(each, np.float32) for name, each in _NUMBERS.items()})


_NUMBERS = {"one": 1, "b1": 0.9, "c1": 0.1, "b2": 0.999, "c2": 0.001, "small": 1e-6, "rate": 0.1}


@pytest.mark.slow
@needs_device
def test_all_updates_are_one_launch_with_the_results_of_the_cpu(tmp_path):
    """Of parameters of any sizes; that whose gradient the loss reads is another kernel."""
    path, sizes = tmp_path / "updates.onnx", [[300, 70], [2], [257, 3], [1, 5], [7, 11, 13], [4096], [2, 2]]
    onnx.save(updates({f"p{i}": shape for i, shape in enumerate(sizes)}), path)
    found = asked(path, fuse=True, numbers=True)
    assert found["kernels"] == 2 and found["donated"] == 3 * len(sizes)
    assert [made["driven"] for made in found["steps"]] == [2] * 3
    with onnx_remat.Session(path, donate=True) as session:
        loop = Loop(session, state_of(session, 0))
        for _ in range(3):
            loop.step()
        for name, value in loop.state().items():
            np.testing.assert_allclose(found["outputs"][name], value.ravel(), rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
@needs_device
def test_updates_are_joined_within_any_budget(tmp_path):
    """Gradients wait for one another only where that takes no memory: training takes what was predicted."""
    model, path = adam(layers=8, batch=2048, width=128), tmp_path / "small.onnx"
    for budget in ("100%", "60%"):
        result = onnx_remat.rewrite_model(model, budget, provider="cuda", effort=0.5)
        result.save(path, force=True)
        predicted = result.report.loop_after
        (found,) = trained(path, predicted.total)
        assert "error" not in found, found
        assert predicted.total <= result.report.budget and found["kernels"] == predicted.kernels
        for made in found["steps"]:
            assert made["peak"] <= predicted.total and made["driven"] == predicted.kernels
        apart = unjoined(path)
        assert predicted.kernels < apart.kernels - 4 and apart.live <= predicted.live <= apart.live * 1.001
        assert predicted.slab <= max(apart.slab * 1.001, predicted.live)


def unjoined(path: Path) -> Footprint:
    """What a step is predicted to take without joins."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joins, "joined", lambda ordered, found, *_: found)
        executed = as_executed(onnx.load(path), None, "all", Options(provider="cuda", run_by="loop").preparation())
        return predict(executed)


@pytest.fixture(scope="module")
def updated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The step of `update`, and its state after three steps from arrays of the host."""
    path = tmp_path_factory.mktemp("update") / "update.onnx"
    onnx.save(update(), path)
    return path, here.ask("tests.support.fake_cuda.lying", {"path": str(path), "how": "host"})["state"]


@pytest.mark.slow
@needs_device
@pytest.mark.parametrize("how", [pytest.param("session", marks=pytest.mark.slow), "loop"])
def test_arrays_of_another_library_are_trained_where_they_lie(updated, how):
    """Nothing is copied, and the session takes no memory for them."""
    path, wanted = updated
    found = here.ask("tests.support.fake_cuda.lying", {"path": str(path), "how": how})
    assert "error" not in found, found
    assert found["state"] == wanted and found["same"]
    assert found["live"] <= 512


@pytest.mark.slow
@needs_device
def test_a_session_is_used_again_without_what_was_there_before(tmp_path):
    path, model = tmp_path / "update.onnx", update()
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(70, np.float32), "scale"))
    onnx.save(model, path)
    found = here.ask("tests.support.fake_cuda.again", {"path": str(path)})
    assert found["lying"] == {"starts": True, "apart": True}
    stepped, read, fine, ran = found["shared"]
    assert fine == "" and stepped == read == ran and "the session was used since by another Loop" in ran
    assert found["left_out"] == {"differ": True, "again": True, "refused": "no value for input 'w'"}
    assert found["restored"]


REFUSED = [
    ("graph", "cuda_graph renews input"), ("odd", "input 'w' does not begin at a multiple of 16 bytes"),
    ("strided", "input 'w' is not contiguous"), ("read-only", "input 'w' is renewed in place: pass a writeable"),
    ("shared", "share memory: pass a copy of one"), ("host, shared", "share memory: pass a copy of one"),
    ("half", "'m' is not on the device"),
]  # fmt: skip


@pytest.mark.slow
@needs_device
@pytest.mark.parametrize(("how", "error"), few(REFUSED, REFUSED[:1], several=True))
def test_arrays_that_cannot_be_trained_where_they_lie_are_refused(updated, how, error):
    found = here.ask("tests.support.fake_cuda.lying", {"path": str(updated[0]), "how": how})
    assert error in found["error"]


@pytest.mark.slow
@needs_device
def test_a_step_of_any_batch_waits_no_more_and_is_captured_as_well(tmp_path):
    """Sizes are known when it is opened: no node that computes with them is left on the host."""
    path = tmp_path / "free.onnx"
    model = mlp(layers=12, width=64, dims="batch")
    result = onnx_remat.rewrite_model(model, "60%", provider="cuda", run_by="loop", effort=0.3, dims={"batch": 8192})
    result.save(path)
    job = {"path": str(path), "limits": [0, result.report.loop_after.total], "dims": {"batch": 8192}}
    for graph, most in ((False, 3), (True, 1)):
        for found in here.ask("tests.support.fake_cuda.session", job | {"graph": graph}):
            assert "error" not in found, found
            assert all(made["waits"] <= most for made in found["steps"])


@needs_device
def test_a_block_is_larger_than_a_kernel_could_fill():
    """More than 2^31 bytes: what lies beyond them is written and read as anything else."""
    job = {"bytes": 3 << 30, "offset": (3 << 30) - 4000}
    assert here.ask("tests.support.fake_cuda.block", job) == {"same": True, "zero": True, "live": [3 << 30, 0]}


@needs_device
def test_a_block_that_does_not_fit_is_refused():
    (found,) = here.ask("tests.support.fake_cuda.block", {"bytes": 1 << 40, "offset": 0}).values()
    assert found == "the CUDA device could not allocate 1099511627776 bytes: fake"


@pytest.mark.slow
@needs_device
def test_a_step_that_draws_random_numbers_is_not_captured(tmp_path):
    nodes = [
        helper.make_node("Dropout", ["w", "half", "on"], ["d"], name="drop"),
        helper.make_node("ReduceMean", ["d"], ["loss"], name="mean", keepdims=0),
    ]
    given = {"half": np.array(0.5, np.float32), "on": np.array(True)}
    onnx.save(model_of(nodes, {"w": [64, 64]}, {"loss": []}, given), tmp_path / "drop.onnx")
    job = {"path": str(tmp_path / "drop.onnx"), "limits": [0], "graph": True}
    (found,) = here.ask("tests.support.fake_cuda.session", job)
    assert found["error"].startswith("cuda_graph: node") and "the same random numbers" in found["error"]
    for job in ({"graph": None}, {"loop": True}):
        found = asked(tmp_path / "drop.onnx", **job)
        assert [(made["captures"], made["replays"]) for made in found["steps"]] == [(0, 0)] * 3


@pytest.mark.slow
@needs_device
def test_a_step_for_whose_graph_the_device_is_too_full_runs_without_one(tmp_path):
    """It is opened again, after the first session has given its weights back."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"], name="product"),
        helper.make_node("ReduceMean", ["y"], ["loss"], name="mean", keepdims=0),
    ]
    path, weights = tmp_path / "wide.onnx", {"w": np.ones((2048, 1024), np.float32)}
    onnx.save(model_of(nodes, {"x": [16, 2048]}, {"loss": []}, weights), path)
    found, captured = asked(path, graph=None, fail_capture=True), asked(path, graph=True)
    assert [(made["captures"], made["replays"]) for made in found["steps"]] == [(0, 0)] * 3
    assert found["opening"] <= captured["opening"] + SPACE < captured["opening"] + 4 * weights["w"].size


@pytest.mark.slow
@needs_device
def test_an_original_is_opened_as_well(tmp_path):
    path = tmp_path / "original.onnx"
    onnx.save(mlp(layers=3, batch=256, width=32), path)
    (found,) = trained(path, 0)
    assert found["donated"] > 0 and found["steps"][0]["waits"] <= 3


@pytest.mark.slow
@needs_device
@pytest.mark.parametrize(
    ("strategy", "row"),
    [("kSameAsRequested", "limit"), pytest.param("kNextPowerOfTwo", "held", marks=pytest.mark.slow)],
)
def test_the_arena_of_a_stock_session_is_predicted(strategy, row, step, tmp_path):
    """What the report says of an arena is what it takes on the device."""
    result = onnx_remat.rewrite_model(mlp(layers=12, batch=2048, width=32), "60%", provider="cuda", effort=0.3)
    result.save(tmp_path / "small.onnx")
    took = run.run_step(tmp_path / "small.onnx", "ORT_ENABLE_ALL", {"arena_extend_strategy": strategy}).held
    inputs = result.report.after.inputs if row == "limit" else 0
    assert took == pytest.approx(getattr(result.report.arena_after, row) + inputs, rel=0.01)


@pytest.mark.parametrize("seed", range(5))
def test_an_arena_for_workspace_follows_the_rules_of_the_other(seed):
    """Without kernels off the stream it is the arena that `memory` emulates, written a second time."""
    draw = np.random.default_rng(seed)
    asked = [[int(n) for n in draw.integers(1, 1 << 20, draw.integers(0, 3))] for _ in range(40)]
    sizes = [n for blocks in asked for n in blocks]
    numbers = iter(range(len(sizes)))
    events: list[int] = []
    for blocks in asked:
        ours = [next(numbers) for _ in blocks]
        events += [*ours, *(~i for i in ours)]
    owner = np.full(len(sizes), -1, np.int32)
    requests = arena.Requests(np.array(events, np.int32), np.array(sizes, np.int64), owner)
    wanted = arena.run(requests, doubling=False, steps=3).reserved
    found = device_scratch.reserved([device_scratch.Requests(blocks) for blocks in asked])
    assert found == pytest.approx(wanted, rel=0.1)  # of equal chunks either may take another region's
    assert device_scratch.reserved([device_scratch.Requests(blocks, off_stream=True) for blocks in asked]) == found


def test_a_device_that_is_not_there_is_named(step_file):
    with pytest.raises(onnx_remat.OnnxRematError, match="onnxruntime makes no CUDAExecutionProvider session here"):
        onnx_remat.Session(step_file, "cuda")


def test_what_is_asked_of_a_device_alone(step_file):
    with pytest.raises(UsageError, match="memory_limit and cuda_graph are for a device"):
        onnx_remat.Session(step_file, memory_limit=1 << 30)
    with pytest.raises(UsageError, match="memory_limit and cuda_graph are for a device"):
        onnx_remat.Session(step_file, cuda_graph=True)
    with pytest.raises(UsageError, match="sessions run on 'cpu' and 'cuda'"):
        onnx_remat.Session(step_file, "rocm")


@pytest.fixture
def step_file(tmp_path: Path) -> Path:
    onnx.save(mlp(layers=2, batch=8, width=4), tmp_path / "step.onnx")
    return tmp_path / "step.onnx"


@pytest.mark.slow
@needs_device
def test_values_are_moved_to_the_host_and_take_nothing_of_the_device(tmp_path):
    """It runs within what was predicted, and the host waits for no copy; a graph holds the copies like other nodes."""
    path = tmp_path / "moved.onnx"
    model = mlp(layers=12, batch=8192, width=256)
    options = {"provider": "cuda", "run_by": "loop", "effort": 0.3, "costs": "t4"}
    result = onnx_remat.rewrite_model(model, "50%", offload=True, host_bandwidth="100TB", **options)
    result.save(path)
    assert result.report.moved is not None
    (found,) = trained(path, result.report.loop_after.total)
    assert all(made["peak"] <= result.report.loop_after.total for made in found["steps"])
    assert all(made["waits"] <= 3 for made in found["steps"])
    (found,) = here.ask("tests.support.fake_cuda.session", {"path": str(path), "limits": [0], "graph": True})
    assert [made["replays"] for made in found["steps"]] == [1] * 3
    assert [made["replays"] for made in asked(path, loop=True)["steps"]] == [1] * 3


@pytest.mark.slow
def test_values_that_move_on_the_stream_of_the_kernels_are_in_no_graph(tmp_path):
    """Without kernels of ours, ONNX Runtime copies, and the host waits."""
    path = tmp_path / "moved.onnx"
    options = {"provider": "cuda", "run_by": "loop", "effort": 0.3, "costs": "t4", "fuse": False}
    model = mlp(layers=12, batch=8192, width=256)
    result = onnx_remat.rewrite_model(model, "50%", offload=True, host_bandwidth="100TB", **options)
    result.save(path)
    assert result.report.moved is not None
    job = {"path": str(path), "limits": [0], "graph": True, "fuse": False}
    (found,) = here.ask("tests.support.fake_cuda.session", job)
    assert "values are moved to the host on the kernels' stream" in found["error"]
