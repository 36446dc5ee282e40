"""Copies to the host and back that run alongside the kernels: their places, their order, their numbers."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import helper

from onnx_remat import rewrite_model
from onnx_remat.fuse.shim import IN, OUT, WAIT
from onnx_remat.ir.metadata import COPIES_KEY
from onnx_remat.ort import runtime
from onnx_remat.ort.executed import Executed, as_executed
from onnx_remat.ort.kernels.registry import kernels_of
from onnx_remat.ort.moves import DOWN, UP
from onnx_remat.ort.prepare import Preparation
from onnx_remat.session import fusing, kernel_file, lean_graph, overlap, plan_session, prediction
from onnx_remat.session.copies import Stated, kind_of
from onnx_remat.session.offsets import least
from onnx_remat.session.slab_layout import SlabLayout, lay_out
from tests.support.copies_check import check_copies
from tests.support.fake_cuda import here
from tests.support.graphs import mlp, model_of
from tests.support.slow import few

pytestmark = pytest.mark.skipif(bool(fusing.why_not("cuda")), reason=fusing.why_not("cuda"))
on_fake_device = pytest.mark.skipif(bool(here.why_not()), reason=here.why_not())
OUT_LATE, IN_LATE = 1, 2  # directions of the fake device that copy as late as anything waits for them
SIZES = [100_000 + 1000 * i for i in range(6)]


def there_and_back(live: int, bandwidth: float = 1e9) -> onnx.ModelProto:
    """Each of six states is computed, moved, and read in reverse order; of different sizes, so that none are fused."""
    nodes = []
    for i in range(6):
        nodes += [
            helper.make_node("Exp", [f"w{i}"], [f"e{i}"], name=f"exp{i}"),
            helper.make_node("Tanh", [f"e{i}"], [f"h{i}"], name=f"tanh{i}"),
            helper.make_node(DOWN, [f"h{i}"], [f"home{i}"], name=f"down{i}"),
        ]
    for i in reversed(range(6)):
        nodes += [
            helper.make_node(UP, [f"home{i}"], [f"back{i}"], name=f"up{i}"),
            helper.make_node("Mul", [f"back{i}", f"w{i}"], [f"m{i}"], name=f"mul{i}"),
            helper.make_node("Add", [f"m{i}", f"back{i}"], [f"new.w{i}"], name=f"add{i}"),
        ]
    nodes.append(helper.make_node("ReduceSum", ["back0"], ["loss"], name="loss", keepdims=0))
    shapes = {f"w{i}": [size] for i, size in enumerate(SIZES)}
    model = model_of(nodes, shapes, {"loss": []} | {f"new.{name}": shape for name, shape in shapes.items()})
    Stated(bandwidth, "h100", live).put(model)
    return model


def laid(model: onnx.ModelProto) -> SlabLayout:
    return prediction.laid_out(executed(model))


def executed(model: onnx.ModelProto) -> Executed:
    return as_executed(model, None, "all", Preparation(kernels_of("cuda")))


def kinds(made: SlabLayout) -> list[str]:
    letters = {None: "k", OUT: "o", IN: "i", WAIT: "w"}
    return [letters[kind_of(step.node)] for step in made.program.steps]


@pytest.mark.parametrize("live", [1, 900_000, 1_300_000, 10_000_000])
@pytest.mark.parametrize("bandwidth", [1e8, 1e12])
def test_every_node_reads_what_was_made_for_it(live, bandwidth):
    """Whatever room there is, and however long copies take: done at once, or as late as anything waits for them."""
    made = laid(there_and_back(live, bandwidth))
    assert made.pinned >= 4 * sum(SIZES[:5])
    assert check_copies(made) == (6, 6)
    assert made.offsets.live <= max(live, prediction.without_overlap(executed(there_and_back(0))).offsets.live)


def test_what_no_kernel_has_to_wait_for_takes_no_time():
    """With room for all values kernels wait less than with little, where they wait for each copy."""
    kernels = overlap.timeline(laid(there_and_back(0, 1e15)))
    wide, narrow = (overlap.timeline(laid(there_and_back(live, 1e11))) for live in (10_000_000, 1))
    plain = overlap.timeline(laid(there_and_back(0, 1e11)))
    assert wide.copies == pytest.approx(narrow.copies) == pytest.approx(plain.copies)
    assert wide.waited < 0.9 * narrow.waited and narrow.waited == pytest.approx(plain.waited) == plain.copies
    assert plain.seconds == pytest.approx(kernels.seconds - kernels.copies + plain.copies)


def test_without_room_a_copy_is_waited_for_where_its_memory_is_needed():
    assert "".join(kinds(laid(there_and_back(1)))) == "kow" * 6 + "iwk" * 6 + "k"


def test_more_room_lets_copies_run_ahead():
    order = "".join(kinds(laid(there_and_back(1_300_000, 1e10))))
    assert order.count("o") == order.count("i") == 6 and order.count("w") == 12
    assert "kow" * 6 not in order and "iwk" * 6 not in order


UNREADABLE = ["", "[]", '{"bandwidth": 0, "costs": "t4"}', '{"costs": 1}', "{", '{"live": "x"}', "[" * 100_000]


@pytest.mark.parametrize("text", UNREADABLE, ids=range(len(UNREADABLE)))
def test_a_file_that_says_nothing_of_its_copies_runs_them_with_the_kernels(text):
    model = there_and_back(1)
    del model.metadata_props[:]
    model.metadata_props.add(key=COPIES_KEY, value=text)
    made = laid(model)
    assert not made.copies and made.pinned == 0
    assert sum(step.node.op_type in (DOWN, UP) for step in made.program.steps) == 12


def test_why_copies_run_in_turn_is_known():
    made, in_turn = laid(there_and_back(1)), prediction.without_overlap(executed(there_and_back(1)))
    assert overlap.why_in_turn(made) == overlap.why_in_turn(laid(there_and_back(0))) == ""
    assert "another order" in overlap.why_in_turn(in_turn)
    refused = replace(in_turn, fused=replace(in_turn.fused, why_not="it is refused"))
    assert overlap.why_in_turn(refused) == "it is refused"
    silent = there_and_back(1)
    del silent.metadata_props[:]
    assert COPIES_KEY in overlap.why_in_turn(laid(silent))
    model = there_and_back(1)
    model.graph.output.append(helper.make_tensor_value_info("home3", onnx.TensorProto.FLOAT, [SIZES[3]]))
    partly = laid(model)
    assert partly.copies and "what node 'down3' copies is also an output" in overlap.why_in_turn(partly)


def test_copies_for_a_node_without_a_kernel_on_the_device_are_no_planned_ones():
    """ONNX Runtime adds them to the step that it loads, whether or not the file plans copies."""
    model = state_on_host(1)
    nodes = [
        helper.make_node(DOWN, ["square"], ["square there"], name="Memcpy"),
        helper.make_node("Det", ["square there"], ["det there"], name="det"),
        helper.make_node(UP, ["det there"], ["det"], name="Memcpy_token_1"),
        helper.make_node("Neg", ["det"], ["size"], name="size"),
    ]
    for at, node in enumerate(nodes):
        model.graph.node.insert(at, node)
    model.graph.input.append(helper.make_tensor_value_info("square", onnx.TensorProto.FLOAT, [4, 4]))
    model.graph.output.append(helper.make_tensor_value_info("size", onnx.TensorProto.FLOAT, []))
    made = laid(model)
    assert made.copies and overlap.why_in_turn(made) == ""


def test_state_that_is_not_donated_is_copied_in_turn_for_that_reason():
    step, outputs = executed(state_on_host(1)), [value.name for value in state_on_host(1).graph.output]
    undonated = lay_out(step, outputs, donate=False, least=1)
    assert overlap.why_in_turn(undonated) == "state 'm0' is not donated: pass donate=True"
    refused = replace(undonated, offsets=replace(undonated.offsets, not_donated={"new.m0": "it is not"}))
    assert overlap.why_in_turn(refused) == "'new.m0' cannot take the place of 'm0': it is not"


@pytest.mark.slow
@on_fake_device
def test_a_session_warns_of_copies_that_run_in_turn(tmp_path):
    model = there_and_back(1)
    model.metadata_props[0].value = "{"
    onnx.save(model, tmp_path / "step.onnx")
    (found,) = here.ask("tests.support.fake_cuda.session", {"path": str(tmp_path / "step.onnx"), "limits": [0]})
    assert "cannot be read: rewrite the original again" in found["warned"][-1]


def test_a_file_that_says_more_than_is_known_is_read_as_far_as_it_is(tmp_path):
    """Written by a later version, for a device that this one does not know; it names no file that would be opened."""
    model, plain = there_and_back(1), laid(there_and_back(1))
    said = {"bandwidth": 1e9, "costs": str(tmp_path / "profile.json"), "live": 1, "more": [1]}
    model.metadata_props[0].value = json.dumps(said)
    assert kinds(laid(model)) == kinds(plain) and plain.copies


def test_a_value_that_leaves_twice_is_copied_to_the_host_once():
    model = there_and_back(1)
    nodes = list(model.graph.node)
    last = next(i for i, node in enumerate(nodes) if node.name == "up5")
    again = [
        helper.make_node(DOWN, ["back5"], ["home5b"], name="down5b"),
        helper.make_node(UP, ["home5b"], ["back5b"], name="up5b"),
    ]
    add = next(node for node in nodes if node.name == "add0")
    nodes.insert(last + 1, again[0])
    nodes.insert(nodes.index(add), again[1])
    add.input[1] = "more"
    nodes.insert(nodes.index(add), helper.make_node("ReduceSum", ["back5b"], ["more"], name="more", keepdims=0))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    made = laid(model)
    assert check_copies(made) == (6, 7)


def state_on_host(live: int) -> onnx.ModelProto:
    """Momentum of six sizes on the host; the loss reads none of it."""
    nodes = [helper.make_node("ReduceSum", ["w0"], ["loss"], name="loss", keepdims=0)]
    for i in range(6):
        nodes += [
            helper.make_node(UP, [f"m{i}"], [f"there{i}"], name=f"up{i}"),
            helper.make_node("Tanh", [f"there{i}"], [f"k{i}"], name=f"k{i}"),
            helper.make_node("Add", [f"k{i}", f"w{i}"], [f"made{i}"], name=f"made{i}"),
            helper.make_node(DOWN, [f"made{i}"], [f"new.m{i}"], name=f"down{i}"),
            helper.make_node("Mul", [f"w{i}", f"made{i}"], [f"new.w{i}"], name=f"w{i}"),
        ]
    shapes = {f"{letter}{i}": [size] for letter in "wm" for i, size in enumerate(SIZES)}
    model = model_of(nodes, shapes, {"loss": []} | {f"new.{name}": shape for name, shape in shapes.items()})
    Stated(1e10, "h100", live).put(model)
    return model


@pytest.mark.parametrize("live", [1, 1_300_000, 10_000_000])
def test_state_on_the_host_takes_no_memory_of_the_device_between_steps(live):
    made = laid(state_on_host(live))
    assert check_copies(made) == (6, 6)
    assert made.state.keys() == {f"m{i}" for i in range(6)}
    footprint = prediction.footprint(made)
    assert footprint.inputs == 4 * sum(SIZES) and footprint.state_on_host == 4 * sum(SIZES)
    assert footprint.slab < max(live, 8 * max(SIZES)) + 4096 and footprint.donated == 12


def test_state_that_is_read_after_its_new_value_left_is_copied_once():
    """The old value is still in the slab, while the new one is copied over the host's."""
    model = state_on_host(1)
    late = helper.make_node("Mul", ["again", "new.w3"], ["late"], name="late")
    total = helper.make_node("ReduceSum", ["late"], ["sum"], name="sum", keepdims=0)
    model.graph.node.extend([helper.make_node(UP, ["m3"], ["again"], name="again"), late, total])
    model.graph.output.extend([helper.make_tensor_value_info("sum", onnx.TensorProto.FLOAT, [])])
    made = laid(model)
    assert check_copies(made) == (6, 6)
    assert len(made.state) == 6


