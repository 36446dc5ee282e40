"""How good a plan is after how many seconds: the search run under growing limits, and a table and a picture of it.

Graphs are ONNX files, published graphs as for `scripts.bench_planner` (their order is fixed), or numbers of ops of a
synthetic one. ``--plot FILE`` draws a picture of all graphs. Each limit is
a run of its own, from the start, so that an entry is what a user gets who asks for it; the seconds are those it took.
Loading and compiling are left out. Printed per graph: seconds to the first plan that keeps the budget, and to one whose
extra compute is within 5 % and 1 % of that under the largest limit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from onnx_remat.ir import model_io
from onnx_remat.memory.buffers import simulate
from onnx_remat.memory.problem import Problem, Schedule
from onnx_remat.ort.kernels.registry import kernels_of
from onnx_remat.ort.prepare import Preparation, prepare
from onnx_remat.plan.request import Deadline
from onnx_remat.plan.selectors import Request, get
from onnx_remat.units import parse_budget
from tests.support import published

LIMITS = (1.0, 4.0, 15.0, 60.0)
HEADS = ("graph", "ops", "first plan, s", "within 5 %", "within 1 %", f"after {LIMITS[-1]:g} s", "late, s")
WITHIN = 0.05, 0.01


@dataclass(frozen=True, slots=True)
class Graph:
    """What is planned: its name, its table, the order without recompute, and whether that is to be kept."""

    name: str
    problem: Problem
    baseline: Schedule
    fixed_order: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """What a limit gave: the seconds it took, and the extra compute, a fraction; None for no plan."""

    limit: float
    seconds: float
    extra_compute: float | None


def load(path: Path) -> Graph:
    """A graph of either kind."""
    if path.suffix == ".json":
        problem, _ = published.load(path)
        return Graph(path.stem, problem, Schedule(tuple(range(problem.n_ops))), True)
    kernels = kernels_of("cpu", None)
    compiled = prepare(model_io.load(path).model, Preparation(kernels, {}, (), (), None, kernels.costs))
    liveness = replace(compiled.problem, poolable=np.zeros(compiled.problem.n_values, np.bool_))  # as plans are made
    return Graph(path.stem, liveness, compiled.default_order(), False)


def synthetic(n_ops: int) -> Graph:
    """A graph of `published.synthetic`, in any order."""
    problem = published.synthetic(n_ops)
    return Graph(f"blocks_{n_ops}", problem, Schedule(tuple(range(problem.n_ops))), False)


def curve(graph: Graph, budget: str, limits: Sequence[float]) -> Iterator[Entry]:
    """An entry for each limit."""
    problem = graph.problem
    peak = simulate(problem, graph.baseline).peak
    request = Request(problem, parse_budget(budget).resolve(peak), graph.baseline, graph.fixed_order, use_time=True)
    for limit in limits:
        began = time.monotonic()
        schedule = get("auto")(replace(request, effort=limit, deadline=Deadline(limit)))
        seconds = time.monotonic() - began
        kept = simulate(problem, schedule).peak <= request.budget
        yield Entry(limit, seconds, schedule.overhead(problem) if kept else None)


def reached(entries: Sequence[Entry], most: float) -> str:
    """Seconds of the first entry, of those by growing limit, whose extra compute is at most this."""
    found = (e.seconds for e in entries if e.extra_compute is not None and e.extra_compute <= most)
    return next((f"{seconds:.1f}" for seconds in found), "-")


def row(graph: Graph, entries: Sequence[Entry]) -> tuple[str, ...]:
    """The table's line for a graph."""
    last = entries[-1].extra_compute
    goals = [float("inf"), *((1 + share) * last + 1e-9 for share in WITHIN)] if last is not None else []
    times = [reached(entries, goal) for goal in goals] or ["-"] * (1 + len(WITHIN))
    late = max(entry.seconds - entry.limit for entry in entries)
    return (graph.name, str(graph.problem.n_ops), *times, "-" if last is None else f"{last:.2%}", f"{max(late, 0):.1f}")


def draw(curves: dict[str, list[Entry]], path: Path) -> None:
    """Extra compute over that under the largest limit, by seconds, a line per graph that has both."""
    from matplotlib.figure import Figure  # the `plot` extra: the table needs none

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="seconds", ylabel="extra compute, of that under the largest limit")
    for name, entries in curves.items():
        if last := entries[-1].extra_compute:
            points = [(e.seconds, e.extra_compute / last) for e in entries if e.extra_compute is not None]
            axes.plot(*zip(*points, strict=True), marker=".", label=name)
    axes.set_ylim(bottom=0.9)
    axes.legend(fontsize="small")
    figure.savefig(path)


_CURVES: dict[str, list[Entry]] = {}
"""Of this run, for the picture."""


def rows(item: str, *, budget: str = "60%", plot: str = "") -> Iterator[tuple[str, ...]]:
    """The row of one graph."""
    for _ in curve(synthetic(64), "60%", [1.0]):
        pass  # compiles what is compiled
    graph = synthetic(int(item)) if item.isdigit() else load(Path(item))
    _CURVES[graph.name] = list(curve(graph, budget, LIMITS))
    if plot:
        draw(_CURVES, Path(plot))
    yield row(graph, _CURVES[graph.name])
