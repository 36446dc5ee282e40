"""Many jobs in a few processes, of which each job may crash or hang its own."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

_context = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Died:
    """A job without an answer, and why: an exception, a signal, an exit status, or the limit of time."""

    cause: str


def answers(
    function: Callable[[Any], Any], jobs: Sequence[Any], processes: int = 2, seconds: float = 60.0
) -> Iterator[tuple[Any, Any]]:
    """Call a function of one argument for every job, in processes that survive from job to job.

    Parameters
    ----------
    function : callable
        Of a module, since processes are started again.
    jobs : sequence
    processes : int
    seconds : float
        That a job may take; its process is then ended. The first job of a process may take five times as long.

    Yields
    ------
    job, answer
        As they come: what the function returns, or `Died`.
    """
    left: SimpleQueue[Any] = SimpleQueue()
    done: SimpleQueue[Any] = SimpleQueue()
    for job in jobs:
        left.put(job)

    def work() -> None:
        child: _Child | None = None
        while not left.empty():
            job = left.get()
            limit = seconds if child else 5 * seconds
            child = child or _Child(function)
            answer = child.ask(job, limit)
            if not child.lives():
                child = None
            done.put((job, answer))
        if child:
            child.end()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(processes, len(jobs)))]
    for thread in threads:
        thread.start()
    for _ in jobs:
        yield done.get()


class _Child:
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._pipe, there = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(function, there), daemon=True)
        self._process.start()
        there.close()

    def ask(self, job: Any, seconds: float) -> Any:
        try:
            self._pipe.send(job)
            if self._pipe.poll(seconds):
                return self._pipe.recv()
            cause = f"no answer in {seconds:g} seconds"
        except (EOFError, OSError):
            self._process.join(10)
            status = self._process.exitcode or 0
            cause = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        self.end()
        return Died(cause)

    def lives(self) -> bool:
        return self._process.is_alive()

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(function: Callable[[Any], Any], pipe: Connection) -> None:
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        try:
            answer = function(job)
        except Exception as error:
            answer = Died(f"{type(error).__name__}: {error}".partition("\n")[0])
        try:
            pipe.send(answer)
        except BrokenPipeError:  # nobody waits any more
            return
