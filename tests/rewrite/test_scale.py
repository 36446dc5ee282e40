"""Peaks that can be worked out on paper, and graphs of ten thousand nodes."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import onnx
import pytest
from onnx import helper

import onnx_remat
from onnx_remat.memory.buffers import simulate
from onnx_remat.memory.problem import Problem, check_schedule
from onnx_remat.ort import runtime
from onnx_remat.ort.executed import as_executed
from onnx_remat.ort.kernels.cpu import CPU
from onnx_remat.ort.prepare import Compiled, Preparation, prepare
from onnx_remat.plan.selectors import Request, get
from onnx_remat.write.realize import realize
from sample_models.chain import chain, peak_bytes
from tests.support.graphs import model_of

WIDTH, BATCH = 32, 64
ACTIVATION = 4 * WIDTH * BATCH


def liveness(problem: Problem) -> Problem:
    """Without taking over dead buffers: what the sample's notes count, in-place work aside."""
    return replace(problem, poolable=np.zeros(problem.n_values, np.bool_))


def compiled_chain(n: int) -> Compiled:
    return prepare(chain(n, WIDTH, BATCH), Preparation(CPU))


@pytest.mark.parametrize("n", [1, 2, 16, 64, 256])
def test_a_chain_peaks_at_exactly_the_documented_bytes(n):
    compiled = compiled_chain(n)
    timeline = simulate(compiled.problem, compiled.default_order())
    assert timeline.peak == peak_bytes(n, WIDTH, BATCH)
    executed = as_executed(chain(n, WIDTH, BATCH), None, "disable", Preparation(CPU))
    assert executed.timeline.peak == timeline.peak


def test_a_chain_has_one_order_only():
    compiled = compiled_chain(16)
    assert compiled.default_order().order == tuple(range(compiled.problem.n_ops))


def lowest(n: int, selector: str) -> tuple[int, float]:
    """Peak of the lowest plan a selector finds, what always stays taken off, in activations; and its overhead."""
    compiled = compiled_chain(n)
    problem = liveness(compiled.problem)
    schedule = get(selector)(Request(problem, 0, compiled.default_order(), work=2000))
    check_schedule(problem, schedule)
    always = 5 * ACTIVATION + 4 * WIDTH + 16  # see the notes of `chain`
    return (simulate(problem, schedule).peak - always) / ACTIVATION, schedule.overhead(problem)


def test_sqrt_n_grows_like_the_square_root():
    """Four times the chain, twice the memory: 2 sqrt(n) activations, and at most one more forward pass."""
    sizes = (16, 64, 256)
    peaks, overheads = zip(*(lowest(n, "sqrt_n") for n in sizes), strict=True)
    for n, peak, overhead in zip(sizes, peaks, overheads, strict=True):
        assert peak <= 2 * n**0.5 + 1
        assert 0 < overhead < 0.5
    for smaller, larger in pairwise(peaks):
        assert larger / smaller == pytest.approx(2, rel=0.25)
    slope = np.polyfit(np.log(sizes), np.log(peaks), 1)[0]
    assert slope == pytest.approx(0.5, abs=0.1)


def test_without_recompute_a_chain_grows_linearly():
    peaks = [lowest(n, "keep_all")[0] for n in (16, 64)]
    assert peaks[1] / peaks[0] == pytest.approx(4, rel=0.1)


