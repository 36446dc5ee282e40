"""Plan published benchmark graphs, or synthetic ones of growing size, and print overheads next to the best
known.

    python -m scripts.bench_planner --graphs DIR --budget 0.9,0.8 --selector search --json -
    python -m scripts.bench_planner --graphs DIR --graph segnet --selector search,sqrt_n,torch_dp,checkmate_milp
    python -m scripts.bench_planner --scale 1000,10000,100000 --budget 0.6 --free

Each graph is a JSON file with ``bytes``, ``cost``, ``edges``, ``backward`` and ``base_peak``. Budgets are
fractions of ``base_peak``; first executions keep the file's order; a value that nobody reads is freed after
its op.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from onnx_remat.memory.buffers import simulate
from onnx_remat.memory.problem import Problem, Schedule, check_schedule
from onnx_remat.plan.bounds import lower_bound
from onnx_remat.plan.cost_bounds import cost_lower_bound
from onnx_remat.plan.selectors import Request, get, names
from scripts.results import Table, save
from tests.support.published import load, synthetic


@dataclass(frozen=True)
class Record:
    """One plan; overheads are fractions, the schedule is a list of node numbers."""

    graph: str
    budget: float
    selector: str
    schedule: list[int]
    overhead: float
    peak: int
    lower_bound: float
    seconds: float
    feasible: bool


def plan(
    name: str, problem: Problem, base_peak: int, share: float, selector: str, limit: float, fixed_order: bool = True
) -> Record:
    """Plan one graph under one budget; peak and overhead are the simulator's."""
    budget = int(base_peak * share)
    baseline = Schedule(tuple(range(problem.n_ops)))
    start = time.perf_counter()
    schedule = get(selector)(Request(problem, budget, baseline, fixed_order=fixed_order, effort=limit))
    seconds = time.perf_counter() - start
    check_schedule(problem, schedule, fixed_order)
    peak = simulate(problem, schedule).peak
    bound = cost_lower_bound(problem, budget, range(problem.n_ops) if fixed_order else None)
    return Record(
        name, share, selector, list(schedule.order), schedule.overhead(problem), peak,
        bound, seconds, peak <= budget,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Best:
    """A best-known overhead, in percent as the table shows it, and how many decimals that has."""

    percent: float
    decimals: int

    def against(self, overhead: float) -> str:
        """How an overhead (a fraction) compares, to the precision of the table."""
        ours = round(100 * overhead, self.decimals)
        return "same" if ours == self.percent else "under" if ours < self.percent else "OVER"


def best_known(readme: Path) -> dict[tuple[str, float], Best]:
    """The table of overheads in the graphs' own README; nothing where there is none."""
    found: dict[tuple[str, float], Best] = {}
    shares: list[float] = []
    for line in readme.read_text(encoding="utf-8").splitlines() if readme.exists() else ():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0].startswith("graph") and len(cells) > 2:
            shares = [float(cell) if re.fullmatch(r"0\.\d+", cell) else math.nan for cell in cells[1:]]
        elif shares and len(cells) == len(shares) + 1:
            for share, cell in zip(shares, cells[1:], strict=True):
                number = re.match(r"\d+(?:\.(\d+))?", cell)
                if number and not math.isnan(share):
                    found[cells[0].split(" ")[0], share] = Best(float(number.group()), len(number.group(1) or ""))
    return found


def rows(records: Sequence[Record], known: dict[tuple[str, float], Best]) -> Iterator[str]:
    """The records as lines of a table."""
    yield (
        f"{'graph':<14}{'budget':>7} {'selector':<12}{'overhead %':>11}{'best known':>11}{'bound %':>9}{'seconds':>9}"
        "  against best known"
    )
    for r in records:
        best = known.get((r.graph, r.budget))
        shown = f"{100 * r.overhead:11.3f}" if r.feasible else "     no plan"
        against = ""
        if best is not None:
            against = best.against(r.overhead) if r.feasible else "no plan"
        known_as = "" if best is None else f"{best.percent:.{best.decimals}f}"
        yield (
            f"{r.graph:<14}{r.budget:>7.3g} {r.selector:<12}{shown:>11}"
            f"{known_as:>11}{100 * r.lower_bound:>9.3f}{r.seconds:>9.2f}"
            f"  {against}".rstrip()
        )


