"""`Loop` over a `Session`: state renewed where it lies, the bits of the original run plainly, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from onnx_remat import ModelError, UsageError, rewrite_model
from onnx_remat.ir.metadata import RUN_BY_KEY
from onnx_remat.session import state_file
from onnx_remat.session.session import Session
from onnx_remat.session.training import Loop, initial_state
from tests.support.graphs import feeds_for, mlp, model_of, same_bits

STEPS = 20


def plain_session(model):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def plainly(model, feeds, batches):
    """State and losses after feeding each step's new state to the next by hand."""
    session, state = plain_session(model), dict(feeds)
    names, losses = [v.name for v in session.get_outputs()], []
    for batch in batches:
        state |= batch
        made = dict(zip(names, session.run(None, state), strict=True))
        losses.append(float(made["loss"]))
        state |= {name.removeprefix("new."): made[name] for name in names if name.startswith("new.")}
    return state, losses


def batches_for(model, count=STEPS):
    return [{"x": feeds_for(model, seed)["x"]} for seed in range(1, count + 1)]


def assert_same_state(found, wanted):
    assert sorted(found) == sorted(wanted)
    assert same_bits([found[name] for name in wanted], wanted.values())


@pytest.mark.parametrize("rewritten", [False, True])
def test_twenty_steps_are_those_of_the_original_run_plainly(rewritten):
    model = mlp(layers=4, batch=256, width=64)
    feeds, batches = feeds_for(model), batches_for(model)
    step = rewrite_model(model, "80%", effort=0.5, run_by="session").model if rewritten else model
    state, losses = plainly(model, feeds, batches)
    loop = Loop(Session(step, donate=True, level="disable"), feeds)
    assert (len(loop.donated), dict(loop.not_donated)) == (4, {})
    given = {name: array.copy() for name, array in feeds.items()}
    assert [loop.step(batch) for batch in batches] == losses
    assert_same_state(loop.state(), state)
    assert same_bits(feeds.values(), given.values())  # the caller's arrays are left alone


TRAIN = """
import sys
import numpy as np
from onnx_remat.training import Loop
loop = Loop(sys.argv[1], np.load(sys.argv[2]))
loop.step({})
print([name for name in ("onnx", "google.protobuf", "numba", "networkx") if name in sys.modules])
"""


