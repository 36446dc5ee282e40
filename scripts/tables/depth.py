"""openai/gradient-checkpointing: how much deeper a network fits in the same memory, and growth with the square root.

They report models "more than 10x larger" at 20 % more time, and memory that grows with sqrt(n) instead of n. Here: a
network of some depth sets the memory, its whole step as ONNX Runtime executes it; then the deepest network whose
rewritten step keeps that peak for up to 20 % extra compute, and what ten times the depth takes. An item that is a
number is the length of a chain: its peak as it is, the lowest, and that over the root of the length, in activations.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import onnx

from onnx_remat.errors import BudgetInfeasibleError
from onnx_remat.ort.executed import as_executed
from onnx_remat.ort.kernels.cpu import CPU
from onnx_remat.ort.prepare import Preparation, prepare
from onnx_remat.plan.bounds import lower_bound
from onnx_remat.rewrite.accounting import smallest_budget
from onnx_remat.rewrite.pipeline import plan_model, rewrite_model
from onnx_remat.units import format_bytes
from sample_models import chain, deep_mlp, residual_cnn

HEADS = ("network", "memory", "as it is", "deepest at up to +20 %", "10x as deep")


@dataclass(frozen=True, slots=True)
class Family:
    """Networks of one kind by depth: how to build one, and the depth that sets the memory."""

    name: str
    build: Callable[[int], onnx.ModelProto]
    depth: int


FAMILIES = (
    Family("residual CNN, blocks per stage", lambda n: residual_cnn.build(blocks=n, batch=16), 8),
    Family("MLP, layers", lambda n: deep_mlp.build(depth=n, width=32, features=32, batch=8192), 24),
)


class Prices:
    """Extra compute of networks of one family by depth, where they keep `allowed` bytes: infinite where not reached."""

    def __init__(self, family: Family, allowed: int, seconds: float) -> None:
        self.family, self.allowed, self.seconds = family, allowed, seconds
        self.known = {family.depth: 0.0}

    def __getitem__(self, depth: int) -> float:
        if depth not in self.known:
            try:
                result = rewrite_model(self.family.build(depth), self.allowed, effort=self.seconds, run_by="session")
                self.known[depth] = result.report.extra_compute
            except BudgetInfeasibleError:
                self.known[depth] = math.inf
            print(f"  depth {depth}: +{self.known[depth]:.1%}", file=sys.stderr, flush=True)
        return self.known[depth]


def deepest(prices: Prices, limit: float) -> int:
    """Deepest network, within a tenth, whose price is at most `limit`; starts from what is known already."""
    low = max(depth for depth, price in prices.known.items() if price <= limit)
    beyond = [depth for depth, price in prices.known.items() if depth > low and price > limit]
    high = min(beyond, default=2 * low)
    while not beyond and prices[high] <= limit:
        low, high = high, 2 * high
    while high - low > max(1, low // 10):
        middle = (low + high) // 2
        low, high = (middle, high) if prices[middle] <= limit else (low, middle)
    return low


def lowest(n: int, seconds: float) -> float:
    """Lowest peak of a chain of `n` layers, in activations."""
    width, batch = 64, 1024
    model = chain.chain(n, width, batch)
    floor = lower_bound(prepare(model, Preparation(CPU)).problem)
    try:
        peak = plan_model(model, smallest_budget(floor), effort=seconds, run_by="session").timeline.peak
    except BudgetInfeasibleError as error:
        peak = error.best_peak_bytes
    return peak / (width * batch * 4)


ITEMS = tuple(family.name for family in FAMILIES)


def rows(item: str, *, effort: float = 3.0) -> Iterator[tuple[str, ...]]:
    """The row of one family, or of a chain."""
    if item.isdigit():
        n = int(item)
        plain = as_executed(chain.chain(n, 64, 1024), None, "all", Preparation(CPU)).timeline.peak / (64 * 1024 * 4)
        least = lowest(n, effort)
        yield f"chain of {n}", f"{plain:.1f}", f"{least:.1f}", f"{least / n**0.5:.2f}", ""
        return
    family = next(each for each in FAMILIES if each.name == item)
    allowed = as_executed(family.build(family.depth), None, "all", Preparation(CPU)).timeline.peak
    prices = Prices(family, allowed, effort)
    depth = deepest(prices, 0.2)
    tenfold = prices[10 * family.depth]
    deep = f"{depth} = {depth / family.depth:.1f}x at +{prices[depth]:.1%}"
    ten = "not reached" if tenfold == math.inf else f"+{tenfold:.1%}"
    yield family.name, format_bytes(allowed), str(family.depth), deep, ten
