"""Networks that people have, built from configurations without weights, through the PyTorch converter and a budget.

    python -m scripts.zoo OUT.jsonl [--family hand] [--family torchvision] ... [--only NAME] [--save]

One line of OUT.jsonl for each network, in a process of its own: whether it converts, and how far its step is from
torch's (the converter's own check); whether the step is rewritten to 60 % of its tensors; how far its losses are from
torch's in five steps of SGD on batches of their own; or the message where one of these fails. Lines that are there
already are not measured again. Dropout is off, so that torch can be followed. With ``--save`` the lines of OUT.jsonl go
to docs/results/data as a table, see `scripts.results`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # configurations only: nothing is fetched

import numpy as np
import onnx
import torch
from onnx_remat.converters.pytorch import export_training_step, initial_feeds
from torch import nn

from onnx_remat.errors import BudgetInfeasibleError
from onnx_remat.rewrite.pipeline import plan_model, rewrite_model
from onnx_remat.session.training import Loop
from scripts import hand, zoo_table
from scripts.hand import Case

CLASSES, SIZE, IMAGES, TEXTS, TOKENS, WORDS = 10, 64, 2, 4, 32, 128
BUDGET = 0.6
RATE, STEPS = 1e-3, 5
CLOSE = 1e-4
"""Losses that are further from torch's ask for torch's own distance from float64."""
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
    return [*_TEXT, "mixtral, batched experts", "llama, gradient checkpointing", "gpt2, reentrant checkpointing"]


_NAMES: Mapping[str, Callable[[], list[str]]] = {
    "hand": lambda: list(hand.NETWORKS), "transformers": _transformers,
    "torchvision": _torchvision, "timm": _timm,
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


_SHALLOW: Mapping[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"depth": 2}, "deit_tiny_patch16_224": {"depth": 2},
    "beit_base_patch16_224": {"depth": 2}, "eva02_tiny_patch14_224": {"depth": 2}, "cait_xxs24_224": {"depth": 2},
    "xcit_nano_12_p16_224": {"depth": 2}, "seresnet50": {"layers": [2, 2, 2, 2]},
    "twins_svt_small": {"depths": [2, 2, 2, 2]},
}  # fmt: skip
"""timm's networks of many equal blocks, with two of each kind."""


