"""One call: `budgeted` trains the module where it lies, within its budget, as torch would."""

from __future__ import annotations

import collections
import copy
import dataclasses
import io
import json
import pickle
import re
import subprocess
import sys
import types
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import numpy as np
import torch
from onnx_remat.converters.pytorch import budgeted, own_step, sizes
from onnx_remat.converters.pytorch.batch import Batch
from onnx_remat.converters.pytorch.unchanged import Facts
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from onnx_remat.errors import BudgetInfeasibleError, ConversionError, UsageError
from onnx_remat.measure import training_memory
from tests.support.slow import few
from tests.support.terminal import on_a_terminal

cross_entropy = nn.functional.cross_entropy


class Net(nn.Module):
    """Convolutions, running statistics, a frozen layer, two layers that share a weight."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.head = nn.Linear(8, 10)
        self.head.bias.requires_grad_(False)

    def forward(self, x):
        x = self.norm(self.conv(x)).tanh().mean((2, 3))
        return self.head(self.second(self.first(x).tanh()).tanh())


def net():
    torch.manual_seed(0)
    return Net()


def adamw(model):
    """Groups with rates of their own."""
    groups = [{"params": [model.conv.weight], "lr": 3e-3}, {"params": [*model.first.parameters(), model.second.bias]}]
    return torch.optim.AdamW([*groups, {"params": list(model.head.parameters()) + list(model.norm.parameters())}], 1e-3)


def batches(count, size=16):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 3, 16, 16, generator=generator), torch.randint(0, 10, (size,), generator=generator))
        for _ in range(count)
    ]


def eagerly(model, optimizer, batch):
    optimizer.zero_grad()
    loss = cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss.item()


def close(ours, theirs, tolerance=2e-5):
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=0, atol=tolerance, msg=lambda m, n=name: n + m)


def test_twenty_steps_with_a_schedule_are_torchs_own():
    ours, theirs = net(), net()
    mine, other = adamw(ours), adamw(theirs)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 20) for each in (mine, other)]
    places = {name: tensor.data_ptr() for name, tensor in ours.state_dict(keep_vars=True).items()}
    with budgeted(ours, cross_entropy, mine, batches(1)[0]) as step, warnings.catch_warnings():
        warnings.simplefilter("error")  # schedulers warn where they see no step of the optimizer
        for index, batch in enumerate(batches(20)):
            assert step(batch) == pytest.approx(eagerly(theirs, other, batch), abs=1e-4)
            for schedule in schedules:
                schedule.step()
            if index % 7 == 3:
                ours.eval()
                theirs.eval()
                torch.testing.assert_close(ours(batch[0]), theirs(batch[0]), rtol=0, atol=2e-4)
                ours.train()
                theirs.train()
    close(ours, theirs)
    assert {name: tensor.data_ptr() for name, tensor in ours.state_dict(keep_vars=True).items()} == places
    assert ours.norm.num_batches_tracked == 20
    for key, value in other.state_dict()["state"].items():
        for slot, tensor in value.items():
            torch.testing.assert_close(mine.state_dict()["state"][key][slot], tensor, rtol=0, atol=2e-5)
    eagerly(ours, mine, batches(1)[0])  # torch goes on from here
    eagerly(theirs, other, batches(1)[0])
    close(ours, theirs, 1e-4)


def test_states_that_are_loaded_are_gone_on_from():
    """Saved after two steps, loaded into another module and optimizer, and into the same after two more."""
    data = batches(6)
    ours = net()
    optimizer = adamw(ours)
    step = budgeted(ours, cross_entropy, optimizer, data[0])
    [step(batch) for batch in data[:2]]
    file = io.BytesIO()
    torch.save([ours.state_dict(), optimizer.state_dict()], file)
    after = [step(batch) for batch in data[2:4]]

    def loaded(model, optimizer):
        file.seek(0)
        model_state, optimizer_state = torch.load(file)
        model.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)

    loaded(ours, optimizer)
    assert [step(batch) for batch in data[2:4]] == after
    theirs = net()
    other = adamw(theirs)
    loaded(theirs, other)
    again = budgeted(theirs, cross_entropy, other, data[0])
    assert [again(batch) for batch in data[2:4]] == after
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()), assign=True)  # the optimizer now holds other tensors
    with pytest.raises(UsageError, match="is gone from the module or the optimizer"):
        again(data[4])


def test_parameters_that_are_not_contiguous_and_half_precision():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).half()
    model[0].weight.data = model[0].weight.data.t()
    theirs = copy.deepcopy(model)
    x, y = torch.randn(8, 6).half(), torch.randn(8, 2).half()
    mse = nn.functional.mse_loss
    step = budgeted(model, mse, torch.optim.SGD(model.parameters(), 0.1, 0.9), (x, y))
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1, 0.9)
    for _ in range(5):
        step((x, y))
        optimizer.zero_grad()
        mse(theirs(x), y).backward()
        optimizer.step()
    close(model, theirs, 5e-3)


@pytest.mark.slow
def test_averages_and_micro_batches():
    ours, theirs = net(), net()
    other = torch.optim.SGD(theirs.parameters(), 0.1)
    step = budgeted(ours, cross_entropy, torch.optim.SGD(ours.parameters(), 0.1), batches(1)[0],
                    accumulate=2, average=0.5)  # fmt: skip
    first = theirs.head.weight.detach().clone()
    for batch in batches(2):
        step(batch)
        (cross_entropy(theirs(batch[0]), batch[1]) / 2).backward()
    other.step()
    close(ours, theirs)
    torch.testing.assert_close(step.extra["state.head.weight.average"], (first + theirs.head.weight) / 2)


@pytest.mark.slow
def test_smaller_batches_share_the_file_and_larger_ones_are_refused():
    ours, theirs = net(), net()
    mine, other = adamw(ours), adamw(theirs)
    data = [*batches(2, 128), *batches(1, 5), *batches(1, 128)]
    open_dims = {"input.0": {0: "batch"}, "input.1": {0: "batch"}}
    step = budgeted(
        ours, cross_entropy, mine, data[0], "100% of the step", dynamic_dims=open_dims, planning={"effort": 1}
    )
    for batch in data:
        assert step(batch) == pytest.approx(eagerly(theirs, other, batch), abs=1e-4)
    close(ours, theirs)
    with pytest.raises(UsageError, match="batch is 129, above the example's 128"):
        step(batches(1, 129)[0])
    with pytest.raises(UsageError, match=r"axis 0 of input\.1 is 128, where batch is 5"):
        step((batches(1, 5)[0][0], data[0][1]))


class ReturnsDict(nn.Linear):
    def forward(self, x, labels):
        logits = super().forward(x)
        return {"logits": logits, "loss": cross_entropy(logits, labels)}


@pytest.mark.slow
def test_a_model_that_returns_its_loss_in_a_dict_and_a_loop_that_calls_item():
    torch.manual_seed(0)
    ours = ReturnsDict(6, 3)
    theirs = copy.deepcopy(ours)
    other = torch.optim.SGD(theirs.parameters(), 0.1)
    batch = {"x": torch.randn(8, 6), "labels": torch.arange(8) % 3}
    step = budgeted(ours, None, torch.optim.SGD(ours.parameters(), 0.1), batch)
    for _ in range(3):
        other.zero_grad()
        loss = theirs(**batch)["loss"]
        loss.backward()
        other.step()
        made = step(batch)
        assert made.item() == made.detach() == pytest.approx(loss.item())
        with pytest.raises(UsageError, match=r"already .* updated the module: leave out loss.backward\(\)"):
            made.backward()
    close(ours, theirs)


class ReturnsLossWithLabels(nn.Linear):
    """As transformers' models do it."""

    def forward(self, x, labels=None, as_tuple=False):
        logits = super().forward(x)
        loss = None if labels is None else cross_entropy(logits, labels)
        return (loss, logits) if as_tuple else types.SimpleNamespace(loss=loss, logits=logits)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, r"returned no loss: are the labels in the batch \('labels' .*\)\? Otherwise pass loss="),
        pytest.param(
            {"labels": torch.arange(8) % 3, "as_tuple": True},
            r"returned tuple, .*: return the loss alone, as .loss or",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["none", "tuple"],
)
def test_a_model_that_returns_no_loss_of_its_own(more, said):
    model = ReturnsLossWithLabels(6, 3)
    with pytest.raises(ConversionError, match=said):
        budgeted(model, None, torch.optim.SGD(model.parameters(), 0.1), {"x": torch.randn(8, 6)} | more)


