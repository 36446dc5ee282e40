"""Standard output and standard error, even if closed, full, or a pipe without a reader; and signals."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from onnx_remat.errors import OnnxRematError


def steady() -> None:
    """Open closed standard streams, and let them accept any text.

    A file opened while a standard stream is closed gets that stream's descriptor, and output of libraries would end up
    in the file. Names in models may contain any character: one that a stream cannot encode is escaped.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _visible(text: str) -> str:
    r"""Escape the characters of a text that would control a terminal: names in files may contain any character.

    >>> print(_visible("node \x1b[2J \u202e"))
    node \x1b[2J \u202e
    """
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in _ACTS else _spelt(c) for c in text)


_ACTS = ("Cc", "Cf", "Cs")  # control, format (direction of writing), surrogates


def _spelt(character: str) -> str:
    return character.encode("unicode_escape").decode()


def is_interruption(error: BaseException) -> bool:
    """Did a KeyboardInterrupt cause an error? An interrupted import of a C extension raises ImportError.

    >>> is_interruption(KeyboardInterrupt()), is_interruption(ImportError())
    (True, False)
    """
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, KeyboardInterrupt):
        behind = behind.__cause__ or behind.__context__
    return behind is not None


def interrupted(name: str) -> int:
    """Report that a command was interrupted and return its exit code."""
    complain(f"{name}: interrupted; nothing was written")
    return 130


def say(text: str) -> None:
    """Print a text on standard output and flush it; do nothing where the reader of a pipe is gone.

    Raises
    ------
    OnnxRematError
        The text cannot be written, for example to a full disk.
    """
    try:
        print(_visible(text), flush=True)
    except OSError as error:
        # Otherwise, flushing the rest of the buffer would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise OnnxRematError(f"cannot write to standard output: {error.strerror}") from error


def complain(text: str, end: str = "\n") -> None:
    """Print a text on standard error where that is possible; words of more than 300 characters are shortened."""
    text = re.sub(r"\S{301,}", lambda word: f"{word[0][:200]}...{word[0][-50:]}", _visible(text))
    with contextlib.suppress(OSError):
        print(text, end=end, file=sys.stderr, flush=True)


def _nowhere() -> Any:
    return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123 - for the rest of the process


class Terminated(BaseException):
    """The process received SIGTERM or SIGHUP."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    def die(self) -> int:
        """End the process by the same signal, so that its sender sees that status."""
        signal.signal(self.number, signal.SIG_DFL)
        os.kill(os.getpid(), self.number)
        return 128 + self.number


@contextmanager
def terminable() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM and SIGHUP within the block: scratch folders are removed, child processes ended.

    Python only prints an exception raised where none can be caught, in a finalizer for example: such a signal is sent
    again.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    def again(unraisable: Any) -> None:
        error = unraisable.exc_value
        if not isinstance(error, KeyboardInterrupt | Terminated):
            forgets(unraisable)
            return
        number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else error.number
        threading.Timer(0.01, signal.raise_signal, [number]).start()  # later: now it would be raised in this hook

    forgets, sys.unraisablehook = sys.unraisablehook, again

    before = {}
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        with contextlib.suppress(ValueError):  # raised outside the main thread, which handles signals
            if number is not None and signal.getsignal(number) == signal.SIG_DFL:  # respect nohup
                before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        sys.unraisablehook = forgets
        for number, handler in before.items():
            signal.signal(number, handler)
