"""This process's own packages, with onnxruntime-gpu in onnxruntime's place and the fake device under it.

    subprocess.run([sys.executable, "-c", ...], env=here.environment())

The whole product runs so as if there were a device: every process that it starts inherits the environment.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.fake_cuda import run


def why_not() -> str:
    """Why nothing can run so here; empty if it can."""
    if why := run.why_not():
        return why
    if not _packages().is_dir():
        return f"the environment with onnxruntime-gpu is not of Python {sys.version_info[0]}.{sys.version_info[1]}"
    return ""


def environment(**settings: int) -> dict[str, str]:
    """Variables for a process; `settings` as `device.Device.set` takes them, for `books` to make."""
    overlay = run.environment() / "overlay"
    overlay.mkdir(exist_ok=True)
    link = overlay / "onnxruntime"
    if not link.is_symlink():
        link.symlink_to(_packages() / "onnxruntime")
    stated = ",".join(f"{name}={value}" for name, value in settings.items())
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "PYTHONPATH": os.pathsep.join([str(overlay), str(run.ROOT)]), "LD_LIBRARY_PATH": str(run.libraries()),
        "ORT_DISABLE_TELEMETRY": "1", "FAKE_CUDA_SETTINGS": stated,
    }  # fmt: skip


def ask(module: str, job: Any, **settings: int) -> Any:
    """What a module answers that is run so: JSON in, JSON out."""
    done = subprocess.run(
        [sys.executable, "-m", module], cwd=run.ROOT, input=json.dumps(job), env=environment(**settings),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise run.Failed(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout.splitlines()[-1])


def _packages() -> Path:
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return run.environment() / "lib" / version / "site-packages"


class Books:
    """The fake device of this process, whose variables are those of `environment`."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libfake.so")
        for setting in filter(None, os.environ["FAKE_CUDA_SETTINGS"].split(",")):
            name, _, value = setting.partition("=")
            ctypes.c_int64.in_dll(self._library, f"fake_{name}").value = int(value)

    def read(self, name: str) -> int:
        """``live``, ``peak``, ``waits``."""
        return ctypes.c_int64.in_dll(self._library, f"fake_{name}").value

    def compute(self) -> None:
        """From now on, kernels that the driver loads as PTX are computed; those of the provider's library are not."""
        from tests.support.fake_cuda import ptx

        addresses = {n: ctypes.cast(getattr(self._library, n), ctypes.c_void_p).value or 0 for n in ptx.FUNCTIONS}
        kind = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)
        self._translate = kind(lambda text: ptx.compiled(text.decode(), addresses))
        ctypes.c_void_p.in_dll(self._library, "fake_translate").value = ctypes.cast(
            self._translate, ctypes.c_void_p
        ).value

    def reset(self) -> None:
        """Start again: the peak is what is live now."""
        self._library.fake_reset()