def test_a_loss_that_takes_the_output_alone():
    model, batch = nn.Linear(6, 3), list(torch.randn(2, 8, 6))
    said = r"with the model's output and the last .* \(too many positional arguments\): .* pass loss=None if the model"
    with pytest.raises(ConversionError, match=said):
        budgeted(model, lambda output: output.loss, torch.optim.SGD(model.parameters(), 0.1), batch)


@pytest.mark.slow
def test_a_model_of_transformers_in_a_loop_of_dicts(tmp_path):
    """As in PyTorch, from loading to saving."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**size, **drop, num_hidden_layers=1, max_position_embeddings=8)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "first")
    ours, theirs = (transformers.BertForSequenceClassification.from_pretrained(tmp_path / "first") for _ in range(2))
    mine, other = (torch.optim.AdamW(each.parameters(), 1e-2) for each in (ours, theirs))
    texts = [{"input_ids": text, "labels": text[0] % 2} for text in torch.randint(0, 32, (12, 8))]
    loader = torch.utils.data.DataLoader(texts, 4)
    step = budgeted(ours.train(), None, mine, next(iter(loader)), outputs=["logits"])
    for batch in loader:
        other.zero_grad()
        made = theirs.train()(**batch)
        made.loss.backward()
        other.step()
        assert step(transformers.BatchEncoding(batch)) == pytest.approx(made.loss.item(), abs=1e-5)
        torch.testing.assert_close(step.outputs["logits"], made.logits, rtol=0, atol=1e-5)
    ours.save_pretrained(tmp_path / "last")
    close(transformers.BertForSequenceClassification.from_pretrained(tmp_path / "last"), theirs, 1e-4)


@pytest.mark.slow
def test_the_last_four_sizes_stay_open(monkeypatch):
    opened = []

    class Counted(sizes.Session):
        def __init__(self, *given, **settings):
            opened.append(settings["dims"]["batch"])
            super().__init__(*given, **settings)

    monkeypatch.setattr(sizes, "Session", Counted)
    ours, theirs = net(), net()
    mine, other = adamw(ours), adamw(theirs)
    open_dims = {"input.0": {0: "batch"}, "input.1": {0: "batch"}}
    step = budgeted(ours, cross_entropy, mine, batches(1, 12)[0], dynamic_dims=open_dims, check=False)
    for size in (12, 5, 12, 5, 7, 9, 11, 5, 12, 3, 5, 7):
        batch = batches(1, size)[0]
        assert step(batch) == pytest.approx(eagerly(theirs, other, batch), abs=1e-4)
    close(ours, theirs, 1e-4)
    assert opened == [12, 5, 7, 9, 11, 3, 7]  # 3 closed 7, which had not been used for longest
    step.close()


@pytest.mark.slow
def test_as_many_threads_as_pytorch_has():
    source = (
        MODEL
        + """
from onnx_remat.converters.pytorch import budgeted
from pathlib import Path
from onnx_remat.converters.pytorch import prepare, program
program._untranslated(prepare.OPSET)  # once, not in both exports
def threads():
    return {task.name for task in Path("/proc/self/task").iterdir()}
