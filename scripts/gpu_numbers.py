"""What the files of a training step compute on a GPU, by several ways: rows of *Numbers*, see `scripts.gpu_truth`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from onnx_remat.errors import UsageError
from onnx_remat.session.arrays import BY_BITS, Array
from onnx_remat.session.session import Session
from scripts.child import Failed, Stepper
from scripts.gpu_steps import arrays_of, keep_plans
from scripts.journal import Journal

LEVELS = {"disable": "ORT_DISABLE_ALL", "all": "ORT_ENABLE_ALL"}
WAYS = (*LEVELS, "Session", "CUDA graph")
HOST, DEVICE = ["CPUExecutionProvider"], ["CUDAExecutionProvider", "CPUExecutionProvider"]

Job = Mapping[str, Any]
"""A file: ``step``, ``file`` (its name in the table), ``path``, ``dims`` and ``fuse``."""
Made = dict[str, Any]
"""Outputs by name, as numbers."""


def rows(jobs: Sequence[Job], journal: Journal, seconds: float) -> Iterator[dict[str, Any]]:
    """The rows of the files of a step, the original's first; each may take so many seconds.

    One process computes them in turn. After a file for which something failed another process goes on: an error of
    CUDA's is one of all that follows in its process.
    """
    todo, first = list(jobs), dict[str, Any]()
    while todo:
        try:
            if row := journal.row(_key(todo[0])):
                todo.pop(0)
                first = first or row
                yield row
                continue
            with closing(Stepper(todo[0]["step"], comparer, jobs[0], first, todo, seconds=seconds)) as process:
                while todo and not journal.row(_key(todo[0])):
                    row = journal.add(_key(todo[0]) | process.step())
                    todo.pop(0)
                    first = first or row
                    yield row
                    if row["failed"]:
                        break
        except Failed as failed:
            row = journal.add(_key(todo.pop(0)) | {"error": str(failed)[-300:]})
            first = first or row
            yield row


def _key(job: Job) -> dict[str, Any]:
    return {"measure": "numbers", "step": job["step"], "file": job["file"], "dims": job["dims"]}


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of a row in the table."""
    if "error" in row:
        return row["step"], row["file"], row["error"], *[""] * len(WAYS)
    apart = (each if isinstance(each, str) else f"{each:.1e}" for each in (row["apart"][way] for way in WAYS))
    return row["step"], row["file"], *apart, "" if row["equal"] is None else f"{row['equal']} of {row['outputs']}"


# ---- in the process ----


def comparer(
    original: Job, row: Mapping[str, Any], jobs: Sequence[Job]
) -> tuple[str, Callable[[], dict[str, Any]]]:  # fmt: skip
    """A step that compares one file after the other; `row` is the original's, empty if that is the first of them.

    What failed with the original is not tried again.
    """
    from onnx_remat.ort.libraries import load_cuda

    load_cuda()
    keep_plans()
    return "", _compared(original, row, jobs).__next__


def _compared(original: Job, row: Mapping[str, Any], jobs: Sequence[Job]) -> Iterator[dict[str, Any]]:
    from onnx_remat.measure.training_memory import state_for

    inputs, outputs = arrays_of(Path(original["path"]), original["dims"])
    state = state_for(inputs)
    fed = [(array, state[array.name]) for array in inputs]
    truth: Made = {}
    why = "the original failed"
    if "error" not in row:
        try:
            truth, why = stock(Path(original["path"]), fed, outputs, HOST, LEVELS["disable"]), ""
        except Exception as error:  # half precision, which the CPU has no kernels for
            why = f"the CPU cannot run it: {_text(error)}"
    first: dict[str, Made] = {}
    known: dict[tuple[Any, ...], tuple[float | str, int | None, bool]] = {}

    def compared(job: Job, way: str) -> tuple[float | str, int | None, bool]:
        """How far the outputs are from the truth, how many have the bits of the original's, whether the way failed."""
        nonlocal truth
        try:
            made = computed(job, way, fed, outputs)
        except Exception as error:
            return _text(error), None, not isinstance(error, UsageError)  # as a step that cannot be captured
        if job["path"] == original["path"]:
            first.setdefault(way, made)
        truth = truth or made
        return apart(made, truth), same(made, first[way]) if way in first else None, False

    again = [original] if row and "error" not in row and not row["failed"] else []
    for job in [*again, *jobs]:
        found = {}
        for way in WAYS:
            key = way, job["path"], job["fuse"] and way not in LEVELS
            found[way] = known[key] = known[key] if key in known else compared(job, way)
        equal = [count for _, count, _ in found.values() if count is not None]
        if job is not original:
            yield {
                "apart": {way: each[0] for way, each in found.items()}, "equal": min(equal, default=None),
                "outputs": len(outputs), "failed": any(failed for *_, failed in found.values()), "truth": why,
            }  # fmt: skip


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def computed(job: Job, way: str, fed: Sequence[tuple[Array, Any]], outputs: Mapping[str, Array]) -> Made:
    """One step of a file by one way."""
    path = Path(job["path"])
    if way in LEVELS:
        return stock(path, fed, outputs, DEVICE, LEVELS[way])
    graph = way == "CUDA graph"
    with Session(path, "cuda", donate=True, cuda_graph=graph, dims=job["dims"], fuse=job["fuse"]) as session:
        made = session.run({array.name: value.copy() for array, value in fed})
        return {array.name: np.array(array.numbers(made[array.name])) for array in session.outputs}


def stock(
    path: Path, fed: Sequence[tuple[Array, Any]], outputs: Mapping[str, Array], providers: Sequence[str], level: str
) -> Made:
    """One step by onnxruntime's own session; bits of a type that numpy lacks are given to it as values of that type."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.enable_mem_pattern = False
    options.log_severity_level = 3
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    session = onnxruntime.InferenceSession(str(path), options, providers=[*providers])
    if session.get_providers()[0] != providers[0]:
        raise RuntimeError("onnxruntime made no session on CUDA")
    value = onnxruntime.OrtValue
    feeds = {
        array.name: value.ortvalue_from_numpy_with_onnx_type(held, array.dtype)
        if array.dtype in BY_BITS
        else value.ortvalue_from_numpy(held)
        for array, held in fed
    }
    names = [output.name for output in session.get_outputs()]
    made = {}
    for name, found in zip(names, session.run_with_ort_values(names, feeds), strict=True):
        array = replace(outputs[name], shape=tuple(found.shape()))
        made[name] = array.numbers(array.copy_of(found, _read))
    return made


def _read(address: int, array: Any) -> None:
    ctypes.memmove(array.ctypes.data, address, array.nbytes)


def same(made: Made, first: Made) -> int:
    """How many outputs are the same, bit for bit."""
    return sum(np.array_equal(array, first[name], equal_nan=True) for name, array in made.items())


def apart(made: Made, truth: Made) -> float:
    """Of the worst output, what is not a number where the truth is one being worst of all."""
    worst = 0.0
    for name, array in made.items():
        right = np.asarray(truth[name], np.float64)
        scale = float(np.linalg.norm(right)) or 1.0
        off = float(np.linalg.norm(np.asarray(array, np.float64) - right)) / scale
        worst = max(worst, off if np.isfinite(off) else float("inf"))
    return worst
