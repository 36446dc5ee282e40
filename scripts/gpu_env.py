"""Makes a virtual environment with onnxruntime-gpu: it shares its package name with the CPU's wheel.

    python scripts/gpu_env.py FOLDER [--version 1.31.1]

The CUDA libraries are left out: the tests put a fake device in their place (tests/support/fake_cuda). With a GPU and
CUDA installed, the environment runs on them. Nothing is done where FOLDER already has that version.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

VERSION = "1.31.1"
_NEEDS = ("numpy", "onnx", "protobuf", "flatbuffers", "packaging")


def make(folder: Path, version: str = VERSION) -> Path:
    """The interpreter of the environment in `folder`, made where it is not there yet."""
    python, stamp = folder / "bin" / "python", folder / "onnxruntime-gpu.version"
    if not stamp.exists() or stamp.read_text() != version:
        stamp.unlink(missing_ok=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        for packages in (_NEEDS, ("--no-deps", f"onnxruntime-gpu=={version}")):
            subprocess.run([*pip, *packages], check=True)
        stamp.write_text(version)
    return python


def main() -> None:
    """Make one and say where its interpreter is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--version", default=VERSION)
    given = parser.parse_args()
    print(make(given.folder, given.version))


if __name__ == "__main__":
    main()