torch.set_num_threads(1)
model, optimizer, batch = made(1, 8)
before = threads()
step = budgeted(model, nn.functional.cross_entropy, optimizer, batch, check=False)
after = threads()
other = budgeted(model, nn.functional.cross_entropy, optimizer, batch, check=False, threads=3)
print(json.dumps([len(after) <= len(before), len(threads() - after)]))
"""
    )
    assert in_a_fresh_process(source.removeprefix(MODEL)) == [True, 2]  # PyTorch's own threads may end in between


def small(kind=torch.optim.SGD, seed=0, check=False, loss=nn.functional.mse_loss, **settings):
    """A module, its optimizer, a step and a batch, and a module and an optimizer that go the same way in torch."""
    torch.manual_seed(seed)
    ours = nn.Sequential(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 2))
    theirs = copy.deepcopy(ours)
    batch = torch.randn(8, 6), torch.randn(8, 2)
    mine, other = kind(ours.parameters(), **settings), kind(theirs.parameters(), **settings)
    return ours, mine, budgeted(ours, loss, mine, batch, check=check), batch, theirs, other


def in_torch(model, optimizer, batch):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
    optimizer.step()


@pytest.mark.slow
def test_rates_of_an_optimizer_that_was_loaded():
    """Loading gives it new groups."""
    ours, mine, step, batch, theirs, other = small(lr=0.1, momentum=0.9)
    for index in range(4):
        if index == 2:
            for each in (mine, other):
                each.load_state_dict(copy.deepcopy(each.state_dict()))
                each.param_groups[0]["lr"] = 1.0
        step(batch)
        in_torch(theirs, other, batch)
    close(ours, theirs)


@pytest.mark.slow
def test_memory_of_another_layout_at_the_same_address():
    ours, _, step, batch, theirs, other = small(lr=0.1)
    for _ in range(2):
        for each in (ours, theirs):
            each[0].weight.data = each[0].weight.data.t()
        step(batch)
        in_torch(theirs, other, batch)
    close(ours, theirs)
    ours[3].weight.data = ours[3].weight.data[:1]
    with pytest.raises(UsageError, match=r"3.weight' is of shape \[2, 6\]"):
        step(batch)


class Counting(torch.optim.Optimizer):
    """Its rate falls with a number in its state."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] = state.get("step", 0) + 1
                    parameter.add_(parameter.grad * (-group["lr"] / state["step"]))


@pytest.mark.slow
def test_numbers_of_an_optimizer_that_was_loaded():
    ours, mine, _, batch, theirs, other = small(Counting)
    mine.state.clear()
    in_torch(ours, mine, batch)
    in_torch(theirs, other, batch)
    step = budgeted(ours, nn.functional.mse_loss, mine, batch, check=False)
    states = [copy.deepcopy(each.state_dict()) for each in (mine, other)]
    for index in range(4):
        if index == 2:
            mine.load_state_dict(states[0])
            other.load_state_dict(states[1])
        step(batch)
        in_torch(theirs, other, batch)
    assert mine.state[ours[0].weight] == other.state[theirs[0].weight] == {"step": 3}
    close(ours, theirs)


@pytest.mark.slow
def test_decays_that_shared_a_tensor_and_do_no_more():
    def adamw(parameters):
        *first, last = parameters
        decay = torch.tensor(0.1)
        return torch.optim.AdamW([{"params": first}, {"params": [last]}], 0.1, weight_decay=decay, foreach=False)

    ours, mine, step, batch, theirs, other = small(adamw)
    for _ in range(3):
        step(batch)
        in_torch(theirs, other, batch)
        for each in (mine, other):
            each.param_groups[0]["weight_decay"] = torch.tensor(1.0)
    close(ours, theirs, 1e-4)


CHANGES = {
    "added to the optimizer": lambda model, optimizer: optimizer.add_param_group({"params": model[4].parameters()}),
    "3.weight is in another group": lambda model, optimizer: optimizer.param_groups.__setitem__(
        slice(None),
        [
            dict(optimizer.param_groups[0], params=list(model[:3].parameters())),
            dict(optimizer.param_groups[0], params=list(model[3].parameters())),
        ],
    ),
    "0.weight was unfrozen": lambda model, _: model[0].weight.requires_grad_(True),
    "0.bias was frozen": lambda model, _: model[0].bias.requires_grad_(False),
    "module '3' was replaced": lambda model, _: model.__setitem__(3, nn.Linear(6, 2)),
    "module '5' was added": lambda model, _: model.append(nn.Tanh()),
    "3.bias is gone": lambda model, _: model[3].register_parameter("bias", None),
    "2.extra was added": lambda model, _: model[2].register_parameter("extra", nn.Parameter(torch.zeros(1))),
    "3.weight is gone": lambda model, _: model[3].register_parameter("weight", nn.Parameter(torch.zeros(2, 6))),
    r"'1' is not in the mode.*get_submodule\('1'\).train\(\)": lambda model, _: model[1].eval(),
    "weight_decay .* from 0 to 0.5": lambda _, o: o.param_groups[0].update(weight_decay=torch.tensor(0.5)),
    "3.weight has hooks since": lambda model, _: model[3].weight.register_post_accumulate_grad_hook(lambda p: None),
    "SGD has hooks since": lambda _, optimizer: optimizer.register_step_post_hook(lambda *_: None),
    "lr_scale .* from 0.5 to 0": lambda _, optimizer: optimizer.param_groups[0].update(lr_scale=0.0),
    "hooks on parameter 0.bias": lambda model, _: model[0].bias.register_hook(lambda gradient: 0 * gradient),
    "hooks on module '0' are others": lambda model, _: model[0].register_forward_hook(lambda *given: 2 * given[2]),
    "hooks on the module are others": lambda model, _: model.register_full_backward_pre_hook(lambda *_: None),
    "buffer 0.mask was added": lambda model, _: model[0].register_buffer("mask", torch.ones(6)),
}  # fmt: skip


def changing():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 2), nn.BatchNorm1d(2))
    model[0].weight.requires_grad_(False)
    return model, torch.optim.SGD([{"params": model[:4].parameters(), "lr_scale": 0.5}], 0.1)


@pytest.mark.parametrize("match", CHANGES)
def test_changes_that_a_step_cannot_follow_are_refused(match):
    model, optimizer = changing()
    before = Facts.of(model, (optimizer,), {(0, 0, "lr")})
    before.check(Facts.of(model, (optimizer,), {(0, 0, "lr")}))
    CHANGES[match](model, optimizer)
    with pytest.raises(UsageError, match=match):
        before.check(Facts.of(model, (optimizer,), {(0, 0, "lr")}))


