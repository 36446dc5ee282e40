"""Optimizers whose own steps are traced: twenty steps alongside torch, and all that is around a step."""

from __future__ import annotations

import collections
import copy
import functools
import math

import numpy as np
import onnx
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import itertools

import torch
from onnx_remat.converters.pytorch import budgeted, export_training_step, initial_feeds, updates
from torch import nn

from onnx_remat.errors import ConversionError
from onnx_remat.ort import runtime
from onnx_remat.session.training import Loop
from tests.support import optimizers
from tests.support.optimizers import CASES, STEPS, Case, batches, feeds, follow, net
from tests.support.slow import few

mse = nn.functional.mse_loss


def both_step(step, theirs, other, batch):
    """A step within a budget, and torch's own of another model."""
    step(batch)
    theirs.zero_grad()
    mse(other(batch[0]), batch[1]).backward()
    theirs.step()


@pytest.mark.parametrize("name", few(CASES, ["SGD", "AdamW"]))
def test_follows_torch_for_twenty_steps(name):
    """State in place, but for weights that are read again, to average them."""
    found = follow(CASES[name])
    assert max(found.error, found.average_error) < CASES[name].most
    phases = {p.value for node in found.step.graph.node for p in node.metadata_props if p.key == "phase"}
    assert phases == {"forward", "backward", "optimizer"}
    assert not any(value.name.startswith("grad.") for value in found.step.graph.output)
    averaged = name in ("ASGD", "AdamW, average")
    assert not [output for output in found.loop.not_donated if output.startswith("new.state.") or not averaged]


@pytest.mark.slow
def test_steps_are_counted_as_exactly_as_torch_counts_them():
    """In float32 a bias correction would be off by 6e-6, which a float64 step is refused for."""
    model = net().double()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    x, y = (array.double() for array in batches(1)[0])
    step = export_training_step(model, (x, y), mse, optimizer)
    kinds = {value.name: value.type.tensor_type.elem_type for value in step.graph.output}
    assert kinds["new.state.0.weight.step"] == onnx.TensorProto.FLOAT  # as torch keeps it


@pytest.mark.parametrize("rate", few([1e-3, 1e-5, 1e-8], [1e-8]))
def test_a_small_rate_is_no_obstacle(rate):
    """No parameter moves by much more than a rounding error, as in the first steps of a warm-up."""
    model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 6))
    step = export_training_step(model, batches(1)[0], mse, torch.optim.SGD(model.parameters(), rate))
    assert any(value.name == "new.0.weight" for value in step.graph.output)


@pytest.mark.slow
def test_a_step_that_leaves_parameters_alone_is_noticed():
    """The measurement can fail."""
    never = Case(lambda p: torch.optim.SGD(p, 0.0))
    real = Case(lambda p: torch.optim.SGD(p, 0.1))
    model, other = net(), net()
    follow(never, model)
    follow(real, other)
    assert optimizers._relative(model[0].weight.detach().numpy(), other[0].weight) > 1e-3


def test_groups_have_settings_of_their_own_and_rates_that_are_tensors_are_inputs():
    rate = torch.tensor(0.01)

    def make(parameters):
        return torch.optim.NAdam([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.02}], lr=rate)

    found = follow(Case(make))
    assert found.error < 2e-5
    assert "learning_rate" in [value.name for value in found.step.graph.input]


def test_an_optimizer_goes_on_from_its_state():
    model = net()
    made = []

    def make(parameters):
        made.append(torch.optim.SGD(parameters, 0.05, momentum=0.9, dampening=0.5))
        x, y = batches(1)[0]
        mse(model(x), y).backward()
        made[0].step()
        made[0].zero_grad()
        return made[0]

    assert follow(Case(make), model).error < 2e-6


@pytest.mark.slow
def test_an_optimizer_that_counts_with_python_numbers_goes_on_from_them():
    def make(parameters):
        optimizer = optimizers.Lion(parameters, 0.01)
        for parameter in parameters:
            optimizer.state[parameter] = {"step": 3, "exp_avg": torch.ones_like(parameter)}
        return optimizer

    found = follow(Case(make))
    assert found.error < 2e-6
    assert float(found.loop.view("state.0.weight.step")) == 3 + STEPS


