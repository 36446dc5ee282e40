"""A step that was exported before is traced again, but not translated, compared or measured again."""

from __future__ import annotations

import shutil

import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import torch
from onnx_remat.converters.pytorch import budgeted, export_cache, own_step, prepare
from torch import nn

from onnx_remat.converters import plan_cache
from onnx_remat.errors import ConversionError
from onnx_remat.process import forked
from tests.support.slow import few

pytestmark = pytest.mark.skipif(not forked.available(), reason="only Linux forks")

mse_loss = nn.functional.mse_loss


class Exported(Exception):
    """A step was translated."""


def kept_in(patch, path):
    for cache in (export_cache, plan_cache):
        patch.setattr(cache.ENTRIES, "folder", lambda name=cache.ENTRIES.name: path / name)


@pytest.fixture(autouse=True)
def folders(monkeypatch, tmp_path):
    kept_in(monkeypatch, tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def one_step(tmp_path_factory):
    """What is kept of `step()`, and its first loss."""
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        kept_in(patch, folder)
        made, batch = step()
        return folder, made(batch)


@pytest.fixture
def kept(one_step, folders):
    """As if `step()` had been made; its first loss."""
    folder, loss = one_step
    shutil.copytree(folder, folders, dirs_exist_ok=True)
    return loss


class Net(nn.Module):
    def __init__(self, width=64, factor=2.0, constant=1.0):
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 4)
        self.factor, self.constant = factor, constant

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)) * self.factor + torch.tensor([self.constant]))


def step(
    *, seed=0, rows=512, betas=(0.9, 0.999), budget="100% of the step", loss=mse_loss, check=True, dropout=0.0, **net
):
    torch.manual_seed(seed)
    model = nn.Sequential(Net(**net), nn.Dropout(dropout)) if dropout else Net(**net)
    optimizer = torch.optim.AdamW(model.parameters(), betas=betas)
    batch = torch.randn(rows, 16), torch.randn(rows, 4)
    return budgeted(model, loss, optimizer, batch, budget, planning=budget and {"effort": 0.1}, check=check), batch


@pytest.fixture
def no_export(monkeypatch):
    def fail(*_, **__):
        raise Exported

    def forbid():
        monkeypatch.setattr(prepare, "lower", fail)
        monkeypatch.setattr(prepare, "compare", fail)

    return forbid


@pytest.mark.parametrize("budget", few([None, "100% of the step", "900%", "20MB"], [None]))
def test_the_same_step_is_exported_once(monkeypatch, no_export, budget):
    """Initial values, another seed of them included, are inputs of the step."""
    monkeypatch.setattr(own_step, "memory", lambda _: 1_400_000)  # a heap's blocks differ by as much as so small a step
    first, batch = step(budget=budget)
    losses = [first(batch) for _ in range(3)]
    no_export()
    again, batch = step(budget=budget)
    assert [again(batch) for _ in range(3)] == losses
    assert again.torch_bytes == first.torch_bytes
    assert again.summary == first.summary
    step(budget=budget, seed=1)


def by_sum(output, target):
    return (output - target).square().sum()


CHANGES = [
    {"width": 65}, {"factor": 2.0000002}, {"constant": 1.5}, {"rows": 256}, {"betas": (0.9, 0.99)}, {"loss": by_sum},
    {"check": False}, {"dropout": 0.1},
]  # fmt: skip


@pytest.mark.parametrize("change", few(CHANGES, CHANGES[1:6:2]), ids=lambda change: next(iter(change)))
def test_another_step_is_exported(kept, no_export, change):
    no_export()
    with pytest.raises(Exported):
        step(**change)


def test_other_code_or_packages_export_again(kept, no_export, monkeypatch):
    no_export()
    monkeypatch.setattr(export_cache, "surroundings", lambda *_: "another version")
    with pytest.raises(Exported):
        step()


@pytest.mark.parametrize("name", few(["exported", "digests.json"], ["exported"]))
def test_an_entry_that_is_damaged_is_exported_again(kept, folders, name):
    (entry,) = (folders / "exports").iterdir()
    (entry / name).write_bytes(b"damaged")
    made, batch = step()
    assert made(batch) == kept


@pytest.mark.slow
def test_a_step_whose_comparison_fails_is_refused_each_time(monkeypatch, folders):
    def fail(*_, **__):
        raise ConversionError("the step is wrong")

    monkeypatch.setattr(prepare, "compare", fail)
    for _ in range(2):
        with pytest.raises(ConversionError, match="the step is wrong"):
            step()
    assert not (folders / "exports").exists()


def test_a_comparison_that_fails_ends_the_planning(monkeypatch):
    """The search for this budget would take a minute."""

    def fail(*_, **__):
        raise ConversionError("the step is wrong")

    def plan(_, budget, *, progress, **__):
        while True:
            progress("search", 0.5)

    monkeypatch.setattr(prepare, "compare", fail)
    monkeypatch.setattr(prepare, "rewrite_model", plan)
    with pytest.raises(ConversionError, match="the step is wrong"):
        step()


def fail(_):
    raise ValueError("no memory")


@pytest.mark.slow
def test_an_own_step_that_fails_refuses_a_share_of_it(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(own_step, "memory", fail)
        with pytest.raises(ConversionError, match="PyTorch's own step fails: ValueError: no memory"):
            step(budget="9000%")
        assert step()[0].torch_bytes == 0
    assert step(budget="9000%")[0].torch_bytes > 0  # a failure is not kept


def test_an_own_step_that_fails_refuses_a_step_that_was_compared_before(kept, monkeypatch):
    """Nothing else would run this batch in torch."""
    monkeypatch.setattr(own_step, "memory", fail)
    with pytest.raises(ConversionError, match="PyTorch's own step fails"):
        step()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("measured", "used"), [(12_000_000, 10_000_000), pytest.param(17_000_000, 17_000_000, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("first", few([False, True], [False]), ids=["", "after a start without a budget"])
def test_torchs_memory_is_measured_each_time_and_its_noise_changes_nothing(monkeypatch, measured, used, first):
    """Checkpointing of the model, for example, does not show in the graph."""
    if first:
        step()
    monkeypatch.setattr(own_step, "memory", lambda _: 10_000_000)
    assert step(budget="90%")[0].torch_bytes == 10_000_000
    monkeypatch.setattr(own_step, "memory", lambda _: measured)
    assert step(budget="90%")[0].torch_bytes == used