def saved(records: Sequence[Record], known: dict[tuple[str, float], Best], command: str) -> Table:
    """The records as a table of the results pages."""
    lines = []
    for r in records:
        best = known.get((r.graph, r.budget))
        lines.append((
            r.graph, f"{r.budget:g}", f"{100 * r.overhead:.3f}" if r.feasible else "no plan",
            "" if best is None else f"{best.percent:.{best.decimals}f}", f"{100 * r.lower_bound:.3f}",
            f"{r.seconds:.1f}",
        ))  # fmt: skip
    return Table(command, ("graph", "budget", "overhead, %", "best known", "bound", "seconds"), tuple(lines))


def growth(
    sizes: Sequence[int], shares: Sequence[float], selector: str, limit: float | None, fixed_order: bool
) -> list[Record]:
    """Plans of synthetic graphs of the given sizes; a millisecond per op unless a limit is given."""
    records = []
    for size in sizes:
        problem = synthetic(size)
        peak = simulate(problem, range(problem.n_ops)).peak
        seconds = limit or size / 1000
        records += [plan(f"blocks_{size}", problem, peak, share, selector, seconds, fixed_order) for share in shares]
    return records


def exponent(records: Sequence[Record]) -> str:
    """How the time of the plans grows with the size of synthetic graphs."""
    sizes = np.log([len(set(r.schedule)) for r in records])
    if np.ptp(sizes) == 0:
        return ""
    slope = np.polyfit(sizes, np.log([r.seconds for r in records]), 1)[0]
    return f"time grows with n to the power of {slope:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    importlib.import_module("scripts.peers")  # registers other people's planners
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=Path, help="folder of graphs")
    parser.add_argument("--graph", action="append", help="only this graph; may be repeated")
    parser.add_argument("--budget", default="0.9,0.8,0.5,0.3,0.2", help="fractions of the graph's base peak")
    parser.add_argument("--selector", default="search", help=f"comma-separated: {', '.join(names())}")
    parser.add_argument("--time-limit", type=float, help="seconds per plan (default 30; with --scale 1 ms per op)")
    parser.add_argument("--free", action="store_true", help="with --scale: any order of first executions")
    parser.add_argument("--scale", help="sizes of synthetic graphs to plan instead, e.g. 1000,10000")
    parser.add_argument("--json", help="file to write the records to, - for standard output")
    parser.add_argument("--save", action="store_true", help="also write docs/results/data/published-graphs.json")
    args = parser.parse_args(arguments)
    shares = [float(share) for share in args.budget.split(",")]
    small = synthetic(64)
    plan("", small, simulate(small, range(64)).peak, 0.6, "search", 0.05)  # compiles what is compiled
    records: list[Record] = []
    known: dict[tuple[str, float], Best] = {}
    if args.scale:
        for selector in args.selector.split(","):
            records += growth([int(n) for n in args.scale.split(",")], shares, selector, args.time_limit, not args.free)
    elif args.graphs:
        known = best_known(args.graphs / "README.md")
        for path in sorted(args.graphs.glob("*.json")):
            if args.graph and path.stem not in args.graph:
                continue
            problem, base_peak = load(path)
            for share in shares:
                if lower_bound(problem) > base_peak * share:
                    continue
                for selector in args.selector.split(","):
                    records.append(plan(path.stem, problem, base_peak, share, selector, args.time_limit or 30.0))
                    print(list(rows(records[-1:], known))[1], file=sys.stderr, flush=True)
    else:
        parser.error("give --graphs or --scale")
    text = json.dumps([asdict(record) for record in records])
    if args.json == "-":
        print(text)
        return 0
    if args.json:
        Path(args.json).write_text(text, encoding="utf-8")
    if args.save:
        command = f"python -m scripts.bench_planner --graphs DIR --time-limit {args.time_limit:g} --save"
        save("published-graphs", saved(records, known, command))
    print("\n".join(rows(records, known)))
    if args.scale:
        print(exponent(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