def clamped(step):
    @functools.wraps(step)
    def within(self, closure=None):
        step(self, closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.clamp_(-0.2, 0.2)

    return within


class Clamped(torch.optim.SGD):
    @clamped
    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.slow
def test_a_decorator_around_the_users_step_is_part_of_the_update():
    assert follow(Case(lambda parameters: Clamped(parameters, 0.05))).error < 2e-6


def test_frozen_and_tied_parameters():
    model = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 6))
    model[2].weight = model[0].weight
    model[3].weight.requires_grad_(False)
    before = model[3].weight.clone()
    found = follow(Case(lambda p: torch.optim.AdamW(p, 0.01)), model)
    assert found.error < 2e-5
    assert torch.equal(model[3].weight, before)
    assert "new.3.weight" not in [value.name for value in found.step.graph.output]


def test_overflowing_steps_are_left_out_and_the_scale_renewed_as_gradscaler_does():
    model, rng = net(), torch.Generator().manual_seed(3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    x, y = batches(1)[0]
    step = export_training_step(model, (x, y), mse, optimizer, scaler=scaler, clip_norm=1.0)
    loop = Loop(step, initial_feeds(step, model, optimizer) | feeds(x, y))
    scales = []
    for index in range(STEPS):
        x, y = torch.randn(16, 12, generator=rng), torch.randn(16, 6, generator=rng)
        if index % 5 == 1:
            y *= 1e30
        scaler.scale(mse(model(x), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        loop.step(feeds(x, y))
        scales.append(scaler.get_scale())
        assert float(loop.view("state.scaler.scale")) == scales[-1]
    assert any(a < b for a, b in itertools.pairwise(scales))  # it went up,
    assert any(a > b for a, b in itertools.pairwise(scales))  # and down
    assert 0 < float(loop.view("state.0.weight.step")) < STEPS
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(loop.view(name), parameter.detach().numpy(), atol=2e-5)


class Looking(torch.optim.SGD):
    """One that decides by a value."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad.norm() > 1:
                p.sub_(p.grad)


class Counting(torch.optim.SGD):
    """One that computes with Python's numbers, as many do."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                p.sub_(p.grad, alpha=min(group["lr"], 1 / math.sqrt(state["step"] + p.norm().item())))


@pytest.mark.slow
def test_numbers_that_a_step_takes_out_of_tensors_are_followed():
    assert follow(Case(lambda p: Counting(p, 0.2))).error < 2e-6


def test_a_step_that_decides_by_a_value_is_refused():
    with pytest.raises(ConversionError, match=r"Looking decides by the value .*updates.py:\d+\).*torch.where"):
        export_training_step(model := net(), batches(1)[0], mse, Looking(model.parameters(), 0.1))


class Noting(torch.optim.Optimizer):
    """Its momentum starts at the gradient; it keeps its first rate as well."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if state:
                    state["m"].mul_(0.9).add_(p.grad)
                else:
                    state["m"], state["rate"] = p.grad.clone(), torch.tensor(group["lr"])
                p.sub_(group["lr"] * state["m"])


def test_a_rate_that_is_kept_is_no_difference_of_a_first_step():
    model, batch = nn.Linear(4, 3), (torch.randn(8, 4), torch.randn(8, 3))
    other = copy.deepcopy(model)
    theirs = Noting(other.parameters(), 1e-3)
    step = budgeted(model, mse, Noting(model.parameters(), 1e-3), batch, check=False)
    for _ in range(3):
        both_step(step, theirs, other, batch)
    torch.testing.assert_close(model.state_dict(), other.state_dict())


class Halved(torch.optim.Optimizer):
    """Its momentum is in bfloat16, as by default in timm's AdafactorBigVision."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p, dtype=torch.bfloat16)
                state["momentum"].lerp_(p.grad.to(torch.bfloat16), 0.1)
                p.sub_(state["momentum"].to(p.dtype), alpha=group["lr"])


def test_state_in_bfloat16_is_computed_in_bfloat16():
    model, batch = nn.Linear(4, 3), (torch.randn(8, 4), torch.randn(8, 3))
    made = export_training_step(model, batch, mse, Halved(model.parameters()))
    kinds = {value.name: value.type.tensor_type.elem_type for value in made.graph.output}
    assert kinds["new.state.weight.momentum"] == onnx.TensorProto.BFLOAT16
    with pytest.raises(ConversionError, match=r"the optimizer computes in bfloat16.* its state in float32"):
        budgeted(model, mse, Halved(model.parameters()), batch, check=False)


def test_outputs_without_an_optimizer_are_clipped():
    model, (x, y) = net(), batches(1)[0]
    step = export_training_step(model, (x, y), mse, clip_norm=0.5, clip_value=0.1)
    mse(model(x), y).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.1)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    made = runtime.outputs(step, initial_feeds(step, model) | feeds(x, y), "all")
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(made[f"grad.{name}"], parameter.grad.numpy(), atol=1e-6)


KINDS = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD"]


@pytest.mark.parametrize("kind", few(KINDS, ["AdamW"]))
def test_at_a_rate_of_zero_nothing_moves(kind):
    """A warm-up begins there, and rows of an embedding that no text has read have had no gradient yet."""
    model = nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.Linear(8, 3))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=torch.tensor(0.01))
    batch = torch.tensor([[0, 1], [2, 1]]), torch.tensor([0, 2])
    step = export_training_step(model, batch, nn.functional.cross_entropy, optimizer)
    given = initial_feeds(step, model, optimizer) | {f"input.{i}": value.numpy() for i, value in enumerate(batch)}
    made = runtime.outputs(step, given | {"learning_rate": np.zeros((), np.float32)})
    for name, value in model.state_dict().items():
        assert np.array_equal(made[f"new.{name}"], value.numpy())


