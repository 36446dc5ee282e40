"""Steps that draw are compared under the same draws, wherever in the module these are made."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import torch
from onnx_remat.converters.checks import default_level
from onnx_remat.converters.pytorch import export_training_step
from torch import nn
from torch.nn import functional as F

from onnx_remat.errors import ConversionError
from onnx_remat.measure import fixed_draws
from onnx_remat.ort import runtime
from tests.support.slow import few

DRAWS = {
    "Dropout": lambda x: F.dropout(x, 0.3),
    "twice": lambda x: F.dropout(F.dropout(x, 0.3).tanh(), 0.3),
    "alpha": lambda x: F.alpha_dropout(x, 0.3, True),
    "features": lambda x: F.feature_alpha_dropout(x[:, :, None], 0.3, True)[..., 0],
    "2d": lambda x: F.dropout2d(x[:, :, None, None], 0.3)[..., 0, 0],
    "attention": lambda x: F.scaled_dot_product_attention(*3 * (x.view(-1, 2, 4, 4),), dropout_p=0.3).flatten(1),
    "RReLU": lambda x: F.rrelu(x, training=True),
    "RReLU in place": lambda x: nn.RReLU(inplace=True)(x * 2),
    "all dropped": lambda x: F.dropout(x, 1.0) + x,
    "normal": lambda x: x + torch.normal(0.5, 2.0, (64, 32)),
    "normal about means": lambda x: x * 0.1 + torch.normal(x, 0.1),
    "normal of deviations": lambda x: x + torch.normal(1.0, x.abs()),
    "normal of rows": lambda x: x * torch.distributions.Normal(x[:, :1], x.abs()[:1] + 1).sample(),
    "uniform": lambda x: x + torch.empty_like(x).uniform_(-1, 3),
    "uniform in place": lambda x: (x * 2).uniform_(1, 2) * x,
    "Laplace": lambda x: torch.distributions.Laplace(x, 1.0).rsample(),
    "order": lambda x: x[torch.randperm(64)] + x,
    "places": lambda x: x * torch.multinomial(x.softmax(-1), 32, replacement=True),
    "place": lambda x: x.gather(1, torch.multinomial(x.detach().exp(), 1)) + x,
    "noise": lambda x: x + torch.randn_like(x),
    "a mask of one's own": lambda x: x * (torch.rand_like(x) > 0.3),
}


class Drawing(nn.Module):
    """Draws between two layers, the first of which is frozen or not."""

    def __init__(self, draw, frozen):
        super().__init__()
        self.first = nn.Linear(16, 32).requires_grad_(not frozen)
        self.draw, self.last = draw, nn.Linear(32, 4)

    def forward(self, x):
        return self.last(self.draw(self.first(x)))


def test_draws_of_no_element_are_compared():
    model = Drawing(lambda x: torch.cat([F.dropout(x[:, :0], 0.3), torch.rand(64, 0), x], 1), False)
    step = export_training_step(model, (torch.randn(64, 16), torch.randint(0, 4, (64,))), F.cross_entropy)
    assert "grad.first.weight" in [value.name for value in step.graph.output]


@pytest.mark.parametrize("frozen", [True, False], ids=["behind a frozen layer", "behind a trained layer"])
@pytest.mark.parametrize("name", few(DRAWS, [*DRAWS][::3]))
def test_draws_anywhere(name, frozen):
    torch.manual_seed(0)
    model = Drawing(DRAWS[name], frozen)
    batch = torch.randn(64, 16), torch.randint(0, 4, (64,))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    step = export_training_step(model, batch, F.cross_entropy, optimizer)
    assert fixed_draws.random_nodes(step)


@pytest.mark.parametrize(
    "draw", few(["Dropout", "all dropped", "attention", "normal", "normal about means"], ["Dropout", "normal"])
)
def test_draws_in_float64(draw):
    """Dropout was scaled in float32."""
    torch.manual_seed(0)
    model = Drawing(DRAWS[draw], frozen=False).double()
    batch = torch.randn(64, 16, dtype=torch.float64), torch.randint(0, 4, (64,))
    step = export_training_step(model, batch, F.cross_entropy)
    assert draw == "all dropped" or fixed_draws.random_nodes(step)


def test_a_draw_that_no_step_can_make_is_refused_with_its_line():
    model = Drawing(lambda x: x + torch.poisson(x.abs()), frozen=True)
    with pytest.raises(ConversionError, match=r"aten.poisson.*at .*test_draws.py.*draw with torch.rand"):
        export_training_step(model, (torch.randn(8, 16), torch.zeros(8).long()), F.cross_entropy)


def test_samples_that_are_not_put_back_are_refused_without_a_check_too():
    model = Drawing(lambda x: x * torch.multinomial(x.softmax(-1), 32), frozen=True)
    with pytest.raises(ConversionError, match=r"without replacement.*pass replacement=True"):
        export_training_step(model, (torch.randn(8, 16), torch.zeros(8).long()), F.cross_entropy, check=False)


NOISY = """<ir_version: 10, opset_import: ["" : 20]>
g (float[64] x) => (float[64] y) <float ratio = {0.25}, bool train = {1}> {
    d = Dropout (x, ratio, train)
    n = RandomNormalLike (x)
    y = Add (d, n)
}"""


def test_given_draws_are_the_other_runs():
    """Unseeded as the nodes are; each of the draws counts."""
    model = onnx.parser.parse_model(NOISY)
    feeds = {"x": np.linspace(1, 2, 64, dtype=np.float32)}
    model = onnx.shape_inference.infer_shapes(model)
    plain = default_level.run(model, feeds)
    assert sorted(plain.outputs) == ["y"] and len(plain.drawn) == 2
    default_level.compare(model, feeds, plain.outputs, drawn=plain.drawn)
    for name in plain.drawn:
        other = copy.deepcopy(plain.drawn)
        other[name] = ~other[name] if other[name].dtype == bool else other[name] + 1
        given = fixed_draws.with_draws_given(model, other)
        assert not fixed_draws.random_nodes(given)
        assert not np.allclose(runtime.outputs(given, feeds | other)["y"], plain.outputs["y"])
