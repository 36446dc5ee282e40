"""Installs onnxruntime-node and onnxruntime-web below examples/javascript, with npm, from its registry.

    python scripts/edge_env.py

The versions are those of examples/javascript/package.json. Install scripts are left out: onnxruntime-node's would
download CUDA's libraries; what runs on the CPU lies in the package. Nothing is done where the packages are there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "examples" / "javascript"
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


def browser() -> str:
    """Path of a Chromium or Chrome; empty where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for path in map(shutil.which, names) if path), "")


def main() -> None:
    """Install them and say which versions are there."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    npm = shutil.which("npm")
    if len(installed()) < len(PACKAGES):
        if npm is None:
            sys.exit("no npm: install Node.js, 20 or newer")
        options = ("--ignore-scripts", "--no-package-lock", "--no-audit", "--no-fund", "--silent")
        subprocess.run([npm, "install", *options], cwd=FOLDER, check=True)
    print(", ".join(f"{name} {version}" for name, version in installed().items()))


if __name__ == "__main__":
    main()
