"""Well-known models in PyTorch, built from their configurations, with batches for which activations outweigh weights.

Only then can half the memory of a step go: weights, their gradients and their new values are there in any plan. Where
the model at its own size would take minutes a step on a CPU, ``-half`` has half its width (and for texts a vocabulary
of 8192) at full depth.

    python -m sample_models.networks.torch_models resnet18 resnet18.onnx

writes the step of one with the size of its batch left open, as ``batch``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import onnx
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

SGD = partial(torch.optim.SGD, lr=0.01)
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


@dataclass(frozen=True, slots=True)
class Case:
    """A model, one batch and the loss; see `onnx_remat.converters.pytorch.export_training_step`."""

    model: nn.Module
    batch: Any
    loss: Callable[[Any, Any], torch.Tensor] | None = F.cross_entropy
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[[Any], torch.optim.Optimizer] = SGD

    def arguments(self, batch: Any = None) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """What the model takes by position and by name, and the target of the loss; of another batch, if given one."""
        batch = self.batch if batch is None else batch
        if isinstance(batch, Mapping):
            return (), {name: value for name, value in batch.items() if name != "labels"}, batch["labels"]
        return tuple(batch[:-1]), {}, batch[-1]


def builder(make: Callable[[], Case]) -> Callable[[], onnx.ModelProto]:
    """Build a case; the function returned exports it as a whole training step."""
    from onnx_remat.converters.pytorch import export_training_step

    torch.manual_seed(0)
    case = make()
    optimizer = case.optimizer(case.model.parameters())
    return lambda: export_training_step(case.model, case.batch, case.loss, optimizer, **case.options)


def of_any_batch(make: Callable[[], Case]) -> Callable[[], Case]:
    """The same with the size of the batch left open, as ``batch``; the example has two at least."""

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if len(tensor) > 1 else torch.cat([tensor, tensor])

    def case() -> Case:
        made = make()
        made = replace(made, batch=pytree.tree_map(wide, made.batch))
        inputs = made.batch if isinstance(made.batch, dict) else [f"input.{slot}" for slot in range(len(made.batch))]
        return replace(made, options=made.options | {"dynamic_dims": {key: {0: "batch"} for key in inputs}})

    return case


def mlp() -> Case:
    """Eight layers of 512 with GELU."""
    layers = [m for _ in range(8) for m in (nn.Linear(512, 512), nn.GELU())]
    return Case(nn.Sequential(*layers, nn.Linear(512, 10)), _images(4096, (512,), 10))


def unet() -> Case:
    """Three levels (Ronneberger et al. 2015) with BatchNorm, on 96 x 96 pixels."""
    return Case(UNet([16, 32, 64, 128], 4), (torch.randn(4, 3, 96, 96), torch.randint(0, 4, (4, 96, 96))))


def resnet18() -> Case:
    return _torchvision("resnet18", 16, 128)


def resnet50() -> Case:
    return _torchvision("resnet50", 8, 128)


def densenet121() -> Case:
    return _torchvision("densenet121", 4, 128)


def vit_b() -> Case:
    case = _torchvision("vit_b_16", 8, 224)
    return replace(case, model=_with_head(case.model))


def vit_b_half() -> Case:
    """Twelve layers of 384, that is ViT-S/16."""
    model = import_torchvision().models.VisionTransformer(224, 16, 12, 6, 384, 1536, num_classes=1000)
    return Case(_with_head(model).train(), _images(8, (3, 224, 224), 1000))


def _with_head(model: Any) -> Any:
    """torchvision's transformers start from a head of zeros, and then nothing below it has a gradient to compare."""
    nn.init.normal_(model.heads.head.weight, std=0.02)
    return model