class Keeping(torch.optim.Optimizer):
    """Steps along the gradient and the one before; `keep` stores it in a parameter's state."""

    def __init__(self, parameters, keep, start):
        super().__init__(parameters, {"lr": 0.1})
        self.keep, self.start = keep, start

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(self.start(p))
                p.add_(p.grad + self.keep(state, p.grad.clone()), alpha=-group["lr"])


def in_list(state, gradient):
    state["last"][0], before = gradient, state["last"][0]
    return before


def from_none(state, gradient):
    before, state["last"] = state["last"], gradient
    return torch.zeros_like(gradient) if before is None else before


def later(state, gradient):
    state["step"] += 1
    before = state.get("last", torch.zeros_like(gradient))
    if "seen" in state:
        state["last"] = gradient
    state["seen"] = torch.ones(())
    return before


@pytest.mark.parametrize(
    ("keep", "start", "warm", "message"),
    [
        (in_list, lambda p: {"last": [torch.zeros_like(p)]}, 0, "'last' of weight .* is a list, and a graph's state"),
        (in_list, lambda p: {"last": [torch.zeros_like(p)]}, 1, "'last' of weight .* is a list, and a graph's state"),
        (from_none, lambda p: {"step": 0, "last": None}, 0, "'last' of weight .* is None before the first step"),
        pytest.param(from_none, lambda p: {"step": 0, "last": None}, 1, None, marks=pytest.mark.slow),
        (later, lambda p: {"step": 0}, 1, "a later step of optimizer Keeping sets state 'last' of weight"),
        pytest.param(later, lambda p: {"step": 0, "kind": "x", "none": None}, 2, None, marks=pytest.mark.slow),
    ],
)
def test_state_that_a_graph_cannot_hold_is_refused_not_dropped(keep, start, warm, message):
    torch.manual_seed(0)
    theirs = nn.Linear(4, 4, bias=False)
    ours = copy.deepcopy(theirs)
    mine, other = (Keeping(model.parameters(), keep, start) for model in (ours, theirs))
    batches = [(torch.randn(3, 4), torch.randn(3, 4)) for _ in range(6)]

    def train(model, optimizer, batch):
        optimizer.zero_grad()
        mse(model(batch[0]), batch[1]).backward()
        optimizer.step()

    for batch in batches[:warm]:
        train(ours, mine, batch)
        train(theirs, other, batch)
    if message:
        with pytest.raises(ConversionError, match=message):
            budgeted(ours, mse, mine, batches[0], progress=False)
        return
    step = budgeted(ours, mse, mine, batches[0], progress=False)
    for batch in batches[warm:]:
        step(batch)
        train(theirs, other, batch)
    torch.testing.assert_close(ours.weight, theirs.weight)


