"""Measure peaks, times and losses of models on ONNX Runtime, each in a fresh process (`onnx_remat.measure.probe`).

In one process, the memory of an earlier run would hide that of a later one. Throughout this module, `python` is the
interpreter of the fresh process: that of another environment runs models on that environment's ONNX Runtime, for
example onnxruntime-training. That environment needs onnx and numpy, not onnx_remat.
"""

from __future__ import annotations

import json
import mmap
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from onnx_remat import files
from onnx_remat.errors import UsageError, VerificationError
from onnx_remat.ort.executed import Executed
from onnx_remat.ort.kernels.registry import kernels_of
from onnx_remat.process import child
from onnx_remat.process.child import QUIET, Limit
from onnx_remat.session.heap import ALIGNMENT

RESOLUTION = 1 << 19
"""Bytes by which measured peaks of one file differ between processes, because of threads and the heap."""

_BOOKKEEPING_PER_NODE = 126
"""Bytes of small blocks that ONNX Runtime has allocated per node at the peak, without values below `LARGE_BLOCK`.

Counted with a hook of malloc on thirteen steps of 134 to 4,742 nodes (1.31.1): 99 to 263, half of them 123 to 136.
"""


def beyond_tensors(executed: Executed) -> int:
    """Predict the bytes by which the resident memory of a measured process exceeds its tensors at the peak.

    `measure` maps every block of `LARGE_BLOCK` bytes or more separately, so that it returns to the system when it is
    freed. Such a block takes whole pages, the first of which also contains its header: a value of 64 kB takes 68 kB.
    ONNX Runtime's bookkeeping for the step is added. Neither is a tensor, and neither exists where one slab contains
    all values.
    """
    timeline = executed.timeline
    page = mmap.PAGESIZE
    whole = -(-(timeline.size + ALIGNMENT) // page) * page
    excess = np.where(timeline.size >= LARGE_BLOCK, whole - timeline.size, 0)
    steps = len(timeline.step_bytes)
    change = np.zeros(steps + 1, np.int64)
    np.add.at(change, timeline.start, excess)
    np.add.at(change, timeline.end + 1, -excess)
    resident = timeline.step_bytes + np.cumsum(change)[:steps]
    return int(resident.max(initial=timeline.peak)) - timeline.peak + _BOOKKEEPING_PER_NODE * steps


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measurement of one model in a fresh process.

    Attributes
    ----------
    peak_bytes : int
        Inputs, initializers and the largest increase of resident memory over the runs.
    executed : tuple of str
        Node names in execution order; empty unless requested with `trace`.
    """

    peak_bytes: int
    executed: tuple[str, ...]


def measure(
    path: Path,
    level: str = "all",
    *,
    default: bool = False,
    patterns: bool = True,
    steps: int = 1,
    outputs: Path | None = None,
    dims: Mapping[str, int] | None = None,
    threads: int = 0,
    trace: bool = False,
    feeds: str = "plain",
    provider: str = "cpu",
    python: str = sys.executable,
) -> Measurement:
    """Run a model in a fresh process and read its peak memory, step times and executed order.

    The process opens the session, creates the inputs and runs the model once, so that code and threads are resident. It
    then resets the kernel's high-water mark and runs the model `steps` times. The peak is the increase of resident
    memory, plus inputs and initializers. Linux only.

    Parameters
    ----------
    path : Path
        An ONNX file.
    level : str
        One of `LEVELS`.
    default : bool
        Keep the CPU memory arena and memory patterns that sessions have by default: the measurement then includes the
        allocator's reserves. Otherwise every buffer returns to the system, and the measurement is the plan's peak.
    patterns : bool
        With `default`, also keep memory patterns; `session_options()` does not.
    steps : int
        Runs over which the peak is taken.
    outputs : Path, optional
        Where to store the outputs of the first run (``.npz``).
    dims : mapping, optional
        Sizes of symbolic dimensions.
    threads : int
        Intra-op threads, 0 for ONNX Runtime's default.
    feeds : str
        One of `probe.FEEDS`.
    trace : bool
        Also read the executed order from a profile.
    provider : str
        One of `registry.PROVIDERS`; this does not measure a device's memory, `train` does.

    Raises
    ------
    VerificationError
        The process failed: the message is the last line of its error.
    """
    with files.scratch() as scratch:
        answer = _probe(python, "measure", {
            "path": str(path), "level": level, "default": default, "patterns": patterns, "steps": steps,
            "dims": dict(dims or {}), "threads": threads, "outputs": str(outputs or ""), "feeds": feeds,
            "optimized": str(scratch / "optimized.onnx"), "patient": True,
            "profile": str(scratch / "profile") if trace else "", **session_job(provider),
        })  # fmt: skip
        executed = _executed(Path(answer["profile"])) if trace else ()
    return Measurement(answer["peak_bytes"], executed)


def by_session(
    path: Path,
    outputs: Sequence[Path],
    level: str = "all",
    *,
    dims: Mapping[str, int] | None = None,
    donate: bool | Mapping[str, str] = True,
    threads: int = 0,
    provider: str = "cpu",
) -> tuple[str, ...]:
    """Run a step with `session.session.Session` in a fresh process, on the feeds of `measure`, once per output file.

    Returns
    -------
    tuple of str
        Inputs that were overwritten although no output renews them.

    Raises
    ------
    VerificationError
        The process failed: the message is the last line of its error.
    """
    answer = _probe(sys.executable, "by_session", {
        "path": str(path), "outputs": [str(path) for path in outputs], "level": level, "dims": dict(dims or {}),
        "donate": donate if isinstance(donate, bool) else dict(donate), "threads": threads, "provider": provider,
        "feeds": "plain", **session_job(provider),
    })  # fmt: skip
    return tuple(answer["changed"])


def peak_under(budget: int, measured: Callable[[], Measurement]) -> int:
    """Return the peak of `measured`; measure again if it is above `budget`, since disturbances only increase a peak."""
    peak = measured().peak_bytes
    return peak if peak <= budget else min(peak, measured().peak_bytes)


def race(
    path: Path,
    rival: Path,
    *,
    level: str = "all",
    runs: int = 9,
    dims: Mapping[str, int] | None = None,
    threads: int = 0,
    provider: str = "cpu",
    python: str = sys.executable,
) -> tuple[float, float]:
    """Return median seconds per step of two models, alternating in one fresh process with default session options."""
    job = {
        "path": str(path), "rival": str(rival), "level": level, "runs": runs, "dims": dict(dims or {}),
        "threads": threads, **session_job(provider),
    }  # fmt: skip
    first, second = _probe(python, "race", job)["seconds"]
    return statistics.median(first), statistics.median(second)


@dataclass(frozen=True, slots=True)
class Training:
    """Arguments of `train`: see `onnx_remat.session.training` and `benchmark`."""

    steps: int
    loss: str
    dims: Mapping[str, int]
    state: str = ""
    level: str = "all"
    threads: int = 0
    provider: str = "cpu"
    python: str = sys.executable


@dataclass(frozen=True, slots=True)
class Trained:
    """Measurement of training in a fresh process: peak in bytes, the loss of every step; `driver_bytes` is the CUDA
    driver's count for the process (its context included), to compare with the peak."""

    peak_bytes: int
    losses: tuple[float, ...]
    driver_bytes: int = 0


def train(path: Path, how: Training) -> Trained:
    """Train a model in a fresh process, on the CPU without the arena; on CUDA bisect the peak (see `session.device`).

    Raises
    ------
    VerificationError
        The process failed: the message is the last line of its error.
    """
    job: dict[str, Any] = {
        "path": str(path),
        "default": False,
        "patient": True,
        **asdict(how),
        **session_job(how.provider),
    }
    with files.scratch() as scratch:
        job["optimized"] = str(scratch / "optimized.onnx")
        answer = _probe(how.python, "train", job)
        peak = answer["peak_bytes"]
        if job["device"] != "cpu":
            from onnx_remat.memory.arena import MOST_STEPS
            from onnx_remat.session import device

            # Outputs that are fed back fragment the arena, which grows for dozens of steps.
            short = job | {"steps": min(how.steps, MOST_STEPS)}
            peak = device.smallest_limit(lambda limit: _runs_within(short, limit), device.total_memory())
    return Trained(peak, tuple(answer["losses"]), answer["driver_bytes"])


def _runs_within(job: dict[str, Any], limit: int) -> bool:
    """Does a training run keep a limit of device memory? Raise failures other than out of memory."""
    from onnx_remat.session.device import OUT_OF_MEMORY

    try:
        _probe(job["python"], "train", job | {"gpu_limit": limit})
    except VerificationError as error:
        if any(sign in str(error) for sign in OUT_OF_MEMORY):
            return False
        raise
    return True


def profile(
    path: Path,
    level: str,
    *,
    steps: int,
    dims: Mapping[str, int] | None = None,
    threads: int = 0,
    provider: str = "cpu",
    python: str = sys.executable,
) -> list[dict[str, Any]]:
    """Return events of ONNX Runtime's profiler over a warm-up and `steps` steps."""
    with files.scratch() as scratch:
        answer = _probe(python, "profile", {
            "path": str(path), "level": level, "steps": steps, "dims": dict(dims or {}), "threads": threads,
            "profile": str(scratch / "profile"), **session_job(provider),
        })  # fmt: skip
        found: list[dict[str, Any]] = json.loads(Path(answer["profile"]).read_text())
        return found


def session_job(provider: str) -> dict[str, Any]:
    """Return the entries of a job for its execution providers and device."""
    kernels = kernels_of(provider)
    return {"providers": kernels.execution_providers, "device": kernels.device}


# Environment variables with which glibc returns freed blocks to the system. Otherwise it would keep blocks of up to
# 32 MB in its heap, and resident memory would not fall. DenseNet-121 has thousands below 64 kB; each block above the
# threshold takes whole pages.
LARGE_BLOCK = 16384
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": str(LARGE_BLOCK), "MALLOC_TRIM_THRESHOLD_": str(LARGE_BLOCK)}


@cache
def _check_interpreter(python: str) -> None:
    """Raise UsageError where `python` is not Python: another program may print nothing, or print for ever."""
    try:
        with subprocess.Popen(
            [python, "-c", "print('a Python')"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            printed = process.stdout.read(len("a Python"))
            process.kill()
    except (OSError, ValueError) as error:
        raise UsageError(f"{python!r} is not a Python interpreter: {getattr(error, 'strerror', error)}") from error
    if printed != b"a Python":
        raise UsageError(f"{python!r} is not a Python interpreter: it does not run Python")


SECONDS = 3600.0
"""Time limit of a process: a Loop node may not terminate. Its memory limit is the machine's memory."""


def _probe(python: str, task: str, job: dict[str, Any]) -> dict[str, Any]:
    if python != sys.executable:
        _check_interpreter(python)
    # Kernels on a device run synchronously: otherwise a profile would show the time of their launches.
    waiting = {"CUDA_LAUNCH_BLOCKING": "1"} if task == "profile" and job["device"] != "cpu" else {}
    limit = Limit(SECONDS, clock=True)
    try:
        answer: dict[str, Any] = child.call(
            f"onnx_remat.measure.probe:{task}", {"job": job}, limit, QUIET | GIVES_BACK | waiting, python
        )
    except OSError as error:
        raise UsageError(f"{python!r} is not a Python interpreter: {error.strerror}") from error
    except child.Failed as failed:
        why = f"failed: {failed.line or 'killed (out of memory?)'}"
        if failed.how == "time":
            why = f"did not finish within {SECONDS:.0f} s"
        raise VerificationError(f"running {Path(job['path']).name} {why}") from None
    return answer


def _executed(profile: Path) -> tuple[str, ...]:
    """Return the node names of the first run in a profile, in the order they started."""
    events = json.loads(profile.read_text())
    runs = [e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
    names = [e["name"].removesuffix("_kernel_time") for e in sorted(runs, key=lambda e: e["ts"])]
    return tuple(dict.fromkeys(names))
