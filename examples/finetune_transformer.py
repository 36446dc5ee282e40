"""Fine-tune a small transformer within 75 % of the memory of its original step.

A PyTorch model from a config, AdamW with a learning-rate schedule, evaluation, a checkpoint, and the trained weights
back in the module. Needs onnx-remat[torch].
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from onnx_remat.converters.pytorch import export_training_step, initial_feeds
from torch import nn

import onnx_remat
from onnx_remat.training import Loop


@dataclass(frozen=True)
class Config:
    words: int = 64
    length: int = 64
    width: int = 64
    heads: int = 4
    blocks: int = 3
    batch: int = 16
    steps: int = 60
    warmup: int = 6
    rate: float = 3e-3


class Model(nn.Module):
    """Predict the next word at every position."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.words = nn.Embedding(config.words, config.width)
        self.places = nn.Parameter(0.02 * torch.randn(config.length, config.width))
        sizes = config.width, config.heads, 4 * config.width
        block = nn.TransformerEncoderLayer(*sizes, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, config.blocks, enable_nested_tensor=False)
        self.head = nn.Linear(config.width, config.words)
        mask = torch.full((config.length, config.length), float("-inf")).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.words(tokens) + self.places, self.mask, is_causal=True)).flatten(0, 1)


def batch(config: Config, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Texts that count upwards in steps of 1 to 3: the tokens, and the next one at every position."""
    start, step = rng.integers(0, config.words, (config.batch, 1)), rng.integers(1, 4, (config.batch, 1))
    text = (start + step * np.arange(config.length + 1)) % config.words
    return text[:, :-1], text[:, 1:].reshape(-1)


def evaluate(model: nn.Module, config: Config) -> float:
    """The module's own loss, in PyTorch, on texts outside the training set."""
    tokens, target = map(torch.from_numpy, batch(config, np.random.default_rng(1)))
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(tokens), target))


def main() -> None:
    config, rng = Config(), np.random.default_rng(0)
    torch.manual_seed(0)
    model = Model(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(config.rate))  # a tensor: an input of the step
    example = tuple(map(torch.from_numpy, batch(config, rng)))
    step = export_training_step(model, example, nn.functional.cross_entropy, optimizer)
    result = onnx_remat.rewrite_model(step, budget="75%", effort=4)
    print(result.report.verdict())

    before = evaluate(model, config)
    feeds = {"input.0": example[0].numpy(), "input.1": example[1].numpy(), "learning_rate": np.float32(config.rate)}
    loop = Loop(result, initial_feeds(step, model, optimizer) | feeds)
    for number in range(config.steps):
        warm = min(1.0, (number + 1) / config.warmup)
        cosine = 0.5 * (1 + np.cos(np.pi * number / config.steps))
        tokens, target = batch(config, rng)
        rate = np.float32(config.rate * warm * cosine)
        loss = loop.step({"input.0": tokens, "input.1": target, "learning_rate": rate})
        if number % 10 == 0:
            print(f"step {number}: loss {loss:.3f}")

    loop.save(Path("checkpoint.safetensors"))
    model.load_state_dict({name: torch.from_numpy(array) for name, array in loop.state().items()}, strict=False)
    print(f"evaluated: {before:.3f} before, {evaluate(model, config):.3f} after")


if __name__ == "__main__":
    main()
