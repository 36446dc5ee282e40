"""Native code in a process of its own, under a limit of time and memory: what a file makes it do harms nobody else.

ONNX's inference, checker and inliner and ONNX Runtime are C++: a hostile or broken model makes them crash, hang, or
take all memory. `ask` starts a `child.Child` once and keeps it, since importing the libraries takes longer than most
answers.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from onnx_remat.errors import ModelError
from onnx_remat.process.child import Child, Failed, Limit

_lock = threading.Lock()
_running: tuple[int, Child] | None = None  # with the process that started it: forks must not share it


def ask(what: str, task: str, limit: Limit, data: bytes | None = None, **job: Any) -> tuple[Any, bytes]:
    """Let the process call a function.

    Parameters
    ----------
    what : str
        Who is asked to do what, for messages: "ONNX Runtime".
    task : str
        The function, ``module:name``. It takes `data`, if there is any, and `job`, and returns what `ask` returns.
    limit : Limit
    data : bytes, optional
        A serialised model, say.
    **job
        More arguments, of types that `child.Child` takes.

    Returns
    -------
    (anything that JSON has, bytes)

    Raises
    ------
    ModelError
        The function raised it, crashed, or hit the limit.
    """
    with _lock:
        try:
            answer, made = _child().call(task, job if data is None else {"data": data, **job}, limit)
        except Failed as failed:
            raise ModelError(_why(what, limit, failed)) from None
    return answer, made


def _why(what: str, limit: Limit, failed: Failed) -> str:
    if failed.how == "time":
        return f"{what} did not come to an end with the model in {limit.seconds:.0f} seconds, the limit"
    if failed.how == "died":
        return f"{what} crashed on the model ({failed.cause})"
    if failed.how == "memory":
        return f"{what} needs more than {limit.bytes / 2**20:.0f} MiB of memory for the model, the limit"
    if failed.error():
        return failed.message
    if failed.kind == "RecursionError":
        return "the model is nested too deeply"
    return f"the model cannot be read: {failed.kind}: {failed.message}"  # a broken installation, a full disk


def start() -> None:
    """Start the process, so that it is ready when the first request comes."""
    with _lock:
        _child()


def _child() -> Child:
    global _running
    if _running is None or _running[0] != os.getpid() or not _running[1].lives():
        _running = os.getpid(), Child(imports=["onnx"])
    return _running[1]