def test_training_does_not_import_onnx(tmp_path):
    """Its memory counts against the budget: onnx and protobuf would take 33 MB."""
    model = mlp()
    onnx.save(model, tmp_path / "step.onnx")
    np.savez(tmp_path / "feeds.npz", **feeds_for(model))
    files = [str(tmp_path / name) for name in ("step.onnx", "feeds.npz")]
    done = subprocess.run([sys.executable, "-c", TRAIN, *files], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def late_reader():
    """MatMul renews w, which it reads; q's renewal is an ordinary one; u has a gradient only."""
    make = helper.make_node
    nodes = [
        make("MatMul", ["w", "q"], ["wq"]), make("MatMul", ["wq", "u"], ["wqu"]), make("Sub", ["wqu", "x"], ["e"]),
        make("Mul", ["e", "e"], ["ee"]), make("ReduceMean", ["ee"], ["loss"], keepdims=0),
        make("MatMul", ["w", "small"], ["new.w"], name="turn"), make("Mul", ["e", "tiny"], ["s"]),
        make("Sub", ["q", "s"], ["new.q"]), make("Mul", ["s", "tiny"], ["grad.u"]),
    ]  # fmt: skip
    square = [64, 64]
    constants = {"small": np.eye(64, dtype=np.float32) * np.float32(0.99), "tiny": np.float32(0.01)}
    inputs = dict.fromkeys(["w", "q", "u", "x"], square)
    return model_of(nodes, inputs, {"loss": [], "new.w": square, "new.q": square, "grad.u": square}, constants)


def test_what_is_unsafe_is_copied_and_named():
    model = late_reader()
    feeds, batches = feeds_for(model), batches_for(model, 5)
    loop, plain = Loop(model, feeds), Loop(plain_session(model), feeds)
    assert dict(loop.donated) == {"new.q": "q"}
    assert dict(loop.not_donated) == {"new.w": "node 'turn' (MatMul) reads 'w' while it writes"}
    assert [loop.step(batch) for batch in batches] == pytest.approx([plain.step(batch) for batch in batches])
    for name, array in plain.state().items():
        np.testing.assert_allclose(loop.state()[name], array, rtol=1e-5, atol=1e-6)


def test_onnxruntime_s_own_session_takes_no_arrays_of_a_device():
    """Wherever it runs the step: on CUDA, too, its state is copied there from the host."""
    model = mlp(layers=2, batch=4, width=3)
    x = SimpleNamespace(__cuda_array_interface__={"shape": (4, 3), "typestr": "<f4", "data": (4096, False)})
    for device in ("cpu", "cuda"):
        with pytest.raises(UsageError, match=r"where only an onnx_remat\.Session .* pass an array of the host"):
            Loop(plain_session(model), {"x": x}, device=device)


@pytest.mark.parametrize(("run_by", "warned"), [("loop", 1), ("session", 0), (None, 0)])
def test_a_file_planned_for_a_loop_warns_in_a_plain_session(recwarn, run_by, warned):
    """It has no slab there, and no output is written over its input: training took twice the budget, silently."""
    model = mlp(layers=2, batch=64, width=64)
    if run_by:
        model.metadata_props.add(key=RUN_BY_KEY, value=run_by)
    Loop(plain_session(model), feeds_for(model))
    found = [str(each.message) for each in recwarn if each.category is UserWarning]
    assert len(found) == warned
    assert all("pass the model's path, or an onnx_remat.Session" in text for text in found)


@pytest.fixture(scope="module")
def model():
    return mlp(layers=2, batch=64, width=64)


@pytest.fixture(scope="module")
def session(model):
    return Session(model, donate=True, level="disable")


@pytest.fixture(params=["session", "onnxruntime"])
def either(request, model, session):
    return session if request.param == "session" else plain_session(model)


def test_a_view_is_live_and_cannot_be_written(model, session):
    loop = Loop(session, feeds := feeds_for(model))
    view = loop.view("w0")
    assert view.tobytes() == feeds["w0"].tobytes()
    loop.step()
    assert view.tobytes() == loop.state()["w0"].tobytes() != feeds["w0"].tobytes()
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 0
    with pytest.raises(UsageError, match="no input 'v'"):
        loop.view("v")


def test_a_look_at_state_does_not_describe_every_input(model, either, monkeypatch):
    """Types and shapes of a thousand inputs take longer than a step; only files state them."""
    loop = Loop(either, feeds := feeds_for(model))
    monkeypatch.delattr(type(loop._runner), "kinds")
    assert loop.view("w0").tobytes() == feeds["w0"].tobytes()
    loop.restore(loop.state())


def test_arrays_are_trained_themselves_where_asked(model, session):
    feeds = feeds_for(model)
    before = feeds["w0"].copy()
    loop = Loop(session, feeds, copy=False)
    loop.step()
    assert feeds["w0"].tobytes() == loop.state()["w0"].tobytes() != before.tobytes()
    shared = feeds | {"w1": feeds["w0"]}
    with pytest.raises(UsageError, match="'w0' and 'w1' share memory"):
        Loop(session, shared, copy=False)
    with pytest.raises(UsageError, match="'w1' is not a contiguous, writeable array"):
        Loop(session, feeds | {"w1": np.broadcast_to(np.float32(0), [64, 64])}, copy=False)
    with pytest.raises(UsageError, match="'w1' is not a contiguous, writeable array"):
        Loop(session, feeds | {"w1": feeds["w1"].tolist()}, copy=False)
    with pytest.raises(UsageError, match=r"copy=False needs an onnx_remat\.Session"):
        Loop(plain_session(model), feeds, copy=False)


def test_a_batch_is_copied(model, either):
    batch = feeds_for(model, 7)["x"]
    loop = Loop(either, feeds_for(model))
    loop.step({"x": batch})
    second = Loop(either, loop.state())
    wanted = second.step()
    third = Loop(either, loop.state())
    batch[:] = 0
    assert third.step() == wanted == loop.step()


@pytest.mark.parametrize(
    ("change", "loss", "message"),
    [
        ({"w1": None}, "loss", "no value for input 'w1'"),
        ({"w2": np.zeros([64, 64], np.float32)}, "loss", "the model has no input 'w2': it has x, t, w0, w1"),
        ({"w0": np.zeros([64, 32], np.float32)}, "loss", r"input 'w0' is of shape \[64, 64\], not \[64, 32\]"),
        ({"w0": np.zeros([64, 64])}, "loss", "input 'w0' is of type float32, not float64"),
        ({}, "lost", "no output 'lost' to take as the loss; did you mean 'loss'"),
        ({}, "new.w0", r"output 'new.w0' is of shape \[64, 64\]: a loss is a single number"),
    ],
)
def test_state_and_loss_are_checked_before_the_first_step(model, either, change, loss, message):
    state = {name: value for name, value in (feeds_for(model) | change).items() if value is not None}
    with pytest.raises(UsageError, match=message) as caught:
        Loop(either, state, loss)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("batch", [{"y": np.zeros(3)}, {"x": np.zeros([3, 64], np.float32)}])
def test_a_batch_that_does_not_fit_changes_nothing(model, either, batch):
    loop = Loop(either, feeds_for(model))
    with pytest.raises(UsageError, match=r"input '[xy]'"):
        loop.step(batch)
    assert loop.step() == Loop(either, feeds_for(model)).step()


def test_training_resumes_with_the_same_bits(model, either, tmp_path):
    batches = batches_for(model, 6)
    loop = Loop(either, feeds_for(model))
    losses = [loop.step(batch) for batch in batches[:3]]
    loop.save(tmp_path / "state.safetensors")
    losses += [loop.step(batch) for batch in batches[3:]]
    again = Loop(either, {name: np.zeros_like(array) for name, array in feeds_for(model).items()})
    again.load(tmp_path / "state.safetensors")
    assert [again.step(batch) for batch in batches[3:]] == losses[3:]
    assert_same_state(again.state(), loop.state())


def failing():
    """A step whose Gather fails on an index out of range, after q's renewal."""
    make = helper.make_node
    nodes = [
        make("Mul", ["q", "half"], ["new.q"]), make("Gather", ["new.q", "i"], ["g"]),
        make("ReduceMean", ["g"], ["loss"], keepdims=0),
    ]  # fmt: skip
    inputs = {"q": [64, 64], "i": (onnx.TensorProto.INT64, [1])}
    return model_of(nodes, inputs, {"loss": [], "new.q": [64, 64]}, {"half": np.float32(0.5)})


def test_a_step_that_failed_midway_is_not_gone_on_from(tmp_path):
    step = failing()
    feeds = {"q": np.ones([64, 64], np.float32), "i": np.array([3])}
    loop = Loop(step, feeds)
    assert loop.donated == {"new.q": "q"}
    loop.save(tmp_path / "s")
    with pytest.raises(ModelError, match="failed during the step"):
        loop.step({"i": np.array([64])})
    with pytest.raises(UsageError, match=r"an earlier step failed midway \(.*\): load or restore the state first"):
        loop.step({"i": np.array([3])})
    for look in (loop.state, lambda: loop.view("q"), lambda: loop.save(tmp_path / "t")):  # q is renewed, i is not
        with pytest.raises(UsageError, match=r"failed midway .*: load or restore the state first"):
            look()
    with pytest.raises(ModelError, match="cannot read"):
        loop.load(tmp_path / "t")
    loop.load(tmp_path / "s")
    assert loop.step() == 0.5
    loop.restore(feeds)
    assert [loop.step(), loop.step()] == [0.5, 0.25]


def test_a_step_that_was_interrupted_is_not_gone_on_from(model, session, monkeypatch):
    loop = Loop(session, feeds_for(model))

    def interrupt(feeds):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(session, "execute", interrupt)
        with pytest.raises(KeyboardInterrupt):
            loop.step()
    with pytest.raises(UsageError, match="failed midway"):
        loop.step()


ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array(3, np.int64), "c": np.zeros([0, 2], np.float16),
    "d": np.array([True, False]), "e": np.arange(8, dtype=np.float64)[::2],
}  # fmt: skip


