"""Networks over graphs, sets and points."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .case import Case, mlp, network

NODES, FEATURES, KINDS, EDGES = 64, 16, 5, 256


def graph() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features, a symmetric adjacency with loops, and a class for each node."""
    linked = torch.rand(NODES, NODES) < 0.1
    linked = linked | linked.t() | torch.eye(NODES, dtype=torch.bool)
    return torch.randn(NODES, FEATURES), linked.float(), torch.randint(0, KINDS, (NODES,))


def edges() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features, edges (2, n) and a class for each node."""
    return torch.randn(NODES, FEATURES), torch.randint(0, NODES, (2, EDGES)), torch.randint(0, KINDS, (NODES,))


class GCN(nn.Module):
    """Kipf & Welling 2016, on a dense adjacency."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(FEATURES, 32), nn.Linear(32, 32), nn.Linear(32, KINDS)])

    def forward(self, x: torch.Tensor, linked: torch.Tensor) -> torch.Tensor:
        """Scores of every node."""
        scale = linked.sum(1).rsqrt()
        shares = scale[:, None] * linked * scale
        for layer in self.layers[:-1]:
            x = (shares @ layer(x)).relu()
        return shares @ self.layers[-1](x)


@network("GCN, dense adjacency")
def gcn() -> Case:
    return Case(GCN(), graph)


