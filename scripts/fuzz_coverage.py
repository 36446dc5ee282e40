"""Compare N random steps with what is written of them, and print which op was seen in which role.

    python -m scripts.fuzz_coverage 200
    python -m scripts.fuzz_coverage 20000 200    # seeds 200 to 19999: goes on where the first one stopped

Roles: recomputed; moved to another place in the order; aliased (it makes or reads a view); in place of an input;
private (its result has a buffer of its own). Every op of the table is asked for in turn: none is left to chance.
An interrupt ends the run early, with the table of what was done.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections import Counter

from tests.support.differential import Coverage, Difference, table, try_step
from tests.support.steps import TABLE

_EVERY = 500  # steps between two lines of progress


def main() -> int:
    given = [int(argument) for argument in sys.argv[1:]]
    count, first = [*given, *(100, 0)[len(given) :]]
    coverage: Coverage = Counter()
    ops, done, files, wrong, start = sorted(TABLE), 0, 0, 0, time.monotonic()
    try:
        for seed in range(first, count):
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
                print(_summary(done, files, wrong, start), flush=True)
    except KeyboardInterrupt:
        pass
    print(table(coverage))
    print(_summary(done, files, wrong, start))
    return 1 if wrong else 0


def _summary(done: int, files: int, wrong: int, start: float) -> str:
    computed, passed = time.process_time(), time.monotonic() - start
    return f"{done} steps, {files} files, {wrong} wrong, {passed:.0f} s, of which {computed:.0f} s computing"


if __name__ == "__main__":
    sys.exit(main())
