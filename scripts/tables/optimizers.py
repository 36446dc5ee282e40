"""Optimizers whose steps the PyTorch converter traces: twenty steps of a small network alongside torch itself.

One row per optimizer: the largest difference of a parameter from torch's after twenty steps, relative to the largest
weight; how many pieces of state are renewed in place by our session, of how many; nodes; and the step's time relative
to plain SGD's, steps in turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

from tests.support.optimizers import CASES, follow

ITEMS = tuple(CASES)
HEADS = ("optimizer", "worst difference", "in place", "nodes", "step time")


def rows(name: str, *, turns: int = 200) -> Iterator[tuple[str, ...]]:
    """The row of one optimizer."""
    plain, outcome = follow(CASES["SGD"]), follow(CASES[name])
    loops = plain.loop, outcome.loop
    times: list[list[float]] = [[], []]
    for _ in range(turns):
        for loop, taken in zip(loops, times, strict=True):
            start = time.perf_counter()
            loop.step()
            taken.append(time.perf_counter() - start)
    first, own = map(statistics.median, times)
    donated, left = len(outcome.loop.donated), len(outcome.loop.not_donated)
    error = f"{max(outcome.error, outcome.average_error):.1e}"
    yield (name, error, f"{donated} of {donated + left}", str(len(outcome.step.graph.node)), f"{own / first:.2f}")
