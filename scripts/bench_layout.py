"""Offsets for instances in the field's format: `python -m scripts.bench_layout --csv FILE --time-limit 60 --json OUT`.

A file has a header with the columns ``id``, ``lower``, ``upper`` and ``size`` in any order (or ``buffer``, ``start``,
``end``, ``size``); a buffer lives in [lower, upper). Other columns are ignored. google/minimalloc publishes such files.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from pathlib import Path

import numpy as np

from onnx_remat.memory.layout import load_later_searches, load_search, solve
from onnx_remat.memory.layout_check import check_layout
from onnx_remat.memory.problem import Longs

_COLUMNS = (("id", "buffer"), ("lower", "start"), ("upper", "end"), ("size",))


def read(path: Path) -> tuple[list[str], Longs, Longs, Longs]:
    """Ids, lower, upper and size of a file's buffers."""
    with path.open(newline="") as file:
        rows = csv.DictReader(file, skipinitialspace=True)
        names = [next((name for name in either if name in (rows.fieldnames or ())), None) for either in _COLUMNS]
        if None in names:
            raise SystemExit(f"{path}: the header must name id, lower, upper and size, not {rows.fieldnames}")
        table = [[row[name] for name in names if name] for row in rows]
    lower, upper, size = np.array([row[1:] for row in table], np.int64).reshape(-1, 3).T
    return [row[0] for row in table], lower, upper, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--csv", type=Path, action="append", required=True, help="an instance; may be given again")
    parser.add_argument("--time-limit", type=float, default=60, help="seconds per instance (default 60)")
    parser.add_argument("--alignment", type=int, default=1, help="bytes that offsets are multiples of (default 1)")
    parser.add_argument("--json", type=Path, help="write {id: offset}, or {file: {id: offset}} for several")
    options = parser.parse_args()
    load_search()  # before the clock starts
    load_later_searches()
    answers: dict[str, dict[str, int]] = {}
    print(f"{'file':<32}{'buffers':>8}{'bound':>14}{'height':>14}{'ratio':>8}{'seconds':>9}")
    for path in options.csv:
        ids, lower, upper, size = read(path)
        began = time.monotonic()
        layout = solve(lower, upper, size, alignment=options.alignment, effort=1_000_000, time_limit=options.time_limit)
        seconds = time.monotonic() - began
        check_layout(lower, upper, size, layout.offsets)
        answers[str(path)] = dict(zip(ids, layout.offsets.tolist(), strict=True))
        ratio = layout.height / max(1, layout.lower_bound)
        print(f"{path.name:<32}{len(ids):>8}{layout.lower_bound:>14}{layout.height:>14}{ratio:>8.4f}{seconds:>9.1f}")
    if options.json:
        answer = answers if len(options.csv) > 1 else next(iter(answers.values()))
        options.json.write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
