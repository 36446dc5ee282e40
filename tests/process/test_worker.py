"""ONNX Runtime crashes and hangs in its own process only."""

from __future__ import annotations

import sys

import pytest

from onnx_remat.errors import ModelError
from onnx_remat.ort import runtime
from onnx_remat.process import child, worker
from tests.support.graphs import mlp


@pytest.fixture
def stand_in(monkeypatch):
    """Make the process run other code."""

    def start(code: str) -> None:
        monkeypatch.setattr(child, "_command", lambda _: [sys.executable, "-c", code])
        monkeypatch.setattr(worker, "_running", None)

    return start


def test_a_crash_is_a_model_error_that_names_the_signal(stand_in):
    stand_in("import os; input(); os.kill(os.getpid(), 11)")
    with pytest.raises(ModelError, match=r"crashed on the model \(SIGSEGV\)"):
        runtime.optimized(mlp(), None, "all")


def test_a_hang_is_given_up(stand_in, monkeypatch):
    monkeypatch.setattr(runtime, "_SECONDS", 0.02)
    stand_in("import time; time.sleep(600)")
    with pytest.raises(ModelError, match="did not finish"):
        runtime.optimized(mlp(), None, "all")


def test_the_next_question_starts_a_new_process(monkeypatch):
    # One that has loaded a step with fused nodes states their domain in every model after it.
    monkeypatch.setattr(worker, "_running", None)
    plain = runtime.optimized(mlp(), None, "basic")
    running = worker._child()
    running.process.kill()
    running.process.wait()
    assert runtime.optimized(mlp(), None, "basic") == plain
    assert worker._child() is not running


def test_answers_come_from_one_process_and_errors_leave_it_running():
    runtime.optimized(mlp(), None, "all")
    running = worker._child()
    broken = mlp()
    broken.graph.node[0].op_type = "NoSuchOp"
    with pytest.raises(ModelError, match="NoSuchOp"):
        runtime.optimized(broken, None, "all")
    assert runtime.infer_shapes(mlp(), [mlp().graph.node[0].output[0]])
    assert worker._child() is running


def test_a_process_that_used_a_device_ends_when_the_device_is_left(monkeypatch):
    """Its context would keep half a gigabyte there until this process ends."""
    monkeypatch.setattr(worker, "_running", None)
    limit = child.Limit(10)
    worker.ask("it", "os.path:split", limit, p="a/b")
    running = worker._child()
    worker.leave_device()
    assert running.lives()
    worker.ask("it", "os.path:split", limit, on_device=True, p="a/b")
    worker.leave_device()
    assert not running.lives() and worker._child() is not running