@pytest.mark.slow
def test_hooks_see_the_share_of_a_micro_batch():
    torch.manual_seed(0)
    theirs = nn.Linear(4, 4, bias=False)
    ours = copy.deepcopy(theirs)
    for model in (ours, theirs):
        model.weight.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
    mine, other = (torch.optim.SGD(model.parameters(), 0.1) for model in (ours, theirs))
    batches = [(torch.randn(3, 4), torch.randn(3, 4)) for _ in range(4)]
    step = budgeted(ours, mse, mine, batches[0], accumulate=2, progress=False)
    for number, batch in enumerate(batches):
        step(batch)
        (mse(theirs(batch[0]), batch[1]) / 2).backward()
        if number % 2:
            other.step()
            other.zero_grad()
    torch.testing.assert_close(ours.weight, theirs.weight)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", few([1, 2], [2]))
def test_an_overflow_skips_the_update_of_its_own_optimizer_alone(accumulate):
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    ours = copy.deepcopy(theirs)
    mine, other = (
        (torch.optim.AdamW(model[0].parameters(), 0.1), torch.optim.SGD(model[2].parameters(), 0.1, momentum=0.9))
        for model in (ours, theirs)
    )
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in range(2)]
    x = torch.randn(3, 4)
    overflows = x.clone()
    overflows[0, 0] = torch.inf  # the first layer's gradient is infinite, and tanh bounds what the second reads

    def loss(made, target):
        return (made * target).sum()

    batches = [(each, torch.ones(3, 2)) for each in (x, overflows, 2 * x, x)]
    step = budgeted(ours, loss, mine, batches[0], scaler=scalers[0], accumulate=accumulate, progress=False)
    for number, batch in enumerate(batches, 1):
        step(batch)
        scalers[1].scale(loss(theirs(batch[0]), batch[1]) / accumulate).backward()
        if not number % accumulate:
            for optimizer in other:
                scalers[1].step(optimizer)
                optimizer.zero_grad()
            scalers[1].update()
        assert step.extra["state.scaler.scale"] == scalers[1].get_scale()
    for own, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, expected)


