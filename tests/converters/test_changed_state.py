"""What a forward pass changes lasts: in the module's tensors, or the conversion is refused."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import torch
from onnx_remat.converters.pytorch import budgeted, export_training_step
from torch import nn

from onnx_remat.errors import ConversionError
from tests.support.slow import few

F = nn.functional


class Net(nn.Module):
    """A layer; subclasses change more than it in their forward pass."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 4)


class Average(Net):
    """A teacher that is the moving average of the trained weights."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for mean, own in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                mean.mul_(0.9).add_(own, alpha=0.1)
        return F.mse_loss(self.net(x), self.teacher(x) + 1)


class Codebook(Net):
    """A table that moves to what it is compared with, through ``.data``."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.randn(4, 4), requires_grad=False)

    def forward(self, x):
        y = self.net(x)
        self.codes.data.mul_(0.5).add_(y.detach().mean(0))
        return F.mse_loss(y, x @ self.codes)


class UnitNorm(Net):
    """A trained weight that the forward pass scales first."""

    def forward(self, x):
        with torch.no_grad():
            self.net.weight.div_(self.net.weight.norm())
        return self.net(x).pow(2).mean()


class Replaced(Net):
    """The same, by an assignment to ``.data``."""

    def forward(self, x):
        self.net.weight.data = self.net.weight.data / self.net.weight.data.norm()
        return self.net(x).pow(2).mean()


class MaxNorm(Net):
    """A table whose rows are shortened where they are read, and only there."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 4, max_norm=0.5)

    def forward(self, x):
        return self.net(self.table((x[:, 0] * 2).long().abs() % 9)).pow(2).mean()


class WithoutGradient(Net):
    """A parameter that no gradient reaches."""

    def __init__(self):
        super().__init__()
        self.centre = nn.Parameter(torch.ones(4))

    def forward(self, x):
        with torch.no_grad():
            self.centre.mul_(0.5).add_(x.mean(0))
        return (self.net(x) - self.centre.detach()).pow(2).mean()


class Carried(Net):
    """The last output, as a buffer that is assigned."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(3, 4))

    def forward(self, x):
        y = torch.tanh(self.net(x) + self.last)
        self.last = y.detach()
        return y.pow(2).mean()


class Fixed(dict):
    """As the outputs of transformers' models, which a model may keep."""

    def update(self, *_, **__):
        raise TypeError("cannot be changed")


class Cached(Net):
    """A table made at the first run, and outputs kept for others: neither is a state of the training."""

    def __init__(self):
        super().__init__()
        self.table, self.outputs, self.settings = None, [], Fixed(scale=1.0)
        self.total = torch.zeros(())

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(4.0).cos()
        self.last = self.net(x) * self.table * self.settings["scale"]
        self.outputs.append(self.last)
        loss = (self.last + self.outputs[-1]).pow(2).mean()
        self.total = self.total + loss.detach()
        return loss


class CachedForms(Net):
    """Constants made of a batch's shape, and of a buffer."""

    def __init__(self):
        super().__init__()
        self.mask = self.angles = None
        self.register_buffer("frequencies", torch.arange(4.0) + 1)

    def forward(self, x):
        y = self.net(x)
        if self.mask is None:
            self.mask = torch.tril(torch.ones_like(y)) + x.new_zeros(4)
        if self.angles is None:
            self.angles = (torch.arange(4.0) * self.frequencies).cos()
        return (y * self.mask * self.angles).pow(2).mean()


KINDS = [Average, MaxNorm, UnitNorm, Codebook, Replaced, WithoutGradient, Carried, Cached, CachedForms]
RECIPES = [*((kind, {}) for kind in KINDS), (UnitNorm, {"accumulate": 2}), (MaxNorm, {"average": 0.5})]


@pytest.mark.parametrize(("kind", "recipe"), few(RECIPES, RECIPES[:1], several=True))
def test_what_a_forward_pass_changes_is_changed_as_in_torch(kind, recipe):
    torch.manual_seed(1)
    theirs = kind()
    ours = copy.deepcopy(theirs)
    mine, other = (torch.optim.AdamW(model.parameters(), 0.1) for model in (ours, theirs))
    batches, every = [torch.randn(3, 4) for _ in range(4)], recipe.get("accumulate", 1)
    step = budgeted(ours, None, mine, (batches[0],), progress=False, **recipe)
    for number, batch in enumerate(batches, 1):
        loss = theirs(batch)
        (loss / every).backward()
        if not number % every:
            other.step()
            other.zero_grad()
        assert step((batch,)) == pytest.approx(loss.item(), rel=1e-5)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, msg=name)


def test_a_step_without_optimizer_outputs_the_parameters_that_it_changes():
    made = {kind: export_training_step(kind(), (torch.randn(3, 4),)) for kind in (Average, UnitNorm, Cached)}
    new = {k: [o.name for o in m.graph.output if o.name.startswith("new.")] for k, m in made.items()}
    assert new == {Average: ["new.teacher.weight", "new.teacher.bias"], UnitNorm: ["new.net.weight"], Cached: []}


class Attribute(Net):
    """The last output, in an attribute."""

    def __init__(self):
        super().__init__()
        self.last = torch.zeros(3, 4)

    def forward(self, x):
        y = torch.tanh(self.net(x) + self.last)
        self.last = y.detach()
        return y.pow(2).mean()


class InDict(Net):
    """The last output, in a dict."""

    def __init__(self):
        super().__init__()
        self.kept = {}

    def forward(self, x):
        y = torch.tanh(self.net(x) + self.kept.get("last", 0))
        self.kept["last"] = y.detach()
        return y.pow(2).mean()


class FirstBatch(Net):
    """A shift by the mean of the first batch."""

    def __init__(self):
        super().__init__()
        self.shift = None

    def forward(self, x):
        if self.shift is None:
            self.shift = x.mean(0)
        return (self.net(x) - self.shift).pow(2).mean()


@pytest.mark.parametrize(
    ("kind", "what"), [(Attribute, "last of a"), (InDict, "a tensor of"), (FirstBatch, "shift of")]
)
def test_a_tensor_of_the_step_before_is_refused_where_no_step_holds_it(kind, what):
    model = kind()
    with pytest.raises(ConversionError, match=rf"{what}.*, read at .*is of the step before.*register_buffer"):
        export_training_step(model, (torch.randn(3, 4),), check=False)
    assert not any(isinstance(v, torch.Tensor) for v in vars(model).get("kept", {}).values())


def test_a_model_that_replaces_a_parameter_is_refused():
    class Replacing(Net):
        def forward(self, x):
            self.net.weight = nn.Parameter(self.net.weight * 0.9)
            return self.net(x).pow(2).mean()

    with pytest.raises(ConversionError, match=r"replaces parameter net.weight.*change it in place"):
        export_training_step(Replacing(), (torch.randn(3, 4),), check=False)