def deep(units: int, batch: int = 256, width: int = 16) -> onnx.ModelProto:
    """A training step of about 10 nodes per unit: h = tanh(h * w[i] + b[i]), gradients of w and b, SGD."""
    make, nodes = helper.make_node, []
    inputs: dict[str, list[int]] = {"x": [batch, width]}
    outputs: dict[str, list[int]] = {"loss": []}
    h = "x"
    for i in range(units):
        inputs |= {f"w{i}": [width], f"b{i}": [width]}
        outputs |= {f"new.w{i}": [width], f"new.b{i}": [width]}
        nodes += [
            make("Mul", [h, f"w{i}"], [f"p{i}"], name=f"mul{i}"),
            make("Add", [f"p{i}", f"b{i}"], [f"z{i}"], name=f"add{i}"),
            make("Tanh", [f"z{i}"], [f"h{i}"], name=f"tanh{i}"),
        ]
        h = f"h{i}"
    nodes.append(make("ReduceL2", [h], ["loss"], name="norm", keepdims=0))
    nodes.append(make("Div", [h, "loss"], ["g"], name="dnorm"))
    g = "g"
    for i in reversed(range(units)):
        before = f"h{i - 1}" if i else "x"
        nodes += [
            make("Mul", [f"h{i}", f"h{i}"], [f"s{i}"], name=f"square{i}"),
            make("Mul", [g, f"s{i}"], [f"gs{i}"], name=f"gsquare{i}"),
            make("Sub", [g, f"gs{i}"], [f"gz{i}"], name=f"dtanh{i}"),
            make("ReduceSum", [f"gz{i}", "rows"], [f"db{i}"], name=f"db{i}", keepdims=0),
            make("Mul", [f"gz{i}", before], [f"gw{i}"], name=f"dmul{i}"),
            make("ReduceSum", [f"gw{i}", "rows"], [f"dw{i}"], name=f"dw{i}", keepdims=0),
            make("Sub", [f"w{i}", f"dw{i}"], [f"new.w{i}"], name=f"neww{i}"),
            make("Sub", [f"b{i}", f"db{i}"], [f"new.b{i}"], name=f"newb{i}"),
        ]
        if i:
            nodes.append(make("Mul", [f"gz{i}", f"w{i}"], [f"g{i}"], name=f"dx{i}"))
            g = f"g{i}"
    return model_of(nodes, inputs, outputs, {"rows": np.array([0])})


def rewritten(data: bytes) -> tuple[int, int]:
    """Load, simulate, write down the order as it is, and simulate the file: nodes and peaks before and after."""
    from onnx_remat.ir import model_io

    options = Preparation(CPU)
    source = model_io.load(data)
    compiled = prepare(source.model, options)
    order = compiled.default_order()
    before = simulate(compiled.problem, order).peak
    written = realize(compiled, order, before, {})
    executed = as_executed(written.model, None, "disable", options)
    return before, executed.timeline.peak


@pytest.mark.slow
def test_time_grows_with_the_number_of_nodes(capsys):
    rewritten(deep(2).SerializeToString())  # compiles what numba compiles
    few, many = deep(212), deep(850)
    assert len(many.graph.node) >= 10_000 and len(many.graph.node) == pytest.approx(4 * len(few.graph.node), rel=0.01)
    seconds = []
    for model in (few, many):
        data = model.SerializeToString()
        start = time.process_time()  # whatever else the machine does
        before, after = rewritten(data)
        seconds.append(time.process_time() - start)
        assert after <= before * 1.02
    with capsys.disabled():
        print(f" {len(many.graph.node)} nodes: {seconds[1]:.1f} s ", end="")
    assert seconds[1] < 8 * seconds[0]  # 16 if anything took the square of their number


def test_graphs_that_the_runtime_takes_minutes_to_load_are_planned_from_the_file(monkeypatch):
    """It is not asked, the report says so, and what is written keeps the budget when it is asked after all."""
    pytest.importorskip("onnxruntime")
    model = deep(20)
    plainly = as_executed(model, None, "disable", Preparation(CPU)).timeline.peak
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "MOST_NODES", 100)
        patch.setattr(runtime, "optimized", lambda *_: pytest.fail("asked"))
        result = onnx_remat.rewrite_model(model, "45%", effort=0.2, run_by="session")
    report = result.report
    assert report.before.total == plainly and len(set(report.peaks_by_level.values())) == 1
    assert any("was not queried" in note for note in report.notes)
    assert report.recomputed > 0
    assert as_executed(result.model, None, "all", Preparation(CPU)).timeline.peak <= report.budget


@pytest.mark.slow
def test_a_loop_may_have_such_a_graph(monkeypatch):
    """A session of ours follows what the runtime makes of it: it is asked, at the level that the session uses alone."""
    pytest.importorskip("onnxruntime")
    asked: list[str] = []
    optimized = runtime.optimized

    def noted(model, folder, level, *rest):
        asked.append(level)
        return optimized(model, folder, level, *rest)

    monkeypatch.setattr(runtime, "MOST_NODES", 100)
    monkeypatch.setattr(runtime, "optimized", noted)
    report = onnx_remat.rewrite_model(deep(20, batch=16384), "70%", effort=0.2).report
    assert set(asked) == {"all"} and set(report.peaks_by_level) == {"disable", "all"}
    assert report.loop_after.total <= report.budget
