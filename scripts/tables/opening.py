"""Seconds to open a step by `Session`, in a fresh process: the first time, and again.

*first* is with an empty cache: the layout is planned, in a process of its own, and kernels are compiled. *again* is the
fastest of three after that. Neither includes imports of onnxruntime and onnx_remat.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from scripts.child import call, empty_cache

HEADS = ("graph", "nodes", "kernels", "first, s", "again, s")


def opened(path: str) -> tuple[float, int, int]:
    """The seconds that opening takes in this process, and the numbers of nodes and kernels."""
    import onnxruntime  # noqa: F401

    from onnx_remat.session.session import Session

    start = time.perf_counter()
    with Session(path, donate=True) as session:
        return time.perf_counter() - start, session.node_count, session.kernel_count


def rows(file: str, *, turns: int = 3) -> Iterator[tuple[str, ...]]:
    """The row of one graph."""
    path = Path(file).resolve()
    with empty_cache():
        first, nodes, kernels = call(opened, str(path)).answer
        again = min(call(opened, str(path)).answer[0] for _ in range(turns))
    yield path.stem, str(nodes), str(kernels), f"{first:.1f}", f"{again:.1f}"
