"""Networks that people have, built from configurations without weights, through the PyTorch converter and a budget.

    python -m scripts.zoo OUT.jsonl [--family torchvision] [--family timm] [--family transformers] [--only NAME]

One line of OUT.jsonl for each network, in a process of its own: whether `budgeted` converts it, checked against torch,
rewrites it to 60 % of its tensors, and follows torch for five steps of SGD on batches of their own; or the message
where it does not. Lines that are there already are not measured again. Dropout is off, so that torch can be followed.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

_STUB = torch.library.Library("torchvision", "FRAGMENT")
"""torchvision's wheel for CUDA has no operators beside a torch for the CPU; two are needed to import it."""

CLASSES, SIZE, IMAGES, TOKENS, WORDS = 10, 64, 4, 16, 128
SECONDS = 400
"""A network may take so long."""


def networks(families: list[str]) -> dict[str, str]:
    """Family by name of network, ``family:network``."""
    return {f"{family}:{name}": family for family in families for name in _NAMES[family]()}


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
    return [*_TEXT, "llama, gradient checkpointing", "gpt2, reentrant checkpointing"]


_NAMES: Mapping[str, Callable[[], list[str]]] = {
    "torchvision": _torchvision, "timm": _timm, "transformers": _transformers,
}  # fmt: skip


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


def build(key: str) -> tuple[nn.Module, Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
    """The network in training mode without dropout, and what makes batches."""
    for operator in ("nms", "qnms"):
        _STUB.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    family, _, name = key.partition(":")
    if family == "transformers":
        return _language(name)
    size = {"inception_v3": 96}.get(name, SIZE)
    if family == "torchvision":
        import torchvision

        options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        network = torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **options)
        size = {"vit_b_32": 224, "maxvit_t": 224}.get(name, size)
    else:
        import timm

        network = timm.create_model(name, pretrained=False, num_classes=CLASSES)
        config = network.pretrained_cfg
        if config.get("fixed_input_size") or "halo" in name or "bot" in name:
            size = config["input_size"][-1]
    model = _without_dropout(Classifier(network))
    count = IMAGES if size < 200 else 2
    return model, lambda: (torch.randn(count, 3, size, size), torch.randint(0, CLASSES, (count,)))


def _language(name: str) -> tuple[nn.Module, Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
    import transformers

    kind, _, checkpoints = name.partition(", ")
    special: Mapping[str, dict[str, Any]] = {
        "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
        "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64}, "distilbert": {"dim": 64, "n_layers": 2, "n_heads": 4},
        "albert": {"embedding_size": 32}, "electra": {"embedding_size": 32}, "gemma": {"head_dim": 16},
        "gemma2": {"head_dim": 16}, "qwen3": {"head_dim": 16},
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(
        kind, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
        vocab_size=WORDS, max_position_embeddings=64, n_embd=64, n_layer=2, n_head=4, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
        **special.get(kind, {}),
    )  # fmt: skip
    network = getattr(transformers, _TEXT[kind])._from_config(config, attn_implementation="eager")
    if checkpoints:
        network.gradient_checkpointing_enable({"use_reentrant": "reentrant" in checkpoints})
    model = _without_dropout(Language(network))
    classes, rows = (WORDS, IMAGES * TOKENS) if model.causal else (config.num_labels, IMAGES)
    return model, lambda: (torch.randint(3, WORDS, (IMAGES, TOKENS)), torch.randint(0, classes, (rows,)))


def _without_dropout(model: Any) -> Any:
    for module in model.train().modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name in ("drop_prob", "dropout", "attention_dropout", "p"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def measured(key: str) -> dict[str, Any]:
    """One line."""
    from onnx_remat.converters.pytorch import budgeted

    torch.manual_seed(0)
    torch.set_num_threads(2)
    model, batch = build(key)
    other = copy.deepcopy(model)
    found: dict[str, Any] = {"network": key, "parameters": sum(p.numel() for p in model.parameters())}
    start = time.perf_counter()
    try:
        loss = nn.functional.cross_entropy
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        step = budgeted(model, loss, optimizer, batch(), "60%", planning={"effort": 2.0, "run_by": "session"})
        found["converts"], found["seconds"] = True, round(time.perf_counter() - start)
        assert step.report is not None
        found["peak"] = [step.report.before.total, step.report.after.total]
        found["compute"] = step.report.extra_compute
        torchs = torch.optim.SGD(other.parameters(), 1e-3)
        ours, theirs = [], []
        for _ in range(5):
            x, y = batch()
            torchs.zero_grad()
            expected = loss(other(x), y)
            expected.backward()
            torchs.step()
            ours.append(step((x, y)))
            theirs.append(expected.item())
        found["losses"] = ours
        found["loss_error"] = float(np.max(np.abs(np.subtract(ours, theirs)) / np.abs(theirs)))  # NaN where one is
    except Exception as error:  # the message is the result
        found["message"] = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        found["seconds"] = round(time.perf_counter() - start)
    return found


def main() -> None:
    """Measure what is not measured yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--family", action="append", choices=list(_NAMES))
    parser.add_argument("--only", default="", help="networks whose name has this in it")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(measured(arguments.here)))
        return
    known = arguments.out.read_text().splitlines() if arguments.out.exists() else []
    done = {json.loads(line)["network"] for line in known}
    for key in networks(arguments.family or list(_NAMES)):
        if key in done or arguments.only not in key:
            continue
        line = in_child(key, arguments.out)
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(key, line.get("message") or f"loss error {line['loss_error']:.1e}, {line['seconds']} s", flush=True)


def in_child(key: str, out: Path) -> dict[str, Any]:
    """`measured` in a fresh process."""
    command = [sys.executable, "-m", "scripts.zoo", str(out), "--here", key]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"network": key, "message": f"took more than {SECONDS} s", "seconds": SECONDS}
    if ran.returncode:
        return {"network": key, "message": (ran.stderr.strip().splitlines() or ["crashed"])[-1][:400], "seconds": 0}
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
