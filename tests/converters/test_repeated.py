# ruff: noqa: NPY002  # numpy's own generator is what is tested
"""What Python decides again in every run of a step cannot be in a graph, and is refused by the module it is in."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import torch
from onnx_remat.converters.pytorch import budgeted, export_training_step, repeated
from torch import nn

from onnx_remat.errors import ConversionError
from tests.support.slow import few

BATCH = torch.randn(16, 8), torch.arange(16) % 4
cross_entropy = nn.functional.cross_entropy


class Block(nn.Module):
    """`forward` is given; counts its runs, and keeps a setting."""

    def __init__(self, forward):
        super().__init__()
        self.inner, self.runs, self.how = nn.Linear(8, 8), 0, forward

    def forward(self, x):
        self.runs += 1
        return self.how(self, x)


def net(forward):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Block(forward), nn.Linear(8, 4))


VARYING = {
    "random": lambda b, x: b.inner(x) if random.random() < 0.5 else x,
    "rarely": lambda b, x: b.inner(x) if random.uniform(0, 1) < 0.001 else x,
    "whole numbers": lambda b, x: b.inner(x) if random.randint(0, 6) else x,
    "a choice": lambda b, x: b.inner(x) * random.choice([1.0, 2.0, 3.0]),
    "normal": lambda b, x: b.inner(x) * random.gauss(0, 1),
    "numpy": lambda b, x: b.inner(x) if np.random.rand() < 0.5 else x,
    "numpy's values": lambda b, x: b.inner(x) + torch.from_numpy(np.random.rand(8).astype(np.float32)),
    "a generator of its own": lambda b, x: b.inner(x) * float(np.random.default_rng().random()),
    "a counter": lambda b, x: b.inner(x) if b.runs % 2 else x,
}


@pytest.mark.parametrize("name", few(VARYING, ["random", "numpy's values", "a counter"]))
def test_steps_that_differ_from_run_to_run_are_refused_by_the_module(name):
    model = net(VARYING[name])
    states = random.getstate(), np.random.get_state()[1].tolist()
    for seed in range(3):
        random.seed(seed)
        with pytest.raises(ConversionError, match=r"runs of the step differ in module '1.*' at .*test_repeated.py"):
            export_training_step(model, BATCH, cross_entropy)
    assert model[1].runs == 0
    random.setstate(states[0])


STEADY = {
    "a rate of zero": lambda b, x: x if random.random() < 0.0 else b.inner(x),
    "a rate of one": lambda b, x: b.inner(x) if np.random.rand() < 1.0 else x,
    "the mode": lambda b, x: b.inner(x) if b.training else x,
    "a count that decides nothing": lambda b, x: b.inner(x),
}


@pytest.mark.parametrize("forward", STEADY.values(), ids=STEADY)
def test_draws_and_counts_that_decide_nothing_are_no_obstacle(forward):
    export_training_step(net(forward), BATCH, cross_entropy)


def test_generators_go_on_as_they_were():
    random.seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist()
    seen = []
    for word in repeated._DRAWS:
        with repeated._drawing(word):
            seen.append((round(random.random(), 6), round(np.random.rand(), 6)))
    assert seen == [(0.0, 0.0), (1.0, 1.0), (0.333333, 0.333333)]
    assert before == (random.getstate(), np.random.get_state()[1].tolist())


def test_values_decided_on_the_host_by_torchs_own_generator_are_refused():
    for read in (bool, torch.Tensor.item):
        model = net(lambda b, x, read=read: b.inner(x) if read(torch.rand(()) < 0.5) else x)
        with pytest.raises(ConversionError, match="reads the value of a tensor"):
            export_training_step(model, BATCH, cross_entropy)


@pytest.mark.slow
def test_an_unused_layer_is_left_alone():
    """By weight decay and momentum as well, as torch leaves a parameter without a gradient."""
    ours, theirs = net(lambda b, x: x), net(lambda b, x: x)
    mine, other = (torch.optim.AdamW(m.parameters(), 0.01, weight_decay=0.1) for m in (ours, theirs))
    step = budgeted(ours, cross_entropy, mine, BATCH, accumulate=2, clip_norm=1.0, average=0.9)
    for index in range(6):
        step(BATCH)
        (cross_entropy(theirs(BATCH[0]), BATCH[1]) / 2).backward()
        if index % 2:
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
            other.step()
            other.zero_grad()
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=0, atol=2e-5)
