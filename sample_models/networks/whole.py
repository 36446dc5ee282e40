"""Networks as people train them on a CPU, with their optimizers: for comparisons of whole processes.

Each has a list of blocks, which PyTorch's checkpointing can run one by one again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from sample_models.networks.torch_models import ADAMW, Case, UNet, import_torchvision, import_transformers

CHARACTERS = 65


class Block(nn.Module):
    """A transformer's block, its norms first, its attention PyTorch's own."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.attention(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        queries, keys, values = parts.unbind(0)
        made = F.scaled_dot_product_attention(queries, keys, values, is_causal=self.causal)
        x = x + self.joined(made.transpose(1, 2).reshape(batch, length, width))
        kept: torch.Tensor = x + self.feed_forward(self.second(x))
        return kept


class Language(nn.Module):
    """A language model; the loss is inside, as transformers' models have it."""

    def __init__(self, words: int, length: int, width: int, heads: int, layers: int, causal: bool = True) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Vision(nn.Module):
    """A vision transformer on patches of an image."""

    def __init__(self, patches: int, patch: int, width: int, heads: int, layers: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(torch.zeros(patches, width))
        self.blocks = nn.ModuleList(Block(width, heads, causal=False) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        made: torch.Tensor = self.head(self.norm(x).mean(1))
        return made


class Residual(nn.Module):
    """Two convolutions with BatchNormalization alongside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(2):
            layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        self.inner = nn.Sequential(*layers[:-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.inner(x))


class Digits(nn.Module):
    """A small residual network for images of 8 x 8 pixels."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        made: torch.Tensor = self.head(x.mean((2, 3)))
        return made


class Diffusion(nn.Module):
    """A small UNet2D of diffusers, and the error of the noise that it predicts."""

    def __init__(self) -> None:
        super().__init__()
        import_torchvision()  # diffusers imports it where it is installed
        from diffusers.models.unets.unet_2d import UNet2DModel

        self.network = UNet2DModel(
            sample_size=32, in_channels=3, out_channels=3, block_out_channels=(32, 64, 64), layers_per_block=1,
            norm_num_groups=8, down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        )  # fmt: skip

    def forward(self, images: torch.Tensor, times: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.network(images, times).sample, noise)


def _language(batch: int, words: int = CHARACTERS, length: int = 256, width: int = 256, causal: bool = True) -> Case:
    texts = torch.randint(0, words, (batch, length + 1))
    model = Language(words, length, width, width // 32, 4, causal)
    return Case(model, (texts[:, :-1].contiguous(), texts[:, 1:].contiguous()), None, optimizer=ADAMW)


def _vision() -> Case:
    return Case(
        Vision(64, 8, 192, 6, 8, 100), (torch.randn(64, 3, 64, 64), torch.randint(0, 100, (64,))), optimizer=ADAMW
    )


def _unet() -> Case:
    return Case(UNet([16, 32, 64], 4), (torch.randn(16, 3, 96, 96), torch.randint(0, 4, (16, 96, 96))), optimizer=ADAMW)


def _digits() -> Case:
    return Case(Digits(32, 4), (torch.randn(512, 1, 8, 8), torch.randint(0, 10, (512,))), optimizer=ADAMW)


def _diffusion() -> Case:
    images = torch.randn(16, 3, 32, 32)
    return Case(Diffusion(), (images, torch.randint(0, 1000, (16,)), torch.randn(16, 3, 32, 32)), None, optimizer=ADAMW)


def _mobile() -> Case:
    network = import_torchvision().models.mobilenet_v3_small(num_classes=100, dropout=0.0).train()
    return Case(network, (torch.randn(32, 3, 128, 128), torch.randint(0, 100, (32,))), optimizer=ADAMW)


def _words(model: nn.Module, words: int, batch: int, length: int) -> Case:
    """A language model of transformers with its own loss, as its users call it: ``model(**batch).loss``."""
    tokens = torch.randint(0, words, (batch, length))
    return Case(model.train(), {"input_ids": tokens, "labels": tokens.clone()}, None, optimizer=ADAMW)


def _gpt2() -> Case:
    library = import_transformers()
    config = library.GPT2Config(
        n_layer=6, n_embd=256, n_head=4, vocab_size=4096, n_positions=256, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return _words(library.GPT2LMHeadModel(config), 4096, 24, 256)


def _bert() -> Case:
    library = import_transformers()
    config = library.BertConfig(
        hidden_size=256, num_hidden_layers=6, num_attention_heads=4, intermediate_size=1024, vocab_size=4096,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return _words(library.BertForMaskedLM(config), 4096, 32, 128)


def _whisper() -> Case:
    """Whisper tiny's shape at two thirds of its width, on spectrograms of 600 frames."""
    library = import_transformers()
    config = library.WhisperConfig(
        vocab_size=2000, num_mel_bins=80, d_model=256, encoder_layers=4, decoder_layers=4, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=1024, decoder_ffn_dim=1024, max_source_positions=300,
        max_target_positions=96, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=3,
    )  # fmt: skip
    batch = {"input_features": torch.randn(16, 80, 600), "labels": torch.randint(4, 2000, (16, 96))}
    return Case(library.WhisperForConditionalGeneration(config).train(), batch, None, optimizer=ADAMW)


def checkpoint_blocks(model: Any) -> None:
    """Put each block of a network of this package under ``torch.utils.checkpoint``, or by its library's own switch."""
    if hasattr(model, "gradient_checkpointing_enable"):  # transformers
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return
    if hasattr(getattr(model, "network", None), "enable_gradient_checkpointing"):  # diffusers
        model.network.enable_gradient_checkpointing()
        return
    if hasattr(model, "blocks"):
        blocks = [*model.blocks]
    elif hasattr(model, "down"):
        blocks = [*model.down, *model.merge]
    else:
        blocks = [block for stage in (model.layer1, model.layer2, model.layer3, model.layer4) for block in stage]
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


MODELS: dict[str, Callable[[], Case]] = {
    "language, 48 texts": lambda: _language(48),
    "characters, 96 texts": lambda: _language(96, width=128),
    "characters, 320 texts": lambda: _language(320, width=128),
    "masked language": lambda: _language(32, 4096, 128, 256, causal=False),
    "vision transformer": _vision,
    "u-net": _unet,
    "digits": _digits,
}

OTHERS: dict[str, Callable[[], Case]] = {
    "mobilenetv3": _mobile, "unet2d": _diffusion, "gpt2": _gpt2, "bert": _bert, "whisper": _whisper,
}  # fmt: skip
"""More of them, which need torchvision, diffusers or transformers."""
