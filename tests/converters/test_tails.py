"""Functions of elements where their usual forms lose all digits, and divisions with a whole quotient."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import torch
from onnx_remat.converters.pytorch import export_training_step
from torch import nn

from onnx_remat.ort import placement
from onnx_remat.ort.kernels.registry import kernels_of
from onnx_remat.ort.prepare import Preparation, prepare_for_simulation
from tests.support.graphs import run_model
from tests.support.slow import few

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


@pytest.mark.slow
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


@pytest.mark.parametrize("scale", few([0.1, 5.0], [5.0]))
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
ENDS = torch.cartesian_prod(*[torch.tensor([-torch.inf, -1, 0, 1, torch.inf, torch.nan])] * 2).T
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
    "rest_of_a_number": (lambda x, y: 1.0 % y, REAL, OF),
    "whole_rest_by_a_number": (lambda x, _: x % 0.1, BY, BY),
    "whole_by_reals": (lambda x, y: torch.div(x, y, rounding_mode="floor"), BY[:1], OF),
    "whole_rest_by_reals": (lambda x, y: x % y, BY[:1], OF),
    "infinite_angles": (lambda x, y: torch.atan2(x, y), ENDS[0], ENDS[1]),
    "kept_sign": (lambda x, y: torch.div(x, y, rounding_mode="trunc"), REAL, OF),
}


@pytest.mark.slow
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
        np.testing.assert_allclose(found[f"output.{name}"], expected, 1e-6 if "angles" in name else 0, err_msg=name)


COUNTS = torch.tensor([[100000, 100000, -3, 2, 2], [2**40, 3, 3, -1, 5]])


def scattered(reduce, include_self):
    return lambda x: x.scatter_reduce(1, x.long() % 3, x.flip(1), reduce, include_self=include_self)


PRODUCTS = {
    "prod": (lambda x: x.prod(1), COUNTS),
    "prod_of_int": (lambda x: x.prod(1), COUNTS[:1].int()),
    "prod_of_all": (lambda x: x.prod(), COUNTS[:1].int()),
    "prod_of_bool": (lambda x: (x > 0).prod(1), COUNTS),
    "prod_of_one": (lambda x: x.sum().prod(0), COUNTS),
    "cumprod": (lambda x: x.cumprod(1), COUNTS),
    "cumprod_of_bool": (lambda x: (x > 0).cumprod(1), COUNTS),
    "cumprod_as_double": (lambda x: x.cumprod(dim=1, dtype=torch.float64), COUNTS),
    "cummax": (lambda x: x.cummax(1).values, COUNTS),
    "scattered_means": (scattered("mean", True), COUNTS),
    "scattered_means_alone": (scattered("mean", False), COUNTS),
    "scattered_least_alone": (scattered("amin", False), COUNTS),
    "scattered_largest_alone": (scattered("amax", False), COUNTS.int()),
    "cummin_at": (lambda x: x.cummin(1).indices, COUNTS),
    "cummin_of_int": (lambda x: x.cummin(0).values, COUNTS[:, 2:].int()),
    "cummax_of_bool": (lambda x: (x < 0).cummax(1).values, COUNTS),
    **{
        f"scattered_{reduce}_of_bool{'_alone' * alone}": (scattered(reduce, not alone), COUNTS > 2)
        for reduce in ("sum", "prod", "amax", "amin")
        for alone in (False, True)
    },
    "amax_of_one": (lambda x: x.sum().amax() - x.sum().amin(), COUNTS.double()),
}


def test_products_and_extremes_of_integers_are_torchs():
    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, **batch):
            return {"loss": self.weight.sum(), **{n: f(batch[f"x_{n}"]) for n, (f, _) in PRODUCTS.items()}}

    batch = {f"x_{name}": x for name, (_, x) in PRODUCTS.items()}
    step = export_training_step(Counted(), batch, outputs=list(PRODUCTS), check=False)
    found = outputs(step, {"weight": np.ones(1, np.float32)} | {name: value.numpy() for name, value in batch.items()})
    for name, (function, x) in PRODUCTS.items():
        expected = function(x).numpy()
        assert found[f"output.{name}"].dtype == expected.dtype, name
        np.testing.assert_array_equal(found[f"output.{name}"], expected, err_msg=name)


class Of(nn.Module):
    """The sum of a function of a parameter, weighed by its place."""

    def __init__(self, function, x):
        super().__init__()
        self.function, self.x = function, nn.Parameter(x.clone())

    def forward(self, one):
        made = self.function(self.x) * one
        return (made * torch.arange(1, made.numel() + 1).reshape(made.shape)).sum()


F = nn.functional
IMAGE = torch.randn(2, 3, 5, 6, generator=SEEDED)
IDENTITY = torch.eye(2, 3).expand(2, 2, 3).clone()
LATTICE = torch.tensor([[0.0, 0, 1], [1, 1, 0], [2, 0, 0]])
PLACES = {
    "cdist_of_lattices": (lambda x: torch.cdist(x, LATTICE + 1, p=float("inf")), LATTICE),
    "pdist_of_lattices": (lambda x: F.pdist(x, p=float("inf")), LATTICE),
    "cdist_by_keywords": (lambda x: torch.cdist(x1=x, x2=LATTICE + 0.3), LATTICE),
    "bilinear_by_keywords": (lambda x: F.bilinear(input1=x, input2=x, weight=torch.ones(2, 3, 3)), LATTICE),
    "cumprod_by_keywords": (lambda x: torch.cumprod(input=x + 2, dim=1), LATTICE),
    "matrix_exp_by_keyword": (lambda x: torch.linalg.matrix_exp(input=x / 4), LATTICE),
    "border": (
        lambda x: F.grid_sample(
            IMAGE, F.affine_grid(x, IMAGE.shape, align_corners=True), padding_mode="border", align_corners=True
        ), IDENTITY,
    ),
    "grid_of_one_row": (lambda x: F.affine_grid(x, [2, 3, 1, 8], align_corners=True), IDENTITY),
    "exponentials_of_all_sizes": (
        lambda x: torch.matrix_exp(x * torch.tensor([1.0, 4000.0])[:, None, None])[0],
        torch.tensor([[[0.0, -1], [1, 0]], [[0.0, -1], [1, 0]]]),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", few(PLACES, [name for name in PLACES if not name.startswith(("exponentials", "matrix"))])
)
def test_gradients_where_functions_have_corners(name):
    model = Of(*PLACES[name])
    step = export_training_step(model, torch.ones(()), check=False)
    found = outputs(step, {"x": model.x.detach().numpy(), "input.0": np.ones((), np.float32)})
    model(torch.ones(())).backward()
    np.testing.assert_allclose(found["grad.x"], model.x.grad, rtol=1e-4, atol=1e-4)


def test_a_normalization_of_half_precision_is_computed_in_float32():
    class Normalized(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.last = nn.Linear(4, 2).half()

        def forward(self, x):
            return self.last(self.norm(x)).float().square().mean()

    torch.manual_seed(0)
    model, x = Normalized(), (1000 * torch.randn(16, 4)).half()
    step = export_training_step(model, x, check=False)
    given = {n: p.detach().numpy() for n, p in (*model.named_parameters(), *model.named_buffers())}
    found = outputs(step, given | {"input.0": x.numpy()})
    model(x).backward()
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(found[f"grad.{name}"], parameter.grad, rtol=2e-2, atol=2e-3, err_msg=name)
    np.testing.assert_allclose(found["new.norm.running_var"], model.norm.running_var, rtol=1e-3)


def test_resizing_in_float64_has_its_digits():
    class Resized(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(torch.randn(1, 2, 4, 5, generator=SEEDED, dtype=torch.float64))

        def forward(self, by):
            plain = F.interpolate(self.x, size=(5, 7), mode="bilinear")
            return (plain * by).square().sum() + F.interpolate(plain, (3, 4), mode="bilinear", antialias=True).sum()

    step = export_training_step(Resized(), torch.ones(7, dtype=torch.float64))  # checked within 1e-9
    assert "grad.x" in [value.name for value in step.graph.output]


def test_nearest_neighbours_of_data_are_read_alone():
    """A product with a matrix of zeros and ones would spread NaN over rows and columns."""
    depth = torch.randn(1, 1, 7, 9, generator=SEEDED)
    depth[0, 0, 2, 2] = torch.nan

    class Halved(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, depth, mask):
            sizes = {"nearest": 0.5, "nearest-exact": 0.7}
            made = [F.interpolate(x, scale_factor=s, mode=m) for x in (depth, mask) for m, s in sizes.items()]
            return {"loss": self.scale * 1, **{f"made{place}": one for place, one in enumerate(made)}}

    model, mask = Halved(), torch.arange(63, dtype=torch.uint8).reshape(1, 1, 7, 9) * 4
    names = [f"made{place}" for place in range(4)]
    step = export_training_step(model, (depth, mask), outputs=names, check=False)
    found = outputs(step, {"scale": np.ones((), np.float32), "input.0": depth.numpy(), "input.1": mask.numpy()})
    for name, own in model(depth, mask).items():
        if name in names:
            np.testing.assert_array_equal(found[f"output.{name}"], own, err_msg=name)


def test_rows_that_a_second_mask_covers_stay_zero():
    """The first mask leaves something of every row; with the second one, of which the example has none, nothing."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(torch.randn(4, 4, generator=SEEDED))

        def forward(self, padding):
            causal = torch.full((4, 4), -torch.inf).triu(1)
            scores = (self.x @ self.x.T + padding) + causal
            lost = (scores == -torch.inf).all(-1, keepdim=True)
            return (torch.where(lost, 0.0, scores.softmax(-1)) @ self.x).square().sum()

    model = Attention()
    step = export_training_step(model, torch.zeros(4))
    padding = torch.tensor([-torch.inf, 0, 0, 0])
    found = outputs(step, {"x": model.x.detach().numpy(), "input.0": padding.numpy()})
    np.testing.assert_allclose(found["loss"], model(padding).item(), rtol=1e-5)