def test_one_value_may_renew_two_states_on_the_host():
    """As an Identity that ONNX Runtime removes leaves it."""
    nodes = [
        helper.make_node(UP, ["m"], ["old"], name="up m"),
        helper.make_node(UP, ["p"], ["older"], name="up p"),
        helper.make_node("Sub", ["old", "older"], ["change"], name="change"),
        helper.make_node("Add", ["change", "w"], ["made"], name="made"),
        helper.make_node(DOWN, ["made"], ["new.m"], name="down m"),
        helper.make_node(DOWN, ["made"], ["new.p"], name="down p"),
        helper.make_node("Mul", ["w", "made"], ["new.w"], name="w"),
    ]
    shapes = {name: [SIZES[0]] for name in "wmp"}
    model = model_of(nodes, shapes, {f"new.{name}": shape for name, shape in shapes.items()})
    Stated(1e10, "h100", 1).put(model)
    made = laid(model)
    results = [name for step in made.program.steps for name in step.writes]
    assert made.state.keys() == {"m", "p"} and len(results) == len({*results})
    assert check_copies(made) == (2, 2)


@pytest.mark.parametrize("live", [1, 10_000_000])
@pytest.mark.parametrize("bandwidth", [1e6, 1e15])
def test_a_weight_that_is_copied_is_renewed_in_place_all_the_same(live, bandwidth):
    """The weights of the last step, for the rate of the next: however long their copy takes, it is done by then."""
    nodes = [
        helper.make_node(UP, ["last"], ["there"], name="up"),
        helper.make_node("Sub", ["w", "there"], ["moved"], name="moved"),
        helper.make_node(DOWN, ["w"], ["new.last"], name="down"),
        helper.make_node("ReduceMean", ["moved"], ["rate"], name="rate", keepdims=0),
        helper.make_node("Tanh", ["g"], ["slope"], name="slope"),
        helper.make_node("Mul", ["slope", "rate"], ["far"], name="far"),
        helper.make_node("Sub", ["w", "far"], ["new.w"], name="renew"),
    ]
    shapes = {name: [SIZES[0]] for name in ("w", "g", "last")}
    model = model_of(nodes, shapes, {f"new.{name}": shapes[name] for name in ("w", "last")})
    Stated(bandwidth, "h100", live).put(model)
    made = laid(model)
    assert made.state.keys() == {"last"}
    assert made.offsets.donated == {"new.w": "w"} and made.offsets.not_donated == {}
    assert check_copies(made) == (1, 1)


