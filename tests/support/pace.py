"""How fast this machine computes just now, so that a test may bound what something costs without naming a machine."""

from __future__ import annotations

import time

_SECONDS = 0.15
"""What `_work` takes of an idle core at 2.4 GHz."""


def slowness() -> float:
    """How many times as long as an idle core of 2.4 GHz plain Python takes here at present; at least 1."""
    start = time.process_time()
    _work()
    return max(1.0, (time.process_time() - start) / _SECONDS)


def _work() -> int:
    table = {f"value {i}": [i] for i in range(200_000)}
    return sum(len(name) + items[0] for name, items in table.items())
