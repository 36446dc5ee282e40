"""A first use compiles side by side what it needs, on nobody's clock, and then nothing more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onnx_remat.plan.request import Deadline
from onnx_remat.rewrite import first_use, pipeline
from onnx_remat.rewrite.first_use import PLANNER, REPORTER, SIMULATOR, FirstUse
from sample_models.chain import chain

COMPILE = """
from onnx_remat.rewrite import first_use
use = first_use.FirstUse()
assert use.compile(first_use.SIMULATOR) > 0
use.begin()
assert use.compile(first_use.PLANNER) > 0
assert use.compile(first_use.REPORTER) > 0
assert use.compile(first_use.PLANNER + first_use.SIMULATOR + first_use.REPORTER) == 0
"""

PLAN = """
import sys
from numba.core import event
made = []
class Listener(event.Listener):
    def on_start(self, started):
        made.append(started.data["dispatcher"].py_func.__qualname__)
    def on_end(self, ended):
        pass
from onnx_remat.rewrite import first_use
event.register("numba:compile", Listener())
import onnx_remat
onnx_remat.rewrite_model("sample_models/attention_stack.onnx", "60%", run_by="session", effort=0.01, verify="none")
print(*made)
"""


@pytest.mark.slow
def test_what_a_first_use_compiles_is_all_that_a_rewrite_needs(tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", COMPILE], env=environment, check=True)
    kernels = {path.name for path in tmp_path.rglob("*.nbi")}
    done = subprocess.run([sys.executable, "-c", PLAN], env=environment, check=True, capture_output=True, text=True)
    compiled = {path.name for path in tmp_path.rglob("*.nbi")} - kernels
    assert not compiled, done.stdout
    assert all(len(list(path.parent.glob(path.stem + ".*.nbc"))) == 1 for path in tmp_path.rglob("*.nbi"))


class Slow(FirstUse):
    """Takes an hour to compile, as the stopwatch has it."""

    def compile(self, names: tuple[str, ...]) -> float:
        return 3600.0


def test_compiling_is_none_of_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_use, "FirstUse", Slow)
    report = pipeline.rewrite_model(chain(16, 1024, 64), "70%", run_by="session", effort=0.1, time_limit=600).report
    assert report.seconds["compile"] == 10800.0
    assert not report.cut_short


def test_a_deadline_can_be_put_off() -> None:
    deadline = Deadline(5.0)
    deadline.later(100.0)
    assert 100 < deadline.left() < 105.1


def test_what_is_not_needed_after_all_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_use, "is_compiled", lambda _: False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with first_use.first_use() as use:
        [child] = {*use.children.values()}  # two cores: one process alongside this one
        assert child.lives()
    assert child.process.returncode < 0


def test_nothing_is_started_where_all_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_use, "is_compiled", lambda _: True)
    with first_use.first_use() as use:
        assert not use.children
        assert use.compile(PLANNER + SIMULATOR + REPORTER) == 0.0
