"""Python child processes that call functions for this one, all by one protocol.

A message is a line of JSON, followed by the raw bytes of all byte strings and arrays in it, in their order. A request
names a function, its arguments and a limit; the answer is the function's result or its error. Other output of the
process is ignored. The process exits, even during a call, when its standard input is closed: by this process, or
because this process has ended.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import operator
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self

from onnx_remat import errors
from onnx_remat.errors import BudgetInfeasibleError, OnnxRematError
from onnx_remat.messages import from_data, to_data

QUIET = {"ORT_DISABLE_TELEMETRY": "1"}
"""Disables ONNX Runtime's telemetry, which exists from 1.29 on and would also take memory and time."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Limits of one request.

    Attributes
    ----------
    seconds : float
        Limit on CPU time, which does not depend on other load; the wall-clock limit is ten times as much.
    bytes : int
        Limit on memory beyond that of the process when the request arrives; 0 for the machine's memory.
    clock : bool
        `seconds` limit wall-clock time, and CPU time is not limited.
    """

    seconds: float
    bytes: int = 0
    clock: bool = False

    @property
    def waits(self) -> float:
        """Wall-clock limit on the answer in seconds, with headroom for other load."""
        return self.seconds if self.clock else 10 * self.seconds


@dataclass(eq=False)
class Failed(Exception):
    """Failure of a request.

    Attributes
    ----------
    how : str
        ``"raised"``: the function raised an error; ``"memory"``: it ran out of memory; ``"time"``: it exceeded its
        limit; ``"died"``: the process ended.
    line : str
        Last line of the traceback, or of the process's output before it died; the exception's text, if not empty.
    kind, message : str
        Class and text of the error; an `OnnxRematError`'s class is in `errors`.
    cause : str
        Why the process died: a signal, or its exit status.
    figures : sequence of int
        Further arguments of an `OnnxRematError`.
    """

    how: Literal["raised", "memory", "time", "died"]
    line: str = ""
    kind: str = ""
    message: str = ""
    cause: str = ""
    figures: Sequence[int] = ()

    def __str__(self) -> str:
        return self.line or self.cause

    def error(self) -> OnnxRematError | None:
        """Return the `OnnxRematError` that the function raised, None for any other failure."""
        kind = getattr(errors, self.kind, None) if self.how == "raised" else None
        return None if kind is None else kind(self.message, *self.figures)


class Child:
    """Start a process.

    Parameters
    ----------
    imports : sequence of str
        Modules to import before the first request.
    variables : mapping of str to str
        Additional environment variables.
    python : str
        An interpreter, possibly of another environment: it finds the modules of that environment and onnx_remat. By
        default this process's interpreter, with the module search path of this process.

    Raises
    ------
    OSError
        The process cannot be started.
    """

    def __init__(
        self, imports: Sequence[str] = (), variables: Mapping[str, str] = QUIET, python: str = ""
    ) -> None:  # fmt: skip
        environment = os.environ | variables | _as_started()
        if not python:
            paths = [path or os.getcwd() for path in sys.path if isinstance(path, str)]  # noqa: PTH109 - Python skips others
            environment["PYTHONPATH"] = os.pathsep.join(paths)
        self.process = self._started([*_command(python), *imports], environment)
        self._stderr = b""
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self._replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._limit: Limit | None = None

    def _started(self, command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        )

    def begin(self, task: str, job: Mapping[str, Any], limit: Limit | None = None, last: bool = False) -> None:
        """Send a request to call a function, ``module:name``, with the arguments `job`; do not wait.

        Arguments and results are JSON values, byte strings, arrays and paths, in mappings and sequences of any depth;
        tuples arrive as lists. The process exits after its `last` answer.
        """
        given = None if limit is None else asdict(limit)
        line, blocks = _packed({"task": task, "job": job, "limit": given, "last": last})
        self._limit = limit
        threading.Thread(target=self._exchange, args=(line, blocks), daemon=True).start()

    def done(self) -> bool:
        """Has the process answered, or died?"""
        return not self._replies.empty()

    def answer(self) -> Any:
        """Wait for the function's result and return it.

        Raises
        ------
        Failed
            The function raised an error, exceeded its limit, or the process died. Only in the first case does the
            process continue.
        """
        try:
            reply = self._replies.get(timeout=None if self._limit is None else self._limit.waits)
        except queue.Empty:
            self.end(0)
            raise Failed("time") from None
        except BaseException:  # an interrupt: the next request must not receive the answer to this one
            self.end()
            raise
        if reply is None:
            status = self.end(1)
            self._listener.join(1)
            if self._limit is not None and status == -getattr(signal, "SIGXCPU", 0):
                raise Failed("time")
            lines = self._stderr.decode(errors="replace").strip().splitlines()
            raise Failed("died", line=lines[-1] if lines else "", cause=_cause(status))
        if "error" in reply:
            raise Failed(**reply["error"] | {"message": from_data(reply["error"]["message"])})
        return reply["result"]

    def call(self, task: str, job: Mapping[str, Any], limit: Limit | None = None, last: bool = False) -> Any:
        """Send a request and wait for its answer: `begin`, then `answer`."""
        self.begin(task, job, limit, last)
        return self.answer()

    def lives(self) -> bool:
        """Is the process running?"""
        return self.process.poll() is None

    def end(self, patience: float = 0.25) -> int:
        """Wait `patience` seconds for the process to exit, then kill it; return its exit status."""
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(0)

    def _exchange(self, line: bytes, blocks: Sequence[Any]) -> None:
        reply = None
        try:
            with contextlib.suppress(OSError, ValueError):  # the process has ended, or its answer is not JSON
                _send(_pipe(self.process.stdin), line, blocks)
                reply = _receive(_pipe(self.process.stdout))
        finally:  # whatever fails, memory for the answer say: `answer` waits for this
            self._replies.put(reply)

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := os.read(_pipe(self.process.stderr).fileno(), 1 << 16):
                self._stderr = (self._stderr + data)[-(1 << 16) :]


def call(
    task: str,
    job: Mapping[str, Any],
    limit: Limit | None = None,
    variables: Mapping[str, str] = QUIET,
    python: str = "",
) -> Any:
    """Call a function in a separate process, see `Child`, so that its memory is freed afterwards."""
    with Child((), variables, python) as child:
        return child.call(task, job, limit, last=True)


# Without this environment's module search path, which would hide the other environment's numpy and onnx.
_ELSEWHERE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("onnx_remat", sys.argv.pop(1) + "/__init__.py")
sys.modules["onnx_remat"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["onnx_remat"])
from onnx_remat.process.child import main
main()
"""


