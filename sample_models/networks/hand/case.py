"""What a network written by hand is handed over as, and the table of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, slots=True)
class Case:
    """A network in training mode, what makes batches, and the loss; None where the network returns it."""

    model: nn.Module
    batch: Callable[[], tuple[torch.Tensor, ...]]
    loss: Callable[[Any, Any], torch.Tensor] | None = F.cross_entropy


Maker = Callable[[], Case]

NETWORKS: dict[str, Maker] = {}


def network(name: str) -> Callable[[Maker], Maker]:
    """Enter the function below as the network of this name."""

    def enter(make: Maker) -> Maker:
        NETWORKS[name] = make
        return make

    return enter


def mlp(*sizes: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with activations between them."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), act()]
    return nn.Sequential(*layers[:-1])