def gpt2(
    layers: int, width: int = 768, words: int = 50257, batch: int = 2, length: int = 128, dropout: float = 0.0
) -> Case:
    """GPT-2, without dropout unless asked for."""
    library = import_transformers()
    config = library.GPT2Config(
        n_layer=layers, n_embd=width, n_head=width // 64, vocab_size=words, resid_pdrop=dropout,
        embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return _language(library.GPT2LMHeadModel(config), words, batch, length)


def bert(width: int = 768, words: int = 30522, batch: int = 8, length: int = 128, dropout: float = 0.0) -> Case:
    """BERT base as a masked language model, without dropout unless asked for."""
    library = import_transformers()
    config = library.BertConfig(
        hidden_size=width, num_attention_heads=width // 64, intermediate_size=4 * width, vocab_size=words,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return _language(library.BertForMaskedLM(config), words, batch, length)


def llama() -> Case:
    """Eight layers of 512 with grouped-query attention, rotary positions, RMSNorm and SwiGLU."""
    library = import_transformers()
    config = library.LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=512, use_cache=False,
    )  # fmt: skip
    return _language(library.LlamaForCausalLM(config), config.vocab_size, 4, 256)


def t5() -> Case:
    """T5 of three layers of 128 on either side, without dropout: hundreds of small arrays."""
    library = import_transformers()
    config = library.T5Config(
        d_model=128, d_kv=32, d_ff=256, num_layers=3, num_heads=4, vocab_size=1000, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    tokens, labels = torch.randint(1, 1000, (4, 48)), torch.randint(1, 1000, (4, 32))
    return Case(library.T5ForConditionalGeneration(config), {"input_ids": tokens, "labels": labels}, None)


MODELS: dict[str, Callable[[], Case]] = {
    "mlp": mlp,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "densenet121": densenet121,
    "unet": unet,
    "vit_b": vit_b,
    "vit_b-half": vit_b_half,
    "gpt2-4": lambda: gpt2(4),
    "gpt2-4-half": lambda: gpt2(4, 384, 8192, 4, 256),
    "gpt2-4-half-dropout": lambda: gpt2(4, 384, 8192, 4, 256, 0.1),
    "gpt2-12": lambda: gpt2(12),
    "gpt2-12-half": lambda: gpt2(12, 384, 8192, 4, 256),
    "gpt2-48-narrow": lambda: gpt2(48, 128, 1000, 2, 64),
    "gpt2-12-adamw": lambda: replace(gpt2(12, batch=1), optimizer=partial(torch.optim.AdamW, lr=1e-4)),
    "bert": bert,
    "bert-half": lambda: bert(384, 8192, 4, 256),
    "bert-half-dropout": lambda: bert(384, 8192, 4, 256, 0.1),
    "llama": llama,
    "lstm": lambda: lstm(128, 1000, 8, 48),
    "lstm-adamw": lambda: replace(lstm(128, 1000, 8, 48), optimizer=ADAMW),
    "resnet18-adamw": lambda: replace(resnet18(), optimizer=ADAMW),
    "t5-adamw": lambda: replace(t5(), optimizer=ADAMW),
}


class LanguageLSTM(nn.Module):
    """Two layers over the words of a text: thousands of small ops once the steps are unrolled."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.layers = nn.LSTM(width, width, 2, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.layers(self.embedding(tokens))[0])
        return made


def lstm(width: int, words: int, batch: int, length: int) -> Case:
    tokens = torch.randint(0, words, (batch, length + 1))
    return Case(
        LanguageLSTM(width, words),
        (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
        lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
    )


class UNet(nn.Module):
    """Down by max-pooling, up by transposed convolutions, with a skip at every level."""

    def __init__(self, widths: list[int], classes: int) -> None:
        super().__init__()
        pairs = list(zip([3, *widths], widths, strict=False))
        self.down = nn.ModuleList(_double(a, b) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairs[:0:-1])
        self.merge = nn.ModuleList(_double(2 * a, a) for a, _ in pairs[:0:-1])
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for index, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if index else x)
            skips.append(x)
        skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([up(x), skips.pop()], 1))
        made: torch.Tensor = self.head(x)
        return made


def _double(a: int, b: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in ((a, b), (b, b)):
        layers += [nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
    return nn.Sequential(*layers)


def _images(batch: int, shape: tuple[int, ...], classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, *shape), torch.randint(0, classes, (batch,))


def _language(model: nn.Module, words: int, batch: int, length: int) -> Case:
    tokens = torch.randint(0, words, (batch, length + 1))
    return Case(
        model,
        {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()},
        lambda output, target: F.cross_entropy(output.logits.flatten(0, 1), target.flatten()),
    )


@functools.cache
def declare_torchvision() -> None:
    """Declare what a torchvision built for CUDA asks for alongside a torch for the CPU, before it is imported."""
    if torch.version.cuda is None:  # where its own operators load, declaring them twice would end the process
        with contextlib.suppress(RuntimeError):  # declared already
            for name in ("nms", "qnms"):
                torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")


def import_torchvision() -> Any:
    """Import torchvision, also one built for CUDA alongside a torch for the CPU: it still builds classifiers."""
    declare_torchvision()
    import torchvision

    return torchvision


def import_transformers() -> Any:
    import_torchvision()  # transformers imports it where it is installed
    import transformers

    return transformers


def _torchvision(name: str, batch: int, size: int) -> Case:
    torchvision = import_torchvision()

    return Case(getattr(torchvision.models, name)(num_classes=1000).train(), _images(batch, (3, size, size), 1000))
