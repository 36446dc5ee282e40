"""Compare N random steps with what is written of them, and print which op was seen in which role.

    python -m scripts.fuzz_coverage 200

Roles: recomputed; moved to another place in the order; aliased (it makes or reads a view); in place of an input;
private (its result has a buffer of its own). Every op of the table is asked for in turn: none is left to chance.
"""

from __future__ import annotations

import sys
import time
from collections import Counter

from tests.support.differential import Coverage, Difference, table, try_step
from tests.support.steps import TABLE


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    coverage: Coverage = Counter()
    ops, files, wrong, start = sorted(TABLE), 0, 0, time.monotonic()
    for seed in range(count):
        try:
            files += try_step(seed, coverage, [ops[seed % len(ops)], ops[(seed * 7 + 3) % len(ops)]])
        except Difference as difference:
            wrong += 1
            print(difference)
    print(table(coverage))
    print(f"{count} steps, {files} files, {wrong} steps with a difference, {time.monotonic() - start:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
