"""Work in fresh processes: a function called once, or steps taken in turns, memory and time measured in one way.

Functions are those of modules, arguments and answers are JSON. *Memory* is the process's highest resident memory, its
interpreter and libraries included; *cpu* the seconds of all its threads; *wall* is from its start to its end.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Ran:
    """What a function returned, bytes, and seconds."""

    answer: Any
    memory: int
    cpu: float
    wall: float


class Failed(Exception):
    """A process ended with an error, whose last line this is, or took too long."""


def call(
    function: Callable[..., Any], *arguments: Any, seconds: float | None = None, environment: Mapping[str, str] = {}
) -> Ran:
    """Call a function in a fresh process.

    Raises
    ------
    Failed
        It raised, died, or took more than `seconds`.
    """
    began = time.monotonic()
    try:
        done = subprocess.run(
            _command("call", function, arguments), capture_output=True, text=True, check=False, cwd=ROOT,
            env=os.environ | environment, timeout=seconds,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise Failed(f"took more than {seconds:g} s") from error
    if done.returncode:
        raise Failed((done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1])
    answer, memory, cpu = json.loads(done.stdout.splitlines()[-1])
    return Ran(answer, memory, cpu, time.monotonic() - began)


class Stepper:
    """A process that takes a step when it is told to; `first` is what its function said besides the step."""

    def __init__(self, name: str, function: Callable[..., tuple[Any, Callable[[], Any]]], *arguments: Any) -> None:
        self.name, self.times = name, list[float]()
        self._process = subprocess.Popen(
            _command("steps", function, arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        self.first = self._answer()

    def step(self) -> None:
        """Take a step and note its seconds."""
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        self.times.append(self._answer())

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise Failed(f"{self.name}: the process ended")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


@contextmanager
def steppers(jobs: Sequence[tuple[Any, ...]]) -> Iterator[list[Stepper]]:
    """A process for each job, a name, a function and its arguments: started one after the other, all ended at last."""
    with ExitStack() as stack:
        made = []
        for job in jobs:
            made.append(Stepper(*job))
            stack.callback(made[-1].close)
        yield made


def in_turns(jobs: Sequence[tuple[Any, ...]], turns: int) -> list[Stepper]:
    """Steppers that have taken so many steps, one at a time and in turns, and have ended."""
    with steppers(jobs) as made:
        for _ in range(turns):
            for each in made:
                each.step()
    return made


def command(*words: str) -> tuple[int, str]:
    """Exit code and output of onnx-remat, in this process."""
    from onnx_remat.app.cli import main as onnx_remat

    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = onnx_remat(list(words))
    return code, said.getvalue().strip()


def _command(how: str, function: Callable[..., Any], arguments: Sequence[Any]) -> list[str]:
    where = f"{function.__module__}:{function.__qualname__}"
    return [sys.executable, "-m", "scripts.child", how, where, json.dumps(arguments)]


def main() -> None:
    """Do the work, in this process."""
    how, where, given = sys.argv[1:]
    module, _, name = where.partition(":")
    answer = getattr(importlib.import_module(module), name)(*json.loads(given))
    if how == "call":
        from onnx_remat.measure.probe import resident

        print(json.dumps([answer, resident("VmHWM"), time.process_time()]))
        return
    first, step = answer
    print(json.dumps(first), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        step()
        print(json.dumps(time.perf_counter() - start), flush=True)


if __name__ == "__main__":
    main()
