"""Native code in a process of its own, under a limit of time and memory: what a file makes it do harms nobody else.

ONNX's inference, checker and inliner and ONNX Runtime are C++: a hostile or broken model makes them crash, hang, or
take all memory. `ask` starts ``python -m onnx_remat.process.worker`` once and keeps it, since importing the libraries
takes longer than most answers. A request is a line of JSON and the bytes it announces, and so is an answer; the process
ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from onnx_remat.errors import ModelError, OnnxRematError

QUIET = {"ORT_DISABLE_TELEMETRY": "1"}
"""ONNX Runtime calls home from 1.29 on; not out of processes of ours, where that also takes memory and time."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What one request may take at most.

    Attributes
    ----------
    seconds : float
        Of computing: a busy machine makes nobody run out of it. Ten times as much may pass in all.
    bytes : int
        Of memory, beyond what the process has when the request comes.
    """

    seconds: float
    bytes: int


_WAITS = 10  # seconds to wait for every second of computing allowed: others compute, too

_lock = threading.Lock()
_running: tuple[int, subprocess.Popen[bytes]] | None = None  # with the process that started it: forks must not share it


def ask(what: str, task: str, limit: Limit, data: bytes = b"", **job: Any) -> tuple[Any, bytes]:
    """Let the process call a function.

    Parameters
    ----------
    what : str
        Who is asked to do what, for messages: "ONNX Runtime".
    task : str
        The function, ``module:name``. It is called as ``function(data, **job)`` and returns what `ask` returns.
    limit : Limit
    data : bytes
        A serialised model, say.
    **job
        More arguments, all of types that JSON has.

    Returns
    -------
    (anything that JSON has, bytes)

    Raises
    ------
    ModelError
        The function raised it, crashed, or hit the limit.
    """
    with _lock:
        child = _child()
        request = {"task": task, "limit": asdict(limit), "job": job}
        reply: queue.SimpleQueue[tuple[Any, bytes] | None] = queue.SimpleQueue()
        try:
            _send(_pipe(child.stdin), request, data)
            threading.Thread(target=lambda: reply.put(_receive(_pipe(child.stdout))), daemon=True).start()
            received = reply.get(timeout=_WAITS * limit.seconds)
        except queue.Empty:
            _end(child)
            raise ModelError(_too_long(what, limit)) from None
        except OSError:
            received = None
        except BaseException:  # an interrupt: the answer to this request must not be taken for the next one's
            _end(child)
            raise
        if received is None:
            status = _end(child)
            if status == -getattr(signal, "SIGXCPU", 0):
                raise ModelError(_too_long(what, limit))
            raise ModelError(f"{what} crashed on the model ({_cause(status)})")
    answer, made = received
    if "memory" in answer:
        raise ModelError(f"{what} needs more than {limit.bytes / 2**20:.0f} MiB of memory for the model, the limit")
    if "error" in answer:
        raise ModelError(answer["error"])
    return answer["result"], made


def _too_long(what: str, limit: Limit) -> str:
    return f"{what} did not come to an end with the model in {limit.seconds:.0f} seconds, the limit"


def start() -> None:
    """Start the process, so that it is ready when the first request comes."""
    with _lock:
        _child()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def _send(stream: IO[bytes], header: Any, data: bytes) -> None:
    stream.write(json.dumps({"header": header, "bytes": len(data)}).encode() + b"\n")
    stream.write(data)
    stream.flush()


def _receive(stream: IO[bytes]) -> tuple[Any, bytes] | None:
    """A header and its bytes; None where the other side has gone."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    message = json.loads(line)
    data = stream.read(message["bytes"])
    return (message["header"], data) if len(data) == message["bytes"] else None


def _child() -> subprocess.Popen[bytes]:
    global _running
    if _running is None or _running[0] != os.getpid() or _running[1].poll() is not None:
        _running = os.getpid(), spawn("onnx_remat.process.worker", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    return _running[1]


def spawn(module: str, *arguments: str, stdin: int, stdout: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """Start ``python -m module arguments``, which finds the modules that this process finds."""
    environment = os.environ | QUIET | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}  # noqa: PTH109
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments], stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL,
        env=environment,
    )  # fmt: skip


def _end(child: subprocess.Popen[bytes]) -> int:
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


@contextmanager
def _limited(seconds: float, memory: int) -> Iterator[None]:
    """Within the block, the process gets no more memory than `memory` bytes, and dies after `seconds` of computing.

    Where the system knows no such limits, only waiting ends a request.
    """
    try:
        import resource

        status = Path("/proc/self/status").read_text().splitlines()
        now = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
    except (ImportError, OSError, StopIteration):
        yield
        return
    before = {kind: resource.getrlimit(kind) for kind in (resource.RLIMIT_DATA, resource.RLIMIT_CPU)}
    wanted = {
        resource.RLIMIT_DATA: now + memory,
        resource.RLIMIT_CPU: math.ceil(time.process_time() + seconds),
    }
    for kind, most in wanted.items():
        soft, hard = before[kind]
        allowed = [limit for limit in (most, soft, hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(kind, (min(allowed), hard))
    try:
        yield
    finally:
        for kind, limits in before.items():
            resource.setrlimit(kind, limits)


def _answer(request: Any, data: bytes) -> tuple[dict[str, Any], bytes]:
    module, _, name = request["task"].partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
        with _limited(request["limit"]["seconds"], request["limit"]["bytes"]):
            result, made = function(data, **request["job"])
    except OnnxRematError as error:
        return {"error": str(error)}, b""
    except MemoryError:
        return {"memory": True}, b""
    except RecursionError:
        return {"error": "the model is nested too deeply"}, b""
    except Exception as error:  # a broken installation, a full disk
        return {"error": f"the model cannot be read: {type(error).__name__}: {error}"}, b""
    return {"result": result}, made


def main() -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a native library prints is no answer
    with contextlib.suppress(ImportError):
        import onnx  # noqa: F401 - while nobody waits
    while (received := _receive(sys.stdin.buffer)) is not None:
        header, made = _answer(*received)
        _send(answers, header, made)


if __name__ == "__main__":
    main()
