"""The process that `opening.open_step` starts: compares the step with ONNX Runtime's own where asked, and plans it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onnx_remat.errors import OnnxRematError
from onnx_remat.measure import verify
from onnx_remat.session import opening


def main() -> None:
    """Do the job on standard input and print a JSON object."""
    job = json.load(sys.stdin)
    path, wish = Path(job["path"]), opening.Wish(**job["wish"])
    try:
        if wish.check:
            verify.session(path, wish.dims, level=wish.level, donate=wish.donate, provider=wish.provider)
        answer: dict[str, Any] = {"opened": asdict(opening.plan(path, Path(job["target"]), wish))}
    except OnnxRematError as error:
        answer = {"error": str(error), "kind": type(error).__name__}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
