"""Rewritten steps of earlier processes: the same step with the same budget need not be planned again.

An entry is a folder with the step and its pickled report, named after everything that planning depends on: the exported
step without the figures of its check, budget and options, and the surroundings, see `process.cache`.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx

from onnx_remat.ir.metadata import entries, set_entries
from onnx_remat.process.cache import Entries, surroundings
from onnx_remat.rewrite.pipeline import Result
from onnx_remat.rewrite.report import Report
from onnx_remat.units import Budget

ENTRIES = Entries("plans")

MOST_BYTES = 64 << 20
"""Largest step to keep."""

_STEP, _REPORT = "step.onnx", "report.pickle"
_OF_CHECK = "check."


def rewritten(
    proto: onnx.ModelProto,
    budget: Budget,
    options: Mapping[str, Any],
    path: Path,
    plan: Callable[[], Result],
) -> Report:
    """Write the rewritten step to `path` and return its report: from the cache, else by `plan`.

    A plan by costs of a file is not kept.
    """
    key = None if options.get("costs") else _key(proto, budget, options)
    known = None if key is None else ENTRIES.take(key, {_STEP: path}, _REPORT)
    if known is not None:
        report: Report = pickle.loads(known)
        return report
    result = plan()
    result.save(path)
    alone = [each.name for each in path.parent.iterdir()] == [path.name]
    if key is not None and alone and path.stat().st_size <= MOST_BYTES:
        ENTRIES.add(key, {_STEP: path, _REPORT: pickle.dumps(result.report)})
    return result.report


def _key(proto: onnx.ModelProto, budget: Budget, options: Mapping[str, Any]) -> str:
    step = onnx.ModelProto()
    step.CopyFrom(proto)
    set_entries(step, {key: value for key, value in entries(step).items() if not key.startswith(_OF_CHECK)})
    found = hashlib.sha256(step.SerializeToString(deterministic=True))
    named = sorted((name, value) for name, value in options.items() if name != "progress")
    found.update(repr((budget, named, surroundings())).encode())
    return found.hexdigest()[:32]
