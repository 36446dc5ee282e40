"""Tensors that a step reads and the module does not hold: read again in every step, or refused, never silently old."""

from __future__ import annotations

import copy
import functools
import gc
import warnings

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import torch
from onnx_remat.converters.pytorch import budgeted, export_training_step
from torch import nn

from onnx_remat.errors import ConversionError, UsageError
from tests.support.slow import few

F = nn.functional


def network(inputs=6):
    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, 3))


def example(size=16):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator)


class Reading:
    """A loss that reads a tensor, and what changes that tensor between steps."""

    def __init__(self):
        self.tensor = torch.ones(3)
        self.rows = torch.ones(3, 2)
        self.numbers = np.ones(3, np.float32)

    def __call__(self, made, target):
        return F.cross_entropy(made * self.read(), target)

    def change(self):
        self.tensor.mul_(torch.tensor([1.0, 2.0, 0.5]))
        self.rows.add_(torch.tensor([[1.0], [2.0], [3.0]]))
        self.numbers *= np.array([3.0, 0.5, 1.0], np.float32)


class Plain(Reading):
    def read(self):
        return self.tensor


class Assigned(Reading):
    def read(self):
        return self.tensor

    def change(self):
        self.tensor.data = self.tensor.data * torch.tensor([1.0, 2.0, 0.5])


class WithoutHistory(Reading):
    def read(self):
        return self.tensor.data


class Strided(Reading):
    def __init__(self):
        super().__init__()
        self.column = self.rows[:, 1]

    def read(self):
        return self.column


class OfNumpy(Reading):
    def read(self):
        return torch.from_numpy(self.numbers)


class InHalf(Reading):
    def __init__(self):
        super().__init__()
        self.tensor = self.tensor.bfloat16()

    def read(self):
        return self.tensor.float()


class Teacher(Reading):
    """An average of weights that follows the student."""

    def __init__(self, frozen):
        super().__init__()
        self.teacher = network().requires_grad_(not frozen)
        self.x, _ = example()

    def read(self):
        with torch.no_grad():
            return self.teacher(self.x).softmax(1)

    @torch.no_grad()
    def change(self):
        for parameter in self.teacher.parameters():
            parameter.mul_(0.5)


LOSSES = {
    "plain": Plain, "assigned": Assigned, "data": WithoutHistory, "strided": Strided, "numpy": OfNumpy, "half": InHalf,
    "frozen teacher": lambda: Teacher(frozen=True), "teacher": lambda: Teacher(frozen=False),
}  # fmt: skip


@pytest.mark.parametrize("kind", few(LOSSES, ["plain", "teacher"]))
def test_steps_read_what_changed(kind):
    torch.manual_seed(0)
    ours = network()
    theirs, loss, batch = copy.deepcopy(ours), LOSSES[kind](), example()
    other = torch.optim.SGD(theirs.parameters(), 0.1)
    with budgeted(ours, loss, torch.optim.SGD(ours.parameters(), 0.1), batch) as step:
        for _ in range(3):
            other.zero_grad()
            expected = loss(theirs(batch[0]), batch[1])
            expected.backward()
            other.step()
            assert step(batch) == pytest.approx(expected.item(), rel=1e-5)
            loss.change()


@pytest.mark.slow
def test_tensors_of_modules_that_are_no_buffers():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.scale = network(), torch.ones(3)

        def forward(self, x):
            return self.inner(x) * self.scale

    model, batch = Scaled(), example()
    step = budgeted(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.0), batch)
    for factor in (1.0, 2.0):
        model.scale.mul_(factor)
        assert step(batch) == pytest.approx(F.cross_entropy(model(batch[0]), batch[1]).item(), rel=1e-5)
    model.scale = torch.zeros(3)
    gc.collect()
    with pytest.raises(UsageError, match=r"scale of a Scaled of shape \[3\], read at .* was replaced.*tensor.copy_"):
        step(batch)
    assert model.inner[0].weight.isfinite().all()


