"""Measure the memory of training with `session.session.Session`, as the operating system counts it.

`measure` trains in a fresh process (`child`) with the C library's default settings. The result is the process's
high-water mark, from before the session and the state exist to after the last step, minus the memory of the
interpreter, the libraries and a session of one node; the libraries' code does not count whenever it is first called
(`probe.library_bytes`). Linux only: other systems cannot reset the mark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnx_remat import files
from onnx_remat.errors import VerificationError
from onnx_remat.process import child
from onnx_remat.session.arrays import Array


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Memory of one process that trained for some steps, in bytes, with its parts.

    Attributes
    ----------
    total : int
        Peak of resident memory.
    inputs : int
        State and batch.
    weights, slab, live, workspace : int
        See `session.Session`.
    books : int
        ONNX Runtime's bookkeeping, as predicted.
    nodes, kernels, donated, not_donated : int
        Counts.
    """

    total: int
    inputs: int
    weights: int
    slab: int
    live: int
    workspace: int
    books: int
    nodes: int
    kernels: int
    donated: int
    not_donated: int


def available() -> bool:
    """Can this machine measure the peak of a process?"""
    return Path("/proc/self/clear_refs").exists()


def measure(path: Path, dims: Mapping[str, int] | None = None, steps: int = 3, fuse: bool = True) -> TrainingMemory:
    """Train for some steps in a fresh process, with state updated in place.

    Parameters
    ----------
    path : Path
        A training step.
    dims : mapping of str to int, optional
        Sizes of symbolic dimensions.
    steps : int
    fuse : bool
        See `session.Session`.

    Raises
    ------
    VerificationError
        The process failed.
    """
    with files.scratch() as home:
        reached = files.reopened(path.absolute())
        job = {"path": reached, "warm": one_node(home), "dims": dims or {}, "steps": steps, "fuse": fuse}
        try:
            return TrainingMemory(**child.call("onnx_remat.measure.training_memory:taken", job))
        except child.Failed as failed:
            raise VerificationError(f"training in a fresh process failed: {str(failed)[:300]}") from None


def state_for(arrays: tuple[Array, ...]) -> dict[str, Any]:
    """Return random values for inputs: small floats, and integers that are valid in every vocabulary."""
    generator = np.random.default_rng(0)
    state: dict[str, Any] = {}
    for array in arrays:
        state[array.name] = np.empty(array.shape, array.dtype_name)
        if array.is_bfloat or array.dtype_name.startswith("float"):
            for part in _parts(state[array.name]):
                numbers = 0.1 * generator.random(part.shape, np.float32) + np.float32(0.01)
                part[...] = numbers.view(np.uint32) >> 16 if array.is_bfloat else numbers
        else:
            state[array.name][...] = generator.integers(0, 2, array.shape, np.uint8)
    return state


def _parts(array: Any) -> list[Any]:
    """Return views of an array of about a megabyte each, so that temporaries do not count as training memory."""
    flat = array.reshape(-1)
    return [flat[at : at + (1 << 18)] for at in range(0, flat.size, 1 << 18)]


def one_node(home: Path) -> Path:
    """Write a model of one node to a folder: its session takes the memory that every session takes."""
    import onnx
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "warm", [x], [y])
    path = home / "warm.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    return path


def load_libraries() -> None:
    """Load what kernels call: libraries are not the step's memory."""
    from onnx_remat.fuse import blas, onednn

    if not blas.why_not():
        blas.address()
    if not onednn.why_not():
        onednn.load()


def taken(path: str, warm: str, dims: Mapping[str, int], steps: int, fuse: bool) -> dict[str, int]:
    """Train in this process, which does nothing else, and return the fields of `TrainingMemory`."""
    from onnx_remat.measure.probe import library_bytes, reset_peak, resident
    from onnx_remat.session.heap import trim
    from onnx_remat.session.session import Session

    with Session(warm) as session:
        session.run(state_for(session.inputs))
    load_libraries()
    trim()
    base = reset_peak() - library_bytes()
    session = Session(path, donate=True, dims=dims, fuse=fuse)
    # Twice, because most code is first called after the session is open.
    opened = resident("VmHWM") - library_bytes()
    state = state_for(session.inputs)
    for _ in range(steps):
        session.execute(state)
    trained = resident("VmHWM") - library_bytes()
    found = TrainingMemory(
        total=max(opened, trained) - base, inputs=sum(array.nbytes for array in state.values()),
        weights=session.weight_bytes, slab=session.slab_bytes, live=session.live_bytes,
        workspace=session.workspace_bytes, books=session.bookkeeping_bytes, nodes=session.node_count,
        kernels=session.kernel_count, donated=len(session.donated), not_donated=len(session.not_donated),
    )  # fmt: skip
    return asdict(found)