def _as_started() -> dict[str, str]:
    """Return environment variables for what this process was started with: its number of processors (Python 3.13)."""
    count = sys._xoptions.get("cpu_count")
    return {"PYTHON_CPU_COUNT": count} if isinstance(count, str) else {}


def _command(python: str) -> list[str]:
    if python:
        return [python, "-c", _ELSEWHERE, str(Path(__file__).parents[1])]
    return [sys.executable, "-P", "-m", "onnx_remat.process.child"]


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def _cause(status: int) -> str:
    """
    >>> _cause(-11), _cause(1)
    ('SIGSEGV', 'exit status 1')
    """
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


# ---- messages ----

_MARK = b"\x1eonnx-remat "  # start of every message; other lines are ignored
_RAW = "\0raw"  # JSON key in place of a block of raw bytes: its size, and an array's type and shape


def _packed(message: Any) -> tuple[bytes, list[Any]]:
    """Return a message as a line and the blocks that follow it."""
    blocks: list[Any] = []

    def announce(value: Any) -> Any:
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if isinstance(value, Mapping):
            return dict(value)
        if isinstance(value, bytes | bytearray | memoryview):
            blocks.append(memoryview(value).cast("B"))
            return {_RAW: [len(blocks[-1]), "", []]}
        numpy = sys.modules.get("numpy")
        if numpy is None or not isinstance(value, numpy.ndarray) or value.dtype.hasobject:
            return operator.index(value)
        blocks.append(numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8))
        return {_RAW: [blocks[-1].size, value.dtype.str, value.shape]}

    return _MARK + json.dumps(message, default=announce).encode() + b"\n", blocks