def heavy_ball():
    """The weights of the last step: they leave before those are read that come."""
    return [
        helper.make_node(DOWN, ["w"], ["new.p"], name="down"),
        helper.make_node("Tanh", ["g"], ["slope"], name="slope"),
        helper.make_node(UP, ["p"], ["there"], name="up"),
        helper.make_node("Sub", ["slope", "there"], ["far"], name="far"),
        helper.make_node("Sub", ["w", "far"], ["new.w"], name="renew"),
    ]


def swap():
    """Two states that change places."""
    return [
        helper.make_node(UP, ["p"], ["old p"], name="up p"),
        helper.make_node(UP, ["q"], ["old q"], name="up q"),
        helper.make_node("Sub", ["w", "old p"], ["closer"], name="closer"),
        helper.make_node(DOWN, ["old q"], ["new.p"], name="down p"),
        helper.make_node("Mul", ["closer", "g"], ["new.w"], name="renew"),
        helper.make_node(DOWN, ["old p"], ["new.q"], name="down q"),
    ]


@pytest.mark.parametrize("live", [1, 10_000_000])
@pytest.mark.parametrize("nodes", [heavy_ball, swap])
def test_state_whose_new_value_is_ready_before_the_old_is_read_comes_first(nodes, live):
    shapes = {name: [SIZES[0]] for name in ("w", "g", "p", *("q" * (nodes is swap)))}
    model = model_of(nodes(), shapes, {f"new.{name}": shape for name, shape in shapes.items() if name != "g"})
    Stated(1e10, "h100", live).put(model)
    made = laid(model)
    assert made.state.keys() == shapes.keys() - {"w", "g"}
    assert check_copies(made) == (len(made.state),) * 2
    assert prediction.footprint(made).inputs == 2 * 4 * SIZES[0]
    assert made.offsets.donated == {"new.w": "w"}


