"""A `Session` and a `Loop` of this project's on the fake device, in a process of `here.environment`: JSON in and out.

In: ``path``, ``limits``, a list of memory limits, 0 for none, ``graph``, whether to capture the step, and ``dims``.
Out, per limit: ``error``, or ``live`` bytes of the device when the session is open, the ``peak`` and host ``waits`` of
each of three steps with its ``captures`` and ``replays`` of CUDA graphs, and what of the state is renewed in place
(``donated``) or not (``not_donated``).
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from onnx_remat.errors import OnnxRematError
from onnx_remat.session.session import Session
from onnx_remat.session.training import Loop
from tests.support.fake_cuda.here import Books


def main() -> None:
    """Do what stdin asks for."""
    job = json.load(sys.stdin)
    books = Books()
    found = []
    for limit in job["limits"]:
        try:
            found.append(_train(books, job["path"], limit, job.get("graph", False), job.get("dims", {})))
        except OnnxRematError as error:
            found.append({"error": str(error)})
    print(json.dumps(found))


def _train(books: Books, path: str, limit: int, graph: bool, dims: dict[str, int]) -> dict[str, Any]:
    books.reset()
    before = books.read("live")
    with Session(path, "cuda", donate=True, dims=dims, memory_limit=limit, cuda_graph=graph) as session:
        live = books.read("live") - before
        loop = Loop(session, {a.name: np.zeros(a.shape, a.dtype_name) for a in session.inputs}, device="cuda")
        steps = []
        for _ in range(3):
            books.reset()
            loop.step()
            counted = {name: books.read(name) for name in ("waits", "captures", "replays")}
            steps.append({"peak": books.read("peak") - before} | counted)
        return {"live": live, "steps": steps, "donated": len(loop.donated), "not_donated": dict(loop.not_donated)}


if __name__ == "__main__":
    main()
