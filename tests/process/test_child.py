"""Functions that other processes call: what comes back, and what is said where nothing does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from onnx_remat.errors import BudgetInfeasibleError, ShapeError, UsageError
from onnx_remat.messages import Setting, Word
from onnx_remat.process import child
from onnx_remat.process.child import Child, Failed, Limit, call
from tests.support.slow import few

HERE = "tests.process.test_child:"


def given_back(**job):
    print("no answer")
    os.write(1, b"nor is this\n")
    return job


def dying(number):
    print("a last word", file=sys.stderr, flush=True)
    os.kill(os.getpid(), number)


def hanging(computes):
    while computes:
        pass
    time.sleep(600)


def raising(how):
    if how == "ours":

        class Refusal(BudgetInfeasibleError):
            pass

        raise Refusal("too little", 7, 5)
    if how == "setting":
        raise UsageError("pass {}, or less than {}", Setting("dims", {"batch": Word("N")}), Setting("effort", 60))
    if how == "shape":
        raise ShapeError("no size")
    if how == "memory":
        return bytearray(1 << 40)
    if how == "odd":
        return object()
    if how == "nul":
        raise ValueError("before\0after")
    raise ValueError("first line\nlast line")


def failure(task, job, limit=None):
    with pytest.raises(Failed) as failed:
        call(HERE + task, job, limit)
    return failed.value


def test_what_python_ignores_in_its_search_path_is_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    assert call(HERE + "given_back", {"number": 1}) == {"number": 1}


def test_large_arrays_and_bytes_go_both_ways(tmp_path):
    arrays = {"big": np.arange(1 << 21), "turned": np.arange(6, dtype=">i2").reshape(2, 3).T, "none": np.zeros((0, 3)),
              "single": np.array(1.5, np.float16), "yes": np.array([True, False])}  # fmt: skip
    job = {"deep": [{"at": arrays}], "blob": bytes(range(256)) * (1 << 14), "empty": b"", "count": np.int64(3)}
    made = call(HERE + "given_back", job | {"path": tmp_path, "dims": {"N": 2}, "pair": (1, None)})
    there = made.pop("deep")[0]["at"]
    for name, array in arrays.items():
        assert there[name].dtype == array.dtype and there[name].shape == array.shape
        assert there[name].tobytes() == array.tobytes()
        there[name][...] = 0  # it can be written
    assert made == {"blob": job["blob"], "empty": b"", "count": 3, "path": str(tmp_path), "dims": {"N": 2},
                    "pair": [1, None]}  # fmt: skip


def test_one_process_answers_many_requests_and_errors_leave_it_running():
    with Child() as process:
        for number in range(3):
            assert process.call(HERE + "given_back", {"number": number}) == {"number": number}
            with pytest.raises(Failed, match="ShapeError: no size"):
                process.call(HERE + "raising", {"how": "shape"})
        assert process.lives()
    assert not process.lives()


def test_who_dies_by_a_signal_is_quoted():
    failed = failure("dying", {"number": 11})
    assert (failed.how, failed.line, failed.cause, str(failed)) == ("died", "a last word", "SIGSEGV", "a last word")
    assert failed.error() is None


@pytest.mark.parametrize(
    ("limit", "computes"), [(Limit(0.3, clock=True), False), pytest.param(Limit(1), True, marks=pytest.mark.slow)]
)
def test_who_exceeds_the_time_is_ended(limit, computes):
    call(HERE + "given_back", {})
    began = time.monotonic()
    assert failure("hanging", {"computes": computes}, limit).how == "time"
    assert time.monotonic() - began < 300


def test_errors_of_ours_come_back_as_what_they_are():
    error = failure("raising", {"how": "ours"}).error()
    assert type(error) is BudgetInfeasibleError and str(error) == "too little"
    assert (error.best_peak_bytes, error.lower_bound_bytes) == (7, 5)
    failed = failure("raising", {"how": "shape"})
    assert type(failed.error()) is ShapeError
    assert str(failed) == "onnx_remat.errors.ShapeError: no size"


def test_settings_in_errors_of_ours_come_back_as_data():
    error = failure("raising", {"how": "setting"}).error()
    assert str(error) == "pass dims={'batch': N}, or less than effort=60"
    assert error.settings == {"dims": {"batch": "N"}, "effort": 60}


def test_other_errors_are_reported_by_their_last_line():
    failed = failure("raising", {"how": "other"})
    assert (failed.how, str(failed), failed.kind, failed.error()) == ("raised", "last line", "ValueError", None)
    assert failed.message == "first line\nlast line"
    assert failure("raising", {"how": "nul"}).message == "before\0after"
    assert failure("raising", {"how": "odd"}).kind == "TypeError"
    assert failure("nothing", {}).kind == "AttributeError"
    assert failure("raising", {"how": "memory"}, Limit(60, 1 << 26)).how == "memory"


def test_what_cannot_be_sent_is_reported_before_it_is():
    with Child() as process, pytest.raises(TypeError):
        process.begin(HERE + "given_back", {"odd": object()})


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("print('garbage'); from onnx_remat.process.child import main; main()", None),
        ("print('garbage', flush=True); input()", "no answer"),
        ("print('\\x1eonnx-remat {', flush=True); input()", "no answer"),
        ("import sys; sys.stdin.close(); sys.exit('reads nothing')", "reads nothing"),
    ],
)
def test_garbage_is_no_answer(code, line, monkeypatch):
    monkeypatch.setattr(child, "_command", lambda _: [sys.executable, "-c", code])
    job = {"data": bytes(1 << 20)}
    if line is None:
        assert call(HERE + "given_back", job) == job
    else:
        failed = failure("given_back", job)
        assert failed.how == "died" and line in (failed.line or "no answer")


def test_a_request_that_the_process_has_no_memory_for_ends_it(monkeypatch):
    data = {child._RAW: [1 << 60, "", []]}
    request = {"task": HERE + "given_back", "job": {"data": data}, "limit": None, "last": False}
    monkeypatch.setattr(child, "_packed", lambda _: (child._MARK + json.dumps(request).encode() + b"\n", []))
    failed = failure("given_back", {}, Limit(60, clock=True))
    assert (failed.how, failed.line) == ("died", "MemoryError")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_answer_that_there_is_no_memory_for_is_a_failure(monkeypatch):
    def too_large(_):
        raise MemoryError

    monkeypatch.setattr(child, "_receive", too_large)
    assert failure("given_back", {}, Limit(60, clock=True)).how == "died"


def processors():
    return os.cpu_count()


@pytest.mark.skipif(sys.version_info < (3, 13), reason="the number of processors cannot be set")
def test_a_process_has_the_processors_of_the_one_that_started_it():
    code = f"from onnx_remat.process.child import call; print(call({HERE + 'processors'!r}, {{}}))"
    command = [sys.executable, "-X", "cpu_count=7", "-c", code]
    assert subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip() == "7"


PARENT = """
import os, sys
from onnx_remat.process.child import Child
child = Child()
child.begin("tests.process.test_child:hanging", {"computes": sys.argv[1] == "computes"})
print(child.process.pid, flush=True)
os.read(0, 1)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="a process that is killed")
@pytest.mark.parametrize("work", few(["sleeps", "computes"], ["sleeps"]))
def test_a_process_ends_with_the_one_that_started_it(work):
    command = [sys.executable, "-c", PARENT, work]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        parent.kill()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("it lives on")
