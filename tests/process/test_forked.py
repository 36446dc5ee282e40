"""A forked copy of the process: its results, warnings and errors arrive here, its memory does not."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from onnx_remat import errors
from onnx_remat.errors import BudgetInfeasibleError, OnnxRematError, UsageError
from onnx_remat.measure import training_memory
from onnx_remat.messages import Setting
from onnx_remat.process import forked

pytestmark = pytest.mark.skipif(not forked.available(), reason="only Linux forks")


def test_a_function_that_cannot_be_pickled_returns_its_result():
    here = np.arange(5)
    made = forked.call(lambda: (here.sum().item(), os.getpid()), "a sum")
    assert made[0] == 10
    assert made[1] != os.getpid()


def test_what_the_copy_changes_stays_there():
    seen = [1]
    assert forked.call(lambda: seen.append(2) or len(seen), "an append") == 2
    assert seen == [1]


@pytest.mark.parametrize(
    "error",
    [
        UsageError("try {}", Setting("effort", 60)),
        BudgetInfeasibleError("too small", 5, 3),
        errors.MissingExtraError("torch is not installed", name="torch"),
        ValueError("plain"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_arrive_whole(error):
    def fail():
        raise error

    with pytest.raises(type(error)) as raised:
        forked.call(fail, "a failure")
    assert str(raised.value) == str(error)
    assert vars(raised.value) == vars(error)
    assert ("in fail" in str(raised.value.__cause__)) is not isinstance(error, OnnxRematError)


def test_an_error_that_cannot_be_sent_arrives_as_its_text():
    class Local(Exception):
        pass

    def fail():
        raise Local("here")

    with pytest.raises(RuntimeError, match="Local: here"):
        forked.call(fail, "a failure")


def test_warnings_go_through_the_filters_of_this_process():
    def warn():
        warnings.warn("attention", UserWarning, stacklevel=1)

    with pytest.warns(UserWarning, match="attention") as seen:
        forked.call(warn, "a warning")
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="attention"):
            forked.call(warn, "a warning")


def test_a_library_that_warns_of_forks_is_not_heard():
    pytest.importorskip("jax").numpy.zeros(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert forked.call(lambda: 1, "a number") == 1


def test_a_copy_that_is_killed_is_an_error_of_one_line():
    with pytest.raises(OnnxRematError, match=r"the process for the export ended without an answer \(SIGKILL; probably"):
        forked.call(lambda: os.kill(os.getpid(), signal.SIGKILL), "the export")


def test_what_is_printed_is_printed_once():
    source = (
        "import sys; from onnx_remat.process import forked; print('before');"
        "forked.call(lambda: print('within'), 'a print'); print('after')"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["before", "within", "after"]


def test_an_interrupt_ends_both():
    source = """
import os, signal, time
from onnx_remat.process import forked
signal.signal(signal.SIGINT, signal.default_int_handler)  # a process started in the background ignores it
def wait():
    print(os.getpid(), flush=True)
    time.sleep(60)
try:
    forked.call(wait, "a wait")
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    copy = int(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    assert process.stdout.read().split() == ["interrupted"]
    assert process.wait() == 0
    assert not Path(f"/proc/{copy}").exists()


def test_a_copy_ends_with_its_parent():
    source = """
import os, time
from onnx_remat.process import forked
forked.call(lambda: (print(os.getpid(), flush=True), time.sleep(60)), "a wait")
"""
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    copy = int(process.stdout.readline())
    process.kill()
    process.wait()
    limit = time.monotonic() + 10
    while Path(f"/proc/{copy}").exists() and time.monotonic() < limit:
        time.sleep(0.05)
    assert not Path(f"/proc/{copy}").exists()


@pytest.mark.skipif(not training_memory.available(), reason="peaks are measured on Linux")
def test_memory_of_the_copy_is_not_resident_here():
    from onnx_remat.measure.probe import reset_peak, resident

    base = reset_peak()
    assert forked.call(lambda: int(np.ones(1 << 25).sum()), "an array") == 1 << 25
    assert resident("VmHWM") - base < 1 << 25


def test_every_class_of_errors_is_picklable():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, OnnxRematError)]
    for kind in kinds:
        error = kind("text", 2, 1) if kind is BudgetInfeasibleError else kind("text")
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (kind, str(error), vars(error))


def test_an_answer_can_be_asked_for_again_and_a_death_too():
    with forked.Running(lambda: 7, "a number") as running:
        assert [running.answer(), running.answer()] == [7, 7]
        assert running.has_answered()
    with forked.Running(lambda: os.kill(os.getpid(), signal.SIGKILL), "a death") as running:
        for _ in range(2):
            with pytest.raises(OnnxRematError, match="the process for a death ended without an answer"):
                running.answer()


def test_a_copy_ends_with_its_context():
    with forked.Running(lambda: time.sleep(600), "a nap") as running:
        assert not running.has_answered()
    with pytest.raises(ChildProcessError):
        os.waitpid(running._copy, os.WNOHANG)


def test_more_than_a_thousand_files_may_be_open():
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < 1200:
        pytest.skip(f"this system lets a process open {before[1]} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 1200), before[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with forked.Running(lambda: 7, "a number") as running:
            running.has_answered()
            assert running.answer() == 7
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
