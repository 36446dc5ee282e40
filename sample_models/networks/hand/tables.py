"""Networks over rows of tables, users and items, and those that act."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .case import Case, mlp, network

ROWS, ITEMS, COLUMNS = 64, 100, 6


def ids(*size: int) -> torch.Tensor:
    """Of items or categories."""
    return torch.randint(0, ITEMS, size)


def clicks() -> torch.Tensor:
    """Zeros and ones."""
    return torch.randint(0, 2, (ROWS,)).float()


class DLRM(nn.Module):
    """Naumov et al. 2019: bags of categories, products of all pairs."""

    pairs: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(ITEMS, 16, mode="sum") for _ in range(COLUMNS))
        self.bottom, self.top = mlp(8, 32, 16), mlp(16 + 21, 32, 1)
        self.register_buffer("pairs", torch.tril_indices(COLUMNS + 1, COLUMNS + 1, -1))

    def forward(self, numbers: torch.Tensor, categories: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """A score for every row."""
        x = self.bottom(numbers)
        every = [x, *(bag(of, offsets) for bag, of in zip(self.bags, categories, strict=True))]
        both = torch.stack(every, 1)
        products = both @ both.transpose(1, 2)
        return self.top(torch.cat([x, products[:, self.pairs[0], self.pairs[1]]], 1)).squeeze(1)


@network("DLRM")
def dlrm() -> Case:
    def batch() -> tuple[torch.Tensor, ...]:
        return torch.randn(ROWS, 8), ids(COLUMNS, 3 * ROWS), 3 * torch.arange(ROWS), clicks()

    return Case(DLRM(), batch, F.binary_cross_entropy_with_logits)


class DeepFM(nn.Module):
    """Guo et al. 2017: a factorization machine and a deep network that share embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(ITEMS * COLUMNS, 1), nn.Embedding(ITEMS * COLUMNS, 8)
        nn.init.normal_(self.second.weight, std=0.1)
        self.deep = nn.Sequential(nn.Linear(8 * COLUMNS, 32), nn.BatchNorm1d(32), nn.PReLU(), nn.Linear(32, 1))

    def forward(self, categories: torch.Tensor) -> torch.Tensor:
        """A chance for every row."""
        at = categories + ITEMS * torch.arange(COLUMNS)
        x = self.second(at)
        pairs = 0.5 * (x.sum(1).square() - x.square().sum(1)).sum(1)
        return (self.first(at).sum((1, 2)) + pairs + self.deep(x.flatten(1)).squeeze(1)).sigmoid()


@network("DeepFM")
def deep_fm() -> Case:
    return Case(DeepFM(), lambda: (ids(ROWS, COLUMNS), clicks()), F.binary_cross_entropy)


class Factors(nn.Module):
    """Koren et al. 2009; Rendle et al. 2009: an item that was bought is to be above one that was not."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(ITEMS, 16), nn.Embedding(ITEMS, 16)
        self.bias = nn.Embedding(ITEMS, 1)

    def forward(self, user: torch.Tensor, bought: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The loss, with a penalty on weights."""
        u = self.users(user)
        ahead = (u * (self.items(bought) - self.items(other))).sum(1, keepdim=True)
        ahead = ahead + self.bias(bought) - self.bias(other)
        return F.softplus(-ahead).mean() + 1e-3 * sum(p.square().sum() for p in self.parameters())


@network("matrix factorization, BPR")
def factors() -> Case:
    return Case(Factors(), lambda: (ids(ROWS), ids(ROWS), ids(ROWS)), None)


def sparsemax(x: torch.Tensor) -> torch.Tensor:
    """Martins & Astudillo 2016: the nearest point of the simplex."""
    ordered = x.sort(-1, descending=True).values
    counts = torch.arange(1, x.shape[-1] + 1)
    sums = ordered.cumsum(-1)
    size = (1 + counts * ordered > sums).sum(-1, keepdim=True)
    return (x - (sums.gather(-1, size - 1) - 1) / size).clamp(min=0)


class TabNet(nn.Module):
    """Arik & Pfister 2019: in each step a sparse mask of columns."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.look = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(3))
        self.think = nn.ModuleList(nn.Sequential(nn.Linear(16, 48), nn.BatchNorm1d(48), nn.GLU()) for _ in range(3))
        self.out = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of every row."""
        x = self.norm(x)
        left, state, made = torch.ones_like(x), x, torch.zeros(())
        for look, think in zip(self.look, self.think, strict=True):
            mask = sparsemax(look(state) * left)
            left = left * (1.3 - mask)
            found, state = think(mask * x).split([8, 16], 1)
            made = made + found.relu()
        return self.out(made)


@network("TabNet, sparsemax")
def tab_net() -> Case:
    return Case(TabNet(), lambda: (torch.randn(ROWS, 16), torch.randint(0, 3, (ROWS,))))