def written(path, arrays):
    state_file.write_each(path, state_file.kinds_of(arrays), arrays.values())


def test_state_files_are_what_others_read(tmp_path):
    written(tmp_path / "f", ARRAYS)
    data = (tmp_path / "f").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    assert header["a"] == {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    assert data[8 + length : 8 + length + 24] == ARRAYS["a"].tobytes()
    found = {name: np.empty_like(array, order="C") for name, array in ARRAYS.items()}
    found["e"] = np.empty(4)
    state_file.read_into(tmp_path / "f", found)
    assert same_bits(found.values(), ARRAYS.values())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:4], "not a safetensors file, or is truncated"),
        (lambda data: data[:-1], "truncated"),
        (lambda data: b"\xff" * 8 + data[8:], "not a safetensors file, or is truncated"),
        (lambda data: data[:8] + b"x" + data[9:], "header is damaged"),
        (lambda data: data.replace(b'"a"', b'"A"'), "has no 'a'"),
        (lambda data: data.replace(b"F32", b"I32"), "has 'a' as I32"),
    ],
)
def test_damaged_state_files_change_nothing(tmp_path, damage, message):
    written(tmp_path / "f", ARRAYS)
    (tmp_path / "f").write_bytes(damage((tmp_path / "f").read_bytes()))
    found = {name: np.zeros(array.shape, array.dtype) for name, array in ARRAYS.items()}
    with pytest.raises((ModelError, UsageError), match=message):
        state_file.read_into(tmp_path / "f", found)
    assert not any(array.any() for array in found.values())


