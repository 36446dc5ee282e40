"""Build hook of the wheel: what is compiled when it is built, so that a first use need not.

The custom-op library of `onnx_remat.fuse` needs a C compiler, the planner's kernels need what they import. Without
these the wheel is plain Python, and both are compiled at their first use; sessions run unfused where there is no C
compiler then.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Compiled(BuildHookInterface):  # type: ignore[type-arg]
    """Adds compiled code to the wheel; an editable install compiles it at its first use."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or version == "editable":
            return
        tag = [*self._add_library(build_data), *self._add_kernels(build_data)]
        if tag:
            name = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{name}"

    def _add_library(self, build_data: dict[str, Any]) -> list[str]:
        """Add the custom-op library; return what was added."""
        source = Path(self.root) / "onnx_remat" / "fuse" / "build.py"
        spec = importlib.util.spec_from_file_location("fused_build", source)
        assert spec is not None and spec.loader is not None
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        folder = Path(self.root) / "build" / "fused"
        if why_not := build.build(folder):
            self.app.display_warning(f"the wheel has no fused kernels: {why_not}")
            return []
        name = build.library_name()
        build_data["force_include"][str(folder / name)] = f"onnx_remat/fuse/{name}"
        return [name]

    def _add_kernels(self, build_data: dict[str, Any]) -> list[str]:
        """Add the planner's kernels for this version of Python and of numba; return what was added."""
        if platform.machine() != "x86_64" or sys.platform != "linux":
            return []
        folder = Path(self.root) / "build" / "precompiled"
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "onnx_remat.rewrite.precompile", str(folder)]
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=False)
        if done.returncode:
            why_not = done.stderr.strip().rpartition("\n")[2]
            self.app.display_warning(f"the wheel has no precompiled kernels, so a first use takes longer: {why_not}")
            return []
        build_data["force_include"][str(folder)] = "onnx_remat/process/precompiled"
        return [folder.name]
