"""Offsets in one slab for published instances, which are CSV files, such as those of google/minimalloc.

A file has a header with the columns ``lower``, ``upper`` and ``size`` in any order (or ``start``, ``end``, ``size``); a
buffer lives in [lower, upper). Other columns are ignored.

*Bound* is the largest sum of sizes live at once. *of capacity* is for files whose name has a capacity, such as
``J.1048576.csv``: the published challenge is to reach 1. A search ends where it reaches the bound.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from onnx_remat.memory.problem import Longs
from tests.support.layout_check import check_layout

HEADS = ("file", "buffers", "bound", "height", "of the bound", "of capacity", "seconds")

_COLUMNS = (("lower", "start"), ("upper", "end"), ("size",))


def read(path: Path) -> tuple[Longs, Longs, Longs]:
    """The lower, upper and size of a file's buffers."""
    with path.open(newline="") as file:
        lines = csv.DictReader(file, skipinitialspace=True)
        names = [next((name for name in either if name in (lines.fieldnames or ())), None) for either in _COLUMNS]
        if None in names:
            raise SystemExit(f"{path}: the header must name lower, upper and size, not {lines.fieldnames}")
        table = [[line[name] for name in names if name] for line in lines]
    lower, upper, size = np.array(table, np.int64).reshape(-1, 3).T
    return lower, upper, size


def rows(file: str, *, seconds: float = 30.0) -> Iterator[tuple[str, ...]]:
    """The row of one instance."""
    from onnx_remat.memory.layout import load_later_searches, load_search, solve

    load_search()  # before the clock starts
    load_later_searches()
    lower, upper, size = read(Path(file))
    began = time.monotonic()
    found = solve(lower, upper, size, alignment=1, effort=1_000_000, time_limit=seconds)
    taken = time.monotonic() - began
    check_layout(lower, upper, size, found.offsets)
    name, _, capacity = (stem := Path(file).stem).partition(".")
    name, share = (name, f"{found.height / int(capacity):.4f}") if capacity.isdigit() else (stem, "")
    figures = f"{found.lower_bound:,}", f"{found.height:,}", f"{found.height / max(1, found.lower_bound):.4f}"
    yield name, str(len(size)), *figures, share, f"{taken:.1f}"
