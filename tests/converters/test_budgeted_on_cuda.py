"""`budgeted` of a module on a GPU: on the fake device, and how tensors move to the host and back."""

from __future__ import annotations

import copy
import types

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import torch
from onnx_remat.converters.pytorch import budgeted, devices, own_step, sizes
from onnx_remat.converters.pytorch.outside import check_lasting, in_memory, lasting, memory
from torch import nn

from onnx_remat.errors import ConversionError, ModelError, UsageError
from onnx_remat.messages import Setting, Word
from onnx_remat.ort import runtime
from onnx_remat.process import worker
from onnx_remat.session.session import Session
from tests.support.fake_cuda import here
from tests.support.slow import few

needs_device = pytest.mark.skipif(bool(here.why_not()), reason=here.why_not())


def asked(how: str, budget: str | None = None):
    found = here.ask("tests.support.fake_cuda.module", {"how": how, "budget": budget})
    assert "error" not in found, found
    return found


WAYS = [("device", None), ("host", "200% of the step"), ("accumulate", None)]


@needs_device
@pytest.mark.parametrize("way", few(WAYS, WAYS[1:2]))
def test_a_module_on_a_device_is_trained_where_it_lies(way):
    """Parameters, buffers and state are PyTorch's own, AdamW's counts included, and no second copy of them exists."""
    found = asked(*way)
    assert found["kernels"] == found["nodes"] - 1  # all but the sum of the loss: the fake device computes those alone
    assert found["state"].keys() == found["torch"].keys() and "step of bias" in found["state"]
    for name, value in found["torch"].items():
        np.testing.assert_allclose(found["state"][name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert found["devices"] == ["cuda:0"] and found["live"] < (found["report"] or 4 * found["value"])
    assert not found["holds"]  # a context of half a gigabyte would stay there


CUDA = torch.device("cuda", 0)


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


def test_a_module_is_on_one_device_that_sessions_run_on():
    model = perceptron()
    assert devices.device_of(model) == devices.device_of(nn.Identity()) == devices.HOST
    with pytest.raises(ConversionError, match=r"0\.weight is on meta: a step runs on the CPU or on CUDA"):
        devices.device_of(perceptron().to("meta"))
    model[3].to("meta")
    with pytest.raises(
        ConversionError, match=r"0\.weight is on cpu and 3\.weight on meta: move the module to one, model.to\(cpu\)"
    ):
        devices.device_of(model)


def test_tensors_are_on_the_host_in_the_block_and_on_their_devices_again_after_an_error(monkeypatch):
    model, where = perceptron(), {}
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(4, 6)).sum().backward()
    optimizer.step()
    tensors = devices.own_tensors(model, nn.CrossEntropyLoss(torch.ones(3)), [optimizer])
    assert {
        "0.weight",
        "1.running_mean",
        "exp_avg of 3.bias",
        "step of 0.weight",
        "the loss's weight",
    } <= tensors.keys()
    monkeypatch.setattr(devices, "_move", lambda tensor, device: where.update({id(tensor): device}))

    def export():
        with devices.on_host(tensors, CUDA):
            assert set(where.values()) == {devices.HOST} and len(where) == len(tensors)
            where.clear()
            raise KeyError

    with pytest.raises(KeyError):
        export()
    assert where == {id(tensor): tensor.device for tensor in tensors.values()}


def test_moving_keeps_a_tensor_and_its_gradient():
    weight = nn.Parameter(torch.rand(3))
    weight.grad = torch.ones(3)
    before = weight.detach().clone()
    devices._move(weight, devices.HOST)
    assert torch.equal(weight, before) and torch.equal(weight.grad, torch.ones(3)) and weight.is_leaf


def test_tensors_that_share_memory_are_not_moved():
    """Afterwards each would have its own."""
    model = nn.Module()
    model.register_buffer("whole", torch.zeros(4, 4))
    model.register_buffer("part", model.whole[1])
    with (
        pytest.raises(UsageError, match="whole and part share memory"),
        devices.on_host(dict(model.named_buffers()), CUDA),
    ):
        pass


@pytest.mark.filterwarnings("ignore:User provided device_type")
def test_autocast_of_a_device_has_its_type_on_the_host():
    one = torch.ones(2, 2)
    cast = torch.autocast("cuda", torch.bfloat16)
    cast._enabled = True  # without CUDA, torch switches it off
    with devices._autocast_on_host():
        with cast, torch.autocast("cpu", enabled=False), copy.copy(cast):
            assert (one @ one).dtype == torch.bfloat16
            softmax, normal = (one @ one).softmax(-1), nn.functional.layer_norm(one @ one, (2,))
            assert softmax.dtype == normal.dtype == (one @ one).sum().dtype == torch.float32  # as on CUDA, not the host
        assert (one @ one).dtype == torch.float32 and cast.device == "cuda"
    with cast:
        assert (one @ one).dtype == torch.float32


def test_batches_keep_their_structure():
    x = torch.rand(2)
    assert devices.batch_on(x, devices.HOST) is x
    assert devices.batch_on({"a": x, "b": [x, 3]}, devices.HOST) == {"a": x, "b": [x, 3]}
    assert devices.batch_on([x, (x, None)], devices.HOST) == (x, (x, None))


@pytest.fixture
def on_cuda(monkeypatch):
    """A module of the host is said to be on a device."""
    monkeypatch.setitem(budgeted.__globals__, "device_of", lambda model: CUDA)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"dynamic_dims": {"input.0": {0: "batch"}}}, "dynamic_dims.*on a device all batches have one size"),
        ({"budget": "60%", "planning": {"provider": "cpu"}}, "budgeted states it itself: leave 'provider' out"),
        ({"budget": "1GB"}, "makes no CUDAExecutionProvider session here: install onnxruntime-gpu"),
    ],
)
def test_what_a_device_cannot_do_is_refused_at_once(on_cuda, torch_cuda, given, error):
    model = perceptron()
    batch = torch.rand(4, 6), torch.tensor([0, 1, 2, 0])
    with pytest.raises(Exception, match=error):
        budgeted(model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters()), batch, **given)


