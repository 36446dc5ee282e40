"""Moments of an optimizer that stay on the host: which state that is, what it costs, and what the device holds."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import onnx
import pytest

from onnx_remat import plan_model, rewrite_model
from onnx_remat.errors import BudgetInfeasibleError, UsageError
from onnx_remat.findings.explain import explain
from onnx_remat.findings.show import slab
from onnx_remat.ir.model_io import Source
from onnx_remat.measure import verify
from onnx_remat.options import parse_options
from onnx_remat.ort.executed import as_executed
from onnx_remat.ort.host_state import movable_state, with_state_on_host
from onnx_remat.ort.kernels.registry import kernels_of
from onnx_remat.ort.moves import DOWN, UP, Moved, movable
from onnx_remat.ort.prepare import Preparation, prepare
from onnx_remat.session import fusing, prediction
from onnx_remat.session.copies import Stated
from onnx_remat.units import format_bytes, parse_budget
from tests.support.adam import adam
from tests.support.copies_check import check_copies
from tests.support.fake_cuda import here
from tests.support.graphs import mlp
from tests.support.updated import momentum, updated

pytestmark = pytest.mark.skipif(bool(fusing.why_not("cuda")), reason=fusing.why_not("cuda"))
DEVICE = {"provider": "cuda", "run_by": "loop", "effort": 0.5, "verify": "none"}
WIDTH, LAYERS = 256, 4
MOMENTS = 2 * (LAYERS - 1) * 4 * WIDTH * WIDTH  # two layers share their weights; moments of biases are small


@pytest.fixture(scope="module")
def rewritten():
    model = adam(layers=LAYERS, batch=512, width=WIDTH)
    return model, rewrite_model(model, "70%", offload_state=True, host_bandwidth="1TB", costs="t4", **DEVICE)


def test_what_only_its_update_reads_may_live_on_the_host():
    model = adam(layers=LAYERS, batch=512, width=WIDTH)
    found = movable_state(prepare(model, Preparation(kernels_of("cuda"))))
    assert len(found) == MOMENTS // (4 * WIDTH * WIDTH)
    assert all(output == f"new.{name}" for name, output in found.items())
    weights = {node.input[1] for node in model.graph.node if node.op_type == "MatMul"}
    assert weights.isdisjoint(found) and "shift" not in found


def test_the_device_holds_no_moments_between_updates(rewritten):
    _, result = rewritten
    report = result.report
    before, after = report.loop_before, report.loop_after
    assert after.state_on_host == MOMENTS == after.on_host
    assert before.inputs - after.inputs == MOMENTS
    assert after.total <= report.budget == int(0.7 * before.total)
    assert after.waited < after.copies and report.extra_compute < 0.5
    executed = as_executed(result.model, None, "all", Preparation(kernels_of("cuda")))
    made = prediction.laid_out(executed)
    count = len(made.state)
    assert check_copies(made) == (count, count)


def test_the_report_says_where_state_lies(rewritten):
    _, result = rewritten
    assert "of state on the host" in result.report.verdict()
    assert "state on the host" in result.report.to_text()


def test_the_report_on_a_file_whose_state_was_on_the_host_says_so_too(rewritten):
    text = rewrite_model(rewritten[1].model, "100%", costs="t4", **DEVICE).report.to_text()
    moments = format_bytes(MOMENTS)
    assert re.search(rf"^  state on the host +{moments} +{moments}$", text, re.M)
    assert "kernels wait for copies" in text and "copies of state" not in text


def test_the_report_tells_copies_of_state_from_the_original_s_nodes(rewritten):
    model, result = rewritten
    report, copies = result.report, 2 * MOMENTS // (4 * WIDTH * WIDTH)
    assert report.nodes_before == len(model.graph.node) and report.state_copies == copies
    assert report.nodes_after == len(result.model.graph.node)
    before, after = (Counter(node.op_type for node in each.graph.node) for each in (model, result.model))
    added = after - before
    assert added.pop(DOWN) + added.pop(UP) == copies
    assert report.helpers() + report.control_edges + report.recomputed == added.total() > 0
    assert "kernels wait for copies" in report.to_text()


def test_the_plot_draws_no_state_that_lies_on_the_host(rewritten):
    _, result = rewritten
    assert sum(size for _, size in slab.after(result).inputs) == result.report.loop_after.inputs


def test_the_plot_draws_the_layout_of_the_file():
    """Where none of the layouts with more room is taken, the last one tried is not what was executed."""
    model = updated(momentum, "m", layers=1, batch=2, width=512)
    result = rewrite_model(model, "100%", offload_state=True, host_bandwidth="1TB", costs="t4", **DEVICE)
    highest = max(block.offset + block.bytes for block in slab.after(result).blocks)
    assert 0 <= result.report.loop_after.slab - highest < 256
    assert Stated.of(result.model) == Stated.of(result.executed.compiled.graph.model)


def test_an_explanation_counts_no_state_on_the_host_to_the_device(rewritten):
    _, result = rewritten
    found = explain(result.model)
    assert found.state_on_host == MOMENTS
    assert f"{format_bytes(MOMENTS)} of state lies on the host but for its update" in found.to_text()
    loop, held = result.report.loop_after, {frame.name: frame.bytes for frame in found.by_module.inside}
    assert held["inputs and weights"] == loop.inputs + loop.weights


def test_the_verdict_names_what_kernels_wait_for(rewritten):
    state = format_bytes(MOMENTS)
    both = replace(rewritten[1].report, moved=Moved(("a",), 2_000_000, 0.01, 0.9))
    assert f"to wait for 2.0 MB and {state} of state to the host and back" in both.verdict()


def test_a_result_that_takes_more_has_one_sign(rewritten):
    report = rewritten[1].report
    assert "(+1.0%)" in replace(report, covered_after=report.covered_before * 101 // 100).verdict()


def test_an_order_is_pinned_by_the_smallest_input_not_by_state_on_the_host(rewritten):
    assert {node.input[0] for node in rewritten[1].model.graph.node if node.op_type == "Size"} == {"count.steps"}


def test_numbers_are_those_of_the_original(rewritten, tmp_path):
    model, result = rewritten
    onnx.save(model, tmp_path / "before.onnx")
    result.save(tmp_path / "after.onnx")
    assert verify.bitwise(tmp_path / "before.onnx", tmp_path / "after.onnx").startswith("bitwise equal")


def test_the_same_call_writes_the_same_file(rewritten):
    model, result = rewritten
    again = rewrite_model(model, "70%", offload_state=True, host_bandwidth="1TB", costs="t4", **DEVICE)
    assert again.model.SerializeToString() == result.model.SerializeToString()


def test_new_state_that_leaves_for_the_host_is_not_moved_there_once_more():
    """ONNX Runtime would merge the two copies, and the state would come back to the device."""
    model = adam(layers=2, batch=512, width=WIDTH)
    state = movable_state(prepare(model, Preparation(kernels_of("cuda"))))
    moved = prepare(with_state_on_host(Source(model, None), state).model, Preparation(kernels_of("cuda")))
    leaving = {op.inputs[0] for op in moved.graph.ops if op.outputs[0] in state.values()}
    assert len(leaving) == len(state) > 0
    assert leaving.isdisjoint(movable(moved)) and movable(moved)


@pytest.mark.slow
def test_values_can_be_moved_as_well():
    model = adam(layers=8, batch=2048, width=WIDTH)
    result = rewrite_model(model, "45%", offload=True, offload_state=True, host_bandwidth="1TB", costs="t4", **DEVICE)
    report = result.report
    assert report.loop_after.total <= report.budget and report.loop_after.state_on_host
    assert report.moved is not None and report.loop_after.on_host > report.loop_after.state_on_host


def test_what_the_step_takes_with_its_state_on_the_host_can_be_asked_for():
    """The memory of an update of one large weight is that of its own state: there is no room for a margin."""
    model = updated(momentum, "m", layers=1, batch=2, width=512)
    report = rewrite_model(model, "100%", offload_state=True, host_bandwidth="1TB", costs="t4", **DEVICE).report
    assert report.recomputed == 0 and report.loop_after.state_on_host == 4 * 512 * 512
    assert report.covered_after <= report.budget
    with pytest.raises(BudgetInfeasibleError) as refused:
        rewrite_model(model, "99%", offload_state=True, host_bandwidth="1TB", costs="t4", **DEVICE)
    assert refused.value.settings["budget"] == report.covered_after
    assert "finds none that takes less than the step with its state on the host: try" in str(refused.value)


@pytest.mark.slow
def test_a_limit_on_time_that_no_budget_keeps_is_refused():
    """The model as it is, the answer elsewhere, has its state on the device."""
    model = updated(momentum, "m")
    given = DEVICE | {"offload_state": True, "host_bandwidth": "100MB", "costs": "t4", "effort": 0.1}
    with pytest.raises(BudgetInfeasibleError, match=r"at most 5% more time.*leave out offload_state=True") as refused:
        rewrite_model(model, "+5%", **given)
    advised = refused.value.settings["budget"]
    report = rewrite_model(model, advised, **given).report
    assert 0.05 < report.extra_time() <= parse_budget(advised).slower


@pytest.mark.parametrize("option", ["offload", "offload_state"])
def test_a_plan_alone_names_the_option_that_it_refuses(option):
    with pytest.raises(UsageError, match=f"^{option}=True: .* call that$"):
        plan_model(updated(momentum, "m"), "90%", provider="cuda", run_by="loop", costs="t4", **{option: True})


def test_a_step_without_such_state_is_refused():
    with pytest.raises(UsageError, match=r"no input of at least 65\.5 kB is read by its own update alone"):
        rewrite_model(mlp(layers=4, batch=4096, width=64), "60%", offload_state=True, **DEVICE)


def test_state_of_which_none_can_lie_on_the_host_is_refused_for_that_reason():
    model = updated(momentum, "m", layers=1)
    model.graph.output.append(next(value for value in model.graph.input if value.name == "m0"))
    with pytest.raises(UsageError, match=r"'m0' cannot lie on the host: .* or it is an output itself: leave this out"):
        rewrite_model(model, "90%", offload_state=True, costs="t4", **DEVICE)


def test_the_report_says_what_state_stays_on_the_device(rewritten):
    model, result = updated(momentum, "m"), rewritten[1]
    model.graph.output.append(next(value for value in model.graph.input if value.name == "m0"))
    report = rewrite_model(model, "98%", offload_state=True, costs="t4", **DEVICE | {"effort": 0.1}).report
    assert report.loop_after.state_on_host == 128 * 128 * 4
    (note,) = (note for note in report.notes if note.startswith("65.5 kB of state stays on the device"))
    assert note.endswith("or it is an output itself") and "after" not in note
    assert "of state stays on the device" not in result.report.to_text()


def test_state_that_was_on_the_host_before_is_not_counted_to_what_stays_on_the_device():
    model = updated(momentum, "m", layers=3)
    model.graph.output.append(next(value for value in model.graph.input if value.name == "m0"))
    before = with_state_on_host(Source(model, None), {"m1": "new.m1"}).model
    report = rewrite_model(before, "98%", offload_state=True, costs="t4", **DEVICE | {"effort": 0.1}).report
    assert report.loop_after.state_on_host == 2 * 128 * 128 * 4
    assert any(note.startswith("65.5 kB of state stays on the device") for note in report.notes)


def test_no_note_advises_what_is_refused_with_state_on_the_host(rewritten):
    (note,) = [note for note in rewritten[1].report.notes if "above the budget" in note]
    assert note.endswith("plan with fuse=False and without offload_state=True")


def test_a_machine_without_our_kernels_is_told_so(monkeypatch):
    monkeypatch.setattr("onnx_remat.fuse.cuda.why_not", lambda: "llvmlite is not installed")
    with pytest.raises(UsageError, match="which this machine cannot run: llvmlite is not installed"):
        rewrite_model(updated(momentum, "m"), "90%", offload_state=True, costs="t4", **DEVICE)


def test_a_step_with_its_state_on_the_host_is_refused(rewritten):
    _, result = rewritten
    with pytest.raises(UsageError, match="state is on the host already: leave this out"):
        rewrite_model(result.model, "90%", offload_state=True, costs="t4", **DEVICE)


@pytest.fixture(scope="module")
def rewritten_again(rewritten):
    """A file whose state is on the host, for less memory."""
    return rewrite_model(rewritten[1].model, "92%", costs="t4", **DEVICE | {"effort": 0.02})


@pytest.mark.slow
def test_a_file_that_is_rewritten_again_keeps_its_state_on_the_host(rewritten, rewritten_again):
    report, before, after = rewritten_again.report, Stated.of(rewritten[1].model), Stated.of(rewritten_again.model)
    assert report.loop_after.state_on_host == MOMENTS
    assert report.loop_after.total <= report.budget == int(0.92 * report.loop_before.total)
    assert after.bandwidth == before.bandwidth and after.live > 1
    made = prediction.laid_out(as_executed(rewritten_again.model, None, "all", Preparation(kernels_of("cuda"))))
    assert check_copies(made) == (len(made.state),) * 2


def test_no_budget_is_called_impossible_that_the_same_state_on_the_host_keeps(rewritten, rewritten_again):
    """The bounds of the file are those of the step that it was made from."""
    assert rewritten_again.report.impossible_below <= rewritten[1].report.impossible_below


def test_what_the_original_waits_for_its_copies_is_no_extra_compute():
    model = updated(momentum, "m", layers=2, batch=128, width=256)
    given = DEVICE | {"costs": "t4", "effort": 0.01}
    slow = rewrite_model(model, "100%", offload_state=True, host_bandwidth="1GB", **given)
    report = rewrite_model(slow.model, "97%", **given).report
    assert report.loop_before.waited > report.loop_before.seconds / 2
    assert report.extra_compute < 0.2


def test_a_file_that_is_rewritten_without_our_kernels_has_its_state_on_the_device(rewritten):
    report = rewrite_model(rewritten[1].model, "100%", costs="t4", fuse=False, **DEVICE).report
    assert report.loop_before.state_on_host == report.loop_after.state_on_host == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"offload_state": True}, "provider='cuda', run_by='loop'"),
        ({"offload_state": True, "provider": "cuda", "run_by": "session"}, "provider='cuda', run_by='loop'"),
        ({"offload_state": True, "provider": "cuda", "run_by": "loop", "fuse": False}, "leave out fuse=False"),
        ({"offload_state": True, "provider": "cuda", "run_by": "loop", "costs": "cpu"}, "set host_bandwidth="),
    ],
)
def test_what_cannot_be_meant_is_refused(given, words):
    with pytest.raises(UsageError, match=words):
        parse_options(given)


@pytest.mark.skipif(bool(here.why_not()), reason=here.why_not())
def test_a_loop_takes_what_is_predicted(rewritten, tmp_path):
    _, result = rewritten
    result.save(tmp_path / "step.onnx")
    job = {"path": str(tmp_path / "step.onnx"), "limits": [0], "graph": None, "loop": True}
    (found,) = here.ask("tests.support.fake_cuda.session", job)
    predicted = result.report.loop_after.total
    assert all(0 <= predicted - step["peak"] <= 0.01 * predicted for step in found["steps"])
    assert [step["replays"] for step in found["steps"]] == [1] * 3
