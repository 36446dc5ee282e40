"""Chains: the planner against the optimum by dynamic programming (Griewank and Walther, Algorithm 799: revolve, 2000).

A chain of n forward ops and n gradients, each of which reads its activation and the gradient before; every value is a
unit, every op costs one. For a number of slots, that is activations held besides the one at work, dynamic programming
finds the fewest forward ops of any plan that holds checkpoints so; its plan is simulated, and the planner is asked for
one that peaks no higher. *Above* is how many more ops ours runs, forward and backward, of those the optimum runs;
below zero where a plan of ours does without a rule of that model: that a slot is held until its gradient is due.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from onnx_remat.memory.buffers import simulate
from onnx_remat.memory.problem import check_schedule
from onnx_remat.plan.selectors import Request, get
from tests.support.planner_problems import baseline, chain, chain_optimum

ITEMS = ("8", "16", "32", "64", "128", "256", "512")
HEADS = ("n", "slots", "plans", "not found", "worst above", "at slots", "mean above")
_ALL = 64  # length up to which every number of slots is tried
_SOME = 24  # numbers of slots tried of longer ones


def rows(length: str, *, effort: float = 10.0) -> Iterator[tuple[str, ...]]:
    """The row of chains of one length."""
    n = int(length)
    problem = chain(n)
    tried = range(n) if n <= _ALL else sorted({int(s) for s in np.geomspace(1, n - 1, _SOME)})
    above: list[tuple[float, int]] = []
    lost = 0
    for slots in tried:
        known = chain_optimum(n, slots)
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
    yield (str(n), which, str(len(tried)), str(lost), *numbers)