class Policy(nn.Module):
    """Schulman et al. 2017, PPO: an actor and a critic that share their first layers."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.mean, self.value = mlp(12, 48, 48, act=nn.Tanh), nn.Linear(48, 3), nn.Linear(48, 1)
        self.log_scale = nn.Parameter(torch.zeros(3))

    def forward(
        self, seen: torch.Tensor, done: torch.Tensor, before: torch.Tensor, gain: torch.Tensor, worth: torch.Tensor
    ) -> torch.Tensor:
        """The clipped loss, of the value, and of the entropy."""
        x = self.trunk(seen).tanh()
        policy = torch.distributions.Normal(self.mean(x), self.log_scale.exp(), validate_args=False)
        ratio = (policy.log_prob(done).sum(1) - before).exp()
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        better = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        return 0.5 * F.mse_loss(self.value(x).squeeze(1), worth) - better - 0.01 * policy.entropy().sum(1).mean()


@network("PPO, actor and critic")
def ppo() -> Case:
    def batch() -> tuple[torch.Tensor, ...]:
        return torch.randn(ROWS, 12), torch.randn(ROWS, 3), torch.randn(ROWS) - 4, torch.randn(ROWS), torch.randn(ROWS)

    return Case(Policy(), batch, None)


class Dueling(nn.Module):
    """Wang et al. 2016: Q-values, learned from a copy that stays behind; the next action is the network's own."""

    def __init__(self) -> None:
        super().__init__()
        self.now = nn.ModuleList([mlp(12, 48, 48), nn.Linear(48, 1), nn.Linear(48, 4)])
        self.behind = copy.deepcopy(self.now).requires_grad_(False)

    @staticmethod
    def values(network: Any, seen: torch.Tensor) -> torch.Tensor:
        """Of all actions."""
        trunk, value, ahead = network
        x = trunk(seen).relu()
        return value(x) + ahead(x) - ahead(x).mean(1, keepdim=True)

    def forward(
        self, seen: torch.Tensor, action: torch.Tensor, reward: torch.Tensor, after: torch.Tensor
    ) -> torch.Tensor:
        """The loss."""
        with torch.no_grad():
            best = self.values(self.now, after).argmax(1, keepdim=True)
            target = reward + 0.99 * self.values(self.behind, after).gather(1, best).squeeze(1)
        return F.huber_loss(self.values(self.now, seen).gather(1, action.unsqueeze(1)).squeeze(1), target)


@network("double dueling DQN")
def dqn() -> Case:
    def batch() -> tuple[torch.Tensor, ...]:
        return torch.randn(ROWS, 12), torch.randint(0, 4, (ROWS,)), torch.randn(ROWS), torch.randn(ROWS, 12)

    return Case(Dueling(), batch, None)


class Densities(nn.Module):
    """Bishop 1994: a mixture of five normal densities."""

    def __init__(self) -> None:
        super().__init__()
        self.network = mlp(4, 48, 48, 15, act=nn.Tanh)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Negative log-likelihood of y."""
        shares, means, log_scales = self.network(x).chunk(3, 1)
        each = -0.5 * ((y - means) * (-log_scales).exp()).square() - log_scales - 0.5 * math.log(2 * math.pi)
        return -(shares.log_softmax(1) + each).logsumexp(1).mean()


@network("mixture density network")
def densities() -> Case:
    return Case(Densities(), lambda: (torch.randn(ROWS, 4), torch.randn(ROWS, 1)), None)


class Hyper(nn.Module):
    """Ha et al. 2016: one network makes the weights of another, for each row its own."""

    def __init__(self) -> None:
        super().__init__()
        self.network = mlp(4, 32, 8 * 16 + 16 * 3)

    def forward(self, task: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Three values for every row."""
        first, second = self.network(task).split([8 * 16, 16 * 3], 1)
        hidden = torch.bmm(x.unsqueeze(1), first.view(-1, 8, 16)).relu()
        return torch.bmm(hidden, second.view(-1, 16, 3)).squeeze(1)


@network("hypernetwork")
def hyper() -> Case:
    return Case(Hyper(), lambda: (torch.randn(ROWS, 4), torch.randn(ROWS, 8), torch.randn(ROWS, 3)), F.mse_loss)


class LowRank(nn.Module):
    """Hu et al. 2021, LoRA: a layer that is not trained, and a product of two thin matrices that is."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.layer = nn.Linear(before, after).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(4, before) * 0.1)
        self.up = nn.Parameter(torch.randn(after, 4) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both."""
        return self.layer(x) + F.linear(F.linear(x, self.down), self.up)


@network("LoRA")
def lora() -> Case:
    model = nn.Sequential(LowRank(32, 64), nn.GELU(), LowRank(64, 64), nn.GELU(), LowRank(64, 5))
    return Case(model, lambda: (torch.randn(ROWS, 32), torch.randint(0, 5, (ROWS,))))


class Highway(nn.Module):
    """Srivastava et al. 2015."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.gate = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x, or something else."""
        return torch.lerp(x, self.made(x).relu(), self.gate(x).sigmoid())


@network("highway network")
def highway() -> Case:
    model = nn.Sequential(nn.Linear(16, 32), *(Highway() for _ in range(6)), nn.Linear(32, 5))
    return Case(model, lambda: (torch.randn(ROWS, 16), torch.randint(0, 5, (ROWS,))))


@network("MLP, orthogonal weights")
def orthogonal() -> Case:
    layers = [nn.utils.parametrizations.orthogonal(nn.Linear(16, 16)) for _ in range(2)]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), nn.Linear(16, 5))
    return Case(model, lambda: (torch.randn(ROWS, 16), torch.randint(0, 5, (ROWS,))))


@network("MLP, eight kinds of activation")
def activations() -> Case:
    kinds = [nn.ELU(), nn.Mish(), nn.Softsign(), nn.Hardsigmoid(), nn.CELU(), nn.LogSigmoid(), nn.PReLU(),
             nn.Tanhshrink()]  # fmt: skip
    layers = [module for kind in kinds for module in (nn.Linear(16, 16), kind)]
    model = nn.Sequential(*layers, nn.Linear(16, 5))
    return Case(model, lambda: (torch.randn(ROWS, 16), torch.randint(0, 5, (ROWS,))))