CHANGES_OF_LOSS = {
    r"the loss is not in the mode .*: call loss.eval\(\)": lambda loss: loss.train(),
    r"module '1' of the loss is not .*: call loss.get_submodule\('1'\).eval\(\)": lambda loss: loss[1].train(),
    "module '0' of the loss was replaced": lambda loss: loss.__setitem__(0, nn.Dropout(0.1)),
    "module '2' of the loss was added": lambda loss: loss.append(nn.Tanh()),
    "hooks on module '1' of the loss": lambda loss: loss[1].register_forward_hook(lambda *given: 2 * given[2]),
}


@pytest.mark.parametrize("match", CHANGES_OF_LOSS)
def test_changes_of_a_loss_that_is_a_module_are_refused(match):
    model, optimizer = changing()
    loss = nn.Sequential(nn.Dropout(), nn.Dropout()).eval()
    before = Facts.of(model, (optimizer,), set(), loss=loss)
    before.check(Facts.of(model, (optimizer,), set(), loss=loss))
    CHANGES_OF_LOSS[match](loss)
    with pytest.raises(UsageError, match=match):
        before.check(Facts.of(model, (optimizer,), set(), loss=loss))


@pytest.mark.slow
def test_a_step_sees_the_mode_of_its_loss():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.noise = nn.Dropout()

        def forward(self, made, target):
            return nn.functional.mse_loss(self.noise(made), target)

    model, loss, batch = nn.Linear(6, 2), Noisy(), (torch.randn(8, 6), torch.randn(8, 2))
    step = budgeted(model, loss, torch.optim.SGD(model.parameters(), 0.1), batch)
    step(batch)
    loss.eval()
    with pytest.raises(UsageError, match="the loss is not in the mode of the step"):
        step(batch)


def test_autocast_around_the_step_stays_as_it_was():
    model, optimizer = changing()
    without = Facts.of(model, (optimizer,), {(0, 0, "lr")})
    with torch.autocast("cpu", torch.bfloat16):
        within = Facts.of(model, (optimizer,), {(0, 0, "lr")})
    with pytest.raises(UsageError, match=r"around the step is torch\.bfloat16, and was off when it was made"):
        without.check(within)
    with pytest.raises(UsageError, match=r"around the step is off, and was torch\.bfloat16"):
        within.check(without)


def test_hooks_on_all_optimizers_are_noticed():
    model, optimizer = changing()
    before = Facts.of(model, (optimizer,), {(0, 0, "lr")})
    hook = register_optimizer_step_post_hook(lambda *_: None)
    try:
        with pytest.raises(UsageError, match="SGD has hooks since"):
            before.check(Facts.of(model, (optimizer,), {(0, 0, "lr")}))
    finally:
        hook.remove()


class Encoding(collections.UserDict):
    """As transformers' BatchEncoding, which is no dict, and no structure that torch knows."""


class OfEncoding(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, given):
        return self.layer(given["x"])


@pytest.mark.slow
def test_tensors_in_a_mapping_of_its_own_type_are_inputs():
    ours, batches = OfEncoding(), [(Encoding(x=torch.randn(8, 6)), torch.randn(8, 2)) for _ in range(3)]
    theirs = copy.deepcopy(ours)
    mine, other = (torch.optim.SGD(each.parameters(), 0.1) for each in (ours, theirs))
    step = budgeted(ours, nn.functional.mse_loss, mine, batches[0])
    for batch in batches:
        step(batch)
        in_torch(theirs, other, batch)
    close(ours, theirs)


class Boxed:
    def __init__(self, x):
        self.x = x


@dataclasses.dataclass(slots=True)
class Slotted:
    x: torch.Tensor


class Stored:
    """As torch_geometric's Data: a call yields what its store has."""

    def __init__(self, x):
        self.store = Boxed({"x": x})

    def __call__(self):
        yield from self.store.x.items()


@pytest.mark.parametrize("kind", [Boxed, Slotted, Stored, lambda x: frozenset([x]), lambda x: Boxed([(x,)])])
def test_objects_that_hold_tensors_are_refused_in_a_batch(kind):
    with pytest.raises(ConversionError, match=r"input\.0 of the batch is a .*, whose tensors would be constants"):
        Batch.of((kind(torch.ones(2)), torch.ones(2)))


class Scaling(Boxed):
    def __call__(self, y):
        return y * self.x


class Calling(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 1)

    def forward(self, x, scaling):
        return scaling(self.inner(x)).square().mean()


@pytest.mark.slow
def test_what_a_model_only_calls_is_given_by_its_method():
    model, x, scaling = Calling(), torch.ones(3, 2), Scaling(torch.ones(1))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with pytest.raises(ConversionError, match=r"a dict of them, or if the model only calls it, its method __call__$"):
        budgeted(model, None, optimizer, (x, scaling), budget=None, progress=False)
    with budgeted(model, None, optimizer, (x, scaling.__call__), budget=None, check=False, progress=False) as step:
        for _ in range(2):
            assert step((x, scaling.__call__)) == pytest.approx(model(x, scaling).item(), rel=1e-5)
            scaling.x.fill_(2.0)


@pytest.mark.parametrize("kept", [nn.Linear(1, 1), torch.sin, torch.nn, Boxed(nn.Tanh()), Slotted("a"), {1, 2}])
def test_objects_without_tensors_and_code_are_constants_of_a_batch(kept):
    batch = Batch.of((torch.ones(2), kept))
    assert batch.names == ("input.0",) and batch.like((torch.zeros(2), kept)).leaves[1] is kept


class Linked:
    """One of many objects that refer to all of them; `looked` counts looks into one."""

    __slots__ = ("all",)
    looked = 0

    @property
    def __dict__(self):
        Linked.looked += 1
        return {}


def test_an_object_in_a_batch_is_looked_into_once():
    every = [Linked() for _ in range(20)]
    for one in every:
        one.all = every
    batch = Batch.of((torch.ones(2), every[0]))
    batch.like((torch.ones(2), every[0]))
    assert Linked.looked == len(every)


class Unlike:
    """What no comparison takes."""

    def __eq__(self, other):
        raise RuntimeError("the value is ambiguous")

    __hash__ = None


