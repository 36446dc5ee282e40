"""Set up an environment with onnxruntime-training: ``python scripts/ort_training_env.py FOLDER``.

The last release is 1.19.2, for Python 3.8 to 3.11 and numpy 1; it cannot share an environment with onnxruntime. Its
package imports torch, whatever is done with it. Prints the interpreter to pass as ``--runtime``.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

REQUIREMENTS = ("onnxruntime-training-cpu==1.19.2", "onnx==1.16.2", "numpy==1.26.4", "torch==2.13.0")


def main() -> None:
    """Make the environment and import the package once."""
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/ort_training_env.py FOLDER")
    if sys.version_info >= (3, 12):
        sys.exit("onnxruntime-training has no wheel for this Python: run this script with Python 3.11")
    folder = Path(sys.argv[1])
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", *REQUIREMENTS], check=True)
    subprocess.run([python, "-c", "import onnxruntime.training.api"], check=True)
    print(python)


if __name__ == "__main__":
    main()
