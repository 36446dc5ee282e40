"""Give N mutants of each kind to all that reads files, and print how they were answered.

An answer is a plan or an OnnxRematError, within 20 seconds; all else is printed with the seed that makes it again.
"""

from __future__ import annotations

import faulthandler
import time
import traceback
from collections import Counter
from collections.abc import Iterator

import onnx_remat
from onnx_remat.errors import OnnxRematError
from onnx_remat.ort import runtime
from tests.support.mutants import KINDS, mutant

LIMIT = 20.0
"""Seconds an answer may take."""

ITEMS = tuple(KINDS)
HEADS = ("changed", "mutants", "planned", "refused", "tracebacks", f"over {LIMIT:.0f} s", "slowest, s", "all, s")
_EVERY = 500  # mutants between two lines of progress


def answered(data: bytes) -> str:
    """What is said of a file: the error's class, or that it was planned."""
    try:
        onnx_remat.rewrite_model(
            data, "80%", selector="keep_all", verify="check", effort=0.05, dims={}, run_by="session"
        )
    except OnnxRematError as error:
        if not str(error) or "Traceback" in str(error):
            raise AssertionError(f"no message for people: {error!r}") from error
        return type(error).__name__
    return "planned"


def rows(kind: str, *, count: int = 10000, first: int = 0) -> Iterator[tuple[str, ...]]:
    """The row of one kind: so many mutants, from this seed on."""
    runtime.available = lambda: False  # what it makes of a broken file is its own affair, and slow
    answers: Counter[str] = Counter()
    slowest, late, start = 0.0, 0, time.monotonic()
    for seed in range(first, first + count):
        faulthandler.dump_traceback_later(LIMIT)
        begun = time.monotonic()
        try:
            answers[answered(mutant(kind, seed))] += 1
        except Exception:
            answers["traceback"] += 1
            print(f"{kind} {seed}: {traceback.format_exc()}", flush=True)
        seconds = time.monotonic() - begun
        slowest = max(slowest, seconds)
        if seconds > LIMIT:
            late += 1
            print(f"{kind} {seed}: {seconds:.0f} s", flush=True)
        if not (seed + 1) % _EVERY:
            print(f"{kind} {seed + 1}: {dict(answers)}, slowest {slowest:.1f} s", flush=True)
    faulthandler.cancel_dump_traceback_later()
    refused = sum(answers.values()) - answers["planned"] - answers["traceback"]
    cells = (count, answers["planned"], refused, answers["traceback"], late)
    yield (kind, *map(str, cells), f"{slowest:.1f}", f"{time.monotonic() - start:.0f}")
