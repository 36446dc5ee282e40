"""Optimizers whose own step is traced: twenty steps beside torch, settings by group, rates as inputs, refusals."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import torch
from onnx_remat.converters.pytorch import export_training_step, initial_feeds
from torch import nn

from onnx_remat.errors import ConversionError
from onnx_remat.ort import runtime


class Lion(torch.optim.Optimizer):
    """A user's own: the sign of a blend of gradient and momentum; it counts its steps for nothing."""

    def __init__(self, parameters, lr=1e-3):
        super().__init__(parameters, {"lr": lr})
        self.keep = 0.9

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["exp_avg"] = 0, torch.zeros_like(p)
                state["step"] += 1
                p.add_((state["exp_avg"] * self.keep + p.grad * (1 - self.keep)).sign(), alpha=-group["lr"])
                state["exp_avg"].lerp_(p.grad, 0.01)


class Looking(torch.optim.SGD):
    """One that decides by a value."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad.norm() > 1:
                p.sub_(p.grad)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def loss(made, target):
    return ((made - target) ** 2).mean()


def batch():
    return torch.randn(6, 4), torch.randn(6, 2)


def twenty_steps(make, clip_norm=None):
    """Largest relative error of a parameter after twenty steps, and the step; some are clipped, some are not."""
    clips = 0
    model = net()
    optimizer = make(list(model.parameters()))
    step = export_training_step(model, batch(), loss, optimizer, clip_norm=clip_norm)
    feeds = {name: value.copy() for name, value in initial_feeds(step, model, optimizer).items()}
    for _ in range(20):
        x, y = batch()
        optimizer.zero_grad()
        loss(model(x), y).backward()
        if clip_norm is not None:
            clips += float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)) > clip_norm
        optimizer.step()
        made = runtime.outputs(step, {**feeds, "input.0": x.numpy(), "input.1": y.numpy()}, "all")
        feeds = {name: made.get(f"new.{name}", value) for name, value in feeds.items()}
    assert clip_norm is None or 0 < clips < 20
    return max(
        float(np.abs(feeds[n] - p.detach().numpy()).max() / p.detach().abs().max()) for n, p in model.named_parameters()
    ), step


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.NAdam(p, 0.01, weight_decay=0.1),
        lambda p: torch.optim.RAdam(p, 0.01),
        lambda p: torch.optim.Adamax(p, 0.01),
        lambda p: torch.optim.Adadelta(p, 0.5),
        lambda p: torch.optim.Adagrad(p, 0.05, lr_decay=0.1, initial_accumulator_value=0.1),
        lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9, centered=True),
        lambda p: torch.optim.Rprop(p, 0.01),
        lambda p: torch.optim.ASGD(p, 0.05),
        Lion,
    ],
    ids=["NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "Rprop", "ASGD", "own"],
)
def test_follows_torch_for_twenty_steps(make):
    error, step = twenty_steps(make)
    assert error < 1e-4
    assert {p.value for node in step.graph.node for p in node.metadata_props if p.key == "phase"} == {
        "forward", "backward", "optimizer",
    }  # fmt: skip
    assert not any(value.name.startswith("grad.") for value in step.graph.output)


def test_groups_have_settings_of_their_own_and_rates_that_are_tensors_are_inputs():
    rate = torch.tensor(0.01)

    def make(parameters):
        return torch.optim.NAdam([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.02}], lr=rate)

    error, step = twenty_steps(make)
    assert error < 1e-4
    assert "learning_rate" in [value.name for value in step.graph.input]


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, 0.5, 0.9), lambda p: torch.optim.Adamax(p, 0.05)])
def test_clipped_gradients_follow_torch(make):
    error, _ = twenty_steps(make, clip_norm=1.0)
    assert error < 1e-4


def test_a_step_that_decides_by_a_value_is_refused():
    with pytest.raises(ConversionError, match="Looking reads the value of a tensor"):
        export_training_step(model := net(), batch(), loss, Looking(model.parameters(), 0.1))