@pytest.fixture
def torch_cuda(monkeypatch):
    """What torch says of a device."""
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 5_000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 1_255_000)


def test_the_process_that_looks_for_a_device_plans_for_it_too(on_cuda, torch_cuda, monkeypatch):
    """Its start takes seconds; while PyTorch's own step is measured, none holds memory of the device."""
    did = []

    def carried_out(*_):
        did.append("plan")
        raise ConversionError("enough")

    def measured(*_):
        did.append("measure")

    monkeypatch.setitem(budgeted.__globals__, "carried_out", carried_out)
    monkeypatch.setitem(budgeted.__globals__, "measured_on_device", measured)
    monkeypatch.setattr(runtime, "check_device", lambda _: did.append("look"))
    monkeypatch.setattr(worker, "leave_device", lambda: did.append("leave"))
    model = perceptron()
    batch = torch.rand(4, 6), torch.tensor([0, 1, 2, 0])
    with pytest.raises(ConversionError, match="enough"):
        budgeted(model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters()), batch, "60%")
    assert did == ["measure", "look", "plan", "leave"]


class Counting(nn.Module):
    """Assigns a buffer, counts, keeps its output, and trains but a part of itself."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.calls = perceptron(), nn.Linear(6, 6), 0
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        self.calls, self.seen = self.calls + 1, 0.9 * self.seen + x.detach().mean(0)
        self.last = self.outer(x)
        return self.inner(self.last)


def test_a_step_of_pytorchs_own_leaves_modules_as_they_were(torch_cuda):
    model = Counting()
    model.outer.weight.grad = torch.ones(6, 6)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.inner.parameters())
    request = types.SimpleNamespace(model=model, loss=nn.functional.cross_entropy, users=(optimizer,))
    batch = torch.rand(4, 6), torch.tensor([0, 1, 2, 0])
    assert not own_step.measured_on_device(request, batch, devices.HOST).result().error
    assert model.calls == 0 and not hasattr(model, "last") and torch.equal(model.outer.weight.grad, torch.ones(6, 6))
    assert model.outer.bias.grad is None and not optimizer.state
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_step_of_pytorchs_own_leaves_everything_as_it_was(torch_cuda):
    """Parameters, running statistics, optimizers, gradients and random numbers; also where it fails."""
    model = perceptron()
    for count in (0, 1):
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(count):
            model(torch.rand(4, 6)).sum().backward()
            optimizer.step()
        model[0].weight.grad = torch.ones(8, 6)
        before = [
            {n: t.clone() for n, t in devices.own_tensors(model, None, [optimizer]).items()},
            torch.get_rng_state(),
        ]
        batch = torch.rand(4, 6), torch.tensor([0, 1, 2, 0])
        before[1] = torch.get_rng_state()
        for loss, wanted in ((nn.functional.cross_entropy, 1_300_000), (lambda *_: 1 / 0, 0)):
            request = types.SimpleNamespace(model=model, loss=loss, users=(optimizer,))
            own = own_step.measured_on_device(request, batch, devices.HOST).result()
            assert own.bytes == wanted and ("ZeroDivisionError" in own.error) == (not wanted)
            after = devices.own_tensors(model, None, [optimizer])
            assert after.keys() == before[0].keys()
            assert all(torch.equal(after[name], value) for name, value in before[0].items())
            assert torch.equal(torch.get_rng_state(), before[1])
            assert torch.equal(model[0].weight.grad, torch.ones(8, 6))
            assert (model[3].weight.grad is None) == (not count)


def test_a_part_of_what_moves_is_refused():
    """Each run of the step makes it again, in memory that the loss no longer has."""
    loss = nn.CrossEntropyLoss(torch.ones(3))
    part = in_memory("a tensor of the loss", loss.weight[:2])
    with pytest.raises(ConversionError, match="is a part of the loss's weight, which moves to the device"):
        check_lasting({"outside.0": part}, {"the loss's weight": loss.weight})
    whole = lasting("a tensor of the loss", loss.weight, loss.weight.detach())
    check_lasting({"outside.0": whole}, {"the loss's weight": loss.weight})
    loss.weight.data = loss.weight.data.clone()
    assert memory(whole.renewed().alias) == memory(loss.weight) != memory(whole.alias)


@pytest.fixture(scope="module")
def made():
    """A step on the host, its module, an optimizer whose steps count on the device, and a batch."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))  # no Dropout: the loss falls
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    batch = torch.rand(4, 6), torch.tensor([0, 1, 2, 0])
    with budgeted(model, nn.CrossEntropyLoss(), optimizer, batch, progress=False) as step:
        yield step, model, optimizer, batch