def test_an_empty_value_moves_like_any_other(tmp_path):
    """As with an open size of 0."""
    nodes = [
        helper.make_node("Tanh", ["w"], ["h"], name="h"),
        helper.make_node(DOWN, ["h"], ["home"], name="down"),
        helper.make_node("Exp", ["w"], ["e"], name="e"),
        helper.make_node(UP, ["home"], ["back"], name="up"),
        helper.make_node("Mul", ["back", "e"], ["new.w"], name="mul"),
    ]
    model = model_of(nodes, {"w": [0, 4]}, {"new.w": [0, 4]})
    Stated(1e10, "h100", 1).put(model)
    made, path = laid(model), tmp_path / "kernels"
    assert len(made.copies) == 4
    kernel_file.write(made.kernels, 1, path, made.copies, made.pinned)
    with kernel_file.offered(path, runs=False):
        pass


@pytest.fixture(scope="module")
def moved():
    return rewrite_model(
        mlp(layers=12, batch=4096, width=128), "50%", offload=True, host_bandwidth="100GB", costs="t4", provider="cuda",
        run_by="loop", effort=0.5, verify="none",
    )  # fmt: skip


@pytest.mark.slow
def test_a_plan_pays_only_for_what_kernels_wait_for(moved):
    report = moved.report
    assert report.moved.covered > 0.9 and report.moved.share < 0.01
    assert report.loop_after.waited < 0.1 * report.loop_after.copies
    assert report.loop_after.total <= report.budget
    made = laid(moved.model)
    assert check_copies(made) == (len(report.moved.values),) * 2
    stated = json.loads(next(each.value for each in moved.model.metadata_props if each.key == COPIES_KEY))
    assert made.offsets.live <= stated["live"]