@pytest.mark.slow
def test_hooks_that_read_a_mask():
    model, batch, mask = network(), example(), torch.ones(8, 6)
    model[0].weight.register_hook(lambda gradient: gradient * mask)
    step = budgeted(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), batch)
    step(batch)
    mask.zero_()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step(batch)
    assert torch.equal(before[0], model[0].weight) and not torch.equal(before[2], model[2].weight)


@pytest.mark.slow
def test_a_variable_that_holds_another_tensor():
    model, batch, weights = network(), example(), torch.ones(3)
    step = budgeted(
        model, lambda made, target: F.cross_entropy(made, target, weights), torch.optim.SGD(model.parameters(), 0.1),
        batch,
    )  # fmt: skip
    step(batch)
    before = model[0].weight.detach().clone()
    weights = torch.tensor([1.0, 2.0, 3.0])
    with pytest.raises(UsageError, match=r"^tensor weights of shape \[3\], read at .* was replaced .*copy_"):
        step(batch)
    assert torch.equal(before, model[0].weight)


class OfRow(Reading):
    def __init__(self):
        super().__init__()
        self.table = np.ones((2, 3), np.float32)

    def read(self):
        return torch.from_numpy(self.table[1])

    def replaced(self):
        self.table = np.full((2, 3), 2, np.float32)


class OfNumbers(OfNumpy):
    def replaced(self):
        self.numbers = np.full(3, 2, np.float32)


class OfTensorsNumbers(OfNumpy):
    def __init__(self):
        super().__init__()
        self.numbers = self.tensor.numpy()

    def replaced(self):
        self.tensor.data = torch.full((3,), 2.0)
        self.numbers = self.tensor.numpy()


@pytest.mark.slow
@pytest.mark.parametrize("kind", few([OfRow, OfNumbers, OfTensorsNumbers], [OfNumbers]))
def test_memory_that_another_takes_the_place_of(kind):
    """The first was read in every step."""
    model, batch, loss = network(), example(), kind()
    steps = [budgeted(model, loss, torch.optim.SGD(model.parameters(), 0.1), batch) for _ in range(2)]
    for step in steps:
        step(batch)
    before = model[0].weight.detach().clone()
    loss.replaced()
    for step in steps:
        with pytest.raises(UsageError, match=r"of shape \[3\], read at .* was replaced .*copy_"):
            step(batch)
    assert torch.equal(before, model[0].weight)


@pytest.mark.slow
def test_a_cache_outside_the_model():
    @functools.cache
    def mask(size):
        return torch.ones(size, size).tril()

    class Masked(nn.Linear):
        def forward(self, x):
            return super().forward(x @ mask(x.shape[1]))

    torch.manual_seed(0)
    model = Masked(6, 3)
    refused(F.cross_entropy, r"read at .*kept outside the model.*empty the cache and run the model once", model)
    mask.cache_clear()
    other, (x, target) = copy.deepcopy(model), example()
    expected = F.cross_entropy(other(x), target)
    step = budgeted(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), (x, target))
    assert step((x, target)) == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.slow
def test_memory_in_the_defaults_of_a_function_lasts():
    def loss(made, target, numbers=np.ones(3, np.float32)):  # noqa: B008  # lasts as long as the function
        return F.cross_entropy(made, target, torch.from_numpy(numbers))

    model, batch = network(), example()
    gc.collect()  # the tuple of defaults is then untracked
    step = budgeted(model, loss, torch.optim.SGD(model.parameters(), 0.1), batch)
    gc.collect()
    assert step(batch) > step(batch)


@pytest.mark.slow
def test_memory_that_nothing_of_python_holds():
    model, kept = network(), bytearray(np.ones(3, np.float32).tobytes())

    def loss(made, target):
        return F.cross_entropy(made * torch.frombuffer(kept, dtype=torch.float32), target)

    with pytest.raises(ConversionError, match=r"read at .* is made in each run from memory that no tensor .*: make it"):
        budgeted(model, loss, torch.optim.SGD(model.parameters(), 0.1), example())


@pytest.mark.slow
def test_another_type_in_its_place():
    model, batch, loss = network(), example(), Plain()
    step = budgeted(model, loss, torch.optim.SGD(model.parameters(), 0.1), batch)
    loss.tensor.data = loss.tensor.data.double()
    with pytest.raises(UsageError, match=r"is now torch.float64 of shape \[3\] on cpu: make a new step"):
        step(batch)


