"""Seconds to open a step by `Session`, in a fresh process: the first time, and again.

*first* is with an empty cache: the layout is planned, in a process of its own, and kernels are compiled. *again* is the
fastest of three after that. Neither includes imports of onnxruntime and onnx_remat.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.child import call

HEADS = ("graph", "nodes", "kernels", "first, s", "again, s")


def opened(path: str) -> tuple[float, int, int]:
    """The seconds that opening takes in this process, and the numbers of nodes and kernels."""
    import onnxruntime  # noqa: F401

    from onnx_remat.session.session import Session

    start = time.perf_counter()
    with Session(path, donate=True) as session:
        return time.perf_counter() - start, session.node_count, session.kernel_count


@contextmanager
def empty_cache() -> Iterator[None]:
    """Within the block, the cache of kernels and plans starts empty; afterwards it has what it had before, too."""
    from onnx_remat.process.cache import cache_folder
    from onnx_remat.session.plan_cache import ENTRIES

    folder = cache_folder()
    if folder is None:
        raise OSError("there is no cache: its folder is not writable")
    with tempfile.TemporaryDirectory(prefix="onnx-remat-", dir=folder) as aside:
        for each in [*folder.glob("*.kernel"), *folder.glob(ENTRIES.name)]:
            each.rename(Path(aside) / each.name)
        try:
            yield
        finally:
            shutil.rmtree(folder / ENTRIES.name, ignore_errors=True)
            for each in Path(aside).iterdir():
                each.replace(folder / each.name)


def rows(file: str, *, turns: int = 3) -> Iterator[tuple[str, ...]]:
    """The row of one graph."""
    path = Path(file).resolve()
    with empty_cache():
        first, nodes, kernels = call(opened, str(path)).answer
        again = min(call(opened, str(path)).answer[0] for _ in range(turns))
    yield path.stem, str(nodes), str(kernels), f"{first:.1f}", f"{again:.1f}"