@pytest.mark.slow
def test_an_optimizer_with_steps_on_the_device_is_traced_on_the_host(made):
    step, _, _, batch = made
    before = float(step(batch))
    assert [step(batch) for _ in range(30)][-1] < before


def test_a_first_step_for_which_the_device_is_too_small_leaves_everything_as_it_was(made, monkeypatch):
    """And says what to give `budgeted`, which has no memory_limit."""
    step, model, optimizer, batch = made
    run, before = Session._run, float(step(batch))
    monkeypatch.setattr(step, "_undoes", True)
    state = {name: tensor.clone() for name, tensor in devices.own_tensors(model, None, [optimizer]).items()}

    def fails(session):
        run(session)
        more = Setting("memory_limit"), Setting("cudnn_workspace", Word("SIZE"))
        raise ModelError("the device is full: raise {}, or plan with a larger {}", *more)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "_run", fails)
        with pytest.raises(ModelError) as caught:
            step(batch)
    wanted = "raise budget=, or plan with a larger planning={'cudnn_workspace': SIZE}"
    assert str(caught.value) == f"the device is full: {wanted}; module and optimizer are as they were before"
    after = devices.own_tensors(model, None, [optimizer])
    assert all(torch.equal(after[name], value) for name, value in state.items())
    assert step(batch) < before


@pytest.mark.parametrize("error", [ModelError, KeyboardInterrupt])
@pytest.mark.parametrize("works", [True, False])
def test_a_step_goes_on_after_a_failed_first_one_only_if_all_is_as_it_was(made, monkeypatch, works, error):
    """After some errors of CUDA's a device does nothing more: the first is shown, and the next step refused."""
    step, _, _, batch = made
    before = float(step(batch))
    monkeypatch.setattr(step, "_undoes", True)
    monkeypatch.setattr(step, "_failed", "")

    def fails(_):
        raise error("CUDA failure 700")

    def does_nothing_more(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(Session, "_run", fails)
        if not works:
            patch.setattr(torch.Tensor, "copy_", does_nothing_more)
        with pytest.raises(error, match="CUDA failure 700"):
            step(batch)
    if works:
        assert step(batch) < before
    else:
        with pytest.raises(UsageError, match=rf"no longer usable \({error.__name__}\)"):
            step(batch)


def test_a_limit_that_a_session_refuses_is_the_budget(made, monkeypatch):
    step, *_ = made

    def refuses(*_, **__):
        raise UsageError("{} is below: raise it", Setting("memory_limit", 10))

    monkeypatch.setattr(sizes, "Session", refuses)
    with pytest.raises(UsageError, match=r"^budget=10 is below: raise it$"):
        step._sessions._opened({}, None)
