"""Functions of elements where their usual forms lose all digits, and divisions with a whole quotient."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import torch
from onnx_remat.converters.pytorch import export_training_step
from torch import nn

from tests.support.graphs import run_model

FAR = torch.tensor(
    [
        -150,
        -100,
        -50,
        -20,
        -10,
        -5,
        -2,
        -1,
        -0.5,
        -1e-3,
        -1e-5,
        -1e-8,
        0,
        1e-8,
        1e-5,
        1e-3,
        0.5,
        1,
        3,
        5,
        6,
        10,
        50,
        100,
    ]
)
ABOVE = torch.tensor([-0.999, -0.9, -0.5, -1e-3, -1e-5, -1e-8, 0, 1e-8, 1e-5, 1e-3, 0.1, 1, 10, 1e4, 1e10, torch.inf])
special = torch.special
TAILS = {
    "logaddexp": (lambda x: torch.logaddexp(x, 2 * x), FAR),
    "logaddexp2": (lambda x: torch.logaddexp2(x, 2 * x), FAR),
    "logcumsumexp": (lambda x: x.logcumsumexp(0), FAR),
    "log_ndtr": (special.log_ndtr, FAR),
    "erfcx": (special.erfcx, FAR[abs(FAR) < 9]),
    "erfc": (torch.erfc, FAR[FAR < 9]),
    "expm1": (torch.expm1, FAR[FAR < 80]),
    "log1p": (torch.log1p, ABOVE),
    "logsigmoid": (nn.functional.logsigmoid, FAR),
    "xlog1py": (lambda x: special.xlog1py(x, x), ABOVE),
    "hypot": (lambda x: torch.hypot(x, x * 1e18), FAR),
    "atan2": (lambda x: torch.atan2(x, -x.abs() - 1), FAR),
    "infinite": (lambda x: torch.logaddexp(x, x), torch.tensor([-torch.inf, torch.inf])),
}


def outputs(step, given):
    """Return the outputs of a step by name."""
    known = {value.name for value in step.graph.input}
    made = run_model(step, {name: value for name, value in given.items() if name in known})
    return made if isinstance(made, dict) else dict(zip((o.name for o in step.graph.output), made, strict=True))


class Each(nn.Module):
    """The values of functions, each of its own parameter, and their sum as the loss."""

    def __init__(self, functions):
        super().__init__()
        self.functions = {name: function for name, (function, _) in functions.items()}
        self.values = nn.ParameterDict({name: nn.Parameter(x.clone()) for name, (_, x) in functions.items()})

    def forward(self, one):
        made = {name: function(self.values[name]) for name, function in self.functions.items()}
        return {"loss": one * sum(value.sum() for value in made.values()), **made}


def test_values_and_gradients_keep_their_digits_far_from_and_near_zero():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = export_training_step(Each(TAILS), torch.ones(()), outputs=list(TAILS), check=False)
    given = {f"values.{name}": x.numpy() for name, (_, x) in TAILS.items()} | {"input.0": np.array(1, np.float32)}
    found = outputs(step, given)
    for name, (function, x) in TAILS.items():
        single, double = x.clone().requires_grad_(), x.double().requires_grad_()
        for each in (single, double):
            function(each).sum().backward()
        close(found[f"output.{name}"], function(single), function(double), name)
        if name not in ("infinite", "log1p", "xlog1py"):  # the last value is infinite
            close(found[f"grad.values.{name}"], single.grad, double.grad, f"gradient of {name}")


class Maximum(nn.Module):
    """Running maxima and minima, and an exponential of a matrix, of parameters."""

    def __init__(self, x, matrix):
        super().__init__()
        self.x, self.matrix = nn.Parameter(x), nn.Parameter(matrix)

    def forward(self, by):
        return (
            (self.x.cummax(0).values * by).sum()
            + (self.x.cummin(0).values * by).sum()
            + (torch.linalg.matrix_exp(self.matrix) * by[:2]).sum()
        )


def test_the_last_of_equal_maxima_has_the_gradient_and_matrices_may_be_large():
    x = torch.tensor([1.0, 1.0, -torch.inf, 0.5, 2.0, 2.0, 2.0])
    model, by = Maximum(x, torch.tensor([[-200.0, 1.0], [0.5, -3.0]])), torch.arange(1.0, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = export_training_step(model, by, check=False)
    found = outputs(step, {"x": x.numpy(), "matrix": model.matrix.detach().numpy(), "input.0": by.numpy()})
    model(by).backward()
    np.testing.assert_allclose(found["grad.x"], model.x.grad)
    np.testing.assert_allclose(found["grad.matrix"], model.matrix.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scale", [0.1, 5.0])
def test_an_exponential_of_a_matrix_in_float64(scale):
    class Exponential(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix = nn.Parameter(scale * torch.randn(5, 5, generator=SEEDED, dtype=torch.float64))

        def forward(self, by):
            return (torch.linalg.matrix_exp(self.matrix) * by).sum()

    step = export_training_step(Exponential(), torch.ones(5, dtype=torch.float64))  # checked within 1e-9
    assert "grad.matrix" in [value.name for value in step.graph.output]


SEEDED = torch.Generator().manual_seed(0)


def close(found, single, double, what):
    """Assert a relative distance of 1e-5, or four times torch's own."""
    single, double = (each.detach().double().numpy() for each in (single, double))
    assert np.array_equal(np.isfinite(found), np.isfinite(single)), what
    with np.errstate(invalid="ignore"):
        allowed = 1e-5 * abs(double) + 4 * abs(single - double) + 1e-37
        wrong = np.isfinite(single) & (abs(found - double) > allowed)
    assert not wrong.any(), (what, found[wrong], double[wrong])


