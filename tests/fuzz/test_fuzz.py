"""Random training graphs through the whole pipeline, and mutated files through all that reads them.

The default run does a few; ``--fuzz N`` does N of each kind.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

import onnx_remat
from onnx_remat.errors import BudgetInfeasibleError, OnnxRematError
from onnx_remat.ort import runtime
from onnx_remat.ort.executed import as_executed
from onnx_remat.ort.kernels.cpu import CPU
from onnx_remat.ort.prepare import Preparation
from tests.memory.test_buffers import naive_steps
from tests.support.computing import computed
from tests.support.graphs import feeds_for, same_bits
from tests.support.mutants import KINDS, mutant
from tests.write.test_writer import Builder, only, run_model, traced

pytest.importorskip("onnxruntime")
QUICK = {"effort": 0.05, "dims": {}, "run_by": "session"}


def fuzz(config: pytest.Config, default: int):
    """Hypothesis settings: `default` examples, or as many as ``--fuzz`` says, other ones each time."""
    asked = config.getoption("--fuzz")
    return settings(
        max_examples=asked or default, derandomize=not asked, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


def test_random_steps_are_rewritten_and_keep_every_promise(pytestconfig):
    """Outputs to the last bit, the order emulated, the peak of the independent simulation, the budget."""
    done = []

    @fuzz(pytestconfig, 8)
    @given(
        seed=st.integers(0, 2**32 - 1), layers=st.integers(5, 40), budget=st.sampled_from(["97%", "90%", "80%"]),
        level=st.sampled_from(["all", "every"]), cond=st.booleans(),
    )  # fmt: skip
    def run(seed, layers, budget, level, cond):
        model = Builder(seed, layers).model()
        model.graph.node.append(helper.make_node("Sign", ["x"], ["g"], name="gradient"))
        model.graph.output.append(helper.make_tensor_value_info("g", 1, [32, 32]))
        try:
            result = onnx_remat.rewrite_model(model, budget, level=level, **QUICK)
        except BudgetInfeasibleError as error:  # then what it says is possible must be
            try:
                result = onnx_remat.rewrite_model(model, int(error.best_peak_bytes * 1.05), level=level, **QUICK)
            except BudgetInfeasibleError:
                return
        peaks = result.report.peaks_by_level
        most = peaks["all"] if level == "all" else max(peaks.values())
        assert result.report.lower_bound <= most <= result.report.budget
        feeds = feeds_for(model) | {"cond": np.array(cond)}
        outputs, executed = traced(result.model, feeds)
        assert same_bits(run_model(model, feeds), outputs)
        emulated = as_executed(result.model, None, "disable", Preparation(CPU))
        labels = [emulated.compiled.graph.ops[i].node.name for i in emulated.order.order]
        assert only(executed, labels) == [name for name in labels if name in set(executed)]
        timeline = emulated.timeline
        assert max(naive_steps(emulated.compiled.problem, list(emulated.order.order))) == timeline.peak
        done.append(result.report.recomputed)

    run()
    assert done


LONGEST = 60.0
"""Seconds of computing that an answer may take: those that the worker may."""


def digest(data: bytes) -> None:
    """All that is done with a file; a refusal is an answer, if it does not take for ever."""
    start = computed()
    try:
        onnx_remat.rewrite_model(data, "80%", selector="keep_all", verify="check", **QUICK)
    except OnnxRematError as error:
        assert str(error) and "Traceback" not in str(error)
    assert computed() - start < LONGEST


@pytest.mark.parametrize("kind", KINDS)
def test_mutants_are_answered(kind, pytestconfig, monkeypatch):
    # Without the runtime: what it makes of a broken file is its own affair, and slow.
    monkeypatch.setattr(runtime, "available", lambda: False)

    @fuzz(pytestconfig, 150)
    @given(seed=st.integers(0, 2**32 - 1))
    def run(seed):
        digest(mutant(kind, seed))

    run()
