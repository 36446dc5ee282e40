"""Offsets in one slab for published instances: google/minimalloc's CSV files, or others that `bench_layout` reads.

*Bound* is the largest sum of sizes live at once. *of capacity* is for files whose name has a capacity, such as
``J.1048576.csv``: the published challenge is to reach 1. A search ends where it reaches the bound.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

HEADS = ("file", "buffers", "bound", "height", "of the bound", "of capacity", "seconds")


def rows(file: str, *, seconds: float = 30.0) -> Iterator[tuple[str, ...]]:
    """The row of one instance."""
    from onnx_remat.memory.layout import load_later_searches, load_search, solve
    from onnx_remat.memory.layout_check import check_layout
    from scripts.bench_layout import read

    load_search()  # before the clock starts
    load_later_searches()
    ids, lower, upper, size = read(Path(file))
    began = time.monotonic()
    found = solve(lower, upper, size, alignment=1, effort=1_000_000, time_limit=seconds)
    taken = time.monotonic() - began
    check_layout(lower, upper, size, found.offsets)
    name, _, capacity = Path(file).stem.partition(".")
    share = f"{found.height / int(capacity):.4f}" if capacity.isdigit() else ""
    figures = f"{found.lower_bound:,}", f"{found.height:,}", f"{found.height / max(1, found.lower_bound):.4f}"
    yield name, str(len(ids)), *figures, share, f"{taken:.1f}"
