"""The process that `asking` starts: lines of JSON in, lines of JSON out; it ends when its standard input does."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from onnx_remat.errors import OnnxRematError
from onnx_remat.ort.runtime import load_and_infer, load_and_optimize

TASKS: Mapping[str, Callable[..., Any]] = {"optimize": load_and_optimize, "infer": load_and_infer}


def main() -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a native library prints is no answer
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = {"result": TASKS[job.pop("task")](**job)}
        except OnnxRematError as error:
            answer = {"error": str(error)}
        except Exception as error:  # a broken installation, a full disk
            answer = {"error": f"ONNX Runtime cannot be asked: {type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
