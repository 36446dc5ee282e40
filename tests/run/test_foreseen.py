"""What training takes: the parts add up, a plan for a loop keeps its budget, and the machine agrees."""

from __future__ import annotations

import sys

import onnx
import pytest

import onnx_remat
from onnx_remat.errors import BudgetInfeasibleError, UsageError
from onnx_remat.run.foreseen import books
from tests.support.graphs import feeds_for, mlp, run_model, same_bits

pytest.importorskip("onnxruntime")
QUICK = {"effort": 0.5}


@pytest.fixture(scope="module")
def result():
    return onnx_remat.rewrite_model(mlp(layers=12, batch=32768, width=32), "60%", run_by="loop", **QUICK)


def test_the_parts_of_what_training_takes_add_up_and_keep_the_budget(result):
    report = result.report
    taken = report.loop_after
    assert taken.total == taken.inputs + taken.weights + taken.slab + taken.workspace + taken.books <= report.budget
    assert report.budget == pytest.approx(0.6 * report.loop_before.total, abs=1)
    assert taken.live <= taken.slab <= 1.02 * taken.live
    assert "training takes" in report.verdict() and "training by Loop takes" in report.to_text()


def test_renewed_state_costs_nothing_and_no_value_needs_a_buffer_of_its_own(result):
    assert result.report.loop_after.donated == 12 and not result.report.loop_after.not_donated
    assert result.report.private_values == 0


def test_a_plan_for_a_loop_computes_the_same(result):
    model = mlp(layers=12, batch=32768, width=32)
    feeds = feeds_for(model)
    assert same_bits(run_model(model, feeds), run_model(result.model, feeds))


def test_the_same_budget_costs_a_loop_no_more_compute_than_a_session():
    """A loop's slab holds no new weights, and no dead buffers."""
    model = mlp(layers=12, batch=32768, width=32)
    by_loop = onnx_remat.rewrite_model(model, "60%", run_by="loop", **QUICK).report
    tensors = by_loop.budget - books(by_loop.nodes_before)
    by_session = onnx_remat.rewrite_model(model, tensors, **QUICK).report
    assert by_loop.extra_compute <= by_session.extra_compute + 0.01


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")
def test_the_machine_takes_what_was_foreseen(result, tmp_path):
    from scripts.resident import in_child

    result.save(tmp_path / "small.onnx")
    small = onnx.helper.make_graph(
        [onnx.helper.make_node("Neg", ["x"], ["y"])], "g",
        [onnx.helper.make_tensor_value_info("x", 1, [4])], [onnx.helper.make_tensor_value_info("y", 1, [4])],
    )  # fmt: skip
    onnx.save(
        onnx.helper.make_model(small, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10),
        tmp_path / "warm.onnx",
    )
    found = in_child("train", tmp_path / "small.onnx", tmp_path / "warm.onnx", "loss", 10)
    assert found["resident"] <= result.report.budget
    # What ONNX Runtime keeps for a graph is foreseen from above, and differs by a few megabytes between machines.
    foreseen = result.report.loop_after.total
    assert foreseen - 6e6 < found["resident"] < foreseen + 1e6


def test_what_the_books_alone_exceed_is_refused():
    with pytest.raises(BudgetInfeasibleError, match="proved"):
        onnx_remat.rewrite_model(mlp(layers=4, batch=64, width=8), "2MB", run_by="loop", **QUICK)


def test_arena_and_loop_exclude_each_other():
    with pytest.raises(UsageError, match="arena"):
        onnx_remat.rewrite_model(mlp(layers=4), "60%", run_by="loop", arena=True)
    with pytest.raises(UsageError, match="run_by"):
        onnx_remat.rewrite_model(mlp(layers=4), "60%", run_by="train")


def test_what_prices_tensors_refuses_budgets_for_a_loop():
    from onnx_remat.sweep import sweep

    with pytest.raises(UsageError, match="sum of tensors"):
        sweep(mlp(layers=4), 3, run_by="loop")
