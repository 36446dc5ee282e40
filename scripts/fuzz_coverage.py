"""Compare N random steps with what is written of them, and print which op was seen in which role.

    python -m scripts.fuzz_coverage 200
    python -m scripts.fuzz_coverage 20000 --first 200    # seeds 200 to 19999: goes on where the first one stopped
    python -m scripts.fuzz_coverage 20000 --save         # hours; the tables of docs/results/attacks.md

Roles: recomputed; moved to another place in the order; aliased (it makes or reads a view); in place of an input;
private (its result has a buffer of its own). Every op of the table is asked for in turn: none is left to chance.
An interrupt ends the run early, with the table of what was done.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

from onnx_remat.plan.selectors import names
from scripts.results import Table, save
from tests.support.differential import LEVELS, ROLES, Coverage, Difference, rows, try_step
from tests.support.steps import TABLE

_EVERY = 500  # steps between two lines of progress


def main() -> int:
    """All seeds asked for; 1 where any result is not its original."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, help="seeds before this one")
    parser.add_argument("--first", type=int, default=0, help="seed of the first step")
    parser.add_argument("--save", action="store_true", help="write docs/results/data/fuzz.json and fuzz-coverage.json")
    asked = parser.parse_args()
    coverage: Coverage = Counter()
    ops, done, files, wrong, start = sorted(TABLE), 0, 0, 0, time.monotonic()
    try:
        for seed in range(asked.first, asked.count):
            try:
                files += try_step(seed, coverage, [ops[seed % len(ops)], ops[(seed * 7 + 3) % len(ops)]])
            except Difference as difference:
                wrong += 1
                print(difference)
            except Exception:
                wrong += 1
                print(f"seed {seed}: {traceback.format_exc()}")
            done += 1
            if not done % _EVERY:
                print(f"{done} steps, {files} files, {wrong} wrong, {time.monotonic() - start:.0f} s", flush=True)
    except KeyboardInterrupt:
        pass
    command = "python -m scripts.fuzz_coverage"
    heads = ("steps", "files written of them", "levels", "selectors", "wrong", "seconds")
    cells = (done, files, len(LEVELS), len(names()), wrong, round(time.monotonic() - start))
    tables = {
        "fuzz": Table(command, heads, (tuple(map(str, cells)),)),
        "fuzz-coverage": Table(command, ("op", *ROLES), rows(coverage)),
    }
    for name, table in tables.items():
        print(table.to_markdown(), end="\n\n")
        if asked.save:
            save(name, table)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
