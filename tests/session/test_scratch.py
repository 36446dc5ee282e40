"""Scratch memory of kernels is taken once, not in every step."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from onnx_remat.session.scratch import LEAST, pool_size

pytest.importorskip("onnxruntime")

CHILD = """
import json, resource, sys
import numpy as np
from onnx import TensorProto, helper
from onnx_remat import Session
from tests.support.graphs import run_model

def masked(n):  # Where takes twice its result as scratch memory
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [n]) for name in "xy")
    nodes = [helper.make_node("IsNaN", ["x"], ["m"]), helper.make_node("Neg", ["x"], ["h"]),
             helper.make_node("Where", ["m", "h", "x"], ["y"])]
    opsets = [helper.make_opsetid("", 17)]
    return helper.make_model(helper.make_graph(nodes, "g", [x], [y]), opset_imports=opsets, ir_version=8)

found = []
for n in json.loads(sys.argv[1]):
    model, feeds = masked(n), {"x": np.arange(n, dtype=np.float32)}
    with Session(model, level="disable") as session:
        for _ in range(2):
            session.execute(feeds)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            session.execute(feeds)
        faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 5
        same = np.array_equal(session.results()["y"], run_model(model, feeds)[0])
        found.append([session.workspace_bytes, faults, bool(same)])
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts page faults")
def test_steps_take_no_new_pages_for_scratch_memory_and_a_larger_step_may_follow():
    sizes = [1 << 20, 1 << 22]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(sizes)], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert not done.returncode, done.stderr
    for size, (workspace, faults, same) in zip(sizes, json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert same and 8 * size <= workspace < 8.5 * size
        assert faults < 0.05 * workspace / 4096


def test_little_scratch_memory_is_not_pooled():
    assert pool_size(0) == pool_size(LEAST - 1) == 0
    assert LEAST < pool_size(LEAST) < 1.2 * LEAST


TAKEN = """
import onnxruntime
where = onnxruntime.OrtMemoryInfo(
    "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT)
onnxruntime.create_and_register_allocator(where, onnxruntime.OrtArenaCfg({"max_mem": 0}))
"""


@pytest.mark.slow
def test_a_pool_of_the_programs_own_is_used():
    code = TAKEN + CHILD
    done = subprocess.run([sys.executable, "-c", code, "[1048576]"], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])[0][2]
