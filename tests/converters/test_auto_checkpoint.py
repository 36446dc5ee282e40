"""`auto_checkpoint`: a budgeted step that its first batch makes."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import torch
from onnx_remat.converters.pytorch import auto_checkpoint

from onnx_remat.errors import UsageError


def network():
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 10))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def test_the_first_batch_makes_the_step_which_keeps_the_budget_and_trains_as_pytorch():
    model, optimizer = network()
    theirs = copy.deepcopy(model)
    other = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    batches = [(torch.randn(4096, 64), torch.randint(0, 10, (4096,))) for _ in range(3)]
    losses = []
    for x, target in batches:
        other.zero_grad()
        loss = torch.nn.functional.cross_entropy(theirs(x), target)
        loss.backward()
        other.step()
        losses.append(loss.item())
    options = {"memory_budget": "80% of the step", "outputs": ["output"], "check": False, "planning": {"effort": 0.5}}
    with auto_checkpoint(model, torch.nn.functional.cross_entropy, optimizer, **options) as step:
        assert step.step is None
        for name in ("summary", "outputs", "extra", "report"):
            with pytest.raises(UsageError, match="the first batch makes the step: train on one first"):
                getattr(step, name)
        assert [step(batch) for batch in batches] == pytest.approx(losses, rel=1e-5)
        assert " kept" in step.summary and step.report.extra_compute >= 0
        assert step.outputs["output"].shape == (4096, 10) and list(step.extra) == ["learning_rate"]


def test_a_step_that_cannot_be_made_leaves_the_next_call_to_try_again():
    model, optimizer = network()
    with auto_checkpoint(model, torch.nn.functional.cross_entropy, optimizer, "nonsense") as step:
        for _ in range(2):
            with pytest.raises(UsageError, match="nonsense"):
                step((torch.randn(8, 64), torch.randint(0, 10, (8,))))
        assert step.step is None
