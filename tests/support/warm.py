"""Opening processes forked from one that has imported what they need: a fresh Python imports for more than a second.

Each is a process of its own still: what a test changes in its own process does not reach it, its memory goes with it,
and it may crash. `Opener.run` takes the place of `subprocess.run` in `opening.open_step`; ``python -m
tests.support.warm FD`` is the process that forks. Processes that tests start themselves, and those for whose libraries
the environment was changed, open sessions in fresh ones as users do.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from onnx_remat.process import worker


class Opener:
    """The process that forks, started when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began_with = _of_libraries()
        self._forks: tuple[subprocess.Popen[bytes], socket.socket] | None = None

    def run(self, command: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        """Run the opening process as `subprocess.run` would."""
        if not hasattr(socket, "SOCK_SEQPACKET") or _of_libraries() != self._began_with:
            return subprocess.run(command, **how)
        with self._lock, tempfile.TemporaryFile("w+") as job, _file() as out, _file() as err:
            job.write(how["input"])
            job.seek(0)
            try:
                here = json.dumps({"folder": str(Path.cwd()), "environment": how["env"]}).encode()
                socket.send_fds(self._started(), [here], [job.fileno(), out.fileno(), err.fileno()])
                answer = self._started().recv(64)
            except BaseException:  # an interrupt: the answer to this request must not be taken for the next one's
                self._forks = None
                raise
            assert answer, "the process that forks has gone"
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(command, int(answer), out.read(), err.read())

    def _started(self) -> socket.socket:
        if self._forks is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "tests.support.warm", str(theirs.fileno())], pass_fds=[theirs.fileno()],
                env=os.environ | worker.QUIET | {"PYTHONPATH": paths},
            )  # fmt: skip
            theirs.close()
            self._forks = child, ours
        return self._forks[1]

    def end(self) -> None:
        """End the process that forks."""
        if self._forks is not None:
            child, ours = self._forks
            ours.close()
            child.wait()
            self._forks = None


def _of_libraries() -> dict[str, str]:
    """What libraries read of the environment when they are loaded."""
    read = ("GLIBC_", "LD_", "MALLOC_", "NUMBA_", "OMP_", "ORT_", "PYTHONHASHSEED")
    return {name: value for name, value in os.environ.items() if name.startswith(read)}


def _file() -> IO[str]:
    return tempfile.TemporaryFile("w+")


class Forked:
    """A worker that is forked: as much of `subprocess.Popen` as `worker` uses."""

    def __init__(self) -> None:
        (read, self_in), (self_out, write) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self_in)
            os.close(self_out)
            _become([read, write], worker.main)
        os.close(read)
        os.close(write)
        self.stdin, self.stdout = os.fdopen(self_in, "wb"), os.fdopen(self_out, "rb")
        self._status: int | None = None

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""
        return self._ended(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status; it is about to end."""
        status = self._ended(0)
        assert status is not None
        return status

    def kill(self) -> None:
        """End it."""
        os.kill(self.pid, 9)

    def _ended(self, how: int) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, how)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status


def _become(files: list[int], main: Callable[[], None]) -> None:
    """Run `main` in this process, which was forked, with some files as its standard ones, and end."""
    status = 1
    try:
        for standard, file in enumerate(files):
            os.dup2(file, standard)
        main()
        sys.stdout.flush()
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _serve(requests: socket.socket) -> None:
    """Fork an opening process for every request, and say with which status it ended."""
    from onnx_remat.measure import opening_process

    while True:
        message, files, *_ = socket.recv_fds(requests, 1 << 18, 3)
        if not message:
            return
        child = os.fork()
        if not child:
            requests.close()
            here = json.loads(message)
            os.environ.clear()
            os.environ.update(here["environment"])
            os.chdir(here["folder"])
            _become(files, opening_process.main)
        for file in files:
            os.close(file)
        requests.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())


def _warm_up() -> None:
    """Import what opening a session imports by and by, numba's code for arrays above all."""
    import onnxruntime  # noqa: F401

    from onnx_remat.memory import layout

    layout.load_compiled()


if __name__ == "__main__":
    worker.spawn = lambda *_, **__: Forked()  # type: ignore[assignment]
    _warm_up()
    _serve(socket.socket(fileno=int(sys.argv[1])))
