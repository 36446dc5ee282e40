"""ONNX Runtime crashes and hangs in its own process only."""

from __future__ import annotations

import sys
import threading
from functools import partial

import pytest

import onnx_remat
from onnx_remat.app.bench import max_batch
from onnx_remat.distributed import parts
from onnx_remat.errors import ModelError
from onnx_remat.findings.check import check
from onnx_remat.findings.estimate import estimate
from onnx_remat.findings.explain import explain
from onnx_remat.findings.lowest import lowest_budget
from onnx_remat.findings.sweep import sweep
from onnx_remat.ort import runtime
from onnx_remat.process import child, worker
from tests.support.graphs import mlp


@pytest.fixture
def fresh(monkeypatch):
    """A process of the test's own answers, and ends with it."""
    monkeypatch.setattr(worker, "_running", None)
    yield
    if worker._running:
        worker._running[1].end(0)


@pytest.fixture
def stand_in(fresh, monkeypatch):
    """Make the process run other code."""

    def start(code: str) -> None:
        monkeypatch.setattr(child, "_command", lambda _: [sys.executable, "-c", code])

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


def test_the_next_question_starts_a_new_process(fresh):
    # One that has loaded a step with fused nodes states their domain in every model after it.
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


@pytest.fixture
def split(fresh):
    """Ask for something quick."""
    return partial(worker.ask, "it", "os.path:split", child.Limit(10), p="a/b")


def test_a_process_that_used_a_device_ends_when_the_device_is_left(split):
    """Its context would keep half a gigabyte there until this process ends."""
    split()
    running = worker._child()
    worker.leave_device()
    assert running.lives()
    split(on_device=True)
    with worker.device_left():
        assert running.lives()
    assert not running.lives() and worker._child() is not running


def test_a_process_after_one_that_used_a_device_does_not_end_with_it(split):
    split(on_device=True)
    worker._child().end(0)
    split()
    running = worker._child()
    worker.leave_device()
    assert running.lives()


def test_a_device_that_was_not_used_is_left_without_waiting_for_another_threads_request(split):
    split()
    with worker._lock:
        thread = threading.Thread(target=worker.leave_device, daemon=True)
        thread.start()
        thread.join(1)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    "entry",
    [
        lambda path: onnx_remat.plan_model(path, "60%"), lambda path: onnx_remat.rewrite_model(path, "60%"), check,
        explain, estimate, lowest_budget, sweep, parts.prepare, lambda path: max_batch(path, "1GB", "batch"),
    ],
)  # fmt: skip
def test_whatever_plans_leaves_the_device_in_the_end(entry, monkeypatch, tmp_path):
    left = []
    monkeypatch.setattr(worker, "leave_device", lambda: left.append(entry))
    with pytest.raises(ModelError):
        entry(tmp_path / "nowhere.onnx")
    assert left == [entry]
