"""PyTorch's activation_memory_budget and us: the same joint graphs, one simulator, one cost model.

    python -m scripts.headline_pytorch

AOTAutograd traces a model's forward and backward pass into one graph, and its min-cut partitioner, which torch.compile
uses, decides for each budget what backward recomputes. Its decision is replayed as a schedule of that same graph; our
planner is then asked for a plan that peaks no higher, and for one that peaks at the fraction PyTorch was asked for.
Peaks are of the whole step: weights, batch, activations, gradients; time is a roofline.

    python -m scripts.headline_pytorch --measured

runs both on the CPU: the model through ``torch.compile`` (Inductor) at each budget, and its exported step on ONNX
Runtime, rewritten to the same fraction of its own peak that PyTorch kept of its own. Every figure is relative to the
same runtime at its defaults.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import onnx
import torch
import torch._functorch.config as functorch_config
from functorch.compile import make_boxed_func
from onnx_remat.converters.pytorch import export_training_step
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule

from onnx_remat.errors import BudgetInfeasibleError
from onnx_remat.measure import processes
from onnx_remat.memory import buffers
from onnx_remat.memory.problem import Problem, Schedule, check_schedule
from onnx_remat.ort.kernels.costs import PRESETS
from onnx_remat.rewrite.pipeline import rewrite_model
from onnx_remat.units import format_bytes
from sample_models.networks import torch_models
from scripts import compiled_step, fx_problems
from scripts.headline_feng_huang import plan

MODELS = ("mlp", "resnet18", "unet", "gpt2-4-half")
BUDGETS = (0.8, 0.5, 0.3, 0.1)
MEASURED = (0.5, 0.1)


def partitioned(case: torch_models.Case, budget: float) -> tuple[Problem, Schedule]:
    """The joint graph of a model as a problem, and PyTorch's decision for a budget as a schedule of it."""
    names, parameters = zip(*case.model.named_parameters(), strict=True)
    kept: dict[str, Any] = {}

    def partition(joint: GraphModule, inputs: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
        with functorch_config.patch(activation_memory_budget=budget):
            halves = min_cut_rematerialization_partition(joint, inputs, **options)
        kept["joint"], kept["halves"] = joint.graph, halves
        return halves

    positional, named, target = case.arguments()

    def step(parameters: Any, data: Any, named_data: Any, target: Any) -> torch.Tensor:
        made = torch.func.functional_call(case.model, dict(zip(names, parameters, strict=True)), data, named_data)
        assert case.loss is not None
        return case.loss(made, target)

    def interpret(gm: GraphModule, example_inputs: Any) -> Any:
        return make_boxed_func(gm.forward)

    traced = aot_function(step, fw_compiler=interpret, bw_compiler=interpret, partition_fn=partition)
    with contextlib.ExitStack() as stack:
        if masks := sys.modules.get("transformers.masking_utils"):  # it knows torch.compile's tracing, not this one
            stack.enter_context(mock.patch.object(masks, "is_tracing", lambda *_: True))
        traced(list(parameters), positional, named, target).backward()
    problem, ops = fx_problems.problem(kept["joint"], PRESETS["h100"])
    number = {node.name: i for i, node in enumerate(ops)}
    order = tuple(
        number[node.name] for half in kept["halves"] for node in half.graph.nodes
        if node.op == "call_function" and node.name in number
    )  # fmt: skip
    schedule = Schedule(order)
    check_schedule(problem, schedule)
    return problem, schedule


def measured_table(models: Sequence[str], seconds: float) -> None:
    """Print what ``torch.compile`` and a rewritten step really hold and take, both against their own defaults."""
    print("| model | asked | PyTorch: peak, time | ONNX Runtime as it is | ours at that fraction: peak, time |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    for name in models:
        plain, clock = compiled_step.measured(name, 1.0)
        torch.manual_seed(0)
        case = torch_models.MODELS[name]()
        with tempfile.TemporaryDirectory(prefix="onnx-remat-") as scratch:
            path, small = Path(scratch) / "step.onnx", Path(scratch) / "small.onnx"
            onnx.save(export_training_step(case.model, case.batch, case.loss, check=False, **case.options), path)
            before = processes.measure(path).peak_bytes
            for budget in MEASURED:
                theirs, their_clock = compiled_step.measured(name, budget)
                try:
                    result = rewrite_model(path, f"{100 * theirs / plain:.1f}%", effort=seconds)
                    result.save(small, force=True)
                    times = processes.race(path, small, runs=9)
                    own = f"{processes.measure(small).peak_bytes / before:.1%}, {times[1] / times[0] - 1:+.1%}"
                    had = f"{format_bytes(before)}, {1e3 * times[0]:.0f} ms"
                except BudgetInfeasibleError as error:
                    had, own = format_bytes(before), f"not below {error.best_peak_bytes / before:.1%}"
                print(
                    f"| {name} ({format_bytes(plain)}, {1e3 * clock:.0f} ms) | {budget:.0%} | {theirs / plain:.1%}, "
                    f"{their_clock / clock - 1:+.1%} | {had} | {own} |", flush=True,
                )  # fmt: skip


def planned_table(models: Sequence[str], seconds: float) -> None:
    """Print both decisions on the same joint graph, under one simulator."""
    print("| model | ops | keep all | asked | PyTorch: peak, extra | ours at that peak | ours at what was asked |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for name in models:
        torch.manual_seed(0)
        case = torch_models.MODELS[name]()
        fx_problems.drop_running_statistics(case.model)
        for budget in BUDGETS:
            problem, theirs = partitioned(case, budget)
            full = buffers.simulate(problem, range(problem.n_ops)).peak
            peak, extra = buffers.simulate(problem, theirs).peak, theirs.overhead(problem)
            same = plan(problem, peak, seconds)
            asked = plan(problem, int(budget * full), seconds)
            cells = [f"{p / full:.1%}, +{e:.1%}" for p, e in ((peak, extra), same, asked)]
            if asked[0] > budget * full:
                cells[2] = f"not reached: {cells[2]}"
            print(
                f"| {name} | {problem.n_ops} | {full / 2**20:.0f} MiB | {budget:.0%} "
                f"| {cells[0]} | {cells[1]} | {cells[2]} |", flush=True,
            )  # fmt: skip


def main() -> None:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=sorted(torch_models.MODELS), help="only this one (repeat)")
    parser.add_argument("--time-limit", type=float, default=5.0, help="seconds per plan")
    parser.add_argument("--measured", action="store_true", help="run both, on the CPU")
    given = parser.parse_args()
    table = measured_table if given.measured else planned_table
    table(given.model or MODELS, given.time_limit)


if __name__ == "__main__":
    main()