@pytest.mark.parametrize("one", [float("nan"), np.float32("nan"), np.array(["a", "b"]), "a", 2, None, np.int64(2)])
def test_a_constant_of_a_batch_is_the_same_by_value(one):
    batch = Batch.of((torch.ones(2), one))
    assert batch.like((torch.ones(2), copy.deepcopy(one))).names == batch.names
    for other in (1.5, "b", np.array(["a", "b", "c"]), Unlike()):
        with pytest.raises(UsageError, match=r"in place of the constant .*: make a new step"):
            batch.like((torch.ones(2), other))


def test_a_constant_of_a_batch_is_named_in_one_line():
    one, other = (np.array([f"{word}{index}" for index in range(999)]) for word in "ab")
    with pytest.raises(UsageError, match=r"^the batch has array\(\['b0'.*: make a new step$") as raised:
        Batch.of((torch.ones(2), one)).like((torch.ones(2), other))
    assert len(str(raised.value)) < 250


@pytest.mark.parametrize("kind", [float, int, bool])
def test_arrays_of_numbers_in_a_batch_are_refused(kind):
    wanted = r"^x\.y of the batch is a numpy array, .*: give a tensor, torch\.from_numpy\(array\), or, .*tolist\(\)$"
    with pytest.raises(ConversionError, match=wanted):
        Batch.of({"x": {"y": np.ones(2, kind)}})
    with pytest.raises(ConversionError, match=wanted):
        Batch.of({"x": {"y": torch.ones(2)}}).like({"x": {"y": np.ones(2, kind)}})


def test_batches_that_a_step_cannot_take_apart_or_differentiate_are_refused():
    model = OfEncoding()
    optimizer, y = torch.optim.SGD(model.parameters(), 0.1), torch.randn(8, 2)
    with pytest.raises(ConversionError, match=r"input.0 of the batch is a Boxed, whose tensors would be constants"):
        budgeted(model, nn.functional.mse_loss, optimizer, (Boxed(torch.randn(8, 6)), y))
    made = nn.Linear(6, 6)(torch.randn(8, 6))
    with pytest.raises(ConversionError, match=r"input.0.x of the batch requires a gradient.*pass it detached"):
        budgeted(model, nn.functional.mse_loss, optimizer, ({"x": made}, y))
    step = budgeted(model, nn.functional.mse_loss, optimizer, ({"x": made.detach()}, y))
    with pytest.raises(ConversionError, match="requires a gradient"):
        step(({"x": made}, y))
    with torch.no_grad():
        step(({"x": nn.Linear(6, 6)(torch.randn(8, 6))}, y))


def test_a_step_says_that_it_cannot_be_copied():
    model = nn.Linear(6, 2)
    optimizer, batch = torch.optim.SGD(model.parameters(), 0.1), (torch.randn(8, 6), torch.randn(8, 2))
    step = budgeted(model, nn.functional.mse_loss, optimizer, batch, check=False)
    for copied in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(UsageError, match=r"^a step cannot be copied or pickled: copy the model .* make a new step"):
            copied({"step": step} if copied is copy.deepcopy else step)
    step(batch)


def test_threads_take_their_steps_one_after_the_other():
    model = nn.Linear(6, 2)
    batch = torch.randn(8, 6), torch.randn(8, 2)
    step = budgeted(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1), batch)
    with ThreadPoolExecutor(4) as pool:
        losses = [float(loss) for loss in pool.map(step, [batch] * 40)]
    assert len(set(losses)) == 40
    assert float(step(batch)) < min(losses)


@pytest.mark.parametrize("kind", few([torch.optim.Adam, torch.optim.SGD], [torch.optim.Adam]))
def test_parameters_without_a_gradient_have_no_state(kind):
    class Partly(nn.Linear):
        def __init__(self):
            super().__init__(6, 2)
            self.unread = nn.Linear(3, 3)

    ours = Partly()
    theirs = copy.deepcopy(ours)
    mine, other = kind(ours.parameters()), kind(theirs.parameters())
    batch = torch.randn(8, 6), torch.randn(8, 2)
    step = budgeted(ours, nn.functional.mse_loss, mine, batch, check=False)
    for _ in range(2):
        step(batch)
        nn.functional.mse_loss(theirs(batch[0]), batch[1]).backward()
        other.step()
        other.zero_grad()
    torch.testing.assert_close(mine.state_dict(), other.state_dict())


def test_a_step_that_was_made_in_eval_mode_says_so_in_train_mode():
    model, optimizer = changing()
    model.eval()
    before = Facts.of(model, (optimizer,), {(0, 0, "lr")})
    model.train()
    said = r"made of a module in eval mode, .*: call model.train\(\) and make a new step, or model.eval\(\) to go on"
    with pytest.raises(UsageError, match=said):
        before.check(Facts.of(model, (optimizer,), {(0, 0, "lr")}))


