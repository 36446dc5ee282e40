"""Fifteen training steps from PyTorch, small enough to plan in seconds, for a device that is a fake.

    python -m sample_models.networks.cuda_models FOLDER

writes those that FOLDER lacks. Six train in half precision as one does on a GPU, by AdamW: `half` and `half_...` by
autocast to float16, weights in float32, with a `GradScaler`; `bfloat16_...` by autocast to bfloat16, and
`bfloat16_weights` with weights and state in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx
import torch
import torch.nn.functional as F
from torch import nn

from sample_models.networks.torch_models import UNet, import_torchvision


class Blocks(nn.Module):
    """A language model of transformer blocks: pre-norm attention, causal, and a GELU MLP."""

    def __init__(self, layers: int, width: int, heads: int, words: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.randn(length, width) * 0.02)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 1))
        self.mix = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.wide = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.narrow = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.heads = heads

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits, words first (as `cross_entropy` takes them): batch, words, length."""
        x = self.words(tokens) + self.places
        for i, mix in enumerate(self.mix):
            parts = mix(self.norms[2 * i](x)).chunk(3, -1)
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out[i](seen.transpose(1, 2).flatten(2))
            x = x + self.narrow[i](F.gelu(self.wide[i](self.norms[2 * i + 1](x))))
        return F.linear(self.norms[-1](x), self.words.weight).transpose(1, 2)


class Autocast(nn.Module):
    """A model that computes in half precision what autocast does, and returns float32."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The model's result."""
        with torch.autocast("cpu", self.dtype):
            return self.model(*inputs).float()


class Recurrent(nn.Module):
    """Two LSTM layers over time, and what the last step says."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 128, 2, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.head(self.lstm(x)[0][:, -1])


def _images(side: int, batch: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 3, side, side), torch.randint(0, 10, (batch,))


def _tokens() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 512, (8, 129))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _vision(name: str, side: int, batch: int = 16, **settings: Any) -> Callable[[], tuple[nn.Module, Any]]:
    made = lambda: getattr(import_torchvision().models, name)(num_classes=10, **settings)  # noqa: E731
    return lambda: (made(), _images(side, batch))


def _transformer() -> tuple[nn.Module, Any]:
    model = import_torchvision().models.VisionTransformer(64, 8, 4, 4, 128, 512, num_classes=10)
    nn.init.normal_(model.heads.head.weight, std=0.02)  # zeros give what is below no gradient
    return model, _images(64)


def _unet() -> tuple[nn.Module, Any]:
    return UNet([16, 32, 64], 4), (torch.randn(4, 3, 64, 64), torch.randint(0, 4, (4, 64, 64)))


def _language() -> tuple[nn.Module, Any]:
    return Blocks(4, 128, 4, 512, 128), _tokens()


STEPS: Mapping[str, Callable[[], tuple[nn.Module, Any]]] = {
    "resnet18": _vision("resnet18", 96, 64),
    "mobilenet": _vision("mobilenet_v2", 64, width_mult=0.5, dropout=0.0),
    "densenet": _vision("DenseNet", 64, growth_rate=12, block_config=(4, 4, 4), num_init_features=24),
    "shufflenet": _vision("shufflenet_v2_x0_5", 64),
    "squeezenet": _vision("squeezenet1_1", 64, dropout=0.0),
    "vit": _transformer,
    "gpt": _language,
    "unet": _unet,
    "lstm": lambda: (Recurrent(), (torch.randn(64, 24, 64), torch.randint(0, 10, (64,)))),
}

_HALVES: Mapping[str, tuple[Callable[[], tuple[nn.Module, Any]], torch.dtype]] = {
    "half": (_language, torch.float16),
    "half_resnet18": (STEPS["resnet18"], torch.float16),
    "half_unet": (_unet, torch.float16),
    "bfloat16_gpt": (_language, torch.bfloat16),
    "bfloat16_vit": (_transformer, torch.bfloat16),
}


NAMES = (*STEPS, *_HALVES, "bfloat16_weights")


def step(name: str) -> onnx.ModelProto:
    """Forward, loss, backward and update as one graph."""
    from onnx_remat.converters.pytorch import export_training_step

    torch.manual_seed(0)
    if name in STEPS:
        model, batch = STEPS[name]()
        return export_training_step(model, batch, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    if name == "bfloat16_weights":
        model, batch = _language()
        model.bfloat16()
    else:
        make, dtype = _HALVES[name]
        model, batch = make()
        model = Autocast(model, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu") if name.startswith("half") else None
    return export_training_step(model, batch, F.cross_entropy, optimizer, scaler=scaler)