def test_without_kernels_of_ours_copies_run_with_the_others(moved):
    made = prediction.laid_out(executed(moved.model), fuse=False)
    assert not made.copies


def test_where_the_runtime_changes_the_fused_step_copies_still_run_alongside(moved):
    step = executed(moved.model)
    smallest = least(step.compiled.kernels)
    made = lay_out(step, [value.name for value in moved.model.graph.output], True, smallest, search=False)
    both, copies, neither = plan_session._candidates(made, smallest, 1)
    assert both.kernels and both.copies and not both.fused.why_not
    assert not copies.kernels and copies.fused.why_not == neither.fused.why_not != ""
    assert check_copies(copies) == check_copies(both) and not neither.copies
    assert overlap.timeline(copies).waited < 0.6 * overlap.timeline(neither).waited


@pytest.mark.parametrize("made_by", [there_and_back, state_on_host])
def test_copies_run_alongside_kernels_of_a_graph_that_the_runtime_changed(made_by, monkeypatch, tmp_path):
    """It changes each candidate of the first layout; the loaded graph is laid out then."""
    loads = []

    def changed_at_first(copy, *_):
        loads.append(copy)
        loaded = onnx.ModelProto.FromString(copy.SerializeToString())
        if len(loads) <= 3:
            loaded.graph.node.append(helper.make_node("Neg", ["w0"], ["new"], name="new"))
        return loaded

    monkeypatch.setattr(lean_graph, "as_loaded", changed_at_first)
    monkeypatch.setattr(runtime, "check_device", lambda _: None)
    request = plan_session.SessionRequest("cuda", donate=True, secret=1)
    made = plan_session.arrange(made_by(1), tmp_path / "step.onnx", request)
    assert len(loads) == 4 and overlap.why_in_turn(made) == ""
    assert check_copies(made) == (6, 6)