WHOLE = torch.tensor([2**24 + 1, -(2**24) - 1, 2**31 + 7, -7, 7, 3 * (2**24 + 1), 2**53 + 1, 2**40 + 3])
BY = torch.tensor([1, 1, 2, 2, -2, 3, 1, -3])
REAL = torch.tensor([7, -7, 7, -7, 5.5, -5.5, 1e8, -0.3, 0.3, 1, torch.inf, 3, 1])
OF = torch.tensor([2, 2, -2, -2, 0.5, 0.5, 3, 0.1, -0.1, 0.1, 2, torch.inf, 0])
DIVISIONS = {
    "trunc": (lambda x, y: torch.div(x, y, rounding_mode="trunc"), WHOLE, BY),
    "floor": (lambda x, y: torch.div(x, y, rounding_mode="floor"), WHOLE, BY),
    "narrow": (lambda x, y: torch.div(x, y, rounding_mode="floor"), WHOLE.int(), BY.int()),
    "of_a_number": (lambda x, _: torch.div(x, 2.5, rounding_mode="floor"), BY, BY),
    "floats": (lambda x, y: torch.div(x, y, rounding_mode="floor"), REAL, OF),
    "floats_by_a_number": (lambda x, _: x // 0.1, REAL, OF),
    "doubles": (lambda x, y: x // y, REAL.double(), OF.double()),
    "mixed": (lambda x, y: torch.div(x, y, rounding_mode="floor"), BY[:1], REAL),
    "rest": (lambda x, y: x % y, REAL, OF),
    "rest_by_a_number": (lambda x, _: x % 0.1, REAL, OF),
    "whole_rest": (lambda x, y: x % y, WHOLE, BY),
    "of_numbers": (lambda x, _: 1000 // x + torch.div(5.0, x, rounding_mode="floor"), BY, BY),
    "angles": (lambda x, y: torch.atan2(x, y), BY, BY),
    "kept_sign": (lambda x, y: torch.div(x, y, rounding_mode="trunc"), REAL, OF),
}


def test_quotients_and_remainders_are_torchs():
    class Divided(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, **batch):
            made = {n: f(batch[f"x_{n}"], batch[f"y_{n}"]) for n, (f, _, _) in DIVISIONS.items()}
            return {"loss": self.weight.sum(), **made}

    batch = {f"x_{n}": x for n, (_, x, _) in DIVISIONS.items()} | {f"y_{n}": y for n, (_, _, y) in DIVISIONS.items()}
    step = export_training_step(Divided(), batch, outputs=list(DIVISIONS), check=False)
    found = outputs(step, {"weight": np.ones(1, np.float32)} | {name: value.numpy() for name, value in batch.items()})
    for name, (function, x, y) in DIVISIONS.items():
        expected = function(x, y).numpy()
        assert found[f"output.{name}"].dtype == expected.dtype
        np.testing.assert_allclose(found[f"output.{name}"], expected, 1e-6 if name == "angles" else 0, err_msg=name)
