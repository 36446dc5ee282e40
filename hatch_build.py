"""Build hook of the wheel: the custom-op library of `onnx_remat.fuse`, where there is a C compiler.

Without one the wheel is plain Python, and the library is compiled at its first use, or sessions run unfused.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class FusedLibrary(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled library to the wheel; an editable install compiles it at its first use."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or version == "editable":
            return
        source = Path(self.root) / "onnx_remat" / "fuse" / "build.py"
        spec = importlib.util.spec_from_file_location("fused_build", source)
        assert spec is not None and spec.loader is not None
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        folder = Path(self.root) / "build" / "fused"
        if why_not := build.build(folder):
            self.app.display_warning(f"the wheel has no fused kernels: {why_not}")
            return
        name = build.library_name()
        build_data["force_include"][str(folder / name)] = f"onnx_remat/fuse/{name}"
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
