"""Python processes that call functions for this one: one protocol for all of them.

A message is a line of JSON and the raw bytes that it announces: byte strings and arrays, wherever in the JSON they
stand, in their order. A request names a function, its arguments and a limit; the answer is what the function returns,
or its error. Whatever else the process prints is no answer. It ends, in the midst of work too, when its standard input
does: when this process closes it, or is gone.
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
"""ONNX Runtime calls home from 1.29 on; not out of processes of ours, where that also takes memory and time."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What one request may take at most.

    Attributes
    ----------
    seconds : float
        Of computing: a busy machine makes nobody run out of it. Ten times as much may pass in all.
    bytes : int
        Of memory, beyond what the process has when the request comes; 0 for as much as the machine has.
    clock : bool
        `seconds` are of the clock, and computing has no limit of its own.
    """

    seconds: float
    bytes: int = 0
    clock: bool = False

    @property
    def waits(self) -> float:
        """Seconds of the clock after which nobody waits any more: others compute, too."""
        return self.seconds if self.clock else 10 * self.seconds


@dataclass(eq=False)
class Failed(Exception):
    """A process that has no answer.

    Attributes
    ----------
    how : str
        ``"raised"``: the function raised an error; ``"memory"``: for lack of memory; ``"time"``: the limit was hit;
        ``"died"``: the process ended.
    line : str
        The last line of the traceback, or the last that a process printed before it died.
        It is the exception's text, `cause` where there is none.
    kind, message : str
        Class and text of the error. The class of one of ours is in `errors`.
    cause : str
        What a process died of: a signal, or its exit status.
    figures : sequence of int
        More arguments of an error of ours.
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
        """The error of ours that the function raised, if it was one."""
        kind = getattr(errors, self.kind, None) if self.how == "raised" else None
        return None if kind is None else kind(self.message, *self.figures)


class Child:
    """A process, started now.

    Parameters
    ----------
    imports : sequence of str
        Modules that it imports while nobody waits.
    variables : mapping of str to str
        Of its environment, besides this process's own.
    python : str
        An interpreter, which may be that of another environment: its own modules are found, and those of onnx_remat.
        By default this process's, which finds the modules that this process finds.

    Raises
    ------
    OSError
        The process cannot be started.
    """

    def __init__(
        self, imports: Sequence[str] = (), variables: Mapping[str, str] = QUIET, python: str = ""
    ) -> None:  # fmt: skip
        environment = os.environ | variables
        if not python:
            environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)  # noqa: PTH109
        self.process = self._started([*_command(python), *imports], environment)
        self._said = b""
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self._replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._limit: Limit | None = None

    def _started(self, command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        )

    def begin(self, task: str, job: Mapping[str, Any], limit: Limit | None = None, last: bool = False) -> None:
        """Let the process call a function, ``module:name``, with the arguments of `job`; wait for nothing.

        Arguments and results are of types that JSON has, byte strings, arrays and paths, in mappings and sequences of
        any depth; tuples come as lists. A process ends after its `last` answer.
        """
        given = None if limit is None else asdict(limit)
        line, blocks = _packed({"task": task, "job": job, "limit": given, "last": last})
        self._limit = limit
        threading.Thread(target=self._exchange, args=(line, blocks), daemon=True).start()

    def done(self) -> bool:
        """Has the process answered, or died?"""
        return not self._replies.empty()

    def answer(self) -> Any:
        """Wait for what the function returns.

        Raises
        ------
        Failed
            It raised an error, died, or hit the limit. Only after the first of these the process lives on.
        """
        try:
            reply = self._replies.get(timeout=None if self._limit is None else self._limit.waits)
        except queue.Empty:
            self.end(0)
            raise Failed("time") from None
        except BaseException:  # an interrupt: the answer to this request must not be taken for the next one's
            self.end()
            raise
        if reply is None:
            status = self.end(1)
            self._listener.join(1)
            if self._limit is not None and status == -getattr(signal, "SIGXCPU", 0):
                raise Failed("time")
            lines = self._said.decode(errors="replace").strip().splitlines()
            raise Failed("died", line=lines[-1] if lines else "", cause=_cause(status))
        if "error" in reply:
            raise Failed(**reply["error"] | {"message": from_data(reply["error"]["message"])})
        return reply["result"]

    def call(self, task: str, job: Mapping[str, Any], limit: Limit | None = None, last: bool = False) -> Any:
        """`begin`, then `answer`."""
        self.begin(task, job, limit, last)
        return self.answer()

    def lives(self) -> bool:
        """Has the process not ended?"""
        return self.process.poll() is None

    def end(self, patience: float = 0.25) -> int:
        """End the process, if it does not within some seconds; its exit status."""
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
        try:
            _send(_pipe(self.process.stdin), line, blocks)
            self._replies.put(_receive(_pipe(self.process.stdout)))
        except (OSError, ValueError):  # gone; or what it says is no JSON
            self._replies.put(None)

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while said := os.read(_pipe(self.process.stderr).fileno(), 1 << 16):
                self._said = (self._said + said)[-(1 << 16) :]


def call(
    task: str,
    job: Mapping[str, Any],
    limit: Limit | None = None,
    variables: Mapping[str, str] = QUIET,
    python: str = "",
) -> Any:
    """Let a process of its own call a function, see `Child`: what that takes does not stay with this one."""
    with Child((), variables, python) as child:
        return child.call(task, job, limit, last=True)


# Without a search path for modules: that of this environment would hide the other's own numpy and onnx.
_ELSEWHERE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("onnx_remat", sys.argv.pop(1) + "/__init__.py")
sys.modules["onnx_remat"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["onnx_remat"])
from onnx_remat.process.child import main
main()
"""


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

_MARK = b"\x1eonnx-remat "  # a line without it is no message
_RAW = "\0raw"  # the key under which a block of raw bytes is announced: its size; an array's type and shape


def _packed(message: Any) -> tuple[bytes, list[Any]]:
    """A message as a line and the blocks that follow it."""
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
    """The next message; None where the other side has gone."""

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
    """Answer requests until there are no more."""
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # whatever a native library prints is no answer
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
        with contextlib.suppress(OSError, ValueError):
            while (request := _receive(asked)) is not None:
                requests.put(request)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    for module in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    while True:
        request = requests.get()
        _send(answers, *_answered(request))
        if request["last"]:
            os._exit(0)  # without the minutes, or the crash, that libraries have at an exit


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
    """The arguments of `Failed` that an error has."""
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
    """Within the block, the process gets no more memory than it may, and dies after so many `seconds` of computing.

    Where the system knows no such limits, only waiting ends a request.
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
