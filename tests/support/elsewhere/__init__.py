"""Where ONNX Runtime runs without Python: the packages and programs that are here, and `places` to train in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "examples" / "javascript"
PACKAGES = ("onnxruntime-node", "onnxruntime-web")


def installed(folder: Path = FOLDER) -> dict[str, str]:
    """Versions of the packages that `folder` has."""
    found = {}
    for package in PACKAGES:
        about = folder / "node_modules" / package / "package.json"
        if about.exists():
            found[package] = str(json.loads(about.read_text(encoding="utf-8"))["version"])
    return found


def missing() -> str:
    """Why the examples cannot run here; empty where they can."""
    if shutil.which("node") is None:
        return "no node"
    if len(installed()) < len(PACKAGES):
        return f"{FOLDER.name}/node_modules lacks onnxruntime's packages: python scripts/edge_env.py"
    return ""


def chromium() -> str:
    """Path of a Chromium or Chrome; empty where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for path in map(shutil.which, names) if path), "")
