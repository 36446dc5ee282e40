"""A `cuda_memory.Block` on the fake device, in a process of `here.environment`: JSON in and out.

In: its ``bytes``, and an ``offset`` to write a kilobyte at. Out: ``error``, or whether what is read there is the
``same`` and what lies before it is ``zero``, and the device's ``live`` bytes, of the block alone and after it.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import numpy as np

from onnx_remat.errors import OnnxRematError
from onnx_remat.ort.libraries import load_cuda
from onnx_remat.session.cuda_memory import Block
from tests.support.fake_cuda.here import Books


def main() -> None:
    """Do what stdin asks for."""
    job = json.load(sys.stdin)
    try:
        print(json.dumps(_filled(job["bytes"], job["offset"])))
    except OnnxRematError as error:
        print(json.dumps({"error": str(error)}))


def _filled(nbytes: int, offset: int) -> dict[str, Any]:
    books = Books()
    load_cuda()
    block = Block(nbytes)
    live = [books.read("live")]
    given, before, after = np.arange(256, dtype=np.float32), np.ones(256, np.float32), np.ones(256, np.float32)
    block.write(offset, given)
    block.read(offset - given.nbytes, before)
    block.read(offset, after)
    del block
    gc.collect()
    return {"same": bool((given == after).all()), "zero": not before.any(), "live": [*live, books.read("live")]}


if __name__ == "__main__":
    main()