def fit_for_both(change, loss=lambda model: nn.functional.mse_loss):
    """Three steps here and in torch, of two modules that were changed in the same way."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    theirs = copy.deepcopy(ours)
    batch = torch.randn(8, 6), torch.randn(8, 2)
    for model in (ours, theirs):
        change(model)
    step = budgeted(ours, loss(ours), torch.optim.SGD(ours.parameters(), 0.1), batch)
    other = torch.optim.SGD(theirs.parameters(), 0.1)
    for _ in range(3):
        step(batch)
        other.zero_grad()
        loss(theirs)(theirs(batch[0]), batch[1]).backward()
        other.step()
    close(ours, theirs)


@pytest.mark.slow
def test_a_loss_that_reads_parameters():
    def penalized(model):
        return lambda made, target: (
            nn.functional.mse_loss(made, target) + sum(parameter.square().sum() for parameter in model.parameters())
        )

    fit_for_both(lambda model: None, penalized)


def test_a_loss_that_kept_a_parameter_is_refused():
    def penalized(model):
        weight = model[0].weight
        return lambda made, target: nn.functional.mse_loss(made, target) + weight.square().sum()

    with pytest.raises(ConversionError, match=r"weight.square\(\).*taken out of its module.*model.get_parameter"):
        fit_for_both(lambda model: None, penalized)


def test_a_loss_with_parameters_of_its_own_says_where_they_belong():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(10))

        def forward(self, made, target):
            return cross_entropy(made + self.shift, target)

    model, loss, batch = net(), Shifted(), batches(1)[0]
    with pytest.raises(ConversionError, match=r"at .*made \+ self.shift.*model.loss = loss\) before the optimizer"):
        budgeted(model, loss, adamw(model), batch)
    both = torch.optim.SGD([*model.parameters(), *loss.parameters()], 0.1)
    with pytest.raises(ConversionError, match=r"of shape \(10,\) that is not in the model.*model.loss = loss"):
        budgeted(model, loss, both, batch)


class Renewing(nn.Module):
    """Buffers that are renewed in every way: not read, from one another, twice, to a constant, to one value."""

    def __init__(self):
        super().__init__()
        for name in ("unread", "one", "other", "twice", "constant", "mean", "again"):
            self.register_buffer(name, torch.randn(6))
        self.register_buffer("kept", torch.zeros(64, 64))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.body = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8))
        self.head = nn.utils.spectral_norm(nn.Linear(8, 2), n_power_iterations=2)

    def forward(self, x):
        self.unread.copy_(x[0])
        self.kept = (x @ x.T).tanh()
        self.one, self.other = self.other * 0.5, self.one
        self.twice.mul_(0.9)
        y = x + self.twice * self.one
        self.twice.add_(x.mean(0))
        self.count += 1
        self.count += 2
        self.constant.fill_(0.5)
        self.mean = self.again = x.mean(0)
        return self.head(self.body(y * self.twice - self.again).tanh())


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("budget", few([None, "100% of the step"], [None]))
def test_every_buffer_is_torchs(budget):
    torch.manual_seed(0)
    model = Renewing()
    other, batch = copy.deepcopy(model), (torch.randn(64, 6), torch.randn(64, 2))
    mine, theirs = (torch.optim.SGD(each.parameters(), 0.1) for each in (model, other))
    with budgeted(model, nn.functional.mse_loss, mine, batch, budget) as step:
        for _ in range(3):
            step(batch)
            theirs.zero_grad()
            nn.functional.mse_loss(other(batch[0]), batch[1]).backward()
            theirs.step()
    for name, value in other.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (torch.zeros(0), torch.zeros(6)),
        pytest.param(torch.zeros(6, dtype=torch.long), torch.zeros(6), marks=pytest.mark.slow),
    ],
)
def test_buffers_that_change_their_form_are_refused(before, after):
    class Keeping(nn.Linear):
        def forward(self, x):
            self.kept = after + x.detach().mean(0)
            return super().forward(x)

    model = Keeping(6, 2)
    model.register_buffer("kept", before)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ConversionError, match=r"buffer kept changes from .* to torch.float32 of shape .6. in a step"):
        budgeted(model, nn.functional.mse_loss, optimizer, (torch.randn(8, 6), torch.randn(8, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", few(["AdamW", "NAdam", "RAdam", "Adadelta"], ["AdamW"]))
def test_float64_is_as_exact_as_torch(kind):
    """NAdam keeps the product of its momenta in float32 all the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    other, batch = copy.deepcopy(model), (torch.randn(16, 6).double(), torch.randn(16, 2).double())
    mine, theirs = (getattr(torch.optim, kind)(each.parameters(), 1e-2) for each in (model, other))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (mine, theirs)]
    with budgeted(model, nn.functional.mse_loss, mine, batch) as step:
        for _ in range(3):
            step(batch)
            theirs.zero_grad()
            nn.functional.mse_loss(other(batch[0]), batch[1]).backward()
            theirs.step()
            for schedule in schedules:
                schedule.step()
    for ours, answer in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, answer, rtol=1e-12, atol=1e-13)


def test_hooks_on_gradients():
    def change(model):
        model[0].weight.register_hook(lambda gradient: gradient * 0)
        model[2].register_full_backward_hook(lambda _, inputs, __: (inputs[0] * 2,))

    fit_for_both(change)


@pytest.mark.parametrize("match", ["hook on its accumulated gradient", "hooks around its step"])
def test_hooks_that_a_graph_cannot_call_are_refused(match):
    model, optimizer = changing()
    if "accumulated" in match:
        model[3].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    else:
        optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(ConversionError, match=match):
        budgeted(model, nn.functional.mse_loss, optimizer, (torch.randn(8, 6), torch.randn(8, 2)))


class Keeping(nn.Module):
    """Makes a table when it first runs, and keeps what it last read."""

    def __init__(self):
        super().__init__()
        self.linear, self.table, self.runs = nn.Linear(6, 2), None, 0

    def forward(self, x):
        self.runs += 1
        if self.table is None:
            self.table = torch.arange(6.0).cos()
            self.register_buffer("late", torch.ones(1))
        self.last = x.detach()
        return self.linear(x * self.table)


def test_what_a_module_keeps_of_a_run_is_not_left_behind():
    model = Keeping()
    batch = torch.randn(8, 6), torch.randn(8, 2)
    step = budgeted(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1), batch)
    step(batch)
    assert model.table is None and model.runs == 0 and not hasattr(model, "last") and not dict(model.named_buffers())
    torch.testing.assert_close(model(batch[0]), model(batch[0]))


@pytest.mark.parametrize("where", few(["k of group 0", "self.k", r"self.state\['all'\]"], ["self.k"]))
def test_optimizers_that_count_outside_the_state_of_parameters_are_refused(where):
    class Counter(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.1, "k": 0})
            self.k = 0

        @torch.no_grad()
        def step(self):
            if "group" in where:
                self.param_groups[0]["k"] += 1
            elif "state" in where:
                self.state["all"]["k"] = self.state["all"].get("k", 0) + 1
            else:
                self.k += 1
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(parameter.grad, alpha=-self.param_groups[0]["lr"])

    with pytest.raises(ConversionError, match=f"Counter updates {where}, which would be a constant"):
        small(Counter)


