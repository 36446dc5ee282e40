"""Attention in parts against PyTorch's: memory and time of training steps at several lengths of texts.

    python -m scripts.attention --save attention

transformers' GPT-2 and Llama (grouped queries, rotary positions), two layers of 256 with heads of 64, 2,048 tokens in
texts of a length, SGD. Runners, as in `scripts.race` each in a process of its own, steps taken in turns: PyTorch eager
with its fused attention and with attention op by op; the exported step by `session.training.Loop` with attention in
parts (*ours*) and whole (``attention_parts=1``, *ours before*), as it is and rewritten to a budget, 60 % of what the
step in parts takes. *Predicted* is what `onnx_remat` says that training takes, *measured* what the operating system
counted, *plan* the clock's seconds to rewrite, *compute* what the rewrite adds. A time is that of the fastest step.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from scripts import results
from scripts.race import Runner, our_step, steps_of

TOKENS, WORDS, WIDTH, LAYERS = 2048, 1024, 256, 2
LENGTHS = (512, 1024, 2048)
HEADS = ("model", "tokens", "runner", "nodes", "predicted, MB", "measured, MB", "of fused", "ms a step", "of fused",
         "plan, s", "compute")  # fmt: skip
FUSED, BY_OP = "PyTorch, fused", "PyTorch, op by op"


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


def torch_step(what: str) -> tuple[Callable[[], None], int]:
    """A step of PyTorch's, and the bytes that it takes."""
    import torch

    name, length, attention = what.split(":")
    model, batch = language_model(name, int(length), attention)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def backward() -> None:
        model(**batch).loss.backward()

    return steps_of(backward, model, optimizer, batch)


def exported(name: str, length: int, path: Path, parts: int | None) -> None:
    """Write the step."""
    import onnx
    import torch
    from onnx_remat.converters.pytorch import export_training_step

    model, batch = language_model(name, length, "sdpa")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    onnx.save(export_training_step(model, batch, None, optimizer, attention_parts=parts), path)


def rows_of(name: str, length: int, budget: str, turns: int, effort: float) -> Iterator[tuple[str, ...]]:
    """The rows of one model and length."""
    from onnx_remat.errors import BudgetInfeasibleError
    from onnx_remat.rewrite.pipeline import rewrite_model

    refused: list[tuple[str, ...]] = []
    jobs = [(FUSED, "torch", f"{name}:{length}:sdpa"), (BY_OP, "torch", f"{name}:{length}:eager")]
    said: dict[str, tuple[str, str, str, str]] = {}
    limit = 0
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as home, ExitStack() as stack:
        for runner, parts in (("ours", None), ("ours before", 1)):
            path = Path(home) / f"{parts}.onnx"
            exported(name, length, path, parts)
            report = rewrite_model(path, "100%", effort=effort, run_by="loop").report
            whole = report.covered()[0]
            limit = limit or int(whole * float(budget.rstrip("%")) / 100)
            said[runner] = str(report.nodes_before), f"{whole / 1e6:.0f}", "", ""
            jobs.append((runner, "file", str(path)))
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
            jobs.append((rewritten, "file", str(small)))
        runners = []
        for job in jobs:
            runners.append(Runner(*job, module="scripts.attention"))
            stack.callback(runners[-1].close)
        for _ in range(turns):
            for each in runners:
                each.step()
    first = runners[0]
    for each in runners:
        nodes, predicted, plan, compute = said.get(each.name, ("", "", "", ""))
        yield (
            name, str(length), each.name, nodes, predicted, f"{each.memory / 1e6:.0f}",
            f"{each.memory / first.memory:.2f}", f"{1000 * min(each.times):.0f}",
            f"{min(each.times) / min(first.times):.2f}", plan, compute,
        )  # fmt: skip
    yield from refused


def child(kind: str, what: str) -> None:
    """Say how much memory a step takes; then, for every line read, take one and say how long it took."""
    step, taken = our_step(what) if kind == "file" else torch_step(what)
    print(taken, flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        step()
        print(time.perf_counter() - start, flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=("gpt2", "llama"), help="only this one (repeat)")
    parser.add_argument("--length", action="append", type=int, help="only texts of so many tokens (repeat)")
    parser.add_argument("--budget", default="60%", help="of what the step in parts takes")
    parser.add_argument("--effort", type=float, default=5.0)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--save", default="", metavar="NAME", help="of the table in docs/results/data")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child)
        return
    rows: list[tuple[str, ...]] = []
    for length in arguments.length or LENGTHS:
        for model in arguments.model or ("gpt2", "llama"):
            found = rows_of(model, length, arguments.budget, arguments.turns, arguments.effort)
            rows += results.printed(found)
            if arguments.save:
                command = f"python -m scripts.attention --effort {arguments.effort:g} --turns {arguments.turns}"
                results.save(arguments.save, results.Table(command, HEADS, tuple(rows)))


if __name__ == "__main__":
    main()
