"""Launches of a step by `Session` on the fake device, fused and not, in a process of `here.environment`.

In: ``path``, and ``costs``, names of devices. Out, for each of the two: ``nodes`` that run, ``launches`` of a step,
``driven``, those of fused kernels, ``slab`` bytes, ``moved``, the bytes that nodes read and write, and predicted
``seconds`` of a step by device.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from onnx_remat.session.offsets import Program
from onnx_remat.session.plan_session import SessionRequest, arrange
from onnx_remat.session.session import Session
from onnx_remat.session.slab_layout import SlabLayout
from onnx_remat.session.step_time import node_seconds
from tests.support.fake_cuda.here import Books


def main() -> None:
    """Do what stdin asks for."""
    job = json.load(sys.stdin)
    books = Books()
    print(json.dumps([_launches(books, job["path"], fuse, job["costs"]) for fuse in (False, True)]))


def _launches(books: Books, path: str, fuse: bool, costs: list[str]) -> dict[str, Any]:
    with Session(path, "cuda", donate=True, fuse=fuse) as session:
        state = {array.name: np.zeros(array.shape, array.dtype_name) for array in session.inputs}
        session.execute(state)
        books.reset()
        session.execute({})
        counted = {name: books.read(name) for name in ("launches", "driven")}
        arranged = _arranged(path, fuse)
        seconds = {name: sum(node_seconds(arranged, name)) for name in costs}
        found = {"nodes": session.node_count, "slab": session.slab_bytes, "moved": moved(arranged.program)}
        return counted | found | {"seconds": seconds}


def _arranged(path: str, fuse: bool) -> SlabLayout:
    with tempfile.TemporaryDirectory() as folder:
        request = SessionRequest("cuda", donate=True, secret=int(fuse))
        return arrange(Path(path), Path(folder) / "lean.onnx", request)


def moved(program: Program) -> int:
    """Bytes of all that the nodes of a step read and write; views move nothing."""
    total = 0
    for step in program.steps:
        if not step.writes or step.writes[0] not in program.root:
            width = len(step.reads) // step.segments
            reads = dict.fromkeys((i // width, name) for i, name in enumerate(step.reads))  # of each joined kernel
            names = [name for name in (*(name for _, name in reads), *step.writes) if name in program.tensors]
            total += sum(program.tensors[name].nbytes for name in names)
    return total


if __name__ == "__main__":
    main()