@pytest.mark.slow
@pytest.mark.parametrize("option", [{"clip_norm": -1.0}, {"clip_value": float("nan")}, {"accumulate": 2.5}])
def test_options_around_the_step_that_make_no_sense(option):
    model, optimizer = changing()
    with pytest.raises(UsageError, match=r"=.*: give"):
        budgeted(model, None, optimizer, (torch.randn(8, 6),), **option)


@pytest.mark.slow
def test_memory_that_a_step_cannot_renew_is_refused():
    model, optimizer = changing()
    batch = torch.randn(8, 6), torch.randn(8, 2)
    step = budgeted(model, nn.functional.mse_loss, optimizer, batch, check=False)
    for match, change in {
        "0.bias and 2.bias share memory": lambda: setattr(model[2].bias, "data", model[0].bias.data),
        "0.weight and 2.weight share memory": lambda: setattr(model[2].weight, "data", model[0].weight.data.t()),
        "'0.weight' is of type float32, not float64": lambda: model.double(),
    }.items():
        was = {name: parameter.data for name, parameter in model.named_parameters()}
        change()
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(UsageError, match=match):
            step(batch)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        for name, parameter in model.named_parameters():
            parameter.data = was[name]
    model.float()
    step(batch)


MODEL = """
import json, sys
import torch
from torch import nn
from onnx_remat.session.heap import trim
from onnx_remat.measure.probe import reset_peak, resident
def made(layers, rows):
    layers = [layer for _ in range(layers) for layer in (nn.Linear(128, 128), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(128, 10))
    batch = torch.randn(rows, 128), torch.randint(0, 10, (rows,))
    return model, torch.optim.AdamW(model.parameters(), 1e-3), batch
def train(model, optimizer, batch):
    for _ in range(3):
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
IN_PYTORCH = """
from onnx_remat.session.heap import give_back_large_blocks
torch.set_num_threads(1)
give_back_large_blocks()  # how much the heap keeps differs from run to run
train(*made(1, 2))  # libraries
base = resident("VmRSS") - resident("RssFile")
whole = made(8, 2048)
trim()
reset_peak()
train(*whole)
print(json.dumps(resident("VmHWM") - resident("RssFile") - base))
"""
HERE = """
from onnx_remat.converters.pytorch import budgeted
model, optimizer, batch = made(8, 2048)
before = resident("VmRSS")
step = budgeted(model, nn.functional.cross_entropy, optimizer, batch, BUDGET, planning={"effort": 1})
opened = resident("VmHWM") - before
held = sum(t.nbytes for t in [*model.parameters(), *batch])
held += sum(t.nbytes for pieces in optimizer.state.values() for t in pieces.values())
trim()
base = reset_peak()
for _ in range(3):
    step(batch)
