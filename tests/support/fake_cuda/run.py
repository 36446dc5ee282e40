"""From the tests' own process: is there an environment with onnxruntime-gpu, and what does a file do there?

The environment is the folder that ONNX_REMAT_GPU_ENV names, else `.gpu-env` in the repository: `scripts/gpu_env.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.fake_cuda.build import build, missing_tools

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, slots=True)
class Step:
    """What the second step of a file did on the fake device.

    Attributes
    ----------
    peak : int
        Bytes allocated at most, inputs and outputs included, weights not.
    waits : int
        Times the host waited for the device.
    copies : dict of str to (int, int)
        Per direction that had any ("up", "down", "device"), how many copies and bytes.
    order : tuple of (str, str, str)
        Name, op and execution provider of every node, as executed.
    held : int
        Bytes allocated after it, weights, inputs and outputs included: with an arena, all that this ever took.
    """

    peak: int
    waits: int
    copies: dict[str, tuple[int, int]]
    order: tuple[tuple[str, str, str], ...]
    held: int


class Failed(Exception):
    """A step that could not be run on the fake device, and the last line of why."""


def environment() -> Path:
    """Where the environment is, or would be."""
    return Path(os.environ.get("ONNX_REMAT_GPU_ENV", ROOT / ".gpu-env"))


def why_not() -> str:
    """Why nothing can run on the fake device here; empty if it can."""
    if not (environment() / "bin" / "python").exists():
        return "no environment with onnxruntime-gpu: python scripts/gpu_env.py .gpu-env"
    if missing := missing_tools():
        return f"the fake CUDA device is compiled: install {', '.join(missing)}"
    return ""


def version() -> str:
    """Of onnxruntime-gpu in the environment."""
    (found,) = environment().glob("lib/python*/site-packages/onnxruntime_gpu-*.dist-info")
    return found.name.removeprefix("onnxruntime_gpu-").removesuffix(".dist-info")


@cache
def libraries() -> Path:
    """The fake libraries for the environment, built once and kept in it."""
    (provider,) = environment().glob("lib/python*/site-packages/onnxruntime/capi/libonnxruntime_providers_cuda.so")
    return build(provider, environment() / "fake-cuda")


def run_step(
    path: Path, level: str = "ORT_ENABLE_ALL", arena: dict[str, str] | None = None, /, **settings: int
) -> Step:
    """Run two steps of a file, inputs of zeros, and report the second; `settings` as `device.Device.set` takes them.

    With `arena`, provider options, tensors lie in an arena; else each is an allocation of its own.
    """
    job = {"libraries": str(libraries()), "path": str(path.resolve()), "level": level, "settings": settings}
    job |= {} if arena is None else {"arena": arena}
    python = environment() / "bin" / "python"
    done = subprocess.run(
        [python, "-m", "tests.support.fake_cuda.step"], cwd=ROOT, input=json.dumps(job), capture_output=True, text=True,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"ORT_DISABLE_TELEMETRY": "1"}, check=False,
    )  # fmt: skip
    if done.returncode:
        raise Failed(done.stderr.strip().splitlines()[-1])
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["provider"] == "CUDAExecutionProvider", f"ran on {found['provider']}"
    copies = {where: (count, size) for where, (count, size) in found["copies"].items()}
    order = tuple(tuple(node) for node in found["order"])
    return Step(found["peak"], found["waits"], copies, order, found["held"])
