"""A `Session` and a `Loop` of this project's on the fake device, in a process of `here.environment`: JSON in and out.

In: ``path``, ``limits``, a list of memory limits, 0 for none, ``graph``, whether to capture the step (null: if it can
be), ``fail_capture``, whether the first capture fails, ``dims``, and ``fuse``. With ``loop`` a `Loop` opens the file.
With ``numbers``, ours and none of the provider's kernels are computed: the state is random, and ``outputs`` is the
state after three steps, as lists. With ``open``, a step without a loss runs once, and only ``kernels`` and
``not_fused`` come out.
Out, per limit: ``error``, or ``live`` bytes of the device when the session is open and at most until then
(``opening``), the ``peak`` and host ``waits`` of each of three steps with its ``launches`` and its ``captures`` and
``replays`` of CUDA graphs, what of the state is renewed in place (``donated``) or not (``not_donated``), and how many
``kernels`` are fused, and what was ``warned`` of.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import numpy as np
from onnxruntime import InferenceSession

from onnx_remat.errors import OnnxRematError
from onnx_remat.session.session import Session
from onnx_remat.session.training import Loop
from tests.support.fake_cuda.here import Books


def main() -> None:
    """Do what stdin asks for."""
    job = json.load(sys.stdin)
    books = Books()
    if job.get("open"):
        with Session(job["path"], "cuda", fuse=job["fuse"]) as session:
            session.run(state_of(session, 0))
            print(json.dumps({"kernels": session.kernel_count, "not_fused": session.not_fused}))
            return
    found = []
    for limit in job["limits"]:
        try:
            found.append(_train(books, job, limit))
        except OnnxRematError as error:
            found.append({"error": str(error)})
    print(json.dumps(found))


def state_of(session: Session, seed: int) -> dict[str, np.ndarray]:
    """Random numbers between 0 and 1 for every input."""
    rng = np.random.default_rng(seed)
    return {a.name: rng.random(a.shape).astype(a.dtype_name) for a in session.inputs}


def _fail_once() -> None:
    """Let the first run of a session fail, which is the capture, as onnxruntime's own would."""
    run = InferenceSession.run_with_iobinding

    def fails(session: Any, binding: Any) -> None:
        run(session, binding)
        InferenceSession.run_with_iobinding = run
        raise RuntimeError("CUDA failure 2")

    InferenceSession.run_with_iobinding = fails


def _train(books: Books, job: dict[str, Any], limit: int) -> dict[str, Any]:
    books.reset()
    before, numbers = books.read("live"), job.get("numbers", False)
    if numbers:
        books.compute()
    asked = {"dims": job.get("dims", {}), "cuda_graph": job.get("graph", False), "fuse": job.get("fuse", True)}
    if job.get("fail_capture"):
        _fail_once()
        books.reset()
    with warnings.catch_warnings(record=True) as warned:
        opened = Session(job["path"], "cuda", donate=True, memory_limit=limit, **asked)
    with opened as session:
        live, opening = books.read("live") - before, books.read("peak") - before
        state = {a.name: np.zeros(a.shape, a.dtype_name) for a in session.inputs}
        loop = Loop(session, state_of(session, 0) if numbers else state, device="cuda")
        if job.get("loop"):
            session.close()
            loop = Loop(job["path"], state, device="cuda")
        steps = []
        for _ in range(3):
            books.reset()
            loop.step()
            counted = {name: books.read(name) for name in ("waits", "launches", "driven", "captures", "replays")}
            steps.append({"peak": books.read("peak") - before} | counted)
        found = {
            "warned": [str(each.message) for each in warned],
            "live": live,
            "opening": opening,
            "steps": steps,
            "donated": len(loop.donated),
            "not_donated": dict(loop.not_donated),
        }
        if numbers:
            found["outputs"] = {name: value.ravel().tolist() for name, value in loop.state().items()}
        return found | {"kernels": session.kernel_count, "not_fused": session.not_fused}


if __name__ == "__main__":
    main()
