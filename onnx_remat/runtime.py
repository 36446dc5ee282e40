"""Everything that touches ONNX Runtime: sessions, what it makes of a file, and measured peaks and times.

Sessions that are measured live in fresh processes (`onnx_remat.probe`), so that one run's memory does not hide
another's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from onnx_remat.errors import OnnxRematError, VerificationError

LEVELS = ("disable", "basic", "all")
"""Graph optimisation levels a written file must keep its promise under; "all" is the default."""


def available() -> bool:
    """Is ONNX Runtime installed?"""
    import importlib.util

    return importlib.util.find_spec("onnxruntime") is not None


def session_options(level: str = "all") -> Any:
    """Session options measured to help a rewritten model beyond what it promises under default options.

    Returns
    -------
    onnxruntime.SessionOptions
        Without the CPU memory arena and memory patterns, whose rounding and fragmentation are the difference between
        the planned and the resident bytes.

    Raises
    ------
    OnnxRematError
        onnxruntime is not installed.
    """
    import_runtime()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.enable_cpu_mem_arena = False
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
    VerificationError
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
            raise VerificationError(f"ONNX Runtime cannot load the model: {_first_line(error)}") from error
        return onnx.load(str(target), load_external_data=False)


def write_beside(model: onnx.ModelProto, folder: Path | None, scratch: Path) -> Path:
    """Write a model to a scratch folder in which its external data files can be found."""
    from onnx_remat.model_io import external_files

    for location in external_files(model) if folder else ():
        assert folder is not None
        link = scratch / location
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            os.link(folder / location, link) if _same_device(folder, scratch) else link.symlink_to(folder / location)
    path = scratch / "model.onnx"
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path


def _same_device(a: Path, b: Path) -> bool:
    return a.stat().st_dev == b.stat().st_dev


def infer_shapes_symbolically(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """ONNX Runtime's symbolic shape inference on a model; None where it is not installed or gives up."""
    try:
        from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference
    except ImportError:
        return None
    try:
        inferred: onnx.ModelProto = SymbolicShapeInference.infer_shapes(model, auto_merge=True)
    except Exception:  # it raises bare Exceptions and assertion errors on what it does not know
        return None
    return inferred


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a fresh process saw of one model.

    Attributes
    ----------
    peak_bytes : int
        Inputs, initializers and the largest rise of resident memory during a run.
    run_seconds : float
        Median time of one run.
    executed : tuple of str
        Node names in the order they ran.
    outputs : str
        Path of an ``.npz`` with the outputs, in graph order, or "" when not asked for.
    """

    peak_bytes: int
    run_seconds: float
    executed: tuple[str, ...]
    outputs: str


def measure(
    path: Path,
    level: str = "all",
    *,
    arena: bool = False,
    runs: int = 1,
    outputs: Path | None = None,
    dims: dict[str, int] | None = None,
    threads: int = 0,
    trace: bool = False,
    warm: bool = True,
) -> Measurement:
    """Run a model in a fresh process and read its peak memory, step time and executed order.

    The peak follows this recipe: session and inputs are built, the kernel's high-water mark of the process is reset,
    the model runs once; the rise of resident memory, plus inputs and initializers, is the peak. Linux only.

    Parameters
    ----------
    path : Path
        An ONNX file.
    level : str
        One of `LEVELS`.
    arena : bool
        Use the CPU memory arena and memory patterns, as sessions do by default; otherwise the allocator returns every
        buffer to the system and the figure is the plan's own.
    runs : int
        Timed runs; the median counts.
    outputs : Path, optional
        Where to store the outputs of the first run.
    dims : dict, optional
        Sizes of symbolic dimensions.
    threads : int
        Intra-op threads, 0 for ONNX Runtime's default.
    trace : bool
        Also read the executed order from a profile.

    Raises
    ------
    VerificationError
        The process failed: the message is the first line of its error.
    """
    job = {
        "path": str(path), "level": level, "arena": arena, "runs": runs, "outputs": str(outputs or ""),
        "dims": dims or {}, "threads": threads, "trace": trace, "warm": warm,
    }  # fmt: skip
    # Without the threshold, glibc keeps freed blocks of up to 32 MB in its heap, and resident memory does not fall.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-m", "onnx_remat.probe"],
        input=json.dumps(job), capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["killed (out of memory?)"]
        raise VerificationError(f"running {path.name} failed: {lines[-1]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return Measurement(answer["peak_bytes"], answer["run_seconds"], tuple(answer["executed"]), job["outputs"])  # type: ignore[arg-type]


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
