"""Compile the planner's kernels for a wheel, so that a first use need not.

python -m onnx_remat.rewrite.precompile FOLDER
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path


def main(into: Path) -> None:
    """Compile every kernel for all processors of `compiled.LEVEL`, and write the code to a folder."""
    from onnx_remat.process import compiled
    from onnx_remat.rewrite import first_use

    first_use.compile_groups(list(first_use.GROUPS))
    compiled.collect(Path(os.environ["NUMBA_CACHE_DIR"]), into)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        # Numba reads these when it is imported.
        os.environ |= {"NUMBA_CACHE_DIR": scratch, "NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": ""}
        main(Path(sys.argv[1]))
