"""A step that was planned before opens without planning; any change of what a plan depends on plans again."""

from __future__ import annotations

import shutil

import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import torch
from onnx_remat.converters.pytorch import budgeted, prepare
from torch import nn

from onnx_remat.converters import plan_cache
from tests.support.slow import few

mse_loss = nn.functional.mse_loss


class Planned(Exception):
    """A step was planned."""


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(plan_cache.ENTRIES, "folder", lambda: tmp_path / "plans")
    return tmp_path / "plans"


def step(width=64, budget="100% of the step", seed=0, **planning):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(512, 16), torch.randn(512, 4)
    return budgeted(model, mse_loss, optimizer, batch, budget, planning={"effort": 0.1} | planning, check=False), batch


@pytest.fixture(scope="module")
def one_step(tmp_path_factory):
    """What is kept of `step()`, that step, and its first three losses."""
    folder = tmp_path_factory.mktemp("kept") / "plans"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_cache.ENTRIES, "folder", lambda: folder)
        made, batch = step()
        return folder, made, [made(batch) for _ in range(3)]


@pytest.fixture
def kept(one_step, folder):
    """As if `step()` had been made; that step, and its first three losses."""
    shutil.copytree(one_step[0], folder)
    return one_step[1:]


@pytest.fixture
def no_planning(monkeypatch):
    def fail(*_, **__):
        raise Planned

    return lambda: monkeypatch.setattr(prepare, "rewrite_model", fail)


def test_the_same_step_is_planned_once(kept, no_planning):
    """Initial values, another seed of them included, are inputs of the step."""
    first, losses = kept
    no_planning()
    again, batch = step()
    assert [again(batch) for _ in range(3)] == losses
    assert again.report == first.report
    assert again.summary == first.summary
    step(seed=1)


CHANGES = [{"width": 65}, {"budget": "99% of the step"}, {"effort": 0.2}]


@pytest.mark.parametrize("change", few(CHANGES, CHANGES[:1]))
def test_another_step_is_planned(kept, no_planning, change):
    no_planning()
    with pytest.raises(Planned):
        step(**change)


def test_other_code_or_packages_plan_again(kept, no_planning, monkeypatch):
    no_planning()
    monkeypatch.setattr(plan_cache, "surroundings", lambda: "another version")
    with pytest.raises(Planned):
        step()


@pytest.mark.parametrize("name", few(["step.onnx", "report.pickle", "digests.json"], ["step.onnx"]))
def test_an_entry_that_is_damaged_is_planned_again(kept, folder, name):
    (entry,) = folder.iterdir()
    (entry / name).unlink()
    made, batch = step()
    assert made(batch) == kept[1][0]


@pytest.mark.slow
def test_the_oldest_entries_go(folder, monkeypatch):
    monkeypatch.setattr(plan_cache.ENTRIES, "most", 2)
    for width in (64, 65, 66):
        step(width)
    assert len([*folder.iterdir()]) == 2