def test_a_type_that_the_format_lacks_is_named(tmp_path):
    with pytest.raises(UsageError, match="state 'z' of type complex64 cannot be saved"):
        written(tmp_path / "f", {"z": np.zeros(2, np.complex64)})
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("ending", [".npz", ".NPY", ".pt", ".pth", ".ckpt", ".onnx"])
def test_a_state_is_not_saved_under_the_ending_of_another_format(tmp_path, ending):
    """numpy.load would take it for damaged; files without an ending, and with unknown ones, are written."""
    arrays = {"w": np.ones(3, np.float32)}
    with pytest.raises(UsageError, match=rf"cannot save to .*{ending}: the file is a safetensors file, .* use .safet"):
        written(tmp_path / f"state{ending}", arrays)
    assert not list(tmp_path.iterdir())
    written(tmp_path / "state.v1", arrays)
    assert state_file.shapes(tmp_path / "state.v1") == {"w": (3,)}


def test_a_saved_state_keeps_the_permissions_of_the_one_before(tmp_path):
    """And its name may be as long as names can be, in bytes."""
    path = tmp_path / f"{'ü' * 120}.safetensors"
    written(path, {"w": np.ones(3, np.float32)})
    path.chmod(0o600)
    written(path, {"w": np.zeros(3, np.float32)})
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_first_state_asks_for_sizes_that_are_open(tmp_path):
    model = mlp(layers=2, batch=4, width=3)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    with pytest.raises(UsageError, match=r"'batch': SIZE"):
        initial_state(session, {})
    assert initial_state(session, {"batch": 5})[model.graph.input[0].name].shape[0] == 5


def test_batches_are_not_written_over_arrays_of_the_caller(model, session):
    feeds = feeds_for(model)
    first = feeds["x"].copy()
    loop = Loop(session, feeds, copy=False)
    batches = [feeds_for(model, seed)["x"] for seed in (7, 8)]
    losses = [loop.step({"x": batch}) for batch in batches]
    assert feeds["x"].tobytes() == first.tobytes()
    again = Loop(model, feeds_for(model))
    assert losses == pytest.approx([again.step({"x": batch}) for batch in batches], rel=1e-4)


def test_a_loop_waits_for_other_users_of_its_slab(model, session):
    loop = Loop(session, feeds_for(model))
    with session.lock:
        other = threading.Thread(target=loop.step)
        other.start()
        other.join(0.3)
        assert other.is_alive()
    other.join(30)
    assert not other.is_alive()


def test_a_header_with_an_infinite_size_is_damaged(tmp_path):
    header = b'{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 0]}}'
    (tmp_path / "s").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match="header is damaged"):
        state_file.check(tmp_path / "s", {})


def test_a_state_is_not_read_into_arrays_of_the_caller_that_no_step_renews(model, session, tmp_path):
    feeds = feeds_for(model)
    loop = Loop(session, feeds, copy=False)
    loop.step({"x": feeds_for(model, 7)["x"]})
    loop.save(tmp_path / "state")
    batch = loop.state()["x"]
    again = feeds_for(model)
    first = again["x"].copy()
    other = Loop(session, again, copy=False)
    other.load(tmp_path / "state")
    assert np.array_equal(again["x"], first) and np.array_equal(other.state()["x"], batch)
    assert np.array_equal(again["w0"], feeds["w0"])  # trained in place


def test_an_empty_state_is_renewed_beside_others():
    nodes = [
        helper.make_node("Add", ["e", "e"], ["new.e"]), helper.make_node("Sub", ["w", "g"], ["new.w"]),
        helper.make_node("ReduceSum", ["new.w"], ["loss"], keepdims=0),
    ]  # fmt: skip
    shapes = {"e": [0], "w": [64, 64], "g": [64, 64]}
    model = model_of(nodes, shapes, {"new.e": [0], "new.w": [64, 64], "loss": []})
    loop = Loop(model, {name: np.ones(shape, np.float32) for name, shape in shapes.items()})
    assert [loop.step(), loop.step()] == [0, -64 * 64]


def with_a_rate():
    nodes = [
        helper.make_node("Mul", ["w", "rate"], ["step"]), helper.make_node("Sub", ["w", "step"], ["new.w"]),
        helper.make_node("ReduceSum", ["new.w"], ["loss"], keepdims=0),
    ]  # fmt: skip
    model = model_of(nodes, {"w": [64], "rate": []}, {"new.w": [64], "loss": []}, {})
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.5), "rate"))
    return model