def _send(stream: IO[bytes], line: bytes, blocks: Sequence[Any]) -> None:
    stream.write(line)
    for block in blocks:
        stream.write(block)
    stream.flush()


def _receive(stream: Any) -> Any:
    """Return the next message, None where the other process has closed the pipe."""

    def take(announced: dict[str, Any]) -> Any:
        if [*announced] != [_RAW]:
            return announced
        size, dtype, shape = announced[_RAW]
        if not dtype:
            block = stream.read(size)
            arrived = len(block)
        else:
            import numpy as np

            block = np.empty(shape, dtype)
            arrived = stream.readinto(block.reshape(-1).view(np.uint8))
        if arrived != size:
            raise EOFError
        return block

    for line in iter(stream.readline, b""):
        _, mark, message = line.partition(_MARK)
        if mark:
            try:
                return json.loads(message, object_hook=take)
            except EOFError:
                break
    return None


# ---- in the process ----


def main() -> None:
    """Answer requests until standard input is closed."""
    incoming, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # keep output of native libraries out of the answers
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
        status = 1
        try:
            while (request := _receive(incoming)) is not None:
                requests.put(request)
            status = 0
        except BaseException:  # no memory for a request, say
            traceback.print_exc()
        finally:
            os._exit(status)

    threading.Thread(target=read, daemon=True).start()
    for module in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    while True:
        request = requests.get()
        _send(answers, *_answered(request))
        if request["last"]:
            os._exit(0)  # skip exit handlers of libraries, which may take minutes or crash


def _answered(request: Any) -> tuple[bytes, list[Any]]:
    module, _, name = request["task"].partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
        with _limited(**request["limit"]) if request["limit"] else contextlib.nullcontext():
            result = function(**request["job"])
        return _packed({"result": result})
    except Exception as error:
        return _packed({"error": _described(error)})


def _described(error: Exception) -> dict[str, Any]:
    """Return the arguments of `Failed` for an error."""
    kind, figures = type(error).__name__, []
    if isinstance(error, OnnxRematError):
        kind = next(base.__name__ for base in type(error).__mro__ if base.__module__ == errors.__name__)
    if isinstance(error, BudgetInfeasibleError):
        figures = [error.best_peak_bytes, error.lower_bound_bytes]
    line = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    how = "memory" if isinstance(error, MemoryError) else "raised"
    text = error.message if isinstance(error, OnnxRematError) and error.args else str(error)
    return {"how": how, "line": line, "kind": kind, "message": to_data(text), "figures": figures}


@contextmanager
def _limited(seconds: float, bytes: int, clock: bool) -> Iterator[None]:
    """Limit memory and CPU time of the process within the block; it dies when it exceeds the latter.

    On systems without such limits, only the wall-clock limit ends a request.
    """
    try:
        import resource

        status = Path("/proc/self/status").read_text().splitlines()
        now = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ImportError, OSError, StopIteration):
        yield
        return
    wanted = {resource.RLIMIT_DATA: now + bytes if bytes else machine}
    if not clock:
        wanted[resource.RLIMIT_CPU] = math.ceil(time.process_time() + seconds)
    before = {kind: resource.getrlimit(kind) for kind in wanted}
    for kind, most in wanted.items():
        soft, hard = before[kind]
        allowed = [limit for limit in (most, soft, hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(kind, (min(allowed), hard))
    try:
        yield
    finally:
        for kind, limits in before.items():
            resource.setrlimit(kind, limits)


if __name__ == "__main__":
    main()