@pytest.mark.slow
def test_with_a_norm_of_all_gradients_an_overflow_skips_every_update():
    """One that overflows makes the norm infinite, and clipped gradients NaN."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    model.forward = lambda x, factor: model[0](x).pow(2).mean() + (model[1](x) * factor).mean()
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in model]
    scaler, x = torch.amp.GradScaler("cpu", init_scale=2.0**16), torch.randn(3, 4)
    step = budgeted(model, None, optimizers, (x, torch.ones(())), scaler=scaler, clip_norm=1.0, progress=False)
    before = copy.deepcopy(model.state_dict())
    step((x, torch.tensor(torch.inf)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    step((x, torch.ones(())))
    assert not any(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Lookahead(torch.optim.Optimizer):
    """Steps by another optimizer, which has the parameters themselves."""

    def __init__(self, base):
        self.base, self.param_groups, self.defaults, self.state = base, base.param_groups, base.defaults, {}

    @torch.no_grad()
    def step(self):
        self.base.step()


class Listing(torch.optim.Optimizer):
    """Steps by a list of its own."""

    def __init__(self, parameters):
        self.ps = list(parameters)
        super().__init__(self.ps, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for parameter in self.ps:
            if parameter.grad is not None:
                parameter.sub_(self.param_groups[0]["lr"] * parameter.grad)


class Logging(torch.optim.SGD):
    """Keeps a list, but steps by its groups."""

    def __init__(self, parameters):
        self.ps = list(parameters)
        super().__init__(self.ps, 0.1)


class Demanding(torch.optim.SGD):
    """Runs the model again, as sharpness-aware minimisation does."""

    def step(self, closure=None):
        assert closure is not None, "a closure, please"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda ps: Lookahead(torch.optim.SGD(ps, 0.1)), "Lookahead works by self.base, not by its param_groups"),
        (Listing, "Listing works by self.ps, not by its param_groups"),
        (lambda ps: Demanding(ps, 0.1), "Demanding cannot be traced .a closure, please"),
    ],
)
def test_optimizers_that_would_move_no_copy_are_refused(make, message):
    model = nn.Linear(4, 4)
    with pytest.raises(ConversionError, match=message):
        export_training_step(model, (torch.randn(3, 4), torch.randn(3, 4)), mse, make(model.parameters()))


def _later(count):
    """A rate that falls after ten steps."""
    return 0.1 if count <= 10 else 0.01


class Clock(torch.optim.Optimizer):
    """Its step counts in a container of its own; `clocks` are such containers, and how to count in them."""

    clocks = {  # noqa: RUF012
        "dict": ({"t": 0}, lambda clock: clock.update(t=clock["t"] + 1) or clock["t"]),
        "nested": ({"all": [0]}, lambda clock: clock["all"].append(0) or len(clock["all"])),
        "deque": (collections.deque([0]), lambda clock: clock.append(0) or len(clock)),
        "set": (set(), lambda clock: clock.add(len(clock)) or len(clock)),
        "array": (np.zeros(1), lambda clock: clock.__iadd__(1)[0]),
        "arrays": ([np.zeros(2)], lambda clock: clock.append(clock.pop() + 1) or clock[0][0]),
    }

    def __init__(self, parameters, kind):
        super().__init__(parameters, {"lr": 0.1})
        clock, self.count = self.clocks[kind]
        self.clock = copy.deepcopy(clock)

    @torch.no_grad()
    def step(self, closure=None):
        rate = _later(self.count(self.clock))
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(rate * parameter.grad)


@pytest.mark.parametrize("kind", Clock.clocks)
def test_a_step_that_counts_in_a_container_is_refused_and_the_users_stays(kind):
    model = nn.Linear(2, 1)
    optimizer = Clock(model.parameters(), kind)
    with pytest.raises(ConversionError, match=r"Clock updates self\.clock, which would be a constant"):
        export_training_step(model, (torch.randn(3, 2), torch.randn(3, 1)), mse, optimizer)
    assert str(optimizer.clock) == str(Clock.clocks[kind][0])


class Caching(torch.optim.Optimizer):
    """It makes a tensor for each shape once, and reads it in later steps."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.factors = {}

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.shape not in self.factors:
                self.factors[parameter.shape] = torch.full(parameter.shape, 0.5)
            parameter.sub_(self.factors[parameter.shape] * parameter.grad)


@pytest.mark.filterwarnings("ignore:.*constants of the file")
def test_a_cache_is_filled_by_one_step_in_torch():
    model, x, y = nn.Linear(2, 1), torch.randn(3, 2), torch.randn(3, 1)
    optimizer = Caching(model.parameters())
    with pytest.raises(ConversionError, match=r"self\.factors, .* a cache .*, take one step in torch, then export"):
        export_training_step(model, (x, y), mse, optimizer)
    mse(model(x), y).backward()
    optimizer.step()
    made = export_training_step(model, (x, y), mse, optimizer)
    assert "new.weight" in [value.name for value in made.graph.output]


def test_a_twin_has_the_settings_of_each_group():
    parameters = {str(i): nn.Parameter(torch.ones(2)) for i in range(9)}
    groups = [{"params": [parameter], "lr": 0.1 * i, "marks": [i]} for i, parameter in enumerate(parameters.values())]
    optimizer = torch.optim.SGD(groups)
    made = updates.twin(optimizer, parameters, parameters, {}).param_groups
    assert [(group["lr"], group["marks"]) for group in made] == [(0.1 * i, [i]) for i in range(9)]
    assert all(mine["marks"] is not own["marks"] for mine, own in zip(made, optimizer.param_groups, strict=True))


class Frozen(dict):
    """A dict that takes no more entries."""

    def __setitem__(self, key, value):
        raise TypeError("frozen")


