"""Attention in parts against PyTorch's: memory and time of training steps at several lengths of texts.

transformers' GPT-2 and Llama (grouped queries, rotary positions), two layers of 256 with heads of 64, 2,048 tokens in
texts of a length, SGD. Runners, as in `race` each in a process of its own, steps taken in turns: PyTorch eager with
its fused attention, the same by ``torch.compile``, and with attention op by op; the exported step by `Loop` with
attention in parts (*ours*) and whole (``attention_parts=1``, *ours before*), as it is and rewritten to a budget, 60 %
of what the step in parts takes. *Predicted* is what `onnx_remat` says that training takes, *measured* what the
operating system counted, *plan* the clock's seconds to rewrite, *compute* what the rewrite adds. A time is that of the
fastest step.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.child import in_turns
from scripts.tables.race import our_step, save_first, steps_of

TOKENS, WORDS, WIDTH, LAYERS = 2048, 1024, 256, 2
ITEMS = tuple(f"{model}:{length}" for length in (512, 1024, 2048) for model in ("gpt2", "llama"))
HEADS = ("model", "tokens", "runner", "nodes", "predicted, MB", "measured, MB", "of fused", "ms a step", "of fused",
         "plan, s", "compute")  # fmt: skip
FUSED, BY_OP, COMPILED = "PyTorch, fused", "PyTorch, op by op", "torch.compile"


def language_model(name: str, length: int, attention: str) -> tuple[Any, dict[str, Any]]:
    """A model that returns its loss, and a batch."""
    import torch
    import transformers

    torch.manual_seed(0)
    settings: dict[str, Any] = {"vocab_size": WORDS, "use_cache": False, "attn_implementation": attention}
    if name == "gpt2":
        settings |= {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": WIDTH // 64, "n_positions": length}
        settings |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config: Any = transformers.GPT2Config(bos_token_id=None, eos_token_id=None, **settings)
        model: Any = transformers.GPT2LMHeadModel(config)
    else:
        settings |= {"hidden_size": WIDTH, "intermediate_size": 688, "num_hidden_layers": LAYERS}
        settings |= {"num_attention_heads": WIDTH // 64, "num_key_value_heads": WIDTH // 128}
        config = transformers.LlamaConfig(max_position_embeddings=length, **settings)
        model = transformers.LlamaForCausalLM(config)
    words = torch.randint(0, WORDS, (TOKENS // length, length))
    return model.train(), {"input_ids": words, "labels": words}


def torch_step(name: str, length: int, attention: str, compiled: bool = False) -> tuple[int, Callable[[], list[float]]]:
    """The bytes that a step of PyTorch's takes, and the step."""
    import torch

    model, batch = language_model(name, length, attention)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    called: Any = torch.compile(model) if compiled else model

    def backward() -> torch.Tensor:
        loss: torch.Tensor = called(**batch).loss
        loss.backward()
        return loss

    return steps_of(backward, model, optimizer, batch)


def exported(name: str, length: int, path: Path, parts: int | None) -> None:
    """Write the step."""
    import onnx
    import torch
    from onnx_remat.converters.pytorch import export_training_step

    model, batch = language_model(name, length, "sdpa")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = export_training_step(model, batch, None, optimizer, attention_parts=parts)
    onnx.save(step, path)
    save_first(path, step, model, optimizer, batch)


def rows(item: str, *, budget: str = "60%", effort: float = 5.0, turns: int = 5) -> Iterator[tuple[str, ...]]:
    """The rows of one model and length."""
    from onnx_remat.errors import BudgetInfeasibleError
    from onnx_remat.rewrite.pipeline import rewrite_model

    name, length = item.partition(":")[0], int(item.partition(":")[2])
    refused: list[tuple[str, ...]] = []
    jobs: list[tuple[Any, ...]] = [
        (FUSED, torch_step, name, length, "sdpa"),
        (BY_OP, torch_step, name, length, "eager"),
        (COMPILED, torch_step, name, length, "sdpa", True),
    ]
    said: dict[str, tuple[str, str, str, str]] = {}
    limit = 0
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as home:
        for runner, parts in (("ours", None), ("ours before", 1)):
            path = Path(home) / f"{parts}.onnx"
            exported(name, length, path, parts)
            read = str(path.with_suffix(".npz"))
            report = rewrite_model(path, "100%", effort=effort, run_by="loop").report
            whole = report.covered()[0]
            limit = limit or int(whole * float(budget.rstrip("%")) / 100)
            said[runner] = str(report.nodes_before), f"{whole / 1e6:.0f}", "", ""
            jobs.append((runner, our_step, str(path), read))
            start, rewritten = time.perf_counter(), f"{runner}, rewritten"
            try:
                result = rewrite_model(path, limit, effort=effort, time_limit=600, run_by="loop")
            except BudgetInfeasibleError as error:
                refused.append((name, str(length), rewritten, *[""] * 7, str(error).partition(";")[0]))
                continue
            seconds = time.perf_counter() - start
            result.save(small := Path(home) / f"{parts}.small.onnx")
            predicted = f"{result.report.covered()[1] / 1e6:.0f}"
            compute = f"{result.report.extra_compute:+.1%}"
            said[rewritten] = str(result.report.nodes_after), predicted, f"{seconds:.0f}", compute
            jobs.append((rewritten, our_step, str(small), read))
        runners = in_turns(jobs, turns)
    first = runners[0]
    for each in runners:
        nodes, predicted, plan, compute = said.get(each.name, ("", "", "", ""))
        yield (
            name, str(length), each.name, nodes, predicted, f"{each.first / 1e6:.0f}",
            f"{each.first / first.first:.2f}", f"{1000 * min(each.times):.0f}",
            f"{min(each.times) / min(first.times):.2f}", plan, compute,
        )  # fmt: skip
    yield from refused
