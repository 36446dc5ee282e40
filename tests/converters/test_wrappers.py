"""Modules in wrappers of torch's: converted under the wrapper's own names, or refused with what to give instead."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import torch
from onnx_remat.converters.pytorch import budgeted, export_training_step
from torch import nn

from onnx_remat.errors import ConversionError
from tests.support.slow import few

BATCH = torch.randn(16, 8), torch.arange(16) % 4
cross_entropy = nn.functional.cross_entropy


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def trained(model):
    """Losses of three steps, and parameters after them."""
    with budgeted(model, cross_entropy, torch.optim.SGD(model.parameters(), 0.1, 0.9), BATCH) as step:
        return [step(BATCH) for _ in range(3)], list(model.parameters())


@pytest.fixture(scope="module")
def plain():
    return trained(net())


@pytest.mark.parametrize("inside", few([False, True], [True]), ids=["around", "inside"])
@pytest.mark.parametrize("wrap", few([nn.DataParallel, torch.compile], [nn.DataParallel]))
def test_wrappers_that_change_no_number(wrap, inside, plain):
    losses, parameters = trained(nn.Sequential(wrap(net())) if inside else wrap(net()))
    assert losses == plain[0]
    for ours, theirs in zip(parameters, plain[1], strict=True):
        assert torch.equal(ours, theirs)


def script(model):
    return torch.jit.script(model)


def traced(model):
    return torch.jit.trace(model, BATCH[0])


@pytest.fixture
def distributed(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inside", few([False, True], [True]), ids=["around", "inside"])
@pytest.mark.parametrize(
    ("wrap", "match"),
    [
        (script, "is TorchScript, .*: give the module it was made from"),
        pytest.param(traced, "is TorchScript, .*: give the module it was made from", marks=pytest.mark.slow),
        (nn.parallel.DistributedDataParallel, "is a DistributedDataParallel, .*: give its .module"),
    ],
    ids=["script", "trace", "ddp"],
)
def test_wrappers_that_cannot_be_traced_are_refused(wrap, match, inside, distributed):
    model = nn.Sequential(wrap(net())) if inside else wrap(net())
    match = ("module '0' " if inside else "the model ") + match
    with pytest.raises(ConversionError, match=match):
        export_training_step(model, BATCH, cross_entropy)
    with pytest.raises(ConversionError, match=match):
        budgeted(model, cross_entropy, torch.optim.SGD(model.parameters(), 0.1), BATCH)