LATE = [(1, 0), (1, OUT_LATE + IN_LATE), (1_300_000, OUT_LATE), (1_300_000, IN_LATE)]


@on_fake_device
@pytest.mark.parametrize(("live", "late"), few(LATE, LATE[1:2], several=True))
def test_numbers_survive_the_way_to_the_host_and_back(late, live, tmp_path):
    model = there_and_back(live)
    onnx.save(model, tmp_path / "step.onnx")
    job = {"path": str(tmp_path / "step.onnx"), "limits": [0], "numbers": True}
    (found,) = here.ask("tests.support.fake_cuda.session", job, late=late)
    assert "outputs" in found, found
    rng = np.random.default_rng(0)
    for i, size in enumerate(SIZES):
        w = rng.random(size).astype(np.float32)
        for _ in range(3):
            h = np.tanh(np.exp(w))
            w = h * w + h
        np.testing.assert_allclose(found["outputs"][f"w{i}"], w, rtol=1e-5)


@on_fake_device
@pytest.mark.parametrize(("live", "late"), few(LATE, LATE[2:3], several=True))
def test_numbers_of_state_on_the_host_are_those_on_a_device(late, live, tmp_path):
    onnx.save(state_on_host(live), tmp_path / "step.onnx")
    job = {"path": str(tmp_path / "step.onnx"), "limits": [0], "numbers": True}
    (found,) = here.ask("tests.support.fake_cuda.session", job, late=late)
    assert "outputs" in found, found
    rng = np.random.default_rng(0)
    drawn = {f"{letter}{i}": rng.random(size).astype(np.float32) for letter in "wm" for i, size in enumerate(SIZES)}
    for i in range(6):
        w, m = drawn[f"w{i}"], drawn[f"m{i}"]
        for _ in range(3):
            m = np.tanh(m) + w
            w = w * m
        np.testing.assert_allclose(found["outputs"][f"w{i}"], w, rtol=1e-5)
        np.testing.assert_allclose(found["outputs"][f"m{i}"], m, rtol=1e-5)


@pytest.mark.slow
@on_fake_device
def test_state_that_is_copied_in_turn_is_in_no_graph(tmp_path):
    onnx.save(state_on_host(0), tmp_path / "step.onnx")
    job = {"path": str(tmp_path / "step.onnx"), "limits": [0], "graph": True}
    (found,) = here.ask("tests.support.fake_cuda.session", job)
    assert found["error"].startswith("cuda_graph: input 'm") and "is read in host memory" in found["error"]


@on_fake_device
@pytest.mark.parametrize("graph", few([False, True], [True]))
def test_a_step_takes_what_is_predicted_and_can_be_captured(moved, graph, tmp_path):
    moved.save(tmp_path / "moved.onnx")
    job = {"path": str(tmp_path / "moved.onnx"), "limits": [0], "graph": graph}
    (found,) = here.ask("tests.support.fake_cuda.session", job)
    predicted = moved.report.loop_after
    assert [step["peak"] for step in found["steps"]] == [predicted.total - prediction.TABLES_BYTES] * 3
    assert [step["replays"] for step in found["steps"]] == [int(graph)] * 3
    assert found["donated"] == 12


def test_what_is_predicted_for_a_file_is_what_its_plan_was_judged_by(moved):
    footprint = moved.report.loop_after
    again = prediction.footprint(laid(moved.model), "t4")
    assert replace(again, in_use={}) == replace(footprint, in_use={})
