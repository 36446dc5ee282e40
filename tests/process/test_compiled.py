"""Compiled code on disk is that of the present sources: of all modules that functions and constants come from."""

from __future__ import annotations

import ast
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import onnx_remat
from onnx_remat.memory import buffers
from onnx_remat.process import compiled
from onnx_remat.process.compiled import SOURCES, source_hash
from tests.support.planner_problems import chain

PACKAGE = Path(onnx_remat.__file__).parent


def is_source(path: Path) -> bool:
    name = path.relative_to(PACKAGE).as_posix()
    return any(name == source or name.startswith(source + "/") for source in SOURCES)


def imports(path: Path) -> list[tuple[str, str]]:
    """(module, name) of every import of a module."""
    tree = ast.parse(path.read_text())
    found = [(node.module or "", alias.name) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
             for alias in node.names]  # fmt: skip
    return found + [(alias.name, "") for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]


def test_whatever_is_compiled_is_in_the_hash() -> None:
    """Modules with kernels, and those that their constants, which numba compiles in, come from."""
    kernels = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        found = imports(path)
        if path.name != "compiled.py":
            assert not any(module.split(".")[0] == "numba" for module, _ in found), path
        if ("onnx_remat.process.compiled", "compiled") in found or ("onnx_remat.process.compiled", "inlined") in found:
            kernels += 1
            assert is_source(path), path
            for module, name in found:
                if module.startswith("onnx_remat.") and name.isupper():
                    assert is_source(PACKAGE / (module.removeprefix("onnx_remat.").replace(".", "/") + ".py")), module
    assert kernels >= 10


@pytest.mark.parametrize("changed", ["plan/search/tuning.py", "memory/order.py", "memory/problem.py"])
def test_the_hash_follows_every_source(changed: str, tmp_path: Path) -> None:
    copy = tmp_path / "onnx_remat"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "converters"))
    source_hash.cache_clear()  # what was compiled first, before a file was edited, is not at issue here
    assert source_hash(copy) == source_hash(PACKAGE)
    source_hash.cache_clear()
    (copy / changed).write_text((copy / changed).read_text() + "# changed\n")
    assert source_hash(copy) != source_hash(PACKAGE)


CALL = """
import numpy as np
from onnx_remat.memory.order import default_order
print(default_order([[], [0], []]))
"""


@pytest.mark.slow
def test_a_package_that_cannot_be_written_is_cached_for_the_user_and_not_stale(tmp_path: Path) -> None:
    copy, cache = tmp_path / "site" / "onnx_remat", tmp_path / "cache"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "converters"))

    def run() -> tuple[str, set[str]]:
        environment = {"PYTHONPATH": str(copy.parent), "XDG_CACHE_HOME": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}
        (copy / "memory" / "__pycache__").touch()  # a file where numba's folder would be
        call = [sys.executable, "-c", CALL]
        done = subprocess.run(call, capture_output=True, text=True, env=environment, cwd=tmp_path, check=True)
        return done.stdout, {path.name for path in cache.rglob("*.nbi")}

    first, files = run()
    assert len(files) == 1 and all(source_hash(copy) in name for name in files)
    assert run() == (first, files)
    order = copy / "memory" / "order.py"
    order.write_text(order.read_text().replace("for node in range(n):", "for node in range(n - 1, -1, -1):"))
    source_hash.cache_clear()
    changed, more = run()
    assert changed != first
    assert files < more


MODULE = """
import numpy as np
from onnx_remat.process.compiled import compiled, inlined

@inlined
def _put(array, i):
    array[i] = 1

@compiled
def direct(array, i):
    array[i] = 1

@compiled
def through(array, i):
    _put(array, i)

for function in (direct, through):
    try:
        function(np.zeros(4)[:2], 3)  # out of bounds, and within the memory behind it
        print("nothing", sum(function.stats.cache_hits.values()))
    except IndexError:
        print("IndexError", sum(function.stats.cache_hits.values()))
"""


@pytest.mark.slow
def test_indices_are_checked_where_that_is_asked_for_and_nowhere_else(tmp_path: Path) -> None:
    """Whatever is in the cache: either kind of code is found there the second time, and never the other."""
    (tmp_path / "module.py").write_text(MODULE)

    def run(checks: dict[str, str]) -> list[str]:
        environment = {"PYTHONPATH": str(PACKAGE.parent), **checks}
        call = [sys.executable, "-c", "import module"]
        done = subprocess.run(call, capture_output=True, text=True, env=environment, cwd=tmp_path, check=True)
        return done.stdout.splitlines()

    for hits in (0, 1):
        assert run({}) == [f"nothing {hits}"] * 2
        assert run({"NUMBA_BOUNDSCHECK": "1"}) == [f"IndexError {hits}"] * 2


@pytest.mark.parametrize(
    ("features", "runs"), [(("avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"), True), (("avx2",), False)]
)
def test_code_of_the_wheel_runs_on_processors_of_its_level_alone(features, runs, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(compiled, "PRECOMPILED", tmp_path)
    monkeypatch.setattr(compiled.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(compiled.binding, "get_host_cpu_features", lambda: dict.fromkeys(features, True))
    compiled._has_precompiled.cache_clear()
    try:
        assert compiled._has_precompiled() == runs
    finally:
        compiled._has_precompiled.cache_clear()


class Interruption(BaseException):
    """What the handler of a signal raises."""


def test_what_a_handler_raises_within_a_compiled_function_comes_out_as_it_is() -> None:
    """Not as the SystemError that numba makes of it where the results are made into objects, most of the time here."""

    def interrupt(_number: int, _frame: object) -> None:
        raise Interruption

    problem = chain(2000)
    order = range(problem.n_ops)
    buffers.simulate(problem, order)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for turn in range(200):
            with pytest.raises(Interruption):
                signal.setitimer(signal.ITIMER_REAL, 1e-4 * (1 + turn % 20))
                while True:
                    buffers.simulate(problem, order)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
def test_a_full_disk_costs_the_cache_and_nothing_else(tmp_path: Path) -> None:
    copy = tmp_path / "site" / "onnx_remat"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "converters"))
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n" + CALL
    environment = {"PYTHONPATH": str(copy.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", full], capture_output=True, text=True, env=environment, cwd=tmp_path, check=True
    )
    assert done.stdout.strip().startswith("[")
    assert not any(path.stat().st_size > 100 for path in copy.rglob("*.nb*"))


COMPILES = """
from onnx_remat.process.compiled import compiled

@compiled
def one(n):
    return n + 1

print(one(1))
"""


def test_code_of_other_sources_is_removed_after_a_month(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(COMPILES)
    folder = tmp_path / "__pycache__"
    folder.mkdir()
    present, other = source_hash(PACKAGE), "0" * 16
    names = [f"module.f_{sources}{more}-7.py311.{end}" for sources in (present, other) for more in ("", "_checked")
             for end in ("nbi", "1.nbc")]  # fmt: skip
    others = ["module.cpython-311.pyc", "module.f-7.py311.nbi", f"module.recent_{other}-7.py311.nbi"]
    for name in names + others:
        (folder / name).write_bytes(b"")
        if "recent" not in name:
            os.utime(folder / name, (time.time() - 40 * 24 * 3600,) * 2)
    call = [sys.executable, "-c", "import module"]
    environment = {"PYTHONPATH": str(PACKAGE.parent)}
    subprocess.run(call, capture_output=True, env=environment, cwd=tmp_path, check=True)
    left = {path.name for path in folder.iterdir()}
    assert {name for name in names if present in name} | {*others} <= left
    assert not {name for name in names if other in name} & left
