"""Installs onnxruntime-node and onnxruntime-web below examples/javascript, with npm, from its registry.

    python scripts/edge_env.py

The versions are those of examples/javascript/package.json. Install scripts are left out: onnxruntime-node's would
download CUDA's libraries; what runs on the CPU lies in the package. Nothing is done where the packages are there.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "examples" / "javascript"


def main() -> None:
    """Install them and say which versions are asked for."""
    asked = json.loads((FOLDER / "package.json").read_text(encoding="utf-8"))["dependencies"]
    if not all((FOLDER / "node_modules" / package).exists() for package in asked):
        npm = shutil.which("npm")
        if npm is None:
            sys.exit("no npm: install Node.js, 20 or newer")
        options = ("--ignore-scripts", "--no-package-lock", "--no-audit", "--no-fund", "--silent")
        subprocess.run([npm, "install", *options], cwd=FOLDER, check=True)
    print(", ".join(f"{name} {version}" for name, version in asked.items()))


if __name__ == "__main__":
    main()
