"""Bounds for a loop: results may lie over what they are made of, which ONNX Runtime's own allocation seldom does."""

from __future__ import annotations

import math
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from onnx_remat.rewrite import pipeline
from onnx_remat.rewrite.original import begin
from onnx_remat.rewrite.pipeline import rewrite_model
from sample_models import chain as sample
from tests.support.slow import few

ENTRIES = 1 << 20
make = helper.make_node
SAMPLES = Path(__file__).parents[2] / "sample_models"


def chain(length: int) -> onnx.ModelProto:
    """Products with a number, each of which may lie over the one before."""
    nodes = [make("Mul", [f"t{i - 1}" if i else "x", "k"], [f"t{i}"], name=f"n{i}") for i in range(length)]
    nodes.append(make("ReduceSum", [f"t{length - 1}"], ["loss"], keepdims=0))
    value = helper.make_tensor_value_info
    inputs = [value("x", TensorProto.FLOAT, [ENTRIES]), value("k", TensorProto.FLOAT, [1])]
    graph = helper.make_graph(nodes, "chain", inputs, [value("loss", TensorProto.FLOAT, [])])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_no_bound_is_above_what_a_loop_takes():
    original = begin(chain(8), {"run_by": "loop"})
    assert original.footprint.live <= 4 * ENTRIES + 64  # one buffer for all of them
    assert original.impossible_below(original.memory.floor) <= original.footprint.total
    assert original.memory.floor <= 2 * 4 * ENTRIES + 64  # the input, and that buffer


def test_an_output_may_lie_over_what_it_is_made_of():
    """The product dies in the Softplus, which is an output: a session needs one buffer, ONNX Runtime's own two."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[1024,1] a, float[1,1024] b) => (float[1024,1024] y) '
        "{ x = MatMul(a, b) y = Softplus(x) }"
    )
    loop, session = (begin(model, {"run_by": by}) for by in ("loop", "session"))
    assert loop.footprint.live == 4 * 1024 * 1024
    assert loop.memory.floor <= loop.footprint.live + 2 * 4 * 1024
    assert session.memory.floor >= 2 * 4 * 1024 * 1024


def test_bounds_leave_out_what_lies_outside_of_the_slab():
    """A thousand products of 4,000 bytes each are joined to an output; the bookkeeping has them."""
    products = " ".join(f"v{i} = MatMul(p, w)" for i in range(1000))
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[1,8] p, float[8,1000] w) => (float[1,1000000] y) '
        f"{{ {products} y = Concat<axis = 1>({', '.join(f'v{i}' for i in range(1000))}) }}"
    )
    original = begin(model, {"run_by": "loop"})
    assert original.footprint.live <= 4_000_000 + 64
    assert original.memory.floor <= original.footprint.live + 4 * 8008


def test_a_sum_of_tensors_is_bounded_as_before():
    original = begin(chain(8), {"run_by": "session"})
    assert original.memory.floor >= 3 * 4 * ENTRIES


def test_what_is_as_low_as_it_goes_is_said_to_be():
    report = rewrite_model(chain(8), "100%", effort=0.1).report
    assert report.impossible_below <= report.after.total + 5_000_000


@pytest.mark.parametrize("budget", few(["80%", "60%", "50%"], ["60%"]))
def test_the_bound_for_a_loop_leaves_the_books_and_the_workspace_out(budget):
    """On a chain it is all but the plan; what no schedule can use would let it do with less."""
    report = rewrite_model(sample.chain(64, 512, 512), budget, run_by="loop", effort=0.5, fuse=False).report
    assert 0 <= report.extra_compute - report.extra_compute_bound <= 0.01
    assert report.extra_compute > 0.02


def test_a_bound_that_the_file_itself_disproves_is_none(monkeypatch):
    """Where ONNX Runtime fuses nodes, a file may keep a budget that its nodes one by one could not."""
    monkeypatch.setattr(pipeline, "cost_lower_bound", lambda *_, **__: math.inf)
    report = rewrite_model(sample.chain(16, 256, 256), "70%", run_by="loop", effort=0.5, fuse=False).report
    assert report.extra_compute_bound == 0 < report.extra_compute
    assert "points above any possible plan" in report.verdict()


def test_a_plain_session_has_no_kernels_that_compute_again():
    """What its bound takes as free is not free: without a better bound nothing is known of the least."""
    options = {"run_by": "session", "level": "all", "effort": 0.05, "verify": "none"}
    report = rewrite_model(sample.chain(8, 1024, 64), "60%", **options).report
    assert report.extra_compute_in_kernels == 0 < report.extra_compute - report.extra_compute_bound
    assert "points above any possible plan" in report.verdict()


def test_the_least_possible_is_said_only_of_what_the_bound_proves():
    """Kernels can compute all that this plan recomputes: another plan may recompute less."""
    report = rewrite_model(sample.chain(16, 4096, 64), "60%", effort=0.05, verify="none").report
    assert report.extra_compute == pytest.approx(report.extra_compute_in_kernels) and report.extra_compute > 0
    assert report.extra_compute_bound == 0
    assert report.verdict().endswith(", above any possible plan only by what kernels can recompute")
    none = rewrite_model(sample.chain(16, 4096, 64), "100%", effort=0.05, verify="none").report
    assert none.verdict().endswith(", the least possible")


@pytest.mark.slow
def test_what_kernels_compute_again_is_no_distance_from_the_best_plan():
    """The bound takes it as free, as a kernel may compute it without any plan."""
    report = rewrite_model(SAMPLES / "attention_stack.onnx", "60%", effort=0.3).report
    inside = report.extra_compute_in_kernels
    assert 0 < inside < report.extra_compute
    gap = 100 * (report.extra_compute - inside - report.extra_compute_bound)
    assert f"at most {gap:.1f} points above any possible plan" in report.verdict()
    assert f"that kernels can compute                  +{inside:.2%}" in report.to_text()