ROWS, BAGS = torch.arange(8.0).reshape(4, 2), torch.tensor([0, 2, 3])
PLANE = torch.randn(1, 1, 70, 70, generator=SEEDED)
SPREAD = torch.rand(1, 3, 5, 2, generator=SEEDED) * 1.8 - 0.9
HOLED = PLANE.clone()
HOLED[0, 0, 0, 0] = torch.inf
NO_PLACE = torch.tensor([[[[torch.nan, 0.5], [0.25, torch.nan]], [[0.1, -0.2], [9, 0.3]]]])
SPEECH = torch.randn(3, 3, 4, generator=SEEDED)
WORDS = torch.tensor([[1, 2, -100], [3, 1, 2], [1, -100, -100]])


ENDS = {
    "bags_that_end_before_the_last_row": (
        lambda x: x * F.embedding_bag(torch.arange(4), ROWS, BAGS, mode="sum", include_last_offset=True),
        torch.ones(1),  # torch's gradient of the table reads memory that it has not written
    ),
    "bags_beside_one_that_is_infinite": (
        lambda x: F.embedding_bag(torch.arange(4), x, torch.tensor([0, 2, 2])),  # the one in the middle is empty
        torch.tensor([[torch.inf, 1.0], [2.0, torch.nan], [3.0, 4.0], [5.0, 6.0]]),
    ),
    "median_of_nan": (lambda x: x.median(), torch.tensor([3.0, torch.nan, 1.0, 2.0, 0.0])),
    "medians_of_nan": (
        lambda x: x.median(1, keepdim=True).values,
        torch.tensor([[3.0, torch.nan, 1.0, torch.nan], [3.0, 2.0, 1.0, 4.0]]),
    ),
    "sums_of_no_exponential": (lambda x: x.logcumsumexp(0)[[0, 1, 3]], torch.tensor([1.0, -torch.inf, -torch.inf, 2])),
    "a_sum_of_one_exponential": (lambda x: x.logcumsumexp(0), torch.tensor(3.0)),
    "padded_targets_and_speech_without_frames": (
        lambda x: F.ctc_loss(x.log_softmax(-1), WORDS, (3, 0, 0), (2, 0, 1), reduction="none", zero_infinity=True),
        SPEECH,
    ),
    "samples_of_half_precision": (
        lambda x: x * F.grid_sample(PLANE.half(), SPREAD.half(), "nearest", align_corners=False), torch.ones(1),
    ),
} | {
    f"samples_outside_of_an_image_that_begins_with_infinity_by_{mode}": (
        lambda x, mode=mode: x * F.grid_sample(HOLED, SPREAD * 2, mode, align_corners=False), torch.ones(1),
    )
    for mode in ("nearest", "bilinear")
} | {
    f"samples_of_no_place_with_{padding}": (
        lambda x, padding=padding: F.grid_sample(x, NO_PLACE, "nearest", padding, align_corners=False), PLANE,
    )
    for padding in ("zeros", "border")
}  # fmt: skip


