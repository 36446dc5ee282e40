"""A device's memory, with a stand-in for the CUDA runtime: when it is waited for, read and written."""

from __future__ import annotations

import ctypes
import tracemalloc
import weakref

import numpy as np
import pytest
from onnx import helper

from onnx_remat.errors import ModelError, UsageError
from onnx_remat.session import cuda_memory, device_copies, on_device
from onnx_remat.session.training import Loop
from tests.support.graphs import model_of
from tests.support.host_as_device import MOST, DeviceSession, Held, Runtime

SIDE = [64, 64]


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()
    monkeypatch.setattr(cuda_memory, "_runtime", lambda: made)
    return made


@pytest.fixture
def session(runtime, monkeypatch):
    """A step that renews w by x, on a device; its runs are among the calls of the runtime."""
    nodes = [
        helper.make_node("Sub", ["w", "x"], ["new.w"], name="renew"),
        helper.make_node("ReduceSum", ["new.w"], ["loss"], name="sum", keepdims=0),
    ]  # fmt: skip
    with DeviceSession(model_of(nodes, {"w": SIDE, "x": SIDE}, {"new.w": SIDE, "loss": []})) as made:
        run = made._run

        def recorded():
            runtime.calls.append("run")
            run()

        monkeypatch.setattr(made, "_run", recorded)
        yield made


def ones(value=1):
    return np.full(SIDE, value, np.float32)


def calls_of(runtime, do):
    """What the runtime is asked for meanwhile."""
    runtime.calls.clear()
    do()
    return list(runtime.calls)


def test_what_another_library_still_writes_is_waited_for_before_it_is_copied(runtime, session):
    loop = Loop(session, {"w": ones(3), "x": ones()}, device="cuda")
    batch = Held(ones(2))
    calls = calls_of(runtime, lambda: loop.step({"x": batch}))
    assert calls[:2] == ["wait", "move"] and "run" in calls
    assert loop.view("w")[0, 0] == 1


def test_what_another_library_still_does_with_state_is_waited_for_before_each_use(runtime, session):
    """The session's stream waits for no other one."""
    w = Held(ones(3))
    loop = Loop(session, {"w": w, "x": Held(ones())}, device="cuda", copy=False)
    for _ in range(2):
        assert calls_of(runtime, loop.step)[:2] == ["wait", "run"]
    assert w.array[0, 0] == 1
    assert calls_of(runtime, lambda: loop.view("w"))[:2] == ["wait", "read"]
    calls = calls_of(runtime, lambda: loop.restore({"w": ones(), "x": ones()}))
    assert calls[calls.index("write") - 1] == "wait"


def test_arrays_of_a_device_are_refused_for_state_that_the_session_keeps_on_the_host(session, monkeypatch):
    """Only that memory would be renewed, and the next run would begin with the array's old value again."""
    monkeypatch.setattr(session.device, "on_host", {"w": ones(0)})
    with pytest.raises(UsageError, match="input 'w' lies on the host between steps: pass an array of the host"):
        session.run({"w": Held(ones(3)), "x": ones()})
    for w in (Held(ones(3)), ones(3)):
        with pytest.raises(UsageError, match="'w' lies in the session's own memory of the host: leave out copy=False"):
            Loop(session, {"w": w, "x": ones()}, device="cuda", copy=False)


def test_a_step_whose_state_lies_in_the_sessions_own_memory_waits_for_nothing(runtime, session):
    loop = Loop(session, {"w": ones(3), "x": ones()}, device="cuda")
    calls = calls_of(runtime, loop.step)
    assert calls[0] == "run" and "wait" not in calls


def test_a_loop_goes_on_from_a_state_that_lies_on_its_device(session):
    loop = Loop(session, {"w": ones(3), "x": ones()}, device="cuda")
    loop.restore({"w": Held(ones(5)), "x": ones()})
    loop.step()
    assert loop.view("w")[0, 0] == 4


