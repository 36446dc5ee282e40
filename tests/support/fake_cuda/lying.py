"""Arrays that another library holds on the fake device, for a `Session` and a `Loop`: JSON in and out.

In: ``path`` of a step, and ``how``: "host" arrays, those of a "session" or of a "loop" on the device, or "graph".
Out: ``state``, lists, after three steps; ``live``, bytes of the device that the session took besides these arrays;
``same``, whether results are the arrays themselves; or ``error``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from onnx_remat.errors import OnnxRematError
from onnx_remat.session.cuda_memory import Block
from onnx_remat.session.session import Session
from onnx_remat.session.training import Loop
from tests.support.fake_cuda.here import Books
from tests.support.fake_cuda.session import state_of


class Held:
    """An array on the device."""

    def __init__(self, array: np.ndarray, skip: int = 0, **shown: Any) -> None:
        self.array = array
        self.block = Block(array.nbytes + skip)
        self.block.write(skip, array)
        self.skip = skip
        self.__cuda_array_interface__ = {
            "shape": array.shape, "typestr": array.dtype.str, "data": (self.block.address + skip, False), "version": 3,
            "strides": None,
        } | shown  # fmt: skip

    def read(self) -> np.ndarray:
        """Its current value."""
        found = np.empty_like(self.array)
        self.block.read(self.skip, found)
        return found


def main() -> None:
    """Do what stdin asks for."""
    job = json.load(sys.stdin)
    books = Books()
    books.compute()
    try:
        print(json.dumps(_train(books, job["path"], job["how"])))
    except OnnxRematError as error:
        print(json.dumps({"error": str(error)}))


def _train(books: Books, path: str, how: str) -> dict[str, Any]:
    with Session(path, "cuda", donate=True, fuse=True, cuda_graph=how == "graph") as session:
        arrays = state_of(session, 0)
        opened = books.read("live")
        held: dict[str, Any] = {name: Held(array) for name, array in arrays.items()}
        if how == "odd":
            held["w"] = Held(arrays["w"], skip=4)
        elif how == "strided":
            held["w"] = Held(arrays["w"], strides=(4, 1200))
        elif how == "read-only":
            held["w"] = Held(arrays["w"], data=(held["w"].block.address, True))
        elif how == "shared":
            held["m"] = held["w"]
        elif how == "host, shared":
            session.run(arrays | {"m": arrays["w"]})
        elif how == "half":
            held["m"] = arrays["m"]
        same = False
        if how == "host":
            for _ in range(3):
                session.run(arrays)
            return {"state": {name: array.ravel().tolist() for name, array in arrays.items()}}
        if how in ("session", "graph", "odd", "strided", "read-only", "shared"):
            for _ in range(3):
                made = session.run(held)
            same = all(made[f"new.{name}"] is held[name] for name in "wmv")
        else:
            loop = Loop(session, held, device="cuda", copy=False)
            for _ in range(3):
                loop.step({"scale": arrays["scale"]})
            same = all(np.array_equal(loop.view(name), held[name].read()) for name in held)
        taken = books.read("live") - opened - sum(each.array.nbytes for each in held.values())
        return {
            "state": {name: each.read().ravel().tolist() for name, each in held.items()}, "same": same, "live": taken,
        }  # fmt: skip


if __name__ == "__main__":
    main()