def test_bags_take_no_number_for_each_index_and_bag():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.Parameter(torch.randn(5, 2))

        def forward(self, index, offsets):
            return F.embedding_bag(index, self.rows, offsets).sum()

    step = export_training_step(Bag(), (torch.arange(33) % 5, torch.arange(0, 33, 3)))
    shapes = [[dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in step.graph.value_info]
    assert shapes and max(map(math.prod, shapes)) < 33 * 11


def test_a_device_has_a_kernel_for_every_node_of_a_median():
    class Median(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))

        def forward(self, x):
            return (x * self.weight).median(1).values.square().mean()

    step = export_training_step(Median(), torch.randn(64, 64), check=False)
    assert placement.nodes_on_host(prepare_for_simulation(step, Preparation(kernels_of("cuda")))) == {}


@pytest.mark.slow
def test_values_and_gradients_at_the_ends_of_what_a_function_reads_are_torchs():
    """Bilinear samples of no place are left out: torch's own gradient of them crashes."""
    step = export_training_step(Each(ENDS), torch.ones(()), outputs=list(ENDS), check=False)
    given = {f"values.{name}": x.numpy() for name, (_, x) in ENDS.items()} | {"input.0": np.array(1, np.float32)}
    found = outputs(step, given)
    for name, (function, x) in ENDS.items():
        own = x.clone().requires_grad_()
        made = function(own)
        made.sum().backward()
        np.testing.assert_allclose(found[f"output.{name}"], made.detach(), rtol=1e-5, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(found[f"grad.values.{name}"], own.grad, rtol=1e-5, atol=1e-6, err_msg=name)
