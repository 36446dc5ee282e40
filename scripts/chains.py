"""Chains: the planner against the optimum by dynamic programming (Griewank and Walther, Algorithm 799: revolve, 2000).

    python -m scripts.chains --save

A chain of n forward ops and n gradients, each of which reads its activation and the gradient before; every value is a
unit, every op costs one. For a number of slots, that is activations held besides the one at work, dynamic programming
finds the fewest forward ops of any plan that holds checkpoints so; its plan is simulated, and the planner is asked for
one that peaks no higher. *Above* is how many more ops ours runs, forward and backward, of those the optimum runs;
below zero where a plan of ours does without a rule of that model: that a slot is held until its gradient is due.
"""

from __future__ import annotations

import argparse

import numpy as np

from onnx_remat.memory.buffers import simulate
from onnx_remat.memory.problem import Schedule, check_schedule
from onnx_remat.plan.selectors import Request, get
from onnx_remat.plan.selectors.revolve import table
from scripts.results import Table, save
from tests.support.planner_problems import baseline, chain

HEADS = ("n", "slots", "plans", "not found", "worst above", "at slots", "mean above")
_ALL = 64  # length up to which every number of slots is tried
_SOME = 24  # numbers of slots tried of longer ones


def optimum(n: int, slots: int) -> Schedule:
    """The plan that dynamic programming finds, in ops as `chain` numbers them."""
    order: list[int] = []
    for first, end in table(n, slots).stages(n, slots):
        order += range(first, end) if first < end else [2 * n - 1 - first]
    return Schedule(tuple(order))


def row(n: int, effort: float) -> tuple[str, ...]:
    """One line of the table."""
    problem = chain(n)
    tried = range(n) if n <= _ALL else sorted({int(s) for s in np.geomspace(1, n - 1, _SOME)})
    above: list[tuple[float, int]] = []
    lost = 0
    for slots in tried:
        known = optimum(n, slots)
        check_schedule(problem, known)
        peak = simulate(problem, known).peak
        found = get("search")(Request(problem, peak, baseline(problem), effort=effort))
        if simulate(problem, found).peak > peak:
            lost += 1
        else:
            above.append((len(found.order) / len(known.order) - 1, slots))
    worst, where = max(above, default=(0.0, 0))
    mean = float(np.mean([a for a, _ in above])) if above else 0.0
    which = f"{tried[0]} to {tried[-1]}"
    numbers = f"{worst:+.1%}", str(where), f"{mean:+.1%}"
    return (str(n), which, str(len(tried)), str(lost), *numbers)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--effort", type=float, default=10.0, help="of each plan, see onnx-remat --effort")
    parser.add_argument("--save", action="store_true", help="write docs/results/data/chains.json")
    arguments = parser.parse_args()
    rows = []
    print("| " + " | ".join(HEADS) + " |\n" + "| --- " * len(HEADS) + "|", flush=True)
    for n in arguments.lengths:
        rows.append(row(n, arguments.effort))
        print("| " + " | ".join(rows[-1]) + " |", flush=True)
    if arguments.save:
        save("chains", Table(f"python -m scripts.chains --effort {arguments.effort:g}", HEADS, tuple(rows)))


if __name__ == "__main__":
    main()
