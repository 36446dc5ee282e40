"""Processes forked from one that has imported what opening a session needs: a fresh Python imports for over a second.

Each is a process of its own still: what a test changes in its own process does not reach it, its memory goes with it,
and it may crash. `warm_processes` puts `WarmChild` in the place of `child.Child` where sessions, steps of several
ranks and kernels are prepared; ``python -m tests.support.warm FD`` is the process that forks. Processes that tests
start themselves, but for ranks, and those where what libraries read of the environment was changed, prepare them in
fresh ones as users do.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from onnx_remat.distributed import parts
from onnx_remat.fuse import machine_code
from onnx_remat.process import child
from onnx_remat.process.child import Child
from onnx_remat.session import plan_session


def _of_libraries(environment: Mapping[str, str]) -> dict[str, str]:
    """What libraries read of the environment when they are loaded."""
    read = ("GLIBC_", "LD_", "MALLOC_", "NUMBA_", "OMP_", "ORT_", "PYTHONHASHSEED")
    return {name: value for name, value in environment.items() if name.startswith(read) and name not in child.QUIET}


class Forked:
    """As much of `subprocess.Popen` as `Child` uses, of a process that another one has forked."""

    def __init__(self, pid: int, ends: socket.socket, stdin: int, stdout: int, stderr: int) -> None:
        self.pid, self._ends = pid, ends
        self.stdin, self.stdout, self.stderr = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb"), os.fdopen(stderr, "rb")
        self._status: int | None = None

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status."""
        if self._status is None:
            self._ends.settimeout(timeout)
            try:
                self._status = int(self._ends.recv(64))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("a fork", timeout or 0) from None
        return self._status

    def kill(self) -> None:
        """End it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, 9)


class Forks:
    """The process that forks, started when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._libraries: dict[str, str] = {}
        self._running: tuple[subprocess.Popen[bytes], socket.socket] | None = None

    def begin(self) -> None:
        """Note what libraries will find in the environment: the process that forks imports them in this one."""
        self._libraries = _of_libraries(os.environ)

    def can(self, environment: Mapping[str, str]) -> bool:
        """Whether libraries would find in a fork the environment that they find in a fresh process."""
        return hasattr(socket, "SOCK_SEQPACKET") and _of_libraries(environment) == self._libraries

    def fork(self, environment: Mapping[str, str]) -> Forked:
        """A process that answers requests as `child.main` does."""
        here = json.dumps({"folder": str(Path.cwd()), "environment": dict(environment)}).encode()
        (read, stdin), (stdout, write), (errors, said) = os.pipe(), os.pipe(), os.pipe()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with self._lock:
            socket.send_fds(self._started(), [here], [read, write, said, theirs.fileno()])
        for file in (read, write, said):
            os.close(file)
        theirs.close()
        return Forked(int(ours.recv(64)), ours, stdin, stdout, errors)

    def _started(self) -> socket.socket:
        if self._running is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tests.support.warm", str(theirs.fileno())], pass_fds=[theirs.fileno()],
                env=os.environ | child.QUIET | {"PYTHONPATH": paths},
            )  # fmt: skip
            theirs.close()
            self._running = process, ours
        return self._running[1]

    def end(self) -> None:
        """End the process that forks."""
        if self._running is not None:
            process, ours = self._running
            ours.close()
            process.wait()
            self._running = None


FORKS = Forks()


class WarmChild(Child):
    """A `Child` that is forked where it can be."""

    def _started(self, command: list[str], environment: Mapping[str, str]) -> Any:
        return FORKS.fork(environment) if FORKS.can(environment) else super()._started(command, environment)


def _call(task: str, job: Mapping[str, Any]) -> Any:
    """`child.call`, forked where it can be."""
    with WarmChild() as process:
        return process.call(task, job, last=True)


@contextlib.contextmanager
def warm_processes() -> Iterator[None]:
    """Within the block, what is prepared in a process of its own is prepared in one forked from one that is warm."""
    FORKS.begin()
    with (
        mock.patch.object(plan_session, "Child", WarmChild),
        mock.patch.object(machine_code, "Child", WarmChild),
        mock.patch.object(parts, "child", SimpleNamespace(call=_call, Failed=child.Failed)),
    ):
        yield
    FORKS.end()


def _become(files: list[int]) -> None:
    """Answer requests in this process, which was forked, with some files as its standard ones, and end."""
    try:
        for standard, file in enumerate(files):
            os.dup2(file, standard)
            os.close(file)
        sys.argv = ["fork"]
        child.main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def _forked_here(_child: Child, _command: list[str], _environment: Mapping[str, str]) -> Any:
    """A process that a fork starts in its turn: a fork of it."""
    (read, stdin), (stdout, write), (errors, said) = os.pipe(), os.pipe(), os.pipe()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if not pid:
        for file in (stdin, stdout, errors):
            os.close(file)
        _become([read, write, said])
    for file in (read, write, said):
        os.close(file)
    _tell(pid, theirs)
    return Forked(pid, ours, stdin, stdout, errors)


def _tell(pid: int, whom: socket.socket) -> None:
    """Wait for a process in a thread, and tell its exit status."""

    def wait() -> None:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):
            whom.send(str(status).encode())
        whom.close()

    threading.Thread(target=wait, daemon=True).start()


def _serve(requests: socket.socket) -> None:
    """Fork a process for every request; tell its number, and later how it ended."""
    while True:
        message, files, *_ = socket.recv_fds(requests, 1 << 17, 4)
        if not message:
            return
        here = json.loads(message)
        ends = socket.socket(fileno=files.pop())
        pid = os.fork()
        if not pid:
            requests.close()
            ends.close()
            os.chdir(here["folder"])
            os.environ.clear()
            os.environ.update(here["environment"])
            _become(files)
        for file in files:
            os.close(file)
        ends.send(str(pid).encode())
        _tell(pid, ends)


def _warm_up() -> None:
    """Import what opening a session imports by and by, numba's code for arrays above all."""
    import onnxruntime  # noqa: F401

    from onnx_remat.memory import layout

    layout.load_greedy()
    layout.load_search()
    layout.load_later_searches()


if __name__ == "__main__":
    child.Child._started = _forked_here  # type: ignore[method-assign]
    _warm_up()
    _serve(socket.socket(fileno=int(sys.argv[1])))
