"""CIFAR-10 networks of searched cells, as DARTS's authors stack them: NASNet-A, AmoebaNet-A and DARTS (second order).

A cell reads the outputs of the two cells before it; each of its nodes adds two operations on earlier nodes, and the
cell's output is some of its nodes side by side. Sources: Zoph et al. 2018 (NASNet-A), Real et al. 2019 (AmoebaNet-A),
Liu et al. 2019 (DARTS, arXiv:1806.09055, section 3 and appendix for the stacking and for cells as drawn there).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Cell:
    """A kind of cell: node i adds edges 2i and 2i + 1, each an operation on an earlier node (0 and 1: the inputs).

    >>> Cell.parse("sep3:0 skip:1", "2").edges
    (('sep3', 0), ('skip', 1))
    """

    edges: tuple[tuple[str, int], ...]
    concat: tuple[int, ...]

    @staticmethod
    def parse(edges: str, concat: str) -> Cell:
        """From ``operation:node`` and the nodes that make the output, both separated by spaces."""
        pairs = (edge.split(":") for edge in edges.split())
        return Cell(tuple((name, int(node)) for name, node in pairs), tuple(map(int, concat.split())))


@dataclass(frozen=True, slots=True)
class Genotype:
    """Both kinds of cells of a network."""

    normal: Cell
    reduction: Cell


GENOTYPES = {
    "nasnet": Genotype(
        Cell.parse("sep5:1 sep3:0 sep5:0 sep3:0 avg:1 skip:0 avg:0 avg:0 sep3:1 skip:1", "2 3 4 5 6"),
        Cell.parse("sep5:1 sep7:0 max:1 sep7:0 avg:1 sep5:0 skip:3 avg:2 sep3:2 max:1", "4 5 6"),
    ),
    "amoebanet": Genotype(
        Cell.parse("avg:0 max:1 sep3:0 sep5:2 sep3:0 avg:3 sep3:1 skip:1 skip:0 avg:1", "4 5 6"),
        Cell.parse("avg:0 sep3:1 max:0 sep7:2 sep7:0 avg:1 max:0 max:1 conv7:0 sep3:5", "3 4 6"),
    ),
    "darts": Genotype(
        Cell.parse("sep3:0 sep3:1 sep3:0 sep3:1 sep3:1 skip:0 skip:0 dil3:2", "2 3 4 5"),
        Cell.parse("max:0 max:1 skip:2 max:1 max:0 skip:2 skip:2 max:1", "2 3 4 5"),
    ),
}


def build(name: str, width: int = 36, layers: int = 20, classes: int = 10) -> nn.Module:
    """A network by name, `width` channels wide at first, without auxiliary head and drop path."""
    return _Network(GENOTYPES[name], width, layers, classes)


def _conv_norm(inside: int, outside: int) -> list[nn.Module]:
    """ReLU, 1 x 1 convolution, BatchNorm."""
    return [nn.ReLU(), nn.Conv2d(inside, outside, 1, bias=False), nn.BatchNorm2d(outside)]


def _separable(width: int, size: int, stride: int, dilation: int = 1) -> list[nn.Module]:
    """ReLU, depthwise convolution, 1 x 1 convolution, BatchNorm."""
    depthwise = nn.Conv2d(
        width, width, size, stride, dilation * (size - 1) // 2, dilation=dilation, groups=width, bias=False
    )
    return [nn.ReLU(), depthwise, nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width)]


def _twice(size: int) -> Callable[[int, int], nn.Module]:
    return lambda width, stride: nn.Sequential(*_separable(width, size, stride), *_separable(width, size, 1))


def _seven(width: int, stride: int) -> nn.Module:
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(width, width, (1, 7), (1, stride), (0, 3), bias=False),
        nn.Conv2d(width, width, (7, 1), (stride, 1), (3, 0), bias=False),
        nn.BatchNorm2d(width),
    )


_OPERATIONS: dict[str, Callable[[int, int], nn.Module]] = {
    "avg": lambda width, stride: nn.AvgPool2d(3, stride, 1, count_include_pad=False),
    "max": lambda width, stride: nn.MaxPool2d(3, stride, 1),
    "skip": lambda width, stride: nn.Identity() if stride == 1 else _Halve(width, width),
    "sep3": _twice(3),
    "sep5": _twice(5),
    "sep7": _twice(7),
    "dil3": lambda width, stride: nn.Sequential(*_separable(width, 3, stride, dilation=2)),
    "conv7": _seven,
}


class _Halve(nn.Module):
    """Half the height and width: two strided 1 x 1 convolutions, the second a pixel off, side by side."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(inside, outside // 2, 1, 2, bias=False)
        self.odd = nn.Conv2d(inside, outside // 2, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(outside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(x)
        made: torch.Tensor = self.norm(torch.cat([self.even(x), self.odd(x[:, :, 1:, 1:])], dim=1))
        return made


class _Cell(nn.Module):
    def __init__(self, cell: Cell, inside: Sequence[int], width: int, halves: bool, halved: bool) -> None:
        super().__init__()
        first = _Halve(inside[0], width) if halved else nn.Sequential(*_conv_norm(inside[0], width))
        self.inputs = nn.ModuleList([first, nn.Sequential(*_conv_norm(inside[1], width))])
        self.edges = nn.ModuleList(
            _OPERATIONS[name](width, 2 if halves and node < 2 else 1) for name, node in cell.edges
        )
        self.nodes = [node for _, node in cell.edges]
        self.concat = cell.concat

    def forward(self, before: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        made = [self.inputs[0](before), self.inputs[1](last)]
        for i in range(0, len(self.nodes), 2):
            made.append(self.edges[i](made[self.nodes[i]]) + self.edges[i + 1](made[self.nodes[i + 1]]))
        return torch.cat([made[i] for i in self.concat], dim=1)


class _Network(nn.Module):
    def __init__(self, genotype: Genotype, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 3 * width, 3, padding=1, bias=False), nn.BatchNorm2d(3 * width))
        inside, halved = [3 * width, 3 * width], False
        self.cells = nn.ModuleList()
        for layer in range(layers):
            halves = layer in (layers // 3, 2 * layers // 3)
            width *= 2 if halves else 1
            cell = genotype.reduction if halves else genotype.normal
            self.cells.append(_Cell(cell, inside, width, halves, halved))
            inside, halved = [inside[1], width * len(cell.concat)], halves
        self.classifier = nn.Linear(inside[1], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = last = self.stem(x)
        for cell in self.cells:
            before, last = last, cell(before, last)
        made: torch.Tensor = self.classifier(last.mean((2, 3)))
        return made
