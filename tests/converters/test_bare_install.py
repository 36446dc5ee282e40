"""Without its frameworks, a converter says in one line which extra brings them."""

from __future__ import annotations

import subprocess
import sys

import pytest

FRAMEWORKS = ("onnx_ir", "onnxscript", "torch", "jax", "optax", "tensorflow", "tf2onnx")

_BARE = """
import sys
from importlib.machinery import PathFinder

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in MISSING else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
"""


def bare(missing: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that finds none of these packages."""
    return subprocess.run(
        [sys.executable, "-c", f"MISSING = {missing!r}{_BARE}{code}"], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("converter", "extra"),
    [("pytorch", "torch"), ("jax", "jax"), ("tensorflow", "tensorflow"), ("autodiff", "convert")],
)
def test_the_extra_is_named(converter, extra):
    """By an exception of ours that is an ImportError, too, in one line; also where the framework alone is missing."""
    name = f"onnx_remat.converters.{converter}"
    code = f"""
from onnx_remat.errors import OnnxRematError
try:
    import {name} as converter
    getattr(converter, "add_backward", None)
except OnnxRematError as error:
    assert isinstance(error, ImportError)
    print(error)
"""
    for missing in (FRAMEWORKS, (extra,) if extra in FRAMEWORKS else ("onnx_ir",)):
        done = bare(missing, code)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("\n") == 1
        assert f"is not installed: pip install 'onnx-remat[{extra}]'" in done.stdout


def test_so_does_the_command_line():
    code = """
import runpy
sys.argv = ["autodiff", "in.onnx", "out.onnx"]
runpy.run_module("onnx_remat.converters.autodiff", run_name="__main__")
"""
    done = bare(FRAMEWORKS, code)
    assert done.returncode == 4 and not done.stdout
    program = "python -m onnx_remat.converters.autodiff"
    assert done.stderr == f"{program}: error: onnx_ir is not installed: pip install 'onnx-remat[convert]'\n"


def test_the_package_itself_needs_none_of_them():
    done = bare((*FRAMEWORKS, "onnxruntime"), "import onnx_remat, onnx_remat.converters")
    assert done.returncode == 0, done.stderr