class GAT(nn.Module):
    """Veličković et al. 2017, four heads on a dense adjacency."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.ModuleList([nn.Linear(FEATURES, 32, bias=False), nn.Linear(32, 32, bias=False)])
        self.scores = nn.ParameterList(torch.randn(2, 4, 8) * 0.3 for _ in range(2))
        self.out = nn.Linear(32, KINDS)

    def forward(self, x: torch.Tensor, linked: torch.Tensor) -> torch.Tensor:
        """Scores of every node."""
        for into, scores in zip(self.into, self.scores, strict=True):
            heads = into(x).unflatten(-1, (4, 8)).transpose(0, 1)
            here, there = torch.einsum("hnd,shd->shn", heads, scores)
            raw = F.leaky_relu(here[:, :, None] + there[:, None, :], 0.2)
            shares = raw.masked_fill(linked == 0, -torch.inf).softmax(-1)
            x = F.elu((shares @ heads).transpose(0, 1).flatten(1))
        return self.out(x)


@network("GAT, dense adjacency")
def gat() -> Case:
    return Case(GAT(), graph)


class GraphSAGE(nn.Module):
    """Hamilton et al. 2017: means over neighbours, by lists of edges."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.ModuleList([nn.Linear(FEATURES, 32), nn.Linear(32, KINDS)])
        self.others = nn.ModuleList([nn.Linear(FEATURES, 32), nn.Linear(32, KINDS)])

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Scores of every node."""
        source, target = edges
        degree = torch.zeros(len(x)).index_add(0, target, torch.ones(len(target))).clamp(min=1)
        for index, (own, others) in enumerate(zip(self.own, self.others, strict=True)):
            mean = torch.zeros_like(x).index_add(0, target, x[source]) / degree[:, None]
            x = own(x) + others(mean)
            x = F.normalize(x.relu(), dim=-1) if index == 0 else x
        return x


@network("GraphSAGE, edge lists")
def graph_sage() -> Case:
    return Case(GraphSAGE(), edges)


class MaxMessages(nn.Module):
    """The largest message of each neighbour, by scatter_reduce; a graph network of Gilmer et al. 2017."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = mlp(2 * FEATURES, 32, FEATURES), nn.GRUCell(FEATURES, FEATURES)
        self.out = nn.Linear(FEATURES, KINDS)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Scores of every node."""
        source, target = edges
        for _ in range(2):
            made = self.message(torch.cat([x[source], x[target]], 1))
            index = target[:, None].expand_as(made)
            heard = torch.zeros_like(x).scatter_reduce(0, index, made, "amax", include_self=False)
            x = self.update(heard, x)
        return self.out(x)


@network("message passing, largest by scatter_reduce")
def max_messages() -> Case:
    return Case(MaxMessages(), edges)


class EGNN(nn.Module):
    """Satorras et al. 2021: features and places of all pairs, equivariant to turns."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(mlp(2 * FEATURES + 1, 32, 32, act=nn.SiLU) for _ in range(2))
        self.moves = nn.ModuleList(mlp(32, 32, 1, act=nn.SiLU) for _ in range(2))
        self.nodes = nn.ModuleList(mlp(FEATURES + 32, 32, FEATURES, act=nn.SiLU) for _ in range(2))

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Where the points go."""
        count = x.shape[1]
        for pair, move, node in zip(self.pairs, self.moves, self.nodes, strict=True):
            apart = places.unsqueeze(2) - places.unsqueeze(1)
            both = [x.unsqueeze(2).expand(-1, -1, count, -1), x.unsqueeze(1).expand(-1, count, -1, -1)]
            message = pair(torch.cat([*both, apart.square().sum(-1, keepdim=True)], -1))
            places = places + (apart * move(message)).mean(2)
            x = x + node(torch.cat([x, message.sum(2)], -1))
        return places


@network("EGNN")
def egnn() -> Case:
    def batch() -> tuple[torch.Tensor, ...]:
        return torch.randn(4, 12, FEATURES), torch.randn(4, 12, 3), torch.randn(4, 12, 3)

    return Case(EGNN(), batch, F.mse_loss)


class SchNet(nn.Module):
    """Schütt et al. 2017: energies of atoms, and forces as their gradient by places."""

    centres: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.filter = nn.Embedding(8, 24), mlp(12, 24, 24, act=nn.Softplus)
        self.into, self.out = nn.Linear(24, 24), mlp(24, 24, 1, act=nn.Softplus)
        self.register_buffer("centres", torch.linspace(0, 5, 12))

    def forward(
        self, kinds: torch.Tensor, places: torch.Tensor, energies: torch.Tensor, forces: torch.Tensor
    ) -> torch.Tensor:
        """The loss of both."""
        places = places.detach().requires_grad_()
        apart = ((places.unsqueeze(2) - places.unsqueeze(1)).square().sum(-1) + 0.01).sqrt()
        x, shape = self.kinds(kinds), (-(apart.unsqueeze(-1) - self.centres).square()).exp()
        for _ in range(2):
            x = x + (self.filter(shape) * self.into(x).unsqueeze(1)).sum(2)
        energy = self.out(x).mean((1, 2))
        (slope,) = torch.autograd.grad(energy.sum(), places, create_graph=True)
        return F.mse_loss(energy, energies) + F.mse_loss(-slope, forces)


@network("SchNet, energies and forces")
def schnet() -> Case:
    def batch() -> tuple[torch.Tensor, ...]:
        return torch.randint(0, 8, (4, 10)), 2 * torch.randn(4, 10, 3), torch.randn(4), torch.randn(4, 10, 3)

    return Case(SchNet(), batch, None)


def points(model: nn.Module) -> Case:
    """A class for every cloud of points."""
    return Case(model, lambda: (torch.randn(4, 3, 64), torch.randint(0, KINDS, (4,))))


class TNet(nn.Module):
    """The part of PointNet that turns its input."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.layers = nn.Sequential(nn.Conv1d(size, 32, 1), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 64, 1))
        self.out = mlp(64, 32, size * size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x, turned."""
        turn = self.out(self.layers(x).amax(-1)).unflatten(-1, (self.size, self.size)) + torch.eye(self.size)
        return turn @ x


@network("PointNet")
def point_net() -> Case:
    """Qi et al. 2016."""

    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv1d(before, after, 1), nn.BatchNorm1d(after), nn.ReLU()]

    layers = [TNet(3), *block(3, 32), TNet(32), *block(32, 64), *block(64, 128)]
    return points(nn.Sequential(*layers, nn.AdaptiveMaxPool1d(1), nn.Flatten(), mlp(128, 32, KINDS)))


class DGCNN(nn.Module):
    """Wang et al. 2018: convolutions over edges to the eight nearest points, found again in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(2 * before, 32, 1), nn.BatchNorm2d(32), nn.LeakyReLU(0.2)) for before in (3, 32)
        )
        self.out = nn.Linear(32, KINDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of the cloud."""
        for layer in self.layers:
            rows = x.transpose(1, 2)
            near = torch.cdist(rows, rows).topk(8, largest=False).indices
            at = near.flatten(1).unsqueeze(1).expand(-1, x.shape[1], -1)
            others = x.gather(2, at).unflatten(2, near.shape[1:])
            own = x.unsqueeze(-1).expand_as(others)
            x = layer(torch.cat([own, others - own], 1)).amax(-1)
        return self.out(x.amax(-1))


@network("DGCNN, nearest points")
def dgcnn() -> Case:
    return points(DGCNN())


class InducedAttention(nn.Module):
    """Lee et al. 2018: a set attends to eight learned points that attended to it."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(1, 8, 32) * 0.2)
        self.first, self.second = (nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(2))
        self.after, self.norm = mlp(32, 32, 32), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The set further on."""
        seen = self.first(self.points.expand(len(x), -1, -1), x, x)[0]
        x = self.norm(x + self.second(x, seen, seen)[0])
        return x + self.after(x)


class SetTransformer(nn.Module):
    """Two of these, then a learned point that attends to the set."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.layers = nn.Linear(3, 32), nn.Sequential(InducedAttention(), InducedAttention())
        self.seed, self.pool = nn.Parameter(torch.randn(1, 1, 32)), nn.MultiheadAttention(32, 4, batch_first=True)
        self.out = nn.Linear(32, KINDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of the set."""
        x = self.layers(self.into(x.transpose(1, 2)))
        return self.out(self.pool(self.seed.expand(len(x), -1, -1), x, x)[0].squeeze(1))


@network("Set Transformer")
def set_transformer() -> Case:
    return points(SetTransformer())


class DeepSets(nn.Module):
    """Zaheer et al. 2017."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.all = mlp(3, 64, 64, act=nn.ELU), mlp(64, 64, KINDS, act=nn.ELU)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of the set."""
        return self.all(self.each(x.transpose(1, 2)).sum(1))


@network("Deep Sets")
def deep_sets() -> Case:
    return points(DeepSets())