def refused(loss, match, model=None):
    model = model or network()
    for convert in (
        lambda optimizer: budgeted(model, loss, optimizer, example()),
        lambda optimizer: export_training_step(model, example(), loss, optimizer),
    ):
        with pytest.raises(ConversionError, match=match):
            convert(torch.optim.SGD(model.parameters(), 0.1))


def test_what_the_step_itself_changes():
    center = torch.zeros(3)

    def loss(made, target):
        value = F.cross_entropy(made - center, target)
        center[:2].add_(made.detach().mean(0)[:2])
        return value

    refused(loss, r"^tensor center of shape \[3\], read at .* is changed by the step.*register_buffer")
    assert not center.any()


@pytest.mark.slow
def test_a_teacher_that_trains():
    teacher = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).requires_grad_(False)
    x, _ = example()
    before = copy.deepcopy(teacher.state_dict())
    refused(
        lambda made, target: F.mse_loss(made, teacher(x)),
        r"^1.\w+ of a Sequential .* is changed by the step.*eval mode",
    )
    for name, value in teacher.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_what_requires_a_gradient():
    temperature = torch.tensor(1.0, requires_grad=True)
    refused(lambda made, target: F.cross_entropy(made * temperature, target), "a parameter is read .*torch.no_grad")


def test_values_that_python_reads():
    temperature = torch.tensor(2.0)
    refused(lambda made, target: F.cross_entropy(made / temperature.item(), target), "reads the value of a tensor")


@pytest.mark.slow
def test_memory_of_what_is_trained():
    model = network()
    weight = model[0].weight.detach()
    refused(
        lambda made, target: F.cross_entropy(made, target) * weight.mean(),
        "shares memory with parameter 0.weight",
        model,
    )
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
    mean = model[0].running_mean.detach()
    with pytest.raises(ConversionError, match=r"shares memory with buffer 0.running_mean"):
        budgeted(
            model, lambda made, target: F.cross_entropy(made, target) + mean.mean(),
            torch.optim.SGD(model.parameters(), 0.1), example(),
        )  # fmt: skip


def test_a_file_says_what_is_constant():
    model, teacher, (x, _) = network(), network(), example()

    def loss(made, target):
        with torch.no_grad():
            wanted = teacher(x)
        return F.cross_entropy(made * torch.tensor([1.0, 2.0, 3.0]), target) + F.mse_loss(made, wanted)

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.warns(UserWarning, match=r"^0.weight of a Sequential .*read at .*, and 4 more: constants of the file"):
        step = export_training_step(model, example(), loss, optimizer)
    assert not [value.name for value in step.graph.input if value.name.startswith("outside")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export_training_step(model, example(), F.cross_entropy, optimizer)


@pytest.mark.slow
def test_within_a_budget_with_open_sizes():
    torch.manual_seed(0)
    ours, loss = network(), Plain()
    theirs = copy.deepcopy(ours)
    batch = torch.randn(50_000, 6), torch.randint(0, 3, (50_000,))
    other = torch.optim.AdamW(theirs.parameters(), 0.01)
    dynamic = {"input.0": {0: "batch"}, "input.1": {0: "batch"}}
    step = budgeted(
        ours, loss, torch.optim.AdamW(ours.parameters(), 0.01), batch, "100% of the step", dynamic_dims=dynamic,
        planning={"effort": 0.2},
    )  # fmt: skip
    for size in (50_000, 40_000, 40_000):
        x, y = (each[:size] for each in batch)
        other.zero_grad()
        expected = loss(theirs(x), y)
        expected.backward()
        other.step()
        assert step((x, y)) == pytest.approx(expected.item(), rel=1e-5)
        loss.change()


@pytest.mark.slow
def test_a_loss_that_only_the_step_refers_to_lives_as_long_as_the_step():
    torch.manual_seed(0)
    model, batch = nn.Linear(4, 3), (torch.rand(8, 4), torch.arange(8) % 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = budgeted(model, nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0])), optimizer, batch, progress=False)
    gc.collect()
    assert step(batch) > step(batch)
