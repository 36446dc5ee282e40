"""Plans of sessions that earlier processes opened: the same step opens again without planning.

An entry has the model to load, its kernels and its `SessionPlan` as JSON. Its key is a hash of the step's file, the
request and the surroundings, see `process.cache`. The secret of an entry is that of its kernels: a file from elsewhere
does not know it. Steps with weights in other files are planned each time, as are those for a device.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx_remat.process.cache import Entries, surroundings
from onnx_remat.session import kernel_file

ENTRIES = Entries("sessions")

MOST_BYTES = 64 << 20
"""Largest file to keep, and the largest step to look for."""

_MODEL, _KERNELS, _PLAN = "lean.onnx", "lean.kernels", "plan.json"


@dataclass(frozen=True, slots=True)
class Key:
    """Name of an entry, and the digest of the step's file in it."""

    name: str
    file: str


def content(path: Path) -> bytes | None:
    """Return the content of a step's file, None for one that is too large to keep or cannot be read."""
    try:
        return path.read_bytes() if _is_small(path) else None
    except (OSError, ValueError):
        return None


def _is_small(path: Path) -> bool:
    return path.is_file() and path.stat().st_size <= MOST_BYTES


def digest_of(data: bytes) -> str:
    """Return the digest of a step's file."""
    return hashlib.sha256(data).hexdigest()


def key_of(path: Path, request: Mapping[str, Any]) -> Key | None:
    """Return the key of a step's plan, None for a step that is planned each time."""
    if request["provider"] != "cpu" or request["check"]:
        return None
    try:
        if not _is_small(path):
            return None
        with path.open("rb") as stream:  # in pieces: this process is to train, and memory that it takes may stay
            file = hashlib.file_digest(stream, "sha256").hexdigest()
    except (OSError, ValueError):
        return None
    asked = dict(request) | {"secret": bool(request["secret"])}
    text = json.dumps([file, asked, surroundings()], sort_keys=True, default=str)
    return Key(hashlib.sha256(text.encode()).hexdigest()[:32], file)


def find(key: Key, target: Path) -> dict[str, Any] | None:
    """Copy the model of an entry to `target` and its kernels next to it, and return its plan; None if there is none."""
    kernels = kernel_file.path_of(target)
    text = ENTRIES.take(key.name, {_MODEL: target, _KERNELS: kernels}, _PLAN)
    plan: dict[str, Any] | None = None if text is None else json.loads(text)
    if plan is not None and not plan["fused"]["kernels"]:
        kernels.unlink()
    return plan


def keep(key: Key, target: Path, plan: Mapping[str, Any]) -> None:
    """Store what `find` returns, unless the model at `target` is too large."""
    kernels = kernel_file.path_of(target)
    code: Path | bytes = kernels if plan["fused"]["kernels"] else b""
    if sum(each.stat().st_size for each in (target, kernels) if each.exists()) <= MOST_BYTES:
        ENTRIES.add(key.name, {_MODEL: target, _KERNELS: code, _PLAN: json.dumps(plan).encode()})
