"""Three PyTorch models for trainings that a page can show: an MLP, a CNN, a transformer, with seeds of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sample_models.networks.torch_models import Case


@dataclass(frozen=True, slots=True)
class Model:
    """A model with its batch, its optimizer, and what it is in a few words."""

    name: str
    about: str
    case: Case
    optimizer: torch.optim.Optimizer


def mlp() -> Model:
    """Twelve layers of 256 with LayerNorm and GELU, on points of which two coordinates decide the class."""
    generator = torch.manual_seed(0)
    layers = [m for _ in range(12) for m in (nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU())]
    points = torch.randn(2048, 256, generator=generator)
    classes = 2 * (points[:, 0] > 0).long() + (points[:, 1] > 0).long()
    case = Case(nn.Sequential(*layers, nn.Linear(256, 4)), (points, classes))
    about = "MLP, 12 layers of 256 with LayerNorm, batch 2048, AdamW"
    return Model("mlp", about, case, torch.optim.AdamW(case.model.parameters(), lr=3e-4))


class Residual(nn.Module):
    """Two convolutions with BatchNorm around which the input goes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> Any:
        return torch.relu(images + self.inner(images))


def cnn() -> Model:
    """Six residual blocks, on images of stripes and grids in noise."""
    generator = torch.manual_seed(0)
    stem, head = nn.Conv2d(1, 16, 3, padding=1), (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 3))
    blocks = [Residual(16), Residual(16), Residual(16), nn.Conv2d(16, 32, 3, 2, 1), *(Residual(32) for _ in range(3))]
    classes = torch.randint(0, 3, (32,), generator=generator)
    wave = torch.sin(torch.arange(32.0))
    patterns = torch.stack([wave.expand(32, 32), wave.expand(32, 32).T, torch.outer(wave, wave)])
    images = patterns[classes].unsqueeze(1) + 0.3 * torch.randn(32, 1, 32, 32, generator=generator)
    case = Case(nn.Sequential(stem, *blocks, *head), (images, classes))
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.02, momentum=0.9)
    return Model("cnn", "Residual CNN, 6 blocks, batch 32 of 32 x 32, SGD with momentum", case, optimizer)


class Transformer(nn.Module):
    """Predicts the next word at every place."""

    def __init__(self, blocks: int, width: int, length: int, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        block = nn.TransformerEncoderLayer(
            width, max(1, width // 32), 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, blocks, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)
        self.register_buffer("mask", torch.full((length, length), float("-inf")).triu(1), persistent=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.blocks(self.words(tokens) + self.places, self.mask, is_causal=True)).flatten(0, 1)


def transformer(blocks: int = 4, width: int = 128, length: int = 64, batch: int = 32) -> Model:
    """Blocks of the given width on texts that count upwards in steps of 1 to 3."""
    generator, words = torch.manual_seed(0), 64
    model = Transformer(blocks, width, length, words)
    start = torch.randint(0, words, (batch, 1), generator=generator)
    pace = torch.randint(1, 4, (batch, 1), generator=generator)
    text = (start + pace * torch.arange(length + 1)) % words
    case = Case(model, (text[:, :-1].contiguous(), text[:, 1:].reshape(-1)))
    about = f"Transformer, {blocks} blocks of {width}, batch {batch} of {length} words, AdamW"
    return Model("transformer", about, case, torch.optim.AdamW(model.parameters(), lr=3e-3))


MODELS = {"mlp": mlp, "cnn": cnn, "transformer": transformer}
