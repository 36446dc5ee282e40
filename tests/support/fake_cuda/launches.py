"""Launches of a step by `Session` on the fake device, fused and not, in a process of `here.environment`.

In: ``path``. Out, for each of the two: ``nodes`` that run, ``launches`` of a step, ``driven``, those of fused kernels,
``slab`` bytes, and ``moved``, the bytes that nodes read and write.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from onnx_remat.session.plan_session import SessionRequest, arrange
from onnx_remat.session.session import Session
from tests.support.fake_cuda.here import Books


def main() -> None:
    """Do what stdin asks for."""
    path = json.load(sys.stdin)["path"]
    books = Books()
    print(json.dumps([_launches(books, path, fuse) for fuse in (False, True)]))


def _launches(books: Books, path: str, fuse: bool) -> dict[str, Any]:
    with Session(path, "cuda", donate=True, fuse=fuse) as session:
        state = {array.name: np.zeros(array.shape, array.dtype_name) for array in session.inputs}
        session.execute(state)
        books.reset()
        session.execute({})
        counted = {name: books.read(name) for name in ("launches", "driven")}
        return counted | {"nodes": session.node_count, "slab": session.slab_bytes, "moved": moved(path, fuse)}


def moved(path: str, fuse: bool) -> int:
    """Bytes of all that the nodes of a step read and write; views move nothing."""
    with tempfile.TemporaryDirectory() as folder:
        request = SessionRequest("cuda", donate=True, secret=int(fuse))
        program = arrange(Path(path), Path(folder) / "lean.onnx", request).program
    total = 0
    for step in program.steps:
        if not step.writes or step.writes[0] not in program.root:
            names = [name for name in (*dict.fromkeys(step.reads), *step.writes) if name in program.tensors]
            total += sum(program.tensors[name].nbytes for name in names)
    return total


if __name__ == "__main__":
    main()
