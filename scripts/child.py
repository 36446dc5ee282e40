"""Work in fresh processes: a function called once, or steps taken in turns, memory and time measured in one way.

Functions are those of modules; arguments and answers are as `onnx_remat.process.child` takes them. *Memory* is the
process's highest resident memory, its interpreter and libraries included; *cpu* the seconds of all its threads; *wall*
is from its start to its end.
"""

from __future__ import annotations

import importlib
import io
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx_remat.process import child
from onnx_remat.process.cache import cache_folder

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
        job = _job(function, arguments)
        answer, memory, cpu = child.call(f"{__name__}:measured", job, _limit(seconds), environment)
    except child.Failed as failed:
        raise Failed(_why(failed, seconds)) from None
    return Ran(answer, memory, cpu, time.monotonic() - began)


_PAUSE = 0.1
"""Seconds before a step: threads of the process before spin for a while after theirs."""


def answered(
    function: Callable[..., Mapping[str, Any]], *arguments: Any, seconds: float, environment: Mapping[str, str] = {}
) -> dict[str, Any]:
    """What a function answers that is called in a fresh process, or its ``error``."""
    try:
        return dict(call(function, *arguments, seconds=seconds, environment=environment).answer)
    except Failed as failed:
        return {"error": str(failed)[-300:]}


class Stepper:
    """A process that takes a step when it is asked to; `first` is what its function said besides the step.

    With `seconds`, neither may take longer.
    """

    def __init__(
        self, name: str, function: Callable[..., tuple[Any, Callable[[], Any]]], *arguments: Any,
        seconds: float | None = None,
    ) -> None:  # fmt: skip
        self.name, self.times, self.cpus, self.said = name, list[float](), list[float](), list[Any]()
        self._seconds = seconds
        self._process = child.Child(variables={})
        self.first = self._ask("prepared", _job(function, arguments))

    def step(self) -> Any:
        """Take a step and note its seconds, by the clock and of all threads; what it returned."""
        time.sleep(_PAUSE)
        seconds, cpu, said = self._ask("stepped", {})
        self.times.append(seconds)
        self.cpus.append(cpu)
        self.said.append(said)
        return said

    def _ask(self, task: str, job: Mapping[str, Any]) -> Any:
        try:
            return self._process.call(f"{__name__}:{task}", job, _limit(self._seconds))
        except child.Failed as failed:
            raise Failed(f"{self.name}: {_why(failed, self._seconds)}") from None

    def close(self) -> None:
        """End the process."""
        self._process.end(0)


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


@contextmanager
def empty_cache() -> Iterator[None]:
    """Within the block, the cache of kernels and plans starts empty; afterwards it has what it had before, too."""
    folder = cache_folder()
    if folder is None:
        raise OSError("there is no cache: its folder is not writable")
    with tempfile.TemporaryDirectory(prefix="onnx-remat-", dir=folder) as aside:
        for each in [*folder.glob("*.kernel"), *(folder / name for name in _ENTRIES if (folder / name).exists())]:
            each.rename(Path(aside) / each.name)
        try:
            yield
        finally:
            for name in _ENTRIES:
                shutil.rmtree(folder / name, ignore_errors=True)
            for each in Path(aside).iterdir():
                each.replace(folder / each.name)


_ENTRIES = ("exports", "plans", "sessions")


def command(*words: str) -> tuple[int, str]:
    """Exit code and output of onnx-remat, in this process."""
    from onnx_remat.app.cli import main as onnx_remat

    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = onnx_remat(list(words))
    return code, said.getvalue().strip()


def _limit(seconds: float | None) -> child.Limit | None:
    return None if seconds is None else child.Limit(seconds, clock=True)


def _why(failed: child.Failed, seconds: float | None) -> str:
    return f"took more than {seconds:g} s" if failed.how == "time" else str(failed)


def _job(function: Callable[..., Any], arguments: Sequence[Any]) -> dict[str, Any]:
    spec = sys.modules[function.__module__].__spec__  # names also the module that ``python -m`` runs as __main__
    assert spec is not None
    return {"function": f"{spec.name}:{function.__qualname__}", "arguments": arguments}


# ---- in the process ----

_steps: list[Callable[[], Any]] = []


def measured(function: str, arguments: Sequence[Any]) -> tuple[Any, int, float]:
    """Call a function; its answer, and what this process has taken: bytes, and seconds of computing."""
    from onnx_remat.measure.probe import resident

    return _called(function, arguments), resident("VmHWM"), time.process_time()


def prepared(function: str, arguments: Sequence[Any]) -> Any:
    """Call a function that makes a step, and keep the step; what else it returns."""
    first, step = _called(function, arguments)
    _steps.append(step)
    return first


def stepped() -> tuple[float, float, Any]:
    """Take the step that is kept; its seconds, by the clock and of all threads, and what it returned."""
    cpu, start = time.process_time(), time.perf_counter()
    said = _steps[-1]()
    return time.perf_counter() - start, time.process_time() - cpu, said


def _called(function: str, arguments: Sequence[Any]) -> Any:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(*arguments)
