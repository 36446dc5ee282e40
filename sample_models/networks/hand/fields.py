"""Networks that are functions of places, and those that solve equations."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from .case import Case, mlp, network


def encoded(x: torch.Tensor, octaves: int) -> torch.Tensor:
    """Sines and cosines of growing frequency."""
    angles = (x.unsqueeze(-1) * 2.0 ** torch.arange(octaves)).flatten(-2)
    return torch.cat([angles.sin(), angles.cos()], -1)


class NeRF(nn.Module):
    """Mildenhall et al. 2020: colours of rays, by what lies along them."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.density = mlp(36, 64, 64, 64), nn.Linear(64, 1)
        self.colour = mlp(64 + 24, 32, 3)

    def forward(self, origins: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
        """Colours (rays, 3)."""
        depths = torch.linspace(2, 6, 24)
        places = origins.unsqueeze(1) + depths.unsqueeze(-1) * directions.unsqueeze(1)
        x = self.trunk(encoded(places, 6)).relu()
        looks = encoded(directions, 4).unsqueeze(1).expand(-1, len(depths), -1)
        colours = self.colour(torch.cat([x, looks], -1)).sigmoid()
        solid = 1 - (-F.softplus(self.density(x).squeeze(-1)) * (depths[1] - depths[0])).exp()
        clear = torch.cat([torch.ones_like(solid[:, :1]), (1 - solid + 1e-10)[:, :-1]], 1).cumprod(1)
        return ((solid * clear).unsqueeze(-1) * colours).sum(1)


@network("NeRF")
def nerf() -> Case:
    return Case(NeRF(), lambda: (torch.randn(64, 3), torch.randn(64, 3), torch.rand(64, 3)), F.mse_loss)


class HashGrid(nn.Module):
    """Müller et al. 2022, Instant NGP: features of the corners of cells, found by hashing."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(512, 2) for _ in range(4))
        self.out = mlp(8, 32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Colours at places in the unit square."""
        made = []
        for level, table in enumerate(self.tables):
            at = x * 4 * 2**level
            low = at.floor()
            share, found = at - low, torch.zeros(())
            for i in (0, 1):
                for j in (0, 1):
                    row, column = (low[:, 0] + i).long(), (low[:, 1] + j).long()
                    where = (row ^ (column * 2654435761)) % 512
                    weight = (share[:, 0] - (1 - i)).abs() * (share[:, 1] - (1 - j)).abs()
                    found = found + weight.unsqueeze(1) * table(where)
            made.append(found)
        return self.out(torch.cat(made, 1))


@network("Instant NGP, hash grid")
def hash_grid() -> Case:
    return Case(HashGrid(), lambda: (torch.rand(256, 2), torch.rand(256, 3)), F.mse_loss)


class Sine(nn.Module):
    """Sitzmann et al. 2020."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """At thirty times the frequency."""
        return torch.sin(30 * x)


@network("SIREN")
def siren() -> Case:
    model = mlp(2, 64, 64, 64, 3, act=Sine)
    for index, layer in enumerate(model):
        if isinstance(layer, nn.Linear):
            bound = 0.5 if index == 0 else math.sqrt(6 / layer.in_features) / 30
            nn.init.uniform_(layer.weight, -bound, bound)
    return Case(model, lambda: (2 * torch.rand(256, 2) - 1, torch.rand(256, 3)), F.mse_loss)


class Burgers(nn.Module):
    """Raissi et al. 2017, a physics-informed network: the residual of Burgers' equation, by second derivatives."""

    def __init__(self) -> None:
        super().__init__()
        self.network = mlp(2, 32, 32, 32, 1, act=nn.Tanh)

    def forward(self, inside: torch.Tensor, edge: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The loss."""
        inside = inside.detach().requires_grad_()
        u = self.network(inside)
        slope = torch.autograd.grad(u.sum(), inside, create_graph=True)[0]
        bend = torch.autograd.grad(slope[:, 0].sum(), inside, create_graph=True)[0][:, 0]
        residual = slope[:, 1] + u.squeeze(1) * slope[:, 0] - 0.01 / math.pi * bend
        return residual.square().mean() + F.mse_loss(self.network(edge), values)


@network("physics-informed network")
def burgers() -> Case:
    return Case(Burgers(), lambda: (torch.rand(128, 2), torch.rand(32, 2), torch.rand(32, 1)), None)


class NeuralODE(nn.Module):
    """Chen et al. 2018, with eight steps of Runge and Kutta."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = mlp(4, 48, 48, 4, act=nn.Tanh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Where x is a second later."""
        step = 1 / 8
        for _ in range(8):
            a = self.rate(x)
            b = self.rate(x + step / 2 * a)
            c = self.rate(x + step / 2 * b)
            x = x + step / 6 * (a + 2 * b + 2 * c + self.rate(x + step * c))
        return x


@network("neural ODE, Runge-Kutta")
def neural_ode() -> Case:
    return Case(NeuralODE(), lambda: (torch.randn(64, 4), torch.randn(64, 4)), F.mse_loss)


class DeepONet(nn.Module):
    """Lu et al. 2019: a function of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.trunk = mlp(32, 48, 48, act=nn.GELU), mlp(1, 48, 48, act=nn.GELU)

    def forward(self, function: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Values (functions, places)."""
        return torch.einsum("np,mp->nm", self.branch(function), self.trunk(places))


@network("DeepONet")
def deep_o_net() -> Case:
    return Case(DeepONet(), lambda: (torch.randn(32, 32), torch.rand(40, 1), torch.randn(32, 40)), F.mse_loss)


class Fourier(nn.Module):
    """Li et al. 2020, a Fourier neural operator: weights of frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out, self.skip = nn.Conv1d(1, 16, 1), nn.Conv1d(16, 1, 1), nn.Conv1d(16, 16, 1)
        self.weight = nn.Parameter(torch.randn(16, 16, 8, 2) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A function further on."""
        x = self.into(x)
        modes = torch.fft.rfft(x)[..., :8]
        made = torch.einsum("nik,iok->nok", modes, torch.view_as_complex(self.weight))
        return self.out(F.gelu(torch.fft.irfft(made, x.shape[-1]) + self.skip(x)))


@network("Fourier neural operator")
def fourier() -> Case:
    return Case(Fourier(), lambda: (torch.randn(16, 1, 64), torch.randn(16, 1, 64)), F.mse_loss)


class Splines(nn.Module):
    """Liu et al. 2024, a layer of a Kolmogorov-Arnold network: cubic B-splines on every edge."""

    knots: torch.Tensor

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.base = nn.Linear(before, after)
        self.weight = nn.Parameter(torch.randn(after, before, 8) * 0.1)
        self.register_buffer("knots", torch.linspace(-2.2, 2.2, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sums of splines."""
        at, knots = x.unsqueeze(-1), self.knots
        made = ((at >= knots[:-1]) & (at < knots[1:])).to(x.dtype)
        for order in (1, 2, 3):
            left = (at - knots[: -order - 1]) / (knots[order:-1] - knots[: -order - 1])
            right = (knots[order + 1 :] - at) / (knots[order + 1 :] - knots[1:-order])
            made = left * made[..., :-1] + right * made[..., 1:]
        return self.base(F.silu(x)) + torch.einsum("nik,oik->no", made, self.weight)


@network("Kolmogorov-Arnold network")
def kan() -> Case:
    model = nn.Sequential(Splines(6, 16), Splines(16, 3))
    return Case(model, lambda: (torch.randn(64, 6), torch.randn(64, 3)), F.mse_loss)


class DeepKernel(nn.Module):
    """Wilson et al. 2015: the marginal likelihood of a Gaussian process over features that are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.noise = mlp(4, 32, 8, act=nn.Tanh), nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Its negative logarithm, by Cholesky's factors."""
        z = self.features(x)
        kernel = (-0.5 * torch.cdist(z, z).square()).exp() + F.softplus(self.noise) * torch.eye(len(x))
        factor = torch.linalg.cholesky(kernel)
        half = torch.linalg.solve_triangular(factor, y, upper=False)
        return 0.5 * half.square().sum() + factor.diagonal().log().sum()


@network("deep kernel, Cholesky")
def deep_kernel() -> Case:
    return Case(DeepKernel(), lambda: (torch.randn(32, 4), torch.randn(32, 1)), None)
