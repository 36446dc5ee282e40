"""Native code in a separate process, under a limit on time and memory, to isolate the effects of a bad file.

ONNX's inference, checker and inliner and ONNX Runtime are C++: a hostile or broken model can make them crash, hang, or
exhaust memory. `ask` starts a `child.Child` once and keeps it, since importing the libraries takes longer than most
requests.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from onnx_remat.errors import ModelError
from onnx_remat.process.child import Child, Failed, Limit

_lock = threading.Lock()
_running: tuple[int, Child, bool] | None = None
"""The id of the process that started it, as forks must not share it; it; and whether it may hold memory of a device."""


def ask(
    what: str, task: str, limit: Limit, data: bytes | None = None, on_device: bool = False, **job: Any
) -> tuple[Any, bytes]:
    """Call a function in the process.

    Parameters
    ----------
    what : str
        Name of the library for messages, such as "ONNX Runtime".
    task : str
        The function, ``module:name``, with arguments `job` and, if given, `data`; `ask` returns its result.
    limit : Limit
    data : bytes, optional
        A serialised model, for example.
    on_device : bool
        The function uses a device, of whose memory the process then holds some until `leave_device`.
    **job
        Further arguments, of types that `child.Child` supports.

    Returns
    -------
    (JSON value, bytes)

    Raises
    ------
    ModelError
        The function raised it, crashed, or hit the limit.
    """
    with _lock:
        child = _child(on_device)
        try:
            answer, made = child.call(task, job if data is None else {"data": data, **job}, limit)
        except Failed as failed:
            raise ModelError(_why(what, limit, failed)) from None
    return answer, made


def _why(what: str, limit: Limit, failed: Failed) -> str:
    if failed.how == "time":
        return f"{what} did not finish with the model within {limit.seconds:.0f} s"
    if failed.how == "died":
        return f"{what} crashed on the model ({failed.cause})"
    if failed.how == "memory":
        return f"{what} needs more than the limit of {limit.bytes / 2**20:.0f} MiB of memory for the model"
    if failed.error():
        return failed.message
    if failed.kind == "RecursionError":
        return "the model is nested too deeply"
    return f"the model cannot be read: {failed.kind}: {failed.message}"  # a broken installation, a full disk


def start() -> None:
    """Start the process in advance of the first request."""
    with _lock:
        _child()


@contextmanager
def device_left() -> Iterator[None]:
    """After the block, the process holds no memory of a device: training is to have all of that."""
    try:
        yield
    finally:
        leave_device()


def leave_device() -> None:
    """End the process if it may hold memory of a device, where a context takes half a gigabyte.

    The next request starts another, which takes seconds.
    """
    if _running is None or not _running[2]:
        return  # without waiting for another thread's request
    with _lock:
        if _lives() and _running[2]:
            _running[1].end(0)


def _lives() -> bool:
    return _running is not None and _running[0] == os.getpid() and _running[1].lives()


def _child(on_device: bool = False) -> Child:
    """Return the process, a new one if none runs, and keep in mind whether a device is used."""
    global _running
    if _running is None or not _lives():
        _running = os.getpid(), Child(imports=["onnx"]), on_device
    elif on_device:
        _running = *_running[:2], True
    return _running[1]
