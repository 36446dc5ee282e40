"""Feng & Huang (CVPR 2021, arXiv:1808.00079): memory cut off by gradient checkpointing and its time, theirs and ours.

Same networks, same batch sizes as their benchmark, counted as they count: intermediate tensors (activations and their
gradients, the batch included), without weights and weight gradients. Their figures were measured on an RTX 2080 Ti;
ours are planned on the step as PyTorch traces it, sizes exact, time by a roofline of the same card, and are asked to
cut as much as they do. Their benchmark asks for the gradient of the batch as well, so ours does. "at most" is a bound:
no schedule can cut more. NASNet, AmoebaNet and DARTS are the CIFAR-10 networks, 36 channels and 20 cells, that their
repository runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from onnx_remat.memory import buffers
from onnx_remat.memory.problem import Problem, Schedule
from onnx_remat.ort.kernels.costs import Device
from onnx_remat.plan import bounds, selectors
from sample_models.networks import nas_models
from sample_models.networks.torch_models import import_torchvision
from scripts import fx_problems

RTX_2080_TI = Device(13.45e12, 616e9, 5e-6)


@dataclass(frozen=True, slots=True)
class Published:
    """A row of their table: batch, image size, fraction of memory cut off, fraction of time added."""

    batch: int
    size: int
    cut: float
    time: float


TABLE = {
    "alexnet": Published(1024, 224, 0.34, 0.34),
    "vgg16": Published(64, 224, 0.31, 0.32),
    "vgg19": Published(64, 224, 0.31, 0.33),
    "resnet18": Published(256, 224, 0.35, 0.30),
    "resnet34": Published(128, 224, 0.55, 0.35),
    "resnet50": Published(64, 224, 0.63, 0.31),
    "resnet101": Published(32, 224, 0.74, 0.35),
    "resnet152": Published(16, 224, 0.81, 0.37),
    "densenet121": Published(32, 224, 0.78, 0.34),
    "densenet161": Published(16, 224, 0.82, 0.36),
    "densenet169": Published(32, 224, 0.82, 0.32),
    "densenet201": Published(16, 224, 0.85, 0.53),
    "inception_v3": Published(32, 300, 0.71, 0.29),
    "nasnet": Published(64, 32, 0.81, 0.31),
    "amoebanet": Published(64, 32, 0.79, 0.36),
    "darts": Published(64, 32, 0.80, 0.55),
}
"""Cut and time as published; batch and image size as in the authors' repository (jianweif/OptimalGradCheckpointing)."""


def build(name: str, row: Published) -> Problem:
    """The step of a network: forward, sum of its output, backward; only intermediate tensors count."""
    options = {"init_weights": False} if name == "inception_v3" else {}
    if name in nas_models.GENOTYPES:
        model = nas_models.build(name)
    else:
        model = getattr(import_torchvision().models, name)(weights=None, **options)
    model.train()
    fx_problems.drop_running_statistics(model)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # as their benchmark does
    batch = torch.empty(row.batch, 3, row.size, row.size, device="meta")
    model = model.to("meta")

    def loss(made: Any) -> torch.Tensor:
        parts = made if isinstance(made, tuple) else (made,)  # Inception's auxiliary head
        return torch.stack([part.sum() for part in parts]).sum()

    graph = fx_problems.trace_step(model, [batch], loss, input_gradient=True)
    weights = [n for n in graph.nodes if n.op == "placeholder"][:-1]
    gradients = [a for a in graph.output_node().all_input_nodes[1:-1] if isinstance(a, Node)]
    return fx_problems.problem(graph, RTX_2080_TI, [*weights, *gradients])[0]


def plan(problem: Problem, target: int, seconds: float) -> tuple[int, float]:
    """Peak and extra compute of our plan for a peak of `target` bytes."""
    baseline = Schedule(tuple(range(problem.n_ops)))
    request = selectors.Request(problem, target, baseline, effort=seconds)
    schedule = selectors.get("auto")(request)
    return buffers.simulate(problem, schedule).peak, schedule.overhead(problem)


ITEMS = tuple(TABLE)
HEADS = (
    "network, batch", "ops", "before", "published: cut, time", "ours: cut, time", "at most", "planning",
)  # fmt: skip


def rows(name: str, *, effort: float = 3.0) -> Iterator[tuple[str, ...]]:
    """The row of one network."""
    known = TABLE[name]
    problem = build(name, known)
    before = buffers.simulate(problem, range(problem.n_ops)).peak
    start = time.perf_counter()
    peak, extra = plan(problem, int(before * (1 - known.cut)), effort)
    spent = time.perf_counter() - start
    most = 1 - bounds.lower_bound(problem) / before
    yield (
        f"{name}, {known.batch}", str(problem.n_ops), f"{before / 2**20:.0f} MiB",
        f"{known.cut:.0%}, +{known.time:.0%}",
        f"{1 - peak / before:.1%}, +{extra:.1%}", f"{most:.0%}", f"{spent:.0f} s",
    )  # fmt: skip