def test_a_state_on_a_device_is_read_one_array_at_a_time_and_only_where_it_is_asked_for(runtime, session, tmp_path):
    loop = Loop(session, {"w": ones(3), "x": ones()}, device="cuda")
    assert calls_of(runtime, lambda: loop.view("w")) == ["read"]
    assert calls_of(runtime, lambda: loop.save(tmp_path / "state")) == ["read"] * 2
    loop.step()
    assert "read" not in calls_of(runtime, lambda: loop.load(tmp_path / "state"))
    assert loop.view("w")[0, 0] == 3
    assert "read" not in calls_of(runtime, lambda: loop.restore({"w": ones(7), "x": ones()}))


def test_an_array_that_is_written_is_gone_before_the_next_is_read(session, tmp_path, monkeypatch):
    loop = Loop(session, {"w": ones(3), "x": ones()}, device="cuda")
    read, made, left = session.device.read, [], []

    def recorded(name):
        left.append(sum(array() is not None for array in made))
        made.append(weakref.ref(array := read(name)))
        return array

    monkeypatch.setattr(session.device, "read", recorded)
    loop.save(tmp_path / "state")
    assert left == [0, 0]


def test_a_state_on_a_device_exists_once_on_the_host(session):
    loop = Loop(session, {"w": ones(3), "x": ones()}, device="cuda")
    loop.state()  # loads code
    tracemalloc.start()
    state = loop.state()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    taken = sum(array.nbytes for array in state.values())
    assert taken <= peak < 1.4 * taken and all(array.flags.writeable for array in state.values())


def test_a_loss_is_read_from_its_address_without_a_look_at_the_other_outputs(runtime, session, monkeypatch):
    loop = Loop(session, {"w": ones(3), "x": ones()}, device="cuda")
    asked = recorded_outputs(session, monkeypatch)
    calls = calls_of(runtime, lambda: asked.append(loop.step()))
    assert calls == ["run", "read"] and asked == [2 * 64 * 64]


def test_outputs_that_onnxruntime_allocates_are_read_beside_those_with_an_address(runtime, monkeypatch):
    nodes = [
        helper.make_node("Sub", ["w", "x"], ["new.w"], name="renew"),
        helper.make_node("ReduceSum", ["new.w"], ["loss"], name="sum", keepdims=0),
    ]  # fmt: skip
    outputs = {"c": [2], "new.w": SIDE, "loss": []}
    model = model_of(nodes, {"w": SIDE, "x": SIDE}, outputs, {"c": np.array([1, 2], np.float32)})
    with DeviceSession(model) as session:
        asked = recorded_outputs(session, monkeypatch)
        made = session.run({"w": ones(3), "x": ones()})
    assert made["c"].tolist() == [1, 2] and made["loss"] == 2 * 64 * 64 and made["new.w"][0, 0] == 2
    assert asked == ["outputs"]


def recorded_outputs(session, monkeypatch):
    """A list that grows each time the session's binding wraps all its outputs."""
    asked = []

    class Binding:
        def __getattr__(self, name):
            return getattr(binding, name)

        def get_outputs(self):
            asked.append("outputs")
            return binding.get_outputs()

    binding = session.device._binding
    monkeypatch.setattr(session.device, "_binding", Binding())
    return asked


def test_memory_is_the_first_devices_whichever_other_code_has_chosen(runtime, session):
    runtime.current = 1
    runtime.used.clear()
    loop = Loop(session, {"w": Held(ones(3)), "x": ones()}, device="cuda", copy=False)
    loop.step({"x": Held(ones())})
    loop.view("w")
    cuda_memory.Block(8)
    assert {"malloc", "set", "write", "read", "move", "wait"} <= {*runtime.calls} and runtime.used == {0}
    assert runtime.current == 1
    with pytest.raises(ModelError, match="could not allocate"):
        cuda_memory.Block(MOST + 1)
    assert runtime.current == 1


