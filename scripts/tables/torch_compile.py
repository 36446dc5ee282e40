"""PyTorch's activation_memory_budget and us: the same joint graphs, one simulator, one cost model.

AOTAutograd traces a model's forward and backward pass into one graph, and its min-cut partitioner, which torch.compile
uses, decides for each budget what backward recomputes. Its decision is replayed as a schedule of that same graph; our
planner is then asked for a plan that peaks no higher, and for one that peaks at the fraction PyTorch was asked for.
Peaks are of the whole step: weights, batch, activations, gradients; time is a roofline.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch._functorch.config as functorch_config
from functorch.compile import make_boxed_func
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule

from onnx_remat.memory import buffers
from onnx_remat.memory.problem import Problem, Schedule, check_schedule
from onnx_remat.ort.kernels.costs import PRESETS
from sample_models.networks import torch_models
from scripts import fx_problems
from scripts.tables.feng_huang import plan

ITEMS = ("mlp", "resnet18", "unet", "gpt2-4-half")
HEADS = ("model", "ops", "keep all", "asked", "PyTorch: peak, extra", "ours at that peak", "ours at what was asked")
BUDGETS = (0.8, 0.5, 0.3, 0.1)


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


def rows(name: str, *, effort: float = 3.0) -> Iterator[tuple[str, ...]]:
    """A row for each budget: both decisions on the same joint graph, under one simulator."""
    torch.manual_seed(0)
    case = torch_models.MODELS[name]()
    fx_problems.drop_running_statistics(case.model)
    for budget in BUDGETS:
        problem, theirs = partitioned(case, budget)
        full = buffers.simulate(problem, range(problem.n_ops)).peak
        peak, extra = buffers.simulate(problem, theirs).peak, theirs.overhead(problem)
        asked = plan(problem, int(budget * full), effort)
        cells = [f"{p / full:.1%}, +{e:.1%}" for p, e in ((peak, extra), plan(problem, peak, effort), asked)]
        if asked[0] > budget * full:
            cells[2] = f"not reached: {cells[2]}"
        yield name, str(problem.n_ops), f"{full / 2**20:.0f} MiB", f"{budget:.0%}", *cells
