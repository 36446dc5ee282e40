"""Rewritten steps of earlier processes: the same step with the same budget need not be planned again.

An entry is a folder with the step and its pickled report, named after everything that planning depends on: the exported
step without the figures of its check, budget and options, the versions of the packages, the code of this one, and the
processor. Entries that were used longest ago are removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import onnx

from onnx_remat import rewrite
from onnx_remat.fuse.kernels import cache_folder
from onnx_remat.rewrite.pipeline import Result
from onnx_remat.rewrite.report import Report
from onnx_remat.units import Budget

ENTRIES = 32
"""Entries to keep."""

MOST_BYTES = 64 << 20
"""Largest step to keep."""

_STEP, _REPORT = "step.onnx", "report.pickle"
_PACKAGES = ("numpy", "numba", "llvmlite", "onnx", "onnxruntime", "onnxruntime-gpu", "ortools", "onednn-cpu-gomp")
_OF_CHECK = "check."


def rewritten(
    proto: onnx.ModelProto,
    budget: Budget,
    options: Mapping[str, Any],
    path: Path,
    plan: Callable[[], Result],
) -> Report:
    """Write the rewritten step to `path` and return its report: from the cache, else by `plan`.

    A plan that the clock cut short is not kept, nor one by costs of a file.
    """
    folder = None if options.get("costs") else _folder()
    entry = None if folder is None else folder / _key(proto, budget, options)
    if entry is not None:
        with contextlib.suppress(Exception):  # a damaged pickle raises errors of any class
            report: Report = pickle.loads((entry / _REPORT).read_bytes())
            shutil.copyfile(entry / _STEP, path)
            os.utime(entry)
            return report
    result = plan()
    result.save(path)
    alone = [each.name for each in path.parent.iterdir()] == [path.name]
    if entry is not None and alone and not result.report.cut_short and path.stat().st_size <= MOST_BYTES:
        _keep(entry, path, result.report)
    return result.report


def _keep(entry: Path, path: Path, report: Report) -> None:
    """Store an entry, complete or not at all, and remove the oldest."""
    with contextlib.suppress(OSError):
        entry.parent.mkdir(mode=0o700, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=entry.parent))
        try:
            shutil.copyfile(path, partial / _STEP)
            (partial / _REPORT).write_bytes(pickle.dumps(report))
            partial.rename(entry)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        known = sorted(entry.parent.iterdir(), key=lambda each: each.stat().st_mtime)
        for old in known[:-ENTRIES]:
            shutil.rmtree(old, ignore_errors=True)


def _folder() -> Path | None:
    """Return a folder that belongs to the user alone: reports are pickled."""
    folder = cache_folder()
    return None if folder is None else folder / "plans"


def _key(proto: onnx.ModelProto, budget: Budget, options: Mapping[str, Any]) -> str:
    step = onnx.ModelProto()
    step.CopyFrom(proto)
    kept = [entry for entry in step.metadata_props if not entry.key.startswith(_OF_CHECK)]
    del step.metadata_props[:]
    step.metadata_props.extend(kept)
    found = hashlib.sha256(step.SerializeToString(deterministic=True))
    named = sorted((name, value) for name, value in options.items() if name != "progress")
    found.update(repr((budget, named, *_surroundings())).encode())
    return found.hexdigest()[:32]


@cache
def _surroundings() -> tuple[Any, ...]:
    """Return the versions of packages, the state of the package's code, and the processor."""
    import llvmlite.binding as llvm

    versions = []
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions.append((name, version(name)))
    home = Path(rewrite.__file__).parents[1]
    code = sorted((str(each), each.stat().st_size, each.stat().st_mtime_ns) for each in home.rglob("*.py"))
    return (*versions, *code, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten(), os.cpu_count())