@functools.cache
def torchvision_operators() -> torch.library.Library:
    """torchvision's wheel for CUDA has no operators beside a torch for the CPU; two are needed to import it."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def build(key: str) -> Case:
    """The network in training mode without dropout, its loss, and what makes batches."""
    torchvision_operators()
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

    kind, _, told = name.partition(", ")
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
    kernels = {"attn_implementation": "eager"}
    if "experts" in told:
        kernels["experts_implementation"] = "batched_mm"
    network = getattr(transformers, _TEXT[kind])._from_config(config, **kernels)
    if "checkpointing" in told:
        network.gradient_checkpointing_enable({"use_reentrant": "reentrant" in told})
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


def measured(key: str, effort: float) -> dict[str, Any]:
    """One line."""
    torch.manual_seed(0)
    case = build(key)
    found: dict[str, Any] = {"network": key, "parameters": sum(p.numel() for p in case.model.parameters())}
    optimizer = torch.optim.SGD([p for p in case.model.parameters() if p.requires_grad], RATE)
    start = time.perf_counter()
    stage = "converts"
    try:
        step = export_training_step(case.model, case.batch(), case.loss, optimizer)
        found["nodes"] = len(step.graph.node)
        found |= {e.key.removeprefix("check."): e.value for e in step.metadata_props if e.key.startswith("check.")}
        stage = "rewrites"
        rewritten, outcome = within_budget(step, effort)
        found |= outcome
        stage = "follows"
        found |= followed(case, step, rewritten, optimizer)
    except Exception as error:  # the message is the result
        found["failed"], found["message"] = stage, f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    found["seconds"] = round(time.perf_counter() - start)
    return found


def within_budget(step: onnx.ModelProto, effort: float) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """The step rewritten to the budget, or as it is where that is refused; and what is to be said about it."""
    try:
        result = rewrite_model(step, f"{BUDGET:.0%}", effort=effort, run_by="session")
    except BudgetInfeasibleError as error:
        before = plan_model(step, "100%", effort=effort, run_by="session").budget
        return step, {"refused": str(error), "before": before, "bound": error.lower_bound_bytes}
    before, after = result.report.covered()
    return result.model, {"before": before, "after": after, "compute": result.report.extra_compute}


def followed(
    case: Case, step: onnx.ModelProto, rewritten: onnx.ModelProto, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Losses of some steps, of the rewritten step, of torch and of torch in float64."""
    batches = [case.batch() for _ in range(STEPS)]
    fed = [{f"input.{i}": value.numpy() for i, value in enumerate(batch)} for batch in batches]
    read = {value.name for value in rewritten.graph.input}
    fed = [{name: value for name, value in feeds.items() if name in read} for feeds in fed]
    loop = Loop(rewritten, initial_feeds(step, case.model, optimizer) | fed[0])
    ours = np.array([loop.step(feeds) for feeds in fed])
    start = copy.deepcopy(case.model.state_dict())
    theirs = _trained(case.model, case.loss, batches)
    found = {"losses": ours.tolist(), "loss_error": _apart(ours, theirs)}
    if found["loss_error"] > CLOSE:  # is it rounding?
        wide = [tuple(v.double() if v.is_floating_point() else v for v in batch) for batch in batches]
        case.model.load_state_dict(start)
        with contextlib.suppress(RuntimeError):  # its code asks for float32
            found["torch_error"] = _apart(theirs, _trained(case.model.double(), case.loss, wide))
    return found


def _trained(model: nn.Module, loss: Any, batches: Sequence[tuple[torch.Tensor, ...]]) -> np.ndarray:
    """Losses of torch's own steps."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], RATE)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        made = model(*batch) if loss is None else loss(model(*batch[:-1]), batch[-1])
        made.backward()
        optimizer.step()
        losses.append(made.item())
    return np.array(losses)


def _apart(losses: np.ndarray, others: np.ndarray) -> float:
    """Largest relative difference; NaN where one is."""
    return float(np.max(np.abs(losses - others) / np.abs(others)))


def main() -> None:
    """Measure what is not measured yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--family", action="append", choices=list(_NAMES))
    parser.add_argument("--only", default="", help="networks whose name has this in it")
    parser.add_argument("--effort", type=float, default=1.0, help="of the rewriting")
    parser.add_argument("--save", action="store_true", help="put OUT.jsonl into docs/results/data")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(measured(arguments.here, arguments.effort)))
        return
    known = arguments.out.read_text().splitlines() if arguments.out.exists() else []
    done = {json.loads(line)["network"] for line in known}
    for key in networks(arguments.family or list(_NAMES)):
        if key in done or arguments.only not in key:
            continue
        line = in_child(key, arguments.out, arguments.effort)
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(key, line.get("message") or f"loss error {line['loss_error']:.1e}", f"{line['seconds']} s", flush=True)
    if arguments.save:
        lines = [json.loads(line) for line in arguments.out.read_text().splitlines()]
        zoo_table.keep(lines, f"python -m scripts.zoo OUT.jsonl --effort {arguments.effort:g} --save")


def in_child(key: str, out: Path, effort: float) -> dict[str, Any]:
    """`measured` in a fresh process."""
    command = [sys.executable, "-m", "scripts.zoo", str(out), "--here", key, "--effort", str(effort)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"network": key, "failed": "converts", "message": f"took more than {SECONDS} s", "seconds": SECONDS}
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or ["crashed"])[-1]
        return {"network": key, "failed": "converts", "message": last[:500], "seconds": 0}
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
