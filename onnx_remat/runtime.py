"""Everything that touches ONNX Runtime: sessions, what it makes of a file, and measured peaks and times.

Sessions that are measured live in fresh processes (`onnx_remat.probe`), so that one run's memory does not hide
another's.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnx_remat.errors import ModelError, OnnxRematError, VerificationError

_PATIENCE = 40  # seconds, and one for every 50 nodes: symbolic inference may run for ever on a contradictory model

LEVELS = ("disable", "basic", "all")
"""Graph optimisation levels a written file must keep its promise under; "all" is the default."""


MOST_WEIGHTS = 512 * 2**20
"""Bytes of initializers up to which ONNX Runtime is shown a model with its weights, to see what it makes of it.

It writes the optimised model into one file, 2 GiB at most, and holds all weights in memory meanwhile. Larger ones are
shown as inputs, what it would fold of them foreseen (`view`); nothing is fused into them then.
"""


MOST_NODES = 20_000
"""Nodes up to which ONNX Runtime is shown a model: the time to load one grows faster than their number, 9 seconds at
10,800 and 40 at 21,600 (basic optimisations, a busy machine), and had not ended after 7 minutes at 109,000."""


RESOLUTION = 1 << 19
"""Bytes by which measured peaks of one file differ between processes: pages, and what threads keep for themselves."""


def available() -> bool:
    """Is ONNX Runtime installed?"""
    import importlib.util

    return importlib.util.find_spec("onnxruntime") is not None


def session_options(level: str = "all") -> Any:
    """Session options measured to help a rewritten model beyond what it promises by itself.

    Memory patterns are switched off. With them, ONNX Runtime keeps the arena of the first step and, from the second
    step on, one block of the whole plan's size besides: the process holds about twice the peak, at no gain in speed
    on the models measured.

    Parameters
    ----------
    level : str
        Graph optimisation level, one of `LEVELS`.

    Returns
    -------
    onnxruntime.SessionOptions

    Raises
    ------
    OnnxRematError
        onnxruntime is not installed.
    """
    import_runtime()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.enable_mem_pattern = False
    options.graph_optimization_level = _level(level)
    return options


def import_runtime() -> None:
    """Raise an error that says how to install ONNX Runtime where it is missing."""
    if not available():
        raise OnnxRematError("onnxruntime is not installed: pip install 'onnx-remat[cpu]' (or [gpu])")


def _level(level: str) -> Any:
    import onnxruntime

    name = {"disable": "ORT_DISABLE_ALL", "basic": "ORT_ENABLE_BASIC", "all": "ORT_ENABLE_ALL"}[level]
    return getattr(onnxruntime.GraphOptimizationLevel, name)


def optimized(model: onnx.ModelProto, folder: Path | None, level: str) -> onnx.ModelProto:
    """The graph ONNX Runtime will really run for `model`, its nodes in execution order.

    Raises
    ------
    ModelError
        ONNX Runtime cannot load the model.
    """
    import onnxruntime

    options = session_options(level)
    options.log_severity_level = 4
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as scratch:
        target = Path(scratch) / "optimized.onnx"
        options.optimized_model_filepath = str(target)
        source = write_beside(model, folder, Path(scratch))
        try:
            onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise ModelError(f"ONNX Runtime cannot load the model: {_first_line(error)}") from error
        return onnx.load(str(target), load_external_data=False)


def outputs(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], level: str = "disable") -> dict[str, np.ndarray]:
    """Run a model once on the CPU; every output by name.

    Raises
    ------
    ModelError
        ONNX Runtime cannot load or run the model.
    """
    options = session_options(level)
    import onnxruntime

    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        made = session.run(None, dict(feeds))
    except Exception as error:
        raise ModelError(f"ONNX Runtime cannot run the model: {_first_line(error)}") from error
    return dict(zip((value.name for value in model.graph.output), made, strict=True))


def write_beside(model: onnx.ModelProto, folder: Path | None, scratch: Path) -> Path:
    """Write a model to a scratch folder in which its external data files can be found."""
    from onnx_remat.model_io import external_files, write

    for location in external_files(model) if folder else ():
        assert folder is not None
        link = scratch / location
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            os.link(folder / location, link) if _same_device(folder, scratch) else link.symlink_to(folder / location)
    path = scratch / "model.onnx"
    write(model, folder, path)
    return path


def _same_device(a: Path, b: Path) -> bool:
    return a.stat().st_dev == b.stat().st_dev


def infer_shapes(model: onnx.ModelProto, names: Sequence[str]) -> dict[str, tuple[str, list[int | str | None]]]:
    """Element type (as in ``tensor(float)``) and shape of values, as ONNX Runtime infers them when it loads a model.

    Its schemas know its own contrib ops. Empty where it is not installed or cannot load the model.
    """
    if not available():
        return {}
    import onnxruntime

    asking = onnx.ModelProto()
    asking.CopyFrom(model)
    have = {value.name for value in model.graph.output}
    asking.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in have)
    options = session_options("disable")
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(asking.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:
        return {}  # whether it should have loaded is for `optimized` to say
    return {value.name: (value.type, value.shape) for value in session.get_outputs() if value.name in names}


def infer_shapes_symbolically(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """ONNX Runtime's symbolic shape inference on a model; None where it is not installed or gives up."""
    if not available():
        return None
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as scratch:
        source, target = Path(scratch) / "in.onnx", Path(scratch) / "out.onnx"
        source.write_bytes(model.SerializeToString())
        # In a process of its own: on failure it leaves a dump in the current folder.
        try:
            done = subprocess.run(
                [sys.executable, "-m", "onnxruntime.tools.symbolic_shape_infer", "--auto_merge",
                 "--input", str(source), "--output", str(target)],
                cwd=scratch, capture_output=True, check=False, timeout=_PATIENCE + len(model.graph.node) / 50,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return None
        return onnx.load(target) if done.returncode == 0 and target.exists() else None


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a fresh process saw of one model.

    Attributes
    ----------
    peak_bytes : int
        Inputs, initializers and the largest rise of resident memory over the runs.
    executed : tuple of str
        Node names in the order they ran; empty when not asked for.
    """

    peak_bytes: int
    executed: tuple[str, ...]


def measure(
    path: Path,
    level: str = "all",
    *,
    default: bool = False,
    steps: int = 1,
    outputs: Path | None = None,
    dims: Mapping[str, int] | None = None,
    threads: int = 0,
    trace: bool = False,
) -> Measurement:
    """Run a model in a fresh process and read its peak memory, step times and executed order.

    Session and inputs are built and the model runs once, so that code and threads are in place; the kernel's
    high-water mark of the process is reset and the model runs `steps` times. The rise of resident memory, plus
    inputs and initializers, is the peak. Linux only.

    Parameters
    ----------
    path : Path
        An ONNX file.
    level : str
        One of `LEVELS`.
    default : bool
        Keep the CPU memory arena and memory patterns that sessions have by default: the process then holds what the
        allocator keeps in reserve besides. Otherwise every buffer goes back to the system and the figure is the
        plan's own.
    steps : int
        Runs over which the peak is taken.
    outputs : Path, optional
        Where to store the outputs of the first run (``.npz``).
    dims : mapping, optional
        Sizes of symbolic dimensions.
    threads : int
        Intra-op threads, 0 for ONNX Runtime's default.
    trace : bool
        Also read the executed order from a profile.

    Raises
    ------
    VerificationError
        The process failed: the message is the last line of its error.
    """
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as scratch:
        answer = _probe("measure", {
            "path": str(path), "level": level, "default": default, "steps": steps, "dims": dict(dims or {}),
            "threads": threads, "outputs": str(outputs or ""), "optimized": str(Path(scratch) / "optimized.onnx"),
            "profile": str(Path(scratch) / "profile") if trace else "",
        })  # fmt: skip
        executed = _executed(Path(answer["profile"])) if trace else ()
    return Measurement(answer["peak_bytes"], executed)


def race(
    path: Path,
    rival: Path,
    *,
    level: str = "all",
    runs: int = 9,
    dims: Mapping[str, int] | None = None,
    threads: int = 0,
    provider: str = "cpu",
) -> tuple[float, float]:
    """Median seconds of one step of two models, steps taken in turns in one fresh process, default session options."""
    job = {
        "path": str(path), "rival": str(rival), "level": level, "runs": runs, "dims": dict(dims or {}),
        "threads": threads, "provider": provider,
    }  # fmt: skip
    first, second = _probe("race", job)["seconds"]
    return statistics.median(first), statistics.median(second)


@dataclass(frozen=True, slots=True)
class Training:
    """How `train` trains: see `onnx_remat.training` and `benchmark`."""

    steps: int
    loss: str
    dims: Mapping[str, int]
    state: str = ""
    level: str = "all"
    threads: int = 0
    provider: str = "cpu"


@dataclass(frozen=True, slots=True)
class Trained:
    """What a fresh process saw while training: peak in bytes, the loss of every step; `driver_bytes` is what the CUDA
    driver counted to the process (its context included), to check the peak against."""

    peak_bytes: int
    losses: tuple[float, ...]
    driver_bytes: int = 0


PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
"""Execution providers by the names the command line takes."""


def check_provider(provider: str) -> None:
    """Raise an error that says what to install where ONNX Runtime lacks an execution provider."""
    import_runtime()
    import onnxruntime

    if PROVIDERS[provider] not in onnxruntime.get_available_providers():
        raise OnnxRematError(
            f"ONNX Runtime has no {PROVIDERS[provider]} here: pip install 'onnx-remat[gpu]' in place of [cpu], "
            "on a machine with an NVIDIA GPU and CUDA"
        )


def train(path: Path, how: Training) -> Trained:
    """Train a model in a fresh process, arena off on the CPU; on CUDA the peak is bisected (see `onnx_remat.cuda`).

    Raises
    ------
    VerificationError
        The process failed: the message is the last line of its error.
    """
    job: dict[str, Any] = {"path": str(path), "default": False, "patient": True, **asdict(how)}
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as scratch:
        job["optimized"] = str(Path(scratch) / "optimized.onnx")
        answer = _probe("train", job)
        peak = answer["peak_bytes"]
        if how.provider == "cuda":
            from onnx_remat import cuda

            short = job | {"steps": 3}
            peak = cuda.smallest_limit(lambda limit: _runs_within(short, limit), cuda.total_memory())
    return Trained(peak, tuple(answer["losses"]), answer["driver_bytes"])


def _runs_within(job: dict[str, Any], limit: int) -> bool:
    """Does a training run keep a limit of device memory? Failures other than for lack of memory are raised."""
    from onnx_remat.cuda import OUT_OF_MEMORY

    try:
        _probe("train", job | {"gpu_limit": limit})
    except VerificationError as error:
        if any(sign in str(error) for sign in OUT_OF_MEMORY):
            return False
        raise
    return True


def profile(
    path: Path, level: str, *, steps: int, dims: Mapping[str, int] | None = None, threads: int = 0
) -> tuple[list[dict[str, Any]], str]:
    """Events of ONNX Runtime's profiler over a warm-up and `steps` steps, and its node memory statistics (CSV)."""
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as scratch:
        statistics_file = Path(scratch) / "statistics.csv"
        answer = _probe("profile", {
            "path": str(path), "level": level, "steps": steps, "dims": dict(dims or {}), "threads": threads,
            "profile": str(Path(scratch) / "profile"), "statistics": str(statistics_file),
        })  # fmt: skip
        table = statistics_file.read_text() if statistics_file.exists() else ""
        return json.loads(Path(answer["profile"]).read_text()), table


def _probe(task: str, job: dict[str, Any]) -> dict[str, Any]:
    # Otherwise glibc keeps freed blocks of up to 32 MB in its heap, and resident memory does not fall.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-m", "onnx_remat.probe"],
        input=json.dumps({"task": task, **job}), capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["killed (out of memory?)"]
        raise VerificationError(f"running {Path(job['path']).name} failed: {lines[-1]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _executed(profile: Path) -> tuple[str, ...]:
    """Node names of the first run in a profile, in the order they started."""
    events = json.loads(profile.read_text())
    runs = [e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
    names = [e["name"].removesuffix("_kernel_time") for e in sorted(runs, key=lambda e: e["ts"])]
    return tuple(dict.fromkeys(names))


def _first_line(error: Exception) -> str:
    """What ONNX Runtime complains of, without its error codes, scratch paths and C++ signatures."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    for clutter in _CLUTTER:
        line = re.sub(clutter, "", line)
    return line[:300]


_CLUTTER = (r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", r"^Load model from \S+ failed:", r"^/\S+ .*?\(.*?\) (?=[A-Z])")
