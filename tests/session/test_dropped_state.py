"""A checkpoint of many small arrays, loaded, given and dropped: training stays within what was predicted.

glibc keeps blocks of less than 128 kB that are freed. So each case is a process of its own, the C library as it is.
"""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import helper

from onnx_remat.measure import training_memory
from onnx_remat.rewrite import pipeline
from onnx_remat.session.training import Loop
from tests.support.graphs import feeds_for, mlp, model_of, same_bits
from tests.support.slow import few

pytestmark = pytest.mark.skipif(not training_memory.available(), reason="resident memory is read from /proc")

CHILD = """
import gc, json, sys
from pathlib import Path
import numpy as np
from onnx_remat.session.heap import trim
from onnx_remat.measure.probe import reset_peak, resident
from onnx_remat.measure.training_memory import one_node
from onnx_remat.session.session import Session
from onnx_remat.session.training import Loop

folder, way = Path(sys.argv[1]), sys.argv[2]

def loaded():
    with np.load(folder / "state.npz") as file:
        return dict(file)

def opened():  # what takes a step
    if way == "session":
        session = Session(folder / "step.onnx", donate=True)
        own = {name: np.array(array) for name, array in loaded().items()}
        return lambda: session.execute(own)
    loop = Loop(folder / "step.onnx", np.load(folder / "state.npz") if way == "lazy" else loaded())
    if way == "restored":
        loop.step()
        loop.restore(loaded())
    return loop.step

with Session(one_node(folder)) as session:
    session.run({"x": np.ones(4, np.float32)})
trim()
base = reset_peak()
step = opened()
opening = resident("VmHWM") - base
step()
reset_peak()  # what the step before began with is no part of it any more
for _ in range(20):
    step()
peak = resident("VmHWM") - base
del step
gc.collect()
print(json.dumps({"opening": opening, "peak": peak, "left": resident("VmRSS") - base}))
"""

ARRAYS, WORDS = 300, 20_000  # of 80 kB, 24 MB together


@pytest.fixture(scope="module")
def budget(tmp_path_factory):
    """A folder with a step and a checkpoint of many small arrays, and what training is predicted to take."""
    folder = tmp_path_factory.mktemp("step")
    nodes = [helper.make_node("ReduceMean", ["w0"], ["loss"], keepdims=0)]
    nodes += [helper.make_node("Mul", [f"w{i}", "rate"], [f"new.w{i}"]) for i in range(ARRAYS)]
    state = {f"w{i}": [WORDS] for i in range(ARRAYS)}
    model = model_of(
        nodes, state, {"loss": [], **{f"new.{name}": shape for name, shape in state.items()}}, {"rate": np.float32(0.9)}
    )
    onnx.save(model, folder / "step.onnx")
    np.savez(folder / "state.npz", **feeds_for(model))
    return folder, pipeline.rewrite_model(model, "100%").report.loop_before.total


@pytest.mark.parametrize("way", few(["loop", "session", "lazy", "restored"], ["loop", "restored"]))
def test_a_checkpoint_that_was_dropped_is_not_kept(budget, way):
    folder, predicted = budget
    done = subprocess.run([sys.executable, "-c", CHILD, str(folder), way], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["peak"] <= predicted
    assert found["left"] < 6e6  # once the loop is gone, though nobody closed its session
    if way == "lazy":
        assert found["opening"] <= predicted


class Counting(dict):
    """A mapping that knows how often each array was asked for."""

    def __init__(self, arrays):
        super().__init__(arrays)
        self.asked = []

    def __getitem__(self, name):
        self.asked.append(name)
        return super().__getitem__(name)

    items = values = None  # what reads all of them


def test_state_is_asked_for_array_by_array():
    model = mlp(layers=2, batch=16, width=8)
    feeds = feeds_for(model)
    state = Counting(feeds)
    loop = Loop(model, state)
    assert state.asked == list(feeds) == list(loop.state())
    assert same_bits(loop.state().values(), feeds.values())