class Settled(torch.optim.SGD):
    """Its settings lie in containers that are frozen, or have two names; a step changes none of them."""

    def __init__(self, parameters):
        super().__init__(parameters, 0.1)
        self.frozen = Frozen(rate=0.5, names=["a"])
        self.listed = self.same = [1.0]
        self.all = {"listed": self.listed}

    @torch.no_grad()
    def step(self, closure=None):
        assert self.listed is self.same is self.all["listed"]
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(self.frozen["rate"] * parameter.grad)


def test_containers_that_are_frozen_or_have_two_names_are_settings():
    model = nn.Linear(2, 1)
    made = export_training_step(model, (torch.randn(3, 2), torch.randn(3, 1)), mse, Settled(model.parameters()))
    assert "new.weight" in [value.name for value in made.graph.output]


def test_an_optimizer_that_keeps_a_list_beside_its_groups_is_followed():
    model = nn.Linear(4, 4)
    (model(torch.randn(3, 4)).sum()).backward()
    before = copy.deepcopy(model.state_dict())
    step = export_training_step(model, (torch.randn(3, 4), torch.randn(3, 4)), mse, Logging(model.parameters()))
    assert "new.weight" in [value.name for value in step.graph.output]
    torch.testing.assert_close(model.state_dict(), before)


@pytest.mark.slow
@pytest.mark.parametrize("warm", few([False, True], [False]))
@pytest.mark.parametrize("kind", few([torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD], [torch.optim.AdamW]))
def test_settings_that_update_all_parameters_at_once_change_nothing(kind, warm):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = kind(model.parameters(), lr=0.01, foreach=True)
    batch = torch.randn(3, 4), torch.randn(3, 4)
    if warm:
        mse(model(batch[0]), batch[1]).backward()
        optimizer.step()
    other = copy.deepcopy(model)
    theirs = kind(other.parameters(), lr=0.01)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step = budgeted(model, mse, optimizer, batch)
    for _ in range(3):
        both_step(step, theirs, other, batch)
    torch.testing.assert_close(model.state_dict(), other.state_dict())


@pytest.mark.slow
def test_a_checkpoint_of_an_update_that_is_computed_in_another_way_is_gone_on_from():
    model, other = nn.Linear(4, 3), nn.Linear(4, 3)
    batch = torch.randn(8, 4), torch.randn(8, 3)
    mine = torch.optim.AdamW(model.parameters())
    step = budgeted(model, mse, mine, batch)
    step(batch)
    other.load_state_dict(model.state_dict())
    theirs = torch.optim.AdamW(other.parameters(), fused=True)
    theirs.load_state_dict(copy.deepcopy(mine.state_dict()))
    theirs.param_groups[0].update(fused=True, foreach=False)
    mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for _ in range(2):
        both_step(step, theirs, other, batch)
    torch.testing.assert_close(model.state_dict(), other.state_dict())