found = {"used": resident("VmHWM") - base + held, "opened": opened, "modules": sorted(sys.modules)}
found |= {"budget": step.report.budget, "exported": step.report.covered()[0], "torch": step.torch_bytes}
print(json.dumps(found))
"""


def in_a_fresh_process(source):
    done = subprocess.run(
        [sys.executable, "-c", MODEL + source],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    return json.loads(done.stdout)


@pytest.mark.skipif(not training_memory.available(), reason="Linux alone tells the most that was resident")
def test_a_share_of_pytorchs_own_step_is_kept_and_the_exporter_leaves_nothing_behind():
    made, eager = in_a_fresh_process(HERE.replace("BUDGET", "'60%'")), in_a_fresh_process(IN_PYTORCH)
    assert made["used"] <= made["budget"] == int(0.6 * made["torch"])
    assert made["torch"] == pytest.approx(eager, rel=0.2)
    assert made["opened"] < 80e6  # onnxruntime and the session
    assert not {"onnx", "onnx_ir", "networkx", "numba", "ortools"} & {*made["modules"]}


def test_memory_that_tensors_share_counts_once_and_of_a_table_what_is_read():
    """Recurrent layers have their weights in one buffer on a GPU; a parameter may be a few rows of a table."""
    model, flat = nn.Linear(6, 8), torch.zeros(10_000)
    model.weight.data, model.bias.data = flat[:48].view(8, 6), flat[52:60]
    optimizer = torch.optim.Adam([model.weight])
    data = torch.zeros(1000, 6)
    data[0] = 1
    model(data[:1]).sum().backward()
    optimizer.step()
    request = types.SimpleNamespace(model=model, users=(optimizer,))
    held = 4 * (48 + 8) + 4 * (2 * 48 + 1)  # parameters; two averages and a count
    for batch, taken in (
        ((data[:4], data[4:8]), 2 * 96), ((data[:4], data[:4]), 96), (torch.zeros(6).expand(50, 6), 24),
        ((data[:4], model.weight.detach()), 96), ((data[:64], data[32:96]), 96 * 24), ((data[0], data[:64]), 64 * 24),
        ((data[:64], data[0]), 64 * 24), (data[:64, :2], 64 * 8), (data[:0], 0),
    ):  # fmt: skip
        assert own_step.held_before(request, Batch.of(batch)) == held + taken


@pytest.mark.slow
def test_a_share_of_the_exported_step():
    made = in_a_fresh_process(HERE.replace("BUDGET", "'60% of the step'"))
    assert made["budget"] == int(0.6 * made["exported"])


def test_a_step_that_fails_in_pytorch_has_no_memory_to_take_a_share_of():
    class Exported(nn.Linear):
        def forward(self, x):
            if not torch.compiler.is_exporting():
                raise ValueError("only exported")
            return super().forward(x)

    model, batch = Exported(4, 2), (torch.randn(8, 4), torch.randn(8, 2))
    with pytest.raises(ConversionError, match="PyTorch's own step fails: ValueError: only exported"):
        budgeted(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters()), batch, "60%", check=False)


class Autocast(Net):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


def test_bfloat16_is_refused_by_the_module_that_uses_it():
    model = Autocast()
    with pytest.raises(ConversionError, match=r"conv computes in bfloat16.*leave torch.autocast out.*provider='cuda'"):
        budgeted(model, cross_entropy, torch.optim.SGD(model.parameters(), 0.1), batches(1)[0], check=False)


EITHER_OPEN = [("input.0", "input.1"), ("input.1", "input.0")]


@pytest.mark.parametrize(("named", "other"), few(EITHER_OPEN, EITHER_OPEN[:1], several=True))
def test_an_input_that_shares_an_open_dimension_must_be_open_too(named, other):
    model, batch = nn.Sequential(nn.Linear(4, 3)), (torch.randn(16, 4), torch.randint(0, 3, (16,)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    said = f"axis 0 of {named} cannot vary, the step needs it to be 16; axis 0 of {other} is still fixed at that size"
    with pytest.raises(ConversionError, match=said):
        budgeted(model, cross_entropy, optimizer, batch, dynamic_dims={named: {0: "batch"}}, check=False)


def test_refusals_say_why():
    model, batch = net(), batches(1)[0]
    optimizer = adamw(model)

    def refused(match, kind=UsageError, **changes):
        given = {"model": model, "loss": cross_entropy, "optimizer": optimizer, "batch": batch} | changes
        with pytest.raises(kind, match=match):
            budgeted(**given)

    refused("needs an optimizer", optimizer=None)
    refused("threads=-1 is not a number of threads", threads=-1)
    refused("planning= needs a budget: pass budget=", planning={"effort": 1})
    refused("budgeted states it itself: leave 'run_by' out", budget="50%", planning={"run_by": "session"})
    batch_of_one = {"batch": (None, None)}  # would be refused later
    refused("write 50% of", budget="50", **batch_of_one)
    refused("must be text like", budget=0.5, **batch_of_one)
    refused("unknown option 'efort'", budget="50%", planning={"efort": 1}, **batch_of_one)
    refused("is not in the model", ConversionError, optimizer=adamw(net()))
    refused("is impossible", BudgetInfeasibleError, budget="1MB", check=False)
    own = r"PyTorch's own step takes .* [kM]B: budget .* is impossible.* \(budget='auto' searches for one\): try"
    refused(own, BudgetInfeasibleError, budget="5%", check=False)
    refused(r"call model.cpu\(\) first", ConversionError, model=net().to("meta"))
    step = budgeted(model, cross_entropy, optimizer, batch, check=False)

    def fails(match, batch=batch):
        with pytest.raises(UsageError, match=match):
            step(batch)

    before = copy.deepcopy(model.state_dict())
    fails("on meta: give a dense tensor on cpu", (batch[0].to("meta"), batch[1]))
    fails("sparse_coo on cpu: give a dense", (batch[0].to_sparse(), batch[1]))
    fails("has another structure than the example", batch[0])
    fails(r"input.0 has shape \[8, .*the example \[.*drop_last=True.*dynamic_dims", batches(1, 8)[0])
    with pytest.raises(UsageError, match="not 2 arguments: pass one tuple"):
        step(*batch)
    fails("is of type int64", (batch[0], batch[1].int()))
    model.eval()
    fails(r"call model.train\(\) first")
    model.train()
    optimizer.param_groups[1]["betas"] = (0.8, 0.999)
    fails(r"betas \(group 1\) changed from .*constant of the step")
    optimizer.param_groups[1]["betas"] = (0.9, 0.999)
    model.conv.weight.requires_grad_(False)
    fails("conv.weight was frozen")
    model.conv.weight.requires_grad_(True)
    optimizer.state.clear()
    fails("is gone from the module or the optimizer")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def deep():
    torch.manual_seed(0)
    layers = [layer for _ in range(2) for layer in (nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(16, 5))


@pytest.mark.slow
def test_micro_batches_and_a_scaler_within_a_budget():
    """A step that overflows is left out, its state too; counts and scale go on in the rewritten file."""
    ours, theirs = deep(), deep()
    mine, other = (torch.optim.AdamW(each.parameters(), 0.01) for each in (ours, theirs))
    scaler, own = (torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(4096, 16, generator=generator), torch.arange(4096) % 5) for _ in range(8)]
    data[3][0][:] = float("inf")  # in the second update
    step = budgeted(
        ours, cross_entropy, mine, data[0], "85% of the step", accumulate=2, scaler=scaler, planning={"effort": 0.2}
    )
    assert step.report.recomputed
    for index, (x, y) in enumerate(data):
        loss = cross_entropy(theirs(x), y)
        assert step((x, y)) == pytest.approx(loss.item(), rel=1e-4, nan_ok=True)
        own.scale(loss / 2).backward()
        if index % 2:
            before = theirs[0].weight.clone()
            own.step(other)
            own.update()
            other.zero_grad()
            assert torch.equal(before, theirs[0].weight) == (index == 3)
        assert step.extra["state.scaler.scale"].item() == own.get_scale()
        close(ours, theirs, 1e-4)
    for name, tensor in zip("ab", (mine, other), strict=True):
        assert {int(pieces["step"]) for pieces in tensor.state.values()} == {3}, name


@pytest.mark.slow
def test_dropouts_behind_frozen_layers_drop():
    """No gradient needs their masks, and ONNX Runtime leaves out a Dropout whose mask nobody reads."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Dropout(0.5), nn.Linear(64, 2))
    model[0].requires_grad_(False)
    batch = torch.randn(8, 6), torch.randn(8, 2)
    with budgeted(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.0), batch) as step:
        assert len({step(batch) for _ in range(4)}) == 4


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("quiet", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_terminal_shows_what_is_being_done(quiet):
    """And gets its line back."""
    text = on_a_terminal(f"""
import time
import torch
from onnx_remat.converters.pytorch import budgeted
def loss(made, wanted):
    if not torch.compiler.is_exporting():
        time.sleep(0.5)  # the line is drawn five times a second
    return torch.nn.functional.mse_loss(made, wanted)
model = torch.nn.Linear(4, 1)
batch = torch.randn(8, 4), torch.randn(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
budgeted(model, loss, optimizer, batch, progress={not quiet})
print("made")
""")
    shown = set(re.findall(r"([A-Za-z][\w ]*), \d+ s so far", text))
    assert shown == (set() if quiet else {"export", "compare with PyTorch"})
    assert text.rstrip().endswith("made")
