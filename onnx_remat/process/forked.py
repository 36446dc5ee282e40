"""Call a function in a forked copy of this process, so that the memory that it takes is freed afterwards.

The copy shares the objects of this process, which therefore need not be picklable. It has one thread: functions of
libraries with threads of their own must run without them.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import select
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from onnx_remat.errors import OnnxRematError

T = TypeVar("T")

_DIE_WITH_PARENT = 1
"""``PR_SET_PDEATHSIG`` of Linux's ``prctl``."""


class _Origin(Exception):
    """Traceback of an error in the copy."""

    def __init__(self, text: str) -> None:
        super().__init__(f"\n{text}")


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the copy sends.

    Attributes
    ----------
    result : object
        The function's result, if it raised no error.
    error : BaseException or None
    origin : str
        The error's traceback, if it is to be shown.
    warnings : list of tuple
        Arguments of ``warnings.warn_explicit``.
    """

    result: Any
    error: BaseException | None
    origin: str
    warnings: list[tuple[str, type[Warning], str, int]]


def available() -> bool:
    """Return whether this system can fork a process that has loaded libraries: Linux."""
    return sys.platform == "linux"


class Running(Generic[T]):
    """A function that runs in a copy of this process; the copy is killed when the context ends before `answer`.

    Parameters
    ----------
    function : callable
        Its result must be picklable.
    what : str
        Description of its work for messages.
    """

    def __init__(self, function: Callable[[], T], what: str) -> None:
        self._what = what
        self._answer: _Answer | None = None
        self._lock = threading.Lock()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()  # the copy would print buffered text again
        reads, writes = os.pipe()
        with warnings.catch_warnings():
            # About threads that the copy lacks: Python's (from 3.12 on) and JAX's.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            self._copy = os.fork()
        if not self._copy:
            os.close(reads)
            _work(function, writes)
        os.close(writes)
        self._stream = os.fdopen(reads, "rb")

    def __enter__(self) -> Running[T]:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._stream.closed:
            os.kill(self._copy, signal.SIGKILL)
            self._ended()

    def _ended(self) -> int:
        """Wait for the copy's end and return its exit status; 0 where this process ignores SIGCHLD."""
        self._stream.close()
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self._copy, 0)[1])
        except ChildProcessError:
            return 0

    def has_answered(self) -> bool:
        """Return whether `answer` returns, or raises, without waiting for the function."""
        with self._lock:
            if self._stream.closed:
                return True
            ready = select.poll()
            ready.register(self._stream, select.POLLIN | select.POLLHUP)
            return bool(ready.poll(0))

    def answer(self) -> T:
        """Wait for the function and return its result; any thread may ask, and again.

        Warnings appear in this process, and an error is raised here. Its cause is its traceback, except for an
        `OnnxRematError` without cause, whose text says all.

        Raises
        ------
        OnnxRematError
            The copy died, for example because the system had no memory left.
        """
        with self._lock:
            answer = self._answer = self._answer or self._received()
        if answer.error is not None:
            raise answer.error from (_Origin(answer.origin) if answer.origin else None)
        result: T = answer.result
        return result

    def _received(self) -> _Answer:
        try:
            data = self._stream.read()
        except BaseException:
            os.kill(self._copy, signal.SIGKILL)
            raise
        finally:
            status = self._ended()
        if not data:
            return _Answer(None, self._died(status), "", [])
        answer: _Answer = pickle.loads(data)
        for message, category, file, line in answer.warnings:
            warnings.warn_explicit(message, category, file, line)
        return answer

    def _died(self, status: int) -> OnnxRematError:
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        memory = "; probably the system ran out of memory" if status == -signal.SIGKILL else ""
        return OnnxRematError(f"the process for {self._what} ended without an answer ({how}{memory})")


def call(function: Callable[[], T], what: str) -> T:
    """Call a function in a copy of this process and return its result, see `Running`."""
    with Running(function, what) as running:
        return running.answer()


def _work(function: Callable[[], Any], writes: int) -> NoReturn:
    """Send the function's result, and exit without exit handlers and finalizers: they are this copy's parent's."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        gc.freeze()  # a collection would copy the parent's objects
        data = pickle.dumps(_answered(function))
        with os.fdopen(writes, "wb") as stream:
            stream.write(data)
        status = 0
    except KeyboardInterrupt:  # the parent has it, too
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        for text in (sys.stdout, sys.stderr):
            if text is not None:
                text.flush()
        os._exit(status)


def _answered(function: Callable[[], Any]) -> _Answer:
    result, error, origin = None, None, ""
    with warnings.catch_warnings(record=True) as seen:
        try:
            result = function()
        except Exception as raised:
            error = _picklable(raised)
            if raised.__cause__ is not None or not isinstance(raised, OnnxRematError):
                origin = traceback.format_exc()
    return _Answer(result, error, origin, [(str(w.message), w.category, w.filename, w.lineno) for w in seen])


def _picklable(error: Exception) -> Exception:
    """Return the error, or one with its text if it cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
