"""Plans of sessions that earlier processes opened: the same step opens again without planning.

An entry has the model to load, its kernels and its `SessionPlan` as JSON. Its key is a hash of the step's file, the
request and the surroundings, see `process.cache`. The secret of an entry is that of its kernels: a file from elsewhere
does not know it. Steps with weights in other files are planned each time, as are those for a device.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnx_remat.process.cache import Entries, surroundings
from onnx_remat.session import fusing

ENTRIES = Entries("sessions")

MOST_BYTES = 64 << 20
"""Largest file to keep, and the largest step to look for."""

_MODEL, _KERNELS, _PLAN = "lean.onnx", "lean.kernels", "plan.json"


def key_of(path: Path, request: Mapping[str, Any]) -> str:
    """Return the key of a step's plan, empty for a step that is planned each time."""
    if request["provider"] != "cpu" or request["check"]:
        return ""
    with contextlib.suppress(OSError):
        if path.stat().st_size <= MOST_BYTES:
            asked = dict(request) | {"secret": bool(request["secret"])}
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256")
            found.update(json.dumps([asked, surroundings()], sort_keys=True, default=str).encode())
            return found.hexdigest()[:32]
    return ""


def find(key: str, target: Path) -> dict[str, Any] | None:
    """Copy the model of an entry to `target` and its kernels next to it, and return its plan; None if there is none."""
    entry = ENTRIES.find(key) if key else None
    if entry is None:
        return None
    kernels = fusing.kernels_of(target)
    try:
        plan: dict[str, Any] = json.loads((entry / _PLAN).read_text(encoding="utf-8"))
        shutil.copyfile(entry / _MODEL, target)
        if plan["fused"]["kernels"]:
            shutil.copyfile(entry / _KERNELS, kernels)
    except (OSError, ValueError):  # removed by another process, or damaged
        target.unlink(missing_ok=True)
        kernels.unlink(missing_ok=True)
        return None
    return plan


def keep(key: str, source: Path, target: Path, plan: Mapping[str, Any]) -> None:
    """Store what `find` returns, unless the model at `target` has weights in other files or is too large."""
    kernels = fusing.kernels_of(target)
    own = {target, kernels, source}
    if not key or any(each not in own for each in target.parent.iterdir()):
        return
    files = {_MODEL: target} | ({_KERNELS: kernels} if plan["fused"]["kernels"] else {})
    if sum(each.stat().st_size for each in files.values()) <= MOST_BYTES:
        ENTRIES.add(key, files | {_PLAN: json.dumps(plan).encode()})
