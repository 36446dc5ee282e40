"""Seconds to open a step by `Session`, in a fresh process: the first time, and again.

*first* is with no kernel on the disk, *again* the fastest of three with all of them there. Neither includes imports of
onnxruntime and onnx_remat; both include the process that plans the layout.
"""

from __future__ import annotations

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
def no_kernels() -> Iterator[None]:
    """Within the block, the cache of kernels starts empty; afterwards it has what it had before, too."""
    from onnx_remat.fuse.kernels import cache_folder

    folder = cache_folder()
    if folder is None:
        raise OSError("there is no cache of kernels: its folder is not writable")
    with tempfile.TemporaryDirectory(prefix="onnx-remat-", dir=folder) as aside:
        for each in folder.glob("*.kernel"):
            each.rename(Path(aside) / each.name)
        try:
            yield
        finally:
            for each in Path(aside).iterdir():
                each.replace(folder / each.name)


def rows(file: str, *, turns: int = 3) -> Iterator[tuple[str, ...]]:
    """The row of one graph."""
    path = Path(file).resolve()
    with no_kernels():
        first, nodes, kernels = call(opened, str(path)).answer
        again = min(call(opened, str(path)).answer[0] for _ in range(turns))
    yield path.stem, str(nodes), str(kernels), f"{first:.1f}", f"{again:.1f}"