def test_a_state_of_any_size_with_a_default_is_gone_on_from(tmp_path):
    model = model_of([helper.make_node("ReduceSum", ["s"], ["loss"], keepdims=0)], {"s": ["n"]}, {"loss": []}, {})
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(4, np.float32), "s"))
    plain = plain_session(model)
    Loop(plain, {"s": np.ones(3, np.float32)}).save(tmp_path / "s")
    loop = Loop(plain, {})
    assert loop.step() == 4
    loop.load(tmp_path / "s")
    assert loop.step() == 3


@pytest.mark.parametrize("by", ["session", "onnxruntime"])
def test_a_state_with_or_without_what_has_a_default_is_gone_on_from(tmp_path, by):
    model = Session(with_a_rate(), donate=True) if by == "session" else plain_session(with_a_rate())
    start = {"w": np.ones(64, np.float32)}
    fed, plain = Loop(model, start), Loop(model, start)
    fed.step({"rate": np.float32(0.25)})
    fed.save(tmp_path / "fed")
    plain.step()
    plain.save(tmp_path / "plain")
    with_it, without = fed.state(), plain.state()
    assert (sorted(with_it), sorted(without)) == (["rate", "w"], ["w"])
    for go_on in (lambda loop, name, state: loop.load(tmp_path / name), lambda loop, name, state: loop.restore(state)):
        for loop in (Loop(model, start), Loop(model, start | {"rate": np.float32(0.125)})):
            go_on(loop, "fed", with_it)
            assert loop.step() == 64 * 0.75 * 0.75
            go_on(loop, "plain", without)
            assert loop.step() == 64 * 0.5 * 0.5


def test_weights_with_a_default_are_state_all_the_same(tmp_path):
    model = with_a_rate()
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(64, np.float32), "w"))
    start = {"w": np.ones(64, np.float32), "rate": np.float32(0.5)}
    loop = Loop(model, start)
    with pytest.raises(UsageError, match="no value for input 'w'"):
        loop.restore({"rate": np.float32(0.25)})
    assert loop.step() == 32


@pytest.mark.parametrize("left", ["new", "grad"])
@pytest.mark.parametrize("by", ["session", "onnxruntime"])
def test_a_default_is_no_first_value_of_what_steps_renew(by, left):
    nodes = [
        helper.make_node("Mul", ["w", "x"], ["p"]), helper.make_node("ReduceSum", ["p"], ["loss"], keepdims=0),
        helper.make_node("Neg", ["p"], [f"{left}.w"]),
    ]  # fmt: skip
    model = model_of(nodes, {"x": [64], "w": [64]}, {"loss": [], f"{left}.w": [64]})
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(64, np.float32), "w"))
    state = {"x": np.ones(64, np.float32)}
    opened = plain_session(model) if by == "onnxruntime" else model
    with pytest.raises(UsageError, match="no value for input 'w', which steps renew: pass it in `state`"):
        Loop(opened, state)
    assert sorted(initial_state(plain_session(model), {})) == ["w", "x"]
    loop = Loop(opened, state | {"w": np.ones(64, np.float32)}, rate=1)
    assert [loop.step(), loop.step()] == [64, -64 if left == "new" else 128]


def test_state_may_change_its_size():
    nodes = [
        helper.make_node("ReduceSum", ["h"], ["loss"], keepdims=0),
        helper.make_node("Identity", ["x"], ["new.h"]),
    ]  # fmt: skip
    model = model_of(nodes, {"h": ["K"], "x": ["N"]}, {"loss": [], "new.h": ["N"]})
    loop = Loop(plain_session(model), {"h": np.zeros(4, np.float32), "x": np.ones(4, np.float32)})
    assert [loop.step(), loop.step({"x": np.float32([5])}), loop.step(), loop.step()] == [0, 4, 5, 5]


def test_what_is_no_mapping_of_arrays_is_refused_as_that():
    model = mlp(layers=1, batch=8, width=16)
    loop = Loop(model, feeds_for(model))
    with pytest.raises(UsageError, match="a batch is a mapping of the inputs' names to arrays, not ndarray"):
        loop.step(np.ones((8, 16), np.float32))
    with pytest.raises(UsageError, match=r"the state is a mapping .*, not NoneType"):
        Loop(model, None)
    with Session(model) as session, pytest.raises(UsageError, match=r"what is fed is a mapping .*, not list"):
        session.run([1])
