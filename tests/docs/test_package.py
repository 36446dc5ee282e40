"""What is published: a wheel that works in an environment of its own, without the checkout."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from onnx_remat.fuse import build

PRECOMPILED = "onnx_remat/process/precompiled/"

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def pythons() -> Iterator[tuple[str, str]]:
    """This interpreter, the oldest that is supported, and the newest, where they are on this machine, pyenv's too."""
    yield "{}.{}".format(*sys.version_info), sys.executable
    for version in ("3.11", "3.13"):
        if version == "{}.{}".format(*sys.version_info):
            continue
        found = [shutil.which(f"python{version}"), *sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
        works = (str(path) for path in found if path and run(path, "-V", cwd=ROOT).returncode == 0)
        if python := next(works, None):
            yield version, python


def wheel_in(folder, **environment):
    """Build an sdist of the files that git tracks, and a wheel from it."""
    pytest.importorskip("hatchling")
    done = run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    unpacked, variables = folder / sdist.name.removesuffix(".tar.gz"), os.environ | environment
    done = subprocess.run(command, cwd=unpacked, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel, with all that is compiled into it."""
    return wheel_in(tmp_path_factory.mktemp("dist"))


def names_in(wheel):
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_the_wheel_has_every_module_and_nothing_else(tmp_path):
    """Apart from what hooks compile, which takes half a minute."""
    names = names_in(wheel_in(tmp_path, HATCH_BUILD_NO_HOOKS="true"))
    listed = run("git", "ls-files", "onnx_remat", "converters", cwd=ROOT)
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = [name for name in listed.stdout.split() if name != "onnx_remat/converters/__init__.py"]
    assert names == {re.sub("^converters/", "onnx_remat/converters/", name) for name in files}
    assert {"onnx_remat/py.typed", "onnx_remat/findings/show/page.html", "onnx_remat/converters/__init__.py"} <= names


@pytest.mark.slow
def test_the_wheel_has_the_library_where_there_is_a_compiler(built):
    names = names_in(built)
    library = f"onnx_remat/fuse/{build.library_name()}"
    assert (library in names) == any(shutil.which(name) for name in ("cc", "gcc", "clang"))
    compiled = library in names or any(name.startswith(PRECOMPILED) for name in names)
    assert built.name.endswith("py3-none-any.whl") == (not compiled)


FIRST_USE = """
from onnx_remat.process import compiled
from onnx_remat.rewrite.first_use import GROUPS
from numba.core import event

class Listener(event.Listener):
    def on_start(self, started):
        raise AssertionError(started.data["dispatcher"].py_func.__qualname__)
    def on_end(self, ended):
        pass

if not compiled._has_precompiled():
    raise SystemExit("an older processor")
event.register("numba:compile", Listener())
for group in GROUPS.values():
    assert compiled.is_compiled(group.last)
    group.call()
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="compiled for x86-64 alone")
def test_a_first_use_of_the_wheel_compiles_nothing(built, tmp_path):
    zipfile.ZipFile(built).extractall(tmp_path / "site")
    kernels = tmp_path / "site" / PRECOMPILED
    assert len(list(kernels.glob("*.nbi"))) == len(list(kernels.glob("*.nbc"))) > 15
    places = {"PYTHONPATH": str(tmp_path / "site"), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", FIRST_USE]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | places, capture_output=True, text=True, check=False)
    if "an older processor" in done.stderr:
        pytest.skip("no processor of this level")
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.joinpath("cache").rglob("*.nbi"))


@pytest.mark.slow
@pytest.mark.parametrize("python", [pytest.param(path, id=version) for version, path in pythons()])
def test_the_wheel_works_in_an_environment_of_its_own(python, built, tmp_path):
    """The main job, a page, a picture and a converter that are refused for want of their extras."""
    shutil.copy(ROOT / "sample_models" / "attention_stack.onnx", tmp_path / "train.onnx")
    assert run(python, "-m", "venv", "bare", cwd=tmp_path).returncode == 0
    bin_ = tmp_path / "bare" / ("Scripts" if sys.platform == "win32" else "bin")
    done = run(bin_ / "python", "-m", "pip", "install", "-q", f"{built}[cpu]", cwd=tmp_path)
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip(f"a dependency cannot be had here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr

    rewrite = (bin_ / "onnx-remat", "train.onnx", "small.onnx", "--budget", "60%", "--effort", "2")
    done = run(*rewrite, "--verify", "run", "--plot", "memory.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "bitwise equal" in done.stdout
    assert (tmp_path / "memory.html").stat().st_size > 50_000

    done = run(*rewrite, "--force", "--plot", "memory.png", cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1
    assert "onnx-remat[plot]" in done.stderr

    done = run(bin_ / "python", "-c", "import onnx_remat.converters.pytorch", cwd=tmp_path)
    assert done.returncode == 1
    assert "onnx-remat[torch]" in done.stderr.strip().splitlines()[-1]
