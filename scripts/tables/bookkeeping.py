"""ONNX Runtime's bookkeeping: predicted, and what training takes beyond tensors and workspace.

Each graph, FILE or FILE=BUDGET, is trained by `session.training.Loop` for three steps in a fresh process, fused and
unfused; with a budget it is rewritten first. *taken* is the process's high-water mark less inputs, weights, slab and
workspace, so a workspace that is predicted too large lowers it. Linux only.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

HEADS = ("graph", "", "nodes", "kernels", "taken, MB", "predicted", "room")


def rows(item: str, *, effort: float = 3.0) -> Iterator[tuple[str, ...]]:
    """The rows of one graph."""
    from onnx_remat.errors import BudgetInfeasibleError
    from onnx_remat.measure.training_memory import measure

    file, _, budget = item.partition("=")
    path, name = Path(file), Path(file).stem + (f", {budget}" if budget else "")
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as scratch:
        if budget:
            from onnx_remat.rewrite.pipeline import rewrite_model

            try:
                result = rewrite_model(path, budget, effort=effort)
            except BudgetInfeasibleError as error:
                yield (name, *([""] * (len(HEADS) - 2)), str(error).partition(";")[0])
                return
            result.save(path := Path(scratch) / "small.onnx")
        for fuse in (True, False):
            found = measure(path, fuse=fuse)
            taken = found.total - found.inputs - found.weights - found.slab - found.workspace
            megabytes = [f"{nbytes / 1e6:.1f}" for nbytes in (taken, found.books, found.books - taken)]
            yield name, "fused" if fuse else "unfused", str(found.nodes), str(found.kernels), *megabytes
