"""Networks that people have, built from configurations without weights, and those written by hand; without dropout."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # configurations only: nothing is fetched

import onnx
import torch
from torch import nn

from . import hand
from .hand import Case
from .torch_models import declare_torchvision

CLASSES, SIZE, IMAGES, TEXTS, TOKENS, WORDS = 10, 64, 2, 4, 32, 128
RATE = 1e-3


def _torchvision() -> list[str]:
    return [
        "alexnet", "vgg11_bn", "resnet18", "resnext50_32x4d", "wide_resnet50_2", "densenet121", "googlenet",
        "inception_v3", "mobilenet_v2", "mobilenet_v3_small", "mnasnet0_5", "shufflenet_v2_x0_5", "squeezenet1_1",
        "efficientnet_b0", "efficientnet_v2_s", "regnet_y_400mf", "convnext_tiny", "vit_b_32", "swin_t", "swin_v2_t",
        "maxvit_t",
    ]  # fmt: skip


def _timm() -> list[str]:
    return [
        "resnet26t", "seresnet50", "efficientnet_lite0", "convnext_atto", "convnextv2_atto", "vit_tiny_patch16_224",
        "deit_tiny_patch16_224", "beit_base_patch16_224", "mixer_s32_224", "gmlp_ti16_224", "resmlp_12_224",
        "poolformer_s12", "edgenext_xx_small", "mobilevit_xxs", "mobilevitv2_050", "cait_xxs24_224", "levit_128s",
        "pit_ti_224", "coat_lite_tiny", "xcit_nano_12_p16_224", "twins_svt_small", "pvt_v2_b0", "ghostnet_050",
        "hardcorenas_a", "tinynet_e", "lcnet_035", "repvgg_a0", "rexnet_100", "nfnet_l0", "fastvit_t8", "hgnet_tiny",
        "dpn48b", "dla34", "vovnet39a", "cspresnet50", "halonet26t", "botnet26t_256", "eva02_tiny_patch14_224",
    ]  # fmt: skip


_TEXT = {
    "bert": "BertForSequenceClassification", "distilbert": "DistilBertForSequenceClassification",
    "roberta": "RobertaForSequenceClassification", "albert": "AlbertForSequenceClassification",
    "electra": "ElectraForSequenceClassification", "deberta-v2": "DebertaV2ForSequenceClassification",
    "gpt2": "GPT2LMHeadModel", "gpt_neo": "GPTNeoForCausalLM", "gpt_neox": "GPTNeoXForCausalLM",
    "opt": "OPTForCausalLM", "bloom": "BloomForCausalLM", "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM", "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM", "falcon": "FalconForCausalLM", "olmo": "OlmoForCausalLM",
    "stablelm": "StableLmForCausalLM", "starcoder2": "Starcoder2ForCausalLM", "cohere": "CohereForCausalLM",
    "mixtral": "MixtralForCausalLM", "mamba": "MambaForCausalLM",
}  # fmt: skip


def _transformers() -> list[str]:
    return [*_TEXT, "mixtral, batched experts", "llama, gradient checkpointing", "gpt2, reentrant checkpointing"]


NAMES = {"hand": [*hand.NETWORKS], "transformers": _transformers(), "torchvision": _torchvision(), "timm": _timm()}
"""Of networks, by family."""


class Classifier(nn.Module):
    """A network whose first output is what counts."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of the classes."""
        made = self.network(x)
        return made if isinstance(made, torch.Tensor) else made[0]


class Language(nn.Module):
    """A model of transformers, from tokens to scores, of each token or of the text."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores as (N, classes)."""
        made = self.network(input_ids=tokens, **({"use_cache": False} if self.causal else {})).logits
        return made.flatten(0, -2)

    @property
    def causal(self) -> bool:
        """Does it score every token?"""
        return not type(self.network).__name__.endswith("Classification")


_SHALLOW: Mapping[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"depth": 2}, "deit_tiny_patch16_224": {"depth": 2},
    "beit_base_patch16_224": {"depth": 2}, "eva02_tiny_patch14_224": {"depth": 2}, "cait_xxs24_224": {"depth": 2},
    "xcit_nano_12_p16_224": {"depth": 2}, "seresnet50": {"layers": [2, 2, 2, 2]},
    "twins_svt_small": {"depths": [2, 2, 2, 2]},
}  # fmt: skip
"""timm's networks of many equal blocks, with two of each kind."""


def build(key: str) -> Case:
    """The network in training mode without dropout, its loss, and what makes batches."""
    declare_torchvision()
    family, _, name = key.partition(":")
    if family == "hand":
        case = hand.NETWORKS[name]()
        return Case(_without_dropout(case.model), case.batch, case.loss)
    if family == "transformers":
        return _language(name)
    size = {"inception_v3": 299}.get(name, SIZE)
    if family == "torchvision":
        import torchvision

        options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        network = torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **options)
        size = {"vit_b_32": 224, "maxvit_t": 224}.get(name, size)
    else:
        import timm

        network = timm.create_model(name, pretrained=False, num_classes=CLASSES, **_SHALLOW.get(name, {}))
        config = network.pretrained_cfg
        if config.get("fixed_input_size") or "halo" in name or "bot" in name:
            size = config["input_size"][-1]
    model = _without_dropout(Classifier(network))
    return Case(model, lambda: (torch.randn(IMAGES, 3, size, size), torch.randint(0, CLASSES, (IMAGES,))))


def _language(name: str) -> Case:
    import transformers

    kind, _, variant = name.partition(", ")
    special: Mapping[str, dict[str, Any]] = {
        "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
        "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64}, "distilbert": {"dim": 64, "n_layers": 2, "n_heads": 4},
        "albert": {"embedding_size": 32}, "electra": {"embedding_size": 32}, "gemma": {"head_dim": 16},
        "gemma2": {"head_dim": 16}, "qwen3": {"head_dim": 16},
    }  # fmt: skip
    config: Any = transformers.AutoConfig.for_model(
        kind, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
        vocab_size=WORDS, max_position_embeddings=64, n_embd=64, n_layer=2, n_head=4, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
        **special.get(kind, {}),
    )  # fmt: skip
    kernels = {"attn_implementation": "eager"}
    if "experts" in variant:
        kernels["experts_implementation"] = "batched_mm"
    network = getattr(transformers, _TEXT[kind])._from_config(config, **kernels)
    if "checkpointing" in variant:
        network.gradient_checkpointing_enable({"use_reentrant": "reentrant" in variant})
    model = _without_dropout(Language(network))
    classes, rows = (WORDS, TEXTS * TOKENS) if model.causal else (config.num_labels, TEXTS)
    return Case(model, lambda: (torch.randint(3, WORDS, (TEXTS, TOKENS)), torch.randint(0, classes, (rows,))))


def _without_dropout(model: Any) -> Any:
    for module in model.train().modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name in ("drop_prob", "dropout", "attention_dropout", "p"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def builder(key: str) -> Callable[[], onnx.ModelProto]:
    """Build a network; the function returned exports it as a training step with SGD."""
    from onnx_remat.converters.pytorch import export_training_step

    torch.manual_seed(0)
    case = build(key)
    optimizer = torch.optim.SGD([p for p in case.model.parameters() if p.requires_grad], RATE)
    return lambda: export_training_step(case.model, case.batch(), case.loss, optimizer)