class Delayed(torch.optim.Optimizer):
    """Its first step sets state and leaves the parameters alone, as that of ADOPT does."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["before"] = parameter.grad.clone()
                    continue
                parameter.sub_(state["before"], alpha=group["lr"])
                state["before"].lerp_(parameter.grad, 0.1)


def test_a_first_step_that_differs_in_its_state_alone_is_taken_in_torch():
    model, batch = nn.Linear(2, 1), (torch.randn(3, 2), torch.randn(3, 1))
    optimizer = Delayed(model.parameters())
    with pytest.raises(ConversionError, match=r"Delayed differs from all others .*: take one step in torch"):
        export_training_step(model, batch, mse, optimizer, check=False)
    mse(model(batch[0]), batch[1]).backward()
    optimizer.step()
    export_training_step(model, batch, mse, optimizer)


@pytest.mark.slow
def test_an_optimizer_that_computes_its_own_rate():
    """As by default in transformers."""
    adafactor = pytest.importorskip("transformers").Adafactor
    torch.manual_seed(0)
    model, batch = nn.Linear(4, 3), (torch.randn(8, 4), torch.randn(8, 3))
    other = copy.deepcopy(model)
    theirs = adafactor(other.parameters())
    step = budgeted(model, mse, adafactor(model.parameters()), batch)
    for _ in range(3):
        both_step(step, theirs, other, batch)
    torch.testing.assert_close(model.state_dict(), other.state_dict())


class OfRows(nn.Module):
    """Embeddings with sparse gradients, one row of which is read twice and some not at all."""

    def __init__(self):
        super().__init__()
        self.rows, self.bag = nn.Embedding(9, 4, sparse=True), nn.EmbeddingBag(9, 4, sparse=True)
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(self.rows(x).sum(1) + self.bag(x))


SPARSE = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.1),
}


@pytest.mark.parametrize("kind", few(SPARSE, ["SGD"]))
def test_embeddings_with_sparse_gradients(kind):
    torch.manual_seed(0)
    model, batch = OfRows(), (torch.tensor([[1, 1], [2, 5], [5, 7]]), torch.randn(3, 3))
    other = copy.deepcopy(model)
    theirs = SPARSE[kind](other.parameters())
    step = budgeted(model, mse, SPARSE[kind](model.parameters()), batch)
    for turn in range(3):
        given = (batch[0] + turn % 2, batch[1])
        both_step(step, theirs, other, given)
    torch.testing.assert_close(model.state_dict(), other.state_dict())


@pytest.mark.parametrize("kind", few([torch.optim.SparseAdam, torch.optim.Adam], [torch.optim.SparseAdam]))
def test_sparse_gradients_of_optimizers_that_treat_dense_ones_otherwise_are_refused(kind):
    model, batch = OfRows(), (torch.tensor([[1, 1], [2, 5], [5, 7]]), torch.randn(3, 3))
    with pytest.raises(ConversionError, match=f"module 'rows' has sparse gradients.*optimizer {kind.__name__} may"):
        budgeted(model, mse, kind(model.rows.parameters()), batch)


def test_names_of_a_batch_and_of_a_buffer_are_apart():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mask", torch.ones(3, 4))

        def forward(self, x, mask):
            return (self.linear(x) * self.mask * mask).square().mean()

    with pytest.raises(ConversionError, match="the batch has 'mask', and so has the model"):
        export_training_step(Masked(), {"x": torch.randn(3, 4), "mask": torch.ones(3, 4)})


@pytest.mark.parametrize("name", few(["learning_rate", "loss", "new.bias", "grad.bias"], ["new.bias"]))
def test_names_of_a_model_and_of_a_steps_other_inputs_and_outputs_are_apart(name):
    """The rate was the parameter's value."""

    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(4, 3)
            home = nn.Module()
            for path in name.split(".")[:-1]:
                self.add_module(path, home)
            (home if "." in name else self).register_parameter(name.split(".")[-1], nn.Parameter(torch.tensor(0.4)))

        def forward(self, x):
            return super().forward(x) * dict(self.named_parameters())[name]

    model, batch = Scaled(), (torch.randn(8, 4), torch.randn(8, 3))
    with pytest.raises(ConversionError, match=f"has {name!r}, and so has .*: rename the parameter"):
        budgeted(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 1e-3), batch)


SINGLE = [
    (torch.optim.AdamW, {}), (torch.optim.Adafactor, {}), (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.NAdam, {}), (torch.optim.RAdam, {}), (torch.optim.Adamax, {}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}), (torch.optim.SGD, {"momentum": 0.9}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"), few(SINGLE, SINGLE[:1], several=True), ids=lambda each: getattr(each, "__name__", "")
)
def test_a_parameter_may_be_a_single_number(kind, settings):
    """As CLIP's scale of the logits: its state has the shape of a count of steps."""

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.scale = torch.nn.Linear(4, 4), torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return self.inner(x) * self.scale.exp()

    torch.manual_seed(0)
    model = Scaled()
    other, batch = copy.deepcopy(model), (torch.randn(3, 4), torch.randn(3, 4))
    step = budgeted(model, mse, kind(model.parameters(), lr=1e-2, **settings), batch)
    theirs = kind(other.parameters(), lr=1e-2, **settings)
    for _ in range(3):
        both_step(step, theirs, other, batch)
    torch.testing.assert_close(model.scale, other.scale, rtol=1e-5, atol=0)
    torch.testing.assert_close(model.inner.weight, other.inner.weight, rtol=1e-4, atol=1e-6)
