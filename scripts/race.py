"""PyTorch and us: the same training steps, taken in turns in one run, and the memory that each takes.

    python -m scripts.convert_models --converter pytorch --out FOLDER
    python -m scripts.race FOLDER --model unet --model resnet18 --save race

Runners, each in a process of its own, of which one works at a time: PyTorch eager; ``torch.compile`` (Inductor); the
exported step by `session.training.Loop`, as it is and rewritten to each budget; with ``--before OTHER`` also the step
that another version of the converter exported into that folder. SGD, or the case's own optimizer; as many threads as
cores.

*Memory* is resident: for PyTorch parameters, optimizer state and batch, and the process's high-water mark over a step
less what is resident between steps, when gradients are gone and the heap is trimmed (what Inductor leaves behind does
not count); for ours all of `measure.residence`, its bookkeeping and state included. *Time* is that of the fastest step
of each, and its ratio to PyTorch eager's fastest: on a machine that others use too, a slower step says more of them.
Linux only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

MODELS = ("mlp", "unet", "resnet18", "resnet50", "vit_b-half", "bert-half", "gpt2-4-half", "gpt2-12-half", "llama",
          "lstm")  # fmt: skip
_WARM = 2  # steps before any is looked at
HEADS = ("model", "runner", "memory, MB", "of eager", "ms a step", "of eager", "compute")


class Runner:
    """A process, a module's child, that takes a step when it is told to."""

    def __init__(self, name: str, kind: str, what: str, module: str = "scripts.race") -> None:
        self.name, self.times = name, list[float]()
        command = [sys.executable, "-m", module, "--child", kind, what]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.memory = int(self._answer())

    def step(self) -> None:
        """Take a step and note its seconds."""
        assert self._process.stdin is not None
        print("step", file=self._process.stdin, flush=True)
        self.times.append(self._answer())

    def _answer(self) -> float:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"{self.name}: the process ended")
        return float(line)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def torch_step(name: str, compiled: bool) -> tuple[Callable[[], None], int]:
    """A step of a case, and the bytes it takes of the machine."""
    import torch

    from scripts import torch_models
    from scripts.compiled_step import arguments

    torch.manual_seed(0)
    case = torch_models.MODELS[name]()
    model, optimizer = case.model, case.optimizer(case.model.parameters())
    called = torch.compile(model) if compiled else model
    positional, named, target = arguments(case.batch)
    assert case.loss is not None
    of_loss = case.loss
    return steps_of(lambda: of_loss(called(*positional, **named), target).backward(), model, optimizer, case.batch)


def steps_of(backward: Callable[[], None], model: Any, optimizer: Any, batch: Any) -> tuple[Callable[[], None], int]:
    """A step of PyTorch's around a forward and backward pass, and the bytes it takes of the machine."""
    import gc

    import torch
    from torch.utils import _pytree as pytree

    from onnx_remat.measure.probe import reset_peak, resident
    from onnx_remat.session.heap import trim

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        backward()
        optimizer.step()

    for _ in range(_WARM):
        step()
    optimizer.zero_grad(set_to_none=True)
    gc.collect()
    trim()
    between = reset_peak()
    step()
    state = pytree.tree_leaves([optimizer.state_dict()["state"], batch])
    tensors = [*model.parameters(), *model.buffers(), *(x for x in state if isinstance(x, torch.Tensor))]
    held = sum(x.numel() * x.element_size() for x in tensors)
    return step, resident("VmHWM") - between + held


def our_step(path: str) -> tuple[Callable[[], None], int]:
    """The same of a file; the memory is of another process, which does nothing else."""
    from onnx_remat.measure.residence import measure, state_for
    from onnx_remat.session.session import Session
    from onnx_remat.session.training import Loop

    taken = measure(Path(path)).total
    session = Session(path, donate=True)
    loop = Loop(session, state_for(session.inputs), "loss")

    def step() -> None:
        loop.step()

    for _ in range(_WARM):
        step()
    return step, taken


def child(kind: str, what: str) -> None:
    """Say how much memory a step takes; then, for every line read, take one and say how long it took."""
    step, taken = our_step(what) if kind == "file" else torch_step(what, kind == "compile")
    print(taken, flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        step()
        print(time.perf_counter() - start, flush=True)


def race(model: str, folder: Path, before: Path | None, budgets: list[str], turns: int, effort: float) -> Any:
    """The rows of one model."""
    from onnx_remat.errors import BudgetInfeasibleError
    from onnx_remat.rewrite.pipeline import rewrite_model

    path = folder / f"{model}.pytorch.onnx"
    compute, refused = {"ours": ""}, []
    files = {"ours": path}
    if before and (before / path.name).exists():
        files["ours before"] = before / path.name
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as home, ExitStack() as stack:
        for budget in budgets:
            name = f"ours, {budget}"
            try:
                result = rewrite_model(path, budget, effort=effort, time_limit=600)
            except BudgetInfeasibleError as error:
                refused.append((model, name, "", "", "", "", str(error).partition(";")[0]))
                continue
            result.save(written := Path(home) / f"{budget.strip('%')}.onnx")
            files[name], compute[name] = written, f"{result.report.extra_compute:+.1%}"
        jobs = [("PyTorch eager", "eager", model), ("torch.compile", "compile", model)]
        jobs += [(name, "file", str(file)) for name, file in files.items()]
        runners = []
        for job in jobs:
            runners.append(Runner(*job))
            stack.callback(runners[-1].close)
        for _ in range(turns):
            for runner in runners:
                runner.step()
    first = runners[0]
    for runner in runners:
        fastest = min(runner.times)
        yield (
            model, runner.name, f"{runner.memory / 1e6:.1f}", f"{runner.memory / first.memory:.2f}",
            f"{1000 * fastest:.0f}", f"{fastest / min(first.times):.2f}", compute.get(runner.name, ""),
        )  # fmt: skip
    yield from refused


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--model", action="append", choices=MODELS, help="only this one (repeat)")
    parser.add_argument("--before", type=Path, help="steps that another version exported")
    parser.add_argument("--budget", action="append", help="default: 60%% and 40%%")
    parser.add_argument("--effort", type=float, default=5.0)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--save", default="", metavar="NAME", help="of the table in docs/results/data")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child)
        return
    from scripts import results

    rows: list[tuple[str, ...]] = []
    print("| " + " | ".join(HEADS) + " |\n" + "| --- " * len(HEADS) + "|", flush=True)
    for model in arguments.model or MODELS:
        budgets = arguments.budget or ["60%", "40%"]
        for row in race(model, arguments.folder, arguments.before, budgets, arguments.turns, arguments.effort):
            rows.append(row)
            print("| " + " | ".join(row) + " |", flush=True)
    if arguments.save:
        results.save(arguments.save, results.Table("python -m scripts.race FOLDER", HEADS, tuple(rows)))


if __name__ == "__main__":
    main()