@pytest.mark.parametrize(
    ("limit", "advice"),
    [
        (0, "free memory on it, or plan with a budget= that fits"),
        (1 << 20, "raise memory_limit=, or plan with a larger cudnn_workspace=SIZE"),
    ],
)
def test_advice_on_a_full_device_names_a_limit_only_where_there_is_one(runtime, session, monkeypatch, limit, advice):
    class Full:
        def run_with_iobinding(self, _):
            raise RuntimeError("Failed to allocate memory for requested buffer")

    monkeypatch.setattr(session, "_limit", limit, raising=False)
    monkeypatch.setattr(session, "_session", Full())
    with pytest.raises(ModelError, match=f"the device is full: {advice}$"):
        session.run({"w": ones(3), "x": ones()})


def test_copies_of_a_step_that_failed_end_before_the_next_call(runtime, session, monkeypatch):
    """A copy to the host that has begun would overwrite the state that is given then."""

    class Fails:
        def run_with_iobinding(self, _):
            raise RuntimeError("CUDA failure 700")

    def run():
        with pytest.raises(ModelError, match=r"failed during the step: CUDA failure 700$"):
            session.run({"w": ones(3), "x": ones()})

    monkeypatch.setattr(session, "_session", Fails())
    assert calls_of(runtime, run)[-2:] == ["run", "wait"]


def test_a_limit_below_slab_and_inputs_is_named_as_a_setting(session):
    with pytest.raises(UsageError, match=r"memory_limit=10 is below the \d+ bytes of .*: raise it") as caught:
        on_device.scratch_limit(session._step, 10)
    assert caught.value.settings == {"memory_limit": 10}


def test_advice_on_a_full_host_fits_what_is_to_lie_there(runtime, monkeypatch):
    monkeypatch.setattr(runtime, "cudaHostAlloc", lambda *_: 2, raising=False)
    with pytest.raises(ModelError, match=r"no 1\.0 MB of memory for what is moved there: plan without offload_state="):
        cuda_memory.HostBlock(1 << 20)
    for name in ("cudaEventRecord", "cudaStreamWaitEvent", "cudaMemcpyAsync"):
        monkeypatch.setattr(runtime, name, ctypes.pythonapi.Py_GetVersion, raising=False)
    with pytest.raises(ModelError, match="for what is moved there: plan with a larger budget="):
        device_copies.enable(1, 0, [], 1 << 20)
    monkeypatch.setattr(runtime, "cudaHostAlloc", lambda *_: 46)
    with pytest.raises(ModelError, match="the CUDA device could not get 8 bytes of the host"):
        cuda_memory.HostBlock(8)


MAPS = """\
7f10-7f11 rw-p 00000000 00:00 0
7f11-7f12 r-xp 00000000 fe:01 173                        /usr/lib/libc.so.6
7f12-7f13 r-xp 00000000 fe:01 174                        {}
7ffc-7ffd rw-p 00000000 00:00 0                          [stack]
"""


@pytest.mark.parametrize(
    "path", ["/usr/lib/libcudart.so.12", "/home/me/my env/nvidia/libcudart.so.13", "/opt/a  b/libcudart-d0da.so.12.8"]
)
def test_the_cuda_runtime_is_found_wherever_it_lies(path):
    assert cuda_memory._loaded(MAPS.format(path)) == path
    assert cuda_memory._loaded(MAPS.format(path + " (deleted)")) == path  # an update replaced the file
    assert cuda_memory._loaded(MAPS.format("/usr/lib/libcudart_static.a")) == ""


def test_a_cuda_runtime_that_cannot_be_opened_is_named(monkeypatch):
    monkeypatch.setattr(cuda_memory, "_loaded", lambda _: "/nowhere/libcudart.so")
    with pytest.raises(ModelError, match=r"the CUDA runtime cannot be opened \(/nowhere/libcudart.so: .*\): restart"):
        cuda_memory._runtime.__wrapped__()
