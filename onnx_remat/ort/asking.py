"""ONNX Runtime in a process of its own: a model that makes it crash or hang ends neither the tool nor its caller.

`ask` starts ``python -m onnx_remat.ort.worker`` once and keeps it, since importing ONNX Runtime takes longer than most
answers. Requests and answers are lines of JSON; the process ends when its standard input does.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from typing import Any

from onnx_remat.errors import ModelError

QUIET = {"ORT_DISABLE_TELEMETRY": "1"}
"""ONNX Runtime calls home from 1.29 on; not out of processes of ours, where that also takes memory and time."""

_lock = threading.Lock()
_running: tuple[int, subprocess.Popen[str]] | None = None  # with the process that started it: a fork must not share it


def ask(task: str, patience: float, **job: Any) -> Any:
    """Let the process do one of `worker.TASKS`; returns what the task returns.

    Parameters
    ----------
    task : str
    patience : float
        Seconds to wait.
    **job
        The task's arguments, all of types that JSON has.

    Raises
    ------
    ModelError
        The task raised it, crashed, or did not come to an end in time.
    """
    with _lock:
        child = _child()
        assert child.stdin is not None and child.stdout is not None
        reply: queue.SimpleQueue[str] = queue.SimpleQueue()
        try:
            child.stdin.write(json.dumps({"task": task, **job}) + "\n")
            child.stdin.flush()
            threading.Thread(target=lambda: reply.put(child.stdout.readline()), daemon=True).start()  # type: ignore[union-attr]
            line = reply.get(timeout=patience)
        except queue.Empty:
            _end(child)
            raise ModelError(f"ONNX Runtime did not come to an end with the model in {patience:.0f} seconds") from None
        except OSError:
            line = ""
        if not line:
            raise ModelError(f"ONNX Runtime crashed on the model ({_cause(_end(child))})")
    answer = json.loads(line)
    if "error" in answer:
        raise ModelError(answer["error"])
    return answer["result"]


def _child() -> subprocess.Popen[str]:
    global _running
    if _running is None or _running[0] != os.getpid() or _running[1].poll() is not None:
        environment = os.environ | QUIET | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        child = subprocess.Popen(
            [sys.executable, "-m", "onnx_remat.ort.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip
        _running = os.getpid(), child
    return _running[1]


def _end(child: subprocess.Popen[str]) -> int:
    """End the process, if it has not ended by itself; its exit status."""
    global _running
    _running = None
    try:
        return child.wait(timeout=1)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


def _cause(status: int) -> str:
    """
    >>> _cause(-11), _cause(1)
    ('SIGSEGV', 'exit status 1')
    """
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"
