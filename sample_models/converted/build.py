"""Write training steps of well-known nets: ``python -m sample_models.converted.build [--out DIR] [NAME ...]``.

They come from PyTorch and JAX by way of `onnx_remat.converters`, which compares each with its framework first. Without
names, those that are kept in this folder are written; ``--all`` writes every one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx

FOLDER = Path(__file__).parent
KEPT = ("flax_gpt", "flax_resnet", "unet")

Export = Callable[[], onnx.ModelProto]


def torch_models() -> Any:
    """The table of PyTorch models, imported when one is asked for."""
    from sample_models.networks import torch_models

    return torch_models


def from_torch(make: Callable[[], Any]) -> Export:
    """A PyTorch case's step, with SGD."""

    def export() -> onnx.ModelProto:
        return torch_models().builder(make)()  # type: ignore[no-any-return]

    return export


def images(model: Any, batch: int, size: int, classes: int = 10) -> Any:
    """A classifier of random images."""
    import torch

    from sample_models.networks.torch_models import Case

    return Case(model.train(), (torch.randn(batch, 3, size, size), torch.randint(0, classes, (batch,))))


def resnet() -> Any:
    """ResNet-18 (He et al. 2016) on 8 images of 64 x 64."""
    models = torch_models().import_torchvision().models
    return images(models.resnet18(num_classes=10), 8, 64)


def densenet() -> Any:
    """DenseNet (Huang et al. 2017): four blocks of three layers that grow by 12."""
    models = torch_models().import_torchvision().models
    return images(models.DenseNet(12, (3, 3, 3, 3), 24, num_classes=10), 8, 64)


def vit() -> Any:
    """A vision transformer (Dosovitskiy et al. 2021) of three layers, 8 x 8 patches."""
    models = torch_models().import_torchvision().models
    net = models.VisionTransformer(
        image_size=64, patch_size=8, num_layers=3, num_heads=4, hidden_dim=96, mlp_dim=384, num_classes=10
    )
    return images(net, 8, 64)


def unet() -> Any:
    """A U-Net (Ronneberger et al. 2015) of three levels with BatchNorm, on 2 images of 64 x 64."""
    import torch

    from sample_models.networks.torch_models import Case, UNet

    return Case(UNet([8, 16, 32], 4), (torch.randn(2, 3, 64, 64), torch.randint(0, 4, (2, 64, 64))))


def language(kind: str) -> Any:
    """A small transformer of the `transformers` library, 4 x 64 tokens, without dropout."""
    import torch
    import torch.nn.functional as F

    from sample_models.networks.torch_models import Case

    transformers, size = torch_models().import_transformers(), {"vocab_size": 512}
    if kind == "gpt2":
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(
            n_layer=3, n_embd=96, n_head=4, n_positions=64, use_cache=False, **size, **drops
        )  # fmt: skip
        model: Any = transformers.GPT2LMHeadModel(config)
    elif kind == "bert":
        drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        config = transformers.BertConfig(
            num_hidden_layers=3, hidden_size=96, num_attention_heads=4, intermediate_size=384,
            max_position_embeddings=64, **size, **drops,
        )  # fmt: skip
        model = transformers.BertForMaskedLM(config)
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=3, hidden_size=96, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=64, use_cache=False, **size,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(0, 512, (4, 65))
    batch = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    return Case(model.train(), batch, lambda made, target: F.cross_entropy(made.logits.flatten(0, 1), target.flatten()))


def flax_resnet() -> onnx.ModelProto:
    """A ResNet in Flax, channels last, BatchNorm with running statistics, SGD with momentum from optax."""
    import optax

    from sample_models.networks import jax_models

    case = jax_models.classifier(jax_models.ResNet((2, 2, 2), 16, 10), (8, 64, 64, 3), 10)
    return case.export(optax.sgd(0.05, momentum=0.9))


def flax_gpt() -> onnx.ModelProto:
    """A GPT in Flax: one block over stacked weights by `jax.lax.scan`, unrolled; AdamW from optax."""
    import optax

    from sample_models.networks import jax_models

    case = jax_models.language_model(jax_models.GPT(512, 3, 96, 4, scanned=True), 4, 64)
    return case.export(optax.adamw(1e-3))


MODELS: dict[str, Export] = {
    "resnet": from_torch(resnet),
    "densenet": from_torch(densenet),
    "unet": from_torch(unet),
    "gpt2": from_torch(lambda: language("gpt2")),
    "bert": from_torch(lambda: language("bert")),
    "llama": from_torch(lambda: language("llama")),
    "vit": from_torch(vit),
    "flax_resnet": flax_resnet,
    "flax_gpt": flax_gpt,
}


def main(arguments: list[str] | None = None) -> None:
    """Write the models that were asked for, and a line on each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--all", action="store_true", help="every one")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder (default: this one)")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.names if name not in MODELS]:
        parser.error(f"no model {unknown[0]!r}: choose from {', '.join(MODELS)}")
    given.out.mkdir(parents=True, exist_ok=True)
    for name in MODELS if given.all else given.names or KEPT:
        model = MODELS[name]()
        data = model.SerializeToString(deterministic=True)
        (given.out / f"{name}.onnx").write_bytes(data)
        print(f"| `{name}` | {len(model.graph.node)} | {len(data) / 1e3:.0f} kB |", flush=True)


if __name__ == "__main__":
    main()
